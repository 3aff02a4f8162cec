"""`ferry doctor` as a whole: what is asked, time limits, recordings, the table, exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from runner import doctor, observe
from runner.doctor_check import Asked, State
from runner.errors import ExitCode, Refusal
from runner.observations import engine_seen, from_json, to_json
from tests.builder import make_bundle, snapshot
from tests.conftest import PROJECT
from tests.doctor_hosts import FIXTURES, FOUR, HOSTS, info_says, nvml_says, recorded

H100 = recorded("h100-sxm-4")


def ferry(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `ferry doctor`."""
    return subprocess.run(
        [sys.executable, "-m", "runner", "doctor", *map(str, words)],
        cwd=PROJECT,
        env={**os.environ, "COLUMNS": "80", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def profile(folder: Path, **fields: object) -> Path:
    path = folder / "server.yaml"
    path.write_text(yaml.safe_dump({"ferry": 1, "name": "here", "assets": {}, **fields}))
    return path


@pytest.mark.parametrize("name", HOSTS)
def test_a_recording_is_written_as_it_was_read(name: str) -> None:
    """Byte for byte: what users send is what is judged."""
    raw = (FIXTURES / f"{name}.json").read_bytes()
    assert to_json(from_json(raw, name)) == raw


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{}", b'{"ferry_doctor": 2}', b'{"ferry_doctor": 1, "engine": 7}', b"\xff"]
)
def test_what_is_no_recording_is_refused(raw: bytes, tmp_path: Path) -> None:
    """By name, without a traceback."""
    path = tmp_path / "x.json"
    path.write_bytes(raw)
    done = ferry("--recorded", path)
    assert done.returncode == ExitCode.REFUSED
    assert "not a recording" in done.stderr
    assert "Traceback" not in done.stderr


def test_recorded_servers_end_with_their_exit_code(tmp_path: Path) -> None:
    """0 where nothing is refused, 3 where something is; the JSON says which."""
    server = profile(tmp_path, gpus={"ids": ["0", "1", "2", "3"]})
    good = ferry("--recorded", FIXTURES / "h100-sxm-4.json", "--server", server, "--image", "cuda", "--json")
    assert good.returncode == ExitCode.OK
    checks = json.loads(good.stdout)
    assert {tuple(sorted(check)) for check in checks} == {("check", "expected", "found", "remedy", "state")}
    assert {check["state"] for check in checks} == {"good", "note"}
    bad = ferry("--recorded", FIXTURES / "a100-pcie-3.json", "--server", server, "--json")
    assert bad.returncode == ExitCode.REFUSED
    refused = [check["check"] for check in json.loads(bad.stdout) if check["state"] == "refused"]
    assert refused == ["GPU 3", "GPU 3 present"]


@pytest.mark.parametrize("name", HOSTS)
def test_the_table_fits_80_columns(name: str, tmp_path: Path) -> None:
    """And loses nothing: every finding and every remedy can be read in it."""
    server = profile(tmp_path, gpus={"ids": ["0", "1", "2", "3"]})
    done = ferry("--recorded", FIXTURES / f"{name}.json", "--server", server)
    assert max(map(len, done.stdout.splitlines())) <= 80
    shown = re.sub(r"\s", "", done.stdout)
    for check in doctor.diagnose(recorded(name), doctor.asked_of(server, None, None, PROJECT)):
        assert re.sub(r"\s", "", check.found) in shown
        assert re.sub(r"\s", "", check.remedy) in shown


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("asked", [FOUR, Asked(), Asked(profile=True), Asked(profile=True, engine="venv")])
def test_what_is_wrong_has_a_remedy(name: str, asked: Asked) -> None:
    """And what is not has none."""
    for check in doctor.diagnose(recorded(name), asked):
        assert check.found
        assert check.expected
        if check.state is not State.NOTE:
            assert bool(check.remedy) is (check.state in (State.WARNING, State.REFUSED)), check


def test_hostile_words_do_not_steer_a_terminal() -> None:
    """A process may be called anything."""
    seen = nvml_says(
        H100,
        {
            "nvmlDeviceGetComputeRunningProcesses 0": [{"pid": 7, "usedGpuMemory": None}],
            "nvmlSystemGetProcessName 7": "\x1b[2J[bold]x[/]\n",
        },
    )
    done = to_json(seen)
    assert b"\x1b" not in done
    import io

    from rich.console import Console

    page = io.StringIO()
    Console(file=page, width=80, force_terminal=True, color_system=None).print(
        doctor.render(doctor.diagnose(seen, FOUR))
    )
    assert "\x1b[2J" not in page.getvalue()
    assert "[bold]x[/]" in page.getvalue()


def test_what_the_documents_ask(tmp_path: Path) -> None:
    """Profile, image and bundle together: GPUs, CUDA from the image's lock, ranks and sizes from the bundle."""
    bundle = make_bundle(tmp_path, update=4)
    server = profile(tmp_path, gpus={"ids": ["0"]}, memory_guard=0.5, shm_bytes=1 << 30)
    asked = doctor.asked_of(server, "cuda", bundle, PROJECT)
    assert (asked.profile, asked.gpus, asked.memory_guard, asked.shm_bytes) == (True, ("0",), 0.5, 1 << 30)
    assert (asked.image, asked.accelerator, asked.cuda) == ("cuda", "cuda", (12, 8))
    assert (asked.ranks, asked.needs_gpus) == (2, True)
    sizes = [path.stat().st_size for path in (bundle / "checkpoint-4").rglob("*") if path.is_file()]
    assert asked.checkpoint_bytes == sum(sizes)
    shards = sum(path.stat().st_size for path in (bundle / "checkpoint-4").rglob("*_optim_states.pt"))
    assert shards > 0
    assert asked.load_peak_bytes is not None
    assert asked.load_peak_bytes >= 2 * shards
    assert doctor.asked_of(None, None, bundle, PROJECT).image == "cpu"


def test_what_the_run_spec_says_that_it_needs_counts(tmp_path: Path) -> None:
    """If it is more than the estimate."""
    bundle = make_bundle(tmp_path, update=4, change=lambda spec: spec.update(needs={"host_memory_gib": 512}))
    asked = doctor.asked_of(None, None, bundle, PROJECT)
    assert (asked.load_peak_bytes, asked.peak_rule) == (512 << 30, "what the run spec says that it needs")


@pytest.mark.parametrize(
    "words",
    [("--server", "absent.yaml"), ("--image", "absent"), ("--bundle", "/proc/sys"), ("--recorded", "absent")],
)
def test_bad_words_are_refused_before_anything_is_looked_at(words: tuple[str, str]) -> None:
    """As everywhere: named, no traceback."""
    done = ferry(*words)
    assert done.returncode in (ExitCode.REFUSED, ExitCode.FAILED)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_engine_that_hangs_does_not_hang_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket that takes the connection and never answers."""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("engine.sock")
        server.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/engine.sock")
        monkeypatch.setattr(observe, "ENGINE_S", 0.5)
        seen = observe.observe(tmp_path, on_step=lambda _: None)
    assert seen.engine.problem == "does not answer within 0.5 s"


def test_no_engine_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the system's words."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    seen = observe.observe(tmp_path, on_step=lambda _: None)
    assert seen.engine.problem is not None
    assert "No such file" in seen.engine.problem


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exec sleep 600", "NVML does not answer within 1.5 s"),
        ("echo Segmentation fault; exit 139", "asking failed: | Segmentation fault"),
    ],
)
def test_a_driver_that_hangs_or_falls_does_not_take_the_doctor_along(
    script: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML is asked by a process of its own."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(observe, "NVML_S", 1.5)
    seen = observe.observe(tmp_path, on_step=lambda _: None)
    assert seen.nvml == {"nvmlInit": {"error": problem}}


def test_what_hangs_is_given_up() -> None:
    """A call that nothing ends, as of a file server that is gone; and what a call raises is raised."""
    for_ever = threading.Event()
    assert observe.within(0.2, for_ever.wait, late=False) is False
    for_ever.set()
    with pytest.raises(OSError, match="gone"):
        observe.within(5, lambda: (_ for _ in ()).throw(OSError("gone")), late=None)


def test_a_recording_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of tokens and never their values; of an engine's answer only what is read."""
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    seen = observe.observe(tmp_path, on_step=lambda _: None)
    assert seen.secrets == ("HF_TOKEN",)
    assert (seen.hub.exists, seen.hub.size_bytes) == (True, 0)
    proxied = {
        "HttpProxy": "http://user:verysecret@proxy",
        "Labels": ["a=verysecret"],
        "RegistryConfig": {"a": "verysecret"},
    }
    kept = engine_seen(
        {**proxied, "ServerVersion": "28"}, {"ApiVersion": "1.51", "GitCommit": "x"}, None, None
    )
    assert kept.info == {"ServerVersion": "28", "Runtimes": {}}
    assert b"verysecret" not in to_json(dataclasses.replace(seen, engine=kept))


def test_this_host_is_recorded_and_judged_alike(tmp_path: Path) -> None:
    """For real: nothing but the recording is written, and it gives the same lines again."""
    place = tmp_path / "runs"
    place.mkdir()
    before = snapshot(place)
    record = tmp_path / "seen.json"
    now = ferry("--run", place, "--record", record, "--json", DOCKER_HOST=f"unix://{tmp_path}/no.sock")
    assert now.returncode == ExitCode.REFUSED
    assert snapshot(place) == before
    again = ferry("--recorded", record, "--json")
    assert json.loads(again.stdout) == json.loads(now.stdout)
    assert [line["check"] for line in json.loads(now.stdout) if line["state"] == "refused"] == ["engine"]


@pytest.mark.engine
def test_the_engine_of_this_host_answers(tmp_path: Path) -> None:
    """The real one: API and versions as the tests need them, and its answer recorded."""
    record = tmp_path / "seen.json"
    done = ferry("--run", tmp_path, "--record", record, "--json")
    states = {line["check"]: line["state"] for line in json.loads(done.stdout)}
    assert states["engine"] == states["image store"] == states["compose"] == states["buildx"] == "good"
    assert set(recorded("cgroup-v1").engine.info) <= set(from_json(record.read_bytes(), "x").engine.info)


def test_the_page_lists_every_check() -> None:
    """docs/reference/doctor.md has a row for every name that a line can have."""
    page = (PROJECT / "docs" / "reference" / "doctor.md").read_text()
    rows = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    source = "".join(path.read_text() for path in sorted((PROJECT / "runner").glob("doctor_*.py")))
    names = {re.sub(r"\{[^}]*\}", "N", name) for name in re.findall(r'Check\(\s*f?"([^"]+)"', source)}
    names |= set(re.findall(r'\("(buildx|compose)", seen', source)) | {"locked memory", "open files"}
    assert rows == names


def test_a_refusal_needs_a_line(tmp_path: Path) -> None:
    """Warnings alone end with 0."""
    path = tmp_path / "seen.json"
    path.write_bytes(to_json(info_says(dataclasses.replace(H100, clock=(1970, False)), MemoryLimit=False)))
    done = ferry("--recorded", path)
    assert done.returncode == ExitCode.OK
    assert done.stdout.splitlines()[-1].startswith("2 warning, ")
    with pytest.raises(Refusal):
        from_json(b"{}", "x")
