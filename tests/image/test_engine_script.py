"""bin/engine: what it does where it has nothing to do, and where it may do nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import PROJECT

TRACES = ("/etc/apt/preferences.d", "/etc/apt/sources.list.d", "/etc/docker")


def engine(**environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script."""
    return subprocess.run(
        [PROJECT / "bin" / "engine"],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def traces() -> dict[str, bytes]:
    """Return every file that the script could write on this machine."""
    return {
        str(path): path.read_bytes()
        for folder in TRACES
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


@pytest.mark.engine
def test_where_an_engine_answers_nothing_is_changed() -> None:
    """The second call, and every later one, says so and ends well."""
    before = traces()
    for _ in range(2):
        done = engine()
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("engine: Docker ")
    assert traces() == before


def test_an_engine_elsewhere_that_does_not_answer_is_not_replaced(tmp_path: Path) -> None:
    """DOCKER_HOST names the user's engine: none is installed beside it, and the exit status says that nothing was tried."""
    before = traces()
    done = engine(DOCKER_HOST=f"unix://{tmp_path}/none.sock")
    assert done.returncode == 3
    assert (
        "no engine answers there" in " ".join(done.stderr.split())
        or "No Docker engine answers" in done.stderr
    )
    assert traces() == before
