"""The built image 'cpu', in real containers: what it says of itself, and what it does without a compiler."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import docker
import pytest

from runner.errors import Refusal
from runner.image import ImagePin, ReadyImage, build, check_in_engine
from runner.image_inputs import read_inputs
from runner.image_pins import Pinned, write_pin
from runner.image_verify import verify_image
from tests.builder import Pin
from tests.conftest import PROJECT

pytestmark = pytest.mark.engine

STEP = """
import os
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

weight = torch.nn.Parameter(torch.ones(64))
optimizer = DeepSpeedCPUAdam([weight], lr=0.5)
weight.grad = torch.ones(64)
optimizer.step()
ShareMemCommBuilder().load()
print("WEIGHT", round(weight[0].item(), 6), "EXTENSIONS", os.listdir(os.environ["TORCH_EXTENSIONS_DIR"]))
"""
LOCK = """
import sys
from pathlib import Path
sys.path.insert(0, "/opt/ferry")
from runner.inside.lock import installed, lock_faults
site = Path(next(path for path in sys.path if path.endswith("site-packages")))
print("FAULTS", [str(fault) for fault in lock_faults(Path("/opt/ferry/lock.txt"), site)], "OF", len(installed(site)))
"""

BYTE_CODE = """
from pathlib import Path
count, checked = 0, []
for root in ("/usr/lib/python3.11", "/opt/venv"):
    for path in Path(root).rglob("*.pyc"):
        with path.open("rb") as file:
            flags = int.from_bytes(file.read(8)[4:], "little")
        count += 1
        if flags != 1:
            checked.append(str(path))
print("CHECKED", checked, "MANY", count > 5000)
"""


@pytest.fixture(scope="module")
def ready(cpu_pin: Pin, client: docker.DockerClient) -> ReadyImage:
    """The image that the project's files describe."""
    return check_in_engine(
        ImagePin(cpu_pin.name, cpu_pin.digest, cpu_pin.config, cpu_pin.lock), PROJECT, client
    )


def inside(client: docker.DockerClient, ready: ReadyImage, *command: str, **options: Any) -> str:
    """Return what `command` prints in a container like a run's: no network, read-only, no capability, any user."""
    container = client.containers.create(
        ready.reference,
        entrypoint=list(command),
        network_mode="none",
        read_only=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        tmpfs={"/tmp": "rw,mode=1777", "/tmp/extensions": "rw,mode=1777"},
        environment={"HOME": "/tmp", "TORCH_EXTENSIONS_DIR": "/tmp/extensions", "OMP_NUM_THREADS": "1"},
        **options,
    )
    try:
        container.start()
        status = container.wait()["StatusCode"]
        output = container.logs().decode()
    finally:
        container.remove(force=True)
    assert status == 0, output
    return str(output)


def test_cpu_adam_steps_without_a_compiler_and_compiles_nothing(
    client: docker.DockerClient, ready: ReadyImage
) -> None:
    """The prebuilt op is the one that runs: the extensions folder of the run stays empty."""
    assert "WEIGHT 0.5 EXTENSIONS []" in inside(
        client, ready, ready.python, "-I", "-c", STEP, user="12345:54321"
    )


def test_there_is_no_compiler_no_pip_and_no_list_of_mirrors(
    client: docker.DockerClient, ready: ReadyImage
) -> None:
    """Nothing in the image can build or install."""
    script = (
        "for name in gcc g++ cc c++ clang ld as make pip pip3 nvcc; do command -v $name; done; "
        "ls /opt/venv/bin | grep -i pip; ls -A /etc/apt/sources.list.d /var/lib/apt/lists/*; "
        "grep -v '^#' /etc/apt/sources.list; cat /etc/machine-id; cat /opt/venv/lib/python3*/site-packages/*/direct_url.json; :"
    )
    output = inside(client, ready, "/bin/sh", "-c", script + " 2>/dev/null")
    assert "://" not in output.replace("file:///build/built/", "")
    assert [line for line in output.split() if line.startswith(("/usr", "/opt/venv/bin"))] == []


def test_the_environment_equals_the_lock(client: docker.DockerClient, ready: ReadyImage) -> None:
    """Compared inside, as the start program does it: 47 packages, none missing, none more, none different."""
    assert "FAULTS [] OF 47" in inside(client, ready, ready.python, "-I", "-c", LOCK)


def test_no_byte_code_holds_a_time(client: docker.DockerClient, ready: ReadyImage) -> None:
    """All of it is unchecked-hash (PEP 552): its bytes do not depend on when or in which environment it was built."""
    assert "CHECKED [] MANY True" in inside(client, ready, ready.python, "-I", "-c", BYTE_CODE)


def test_identity_equals_labels(client: docker.DockerClient, ready: ReadyImage) -> None:
    """What the image says inside is what the engine says of it."""
    identity = json.loads(inside(client, ready, "/bin/cat", "/opt/ferry/IDENTITY"))
    labels = client.images.get(ready.reference).labels
    for key in ("name", "lock", "files", "python", "accelerator", "arch"):
        assert labels[f"ferry.{key}"] == identity[key]
    assert labels["ferry.ops"].split() == identity["ops"] == ["cpu_adam", "shm_comm"]
    assert labels["ferry.cpu_flags"].split() == identity["cpu_flags"]
    assert json.loads(labels["ferry.versions"]) == identity["versions"]
    assert labels["org.opencontainers.image.base.digest"] == identity["base"]


def test_verify_reads_all_of_it_from_inside(cpu_pin: Pin) -> None:
    """Every package's RECORD, every file of the list, the standard library by Debian's sums: nothing differs."""
    done = verify_image("cpu", PROJECT)
    assert (done.pin.digest, done.pinned_by) == (cpu_pin.digest, "the last build")
    report = done.report
    assert (report.packages, report.faults, report.notes) == (47, [], [])
    assert report.files > report.byte_code > 5000
    assert report.library_files > 500


def test_verify_names_what_was_put_into_an_image(
    client: docker.DockerClient, ready: ReadyImage, tmp_path: Path
) -> None:
    """Pinned by mistake: its digest is the pinned one, and what is in it is not what its packages brought."""
    evil = "/opt/venv/lib/python3.11/site-packages/evil.py"
    for name in ("Dockerfile", "lockfiles", "runner"):
        (tmp_path / name).symlink_to(PROJECT / name)
    shutil.copytree(PROJECT / "images", tmp_path / "images")
    tag = "ferry/verify-names"
    base = read_inputs("cpu", PROJECT).tag
    recipe = f"FROM {base}\nUSER 0:0\nRUN --network=none touch {evil} /opt/ferry/torch.py\nUSER 65534:65534\n"
    command = ["docker", "buildx", "build", "--provenance=false", "--output", f"type=image,name={tag}", "-"]
    subprocess.run(command, input=recipe, text=True, check=True, capture_output=True)
    try:
        changed = str(client.images.get(tag).id)
        write_pin(
            tmp_path,
            "cpu",
            Pinned(digest=changed, config=changed, lock=ready.pin.lock, inputs=ready.pin.lock),
        )
        with pytest.raises(Refusal) as caught:
            verify_image("cpu", tmp_path)
    finally:
        client.images.remove(tag)
    assert {(fault.what, fault.where) for fault in caught.value.faults} == {
        ("not in the environment's list", evil),
        ("not in the environment's list", "/opt/ferry/torch.py"),
        ("belongs to no package", evil),
    }


def test_the_sbom_names_every_package(client: docker.DockerClient, ready: ReadyImage) -> None:
    """Whoever has docker and the image alone can read it: 47 Python packages, and Debian's."""
    bom = json.loads(inside(client, ready, "/bin/cat", "/opt/ferry/sbom.cdx.json"))
    kinds = [part["purl"].partition("/")[0] for part in bom["components"]]
    assert (kinds.count("pkg:pypi"), kinds.count("pkg:deb") > 50) == (47, True)
    assert "pkg:pypi/deepspeed@0.19.8" in {part["purl"] for part in bom["components"]}


def test_it_does_not_run_as_root_by_itself(client: docker.DockerClient, ready: ReadyImage) -> None:
    """Without a user the container has nobody's rights."""
    assert inside(client, ready, "/usr/bin/id", "-u").strip() == "65534"


def test_the_start_program_is_the_entry_point(client: docker.DockerClient, ready: ReadyImage) -> None:
    """A container started without a launch says how it is used, and ends with the exit code for that."""
    container = client.containers.create(ready.reference, network_mode="none", read_only=True)
    try:
        container.start()
        assert container.wait()["StatusCode"] == 2
        assert container.logs().decode() == "usage: start LAUNCH.json\n"
    finally:
        container.remove(force=True)


def test_a_second_build_is_the_same_pin_and_builds_nothing(cpu_pin: Pin) -> None:
    """The inputs are compared, not the time: not one step runs."""
    lines: list[str] = []
    pin = build("cpu", PROJECT, on_line=lines.append)
    assert (pin.digest, pin.config, pin.lock) == (cpu_pin.digest, cpu_pin.config, cpu_pin.lock)
    assert lines == []


def test_the_config_digest_alone_finds_nothing_that_is_not_there(
    client: docker.DockerClient, ready: ReadyImage
) -> None:
    """An image that this engine does not have is refused with what is there; nothing is pulled."""
    absent = "sha256:" + "e" * 64
    with pytest.raises(Refusal) as caught:
        check_in_engine(ImagePin("cpu", absent, absent, ready.pin.lock), PROJECT, client)
    (fault,) = caught.value.faults
    assert fault.what == "image is not in the engine"
    assert ready.reference in fault.found


def test_an_image_with_another_lock_is_refused(client: docker.DockerClient, ready: ReadyImage) -> None:
    """The digest is there, but the lock that the bundle pins is another one: named with both."""
    other = "sha256:" + "d" * 64
    pin = ImagePin("gpu", ready.pin.digest, ready.pin.config, other)
    with pytest.raises(Refusal) as caught:
        check_in_engine(pin, PROJECT, client)
    assert [(fault.expected, fault.found) for fault in caught.value.faults] == [
        (other, ready.pin.lock),
        ("gpu", "cpu"),
    ]
