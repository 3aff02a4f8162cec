"""The schedule is a pure function with the published runs' numbers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.schedule import learning_rate_multiplier, ramp


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, int, float]:
    total = draw(st.integers(1, 5000))
    return total, draw(st.integers(0, total - 1)), draw(st.floats(0.0, 1.0))


def test_run_g_first_update_after_its_move() -> None:
    """3,852 updates, warm-up 116, floor 0.1 of 5e-6: update 2,101 applies 2.531e-06."""
    assert f"{5e-6 * learning_rate_multiplier(2100, 3852, 116, 0.1):.3e}" == "2.531e-06"


def test_run_m_recomputed_cosine() -> None:
    """60,000 steps, warm-up 1,000, floor 0.1: at 40,000 the multiplier is 0.332, at the end the floor."""
    assert round(learning_rate_multiplier(40_000, 60_000, 1_000, 0.1), 3) == 0.332
    assert learning_rate_multiplier(60_000, 60_000, 1_000, 0.1) == 0.1


@given(schedules(), st.integers(0, 10_000))
def test_stays_in_bounds(schedule: tuple[int, int, float], update: int) -> None:
    """Never above 1; after warm-up never below the floor."""
    total, warmup, floor = schedule
    value = learning_rate_multiplier(update, total, warmup, floor)
    assert 0.0 <= value <= 1.0
    assert update < warmup or value >= floor * (1 - 1e-12)


@given(schedules())
def test_rises_then_falls(schedule: tuple[int, int, float]) -> None:
    """Rises strictly up to the peak of 1 at the end of warm-up, and never rises after it."""
    total, warmup, floor = schedule
    values = [learning_rate_multiplier(update, total, warmup, floor) for update in range(total + 1)]
    assert values[warmup] == 1.0
    assert all(a < b for a, b in itertools.pairwise(values[: warmup + 1]))
    assert all(a >= b for a, b in itertools.pairwise(values[warmup:]))
    assert values[-1] == floor


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 4, 0.1), "warmup must be in [0, total), got warmup 4, total 4"),
        ((0, 4, -1, 0.1), "warmup must be in [0, total), got warmup -1, total 4"),
        ((0, 4, 1, 1.5), "floor must be in [0, 1], got 1.5"),
        ((-1, 4, 1, 0.1), "update must not be negative, got -1"),
    ],
)
def test_refuses_nonsense(arguments: tuple[int, int, int, float], message: str) -> None:
    """A schedule that cannot be is an error, not a number."""
    with pytest.raises(ValueError) as caught:
        learning_rate_multiplier(*arguments)
    assert str(caught.value) == message


def test_ramp() -> None:
    """Linear up to its length, then 1; a length of 0 is no ramp."""
    assert [ramp(update, 4) for update in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert ramp(0, 0) == 1.0
