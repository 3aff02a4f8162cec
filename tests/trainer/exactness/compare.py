"""Compare two run folders bit for bit: what each rank saw, and every value in their checkpoints.

Promise: all tensors of all ranks' shards, weights and random states are compared by type, shape and bytes,
and all plain values beside them by equality; nothing is compared within a tolerance.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file


@dataclass(frozen=True)
class Verdict:
    """How much was compared, and the first few places that differ."""

    updates: int
    tensors: int
    differences: tuple[str, ...]

    @property
    def word(self) -> str:
        return "DIFFERS" if self.differences else "EXACT"


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor, array and plain value in nested containers, with where it stands."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{at}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{at}/{index}")
    elif isinstance(value, torch.Tensor | numpy.ndarray | int | float | str | bytes | bool | type(None)):
        yield at, value
    elif hasattr(value, "__dict__"):
        yield from leaves(vars(value), f"{at}<{type(value).__name__}>")
    else:
        yield at, repr(value)


def same(left: Any, right: Any) -> bool:
    """Equality of bits for tensors and arrays, of values for the rest."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return bytes(left.contiguous().view(-1).view(torch.uint8).numpy()) == bytes(
            right.contiguous().view(-1).view(torch.uint8).numpy()
        )
    if isinstance(left, numpy.ndarray) and isinstance(right, numpy.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    return type(left) is type(right) and bool(left == right)


def contents(path: Path) -> Any:
    """The decoded content of a checkpoint's file. The run is our own, so its pickles are trusted."""
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix in (".pt", ".pth"):
        return torch.load(path, map_location="cpu", weights_only=False)
    return path.read_bytes()


def compare_checkpoints(left: Path, right: Path, skip: frozenset[str]) -> Verdict:
    """Compare two checkpoint folders; `skip` are file names that may differ."""
    wrong, tensors = [], 0
    names = {p.relative_to(left).as_posix() for p in left.rglob("*") if p.is_file() and p.name not in skip}
    others = {p.relative_to(right).as_posix() for p in right.rglob("*") if p.is_file() and p.name not in skip}
    wrong += [f"{left.name}/{name} is in one only" for name in sorted(names ^ others)]
    for name in sorted(names & others):
        one, two = dict(leaves(contents(left / name))), dict(leaves(contents(right / name)))
        tensors += sum(isinstance(value, torch.Tensor) for value in one.values())
        if one.keys() != two.keys():
            wrong.append(f"{left.name}/{name} holds other things")
        wrong += [f"{left.name}/{name}{at}" for at in one if at in two and not same(one[at], two[at])]
    return Verdict(0, tensors, tuple(wrong))


def exposures(run: Path, world: int) -> list[list[dict[str, Any]]]:
    """The exposure records of each rank, in order."""
    paths = [run / "train" / "exposure" / f"rank_{rank}.jsonl" for rank in range(world)]
    return [[json.loads(line) for line in path.read_text("utf-8").splitlines()] for path in paths]


def compare_runs(left: Path, right: Path, world: int, skip: frozenset[str]) -> Verdict:
    """Compare the records of all updates, and every checkpoint that both have."""
    wrong, updates, tensors = [], 0, 0
    for rank, (one, two) in enumerate(zip(exposures(left, world), exposures(right, world), strict=True)):
        updates = max(updates, len(one))
        if len(one) != len(two):
            wrong.append(f"rank {rank}: {len(one)} and {len(two)} updates")
        for a, b in zip(one, two, strict=False):
            wrong += [f"rank {rank} update {a['update']} {key}" for key in a if a[key] != b.get(key)]
    shared = {p.name for p in left.glob("checkpoint-*")} & {p.name for p in right.glob("checkpoint-*")}
    for name in sorted(shared | {"final"}):
        verdict = compare_checkpoints(left / name, right / name, skip)
        tensors += verdict.tensors
        wrong += verdict.differences
    return Verdict(updates, tensors, tuple(wrong))
