"""The workflow for users' CI: what it calls is there, and nobody else can change what it runs."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from runner.image_spec import load_spec
from tests.conftest import PROJECT

WORKFLOW = PROJECT / ".github" / "workflows" / "image.yml"


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    """The one job, as GitHub reads it."""
    workflow: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())
    (found,) = workflow["jobs"].values()
    assert isinstance(found, dict)
    return found


def recipes_called(text: str) -> list[str]:
    """Return the recipes that a script calls, in order."""
    return re.findall(r"\./just ([a-z-]+)", text)


def test_its_recipes_are_in_the_justfile_and_in_the_projects_own_ci(job: dict[str, Any]) -> None:
    """A recipe that gets another name is noticed here, and not on a Monday in somebody's CI."""
    called = [name for step in job["steps"] for name in recipes_called(step.get("run", ""))]
    assert called == ["engine", "check", "image", "smoke"]
    summary = subprocess.run(
        [PROJECT / ".venv" / "bin" / "just", "--justfile", PROJECT / "Justfile", "--summary"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert set(called) <= set(summary.stdout.split())


def test_every_image_of_the_project_is_built(job: dict[str, Any]) -> None:
    """An image that is added is added here too."""
    names = job["strategy"]["matrix"]["name"]
    assert names == sorted(path.stem for path in (PROJECT / "images").glob("*.yaml") if path.stem != "pins")
    for name in names:
        load_spec(name, PROJECT)


def test_actions_of_others_are_named_by_commit_and_get_no_credentials(job: dict[str, Any]) -> None:
    """A tag can be moved to other code; a commit cannot."""
    used = [step for step in job["steps"] if "uses" in step]
    assert used
    for step in used:
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"])
    assert used[0]["with"]["persist-credentials"] is False


def test_secrets_are_read_in_the_step_that_pushes_and_nowhere_else(job: dict[str, Any]) -> None:
    """A pull request's build sees none, and the step that does does not run for one."""
    readers = [step for step in job["steps"] if "secrets." in str(step)]
    assert [step["name"] for step in readers] == ["Push by digest"]
    assert "github.event_name != 'pull_request'" in readers[0]["if"]
    assert "secrets." not in str(job.get("env", {}))
