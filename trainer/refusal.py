"""The one error by which the trainer says no.

Promise: a refusal names what, where, expected, found and the fix, and is raised before anything is trained.
It prints nothing itself and knows no exit code; `trainer.train` turns it into text.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """One field that is not what it must be. `where` is a JSON pointer, a file name or `file line N`."""

    where: str
    expected: str
    found: str

    def line(self) -> str:
        return f"  {self.where}: expected {self.expected}, found {self.found}"


class Refused(Exception):
    """The process ends with a refusal; the text is what the operator reads."""


class Refusal(Refused):
    """The trainer will not go on. All differences known at this point are listed together."""

    def __init__(self, what: str, differences: list[Difference], fix: str) -> None:
        self.what = what
        self.differences = tuple(differences)
        self.fix = fix
        super().__init__("\n".join([f"REFUSED: {what}", *(d.line() for d in differences), f"  fix: {fix}"]))


class AgreedRefusal(Refused):
    """A refusal of some rank, raised on all of them with the same text."""


def refuse(what: str, where: str, expected: str, found: str, fix: str) -> Refusal:
    """Make a refusal of a single difference, to be raised."""
    return Refusal(what, [Difference(where, expected, found)], fix)
