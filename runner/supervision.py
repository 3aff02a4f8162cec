"""What a run spec declares for whoever watches a run: gates, first update, kill lines, saves. Form only.

Promises: what cannot hold is refused when the document is read (a gate's pattern with an unknown field, an empty
range, a kill line without a rule). Nothing here watches anything.
"""

from __future__ import annotations

import string
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from runner.documents import Document, Name
from runner.patterns import PatternText, groups_of

Update = Annotated[int, Field(gt=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
_GATE_FIELDS = frozenset({"total", "warmup", "update", "world", "contract"})


class LogPattern(Document):
    r"""A pattern (RE2) for lines of a trainer that no reader knows: its named groups are numbers.

    The groups `update` and `rank` say where the numbers belong; without them it is the last update known, and the rank
    that printed the line. A number is multiplied with its factor in `scale`, so that MiB become GiB.
    """

    name: Name
    pattern: PatternText
    kind: Literal["training", "evaluation", "other"] = "other"
    scale: dict[str, Finite] = Field(default_factory=dict)

    @pydantic.model_validator(mode="after")
    def _has_numbers(self) -> LogPattern:
        groups = groups_of(self.pattern) - {"update", "rank"}
        if not groups:
            raise ValueError(
                "a pattern names at least one number: (?P<loss>[-+.0-9e]+), beside update and rank"
            )
        if unknown := sorted(self.scale.keys() - groups):
            raise ValueError(f"scale names {unknown[0]}, which is no group of the pattern")
        return self


class Reading(Document):
    """How the trainer's log is read, beyond the forms that Ferry knows.

    `every`: Transformers' `logging_steps`, since its lines do not say their update.
    """

    every: Update = 1
    patterns: Annotated[tuple[LogPattern, ...], Field(max_length=50)] = ()

    @pydantic.model_validator(mode="after")
    def _names_once(self) -> Reading:
        names = [pattern.name for pattern in self.patterns]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two patterns are called {twice[0]}")
        return self


class Gate(Document):
    """A line that must be printed, by `ranks`, before `before_update`; else the run is ended.

    `{total}`, `{warmup}`, `{update}`, `{world}` and `{contract}` in `line` stand for the run's values; `{{` for a brace.
    """

    name: Name
    line: Annotated[str, Field(min_length=1)]
    ranks: Literal["all"] | tuple[Annotated[int, Field(ge=0)], ...] = "all"
    before_update: Update

    @pydantic.field_validator("line")
    @classmethod
    def _known_fields(cls, line: str) -> str:
        fields = {field for _, field, _, _ in string.Formatter().parse(line) if field is not None}
        if unknown := sorted(fields - _GATE_FIELDS):
            raise ValueError(f"{{{unknown[0]}}} is none of {', '.join(sorted(_GATE_FIELDS))}")
        return line


class FirstUpdate(Document):
    """What the first update after a resume must log. `epoch` is compared to four decimals; `loss` lies in a range."""

    update: Update
    learning_rate: Finite
    epoch: Finite | None = None
    loss: tuple[Finite, Finite] | None = None

    @pydantic.model_validator(mode="after")
    def _range(self) -> FirstUpdate:
        if self.loss is not None and self.loss[0] > self.loss[1]:
            raise ValueError("loss is [lowest, highest]")
        return self


class KillLine(Document):
    """A rule that ends the run: values of `any` that are not finite, or `metric` over a bound.

    It holds from update `after` on, once it was true `sustained` times in a row, looked at each update or at saves.
    """

    name: Name
    any: tuple[str, ...] = ()
    becomes: Literal["not_finite"] | None = None
    metric: str | None = None
    over: Finite | None = None
    after: Annotated[int, Field(ge=0)] = 0
    sustained: Annotated[int, Field(gt=0)] = 1
    judged_at: Literal["update", "save"] = "update"

    @pydantic.model_validator(mode="after")
    def _one_rule(self) -> KillLine:
        finite = bool(self.any) and self.becomes is not None
        bound = self.metric is not None and self.over is not None
        parts = sum(
            (bool(self.any), self.becomes is not None, self.metric is not None, self.over is not None)
        )
        if finite == bound or parts != 2:
            raise ValueError("a kill line is either 'any' with 'becomes', or 'metric' with 'over'")
        return self


class Saves(Document):
    """When the run saves: each `every` updates, and at the updates in `at`."""

    every: Update
    at: tuple[Update, ...] = ()


class Needs(Document):
    """What a host must have to train the run, whatever else it has."""

    host_memory_gib: Annotated[int, Field(gt=0)]
