"""Exposure logs: what each rank saw at each update, one JSON object a line, in `rank_R.jsonl`.

Promises: a line that was cut off at the end is no row; a damaged one is refused with its number; whether the logs reach
a checkpoint is answered from their rows. They are the sampler's position as it was seen, beside the one that follows
from the update.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner.errors import Fault, Note, Refusal


def read_exposure(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an exposure log; a last line that was cut off is left out. A missing file has no rows."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(raw.split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            rows.append({**row, "update": int(row["update"])})
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            fix = "resume the run: the trainer trims its logs to the checkpoint"
            raise Refusal(
                Fault("exposure log damaged", f"{path}:{number}", "a JSON object", str(error), fix)
            ) from error
    return rows


def notes_of(folder: Path, world: int, update: int) -> list[Note]:
    """Return what the logs of `world` ranks in `folder` lack on the way to `update`; nothing if there are no logs.

    Every rank has each update from the first logged one to `update` once, in order. Raises `Refusal` if a log is damaged.
    """
    logs = {rank: read_exposure(folder / f"rank_{rank}.jsonl") for rank in range(world)}
    if not any(logs.values()):
        return []
    notes = []
    meaning = "the logs are not of this checkpoint: order and repetition of samples cannot be shown from them"
    for rank, rows in logs.items():
        where = str(folder / f"rank_{rank}.jsonl")
        updates = [row["update"] for row in rows if row["update"] <= update]
        expected = list(range(updates[0] if updates else 1, update + 1))
        if updates != expected:
            odd = sorted(set(expected) ^ set(updates)) or sorted({n for n in updates if updates.count(n) > 1})
            first = odd[0] if odd else updates[0]
            found = f"{len(updates)} rows of updates up to {update}; the first odd one is update {first}"
            notes.append(Note("exposure log has gaps", where, found, meaning))
    return notes
