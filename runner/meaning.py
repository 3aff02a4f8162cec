"""What the bytes of a bundle mean: spec against code, manifest, checkpoint, pickles and lineage (rules S1 to S7, C, P).

Promises: begun only when every byte is the list's; nothing of the bundle is imported, unpickled or run; each check
returns what it found right or raises `Refusal` with every fault of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from runner import archive, code_identity, consistency, exposure, manifest, pickles
from runner.bundle import Bundle, read_listed
from runner.errors import Fault, Note, Refusal, refuse_if
from runner.inside import census
from runner.lineage import Link
from runner.lineage import parse as parse_lineage
from runner.spec import RunSpec

SPEC_NAME = "run.yaml"
LINEAGE_NAME = "lineage.jsonl"
T = TypeVar("T")


def gather(faults: list[Fault], step: Callable[[], T]) -> T | None:
    """Return what `step` returns; if it refuses, add its faults to `faults` and return None."""
    try:
        return step()
    except Refusal as refusal:
        faults.extend(refusal.faults)
        return None


def check_code(bundle: Bundle, spec: RunSpec) -> archive.Members:
    """Return the code: archive and tree are those of the spec, and of the commit if a git bundle is there (S2, S7)."""
    where = listed(bundle, spec.code.archive, "code.archive", spec.code.sha256)
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
    if spec.code.bundle is not None:
        refs = bundle.path / spec.code.bundle
        if spec.code.bundle not in bundle.digests:
            missing = f"{bundle.path / SPEC_NAME}: code.bundle"
            fix = "pack the run again"
            raise Refusal(
                Fault("named but not there", missing, f"a listed file {spec.code.bundle}", "none", fix)
            )
        refuse_if(code_identity.faults_of(where, refs, spec.code.commit))
    return members


def check_manifest(
    bundle: Bundle, spec: RunSpec, known: manifest.ManifestFacts | None
) -> manifest.ManifestFacts:
    """Return what identifies the manifest: it has the rows and the fingerprint of the spec (S3, S4).

    `known` are the facts of these very bytes, columns and root, if they were read before.
    """
    data = spec.data
    where = listed(bundle, data.manifest, "data.manifest", data.sha256)
    facts = known or manifest.read_facts(where, data.path_columns, spec.assets[data.root].origin)
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
    return facts


def check_logs(bundle: Bundle, spec: RunSpec) -> None:
    """The folder of the logs, if the spec names one, has files in the bundle (S8)."""
    if spec.logs is not None and not any(name.startswith(f"{spec.logs}/") for name in bundle.digests):
        fix = "name the folder that holds the logs, or leave `logs` out"
        where = f"{bundle.path / SPEC_NAME}: logs"
        raise Refusal(Fault("named but not there", where, f"listed files below {spec.logs}", "none", fix))


def check_checkpoint(bundle: Bundle, spec: RunSpec) -> census.Checkpoint | None:
    """Return the checkpoint of the spec, complete and at its update (S5, C1 to C9); None if the run begins here."""
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


def check_lineage(bundle: Bundle, spec: RunSpec, *, needed: bool) -> tuple[Link, ...]:
    """Return the links of the lineage (S6), which may be absent only from a fresh run or where it is not `needed`."""
    if LINEAGE_NAME not in bundle.digests:
        if spec.checkpoint == "fresh" or not needed:
            return ()
        where = str(bundle.path / LINEAGE_NAME)
        raise Refusal(
            Fault("no lineage", where, "who trained which updates", "no such file", "pack the run again")
        )
    return parse_lineage(read_listed(bundle, LINEAGE_NAME), str(bundle.path / LINEAGE_NAME))


def listed(bundle: Bundle, name: str, field: str, sha256: str) -> Path:
    """Return the path of the file that `field` of the spec names, if the list has it with the digest that the spec says."""
    where = str(bundle.path / SPEC_NAME) + f": {field}"
    if name not in bundle.digests:
        raise Refusal(
            Fault("named but not there", where, f"a listed file {name}", "none", "pack the run again")
        )
    if "sha256:" + bundle.digests[name] != sha256:
        found = "sha256:" + bundle.digests[name]
        raise Refusal(Fault("spec and list differ", f"{where} ({name})", sha256, found, "pack the run again"))
    return bundle.path / name


def check_pickles(bundle: Bundle, spec: RunSpec) -> None:
    """Every pickle of the bundle names safe globals only (rules P1 to P5); in a checkpoint, `.bin` is a pickle too."""
    inside = "" if spec.checkpoint == "fresh" else spec.checkpoint.path + "/"
    faults: list[Fault] = []
    for name in sorted(bundle.digests):
        if name.endswith(pickles.SUFFIXES):
            needed = not name.endswith(".bin") or bool(inside and name.startswith(inside))
            faults += pickles.faults_of(bundle.path / name, must_be_pickle=needed)
    refuse_if(faults)


def check_consistency(bundle: Bundle, checkpoint: census.Checkpoint, spec: RunSpec) -> tuple[Note, ...]:
    """The parts of the checkpoint agree with each other (rules C10 to C13); returns what is odd."""
    found = consistency.compare(checkpoint, spec.data.rows)
    refuse_if(found.faults)
    if spec.logs is None:
        return found.notes
    logs = bundle.path / spec.logs / spec.outputs.exposure
    return (*found.notes, *exposure.notes_of(logs, spec.world.ranks, checkpoint.update))
