"""What must be equal between a checkpoint and the process that resumes it, and the comparison itself.

Promise: two documents are compared in every field, and all differences are listed together with their JSON
pointers; an int is not a float and nothing is ignored. Standard library only. What goes into the documents is
decided by the trainer (`resume_contract.json`) and the model (`navigation.json`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.durable import document_bytes
from trainer.refusal import Difference, Refusal, refuse

CONTRACT_NAME = "resume_contract.json"
METADATA_NAME = "navigation.json"
_ABSENT = object()


@dataclass(frozen=True)
class Document:
    """A JSON document that belongs to a checkpoint, with the exact bytes that are written."""

    name: str
    content: bytes

    @classmethod
    def of(cls, name: str, value: dict[str, Any]) -> Document:
        return cls(name, document_bytes(value))

    @property
    def sha256(self) -> str:
        """`sha256:<hex>` of the bytes."""
        return f"sha256:{hashlib.sha256(self.content).hexdigest()}"


def _shown(value: Any) -> str:
    return "nothing" if value is _ABSENT else json.dumps(value, sort_keys=True, ensure_ascii=False)


def differences(then: Any, now: Any, at: str = "") -> Iterator[Difference]:
    """Every leaf in which two decoded JSON values differ, in pointer order (RFC 6901)."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted(then.keys() | now.keys()):
            pointer = f"{at}/{key.replace('~', '~0').replace('/', '~1')}"
            yield from differences(then.get(key, _ABSENT), now.get(key, _ABSENT), pointer)
    elif isinstance(then, list) and isinstance(now, list):
        for index in range(max(len(then), len(now))):
            old = then[index] if index < len(then) else _ABSENT
            new = now[index] if index < len(now) else _ABSENT
            yield from differences(old, new, f"{at}/{index}")
    elif type(then) is not type(now) or then != now:
        yield Difference(at or "/", f"{_shown(then)} (in checkpoint)", f"{_shown(now)} (now)")


def require_equal(checkpoint: Path, documents: list[Document]) -> None:
    """Refuse unless the checkpoint holds each document with the same fields and values.

    Raises:
        Refusal: with all differences of all documents.
    """
    found = []
    if not checkpoint.is_dir():
        fix = "give --resume-from the folder of a complete checkpoint"
        raise refuse("the checkpoint is not there", "--resume-from", f"a folder at {checkpoint}", "none", fix)
    for document in documents:
        try:
            then = json.loads((checkpoint / document.name).read_bytes())
        except (OSError, ValueError):
            found.append(
                Difference(document.name, "a JSON document in the checkpoint", "none that can be read")
            )
            continue
        now = json.loads(document.content)
        found += [
            Difference(f"{document.name}#{d.where}", d.expected, d.found) for d in differences(then, now)
        ]
    if found:
        fix = "resume with the config and environment of the checkpoint, or rebase what may change"
        raise Refusal(f"{checkpoint.name} was made under another contract", found, fix)
