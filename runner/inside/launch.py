"""What the launch plan tells the start program: one JSON document, written on the host, read inside.

Promises: every field is there and of its type, or the start is refused; paths are those that the start program sees.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from runner.errors import Fault, Refusal


@dataclasses.dataclass(frozen=True)
class Launch:
    """Everything that the start program must know, and what it must find. Digests are 'sha256:...' but for `code_tree`.

    `segments_before` counts the segments in the bundle's lineage; `checkpoint` is the bundle's checkpoint folder name,
    or 'fresh'; `inventory` and `contract` are its hashes on this server, or 'fresh'; `checkpoint_lies` says whether its
    bytes are checked as part of the bundle ('in the bundle') or on their own ('in the run folder').
    """

    run: str
    server: str
    engine: str
    segments_before: int
    image: str
    lock: str
    lock_file: str
    site_packages: str
    code: str
    code_tree: str
    code_archive: str
    bundle: str
    bundle_root: str
    verified: str
    output: str
    segments: str
    lease: str
    seal: str
    request: str
    outcome: str
    world: int
    updates: int
    checkpoint: str
    inventory: str
    contract: str
    checkpoint_lies: str
    torchrun: list[str]
    args: list[str]
    resume_args: list[str]

    def to_json(self) -> bytes:
        """Return the document, in one form."""
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True).encode() + b"\n"


def read(path: Path) -> Launch:
    """Return the launch at `path`. Raises `Refusal` naming every field that is missing, unknown or of another type."""
    fix = "prepare the run again: `ferry prepare` writes this file"
    try:
        value: Any = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Refusal(Fault("no launch", str(path), "a JSON object", str(error), fix)) from error
    fields = {field.name: field.type for field in dataclasses.fields(Launch)}
    kinds = {"str": str, "int": int, "list[str]": list}
    if not isinstance(value, dict):
        raise Refusal(Fault("no launch", str(path), "a JSON object", type(value).__name__, fix))
    faults = [
        Fault("launch damaged", f"{path}: {name}", str(kind), repr(value.get(name, "nothing")), fix)
        for name, kind in fields.items()
        if type(value.get(name)) is not kinds[str(kind)]
    ]
    faults += [
        Fault(
            "launch damaged",
            f"{path}: {name}",
            "a known field",
            name,
            "image and runner differ in age: build the image again",
        )
        for name in sorted(value.keys() - fields.keys())
    ]
    if faults:
        raise Refusal(*faults)
    return Launch(**value)
