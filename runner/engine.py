"""What every engine can do, and what it says of a run's container: a small Protocol, and the types it speaks.

Engines: `docker_engine` (the default) and `venv_engine` (no container; never chosen in silence).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Protocol

from runner.plan import LaunchPlan


class Phase(enum.Enum):
    """Where a container is in its life."""

    ABSENT = "absent"
    RUNNING = "running"
    ENDED = "ended"


@dataclasses.dataclass(frozen=True)
class State:
    """What an engine says of a container. `exit_code` is None unless it has ended; unknown is not success."""

    phase: Phase
    exit_code: int | None = None
    out_of_memory: bool = False


class Engine(Protocol):
    """Starts, follows and ends the one container of a run; `name` is the plan's name throughout."""

    def prepare(self, plan: LaunchPlan) -> None:
        """Make ready whatever `start` needs. Raises `Refusal` if this engine cannot run `plan` here."""

    def start(self, plan: LaunchPlan) -> None:
        """Start the container of `plan`. Raises `Refusal` if one of that name runs already, or it does not start."""

    def follow(self, name: str, on_line: Callable[[str], None]) -> State:
        """Hand every line that the container prints to `on_line` until it has ended; return its last state."""

    def signal(self, name: str, signal: str) -> None:
        """Send `signal` ('SIGTERM', 'SIGKILL') to the container; nothing happens if it has ended."""

    def inspect(self, name: str) -> State:
        """Return the state of the container."""

    def remove(self, name: str) -> None:
        """Forget the ended container, after its state was read; a running one is a `Refusal`."""


class Lines:
    """Turns a stream of chunks into lines, whatever the chunks: no character is split and no line lost or doubled.

    Only LF ends a line (CR frames of a progress bar stay in theirs); a line over `limit_bytes` is cut into pieces, so
    that memory stays flat.
    """

    def __init__(self, on_line: Callable[[str], None], limit_bytes: int = 1 << 20) -> None:
        self._on_line = on_line
        self._limit_bytes = limit_bytes
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        """Take the next chunk and hand on every line that it completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._emit(line)
        while len(self._rest) > self._limit_bytes:
            piece, self._rest = self._rest[: self._limit_bytes], self._rest[self._limit_bytes :]
            self._emit(piece)

    def close(self) -> None:
        """Hand on what is left when the stream has ended."""
        if self._rest:
            self._emit(self._rest)
            self._rest = b""

    def _emit(self, line: bytes) -> None:
        self._on_line(line.decode("utf-8", "backslashreplace"))
