"""The order of rows depends on seed, epoch, update, micro-batch and rank, and on nothing else."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.sampler import Order, permutation


def test_order_never_changes() -> None:
    """Golden values: a change here would change the order of every run that was ever packed."""
    assert permutation(429, 0, 12) == GOLDEN_SMALL
    text = ",".join(str(row) for epoch in (0, 1) for row in permutation(429, epoch, 30_815))
    assert hashlib.sha256(text.encode()).hexdigest() == GOLDEN_LARGE


@given(st.integers(0, 2**32), st.integers(0, 50), st.integers(0, 300))
def test_is_a_permutation(seed: int, epoch: int, rows: int) -> None:
    """Every row exactly once."""
    assert sorted(permutation(seed, epoch, rows)) == list(range(rows))


def test_epochs_and_seeds_differ() -> None:
    """Epoch 1 does not replay epoch 0, and a new seed is a new order."""
    assert len({tuple(permutation(seed, epoch, 100)) for seed in (1, 2) for epoch in (0, 1)}) == 4


@st.composite
def orders(draw: st.DrawFn) -> Order:
    world, per_device, accumulation = (draw(st.integers(1, 4)) for _ in range(3))
    rows = draw(st.integers(world * per_device * accumulation, 120))
    return Order(draw(st.integers(0, 1000)), rows, world, per_device, accumulation)


@given(orders(), st.integers(0, 3))
def test_epoch_is_cut_to_whole_global_batches(order: Order, epoch: int) -> None:
    """All ranks together see the first whole global batches of the permutation,
    each row once, in its order.
    """
    completed = epoch * order.updates_per_epoch
    ranks = [order.remaining(completed, epoch, rank) for rank in range(order.world)]
    assert {len(batches) for batches in ranks} == {order.micro_batches_per_epoch}
    seen = [row for micro in zip(*ranks, strict=True) for batch in micro for row in batch]
    assert seen == permutation(order.seed, epoch, order.rows)[: order.updates_per_epoch * order.global_batch]
    assert order.rows - len(seen) < order.global_batch


@given(orders(), st.integers(0, 40), st.data())
def test_resume_goes_on_where_the_run_was(order: Order, completed: int, data: st.DataObject) -> None:
    """What is left after N updates is the end of what the whole run sees:
    in epoch 0, in later ones, and between.
    """
    rank = data.draw(st.integers(0, order.world - 1))
    last = order.epoch_of(completed) + 1
    whole = [b for epoch in range(last + 1) for b in order.remaining(0, epoch, rank)]
    left = [
        b
        for epoch in range(order.epoch_of(completed), last + 1)
        for b in order.remaining(completed, epoch, rank)
    ]
    assert left == whole[completed * order.accumulation :]


def test_refuses_less_than_one_global_batch() -> None:
    """There would be no update to make."""
    with pytest.raises(ValueError) as caught:
        Order(1, 7, 4, 1, 2)
    assert str(caught.value) == "7 rows are fewer than one global batch of 8"


GOLDEN_SMALL = [0, 5, 2, 7, 11, 8, 6, 1, 10, 9, 3, 4]
GOLDEN_LARGE = "9f4557de9fc1b179fd14c37bed9d0188f5edb25a2cb9717d22d0a7dcc42b9c0b"
