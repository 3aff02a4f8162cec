"""The parts of a checkpoint agree with each other, and its pickles are safe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner import consistency, meaning, verify
from runner.errors import Refusal
from runner.inside import census
from runner.verify import open_bundle
from tests.builder import make_draft, relist
from tests.scripted.saving import pickled, save_checkpoint
from tests.test_census import relist as relist_checkpoint


def whats(refusal: Refusal) -> list[str]:
    return [fault.what for fault in refusal.faults]


def test_an_unsafe_pickle_in_a_bundle_is_refused_by_name(tmp_path: Path) -> None:
    """Right bytes, right inventory: and still nothing that a loader would run."""
    draft = make_draft(tmp_path / "draft", update=4)
    folder = draft / "checkpoint-4"
    import zipfile

    with zipfile.ZipFile(folder / "rng_state_0.pth", "w") as file:
        file.writestr("x/data.pkl", b"cos\nsystem\n(S'true'\ntR.")
    (draft / "data" / "plain.bin").write_bytes(b"\x01\x02not a pickle")
    relist_checkpoint(folder)
    relist(draft)
    with pytest.raises(Refusal) as refused:
        verify.verify(open_bundle(draft))
    fault = next(fault for fault in refused.value.faults if fault.what == "unsafe pickle")
    assert (fault.where, fault.found) == (str(draft / "checkpoint-4/rng_state_0.pth"), "os.system")


def checkpoint_of(folder: Path) -> census.Checkpoint:
    relist_checkpoint(folder)
    return census.take_census(folder, 4)


ENGINE = {
    "global_steps": 20,
    "global_samples": 160,
    "dp_world_size": 4,
    "skipped_steps": 0,
    "ds_config": {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
    },
}
STATE = {"global_step": 20, "epoch": 0.5, "train_batch_size": 1, "log_history": [{"step": 20, "epoch": 0.5}]}
ROWS = 320

PART_BREAKS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]] = {
    "all agree": ({}, {}, {}, []),
    "engine of another update": ({"global_steps": 10}, {}, {}, ["engine state differs"]),
    "engine of another world": ({"dp_world_size": 8}, {}, {}, ["engine state differs"]),
    "engine with other samples": ({"global_samples": 80}, {}, {}, ["engine state differs"]),
    "scheduler behind": ({}, {"last_epoch": 10}, {}, ["scheduler differs"]),
    "scheduler ahead": ({}, {"last_epoch": 21}, {}, ["scheduler differs"]),
    "scheduler that waited": ({"skipped_steps": 2}, {"last_epoch": 18}, {}, []),
    "scheduler in the engine": ({"lr_scheduler": {"last_epoch": 3}}, {}, {}, ["scheduler differs"]),
    "another batch": ({}, {}, {"train_batch_size": 2}, ["batch differs"]),
    "another epoch than its log": ({}, {}, {"epoch": 0.6}, ["epoch differs"]),
}


@pytest.mark.parametrize("name", PART_BREAKS)
def test_parts_of_a_checkpoint_agree(tmp_path: Path, name: str) -> None:
    """Engine, scheduler and trainer state, each against update, world and batch."""
    engine, scheduler, state, expected = PART_BREAKS[name]
    folder = save_checkpoint(tmp_path, 20, 40, 4, 1.0)
    (folder / "global_step20" / "mp_rank_00_model_states.pt").write_bytes(pickled(ENGINE | engine))
    (folder / "scheduler.pt").write_bytes(pickled({"last_epoch": 20} | scheduler))
    (folder / "trainer_state.json").write_text(json.dumps(STATE | state))
    found = consistency.compare(checkpoint_of(folder), ROWS)
    assert [fault.what for fault in found.faults] == expected


@pytest.mark.parametrize(
    ("update", "rows", "world", "batch", "epoch"),
    [
        (20, 320, 4, (1, 2), 0.5),
        (2100, 30815, 4, (1, 2), 4200 / 7704),
        (2101, 30815, 4, (1, 2), 4202 / 7704),
        (3852, 30815, 4, (1, 2), 1.0),
        (4, 28, 4, (1, 2), 1.0),
        (5, 28, 4, (1, 2), 1 + 2 / 7),
    ],
)
def test_the_epoch_is_that_of_the_pinned_librarys_rule(
    update: int, rows: int, world: int, batch: tuple[int, int], epoch: float
) -> None:
    """Micro-batches are counted, the last update of an epoch may be short: run G's 2,101 is 0.5454."""
    assert consistency.epoch_of(update, rows, world, consistency.Batch(*batch)) == pytest.approx(
        epoch, rel=1e-12
    )


def test_what_is_odd_is_a_note(tmp_path: Path) -> None:
    """Two ranks with the same RNG state are named both; so is an epoch of another number of rows. Neither refuses."""
    folder = save_checkpoint(tmp_path, 20, 40, 4, 1.0)
    (folder / "rng_state_2.pth").write_bytes(pickled({"random state": 1}))
    (folder / "global_step20" / "mp_rank_00_model_states.pt").write_bytes(pickled(ENGINE))
    (folder / "trainer_state.json").write_text(json.dumps(STATE))
    found = consistency.compare(checkpoint_of(folder), ROWS * 2)
    assert found.faults == ()
    assert [(note.what, note.found) for note in found.notes] == [
        ("epoch is not the manifest's", "epoch 0.5"),
        ("same RNG state", "rng_state_1.pth and rng_state_2.pth hold the same"),
    ]


def test_notes_come_with_the_verified_bundle(tmp_path: Path) -> None:
    """A note does not refuse, and is not lost."""
    draft = make_draft(tmp_path / "draft", update=4)
    folder = draft / "checkpoint-4"
    (folder / "rng_state_1.pth").write_bytes((folder / "rng_state_0.pth").read_bytes())
    relist_checkpoint(folder)
    relist(draft)
    assert [note.what for note in verify.verify(open_bundle(draft)).notes] == ["same RNG state"]
    assert meaning.SPEC_NAME == "run.yaml"
