"""The start program and the environment it stands in: one changed, added or missing file, and nothing is started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runner import documents
from runner.errors import ExitCode
from runner.image import ImagePin, ReadyImage
from runner.inside.digests import sha256_bytes
from runner.plan import plan_launch
from runner.prepare import prepare
from runner.rebase import rebase
from runner.run import RunFolder
from runner.server import ServerProfile
from runner.verify import open_bundle, verify
from tests.builder import Pin, make_bundle, make_server, snapshot
from tests.conftest import PROJECT
from tests.image.environment import PACKAGES, SITE, make_environment
from tests.test_rebase_plan import HOST

# As runner.venv_engine starts it.
START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from runner.inside.start import main; main()"


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A good environment, of the venv engine."""
    return make_environment(tmp_path / "venv")


@pytest.fixture
def run(tmp_path: Path, venv: Path) -> RunFolder:
    """A run that was prepared for that environment."""
    lock = "sha256:" + sha256_bytes((venv / "lock.txt").read_bytes())
    profile = make_server(tmp_path, engine="venv", venv=str(venv))
    bundle = make_bundle(tmp_path, update=4, pin=Pin(lock=lock))
    folder = RunFolder(tmp_path / "run")
    output = str(folder.path / "output")
    inputs = rebase(verify(open_bundle(bundle)), documents.load(ServerProfile, profile), output=output)
    ready = ReadyImage(
        pin=ImagePin("cpu", "sha256:0", "sha256:0", lock),
        reference=str(venv),
        lock_file=str(venv / "lock.txt"),
        site_packages=str(venv / SITE),
        python=sys.executable,
        environment={},
    )
    prepare(inputs, plan_launch(inputs, ready, folder.path, HOST), folder, profile.read_bytes())
    # As the venv engine links it.
    (folder.path / "output" / "checkpoint-4").rmdir()
    (folder.path / "output" / "checkpoint-4").symlink_to(bundle / "checkpoint-4")
    return folder


def start(run: RunFolder) -> subprocess.CompletedProcess[str]:
    """Run the start program. What it becomes is no torchrun here: Python without torch, or without the trainer."""
    command = [sys.executable, "-I", "-c", START, str(PROJECT), str(run.launch_file)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_in_a_good_environment_a_segment_is_opened(run: RunFolder) -> None:
    """Everything is checked, the identity line printed, and the start program becomes what it starts."""
    assert "FERRY IDENTITY" in start(run).stdout


BREAKS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "environment differs: content": (f"{SITE}/other.py", lambda path: path.write_bytes(b"import evil\n")),
    "not in the environment's list": (f"{SITE}/torch.py", Path.touch),
    "missing from the environment": (f"{SITE}/good/op.so", Path.unlink),
}


@pytest.mark.parametrize("what", BREAKS)
def test_one_file_changed_added_or_missing_is_refused(venv: Path, run: RunFolder, what: str) -> None:
    """By its name, with the exit code of a refusal; no segment is opened and nothing is written."""
    name, change = BREAKS[what]
    change(venv / name)
    before = snapshot(run.path)
    done = start(run)
    assert done.returncode == ExitCode.REFUSED
    assert "FERRY REFUSES: 1 fault(s), nothing was started" in done.stderr
    assert f"{what}: {venv}/{name}" in done.stderr
    assert "FERRY IDENTITY" not in done.stdout
    after = snapshot(run.path)
    assert {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)} <= {"lease"}


def test_all_that_is_wrong_is_told_at_once(venv: Path, run: RunFolder) -> None:
    """A package that is gone from the lock's view and from the list's, and a code tree that was changed as well."""
    for path in sorted((venv / SITE / "other-1.dist-info").iterdir()):
        path.unlink()
    (run.path / "code" / "more.py").touch()
    done = start(run)
    assert sorted(PACKAGES) == ["good", "other"]
    for what in ("package is missing", "missing from the environment", "code tree differs"):
        assert what in done.stderr
