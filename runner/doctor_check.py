"""What a check of `ferry doctor` is, and what is asked of a host.

Promises: every check says what was found and what was expected; one that is not good says the remedy. What nobody asked
for never refuses.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal


class State(enum.Enum):
    """How a check ended, from best to worst; `NOTE` is told and judged by nobody."""

    GOOD = "good"
    NOTE = "note"
    WARNING = "warning"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True)
class Check:
    """One line: what was looked at, how it is, what was found and expected, and what to do about it."""

    check: str
    state: State
    found: str
    expected: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a host shall do. Sizes in bytes; what is None or empty was not asked.

    `profile`: a server profile was given, so only what it needs is judged. `cuda` is the CUDA that the image `image`
    brings. `load_peak_bytes` is what loading the checkpoint takes, by `peak_rule`.
    """

    profile: bool = False
    engine: Literal["docker", "venv"] = "docker"
    gpus: tuple[str, ...] = ()
    memory_guard: float = 0.9
    shm_bytes: int = 8 << 30
    image: str | None = None
    accelerator: Literal["cpu", "cuda"] = "cpu"
    cuda: tuple[int, int] | None = None
    cpu_flags: tuple[str, ...] = ()
    ranks: int | None = None
    gpu_model: str | None = None
    load_peak_bytes: int | None = None
    peak_rule: str = ""
    checkpoint_bytes: int | None = None

    @property
    def needs_gpus(self) -> bool:
        """Whether a run would use GPUs here."""
        return bool(self.gpus) or (not self.profile and self.accelerator == "cuda")

    def of_gpus(self, state: State) -> State:
        """Return what a check of GPUs weighs: as it is if GPUs are needed; else it refuses nothing."""
        if self.needs_gpus:
            return state
        if self.profile:
            return State.NOTE
        return State.WARNING if state is State.REFUSED else state

    def of_engine(self, state: State) -> State:
        """Return what a check of the container engine weighs: nothing where the profile has another engine."""
        return state if self.engine == "docker" else State.NOTE


def size(count: int) -> str:
    """Return `count` bytes for people."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
