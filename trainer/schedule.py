"""The learning-rate schedule and the loss ramp as pure functions of the update number.

Promise: the same arguments give the same bits on every machine that has an IEEE double and the same libm
`cos`; nothing is remembered between calls, so a resume cannot restart, repeat or shift the schedule. No torch
here.
"""

from __future__ import annotations

import math


def learning_rate_multiplier(update: int, total: int, warmup: int, floor: float) -> float:
    """Multiplier of every group's learning rate for the update that follows `update` completed updates.

    Linear from 0 over `warmup` updates, then one cosine down to `floor` at `total`; `floor` beyond it.
    So update 2,101 of 3,852 with warm-up 116, peak 5e-6 and floor 0.1 applies 5e-6 * f(2100) = 2.531e-6.

    Raises:
        ValueError: if not 0 <= warmup < total, or floor is outside [0, 1], or update is negative.
    """
    if not 0 <= warmup < total:
        raise ValueError(f"warmup must be in [0, total), got warmup {warmup}, total {total}")
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"floor must be in [0, 1], got {floor}")
    if update < 0:
        raise ValueError(f"update must not be negative, got {update}")
    if update < warmup:
        return update / warmup
    if update >= total:
        return floor
    progress = (update - warmup) / (total - warmup)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def ramp(update: int, ramp_updates: int) -> float:
    """Weight factor in [0, 1] after `update` completed updates:
    linear over `ramp_updates`, then 1 (0 = no ramp).
    """
    if update < 0 or ramp_updates < 0:
        raise ValueError(f"update and ramp_updates must not be negative, got {update}, {ramp_updates}")
    return 1.0 if update >= ramp_updates else update / ramp_updates
