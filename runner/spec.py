"""The run spec, `run.yaml`: what to run and what must hold. Written by whoever packs; names no server's own paths."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from runner.documents import AbsolutePath, Document, GitObject, InsidePath, Name, Sha256

EnvName = Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Module = Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]


class ImageRef(Document):
    """The image pin: environment only, code comes from the bundle. `digest` and `config` are the two OCI digests."""

    name: Name
    lock: Sha256
    digest: Sha256
    config: Sha256


class Code(Document):
    """The run's code: an archive in the bundle, its hash, and the git tree id of what it holds."""

    archive: InsidePath
    sha256: Sha256
    tree: GitObject
    commit: GitObject | None = None


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
    """What a server must bring: a folder, or a file of known hash. The run knows it by the path `origin`."""

    origin: AbsolutePath
    kind: Literal["file", "folder"]
    sha256: Sha256 | None = None

    @pydantic.model_validator(mode="after")
    def _files_are_known_by_hash(self) -> Asset:
        if (self.kind == "file") != (self.sha256 is not None):
            raise ValueError("an asset of kind 'file' needs its sha256; one of kind 'folder' has none")
        return self


class Rebase(Document):
    """How a server's data takes the place of the origin's: the assets in `mount` are mounted at their origin."""

    mount: tuple[Name, ...] = ()


class Outputs(Document):
    """Where, below the output folder, the trainer writes what Ferry reads."""

    exposure: InsidePath = "train/exposure"
    events: InsidePath = "train/events.jsonl"
    request: InsidePath = "train/REQUEST_CHECKPOINT_AND_STOP"
    outcome: InsidePath = "train/OUTCOME.json"
    final: InsidePath = "final"


class RunSpec(Document):
    """`run.yaml`. `checkpoint: fresh` says that the run begins here; nothing starts from scratch by accident."""

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
    outputs: Outputs = Outputs()
    logs: InsidePath | None = None

    @pydantic.model_validator(mode="after")
    def _names_fit_together(self) -> RunSpec:
        if self.data.root not in self.assets:
            raise ValueError(f"data.root names the asset '{self.data.root}', which is not among assets")
        if unknown := sorted(set(self.rebase.mount) - self.assets.keys()):
            raise ValueError(f"rebase.mount names {', '.join(unknown)}, not among assets")
        if missing := sorted(self.assets.keys() - set(self.rebase.mount)):
            raise ValueError(f"rebase.mount must name every asset; it lacks {', '.join(missing)}")
        if self.checkpoint != "fresh" and self.checkpoint.update > self.updates:
            raise ValueError(f"checkpoint.update {self.checkpoint.update} is beyond updates {self.updates}")
        return self

    @property
    def from_update(self) -> int:
        """The update that the bundle's state is at; 0 for a fresh run."""
        return 0 if self.checkpoint == "fresh" else self.checkpoint.update
