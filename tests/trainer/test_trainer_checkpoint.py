"""A checkpoint is complete by content or it is refused;
a contract is equal in every field or it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.checkpoint import (
    INVENTORY_NAME,
    Rotation,
    Seal,
    aside_for,
    expected_names,
    folder_name,
    seal,
    verify,
)
from trainer.contract import CONTRACT_NAME, Document, differences, require_equal
from trainer.output import Output
from trainer.refusal import Refusal

CONTRACT = Document.of(CONTRACT_NAME, {"loader": {"workers": 0}, "seed": 429})


def make(output: Path, update: int = 20, world: int = 4) -> Path:
    """A complete checkpoint with made-up contents."""
    output.mkdir(parents=True, exist_ok=True)
    final = output / folder_name(update)
    aside = aside_for(output, final.name)
    for name in expected_names(update, world):
        path = aside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"content of {name}".encode())
    (aside / "latest").write_text(f"global_step{update}")
    (aside / "trainer_state.json").write_text(json.dumps({"global_step": update}))
    (aside / CONTRACT_NAME).write_bytes(CONTRACT.content)
    seal(aside, final, INVENTORY_NAME, Seal(update, 40, world, CONTRACT.sha256))
    return final


def test_sealed_and_verified(tmp_path: Path) -> None:
    """What was sealed verifies, under a hostile path too, and nothing hidden is left."""
    output = tmp_path / "out [1] it's é"
    assert verify(make(output), 4, 40) == Seal(20, 40, 4, CONTRACT.sha256)
    assert [path.name for path in output.iterdir()] == ["checkpoint-20"]
    inventory = json.loads((output / "checkpoint-20" / INVENTORY_NAME).read_bytes())
    assert set(inventory) == {"ferry", "update", "of", "world", "contract", "files"}
    assert set(inventory["files"]) == set(expected_names(20, 4))


SHARD = "global_step20/bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (lambda c: (c / SHARD).unlink(), SHARD),
        (lambda c: (c / SHARD).write_bytes(b""), SHARD),
        (lambda c: (c / "rng_state_2.pth").write_bytes(b"content of rng_state_3.pth"), "rng_state_2.pth"),
        (lambda c: (c / "checkpoint-is-incomplete.txt").touch(), "checkpoint-is-incomplete.txt"),
        (lambda c: (c / "latest").write_text("global_step10"), "latest"),
        (lambda c: (c / INVENTORY_NAME).unlink(), f"checkpoint-20/{INVENTORY_NAME}"),
        (lambda c: (c / INVENTORY_NAME).write_bytes(b'{"ferry": 1'), f"checkpoint-20/{INVENTORY_NAME}"),
        (lambda c: (c / INVENTORY_NAME).write_bytes(b"[]"), f"checkpoint-20/{INVENTORY_NAME}"),
    ],
)
def test_anything_less_is_refused(tmp_path: Path, damage: Callable[[Path], object], where: str) -> None:
    """Missing, empty, exchanged, added and unreadable files are refused by name."""
    checkpoint = make(tmp_path)
    damage(checkpoint)
    with pytest.raises(Refusal) as caught:
        verify(checkpoint, 4, 40)
    assert [d.where for d in caught.value.differences] == [where]


def test_a_rank_that_was_never_saved_is_named(tmp_path: Path) -> None:
    """An inventory that is consistent, but of 3 ranks, does not resume 4."""
    checkpoint = make(tmp_path, world=3)
    with pytest.raises(Refusal) as caught:
        verify(checkpoint, 4, 41)
    assert [(d.expected, d.found) for d in caught.value.differences] == [
        ("checkpoint 3", "target 4"),
        ("checkpoint 40", "target 41"),
    ]


def test_contracts_differ_in_every_field_at_once(tmp_path: Path) -> None:
    """All differences with their pointers:
    changed, added, gone, another type, inside lists, odd key names.
    """
    then = {"a": 1, "b": {"c~/d": True}, "gone": 0, "list": [1, 2]}
    now = {"a": 1.0, "b": {"c~/d": 1}, "new": None, "list": [1]}
    assert [d.where for d in differences(then, now)] == ["/a", "/b/c~0~1d", "/gone", "/list/1", "/new"]
    assert list(differences(then, then)) == []


def test_the_refusal_of_a_contract(tmp_path: Path) -> None:
    """It shows where, what the checkpoint says, and what is now."""
    checkpoint = make(tmp_path)
    require_equal(checkpoint, [CONTRACT])
    with pytest.raises(Refusal) as caught:
        require_equal(checkpoint, [Document.of(CONTRACT_NAME, {"loader": {"workers": 8}, "seed": 429})])
    assert str(caught.value) == (
        "REFUSED: checkpoint-20 was made under another contract\n"
        "  resume_contract.json#/loader/workers: expected 0 (in checkpoint), found 8 (now)\n"
        "  fix: resume with the config and environment of the checkpoint, or rebase what may change"
    )


def test_rotation_deletes_only_its_own(tmp_path: Path) -> None:
    """The checkpoint that was resumed from stays; of those written here the newest two stay."""
    make(tmp_path, 10)
    rotation = Rotation(2)
    assert [rotation.wrote(make(tmp_path, update)) for update in (20, 30, 40)] == [[], [], ["checkpoint-20"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-10",
        "checkpoint-30",
        "checkpoint-40",
    ]


def test_a_fresh_start_writes_over_nothing(tmp_path: Path) -> None:
    """An output with a checkpoint is refused; leftovers of a cut-off save do not matter."""
    checkpoint = make(tmp_path)
    with pytest.raises(Refusal, match="checkpoint-20: expected no such folder"):
        Output(tmp_path).prepare_fresh(4)
    checkpoint.rename(tmp_path / ".saving-20")
    assert Output(tmp_path).prepare_fresh(4).swept == (".saving-20",)


def test_a_resume_sets_later_work_aside(tmp_path: Path) -> None:
    """Checkpoints after N and `final` go to the history; N and earlier stay; a stale outcome goes."""
    output = Output(tmp_path)
    for update in (10, 20, 30):
        make(tmp_path, update)
    (output.train / "exposure").mkdir(parents=True)
    for rank in range(4):
        lines = "".join(json.dumps({"update": update}) + "\n" for update in range(1, 31))
        (output.train / "exposure" / f"rank_{rank}.jsonl").write_text(lines)
    output.final.mkdir()
    output.write_outcome("finished", 30, "checkpoint-30", None)
    prepared = output.prepare_resume(20, 4)
    assert set(prepared.set_aside) == {"checkpoint-30", "final", *(f"rank_{rank}.jsonl" for rank in range(4))}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-20", "train"]
    assert verify(output.train / "recovery-history" / "from-20-1" / "checkpoint-30", 4, 40).update == 30
    assert not output.outcome.exists()
