"""The record of what each rank saw: one JSON line per update, `train/exposure/rank_{r}.jsonl`.

Promise: a line is flushed before the next update starts; floats are written as `float.hex()`, so that equal
lines mean equal bits; on a resume at update N the logs hold exactly the updates 1 to N, and what was cut off
is kept below `train/recovery-history/`. `loss` is this rank's own mean over its micro-batches, not reduced
over ranks. Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from trainer.durable import Appender, sync_folder, write_document
from trainer.refusal import Difference, Refusal


@dataclass(frozen=True)
class Exposure:
    """One update as one rank saw it;
    `lr` has the applied rate of every parameter group, in the contract's order.
    """

    update: int
    epoch: float
    ids: tuple[str, ...]
    loss: float
    lr: tuple[float, ...]
    grad_norm: float

    def line(self) -> str:
        """The record as one line of JSON, ending in LF."""
        record = {
            "update": self.update,
            "epoch": self.epoch,
            "ids": list(self.ids),
            "loss": self.loss.hex(),
            "lr": [value.hex() for value in self.lr],
            "grad_norm": self.grad_norm.hex(),
        }
        return json.dumps(record, ensure_ascii=False, separators=(", ", ": ")) + "\n"


def log_path(train: Path, rank: int) -> Path:
    """Where a rank's record lies below `{output}/train`."""
    return train / "exposure" / f"rank_{rank}.jsonl"


class ExposureLog:
    """Appends one rank's record, a line at a time."""

    def __init__(self, path: Path) -> None:
        self._file = Appender(path)

    def append(self, exposure: Exposure) -> None:
        """Write a line; it is with the kernel when this returns."""
        self._file.append(exposure.line().encode("utf-8"))

    def sync(self) -> None:
        """Put everything appended so far on disk (called before a checkpoint is written)."""
        self._file.sync()


def _update_of(line: bytes) -> int | None:
    try:
        value = json.loads(line)["update"]
    except (ValueError, TypeError, KeyError):
        return None
    return value if type(value) is int else None


def split_at(content: bytes, update: int) -> tuple[bytes, bytes]:
    """Cut a log after the line of `update`: (updates 1..N, the rest byte for byte, torn last line included).

    Raises:
        ValueError: when the log does not begin with exactly the updates 1, 2, ..., N, each on a whole line.
    """
    position = 0
    for expected in range(1, update + 1):
        end = content.find(b"\n", position)
        if end < 0:
            raise ValueError(f"ends at update {expected - 1}")
        found = _update_of(content[position : end + 1])
        if found != expected:
            raise ValueError(f"line {expected} is of update {found}")
        position = end + 1
    return content[:position], content[position:]


def next_history(train: Path, update: int) -> Path:
    """`train/recovery-history/from-N-K` with the smallest K from 1 that is free. Not created."""
    counter = 1
    while (train / "recovery-history" / f"from-{update}-{counter}").exists():
        counter += 1
    return train / "recovery-history" / f"from-{update}-{counter}"


def trim_logs(train: Path, update: int, world: int, history: Path, *, fresh: bool = False) -> list[str]:
    """Cut every rank's log to updates <= `update` and keep the rest in `history` (made only if there is a
    rest).

    All logs are judged before any is changed. Gives the names of the logs that were cut. With `fresh`, a
    missing log is an empty one.

    Raises:
        Refusal: when a log is missing or does not reach `update`; then nothing was changed.
    """
    parts, differences = {}, []
    for rank in range(world):
        path = log_path(train, rank)
        where = f"train/exposure/{path.name}"
        try:
            parts[path] = split_at(path.read_bytes(), update)
        except FileNotFoundError:
            if fresh:
                continue
            differences.append(Difference(where, f"updates 1 to {update}", "no such file"))
        except ValueError as error:
            differences.append(Difference(where, f"updates 1 to {update}", str(error)))
    if differences:
        fix = "bring the run's own train/exposure logs along with its checkpoint"
        raise Refusal(f"an exposure log does not reach update {update}", differences, fix)
    cut = []
    for path, (kept, rest) in parts.items():
        if rest:
            history.mkdir(parents=True, exist_ok=True)
            write_document(history / path.name, rest)
            write_document(path, kept)
            cut.append(path.name)
    if cut:
        sync_folder(history.parent)
    return cut
