"""The server profile, `server.yaml`: what this server has. Written by its operator, known to no bundle."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from runner.documents import AbsolutePath, Document, Name

Engine = Literal["docker", "venv"]
Number = Annotated[float, Field(allow_inf_nan=False)]
Value = bool | int | Number | str


GpuId = Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z0-9._:-]+$")]


class Gpus(Document):
    """The GPUs that a run may use: by their `ids` on this server, or the first `count` of those there. Never `all`.

    `by` is how containers get them: `cdi` (CDI devices nvidia.com/gpu=ID), or `runtime` (one device request to the NVIDIA
    runtime); never both. In a job of a scheduler they are of its allotment, and `ids` outside of it are refused.
    """

    by: Literal["cdi", "runtime"] = "cdi"
    count: Annotated[int, Field(gt=0, le=1024)] | None = None
    ids: tuple[GpuId, ...] | None = None

    @pydantic.model_validator(mode="after")
    def _one_way_to_say_which(self) -> Gpus:
        if (self.count is None) == (self.ids is None):
            raise ValueError("either 'count' or 'ids': neither would be no GPU, both would be two requests")
        if self.ids is not None and (
            not self.ids or "all" in self.ids or len(set(self.ids)) != len(self.ids)
        ):
            raise ValueError("'ids' names each GPU once; 'all' would take those of other people's runs")
        return self


class ServerProfile(Document):
    """`server.yaml`. Without `gpus` a run sees none; `memory_guard` is the share of this host's RAM a run may take.

    `scratch` is a folder on a fast local disk for what may be lost (caches of compiled kernels); without it they lie in the
    run folder. `values` holds this server's values for fields that a run spec declares as runtime-only (`rebase.rewrite`).
    """

    ferry: Literal[1]
    name: Name
    engine: Engine = "docker"
    venv: AbsolutePath | None = None
    gpus: Gpus | None = None
    memory_guard: Annotated[float, Field(gt=0, le=1)] = 0.9
    shm_bytes: Annotated[int, Field(gt=0)] = 8 << 30
    stop_grace_s: Annotated[int, Field(gt=0)] = 600
    scratch: AbsolutePath | None = None
    assets: dict[Name, AbsolutePath]
    values: dict[Name, Value] = Field(default_factory=dict)

    @pydantic.model_validator(mode="after")
    def _venv_has_a_place(self) -> ServerProfile:
        if self.engine == "venv" and self.venv is None:
            raise ValueError("engine 'venv' needs 'venv': the folder of the locked environment")
        return self
