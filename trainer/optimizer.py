"""The optimizer: DeepSpeedCPUAdam over named parameter groups, and DeepSpeed's config for it.

Promise: six groups (body, adapter, head; each with and without weight decay), in this order, none of them
empty. The optimizer is made here and not by an "optimizer" section of DeepSpeed's config, which would make
one group of it all and decay the norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from torch import nn

from trainer.config import RunConfig
from trainer.model import Part, part_of


@dataclass(frozen=True)
class Group:
    """A parameter group: `lr` is the peak rate;
    `parameters` are names and shapes in the model's own order.
    """

    name: str
    lr: float
    weight_decay: float
    parameters: tuple[tuple[str, tuple[int, ...]], ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "parameters": [[name, list(shape)] for name, shape in self.parameters],
        }


def group_layout(model: nn.Module, config: RunConfig) -> tuple[Group, ...]:
    """All trainable parameters in groups: one-dimensional ones (norms, biases) are not decayed."""
    rates = {
        "body": config.optimizer.lr.body,
        "adapter": config.optimizer.lr.adapter,
        "head": config.optimizer.lr.head,
    }
    groups = []
    for part in get_args(Part):
        for decayed in (True, False):
            chosen = tuple(
                (name, tuple(parameter.shape))
                for name, parameter in model.named_parameters()
                if parameter.requires_grad and part_of(name) == part and (parameter.ndim > 1) == decayed
            )
            decay = config.optimizer.weight_decay if decayed else 0.0
            groups.append(Group(f"{part}/{'decay' if decayed else 'no-decay'}", rates[part], decay, chosen))
    return tuple(group for group in groups if group.parameters)


def create_optimizer(model: nn.Module, groups: tuple[Group, ...], config: RunConfig) -> Any:
    """A `DeepSpeedCPUAdam` over these groups."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameters = dict(model.named_parameters())
    return DeepSpeedCPUAdam(
        [
            {
                "params": [parameters[name] for name, _ in group.parameters],
                "lr": group.lr,
                "weight_decay": group.weight_decay,
                "name": group.name,
            }
            for group in groups
        ],
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        adamw_mode=True,
    )


def deepspeed_config(config: RunConfig) -> dict[str, Any]:
    """DeepSpeed's config in full: nothing is "auto".
    A new dict each time, since DeepSpeed's users change theirs.
    """
    batch = config.batch
    return {
        "train_micro_batch_size_per_gpu": batch.per_device,
        "gradient_accumulation_steps": batch.accumulation,
        "train_batch_size": batch.per_device * batch.accumulation * batch.world,
        "gradient_clipping": config.optimizer.clip,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": True,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 1000000,
            "allgather_bucket_size": 1000000,
            "round_robin_gradients": False,
        },
        "steps_per_print": 1000000000,
        "wall_clock_breakdown": False,
    }
