"""Exposure logs hold exactly the updates up to the resume point, and nothing that was cut off is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.exposure import Exposure, ExposureLog, log_path, next_history, split_at, trim_logs
from trainer.refusal import Refusal

WORLD = 4


def exposure(update: int, rank: int = 0) -> Exposure:
    return Exposure(update, update / 40, (f"ep-{rank}",), 0.1 * update, (1e-3, 0.0), float("nan"))


def make_logs(train: Path, updates: int) -> None:
    (train / "exposure").mkdir(parents=True)
    for rank in range(WORLD):
        log = ExposureLog(log_path(train, rank))
        for update in range(1, updates + 1):
            log.append(exposure(update, rank))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_floats_keep_their_bits() -> None:
    """`float.hex` and back is the identity, and a loss that is not a number is still a line of JSON."""
    record = json.loads(exposure(3).line())
    assert list(record) == ["update", "epoch", "ids", "loss", "lr", "grad_norm"]
    assert float.fromhex(record["loss"]) == 0.1 * 3
    assert record["grad_norm"] == "nan"


def test_trim_keeps_and_archives(tmp_path: Path) -> None:
    """Updates 1 to 20 stay, the rest goes to from-20-1, a second time to from-20-2;
    both parts are byte for byte.
    """
    make_logs(tmp_path, 23)
    before = snapshot(tmp_path)
    with open(log_path(tmp_path, 2), "ab") as stream:
        stream.write(b'{"update": 24, "torn')
    assert trim_logs(tmp_path, 20, WORLD, next_history(tmp_path, 20)) == [
        f"rank_{r}.jsonl" for r in range(WORLD)
    ]
    after = snapshot(tmp_path)
    for rank in range(WORLD):
        kept = after[f"exposure/rank_{rank}.jsonl"]
        rest = after[f"recovery-history/from-20-1/rank_{rank}.jsonl"]
        torn = b'{"update": 24, "torn' if rank == 2 else b""
        assert kept + rest == before[f"exposure/rank_{rank}.jsonl"] + torn
        assert kept.count(b"\n") == 20
    assert next_history(tmp_path, 20).name == "from-20-2"
    assert trim_logs(tmp_path, 20, WORLD, next_history(tmp_path, 20)) == []
    assert not (tmp_path / "recovery-history" / "from-20-2").exists()


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), "ends at update 19"),
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(path.read_bytes().split(b"\n", 1)[1]), "line 1 is of update 2"),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b'"update": 7,', b'"update": 7.0,')),
            "line 7 is of update None",
        ),
    ],
)
def test_a_log_that_does_not_reach_is_refused(tmp_path: Path, damage: object, found: str) -> None:
    """Cut, missing, headless or odd logs are refused by name, and no log was changed."""
    make_logs(tmp_path, 20)
    damage(log_path(tmp_path, 3))  # type: ignore[operator]
    before = snapshot(tmp_path)
    with pytest.raises(Refusal) as caught:
        trim_logs(tmp_path, 20, WORLD, next_history(tmp_path, 20))
    assert [(d.where, d.found) for d in caught.value.differences] == [("train/exposure/rank_3.jsonl", found)]
    assert snapshot(tmp_path) == before


def test_split_at_nothing() -> None:
    """A fresh start keeps nothing and sets everything aside."""
    assert split_at(b"anything", 0) == (b"", b"anything")
