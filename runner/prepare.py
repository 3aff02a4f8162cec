"""From a verified bundle and a server profile to a run folder that either door can start.

Promises: everything is checked before the first byte is written; the folder appears whole, under its name, or not at
all; no byte of the bundle's checkpoint is copied.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
from collections.abc import Mapping

from runner import archive, compose
from runner.errors import Fault, Refusal
from runner.inside.digests import Hashed, to_memory
from runner.plan import LaunchPlan
from runner.rebase import RebasedInputs
from runner.record import sync_folder, to_json, write_file
from runner.run import RunFolder


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A run folder that is ready to start, and the plan that it will start with."""

    folder: RunFolder
    plan: LaunchPlan


def refuse_if_taken(folder: RunFolder) -> None:
    """Raise `Refusal` if something lies where the run folder would appear."""
    if folder.path.exists() or folder.path.is_symlink():
        fix = "resume it with `ferry resume`, or prepare under another path"
        raise Refusal(
            Fault("run folder exists", str(folder.path), "a path that is free", "an entry of that name", fix)
        )


def prepare(inputs: RebasedInputs, plan: LaunchPlan, folder: RunFolder, server_bytes: bytes) -> Prepared:
    """Write the run folder of `plan` and return it. Raises `Refusal` or OSError, and then leaves nothing behind."""
    refuse_if_taken(folder)
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    aside = RunFolder(folder.path.with_name(f".{folder.path.name}.preparing-{secrets.token_hex(4)}"))
    try:
        _write(inputs, aside, server_bytes)
        write_control(inputs.bundle.digests, inputs.bundle.hashed, plan, aside)
        sync_folder(aside.path)
        aside.path.rename(folder.path)
    except BaseException:
        shutil.rmtree(aside.path, ignore_errors=True)
        raise
    sync_folder(folder.path.parent)
    return Prepared(folder, plan)


def write_control(
    digests: Mapping[str, str], hashed: Mapping[str, Hashed], plan: LaunchPlan, folder: RunFolder
) -> None:
    """Write what the start program reads, and the compose file; content that is there already is left alone."""
    verified = (
        json.dumps({"digests": dict(digests), "memory": to_memory(hashed)}, sort_keys=True).encode() + b"\n"
    )
    documents = (
        (folder.launch_file, plan.launch.to_json()),
        (folder.verified_file, verified),
        (folder.compose_file, compose.render(plan)),
    )
    for path, content in documents:
        if not path.exists() or path.read_bytes() != content:
            write_file(path, content)


def _write(inputs: RebasedInputs, folder: RunFolder, server_bytes: bytes) -> None:
    bundle = inputs.bundle
    for path in (folder.control, folder.segments, folder.output):
        path.mkdir(parents=True)
    archive.unpack(bundle.code, folder.code)
    folder.lease.touch(mode=0o644)
    lineage_file = bundle.path / "lineage.jsonl"
    write_file(folder.lineage_file, lineage_file.read_bytes() if "lineage.jsonl" in bundle.digests else b"")
    write_file(folder.spec_file, bundle.spec_bytes)
    write_file(folder.server_file, server_bytes)
    write_file(folder.rebase_record, to_json(inputs.record()))
    if bundle.checkpoint is not None:
        (folder.output / bundle.checkpoint.name).mkdir()
    if bundle.spec.logs is not None:
        shutil.copytree(bundle.path / bundle.spec.logs, folder.output, dirs_exist_ok=True)
    write_file(
        folder.prepared_file, to_json({"ferry": 1, "bundle": {"path": str(bundle.path), "root": bundle.root}})
    )
