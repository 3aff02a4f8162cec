"""The few things that ranks agree on.

Promise: after each of these calls all ranks hold the same answer, or all of them raise. Needs an initialised
process group (or a single process).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import distributed

from trainer.refusal import AgreedRefusal, Refusal

T = TypeVar("T")


def rank() -> int:
    """Return this process's rank; 0 where there is no group."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def barrier() -> None:
    """Wait for all ranks."""
    if distributed.is_initialized():
        distributed.barrier()


def all_or_none(step: Callable[[], T]) -> T:
    """Run `step` on every rank; if any refuses, every rank raises one refusal that names the ranks."""
    result: T | None = None
    text: str | None = None
    try:
        result = step()
    except Refusal as error:
        text = str(error)
    texts: list[str | None] = [text]
    if distributed.is_initialized():
        texts = [None] * distributed.get_world_size()
        distributed.all_gather_object(texts, text)
    said = {
        found: [number for number, t in enumerate(texts) if t == found]
        for found in texts
        if found is not None
    }
    if said:
        raise AgreedRefusal("\n".join(f"{found}\n  ranks: {numbers}" for found, numbers in said.items()))
    return result  # type: ignore[return-value]


def on_rank_zero(step: Callable[[], T]) -> T:
    """Run `step` on rank 0 alone and give its answer to all; its refusal is everybody's."""
    result = all_or_none(lambda: step() if rank() == 0 else None)
    box: list[T | None] = [result]
    if distributed.is_initialized():
        distributed.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]


def any_rank(flags: list[bool], device: torch.device) -> list[bool]:
    """Each flag is true if it is true on any rank."""
    values = torch.tensor(flags, dtype=torch.int32, device=device)
    if distributed.is_initialized():
        distributed.all_reduce(values, op=distributed.ReduceOp.MAX)
    return [bool(value) for value in values.tolist()]
