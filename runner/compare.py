"""Are two runs the same run? Every update on every rank, and every tensor of model and optimizer, bit for bit.

Promises: equal means equal bits (losses, learning rates and gradient norms as hex floats, sample ids, tensors by their
bytes); runs that have nothing in common to compare are not equal; the first difference is named exactly.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.errors import Fault, Refusal
from runner.exposure import read_exposure
from runner.inside import census
from runner.inside.digests import hash_files
from runner.run import RunFolder
from runner.tensors import Tensor, read_leaves

_RANK = re.compile(r"rank_([0-9]+)\.jsonl\Z", re.ASCII)
_TENSOR_FILES = (".safetensors", ".pt", ".pth")


@dataclasses.dataclass(frozen=True)
class Row:
    """One update in both runs: the loss (mean over ranks) and whether all that was logged is equal on every rank."""

    update: int
    loss_a: float
    loss_b: float
    equal: bool


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was compared, and the differences, the first first (none: the runs are equal)."""

    rows: tuple[Row, ...]
    ranks: int
    tensors: int
    checkpoint: str
    differences: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether every update and every tensor is equal, bit for bit."""
        return not self.differences

    @property
    def verdict(self) -> str:
        """The one line that says it all."""
        same = sum(row.equal for row in self.rows)
        word = "EXACT" if self.equal else "DIFFERENT"
        return f"{word}: {same} of {len(self.rows)} updates, {self.tensors} tensors, {self.ranks} ranks"


def compare(a: RunFolder, b: RunFolder) -> Comparison:
    """Compare the logged updates of the runs, and the newest complete checkpoint of each, which must be of one update.

    Raises `Refusal` if either has no exposure log or no complete checkpoint.
    """
    logs_a, logs_b = _logs(a), _logs(b)
    differences: list[str] = []
    if logs_a.keys() != logs_b.keys():
        differences.append(f"ranks: {sorted(logs_a)} against {sorted(logs_b)}")
    ranks = sorted(logs_a.keys() & logs_b.keys())
    rows = tuple(_rows(logs_a, logs_b, ranks, differences))
    newest_a, newest_b = _newest(a), _newest(b)
    for name, folder, logs, newest in (("first", a, logs_a, newest_a), ("second", b, logs_b, newest_b)):
        differences += _gaps(name, folder, logs, census.update_of(newest.name) or 0)
    if newest_a.name != newest_b.name:
        differences.append(f"newest complete checkpoint: {newest_a.name} against {newest_b.name}")
        return Comparison(rows, len(ranks), 0, "", tuple(differences))
    tensors = _compare_folders(newest_a, newest_b, differences)
    final = [folder.output / folder.spec().outputs.final for folder in (a, b)]
    if any(path.is_dir() for path in final):
        tensors += _compare_folders(final[0], final[1], differences)
    if not tensors:
        differences.append(f"{newest_a.name}: no tensor to compare")
    return Comparison(rows, len(ranks), tensors, newest_a.name, tuple(differences))


def _newest(folder: RunFolder) -> Path:
    newest, rejected = folder.checkpoints()
    if newest is None:
        fix = "compare runs that have saved"
        found = f"{len(rejected)} incomplete"
        raise Refusal(Fault("no complete checkpoint", str(folder.output), "at least one", found, fix))
    return newest.path


def _logs(folder: RunFolder) -> dict[int, dict[int, dict[str, Any]]]:
    """Rank -> update -> row."""
    place = folder.output / folder.spec().outputs.exposure
    logs: dict[int, dict[int, dict[str, Any]]] = {}
    for path in sorted(place.glob("rank_*.jsonl")):
        match = _RANK.match(path.name)
        if match is not None:
            logs[int(match[1])] = {row["update"]: row for row in read_exposure(path)}
    if not logs:
        raise Refusal(
            Fault(
                "no exposure log",
                str(place),
                "rank_R.jsonl of each rank",
                "none",
                "compare runs that trained",
            )
        )
    return logs


def _gaps(name: str, folder: RunFolder, logs: Mapping[int, Mapping[int, Any]], last: int) -> list[str]:
    """Say what an exposure log lacks: a rank of the run's world, or an update on the way to its checkpoint.

    Runs that are equal in what was logged are not shown to be equal where nothing was.
    """
    gaps = []
    for rank in range(folder.spec().world.ranks):
        updates = logs.get(rank, {})
        first = min(updates, default=last)
        lacking = sorted(set(range(first, last + 1)) - updates.keys())
        if lacking:
            gaps.append(
                f"the {name} has no log of rank {rank} at update {lacking[0]} ({len(lacking)} in all)"
            )
    return gaps


def _rows(
    a: Mapping[int, Mapping[int, dict[str, Any]]],
    b: Mapping[int, Mapping[int, dict[str, Any]]],
    ranks: list[int],
    differences: list[str],
) -> Iterator[Row]:
    updates = sorted({update for log in (*a.values(), *b.values()) for update in log})
    ends = [max((max(log[rank], default=0) for rank in ranks), default=0) for log in (a, b)]
    if ends[0] != ends[1] and ranks:
        shorter, longer = ("first", "second") if ends[0] < ends[1] else ("second", "first")
        differences.append(f"the {shorter} ends at update {min(ends)}, the {longer} at {max(ends)}")
        updates = [update for update in updates if update <= min(ends)]
    for update in updates:
        equal = True
        losses: tuple[list[float], list[float]] = ([], [])
        for rank in ranks:
            row_a, row_b = a[rank].get(update), b[rank].get(update)
            if row_a is None or row_b is None:
                differences.append(
                    f"update {update}, rank {rank}: only in {'the first' if row_a else 'the second'}"
                )
                equal = False
                continue
            for field in sorted(row_a.keys() | row_b.keys()):
                if row_a.get(field) != row_b.get(field):
                    differences.append(
                        f"update {update}, rank {rank}, {field}: {row_a.get(field)} against {row_b.get(field)}"
                    )
                    equal = False
            losses[0].append(_loss(row_a))
            losses[1].append(_loss(row_b))
        yield Row(update, _mean(losses[0]), _mean(losses[1]), equal)


def _loss(row: Mapping[str, Any]) -> float:
    """The logged loss; one that is not a hex float is shown as not a number (it is compared as it stands)."""
    try:
        return float.fromhex(row["loss"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return float("nan")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _compare_folders(a: Path, b: Path, differences: list[str]) -> int:
    """Compare every file of two folders, tensor by tensor where their bytes differ; return how many tensors were."""
    names_a, names_b = _files(a), _files(b)
    for name in sorted(names_a ^ names_b):
        differences.append(f"{a.name}/{name}: only in {'the first' if name in names_a else 'the second'}")
    names = sorted(names_a & names_b)
    hashed_a, hashed_b = hash_files(a, names), hash_files(b, names)
    tensors = 0
    for name in names:
        same_bytes = hashed_a[name] == hashed_b[name] or _digest(hashed_a[name]) == _digest(hashed_b[name])
        if not name.endswith(_TENSOR_FILES):
            if not same_bytes and _counts(name):
                differences.append(f"{a.name}/{name}: the bytes differ")
            continue
        leaves_a = read_leaves(a / name)
        leaves_b = leaves_a if same_bytes else read_leaves(b / name)
        tensors += sum(isinstance(leaf, Tensor) for leaf in leaves_a.values())
        for leaf in sorted(leaves_a.keys() | leaves_b.keys()):
            if leaves_a.get(leaf) != leaves_b.get(leaf):
                differences.append(
                    f"{a.name}/{name}: {leaf}: {leaves_a.get(leaf)} against {leaves_b.get(leaf)}"
                )
    return tensors


def _digest(entry: object) -> object:
    return getattr(entry, "sha256", entry)


def _counts(name: str) -> bool:
    # The inventory holds the hashes of files whose bytes may differ where their tensors do not (archive layout).
    return not name.endswith(("RECOVERY_COMPLETE.json", "FINAL_COMPLETE.json"))


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
