"""Links that stand in for mounts: made where nothing is, taken away with the run, never anybody else's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from runner.errors import Refusal
from runner.plan import LaunchPlan
from runner.venv_engine import VenvEngine
from tests.builder import snapshot
from tests.test_rebase_plan import plan_of


def plan_with(folder: Path, links: dict[str, str]) -> LaunchPlan:
    """Return a plan of the venv engine with `links`."""
    return dataclasses.replace(plan_of(folder, engine="venv", venv="/opt/elsewhere"), links=links)


def test_links_come_and_go_with_the_run(tmp_path: Path) -> None:
    """As a container's mounts: another run may know other data by the same origin afterwards."""
    (tmp_path / "data").mkdir()
    origin = tmp_path / "origin" / "images"
    plan = plan_with(tmp_path / "x", {str(origin): str(tmp_path / "data")})
    engine = VenvEngine(tmp_path / "run")
    engine.prepare(plan)
    assert origin.readlink() == tmp_path / "data"
    engine.prepare(plan)
    assert origin.readlink() == tmp_path / "data"
    engine.remove(plan.name)
    assert not origin.is_symlink()


def test_an_operators_own_link_stays(tmp_path: Path) -> None:
    """What was there before the run is there after it."""
    (tmp_path / "data").mkdir()
    (tmp_path / "origin").symlink_to("data")
    engine = VenvEngine(tmp_path / "run")
    plan = plan_with(tmp_path / "x", {str(tmp_path / "origin"): str(tmp_path / "data")})
    engine.prepare(plan)
    engine.remove(plan.name)
    assert (tmp_path / "origin").is_symlink()


def test_what_lies_at_an_origin_is_not_replaced(tmp_path: Path) -> None:
    """All that is taken is named, and no link of the others is left."""
    (tmp_path / "data").mkdir()
    (tmp_path / "taken").write_text("mine")
    links = {str(tmp_path / "free"): str(tmp_path / "data"), str(tmp_path / "taken"): str(tmp_path / "data")}
    plan = plan_with(tmp_path / "x", links)
    before = snapshot(tmp_path)
    with pytest.raises(Refusal, match="origin is taken"):
        VenvEngine(tmp_path / "run").prepare(plan)
    after = snapshot(tmp_path)
    assert {name: state for name, state in after.items() if not name.startswith("run")} == before
