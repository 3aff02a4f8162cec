"""The next move, and what a spec may declare for whoever watches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest

from runner import documents
from runner.changes import moved_path
from runner.spec import CheckpointRef, RunSpec
from runner.supervision import FirstUpdate, Gate, KillLine
from tests.test_g3a1 import g3a1
from tests.test_rewrite_bundle import RULES, make


def test_places_follow_the_run_to_its_next_checkpoint(tmp_path: Path) -> None:
    """A place that names the bundle's checkpoint is one in the next bundle's too."""
    spec = documents.load(RunSpec, make(tmp_path) / "run.yaml")
    later = spec.at_checkpoint(CheckpointRef(path="checkpoint-6", update=6), "run")
    assert later.rebase.rewrite[1].at == ("{checkpoint}/resume_contract.json#/teacher/path",)
    assert later.file_of(later.rebase.rewrite[1].at[0]) == "checkpoint-6/resume_contract.json"
    assert later.rebase.rewrite[0].at == tuple(RULES[0]["at"])
    assert RunSpec.model_validate_json(later.model_dump_json()) == later


@pytest.mark.parametrize(
    ("path", "moved"),
    [
        ("/mnt/a", "/x"),
        ("/mnt/a/b.bin", "/x/b.bin"),
        ("/ferry/assets/teacher/b.bin", "/x/b.bin"),
        ("/mnt/a2", None),
        ("/mnt", None),
        ("mnt/a", None),
        ("see /mnt/a/b", None),
        ("", None),
    ],
)
def test_whole_segments_move(path: str, moved: str | None) -> None:
    """The origin's path, or the container's that a checkpoint saved under Ferry holds; never a look-alike or prose."""
    known = ("/mnt/a", "/ferry/assets/teacher")
    if moved is None:
        with pytest.raises(ValueError, match="does not lie below /mnt/a"):
            moved_path(path, known, "/x")
    else:
        assert moved_path(path, known, "/x") == moved


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (Gate, {"name": "g", "line": "PASS ({totl})", "before_update": 3}, "totl} is none of"),
        (FirstUpdate, {"update": 3, "learning_rate": 1e-5, "loss": (0.3, 0.1)}, "lowest, highest"),
        (KillLine, {"name": "k", "metric": "gpu_gib"}, "either 'any'"),
        (KillLine, {"name": "k", "any": ("loss",), "becomes": "not_finite", "over": 1.0}, "either 'any'"),
    ],
)
def test_a_rule_that_cannot_hold_is_refused_when_it_is_read(
    model: type[documents.Document], fields: dict[str, Any], message: str
) -> None:
    """Not at update 2,101 of 3,852."""
    with pytest.raises(pydantic.ValidationError, match=message):
        model.model_validate(fields)


def test_the_example_survives_being_written_again() -> None:
    """What is packed from it is the same spec."""
    spec = documents.load(RunSpec, g3a1.EXAMPLE)
    from runner.pack import render_spec

    assert documents.parse(RunSpec, render_spec(spec), "again") == spec
