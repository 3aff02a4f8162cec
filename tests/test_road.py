"""The whole road with real containers and the scripted trainer: every step as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from runner.errors import ExitCode
from runner.plan import container_name
from runner.run import RunFolder
from tests.builder import Pin, make_bundle, make_server, snapshot
from tests.conftest import PROJECT

pytestmark = pytest.mark.engine


def ferry(*words: object, code: int = 0) -> str:
    """Run `ferry` to its end, see that it ends with `code`, and return what it printed."""
    command = [sys.executable, "-m", "runner", *map(str, words)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    assert f'File "{PROJECT}/runner' not in done.stderr, "a traceback of Ferry's own"
    return done.stdout + done.stderr


def compose(run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run docker compose on the prepared run `run`, from Ferry's own folder."""
    command = ["docker", "compose", "--env-file", str(run / "compose.env"), *words]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(autouse=True)
def _no_container_left(client: docker.DockerClient, tmp_path: Path) -> Iterator[None]:
    """Remove the containers of runs that a test left, whatever happened to it, and of no other test's runs."""
    yield
    for container in client.containers.list(all=True, filters={"label": "ferry.run=tiny"}):
        if any(mount["Source"].startswith(f"{tmp_path}/") for mount in container.attrs["Mounts"]):
            container.remove(force=True)


def stop_at(run: Path, update: int) -> None:
    """Wait until the segment is open, then ask it to stop at `update`."""
    folder = RunFolder(run)
    opened = len(folder.links())
    deadline = time.monotonic() + 120
    while len(list(folder.segments.glob("*.json"))) <= opened:
        assert time.monotonic() < deadline, "the start program did not open a segment"
        time.sleep(0.05)
    ferry("stop", run, "--at-update", update)


def test_a_run_that_moves_is_the_run_that_never_moved(tmp_path: Path, cpu_pin: Pin) -> None:
    """Start, stop, pack, move, resume under other paths: equal to a control, with nothing of A left at B."""
    start = make_bundle(tmp_path, pin=cpu_pin, args=("--seconds", "0.3"))
    control, on_a, on_b = tmp_path / "c" / "run", tmp_path / "a" / "run", tmp_path / "b" / "elsewhere" / "run"
    for name, run in (("control", control), ("server-a", on_a)):
        profile = make_server(tmp_path / name, name) if (tmp_path / name).mkdir() is None else Path()
        assert "PREPARE_OK" in ferry("prepare", start, "--server", profile, "--run", run)
    assert "FINISHED at update 6 of 6" in ferry("resume", control)
    ferry("resume", on_a, "--detach")
    stop_at(on_a, 3)
    engine = docker.from_env()
    engine.containers.get(container_name("tiny", on_a)).wait(timeout=120)
    status = json.loads(ferry("status", on_a, "--json"))
    assert (status["verdict"], status["update"], status["checkpoint"]) == ("stopped", 3, "checkpoint-3")

    packed = tmp_path / "packed"
    assert "PACKED" in ferry("pack", on_a, "-o", packed)
    assert "run folder is sealed" in ferry("resume", on_a, code=ExitCode.REFUSED)
    before = snapshot(packed)
    (tmp_path / "server-b").mkdir()
    ferry("prepare", packed, "--server", make_server(tmp_path / "server-b", "server-b"), "--run", on_b)
    assert "FINISHED at update 6 of 6" in ferry("resume", on_b)
    assert snapshot(packed) == before
    assert "EXACT: 6 of 6 updates" in ferry("compare", control, on_b)
    _nothing_of_a(on_b, [str(tmp_path / "server-a"), str(on_a), "server-a"])
    links = RunFolder(on_b).links()
    assert [(link.server, link.first_update, link.last_update, link.verdict) for link in links] == [
        ("server-a", 1, 3, "stopped"),
        ("server-b", 4, 6, "finished"),
    ]


def _nothing_of_a(run: Path, words: list[str]) -> None:
    """Nothing below `run` mentions `words`, but lineage and the record of the rebase."""
    allowed = {"lineage.jsonl", "REBASE_RECORD.json"}
    for path in run.rglob("*"):
        if path.is_file() and path.name not in allowed:
            content = path.read_bytes()
            assert not [word for word in words if word.encode() in content], path


def ready(folder: Path, pin: Pin, **options: Any) -> tuple[Path, Path]:
    """Return a bundle and a run folder prepared from it."""
    bundle = make_bundle(folder, pin=pin, **options)
    run = folder / "run"
    ferry("prepare", bundle, "--server", make_server(folder), "--run", run)
    return bundle, run


def test_compose_trains_and_ferry_knows_how_it_ended(tmp_path: Path, cpu_pin: Pin) -> None:
    """The second door alone: identity line first, a verdict afterwards, and a second `up` continues."""
    _, run = ready(tmp_path, cpu_pin, update=4)
    up = compose(run, "up", "trainer")
    assert up.returncode == 0, up.stderr
    lines = [line for line in up.stdout.splitlines() if "FERRY IDENTITY" in line]
    assert len(lines) == 1
    for word in ("image=", "lock=", "code=", "contract=", "checkpoint="):
        assert word + "" in lines[0]
    assert "FINISHED" not in up.stdout
    assert json.loads(ferry("status", run, "--json"))["verdict"] == "finished"
    assert len(RunFolder(run).links()) == 1


@pytest.mark.parametrize(
    "name", ["checkpoint-4/rng_state_1.pth", "data/train.jsonl", "source/code.tar.gz", "SHA256SUMS"]
)
def test_one_bit_flipped_after_preparing_is_refused_by_both_doors(
    tmp_path: Path, cpu_pin: Pin, name: str
) -> None:
    """The file is named, nothing is trained, and nothing changes."""
    bundle, run = ready(tmp_path, cpu_pin, update=4)
    content = bytearray((bundle / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / name).write_bytes(content)
    before = snapshot(tmp_path)
    shown = ferry("resume", run, code=ExitCode.REFUSED)
    assert name in shown
    assert snapshot(tmp_path) == before
    if name != "SHA256SUMS":  # Not part of what the container is given to check: the files themselves are.
        up = compose(run, "up", "trainer")
        assert f"/ferry/bundle/{name}" in up.stdout + up.stderr
        assert list(RunFolder(run).segments.iterdir()) == []


def test_compose_keeps_two_runs_apart(tmp_path: Path, cpu_pin: Pin, client: docker.DockerClient) -> None:
    """Starting a second run by compose does not replace the container of the first."""
    _, first = ready(tmp_path / "1", cpu_pin, updates=400, args=("--seconds", "0.2"))
    _, second = ready(tmp_path / "2", cpu_pin, update=4)
    assert compose(first, "up", "--detach", "trainer").returncode == 0
    assert compose(second, "up", "trainer").returncode == 0
    assert client.containers.get(container_name("tiny", first)).status == "running"
    assert json.loads(ferry("status", second, "--json"))["verdict"] == "finished"


def test_changed_code_is_refused_inside(tmp_path: Path, cpu_pin: Pin) -> None:
    """The tree id is checked in the container, on what will be imported."""
    _, run = ready(tmp_path, cpu_pin, update=4)
    path = RunFolder(run).code / "scripted" / "train.py"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes() + b"\n")
    shown = ferry("resume", run, code=ExitCode.REFUSED)
    assert "code tree differs" in shown


def test_a_sealed_run_is_refused_by_compose_too(tmp_path: Path, cpu_pin: Pin) -> None:
    """The seal is read inside: no door trains a run that lives elsewhere."""
    _, run = ready(tmp_path, cpu_pin, update=4)
    ferry("pack", run, "-o", tmp_path / "packed")
    up = compose(run, "up", "trainer")
    assert "run folder is sealed" in up.stdout + up.stderr
    assert list(RunFolder(run).segments.iterdir()) == []


def test_two_writers_are_impossible(tmp_path: Path, cpu_pin: Pin) -> None:
    """A second resume, and packing, are refused while the first trains; then it is stopped."""
    _, run = ready(tmp_path, cpu_pin, updates=400, args=("--seconds", "0.2"))
    ferry("resume", run, "--detach")
    stop_at(run, 399)
    assert "lease is held" in ferry("resume", run, code=ExitCode.LEASE_HELD)
    assert "the run is running" in ferry("pack", run, "-o", tmp_path / "packed", code=ExitCode.LEASE_HELD)
    assert "STOPPED; resume continues from checkpoint-" in ferry("stop", run)
    assert json.loads(ferry("status", run, "--json"))["verdict"] == "stopped"


def test_a_crash_is_a_failure_and_the_next_start_continues(tmp_path: Path, cpu_pin: Pin) -> None:
    """Exit 1 at update 5; resumed from 4; equal to a run without the crash."""
    _, crashed = ready(tmp_path / "x", cpu_pin, args=("--crash-at", "5"))
    assert "FAILED" in ferry("resume", crashed, code=ExitCode.FAILED)
    assert [link.verdict for link in RunFolder(crashed).links()] == ["failed"]
    status = json.loads(ferry("status", crashed, "--json"))
    assert (status["checkpoint"], status["verdict"]) == ("checkpoint-4", "failed")


def test_a_killed_container_is_not_a_success(
    tmp_path: Path, cpu_pin: Pin, client: docker.DockerClient
) -> None:
    """SIGKILL from outside: forced, its own exit code, and resumable."""
    _, run = ready(tmp_path, cpu_pin, updates=400, args=("--seconds", "0.2"))
    ferry("resume", run, "--detach")
    stop_at(run, 399)
    client.containers.get(container_name("tiny", run)).kill()
    client.containers.get(container_name("tiny", run)).wait(timeout=60)
    assert json.loads(ferry("status", run, "--json"))["verdict"] == "forced"


def test_a_dry_run_changes_nothing(tmp_path: Path, cpu_pin: Pin) -> None:
    """Plan shown, disk as it was."""
    bundle = make_bundle(tmp_path, pin=cpu_pin, update=4)
    server = make_server(tmp_path)
    before = snapshot(tmp_path)
    shown = ferry("prepare", bundle, "--server", server, "--run", tmp_path / "run", "--dry-run")
    assert "docker run" in shown
    assert snapshot(tmp_path) == before
    ferry("prepare", bundle, "--server", server, "--run", tmp_path / "run")
    before = snapshot(tmp_path)
    plan = json.loads(ferry("resume", tmp_path / "run", "--dry-run", "--json"))
    assert plan["launch"]["checkpoint"] == "checkpoint-4"
    ferry("pack", tmp_path / "run", "-o", tmp_path / "packed", "--dry-run")
    assert snapshot(tmp_path) == before


def test_an_image_that_is_not_the_pinned_one_is_refused(tmp_path: Path, cpu_pin: Pin) -> None:
    """Another digest or another lock is another environment; nothing is pulled in its place."""
    wrong = Pin(cpu_pin.name, "sha256:" + "0" * 64, "sha256:" + "1" * 64, "sha256:" + "2" * 64)
    bundle = make_bundle(tmp_path, pin=wrong, update=4)
    before = snapshot(tmp_path)
    ferry(
        "prepare",
        bundle,
        "--server",
        make_server(tmp_path / "s"),
        "--run",
        tmp_path / "run",
        code=ExitCode.REFUSED,
    )
    assert {name: digest for name, digest in snapshot(tmp_path).items() if not name.startswith("s")} == before


def test_refusals_are_json_for_programs(tmp_path: Path) -> None:
    """What, where, expected, found, fix: as fields."""
    refused = json.loads(ferry("verify", tmp_path, "--json", code=ExitCode.REFUSED))
    assert refused["refused"][0]["what"] == "not a bundle"
    assert set(refused["refused"][0]) == {"what", "where", "expected", "found", "fix"}
