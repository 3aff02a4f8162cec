"""Every fault, refusal, verdict and exit code that Ferry knows.

Promises: a refusal carries all faults found, each with what, where, expected, found and the fix; the exit codes
are distinct and stable. Standard library only: this module is copied into images, beside `runner/inside`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable


class ExitCode(enum.IntEnum):
    """What a Ferry command, or the start program in a container, ends with (docs/reference/exit-codes.md)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    DIFFERENT = 4
    STOPPED = 10
    FORCED = 11
    KILLED_BY_LINE = 12
    OUT_OF_MEMORY = 13
    LOST = 14
    NO_PROGRESS = 15
    LEASE_HELD = 16


class Verdict(enum.Enum):
    """How a segment ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FORCED = "forced"
    KILLED_BY_LINE = "killed by a line"
    OUT_OF_MEMORY = "out of memory"
    LOST = "lost"
    FAILED = "failed"

    @property
    def exit_code(self) -> ExitCode:
        """The exit code that `ferry resume` ends with for this verdict."""
        return _EXIT_CODE_OF[self]


_EXIT_CODE_OF = {
    Verdict.FINISHED: ExitCode.OK,
    Verdict.STOPPED: ExitCode.STOPPED,
    Verdict.FORCED: ExitCode.FORCED,
    Verdict.KILLED_BY_LINE: ExitCode.KILLED_BY_LINE,
    Verdict.OUT_OF_MEMORY: ExitCode.OUT_OF_MEMORY,
    Verdict.LOST: ExitCode.LOST,
    Verdict.FAILED: ExitCode.FAILED,
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that is wrong: what, where (a path, or a path and a field), expected, found, and how to mend it."""

    what: str
    where: str
    expected: str
    found: str
    fix: str

    def __str__(self) -> str:
        return (
            f"{self.what}: {printable(self.where)}\n"
            f"    expected {printable(self.expected)}\n"
            f"    found    {printable(self.found)}\n"
            f"    fix      {printable(self.fix)}"
        )


@dataclasses.dataclass(frozen=True)
class Note:
    """What is odd and no reason to refuse: what, where, found, and what it may mean."""

    what: str
    where: str
    found: str
    meaning: str

    def __str__(self) -> str:
        return (
            f"{self.what}: {printable(self.where)}\n"
            f"    found    {printable(self.found)}\n"
            f"    meaning  {printable(self.meaning)}"
        )


class Refusal(Exception):
    """Ferry will not go on; nothing was changed. Holds every fault that was found, never only the first.

    Raised with at least one fault; `exit_code` is what the command ends with.
    """

    def __init__(self, *faults: Fault, exit_code: ExitCode = ExitCode.REFUSED) -> None:
        if not faults:
            raise ValueError("a refusal needs at least one fault")
        super().__init__("; ".join(f"{fault.what}: {fault.where}" for fault in faults))
        self.faults = faults
        self.exit_code = exit_code

    def __str__(self) -> str:
        return "\n".join(str(fault) for fault in self.faults)


def refuse_if(faults: Iterable[Fault], exit_code: ExitCode = ExitCode.REFUSED) -> None:
    """Raise one `Refusal` with all `faults`, or return if there are none."""
    found = tuple(faults)
    if found:
        raise Refusal(*found, exit_code=exit_code)


def printable(text: str) -> str:
    """Return `text` with control characters and lone surrogates escaped: no hostile name steers a terminal."""
    return "".join(
        char
        if char.isprintable() or char == "\n"
        else char.encode("unicode_escape", "surrogatepass").decode("ascii")
        for char in text
    )
