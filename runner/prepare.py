"""From a verified bundle and a server profile to a run folder that either door can start.

Promises: everything is checked before the first byte is written; the folder appears whole, under its name, or not at
all; the bundle is never written to, and by mount no byte of its checkpoint is copied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from runner import archive, columns, compose, manifest
from runner.aside import going_on, growing
from runner.changes import RewrittenFile
from runner.draft import name_draft
from runner.errors import Fault, Refusal, refuse_if
from runner.inside.digests import Hashed, Stamp, hash_file, to_memory
from runner.lay import lay, settled
from runner.plan import LaunchPlan, account_files
from runner.rebase import RebasedInputs, to_known
from runner.record import sync_folder, to_json, write_file
from runner.run import RunFolder

# A fingerprint parses every row, at about 10 us each.
_FINGERPRINT_ROWS = 200_000


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


def _refuse_if_inside(path: Path, inputs: RebasedInputs) -> None:
    """Raise `Refusal` if the run folder would appear in its own bundle, or in data of this server."""
    for what, place in (
        ("bundle", inputs.bundle.path),
        *((f"asset '{a.name}'", a.host) for a in inputs.assets),
    ):
        if path.resolve().is_relative_to(place.resolve()):
            fix = "choose another --run: a bundle is never written to, and neither is an asset"
            raise Refusal(
                Fault(
                    f"run folder lies in the {what}",
                    str(path),
                    f"a path outside of {place}",
                    "one inside",
                    fix,
                )
            )


def laid_bytes(inputs: RebasedInputs) -> int:
    """Return how many bytes preparing `inputs` will link, clone or copy."""
    if inputs.mode == "mount":
        return 0
    prefix = f"{inputs.checkpoint}/" if inputs.server.engine == "docker" else ""
    names = (name for name in inputs.bundle.digests if name.startswith(prefix))
    return sum((inputs.bundle.path / name).stat().st_size for name in names)


def prepare(
    inputs: RebasedInputs,
    plan: LaunchPlan,
    folder: RunFolder,
    server_bytes: bytes,
    on_bytes: Callable[[int], None] | None = None,
    check: Callable[[RunFolder], object] | None = None,
) -> Prepared:
    """Write the run folder of `plan` and return it. Raises `Refusal` or OSError, and then leaves nothing behind.

    `check` sees the folder before it has its name, and before a byte of the checkpoint was copied.
    """
    refuse_if_taken(folder)
    _refuse_if_inside(folder.path, inputs)
    with growing(folder.path, "preparing") as path:
        aside = RunFolder(path)
        rebased = _rebased(inputs, aside, _write(inputs, aside, server_bytes))
        write_accounts(plan, aside)
        if check is not None:
            check(aside)
        own = _lay(inputs, aside, folder.path, on_bytes)
        write_control(inputs, plan, aside, own, rebased)
        for inner in sorted(entry for entry in path.rglob("*") if entry.is_dir()):
            sync_folder(inner)
        sync_folder(path)
    make_caches(plan)
    return Prepared(folder, plan)


def write_accounts(plan: LaunchPlan, folder: RunFolder) -> None:
    """Write the files that name the run's user inside a container; content that is there already is left alone."""
    for name, content in account_files(plan.user).items():
        _write_if_other(folder.control / name, content)


def make_caches(plan: LaunchPlan) -> None:
    """Make the folder for what is kept between segments, if it is not there: it may lie on a disk that is cleared."""
    plan.caches.mkdir(exist_ok=True)


def write_control(
    inputs: RebasedInputs,
    plan: LaunchPlan,
    folder: RunFolder,
    own: Mapping[str, Hashed] | None = None,
    rebased: Mapping[str, Hashed] | None = None,
) -> None:
    """Write what the start program reads, and the compose file; content that is there already is left alone.

    `own` are the files of the bundle that were laid into the run folder; None keeps what is recorded of them. `rebased` are
    the rewritten files, if they have just been seen to be what they must be; else they are read. Raises
    `Refusal` if a rewritten file is not what it was proved to be.
    """
    hashed = dict(inputs.bundle.hashed) | (_rebased(inputs, folder) if rebased is None else dict(rebased))
    whole = inputs.server.engine == "venv" and inputs.mode != "mount"
    if own is None:
        laid = json.loads(folder.verified_file.read_bytes())["memory" if whole else "checkpoint"]
    else:
        laid = to_memory(settled(own, time.time_ns()))
    memory = to_memory(hashed)
    if whole:
        memory, laid = laid, {}
    content = {"digests": inputs.digests, "memory": memory, "checkpoint": laid}
    documents = (
        (folder.launch_file, plan.launch.to_json()),
        (folder.verified_file, json.dumps(content, sort_keys=True).encode() + b"\n"),
        (folder.compose_file, compose.render(plan)),
        (folder.compose_env, compose.render_env(plan)),
    )
    for path, content_bytes in documents:
        _write_if_other(path, content_bytes)
    write_accounts(plan, folder)


def _write_if_other(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        write_file(path, content)


def _rebased(
    inputs: RebasedInputs, folder: RunFolder, written: Mapping[str, Hashed] | None = None
) -> dict[str, Hashed]:
    """The rewritten files as they lie in the run folder, each seen to be what it must be.

    `written` are those that were hashed as they were written; the others are read.
    """
    faults = []
    found = dict(written or {})
    fix = (
        "the profile or the file was changed after the run was prepared: prepare it again, under another path"
    )
    for file in inputs.files:
        if file.path in found:
            continue
        path = folder.rebased / file.path
        try:
            found[file.path] = hash_file(path)
        except OSError as error:
            faults.append(Fault("cannot be read", str(path), f"sha256 {file.sha256_after}", str(error), fix))
            continue
        if found[file.path].sha256 != file.sha256_after:
            digest = found[file.path].sha256
            faults.append(
                Fault(
                    "rebased file differs", str(path), f"sha256 {file.sha256_after}", f"sha256 {digest}", fix
                )
            )
    refuse_if(faults)
    return found


def _lay(
    inputs: RebasedInputs, folder: RunFolder, final: Path, on_bytes: Callable[[int], None] | None
) -> dict[str, Hashed]:
    """Lay the checkpoint (without containers: the bundle) into the run folder, unless it is mounted.

    Copies grow beside `final`, the name that the run folder will have, so that an interrupted one can be gone on with.
    """
    bundle = inputs.bundle
    if inputs.mode == "mount":
        return {}
    prefix = f"{inputs.checkpoint}/" if inputs.server.engine == "docker" else ""
    if inputs.server.engine == "docker" and bundle.checkpoint is None:
        return {}
    target = (
        folder.output / bundle.checkpoint.name if prefix and bundle.checkpoint else folder.path / "bundle"
    )
    rewritten = {file.path for file in inputs.files}
    names = {
        name.removeprefix(prefix): digest
        for name, digest in bundle.digests.items()
        if name.startswith(prefix)
    }
    known = {
        name.removeprefix(prefix): entry for name, entry in bundle.hashed.items() if name.startswith(prefix)
    }
    plain = {name: digest for name, digest in names.items() if prefix + name not in rewritten}
    source = bundle.path / prefix
    if inputs.mode == "copy":
        with going_on(final, "copying", f"{bundle.root} {prefix}") as place:
            _remove_others(place, plain)
            laid = lay(source, plain, place, "copy", known=known, on_bytes=on_bytes, go_on=True)
            place.rename(target)
    else:
        laid = lay(source, plain, target, inputs.mode, known=known, on_bytes=on_bytes)
    changed = {
        file.path.removeprefix(prefix): file.sha256_after
        for file in inputs.files
        if file.path.startswith(prefix)
    }
    return laid | lay(folder.rebased / prefix, changed, target, "copy", known={})


def _remove_others(place: Path, names: Collection[str]) -> None:
    """Remove what an earlier attempt copied to `place` and this one does not want."""
    for path in sorted(place.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):
                path.rmdir()
        elif path.relative_to(place).as_posix() not in names or path.is_symlink():
            path.unlink()


def _write_rebased(inputs: RebasedInputs, folder: RunFolder) -> dict[str, Hashed]:
    """Write what was rewritten under `rebased`, each small document with its original beside it as `*.orig`.

    Returns the files whose digest was taken as they were written, and which are on the disk.
    """
    written: dict[str, Hashed] = {}
    for file in inputs.files:
        path = folder.rebased / file.path
        if file.content is not None:
            write_file(path, file.content)
            write_file(path.with_name(path.name + ".orig"), (inputs.bundle.path / file.path).read_bytes())
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        assert file.moved is not None
        if file.draft is not None and (status := name_draft(file.draft, path)) is not None:
            if status.st_size == file.size_bytes:
                written[file.path] = Hashed(file.sha256_after, file.size_bytes, Stamp.of(status))
        else:
            with path.open("xb", buffering=0) as out:
                roots = file.moved.before, file.moved.after
                columns.move(inputs.bundle.path / file.path, file.moved.columns, roots, out.write)
                os.fsync(out.fileno())
        _prove_manifest(inputs, file, path)
    return written


def _prove_manifest(inputs: RebasedInputs, file: RewrittenFile, path: Path) -> None:
    """Take the fingerprint of the moved manifest, where that takes seconds; it is the old one by construction."""
    data = inputs.bundle.spec.data
    assert file.moved is not None
    if data.rows > _FINGERPRINT_ROWS:
        return
    facts = manifest.read_facts(path, data.path_columns, file.moved.after)
    if facts.fingerprint != data.fingerprint or facts.sha256 != f"sha256:{file.sha256_after}":
        fix = "report this: a manifest that was moved must keep its fingerprint"
        raise Refusal(Fault("fingerprint differs", str(path), data.fingerprint, facts.fingerprint, fix))


def _write(inputs: RebasedInputs, folder: RunFolder, server_bytes: bytes) -> dict[str, Hashed]:
    """Write all but the checkpoint and the control files; return the rewritten files that need not be read again."""
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
    if bundle.checkpoint is not None and (inputs.mode == "mount" or inputs.server.engine == "docker"):
        (folder.output / bundle.checkpoint.name).mkdir()
    if bundle.spec.logs is not None:
        shutil.copytree(bundle.path / bundle.spec.logs, folder.output, dirs_exist_ok=True)
    written = _write_rebased(inputs, folder)
    prepared = {
        "ferry": 1,
        "bundle": {"path": str(bundle.path), "root": bundle.root},
        "mode": inputs.mode,
        "rebased": to_known(inputs.files),
    }
    write_file(folder.prepared_file, to_json(prepared))
    return written
