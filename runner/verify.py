"""From a bundle to a verified bundle: every byte, the set of files, the checkpoint, the code and the manifest.

Promises: the rules apply in the order of docs/reference/bundle-format.md (list, set, bytes, then meaning); all faults
of a stage are reported together; nothing is written but the memory of what was hashed, outside the bundle. Only
`verify` makes a `VerifiedBundle`. Knows no engine and no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from runner import archive, documents, lineage, manifest, sums
from runner.errors import Fault, Refusal, refuse_if
from runner.inside import census
from runner.inside.digests import Hashed, from_memory, hash_files, sha256_bytes, to_memory
from runner.record import cache_folder, write_file
from runner.spec import RunSpec

SPEC_NAME = "run.yaml"
LINEAGE_NAME = "lineage.jsonl"
_FETCH_AGAIN = "fetch this file again from where the bundle was packed"
_PROOF = object()

Progress = Callable[[int], None]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A directory with a well-formed list whose files are all there, and no others. Not yet trusted."""

    path: Path
    digests: Mapping[str, str]
    sizes: Mapping[str, int]
    root: str

    @property
    def size_bytes(self) -> int:
        """The size of all listed files together."""
        return sum(self.sizes.values())


@dataclasses.dataclass(frozen=True)
class VerifiedBundle:
    """A bundle of which every byte, and what the bytes mean, was found right. Only `verify` makes one.

    `root` is the SHA-256 of the list ('sha256:...'): it identifies the whole bundle. `hashed` holds the stamps that
    allow the same bytes to be trusted again without reading them.
    """

    path: Path
    root: str
    spec: RunSpec
    spec_bytes: bytes
    code: archive.Members
    checkpoint: census.Checkpoint | None
    lineage: tuple[lineage.Link, ...]
    digests: Mapping[str, str]
    hashed: Mapping[str, Hashed]
    proof: dataclasses.InitVar[object]

    def __post_init__(self, proof: object) -> None:
        if proof is not _PROOF:
            raise TypeError("a VerifiedBundle is made by verify.verify alone")


def open_bundle(path: Path) -> Bundle:
    """Read the list of the bundle at `path` and compare it with the files that are there.

    Raises `Refusal` with every fault: no list, a bad list (see `sums.parse`), files missing, unexpected or unsafe.
    """
    where = path / sums.LIST_NAME
    try:
        raw = where.read_bytes()
    except OSError as error:
        fix = "give the folder that holds SHA256SUMS; a bundle without one is not complete"
        raise Refusal(
            Fault("not a bundle", str(where), "the list of its files", os.strerror(error.errno or 0), fix)
        ) from error
    digests = sums.parse(raw, str(where))
    faults: list[Fault] = []
    sizes = _walk(path, faults)
    sizes.pop(sums.LIST_NAME, None)
    unsafe = {fault.where for fault in faults}
    for name in digests.keys() - sizes.keys():
        if str(path / name) not in unsafe:
            faults.append(
                Fault("missing", str(path / name), "a file, as listed", "no such file", _FETCH_AGAIN)
            )
    for name in sizes.keys() - digests.keys():
        fix = "move it out of the bundle; a bundle is never written to"
        faults.append(Fault("unexpected", str(path / name), "only listed files", f"{sizes[name]} bytes", fix))
    refuse_if(sorted(faults, key=lambda fault: fault.where))
    return Bundle(path, digests, sizes, "sha256:" + sha256_bytes(raw))


def verify(
    bundle: Bundle,
    *,
    use_memory: bool = False,
    on_bytes: Progress | None = None,
    spec_bytes: bytes | None = None,
) -> VerifiedBundle:
    """Hash every file of `bundle`, then check what the files mean, and return the verified bundle.

    `spec_bytes` is the run spec of a bundle from elsewhere, which has none inside; such a bundle needs no lineage either.
    With `use_memory`, a file whose stamp is what it was when its digest was last found right is not read again.
    Raises `Refusal` with every mismatch; when all bytes are right, with every fault of spec, code, manifest,
    checkpoint and lineage together.
    """
    remembered = _recall(bundle) if use_memory else {}
    hashed = hash_files(bundle.path, bundle.digests, remembered=remembered, on_bytes=on_bytes)
    faults = []
    right: dict[str, Hashed] = {}
    for name, found in hashed.items():
        where, wanted = str(bundle.path / name), bundle.digests[name]
        if isinstance(found, OSError):
            faults.append(Fault("cannot be read", where, f"sha256 {wanted}", str(found), _FETCH_AGAIN))
        elif found.sha256 != wanted:
            faults.append(
                Fault("mismatch", where, f"sha256 {wanted}", f"sha256 {found.sha256}", _FETCH_AGAIN)
            )
        else:
            right[name] = found
    _remember(bundle, right)
    refuse_if(faults)
    return _meaning(bundle, right, spec_bytes)


def _meaning(bundle: Bundle, hashed: Mapping[str, Hashed], given: bytes | None) -> VerifiedBundle:
    if given is not None and SPEC_NAME in bundle.digests:
        fix = "leave --spec out: a bundle with a run spec is described by that one alone"
        raise Refusal(
            Fault("two run specs", str(bundle.path / SPEC_NAME), "one", "one inside, one given", fix)
        )
    if given is None and SPEC_NAME not in bundle.digests:
        fix = "for a bundle from elsewhere, draft one with `ferry describe` and give it with --spec; else pack it again"
        raise Refusal(Fault("no run spec", str(bundle.path / SPEC_NAME), "run.yaml", "no such file", fix))
    spec_bytes = _read(bundle, SPEC_NAME) if given is None else given
    spec = documents.parse(RunSpec, spec_bytes, str(bundle.path / SPEC_NAME))
    faults: list[Fault] = []
    code = _gather(faults, lambda: _code(bundle, spec)) or {}
    checkpoint = _gather(faults, lambda: _checkpoint(bundle, spec))
    links = _gather(faults, lambda: _lineage(bundle, spec, needed=given is None)) or ()
    _gather(faults, lambda: _manifest(bundle, spec))
    refuse_if(faults)
    return VerifiedBundle(
        bundle.path,
        bundle.root,
        spec,
        spec_bytes,
        code,
        checkpoint,
        links,
        bundle.digests,
        hashed,
        proof=_PROOF,
    )


def _gather(faults: list[Fault], step: Callable[[], T]) -> T | None:
    try:
        return step()
    except Refusal as refusal:
        faults.extend(refusal.faults)
        return None


def _code(bundle: Bundle, spec: RunSpec) -> archive.Members:
    where = _listed(bundle, spec.code.archive, "code.archive", spec.code.sha256)
    members = archive.read(where)
    tree = archive.tree_of(members)
    if tree != spec.code.tree:
        raise Refusal(
            Fault(
                "code tree differs",
                str(where),
                f"tree {spec.code.tree}",
                f"tree {tree}",
                "pack the run again",
            )
        )
    return members


def _manifest(bundle: Bundle, spec: RunSpec) -> None:
    data = spec.data
    where = _listed(bundle, data.manifest, "data.manifest", data.sha256)
    facts = manifest.read_facts(where, data.path_columns, spec.assets[data.root].origin)
    faults = []
    if facts.sha256 != data.sha256:
        faults.append(
            Fault("mismatch", str(where), data.sha256, facts.sha256, "it changes while it is read: stop that")
        )
    if facts.rows != data.rows:
        faults.append(Fault("rows differ", str(where), str(data.rows), str(facts.rows), "pack the run again"))
    if facts.fingerprint != data.fingerprint:
        fix = "the episodes, their order or their targets changed: take the manifest of the run"
        faults.append(Fault("fingerprint differs", str(where), data.fingerprint, facts.fingerprint, fix))
    refuse_if(faults)


def _checkpoint(bundle: Bundle, spec: RunSpec) -> census.Checkpoint | None:
    if spec.checkpoint == "fresh":
        return None
    checkpoint = census.take_census(bundle.path / spec.checkpoint.path, spec.world.ranks)
    where = str(bundle.path / spec.checkpoint.path)
    faults = []
    if checkpoint.update != spec.checkpoint.update:
        faults.append(
            Fault(
                "update differs",
                where,
                str(spec.checkpoint.update),
                str(checkpoint.update),
                "pack the run again",
            )
        )
    if checkpoint.updates != spec.updates:
        fix = "a new total is a continuation, not a move: declare it"
        faults.append(
            Fault("total of updates differs", where, f"{spec.updates}", f"{checkpoint.updates}", fix)
        )
    for name, entry in checkpoint.files.items():
        listed = bundle.digests[f"{spec.checkpoint.path}/{name}"]
        if listed != entry.sha256:
            fix = "the checkpoint was changed before it was packed: pack it again from where it was made"
            faults.append(
                Fault(
                    "inventory and list differ",
                    f"{where}/{name}",
                    f"sha256 {entry.sha256}",
                    f"sha256 {listed}",
                    fix,
                )
            )
    refuse_if(faults)
    return checkpoint


def _lineage(bundle: Bundle, spec: RunSpec, *, needed: bool) -> tuple[lineage.Link, ...]:
    if LINEAGE_NAME not in bundle.digests:
        if spec.checkpoint == "fresh" or not needed:
            return ()
        where = str(bundle.path / LINEAGE_NAME)
        raise Refusal(
            Fault("no lineage", where, "who trained which updates", "no such file", "pack the run again")
        )
    return lineage.parse(_read(bundle, LINEAGE_NAME), str(bundle.path / LINEAGE_NAME))


def _read(bundle: Bundle, name: str) -> bytes:
    """Return the bytes of a small file, which must be those that were hashed: what is used is what was verified."""
    raw = (bundle.path / name).read_bytes()
    if sha256_bytes(raw) != bundle.digests[name]:
        where, fix = str(bundle.path / name), "it changes while it is read: stop that, then verify again"
        raise Refusal(
            Fault("mismatch", where, f"sha256 {bundle.digests[name]}", f"sha256 {sha256_bytes(raw)}", fix)
        )
    return raw


def _listed(bundle: Bundle, name: str, field: str, sha256: str) -> Path:
    where = str(bundle.path / SPEC_NAME) + f": {field}"
    if name not in bundle.digests:
        raise Refusal(
            Fault("named but not there", where, f"a listed file {name}", "none", "pack the run again")
        )
    if "sha256:" + bundle.digests[name] != sha256:
        found = "sha256:" + bundle.digests[name]
        raise Refusal(Fault("spec and list differ", f"{where} ({name})", sha256, found, "pack the run again"))
    return bundle.path / name


def _walk(root: Path, faults: list[Fault]) -> dict[str, int]:
    """Relative path -> size of every regular file below `root`; links, devices and unreadable folders are faults."""
    sizes: dict[str, int] = {}
    pending = [("", root)]
    while pending:
        prefix, folder = pending.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            faults.append(
                Fault("cannot be read", str(folder), "a readable folder", str(error), "mend its permissions")
            )
            continue
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                pending.append((f"{prefix}{entry.name}/", Path(entry.path)))
            elif stat.S_ISREG(status.st_mode):
                sizes[prefix + entry.name] = status.st_size
            else:
                found = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "a device, socket or pipe"
                faults.append(Fault("unsafe", entry.path, "a regular file or a folder", found, _FETCH_AGAIN))
    return sizes


def _memory_path(bundle: Bundle) -> Path:
    return cache_folder() / "verified" / f"{sha256_bytes(os.fsencode(bundle.path.resolve()))}.json"


def _recall(bundle: Bundle) -> dict[str, Hashed]:
    try:
        return from_memory(json.loads(_memory_path(bundle).read_bytes()))
    except (OSError, ValueError):
        return {}


def _remember(bundle: Bundle, hashed: Mapping[str, Hashed]) -> None:
    memory = json.dumps(to_memory(hashed)).encode()
    try:
        write_file(_memory_path(bundle), memory)
    except OSError:
        return  # A cache that cannot be written costs time later and nothing else.
