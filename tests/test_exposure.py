"""Exposure logs of a bundle reach its checkpoint on every rank, or the bundle's notes say where they do not (C13)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.errors import Refusal
from runner.exposure import notes_of

BREAKS: dict[str, Callable[[list[int]], list[int]]] = {
    "ends too early": lambda updates: updates[:-1],
    "a gap": lambda updates: [update for update in updates if update != 4],
    "twice": lambda updates: [*updates[:3], *updates[2:]],
    "another order": lambda updates: [updates[1], updates[0], *updates[2:]],
    "none": lambda updates: [],
}


def write(folder: Path, rank: int, updates: list[int]) -> None:
    """A log of `rank` with rows of `updates`."""
    rows = "".join(json.dumps({"update": update, "ids": ["a"]}) + "\n" for update in updates)
    (folder / f"rank_{rank}.jsonl").write_text(rows)


@pytest.mark.parametrize("begin", [1, 5])
def test_whole_logs_need_no_note(tmp_path: Path, begin: int) -> None:
    """From the first update or from where the run came from elsewhere; rows after the save are a crash's."""
    for rank in range(3):
        write(tmp_path, rank, list(range(begin, 9 + rank)))
    assert notes_of(tmp_path, 3, 8) == []
    assert notes_of(tmp_path / "absent", 3, 8) == []


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_lacking_is_named_with_its_rank(tmp_path: Path, name: str) -> None:
    """One note for the one rank."""
    for rank in range(3):
        updates = list(range(1, 9))
        write(tmp_path, rank, BREAKS[name](updates) if rank == 1 else updates)
    (note,) = notes_of(tmp_path, 3, 8)
    assert note.where.endswith("rank_1.jsonl")


def test_a_damaged_log_is_refused(tmp_path: Path) -> None:
    """With its line."""
    write(tmp_path, 0, [1, 2])
    path = tmp_path / "rank_0.jsonl"
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(Refusal, match=r"rank_0.jsonl:1"):
        notes_of(tmp_path, 1, 2)
