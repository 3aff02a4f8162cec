"""The server profile, `server.yaml`: what this server has. Written by its operator, known to no bundle."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from runner.documents import AbsolutePath, Document, Name

Engine = Literal["docker", "venv"]
Number = Annotated[float, Field(allow_inf_nan=False)]
Value = bool | int | Number | str


class Gpus(Document):
    """The GPUs that a run may use, by the ids that the server knows them by (CDI device names)."""

    ids: tuple[Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z0-9._:-]+$")], ...]


class ServerProfile(Document):
    """`server.yaml`. Without `gpus` a run sees none; `memory_guard` is the share of this host's RAM a run may take.

    `values` holds this server's values for fields that a run spec declares as runtime-only (`rebase.rewrite`).
    """

    ferry: Literal[1]
    name: Name
    engine: Engine = "docker"
    venv: AbsolutePath | None = None
    gpus: Gpus | None = None
    memory_guard: Annotated[float, Field(gt=0, le=1)] = 0.9
    shm_bytes: Annotated[int, Field(gt=0)] = 8 << 30
    stop_grace_s: Annotated[int, Field(gt=0)] = 600
    assets: dict[Name, AbsolutePath]
    values: dict[Name, Value] = Field(default_factory=dict)

    @pydantic.model_validator(mode="after")
    def _venv_has_a_place(self) -> ServerProfile:
        if self.engine == "venv" and self.venv is None:
            raise ValueError("engine 'venv' needs 'venv': the folder of the locked environment")
        return self
