"""Which row is seen when: a pure function of seed, epoch, update, micro-batch and rank.

Promise: the order depends on nothing but these numbers, not on torch, Transformers, NumPy or Python's
version, and the position follows from the number of completed updates, so a resume never counts batches to
skip (transformers 5605, 22098, 40691). Standard library only; it knows row numbers, not rows.

The tail rule: an epoch's permutation is cut to whole global batches, and the rest of it (fewer than one
global batch) is not trained in that epoch. A shorter last update would leave ranks without a batch or need
another loss scale; because the permutation changes with the epoch, other rows fall into the tail each time.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


def permutation(seed: int, epoch: int, rows: int) -> list[int]:
    """All row numbers in the order of `epoch`: sorted by SHA-256 of "ferry-order-1:seed:epoch:row"."""
    prefix = hashlib.sha256(f"ferry-order-1:{seed}:{epoch}:".encode("ascii"))

    def key(row: int) -> tuple[bytes, int]:
        digest = prefix.copy()
        digest.update(str(row).encode("ascii"))
        return digest.digest(), row

    return sorted(range(rows), key=key)


@dataclass(frozen=True)
class Order:
    """The order of a whole run. All counts are positive; `updates_per_epoch` is at least 1.

    Raises:
        ValueError: when there are fewer rows than one global batch.
    """

    seed: int
    rows: int
    world: int
    per_device: int
    accumulation: int

    def __post_init__(self) -> None:
        if self.rows < self.global_batch:
            raise ValueError(f"{self.rows} rows are fewer than one global batch of {self.global_batch}")

    @property
    def global_batch(self) -> int:
        """Rows in one update, over all ranks and micro-batches."""
        return self.world * self.per_device * self.accumulation

    @property
    def updates_per_epoch(self) -> int:
        """Whole global batches in an epoch; the tail is dropped."""
        return self.rows // self.global_batch

    @property
    def micro_batches_per_epoch(self) -> int:
        """Micro-batches of one rank in an epoch."""
        return self.updates_per_epoch * self.accumulation

    def epoch_of(self, completed: int) -> int:
        """The epoch (from 0) in which the update after `completed` updates lies."""
        return completed // self.updates_per_epoch

    def remaining(self, completed: int, epoch: int, rank: int) -> list[list[int]]:
        """Row numbers of each micro-batch that `rank` still has to see in `epoch` after `completed`
        updates.
        """
        first = max(0, completed - epoch * self.updates_per_epoch)
        order = permutation(self.seed, epoch, self.rows)
        batches = []
        for update in range(first, self.updates_per_epoch):
            for micro in range(self.accumulation):
                start = update * self.global_batch + (micro * self.world + rank) * self.per_device
                batches.append(order[start : start + self.per_device])
        return batches
