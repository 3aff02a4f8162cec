"""What stock libraries lose on a resume, put back.

Promise: after `replay_adam_counter` the next update is computed with the same bits as in a run that never
stopped.

DeepSpeedCPUAdam's C++ half (`IncrementStep` in cpu_adam.h) keeps beta1^t and beta2^t as running float
products, in memory only. A new process that is handed step t+1 makes them with pow() instead, which rounds
differently at most steps: the weights drift within two updates. The cure walks the counter from 1 to t on
one-element dummies, so that the products are multiplied up in the same way.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from trainer.refusal import refuse

#: Set to "1" by the exactness tests alone, to show that the cure is needed. Named in every line it causes.
WITHOUT_REPLAY = "FERRY_TEST_WITHOUT_ADAM_REPLAY"


def cpu_adam_below(optimizer: Any) -> Any:
    """The DeepSpeedCPUAdam inside Accelerate's and ZeRO's wrappers.

    Raises:
        Refusal: when another optimizer is found, for which this cure says nothing.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    inner = optimizer
    while not isinstance(inner, DeepSpeedCPUAdam):
        if not hasattr(inner, "optimizer"):
            fix = "use the optimizer of trainer/optimizer.py"
            raise refuse("exactness is not known", "optimizer", "DeepSpeedCPUAdam", type(inner).__name__, fix)
        inner = inner.optimizer
    return inner


def _saved_steps(adam: Any) -> set[int]:
    return {int(state["step"]) for state in adam.state.values() if "step" in state}


def replay_adam_counter(optimizer: Any, update: int) -> bool:
    """Bring the C++ optimizer's counter and beta powers to `update`. Call once, in a fresh process, after
    loading.

    Gives False, having done nothing, only where the exactness tests switched it off.

    Raises: Refusal: when the loaded optimizer state is not at `update` in every parameter, or has several
        pairs of betas.
    """
    adam = cpu_adam_below(optimizer)
    steps = _saved_steps(adam)
    if steps != {update}:
        fix = "resume from a complete checkpoint"
        raise refuse(
            "the optimizer state is of another update", "optimizer step", str(update), str(sorted(steps)), fix
        )
    betas = {tuple(group["betas"]) for group in adam.param_groups}
    if len(betas) != 1:
        fix = "give all groups the same betas"
        raise refuse("exactness is not known", "optimizer betas", "one pair", str(sorted(betas)), fix)
    if os.environ.get(WITHOUT_REPLAY) == "1":
        return False
    (beta1, beta2), eps = betas.pop(), adam.param_groups[0]["eps"]
    dummies = [torch.zeros(1) for _ in range(4)]
    for step in range(1, update + 1):
        adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, beta1, beta2, eps, 0.0, True, *dummies)
    return True
