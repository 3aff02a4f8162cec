"""Reads what ranks print into typed updates: Transformers' dict lines, JSON lines, DeepSpeed's lines, declared patterns.

Promises: the same updates whatever chunks the log came in (`engine.Lines` makes lines of them), whether a progress bar
stands before a line, and whether torchrun's prefix names the rank; nothing is evaluated; a line takes time that grows with
its length; what is not a trainer's line in form gives no number, so that `nan` in prose or in `finance` is nothing. Rules
W1 to W9 of docs/reference/watching.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from runner.patterns import Patterns
from runner.supervision import Reading
from runner.updates import Kind, Number, Printed, Saved, Started, Told, Update, number_of, rounded_number

FRAME_LIMIT_CHARS = 1 << 16
_NUMBERS_LIMIT = 200
_NAME_CHARS = 100
_LARGEST_UPDATE = 1 << 53

_ESCAPE = re.compile(r"\x1b\[[0-9;?]{0,40}[A-Za-z]")
# torchrun --tee, and torch's own lines on stderr.
_RANK = re.compile(r"\[(?:default|rank)([0-9]{1,4})\]:\s?", re.ASCII)
_PAIR = re.compile(
    r"""\s*(?:'([^'\\]*)'|"([^"\\]*)")\s*:\s*"""
    r"""(?:'([^'\\]*)'|"([^"\\]*)"|[A-Za-z_][\w.]{0,40}\(([^()]*)\)|([\[(][^\[\](){}]*[\])])|([^\s,'"{}\[\]()]+))"""
    r"""\s*([,}])"""
)
_STEP = re.compile(
    r"\[Rank (?P<rank>[0-9]{1,4})\] step=(?P<step>[0-9]{1,15}), skipped=(?P<skipped>[0-9]{1,15}), lr=\[(?P<lr>[^\],]{1,60})",
    re.ASCII,
)
_TIMER = re.compile(
    r"global_step=(?P<step>[0-9]{1,15}), RunningAvgSamplesPerSec=.{0,200}MaxMemAllocated=(?P<peak>[0-9.]{1,20})GB",
    re.ASCII,
)
_NAMES = {
    "lr": "learning_rate",
    "step_time": "seconds",
    "step_seconds": "seconds",
    "gradient_norm": "grad_norm",
}
_UPDATE_KEYS = ("update", "global_step", "step")
_NOT_FINITE = frozenset({"nan", "inf", "-inf", "NaN", "Infinity", "-Infinity"})


def printed(line: str, rank: int = 0) -> list[Printed]:
    r"""Return the frames of `line`, which `rank` wrote unless torchrun's prefix names another.

    A CR ends a frame; escapes of a terminal and blanks are taken off; a frame over 65,536 characters is left out.
    """
    frames = []
    for piece in line.split("\r"):
        text = (_ESCAPE.sub("", piece) if "\x1b" in piece else piece).strip()
        if text.startswith("[") and (match := _RANK.match(text)) is not None:
            rank, text = int(match[1]), text[match.end() :].strip()
        if text and len(text) <= FRAME_LIMIT_CHARS:
            frames.append(Printed(rank, text))
    return frames


class LogReader:
    """Reads the frames of one log, of one rank or of all, in the order in which they were written.

    `resumed_at`: the update at which this segment began (0: fresh). `misread` counts, by pattern, the groups whose text
    was no number.
    """

    def __init__(self, reading: Reading, resumed_at: int, last: Mapping[int, int] | None = None) -> None:
        self._every = reading.every
        self._resumed_at = resumed_at
        self._last = dict(last or {})
        self._declared = reading.patterns
        self._patterns = Patterns([declared.pattern for declared in reading.patterns])
        self.misread: dict[str, int] = {}

    @property
    def last(self) -> Mapping[int, int]:
        """The last update of each rank: with it as `last`, another reader goes on where this one ended."""
        return dict(self._last)

    def read(self, frame: Printed) -> tuple[Told, ...]:
        """Return what `frame` says; nothing if it is no line of a trainer."""
        told: list[Told | None] = []
        text = frame.text
        if text.startswith('{"') and text.endswith("}"):
            told.append(self._json(frame.rank, text))
        elif text.startswith("{") and text.endswith("}"):
            told.append(self._dict(frame.rank, text))
        elif text.endswith("}") and "%|" in text and (start := text.find("]{'")) > 0:
            told.append(self._dict(frame.rank, text[start + 1 :]))  # A bar, and no line feed after it.
        if "step=" in text:
            told.append(self._deepspeed(frame.rank, text))
        for number, groups in self._patterns.find(text):
            told.append(self._groups(frame.rank, number, groups))
        return tuple(one for one in told if one is not None)

    def _known(self, rank: int) -> int:
        return self._last.get(rank, self._resumed_at)

    def _update(
        self, rank: int, update: int | None, kind: Kind, numbers: Mapping[str, Number]
    ) -> Update | None:
        """The update, under canonical names; without a number of its own it gets the next one, or the last one known."""
        if not numbers:
            return None
        if update is None:
            known = self._known(rank)
            update = (known // self._every + 1) * self._every if kind == "training" else known
        self._last[rank] = max(update, self._known(rank))
        return Update(rank, update, kind, tuple(sorted(numbers.items())))

    def _dict(self, rank: int, text: str) -> Update | None:
        """A dict as Python prints it. One of Transformers has an epoch or a loss; any other is nobody's."""
        numbers: dict[str, Number] = {}
        at = 1
        while (match := _PAIR.match(text, at)) is not None:
            key = match[1] if match[1] is not None else match[2]
            quoted = match[3] if match[3] is not None else match[4]
            bare = match[5].partition(",")[0] if match[5] is not None else match[7]
            number = rounded_number(quoted) if quoted is not None else _exact(bare)
            if number is not None and _is_name(key) and len(numbers) < _NUMBERS_LIMIT:
                numbers[_NAMES.get(key, key)] = number
            at = match.end()
            if match[8] == "}":
                break
        else:
            return None
        if at != len(text) or not numbers.keys() & {"loss", "epoch"}:
            return None
        return self._update(rank, _taken_update(numbers), _kind(numbers), numbers)

    def _json(self, rank: int, text: str) -> Told | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return self._dict(rank, text)
        if not isinstance(value, dict):
            return None
        return self._event(rank, text, value)

    def _event(self, rank: int, text: str, value: Mapping[str, Any]) -> Told | None:
        """An event of the kit, or a JSON object that another trainer prints."""
        update = next((value[key] for key in _UPDATE_KEYS if _is_update(value.get(key))), None)
        match value.get("event"):
            case "start" if _is_update(value.get("resumed_at")):
                return Started(rank, value["resumed_at"])
            case "save" if update is not None and isinstance(value.get("checkpoint"), str):
                return Saved(rank, update, value["checkpoint"])
            case ("update" | "evaluation") as event if update is not None:
                kind: Kind = "training" if event == "update" else "evaluation"
                return self._update(rank, update, kind, _json_numbers(value))
            case None if update is not None:
                numbers = _json_numbers(value)
                return self._update(rank, update, _kind(numbers), numbers)
            case None:
                return self._dict(rank, text)
        return None

    def _deepspeed(self, rank: int, text: str) -> Update | None:
        """Its step line shows the rate of the NEXT update; its timer's line the peak of allocated memory, in GiB."""
        if (match := _STEP.search(text)) is not None:
            rate, skipped = number_of(match["lr"].strip()), number_of(match["skipped"])
            found = {"next_learning_rate": rate, "skipped_updates": skipped}
            numbers = {name: Number(value) for name, value in found.items() if value is not None}
            return self._update(int(match["rank"]), int(match["step"]), "other", numbers)
        if (match := _TIMER.search(text)) is not None and (peak := number_of(match["peak"])) is not None:
            return self._update(rank, int(match["step"]), "other", {"gpu_gib": Number(peak)})
        return None

    def _groups(self, rank: int, number: int, groups: Mapping[str, str]) -> Update | None:
        declared = self._declared[number]
        values: dict[str, float] = {}
        for name, text in groups.items():
            value = number_of(text.strip())
            counts = name in {"update", "rank"}
            if value is None or (counts and not _is_count(value)):
                self.misread[declared.name] = self.misread.get(declared.name, 0) + 1
                if counts:
                    return None  # Numbers without their place would count for another one.
            else:
                values[name] = value
        rank = int(values.pop("rank", rank))
        update = values.pop("update", None)
        numbers = {name: Number(value * declared.scale.get(name, 1.0)) for name, value in values.items()}
        return self._update(rank, None if update is None else int(update), declared.kind, numbers)


def _exact(text: str | None) -> Number | None:
    value = None if text is None else number_of(text.strip())
    return None if value is None else Number(value)


def _is_name(key: str) -> bool:
    return 0 < len(key) <= _NAME_CHARS and key.isprintable()


def _is_update(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_UPDATE


def _is_count(value: float) -> bool:
    return value.is_integer() and 0 <= value < _LARGEST_UPDATE


def _kind(numbers: Mapping[str, Number]) -> Kind:
    if "loss" in numbers:
        return "training"
    return "evaluation" if any(name.startswith("eval_") for name in numbers) else "other"


def _taken_update(numbers: dict[str, Number]) -> int | None:
    """The update that a dict line itself names, which is then no longer one of its numbers."""
    for key in _UPDATE_KEYS:
        if key in numbers and _is_count(numbers[key].value):
            return int(numbers.pop(key).value)
    return None


def _json_numbers(value: Mapping[str, Any]) -> dict[str, Number]:
    numbers: dict[str, Number] = {}
    for key, found in value.items():
        if key in _UPDATE_KEYS or key == "of" or not _is_name(key) or len(numbers) >= _NUMBERS_LIMIT:
            continue
        if isinstance(found, str) and found in _NOT_FINITE:  # JSON has no NaN: the kit writes its name.
            numbers[_NAMES.get(key, key)] = Number(float(found))
        elif isinstance(found, int | float) and not isinstance(found, bool):
            try:
                numbers[_NAMES.get(key, key)] = Number(float(found))
            except OverflowError:
                continue
    return numbers
