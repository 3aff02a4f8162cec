"""From a run folder to a bundle for the next server.

Promises: the bundle holds the newest complete checkpoint, checked byte by byte against its inventory; the same run
gives the same bytes; what was written is read again and verified before it gets its name; the source is sealed before
that, so that there is no moment at which two servers could train the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from runner import archive, lineage, manifest, sums, verify
from runner.aside import growing
from runner.copying import copy_all
from runner.errors import Fault, Refusal, refuse_if
from runner.inside import census
from runner.inside.digests import sha256_bytes
from runner.record import sync_folder, to_json, write_file
from runner.run import RunFolder
from runner.spec import CheckpointRef, RunSpec

LOGS = "run"
_LEFT_BEHIND = ("checkpoint-", ".", "tmp-checkpoint-")


@dataclasses.dataclass(frozen=True)
class Packed:
    """A bundle that was written and verified, at `path`."""

    path: Path
    root: str
    update: int
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Contents:
    """What goes into a bundle: path in it -> file on disk, or content made for it.

    `left_out` names newer checkpoints that are not complete, each with its reason.
    """

    files: dict[str, Path]
    made: dict[str, bytes]
    update: int
    left_out: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """The size of all of it."""
        return sum(path.stat().st_size for path in self.files.values()) + sum(map(len, self.made.values()))


def gather(folder: RunFolder) -> Contents:
    """Return what a bundle of the run in `folder` holds; nothing is written. The caller holds the run's lease.

    Raises `Refusal` if the run has no complete checkpoint, the one that it stopped with is not complete, or the
    checkpoint's bytes are not those of its inventory.
    """
    newest, rejected = folder.checkpoints()
    if newest is None:
        reasons = "; ".join(str(refusal.faults[0].what) for refusal in rejected.values()) or "none was saved"
        fix = "resume the run until it has saved"
        raise Refusal(Fault("no complete checkpoint", str(folder.output), "one to pack", reasons, fix))
    promised = str((folder.outcome() or {}).get("checkpoint"))
    if promised in rejected:
        # The trainer says that it saved this one: an older one in its place would be a guess.
        raise rejected[promised]
    refuse_if(census.hash_faults(newest))
    bundle = verify.open_bundle(folder.bundle_path())
    spec = folder.spec()
    old = "" if spec.checkpoint == "fresh" else spec.checkpoint.path + "/"
    replaced = tuple(part for part in (old, f"{spec.logs}/" if spec.logs else "") if part)
    files = {
        name: bundle.path / name
        for name in bundle.digests
        if not (replaced and name.startswith(replaced))
        and name not in (verify.SPEC_NAME, verify.LINEAGE_NAME)
    }
    files |= {f"{newest.name}/{name}": newest.path / name for name in (*newest.files, census.INVENTORY)}
    logs = _logs(folder)
    files |= {f"{LOGS}/{name}": path for name, path in logs.items()}
    at = CheckpointRef(path=newest.name, update=newest.update)
    packed = spec.at_checkpoint(at, LOGS if logs else None)
    made = {verify.SPEC_NAME: render_spec(packed), verify.LINEAGE_NAME: lineage.render(folder.links())}
    left_out = tuple(f"{name}: {refusal.faults[0].what}" for name, refusal in rejected.items())
    return Contents(files, made, newest.update, left_out)


def pack(folder: RunFolder, target: Path, on_bytes: Callable[[int], None] | None = None) -> Packed:
    """Write the bundle of `folder` at `target`, verify it, seal the run folder, and give the bundle its name.

    Raises `Refusal` as `gather` does, if the run is being trained, if `target` exists or lies inside the run or its
    bundle, or if what was written does not verify; then nothing is left at `target` and the run is not sealed.
    """
    _refuse_if_taken(target, (folder.path, folder.bundle_path()))
    with folder.hold_lease("ferry pack"):
        contents = gather(folder)
        with growing(target, "packing") as aside:
            write_bundle(contents, aside, on_bytes)
            verified = verify.verify(verify.open_bundle(aside))
            _seal(folder, verified.root, contents.update)
    return Packed(target, verified.root, contents.update, contents.size_bytes)


def pack_draft(draft: Path, target: Path) -> Packed:
    """Write a bundle of the folder `draft`, which holds a complete run spec and all that it names, at `target`.

    For a run that begins, or was described from outside. Raises `Refusal` if the result does not verify.
    """
    _refuse_if_taken(target, (draft,))
    names = [path for path in sorted(draft.rglob("*")) if not path.is_dir() or path.is_symlink()]
    contents = Contents({str(path.relative_to(draft)): path for path in names}, {}, 0)
    with growing(target, "packing") as aside:
        write_bundle(contents, aside, None)
        verified = verify.verify(verify.open_bundle(aside))
    return Packed(target, verified.root, verified.spec.from_update, contents.size_bytes)


def write_bundle(contents: Contents, target: Path, on_bytes: Callable[[int], None] | None) -> None:
    """Write `contents` and their list into the empty folder `target`, hashing while copying; everything is fsynced."""
    target.mkdir(exist_ok=True)
    copied = {name: source for name, source in contents.files.items() if name not in contents.made}
    digests = {name: entry.sha256 for name, entry in copy_all(copied, target, on_bytes=on_bytes).items()}
    for name, content in contents.made.items():
        write_file(target / name, content)
        digests[name] = sha256_bytes(content)
    write_file(target / sums.LIST_NAME, sums.render(digests))
    for folder in sorted(path for path in target.rglob("*") if path.is_dir()):
        sync_folder(folder)
    sync_folder(target)


def render_spec(spec: RunSpec) -> bytes:
    """Return `run.yaml` for `spec`: one form for one spec; fields that have their default are left out."""
    value: dict[str, Any] = spec.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump(
        {"ferry": spec.ferry, **value}, sort_keys=False, allow_unicode=True, width=1000
    ).encode()


def describe_code(folders: Mapping[str, Path]) -> tuple[bytes, dict[str, str]]:
    """Return the archive of `folders` (name in it -> folder), and what the spec says of it: sha256 and tree."""
    members = {
        f"{prefix}/{name}": entry
        for prefix, root in folders.items()
        for name, entry in archive.collect(root).items()
    }
    raw = archive.make(members)
    return raw, {"sha256": "sha256:" + sha256_bytes(raw), "tree": archive.tree_of(members)}


def describe_manifest(path: Path, columns: tuple[str, ...], origin: str) -> dict[str, Any]:
    """Return what the run spec says of the manifest at `path`: sha256, rows and fingerprint."""
    return dataclasses.asdict(manifest.read_facts(path, columns, origin))


def _refuse_if_taken(target: Path, beside: Sequence[Path]) -> None:
    if target.exists() or target.is_symlink():
        fix = "a bundle is never written over: choose another name"
        raise Refusal(
            Fault("bundle exists", str(target), "a path that is free", "an entry of that name", fix)
        )
    for folder in beside:
        if target.resolve().is_relative_to(folder.resolve()):
            fix = "choose a place outside of it"
            raise Refusal(
                Fault(
                    "bundle inside another folder",
                    str(target),
                    f"a path outside of {folder}",
                    "one inside",
                    fix,
                )
            )


def _logs(folder: RunFolder) -> dict[str, Path]:
    """Every file of the output folder but checkpoints, requests and unfinished saves."""
    outputs = folder.spec().outputs
    found = {}
    for path in sorted(folder.output.rglob("*")):
        name = path.relative_to(folder.output)
        if (
            (path.is_dir() and not path.is_symlink())
            or name.parts[0].startswith(_LEFT_BEHIND)
            or str(name) == outputs.request
        ):
            continue
        if path.is_symlink() or not path.is_file():
            kind = "a symbolic link" if path.is_symlink() else "a device, socket or pipe"
            fix = "move it out of the output folder"
            raise Refusal(Fault("unsafe", str(path), "regular files and folders", kind, fix))
        found[str(name)] = path
    return found


def _seal(folder: RunFolder, root: str, update: int) -> None:
    seal = folder.seal()
    if seal is not None and seal.get("bundle") != root:
        fix = "the run folder was changed after it was sealed; use the bundle that it was packed as"
        raise Refusal(
            Fault("run folder is sealed", str(folder.seal_file), f"bundle {seal.get('bundle')}", root, fix)
        )
    write_file(folder.seal_file, to_json({"ferry": 1, "bundle": root, "update": update}))
