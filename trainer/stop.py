"""How a run is asked to stop: a request file, or a signal. Nothing here talks to other ranks.

Promise: the file is read, never written; a half-written (still empty) file is given one more update before it
is taken as a request; a second line that is not understood stops the run now rather than never. Standard
library only.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
REQUEST_NAME = "REQUEST_CHECKPOINT_AND_STOP"
_AT_UPDATE = re.compile(r"at_update:\s*([0-9]{1,18})\s*", re.ASCII)


@dataclass(frozen=True)
class StopRequest:
    """Who asks (the first line, any text), and from which update on it holds (0 = at once)."""

    job: str
    at_update: int


def parse_request(content: bytes) -> StopRequest:
    """Read a request. Never refuses: whatever stands in the file, somebody wants the run to stop."""
    lines = content.decode("utf-8", errors="replace").split("\n")
    second = _AT_UPDATE.fullmatch(lines[1]) if len(lines) > 1 else None
    return StopRequest(lines[0].strip(), int(second.group(1)) if second else 0)


class RequestFile:
    """The request file of one run, looked at by one process at every update boundary."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._was_empty = False

    def due(self, update: int) -> StopRequest | None:
        """The request that holds at this update, or None."""
        try:
            content = self.path.read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            self._was_empty = False
            return None
        if not content.strip() and not self._was_empty:
            self._was_empty = True
            return None
        request = parse_request(content)
        return request if update >= request.at_update else None

    def answer(self) -> None:
        """Remove the request once its outcome is on disk."""
        self.path.unlink(missing_ok=True)


class StopSignals:
    """SIGTERM and SIGUSR1 as stop requests:
    the handler only notes the signal, the next update boundary acts on it.
    """

    def __init__(self) -> None:
        self._received: str | None = None

    def install(self) -> None:
        """Replace the process's handlers of both signals. Main thread only."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._received = signal.Signals(number).name

    @property
    def received(self) -> str | None:
        """Name of the last such signal, e.g. "SIGTERM", or None."""
        return self._received


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes forked inside never get a stop signal; one that comes meanwhile reaches this process
    afterwards.

    torchrun signals a rank's whole process group. A loader process that dies of it makes the rank fail in the
    middle of an update ("DataLoader worker is killed by signal: Terminated") instead of saving.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
