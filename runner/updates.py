"""What a run says of itself, typed: a printed line, the numbers of an update, a save, a start.

Promises: frozen; a number is a float that was written as one (NaN and the infinities are kept), and knows how exactly it
was written. Nothing here reads a log: `log_reader` does.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal

Kind = Literal["training", "evaluation", "other"]

# Newer versions of Transformers print floats with four digits and drop the zeros at their end.
_PRINTED_DIGITS = 4
_NUMBER = re.compile(
    r"[-+]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][-+]?[0-9]{1,4})?|[-+]?(?:nan|inf|infinity)",
    re.ASCII | re.IGNORECASE,
)
_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3}){1,12}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Number:
    """A number, and half a unit of the last digit that was shown of it (0: it was written in full)."""

    value: float
    half_unit: float = 0.0


@dataclasses.dataclass(frozen=True)
class Printed:
    """What one rank printed in one line or one frame of a progress bar, without blanks at its ends."""

    rank: int
    text: str


@dataclasses.dataclass(frozen=True)
class Update:
    """The numbers that one rank logged at an update, by name and sorted; `learning_rate`, `seconds`, `gpu_gib`, ...

    `training` numbers are of the update itself, `evaluation` of an evaluation after it, `other` of anything else.
    """

    rank: int
    update: int
    kind: Kind
    numbers: tuple[tuple[str, Number], ...]

    def number(self, name: str) -> Number | None:
        """Return the number called `name`, or None."""
        return next((number for known, number in self.numbers if known == name), None)

    def value(self, name: str) -> float | None:
        """Return the value called `name`, or None."""
        number = self.number(name)
        return None if number is None else number.value

    @property
    def epoch(self) -> float | None:
        """How many times the data was gone through, with its fraction."""
        return self.value("epoch")

    @property
    def loss(self) -> float | None:
        """The training loss."""
        return self.value("loss")

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of the first group, as the trainer logs it."""
        return self.value("learning_rate")

    @property
    def grad_norm(self) -> float | None:
        """The gradient norm before clipping."""
        return self.value("grad_norm")

    @property
    def seconds(self) -> float | None:
        """What the update took."""
        return self.value("seconds")

    @property
    def gpu_gib(self) -> float | None:
        """The peak of GPU memory since the process began, in GiB, as the trainer knows it."""
        return self.value("gpu_gib")

    @property
    def host_gib(self) -> float | None:
        """Host memory, in GiB, as the trainer knows it."""
        return self.value("host_gib")


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint was written at `update`, the trainer says."""

    rank: int
    update: int
    checkpoint: str


@dataclasses.dataclass(frozen=True)
class Started:
    """The trainer began, having resumed at `resumed_at` (0: fresh)."""

    rank: int
    resumed_at: int


Told = Update | Saved | Started


def number_of(text: str) -> float | None:
    """Return the number that `text` is, or None: digits as Python or C print them, `878` and `18,636,749`, nan and inf."""
    if _NUMBER.fullmatch(text) is not None:
        return float(text)
    if _THOUSANDS.fullmatch(text) is not None:
        return float(text.replace(",", ""))
    return None


def rounded_number(text: str) -> Number | None:
    """Return the number that `text` is, which was rounded to four significant digits or to more, if more are shown."""
    value = number_of(text)
    if value is None:
        return None
    if value == 0 or not math.isfinite(value):
        return Number(value)
    digits = re.sub(r"[^0-9]", "", re.split("[eE]", text)[0]).lstrip("0")
    last = math.floor(math.log10(abs(value))) + 1 - max(_PRINTED_DIGITS, len(digits))
    return Number(value, 0.5 * 10.0**last)
