"""Lines of a trainer become typed updates; prose, chunks and hostile lines do not (rules W1 to W9)."""

from __future__ import annotations

import itertools
import json
import math
import random

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.engine import Lines
from runner.log_reader import FRAME_LIMIT_CHARS, LogReader, printed
from runner.supervision import LogPattern, Reading
from runner.updates import Number, Printed, Saved, Started, Told, Update, number_of, rounded_number

DICT = "{'loss': 0.1234, 'grad_norm': nan, 'learning_rate': 2.531e-06, 'epoch': 0.5454}"
PROSE = (
    "nan",
    "finance: the loss is nan",
    "config {'loss': nan, 'epoch': 1.0}",
    "{'a': nan}",
    "{'loss': nan, 'epoch': 1.0} is what a broken run prints",
    "warning: grad_norm=nan would end the run",
    '{"text": "loss nan"}',
    '{"event": "note", "update": 3, "loss": "nan", "epoch": 1.0}',
    "{'loss': 'not a number'}",
    "{'loss': nan, 'epoch'",
    "{'loss': __import__('os').abort(), 'epoch': 1.0}",
    "{'text': 'a', 'note': 'nan'}",
)


def told(line: str, reader: LogReader | None = None, rank: int = 0) -> list[Told]:
    reader = reader or LogReader(Reading(), resumed_at=2100)
    return [one for frame in printed(line, rank) for one in reader.read(frame)]


def update(line: str, reader: LogReader | None = None) -> Update:
    (one,) = told(line, reader)
    assert isinstance(one, Update)
    return one


def test_a_dict_line_is_the_next_update() -> None:
    """W3: Transformers' line does not say its update: it is the next after the one resumed at; NaN is kept."""
    reader = LogReader(Reading(), resumed_at=2100)
    first = update(DICT, reader)
    assert (first.rank, first.update, first.kind) == (0, 2101, "training")
    assert (first.loss, first.learning_rate, first.epoch) == (0.1234, 2.531e-06, 0.5454)
    assert first.grad_norm is not None
    assert math.isnan(first.grad_norm)
    assert update(DICT, reader).update == 2102
    evaluation = update("{'eval_loss': 0.5, 'eval_runtime': 1.5, 'epoch': 0.55}", reader)
    assert (evaluation.update, evaluation.kind, evaluation.value("eval_loss")) == (2102, "evaluation", 0.5)
    summary = update("{'train_runtime': 3.0, 'train_loss': 0.2, 'epoch': 1.0}", reader)
    assert (summary.update, summary.kind) == (2102, "other")


def test_lines_of_each_tenth_update() -> None:
    """W3: with `every: 10` the lines are of multiples of 10, also when the run resumed between two."""
    reader = LogReader(Reading(every=10), resumed_at=2104)
    assert [update(DICT, reader).update for _ in range(2)] == [2110, 2120]


def test_newer_lines_have_strings_of_four_digits() -> None:
    """W4: a quoted number was rounded, and says by how much; a bare one was written in full."""
    one = update("{'loss': '0.12', 'grad_norm': 'nan', 'learning_rate': '2.53e-06', 'epoch': '1.234'}")
    rate = one.number("learning_rate")
    assert rate is not None
    assert rate.value == 2.53e-06
    assert rate.half_unit == pytest.approx(0.5e-9)
    assert one.number("epoch") == Number(1.234, pytest.approx(0.0005))
    assert update(DICT).number("learning_rate") == Number(2.531e-06)


def test_numbers_in_wrappers() -> None:
    """W3: NumPy's and torch's way to show a number is one; a list is none, and hides nothing beside it."""
    one = update(
        "{'loss': np.float64(nan), 'rates': [1e-6, 2e-6], 'grad_norm': tensor(1.5, device=cpu), 'epoch': 1.0}"
    )
    assert math.isnan(one.loss or 0)
    assert (one.grad_norm, one.value("rates")) == (1.5, None)


def test_the_kits_events() -> None:
    """W5: updates, saves and starts of trainer/events.py; NaN stands there as a string."""
    assert told('{"event": "start", "run": "demo", "resumed_at": 2100, "of": 3852}') == [Started(0, 2100)]
    line = '{"event": "update", "update": 2101, "of": 3852, "loss": "nan", "lr": 2.531e-06, "seconds": 13.5, "epoch": 0.5454}'
    one = update(line)
    assert (one.update, one.kind, one.learning_rate, one.seconds) == (2101, "training", 2.531e-06, 13.5)
    assert math.isnan(one.loss or 0)
    assert one.value("of") is None
    saved = (
        '{"event": "save", "update": 2200, "checkpoint": "checkpoint-2200", "seconds": 3.2, "deleted": []}'
    )
    assert told(saved) == [Saved(0, 2200, "checkpoint-2200")]


def test_json_lines_of_other_trainers() -> None:
    """W5: any object with an update (or step) and numbers; true is no number, and a huge one is left out."""
    one = update('{"step": 7, "loss": NaN, "ok": true, "tokens": ' + "9" * 400 + "}")
    assert (one.update, [name for name, _ in one.numbers]) == (7, ["loss"])
    assert update('{"global_step": 8, "eval_accuracy": 0.5}').kind == "evaluation"
    assert update('{"loss": 0.5, "epoch": 1.0}').update == 2101


def test_deepspeeds_lines() -> None:
    """W6: the rate on its step line is the next update's, so it is not `learning_rate`; its timer knows the peak."""
    step = "[2026-01-01 00:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 3] step=2110, skipped=1, lr=[2.5e-06, 1e-4], mom=[[0.9, 0.95]]"
    one = update(step)
    assert (one.rank, one.update, one.kind, one.learning_rate) == (3, 2110, "other", None)
    assert (one.value("next_learning_rate"), one.value("skipped_updates")) == (2.5e-06, 1.0)
    glued = update(" 55%|#####  | 2109/3852 [1:52:09<20:27:23,  3.33s/it]" + step)
    assert glued == one
    timer = "[timer.py:215:stop] epoch=0/micro_step=34/global_step=2110, RunningAvgSamplesPerSec=7.86, CurrSamplesPerSec=8.0, MemAllocated=59.65GB, MaxMemAllocated=63.31GB"
    assert update(timer).gpu_gib == 63.31


def test_declared_patterns() -> None:
    """W7: named groups are numbers of the update that they name, or of the last one; factors turn MiB into GiB."""
    reading = Reading(
        patterns=(
            LogPattern(
                name="probe", pattern=r"^probe at (?P<update>\d+): (?P<probe>\S+)$", kind="evaluation"
            ),
            LogPattern(
                name="vram",
                pattern=r"peak (?P<gpu_gib>[\d,]+) MiB on rank (?P<rank>\d+)",
                scale={"gpu_gib": 1 / 1024},
            ),
        )
    )
    reader = LogReader(reading, resumed_at=40000)
    one = update("probe at 41600: 8.3", reader)
    assert (one.update, one.kind, one.value("probe")) == (41600, "evaluation", 8.3)
    peak = update("memory: peak 75,254 MiB on rank 2", reader)
    assert (peak.rank, peak.update) == (2, 40000)
    assert peak.gpu_gib == pytest.approx(73.49, abs=0.001)
    assert told("probe at 41700: broken", reader) == []
    assert told("probe at 4x1700: 8.3", reader) == []
    assert reader.misread == {"probe": 1}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"loss \d+", "at least one number"),
        (r"update (?P<update>\d+)", "at least one number"),
        (r"(?P<loss>\d+)(?=x)", "invalid perl operator"),
        (r"(?P<loss>a)\1", "invalid escape"),
        (r"(?P<loss>(a{1000}){1000})", "invalid repetition"),
        ("(?P<loss>x)" + "y" * 1000, "at most 1000 characters"),
    ],
)
def test_patterns_that_are_refused(pattern: str, message: str) -> None:
    """W7: without a number, or not in linear time: refused when the document is read."""
    with pytest.raises(pydantic.ValidationError, match=message):
        LogPattern(name="p", pattern=pattern)


def test_scales_and_names_of_patterns() -> None:
    """W7: a factor belongs to a group, and a name to one pattern."""
    with pytest.raises(pydantic.ValidationError, match="no group of the pattern"):
        LogPattern(name="p", pattern=r"(?P<loss>\d+)", scale={"los": 1.0})
    one = LogPattern(name="p", pattern=r"(?P<loss>\d+)")
    with pytest.raises(pydantic.ValidationError, match="two patterns are called p"):
        Reading(patterns=(one, one))


def test_an_exponential_pattern_ends() -> None:
    """W7: what takes others for ever takes RE2 no time; a line over the limit is not looked at."""
    reader = LogReader(Reading(patterns=(LogPattern(name="p", pattern=r"^(a+)+(?P<x>\d)$"),)), resumed_at=0)
    assert told("a" * 60000 + "!", reader) == []
    assert printed("a" * (FRAME_LIMIT_CHARS + 1)) == []


@pytest.mark.parametrize("line", PROSE)
def test_prose_is_nothing(line: str) -> None:
    """W2: only a line that is a trainer's in its whole form has numbers."""
    assert told(line) == []


def test_ranks() -> None:
    """W8: torchrun's prefix, torch's own, or the rank whose file it is; each rank has its own count of updates."""
    reader = LogReader(Reading(), resumed_at=2100)
    lines = ["[default3]:" + DICT, "[default1]:" + DICT, "[default3]: " + DICT]
    assert [(one.rank, one.update) for line in lines for one in told(line, reader)] == [
        (3, 2101), (1, 2101), (3, 2102),
    ]  # fmt: skip
    assert printed("[rank2]: Traceback", 0) == [Printed(2, "Traceback")]
    assert told(DICT, rank=5)[0].rank == 5
    assert reader.last == {3: 2102, 1: 2101}
    later = LogReader(Reading(), resumed_at=2100, last=reader.last)
    assert [one.update for one in told("[default3]:" + DICT, later)] == [2103]


def test_frames_of_a_progress_bar() -> None:
    """W1: CR frames, colours and blanks around a line do not hide it, and are no updates."""
    bar = " 55%|\x1b[32m#####\x1b[0m     | 2101/3852 [00:13<6:24:03, 13.2s/it]"
    assert update(f"\r{bar}\r          \r{DICT}    \r{bar}").loss == 0.1234
    assert update(bar + DICT).loss == 0.1234


STREAM = "\n".join(
    [
        "Lädt … 100 %|██| é",
        DICT,
        f"\r 5%|█ | 1/20\r      \r[default1]:{DICT}",
        '{"step": 2107, "loss": 0.5}',
        "",
        "x" * 70000,
        DICT,
    ]
).encode()


def collected(chunks: list[bytes]) -> list[Told]:
    reader = LogReader(Reading(), resumed_at=2100)
    found: list[Told] = []
    lines = Lines(lambda line: found.extend(told(line, reader)))
    for chunk in chunks:
        lines.feed(chunk)
    lines.close()
    return found


@settings(max_examples=60)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_whatever_the_chunks(cuts: list[int]) -> None:
    """W1: split characters, 16 kB pieces, a rotation in mid-line: the same updates, none lost, none doubled."""
    edges = [0, *sorted(cuts), len(STREAM)]
    found = collected([STREAM[a:b] for a, b in itertools.pairwise(edges)])
    assert [(one.rank, one.update) for one in found if isinstance(one, Update)] == [
        (0, 2101), (1, 2101), (0, 2107), (0, 2108),
    ]  # fmt: skip


@given(st.floats())
def test_numbers_come_back(value: float) -> None:
    """W4: what Python prints of a float is that float."""
    found = number_of(repr(value))
    assert found == value or (math.isnan(value) and math.isnan(found or 0.0))


@given(st.floats(1e-30, 1e30))
def test_a_rounded_number_holds_its_original(value: float) -> None:
    """W4: the original lies within half a unit of what four digits show."""
    number = rounded_number(f"{value:.4g}")
    assert number is not None
    assert abs(number.value - value) <= number.half_unit * (1 + 1e-9)


@given(st.text())
def test_any_text_is_answered(text: str) -> None:
    """W2: no line raises, whatever it holds."""
    told(text)
    told("{" + text + "}")
    told('{"' + text + '"}')


def test_damaged_dict_lines_never_invent_numbers() -> None:
    """W2: every number of a damaged line stands in it as text."""
    source = random.Random(7)  # noqa: S311 - the same lines each time
    for _ in range(3000):
        line = list(DICT)
        for _ in range(source.randint(1, 3)):
            line[source.randrange(len(line))] = source.choice("'\"{},:[]() \\en0a")
        for one in told("".join(line)):
            assert isinstance(one, Update)
            for name, number in one.numbers:
                assert math.isfinite(number.value) or "n" in "".join(line)
                assert name == "learning_rate" or name in "".join(line)


def test_events_of_the_scripted_trainer_are_json() -> None:
    """W5: what json.dumps writes is read, whatever the order of keys."""
    event = {"loss": 0.25, "event": "update", "update": 3, "grad_norm": 1}
    assert update(json.dumps(event, sort_keys=True)) == update(json.dumps(event))
