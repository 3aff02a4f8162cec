"""From a bundle to a verified bundle: every byte, the set of files, the checkpoint, the code and the manifest.

Promises: the rules apply in the order of docs/reference/bundle-format.md (list, set, sizes, bytes, then meaning); all
faults of a stage are reported together; nothing is written but the memory of what was hashed, outside the bundle; a
verification that was interrupted goes on where it was. Only `verify` makes a `VerifiedBundle`. Knows no engine and no
torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from runner import documents, meaning
from runner.archive import Members
from runner.bundle import FETCH_AGAIN, Bundle, open_bundle, read_listed
from runner.errors import Fault, Note, Refusal, refuse_if
from runner.inside import census
from runner.inside.digests import Hashed, from_memory, hash_file, hash_files, sha256_bytes, to_memory
from runner.lineage import Link
from runner.manifest import ManifestFacts
from runner.meaning import LINEAGE_NAME, SPEC_NAME
from runner.record import cache_folder, write_file
from runner.spec import RunSpec

__all__ = ["LINEAGE_NAME", "SPEC_NAME", "Bundle", "VerifiedBundle", "open_bundle", "verify"]

_PROOF = object()
_SAVE_EVERY_S = 15.0
_FINISHED = ".json"
_UNFINISHED = ".unfinished.json"

Progress = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class VerifiedBundle:
    """A bundle of which every byte, and what the bytes mean, was found right. Only `verify` makes one.

    `root` is the SHA-256 of the list ('sha256:...'): it identifies the whole bundle. `hashed` holds the stamps that
    allow the same bytes to be trusted again without reading them. `notes` are what is odd and no reason to refuse.
    """

    path: Path
    root: str
    spec: RunSpec
    spec_bytes: bytes
    code: Members
    checkpoint: census.Checkpoint | None
    lineage: tuple[Link, ...]
    digests: Mapping[str, str]
    hashed: Mapping[str, Hashed]
    notes: tuple[Note, ...]
    proof: dataclasses.InitVar[object]

    def __post_init__(self, proof: object) -> None:
        if proof is not _PROOF:
            raise TypeError("a VerifiedBundle is made by verify.verify alone")


def verify(
    bundle: Bundle,
    *,
    use_memory: bool = False,
    paranoid: bool = False,
    on_bytes: Progress | None = None,
    spec_bytes: bytes | None = None,
) -> VerifiedBundle:
    """Hash every file of `bundle`, then check what the files mean, and return the verified bundle.

    `spec_bytes` is the run spec of a bundle from elsewhere, which has none inside; such a bundle needs no lineage either.
    A file is not read again if its stamp is what it was when a verification of this very list, that was interrupted,
    found it right; with `use_memory`, also when any verification found it right; with `paranoid`, every file is read.
    Raises `Refusal` with every file whose size is not its inventory's; then with every mismatch; when all bytes are
    right, with every fault of spec, code, manifest, checkpoint, pickles and lineage together.
    """
    refuse_if(_size_faults(bundle))
    memory = {} if paranoid else _recall(bundle, finished=use_memory)
    hashed = _hash(bundle, memory, on_bytes)
    faults = []
    right: dict[str, Hashed] = {}
    for name, found in hashed.items():
        wanted = bundle.digests[name]
        if isinstance(found, OSError):
            where = str(bundle.path / name)
            faults.append(Fault("cannot be read", where, f"sha256 {wanted}", str(found), FETCH_AGAIN))
        elif found.sha256 != wanted:
            where = str(bundle.path / name)
            faults.append(Fault("mismatch", where, f"sha256 {wanted}", f"sha256 {found.sha256}", FETCH_AGAIN))
        else:
            right[name] = found
    _remember(bundle, _FINISHED, to_memory(right))
    with contextlib.suppress(OSError):
        _memory_path(bundle, _UNFINISHED).unlink(missing_ok=True)
    refuse_if(faults)
    return _meaning(bundle, right, spec_bytes, use_memory=use_memory)


def _size_faults(bundle: Bundle) -> list[Fault]:
    """Sizes of an inventory, if its own bytes are right: seconds instead of minutes for a file that was cut off."""
    faults = []
    for name in sorted(bundle.digests):
        folder, _, last = name.rpartition("/")
        if last != census.INVENTORY or not folder:
            continue
        try:
            if hash_file(bundle.path / name).sha256 != bundle.digests[name]:
                continue
            files = json.loads((bundle.path / name).read_bytes())["files"].items()
            sizes = {f"{folder}/{file}": entry["bytes"] for file, entry in files}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue  # Its faults are told by the stages that follow.
        faults += [
            Fault(
                "size differs",
                str(bundle.path / file),
                f"{size} bytes",
                f"{bundle.sizes[file]} bytes",
                FETCH_AGAIN,
            )
            for file, size in sizes.items()
            if file in bundle.sizes and bundle.sizes[file] != size
        ]
    return faults


def _hash(
    bundle: Bundle, memory: Mapping[str, Hashed], on_bytes: Progress | None
) -> dict[str, Hashed | OSError]:
    """Hash all files; what was found right is saved now and then, and when the caller is interrupted."""
    right = {name: entry for name, entry in memory.items() if bundle.digests.get(name) == entry.sha256}
    saved = time.monotonic()

    def save() -> None:
        _remember(bundle, _UNFINISHED, {"root": bundle.root, "files": to_memory(right)})

    def keep(name: str, entry: Hashed) -> None:
        nonlocal saved
        if entry.sha256 == bundle.digests[name]:
            right[name] = entry
        if time.monotonic() - saved > _SAVE_EVERY_S:
            save()
            saved = time.monotonic()

    try:
        return hash_files(
            bundle.path,
            bundle.digests,
            remembered=right,
            sizes=bundle.sizes,
            on_bytes=on_bytes,
            on_hashed=keep,
        )
    except BaseException:
        save()
        raise


def _meaning(
    bundle: Bundle, hashed: Mapping[str, Hashed], given: bytes | None, *, use_memory: bool
) -> VerifiedBundle:
    if given is not None and SPEC_NAME in bundle.digests:
        fix = "leave --spec out: a bundle with a run spec is described by that one alone"
        raise Refusal(
            Fault("two run specs", str(bundle.path / SPEC_NAME), "one", "one inside, one given", fix)
        )
    if given is None and SPEC_NAME not in bundle.digests:
        fix = "for a bundle from elsewhere, draft one with `ferry describe` and give it with --spec; else pack it again"
        raise Refusal(Fault("no run spec", str(bundle.path / SPEC_NAME), "run.yaml", "no such file", fix))
    spec_bytes = read_listed(bundle, SPEC_NAME) if given is None else given
    spec = documents.parse(RunSpec, spec_bytes, str(bundle.path / SPEC_NAME))
    faults: list[Fault] = []
    notes: tuple[Note, ...] = ()
    code = meaning.gather(faults, lambda: meaning.check_code(bundle, spec)) or {}
    before = len(faults)
    meaning.gather(faults, lambda: meaning.check_pickles(bundle, spec))
    checkpoint = meaning.gather(faults, lambda: meaning.check_checkpoint(bundle, spec))
    if checkpoint is not None and len(faults) == before:
        found = checkpoint
        notes = meaning.gather(faults, lambda: meaning.check_consistency(bundle, found, spec)) or ()
    links = meaning.gather(faults, lambda: meaning.check_lineage(bundle, spec, needed=given is None)) or ()
    meaning.gather(faults, lambda: meaning.check_logs(bundle, spec))
    known = _recall_facts(spec) if use_memory else None
    facts = meaning.gather(faults, lambda: meaning.check_manifest(bundle, spec, known))
    refuse_if(faults)
    if facts is not None and facts != known:
        # Found right, like `hashed`: the same bytes have the same facts.
        with contextlib.suppress(OSError):
            write_file(_facts_path(spec), json.dumps(dataclasses.asdict(facts)).encode())
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
        notes,
        proof=_PROOF,
    )


def _memory_path(bundle: Bundle, kind: str) -> Path:
    return cache_folder() / "verified" / f"{sha256_bytes(os.fsencode(bundle.path.resolve()))}{kind}"


def _facts_path(spec: RunSpec) -> Path:
    """Where the facts of the spec's manifest are remembered: by its bytes, and by what else they follow from."""
    data = spec.data
    key = json.dumps([data.sha256, data.path_columns, spec.assets[data.root].origin])
    return cache_folder() / "manifests" / f"{sha256_bytes(key.encode())}.json"


def _recall_facts(spec: RunSpec) -> ManifestFacts | None:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        match json.loads(_facts_path(spec).read_bytes()):
            case {"rows": int(rows), "sha256": spec.data.sha256, "fingerprint": str(fingerprint)}:
                return ManifestFacts(rows, spec.data.sha256, fingerprint)
    return None


def _recall(bundle: Bundle, *, finished: bool) -> dict[str, Hashed]:
    """What an interrupted verification of this list found right; with `finished`, what any verification did."""
    known: dict[str, Hashed] = {}
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if finished:
            known = from_memory(json.loads(_memory_path(bundle, _FINISHED).read_bytes()))
    with contextlib.suppress(OSError, ValueError, RecursionError):
        match json.loads(_memory_path(bundle, _UNFINISHED).read_bytes()):
            case {"root": bundle.root, "files": files}:
                known |= from_memory(files)
    return known


def _remember(bundle: Bundle, kind: str, memory: object) -> None:
    # A cache that cannot be written, or that there is no place for, costs time later and nothing else.
    with contextlib.suppress(OSError):
        write_file(_memory_path(bundle, kind), json.dumps(memory).encode())
