"""The run spec, `run.yaml`: what to run and what must hold. Written by whoever packs; names no server's own paths."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from runner import rewrite
from runner.documents import AbsolutePath, Document, GitObject, InsidePath, Name, Sha256, inside_path
from runner.supervision import FirstUpdate, Gate, KillLine, Needs, Reading, Saves

CHECKPOINT_MARK = "{checkpoint}/"
COLUMN_MARK = "[]/"

EnvName = Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Module = Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]


class ImageRef(Document):
    """The image pin: environment only, code comes from the bundle. `digest` and `config` are the two OCI digests."""

    name: Name
    lock: Sha256
    digest: Sha256
    config: Sha256


class Code(Document):
    """The run's code: an archive in the bundle, its hash, and the git tree id of what it holds.

    `bundle` is a git bundle that holds `commit`: then the archive must be `git archive COMMIT`, byte for byte.
    """

    archive: InsidePath
    sha256: Sha256
    tree: GitObject
    commit: GitObject | None = None
    bundle: InsidePath | None = None


class World(Document):
    """How many ranks train. Never changed by a move."""

    ranks: Annotated[int, Field(gt=0, le=4096)]
    gpu: str | None = None


class CheckpointRef(Document):
    """The checkpoint in the bundle that the run continues from."""

    path: InsidePath
    update: Annotated[int, Field(gt=0)]


class Launch(Document):
    """What torchrun starts. `{output}`, `{checkpoint}`, `{bundle}` and `{code}` in arguments become paths.

    `resume_args` are appended when the run continues from a checkpoint, and only then.
    """

    module: Module
    args: tuple[str, ...] = ()
    resume_args: tuple[str, ...] = ()
    env: dict[EnvName, str] = Field(default_factory=dict)


class Data(Document):
    """The training manifest: a jsonl file whose `path_columns` hold paths below the origin of the asset `root`."""

    manifest: InsidePath
    sha256: Sha256
    rows: Annotated[int, Field(gt=0)]
    root: Name
    path_columns: tuple[str, ...]
    fingerprint: Sha256


class Asset(Document):
    """What a server must bring; the run knows it by the path `origin`.

    A `file` is known by its SHA-256. A `folder` is not known: its files are named by the manifest. A `tree` is a source
    tree, known by git's id of it (`tree`) or by `sha256`, the SHA-256 of its sorted list as `sha256sum` prints it. A `hub`
    is a model in a Hugging Face cache: `origin` is its `models--...` folder, `sha256` that of the sorted list of
    `snapshots/<revision>`.
    """

    origin: AbsolutePath
    kind: Literal["file", "folder", "tree", "hub"]
    sha256: Sha256 | None = None
    tree: GitObject | None = None
    revision: Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z0-9._-]+$")] | None = None

    @pydantic.model_validator(mode="after")
    def _known_by_its_kind(self) -> Asset:
        match self.kind:
            case "file" | "folder" if (self.kind == "file") != (self.sha256 is not None):
                raise ValueError("an asset of kind 'file' needs its sha256; one of kind 'folder' has none")
            case "tree" if (self.sha256 is None) == (self.tree is None):
                raise ValueError("an asset of kind 'tree' needs either 'tree' (git's id) or 'sha256'")
            case "hub" if self.sha256 is None or self.revision is None or set(self.revision) == {"."}:
                raise ValueError("an asset of kind 'hub' needs 'revision' and 'sha256'")
        if self.kind != "tree" and self.tree is not None:
            raise ValueError(f"'tree' is for kind 'tree', not for '{self.kind}'")
        if self.kind != "hub" and self.revision is not None:
            raise ValueError(f"'revision' is for kind 'hub', not for '{self.kind}'")
        return self


def _place(text: str) -> str:
    file, mark, pointer = text.partition("#")
    inside_path(file.removeprefix(CHECKPOINT_MARK))
    if not mark:
        raise ValueError("a field is FILE#POINTER (RFC 6901), a manifest's column FILE#[]/COLUMN")
    if pointer.startswith(COLUMN_MARK):
        if not pointer.removeprefix(COLUMN_MARK):
            raise ValueError("a manifest's column is FILE#[]/COLUMN")
    elif rewrite.kind_of(file) is None:
        raise ValueError("fields are rewritten in .json, .yaml and .yml files")
    else:
        rewrite.parse_pointer(pointer)
    return text


Place = Annotated[str, pydantic.AfterValidator(_place)]


class Invariant(Document):
    """A field that must hold `equals` on every server; compared before each launch."""

    at: Place
    equals: bool | int | float | str | None

    @pydantic.model_validator(mode="after")
    def _single_value(self) -> Invariant:
        if COLUMN_MARK in self.at.partition("#")[2]:
            raise ValueError("an invariant is a field of a document, not a manifest's column")
        return self


class Rewrite(Document):
    """Fields that may ever change, at the places `at`, by one of four rules. `{checkpoint}` is the checkpoint's folder.

    `name`: the server profile's value of that name; it must be `runtime_only`, of no effect on what is trained.
    `asset`: a path to that asset, or below it. `output`: a path below the output folder that the origin had.
    `digest_of`: the SHA-256 of another file of the bundle that is rewritten.
    """

    at: Annotated[tuple[Place, ...], Field(min_length=1)]
    name: Name | None = None
    asset: Name | None = None
    output: AbsolutePath | None = None
    digest_of: InsidePath | None = None
    runtime_only: bool = False

    @pydantic.model_validator(mode="after")
    def _one_rule(self) -> Rewrite:
        if sum(rule is not None for rule in (self.name, self.asset, self.output, self.digest_of)) != 1:
            raise ValueError(
                "exactly one of 'name', 'asset', 'output' and 'digest_of' says what the fields become"
            )
        if self.runtime_only != (self.name is not None):
            raise ValueError(
                "'runtime_only: true' stands with 'name' and nowhere else: "
                "a value that changes what is trained is a continuation, not a rebase"
            )
        return self


class Rebase(Document):
    """How a server's data takes the place of the origin's. What is not declared here never changes.

    The assets in `mount` are mounted at their origin; `rewrite` names fields that are rewritten.
    """

    mount: tuple[Name, ...] = ()
    rewrite: tuple[Rewrite, ...] = ()


class Outputs(Document):
    """Where, below the output folder, the trainer writes what Ferry reads."""

    exposure: InsidePath = "train/exposure"
    events: InsidePath = "train/events.jsonl"
    request: InsidePath = "train/REQUEST_CHECKPOINT_AND_STOP"
    outcome: InsidePath = "train/OUTCOME.json"
    final: InsidePath = "final"


class RunSpec(Document):
    """`run.yaml`. `checkpoint: fresh` says that the run begins here; nothing starts from scratch by accident.

    `preflight` is the run's own validation: a command that runs inside the image before a run folder appears.
    """

    ferry: Literal[1]
    name: Name
    image: ImageRef
    code: Code
    world: World
    updates: Annotated[int, Field(gt=0)]
    checkpoint: Literal["fresh"] | CheckpointRef
    launch: Launch
    data: Data
    assets: dict[Name, Asset]
    rebase: Rebase = Rebase()
    preflight: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    invariants: tuple[Invariant, ...] = ()
    needs: Needs | None = None
    reading: Reading = Reading()
    gates: tuple[Gate, ...] = ()
    first_update: FirstUpdate | None = None
    kill: tuple[KillLine, ...] = ()
    saves: Saves | None = None
    outputs: Outputs = Outputs()
    logs: InsidePath | None = None

    @pydantic.model_validator(mode="after")
    def _names_fit_together(self) -> RunSpec:
        if self.data.root not in self.assets:
            raise ValueError(f"data.root names the asset '{self.data.root}', which is not among assets")
        _check_rebase(self)
        if self.checkpoint != "fresh" and self.checkpoint.update > self.updates:
            raise ValueError(f"checkpoint.update {self.checkpoint.update} is beyond updates {self.updates}")
        return self

    @property
    def from_update(self) -> int:
        """The update that the bundle's state is at; 0 for a fresh run."""
        return 0 if self.checkpoint == "fresh" else self.checkpoint.update

    def at_checkpoint(self, checkpoint: CheckpointRef, logs: str | None) -> RunSpec:
        """Return the spec of the same run at `checkpoint`, its logs in the folder `logs` (None: it has none)."""
        old = "" if self.checkpoint == "fresh" else self.checkpoint.path + "/"

        def place(text: str) -> str:
            return CHECKPOINT_MARK + text.removeprefix(old) if old and text.startswith(old) else text

        rules = tuple(
            rule.model_copy(update={"at": tuple(place(at) for at in rule.at)}) for rule in self.rebase.rewrite
        )
        kept = tuple(one.model_copy(update={"at": place(one.at)}) for one in self.invariants)
        return self.model_copy(
            update={
                "checkpoint": checkpoint,
                "logs": logs,
                "rebase": self.rebase.model_copy(update={"rewrite": rules}),
                "invariants": kept,
            }
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The manifest's columns that are rewritten."""
        marked = (place.partition("#")[2] for rule in self.rebase.rewrite for place in rule.at)
        return tuple(
            pointer.removeprefix(COLUMN_MARK) for pointer in marked if pointer.startswith(COLUMN_MARK)
        )

    def file_of(self, place: str) -> str:
        """Return the path in the bundle of the file that `place` names."""
        file = place.partition("#")[0]
        if file.startswith(CHECKPOINT_MARK) and self.checkpoint != "fresh":
            return f"{self.checkpoint.path}/{file.removeprefix(CHECKPOINT_MARK)}"
        return file


def _check_rebase(spec: RunSpec) -> None:
    rebase = spec.rebase
    moved = {rule.asset for rule in rebase.rewrite if rule.asset is not None}
    if unknown := sorted((set(rebase.mount) | moved) - spec.assets.keys()):
        raise ValueError(f"rebase names {', '.join(unknown)}, not among assets")
    if twice := sorted(set(rebase.mount) & moved):
        raise ValueError(f"rebase both mounts and rewrites {', '.join(twice)}: one of the two")
    if missing := sorted(spec.assets.keys() - set(rebase.mount) - moved):
        raise ValueError(f"rebase must mount or rewrite every asset; it lacks {', '.join(missing)}")
    places = [place for rule in rebase.rewrite for place in rule.at]
    if again := sorted({place for place in places if places.count(place) > 1}):
        raise ValueError(f"rebase.rewrite names {', '.join(again)} more than once")
    names = [rule.name for rule in rebase.rewrite if rule.name is not None]
    if again := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"rebase.rewrite has more than one entry for {', '.join(again)}: give all places in one"
        )
    for rule in rebase.rewrite:
        for place in rule.at:
            _check_place(spec, rule, place)
    if spec.data.root in moved and set(spec.columns) != set(spec.data.path_columns):
        wanted = ", ".join(f"{spec.data.manifest}#[]/{column}" for column in spec.data.path_columns)
        raise ValueError(
            f"the manifest's paths lie below '{spec.data.root}', which is rewritten: name {wanted}"
        )


def _check_place(spec: RunSpec, rule: Rewrite, place: str) -> None:
    file, _, pointer = place.partition("#")
    if pointer.startswith(COLUMN_MARK) and (file != spec.data.manifest or rule.asset != spec.data.root):
        raise ValueError(f"{place}: columns are rewritten in data.manifest only, and for the asset data.root")
    if spec.checkpoint == "fresh":
        if file.startswith(CHECKPOINT_MARK):
            return
    elif file.startswith("checkpoint-") and not file.startswith(spec.checkpoint.path + "/"):
        raise ValueError(
            f"{place}: the checkpoint of this bundle is {spec.checkpoint.path}; write {CHECKPOINT_MARK}"
        )
    if spec.file_of(place) in (spec.code.archive, "run.yaml", "lineage.jsonl", "SHA256SUMS") or file.endswith(
        "/RECOVERY_COMPLETE.json"
    ):
        raise ValueError(f"{place}: code, spec, list, lineage and inventory are not a server's to change")
