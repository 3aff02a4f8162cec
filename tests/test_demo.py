"""The real thing: real 4-rank training through the whole road, and the kit's exactness, inside the image."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import docker
import pytest

from runner import image, image_verify
from runner.errors import ExitCode
from tests.builder import Pin
from tests.conftest import PROJECT

pytestmark = pytest.mark.engine
EXACT = re.compile(r"^EXACT: 40 of 40 updates, [1-9][0-9]* tensors, 4 ranks$", re.MULTILINE)


def demo(work: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `ferry demo` in `work`."""
    command = [sys.executable, "-m", "runner", "demo", "--work", str(work)]
    env = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=PROJECT, env=env, capture_output=True, text=True, check=False, timeout=1500
    )


@pytest.mark.usefixtures("cpu_pin")
def test_the_demo_moves_a_run_and_it_is_exact(tmp_path: Path) -> None:
    """Stopped at 20 of 40, packed, moved, resumed: every update and tensor equals the control's, and a bundle's bit counts."""
    done = demo(tmp_path / "demo")
    assert done.returncode == ExitCode.OK, done.stdout + done.stderr
    assert EXACT.search(done.stdout)
    assert done.stderr.count("FERRY IDENTITY") == 3
    for rank in range(4):
        assert f"[default{rank}]:SCHEDULE_GATE_PASS (40, 4)" in done.stderr
    assert "NO DOCKER ENGINE" not in done.stderr
    on_a, on_b = tmp_path / "demo/server-a/runs/demo", tmp_path / "demo/server-b/runs/demo"
    contract = "checkpoint-20/resume_contract.json"
    bundled = tmp_path / "demo/server-b/incoming/demo-at-20"
    assert (on_a / "output" / contract).read_bytes() == (bundled / contract).read_bytes()
    assert list((on_b / "output/checkpoint-20").iterdir()) == [], (
        "the bundle's checkpoint is mounted, not copied"
    )


def test_without_an_engine_the_demo_says_so_and_is_exact_too(tmp_path: Path) -> None:
    """The embedded engine: the same lock, the same checks; never in silence. Runs leave the environment as it was."""
    venv = PROJECT / ".ferry" / "venvs" / "cpu"
    image.build_venv("cpu", PROJECT, venv, on_line=print)
    done = demo(tmp_path / "demo", DOCKER_HOST=f"unix://{tmp_path}/no-engine.sock")
    assert done.returncode == ExitCode.OK, done.stdout + done.stderr
    assert EXACT.search(done.stdout)
    assert "NO DOCKER ENGINE ANSWERS" in done.stderr
    assert image_verify.verify_venv("cpu", PROJECT, venv).report.packages == 47


def test_a_resume_never_falls_back(tmp_path: Path, cpu_pin: Pin) -> None:
    """Without an engine, `resume` of a docker run is refused with the remedy."""
    from tests.test_road import ready

    _, run = ready(tmp_path, cpu_pin, update=4)
    env = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/no-engine.sock"}
    command = [sys.executable, "-m", "runner", "resume", str(run)]
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.FAILED
    assert "no Docker engine" in done.stderr


def test_the_kit_is_exact_where_a_plain_resume_is_not(client: docker.DockerClient, cpu_pin: Pin) -> None:
    """The cases of tests/trainer/exactness, in the image: each EXACT, but the one without the cure, which must differ."""
    container = client.containers.create(
        cpu_pin.digest,
        entrypoint=["/opt/venv/bin/python", "-m", "tests.trainer.exactness.road", "--work", "/tmp/road"],
        environment={
            "PYTHONPATH": "/project", "HOME": "/tmp/home", "USER": "ferry", "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0", "MASTER_ADDR": "127.0.0.1",
            "TORCH_EXTENSIONS_DIR": "/tmp/extensions", "TOKENIZERS_PARALLELISM": "false",
        },
        mounts=[
            docker.types.Mount("/project/trainer", str(PROJECT / "trainer"), type="bind", read_only=True),
            docker.types.Mount("/project/tests", str(PROJECT / "tests"), type="bind", read_only=True),
        ],
        tmpfs={"/tmp": "rw,exec,mode=1777,size=4g"},
        user="1234:1234", network_mode="none", read_only=True, cap_drop=["ALL"], init=True, shm_size="2g",
        security_opt=["no-new-privileges:true"],
        working_dir="/project",
    )  # fmt: skip
    try:
        container.start()
        status = container.wait(timeout=1500)["StatusCode"]
        output = container.logs().decode()
    finally:
        container.remove(force=True)
    assert status == 0, output[-4000:]
    cases = dict(re.findall(r"^CASE (\S+) (EXACT|DIFFERS)", output, re.MULTILINE))
    assert cases.pop("uncured") == "DIFFERS"
    assert len(cases) >= 4
    assert set(cases.values()) == {"EXACT"}
