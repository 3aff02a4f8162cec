"""The launch plan on the real engine: what a container is by every door, and what it looks like from inside."""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from runner import compose as composing
from runner import documents, screen
from runner.docker_engine import DockerEngine, create_arguments
from runner.engine_info import cdi_devices
from runner.engines import ready_image
from runner.errors import ExitCode
from runner.facts import host_facts
from runner.plan import container_name, plan_launch
from runner.prepare import prepare
from runner.rebase import rebase
from runner.run import RunFolder
from runner.server import ServerProfile
from runner.verify import open_bundle, verify
from tests.builder import Pin, make_bundle, make_server, snapshot
from tests.conftest import PROJECT
from tests.test_road import _no_container_left, compose, ferry  # noqa: F401 - a fixture

pytestmark = pytest.mark.engine

CDI = Path("/etc/cdi")
SHM = 1 << 30
ARGS = ("--look", "--seconds", "0.01")
# The environment that images/ gives: Python's, and which accelerator DeepSpeed was built for.
IMAGES_OWN = {"PATH", "DS_ACCELERATOR"}
# What torchrun makes anew each time, and the segment's own name.
PER_START = {"FERRY_SEGMENT", "HOSTNAME", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
SAME = ("user", "shm_bytes", "limits", "authority", "init", "zombies", "interfaces", "writable")


class FakeGpus:
    """CDI devices `nvidia.com/gpu=N` of nodes that are all /dev/null, in a spec that is taken away again."""

    def __init__(self, spec: Path) -> None:
        self._spec = spec

    def put(self, count: int) -> None:
        """Let there be `count` of them, and `all`, as nvidia-ctk writes it."""
        nodes = [{"path": f"/dev/nvidia{index}", "hostPath": "/dev/null"} for index in range(count)]
        devices = [
            {"name": str(index), "containerEdits": {"deviceNodes": [node]}}
            for index, node in enumerate(nodes)
        ]
        devices.append({"name": "all", "containerEdits": {"deviceNodes": nodes}})
        aside = self._spec.with_suffix(".new")
        aside.write_text(json.dumps({"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices}))
        aside.rename(self._spec)


@pytest.fixture
def gpus(client: docker.DockerClient) -> Iterator[FakeGpus]:
    """Four fake GPUs, for one test at a time on this host."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to write a CDI spec into /etc/cdi")
    with (Path(tempfile.gettempdir()) / "ferry-test-cdi.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if any(name.startswith("nvidia.com/gpu=") for name in cdi_devices(client.info())):
            pytest.skip("this host has GPUs of its own, and two specs that name one device annul each other")
        made = not CDI.exists()
        CDI.mkdir(exist_ok=True)
        spec = CDI / "ferry-test.json"
        try:
            fake = FakeGpus(spec)
            fake.put(4)
            yield fake
        finally:
            spec.unlink(missing_ok=True)
            if made:
                CDI.rmdir()


@pytest.fixture
def _proxied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller whose docker configuration names a proxy, with a password."""
    folder = tmp_path / "docker config"
    folder.mkdir()
    proxies = dict.fromkeys(("httpProxy", "httpsProxy", "allProxy", "noProxy"), "http://me:secret@proxy:1")
    (folder / "config.json").write_text(json.dumps({"proxies": {"default": proxies}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    monkeypatch.setenv("MY_OWN_TOKEN", "secret")


IGNORED = {
    "Id",
    "Created",
    "Path",
    "ResolvConfPath",
    "HostnamePath",
    "HostsPath",
    "LogPath",
    "State",
    "GraphDriver",
}


def inspected(client: docker.DockerClient, name: str) -> dict[str, Any]:
    """Return what the engine says of a container, without what differs between any two and compose's labels."""
    attrs: dict[str, Any] = client.api.inspect_container(name)
    kept = {key: value for key, value in attrs.items() if key not in IGNORED and key != "NetworkSettings"}
    config = kept["Config"]
    config["Labels"] = {
        key: value for key, value in config["Labels"].items() if not key.startswith("com.docker.compose.")
    }
    config.pop("Hostname")
    for stream in ("AttachStdin", "AttachStdout", "AttachStderr"):
        config.pop(stream)  # Who listens to the client's call, not what the container is.
    config["Env"] = sorted(config["Env"])
    kept["Mounts"] = sorted(kept["Mounts"], key=lambda mount: str(mount["Destination"]))
    # The engine orders mounts by their depth itself.
    kept["HostConfig"]["Mounts"] = sorted(
        kept["HostConfig"]["Mounts"], key=lambda mount: str(mount["Target"])
    )
    kept["HostConfig"]["Ulimits"].sort(key=lambda limit: str(limit["Name"]))  # To the engine, a set.
    kept["HostConfig"] = without_empty(kept["HostConfig"])
    return kept


def without_empty(value: Any) -> Any:
    """Return `value` without what says nothing: to the engine, an empty list, {} and null are all "not given"."""
    if isinstance(value, dict):
        kept = {key: without_empty(entry) for key, entry in value.items()}
        return {key: entry for key, entry in kept.items() if entry not in (None, [], {}, "")}
    if isinstance(value, list):
        return [without_empty(entry) for entry in value]
    return value


def difference(one: Any, other: Any) -> dict[str, Any]:
    """Return what is not equal, by field."""
    found = {}
    for part in one.keys() | other.keys():
        left, right = one.get(part), other.get(part)
        if isinstance(left, dict) and isinstance(right, dict):
            found |= {f"{part}.{key}": pair for key, pair in difference(left, right).items()}
        elif left != right:
            found[part] = (left, right)
    return found


def seen(run: Path, number: int) -> dict[str, Any]:
    """Return what the trainer of segment `number` saw."""
    found: dict[str, Any] = json.loads((run / "output" / f"seen-tiny-{number:04}.json").read_text())
    return found


@pytest.mark.usefixtures("_proxied")
def test_every_door_starts_the_same_container(
    tmp_path: Path, cpu_pin: Pin, client: docker.DockerClient, gpus: FakeGpus
) -> None:
    """`ferry resume`, the command that `--dry-run` shows, and compose: `docker inspect` field by field, and from inside."""
    bundle = make_bundle(tmp_path, pin=cpu_pin, update=4, world=4, args=ARGS)
    run = tmp_path / 'r,"u":n'
    server = make_server(tmp_path, gpus={"count": 4}, shm_bytes=SHM)
    ferry("prepare", bundle, "--server", server, "--run", run)
    name = container_name("tiny", run)

    shown = ferry("resume", run, "--dry-run")
    assert "0, 1, 2, 3 by CDI" in shown
    words = json.loads(ferry("resume", run, "--dry-run", "--json"))["docker_run"]
    ferry("resume", run, "--detach")
    client.containers.get(name).wait(timeout=120)
    by_ferry = inspected(client, name)
    assert json.loads(ferry("status", run, "--json"))["verdict"] == "finished"
    client.containers.get(name).remove()

    subprocess.run(words, check=True, capture_output=True, timeout=120)
    client.containers.get(name).wait(timeout=120)
    by_command = inspected(client, name)
    ferry("status", run)
    client.containers.get(name).remove()

    up = compose(run, "up", "trainer")
    assert up.returncode == 0, up.stdout + up.stderr
    by_compose = inspected(client, name)

    assert difference(by_ferry, by_command) == {}
    assert difference(by_ferry, by_compose) == {}
    request = by_ferry["HostConfig"]["DeviceRequests"]
    assert [(one["Driver"], one["DeviceIDs"]) for one in request] == [
        ("cdi", [f"nvidia.com/gpu={index}" for index in range(4)])
    ]
    assert by_ferry["HostConfig"]["RestartPolicy"]["Name"] == "no"
    assert not by_ferry["HostConfig"].get("AutoRemove")
    assert by_ferry["Config"]["StopTimeout"] == 600

    first, *others = (seen(run, number) for number in (1, 2, 3))
    assert [(one["gpus"], one["kernels"], one["extensions"]) for one in (first, *others)] == [
        ([f"nvidia{index}" for index in range(4)], kernels, []) for kernels in ([], ["lock"], ["lock"])
    ]
    for one in others:
        assert difference(one["environment"], first["environment"]).keys() <= PER_START
        assert {key: one[key] for key in SAME} == {key: first[key] for key in SAME}
    assert "secret" not in json.dumps([first, by_ferry])


def test_a_gpu_that_is_gone_is_refused_by_name_before_a_container_starts(
    tmp_path: Path, cpu_pin: Pin, client: docker.DockerClient, gpus: FakeGpus
) -> None:
    """Four asked for and three present: by preparing, by resuming, and by compose; nothing is trained or changed."""
    bundle = make_bundle(tmp_path, pin=cpu_pin, update=4, args=ARGS)
    counted, named = tmp_path / "run", tmp_path / "named"
    ferry("prepare", bundle, "--server", make_server(tmp_path / "c", gpus={"count": 4}), "--run", counted)
    profile = make_server(tmp_path / "n", gpus={"ids": ["0", "1", "2", "3"]})
    ferry("prepare", bundle, "--server", profile, "--run", named)
    gpus.put(3)
    before = snapshot(tmp_path)
    assert "expected 4 GPUs\n    found    there are 3: 0, 1, 2" in ferry(
        "resume", counted, code=ExitCode.REFUSED
    )
    said = ferry("resume", named, code=ExitCode.REFUSED)
    assert "expected the CDI device nvidia.com/gpu=3\n    found    there are 0, 1, 2" in said
    again = ferry("prepare", bundle, "--server", profile, "--run", tmp_path / "new", code=ExitCode.REFUSED)
    assert "nvidia.com/gpu=3" in again
    up = compose(named, "up", "trainer")
    assert up.returncode != 0
    assert "nvidia.com/gpu=3" in up.stderr
    assert snapshot(tmp_path) == before
    state = client.api.inspect_container(container_name("tiny", named))["State"]
    assert (state["Status"], state["StartedAt"][:4]) == ("created", "0001")


def test_a_container_gives_what_the_faults_of_others_lacked(
    tmp_path: Path, cpu_pin: Pin, client: docker.DockerClient
) -> None:
    """64 MB of shm, memlock, outputs of root, a uid without a name, zombies, a 10 s stop (moby 19726, 35910, pytorch 5040)."""
    bundle = make_bundle(tmp_path, pin=cpu_pin, update=4, args=ARGS)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    path = make_server(tmp_path, shm_bytes=SHM, stop_grace_s=77, scratch=str(scratch))
    profile = documents.load(ServerProfile, path)
    inputs = rebase(verify(open_bundle(bundle)), profile)
    image = ready_image(profile, inputs.bundle.spec.image, PROJECT)
    run = RunFolder(tmp_path / "run")
    facts = dataclasses.replace(host_facts(profile), uid=12345, gid=54321)
    plan = plan_launch(inputs, image, run.path, facts)
    prepare(inputs, plan, run, path.read_bytes())
    for place in tmp_path.rglob("*"):
        os.chown(place, 12345, 54321)
    engine = DockerEngine(client)
    engine.start(plan)
    lines: list[str] = []
    state = engine.follow(plan.name, lines.append)
    attributes = client.api.inspect_container(plan.name)
    assert state.exit_code == 0, "\n".join(lines)
    found = seen(run.path, 1)
    assert found["user"] == [12345, 54321, "ferry", "ferry", "ferry"]
    output = [path.stat() for path in run.output.rglob("*") if path.is_file()]
    assert {(entry.st_uid, entry.st_gid) for entry in output} == {(12345, 54321)}
    assert found["shm_bytes"] == SHM
    assert found["limits"] == {name: [limit, limit] for name, limit in plan.limits.items()}
    assert found["authority"] == {"CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1"}
    assert (found["init"], found["zombies"], found["interfaces"]) == ("docker-init", 0, ["lo"])
    assert found["writable"] == ["/ferry/run", "/tmp/caches"]
    assert (plan.caches / "triton" / "lock").exists()
    assert plan.caches.parent == scratch
    named = {entry.partition("=")[0] for entry in attributes["Config"]["Env"]}
    assert named - plan.environment.keys() == IMAGES_OWN
    assert attributes["Config"]["StopTimeout"] == 77
    assert attributes["HostConfig"]["Memory"] == attributes["HostConfig"]["MemorySwap"] == plan.memory_bytes
    assert plan.memory_bytes == int(facts.memory_bytes * profile.memory_guard)


def test_a_request_to_the_runtime_is_the_same_by_every_door(
    tmp_path: Path, cpu_pin: Pin, client: docker.DockerClient
) -> None:
    """Created and not started: without an NVIDIA driver the engine takes the request, and refuses only to start."""
    bundle = make_bundle(tmp_path, pin=cpu_pin, update=4)
    profile = documents.load(ServerProfile, make_server(tmp_path, gpus={"by": "runtime", "ids": ["0", "2"]}))
    inputs = rebase(verify(open_bundle(bundle)), profile)
    image = ready_image(profile, inputs.bundle.spec.image, PROJECT)
    run = RunFolder(tmp_path / "run")
    without = documents.load(ServerProfile, make_server(tmp_path / "2"))
    facts = dataclasses.replace(host_facts(without), gpus=("0", "2"))
    plan = plan_launch(inputs, image, run.path, facts)
    prepare(inputs, plan, run, (tmp_path / "server-a.yaml").read_bytes())
    assert (run.path / "compose.yaml").read_bytes() == composing.render(plan)

    found = []
    words = ["docker", "create", *(word for word in screen.docker_words(plan)[2:] if word != "--detach")]
    for create in (
        lambda: client.api.create_container(**create_arguments(plan, client.api)),
        lambda: subprocess.run(words, check=True, capture_output=True, timeout=60),
        lambda: compose(run.path, "create", "trainer"),
    ):
        create()
        found.append(inspected(client, plan.name))
        client.containers.get(plan.name).remove()
    assert difference(found[0], found[1]) == {}
    assert difference(found[0], found[2]) == {}
    (request,) = found[0]["HostConfig"]["DeviceRequests"]
    assert (request["Driver"], request["DeviceIDs"]) == ("nvidia", ["0", "2"])
    assert request["Capabilities"] == [["compute", "utility", "gpu"]]
    refused = ferry("resume", run.path, code=ExitCode.REFUSED)
    assert "no NVIDIA runtime: server server-a: gpus" in refused


def test_a_job_of_a_scheduler_gives_what_is_its_own_and_no_more(
    tmp_path: Path, cpu_pin: Pin, gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-docker 1227: a container has the job's GPUs, by the server's ids, and its memory; never `all`."""
    bundle = make_bundle(tmp_path, pin=cpu_pin, update=4)
    server = make_server(tmp_path, gpus={"count": 2})
    words = ("prepare", bundle, "--server", server, "--run", tmp_path / "run", "--dry-run", "--json")
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_GPUS": "1,3",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "SLURM_MEM_PER_NODE": "1024",
    }
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    plan = json.loads(ferry(*words))
    assert plan["gpus"] == {"by": "cdi", "ids": ["1", "3"]}
    assert plan["memory_bytes"] == int((1 << 30) * 0.9)
    command = plan["docker_run"]
    devices = [value for word, value in itertools.pairwise(command) if word == "--device"]
    assert devices == ["nvidia.com/gpu=1", "nvidia.com/gpu=3"]
    assert not [word for word in command if "SLURM" in word or "CUDA_VISIBLE" in word]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert "the scheduler's words disagree" in ferry(*words, code=ExitCode.REFUSED)
    assert not (tmp_path / "run").exists()


def test_whoever_listens_and_does_not_read_stops_no_training(
    tmp_path: Path, cpu_pin: Pin, client: docker.DockerClient
) -> None:
    """Moby 22502: a client that is attached and stuck blocks what is printed; the ranks print into files of their own."""
    bundle = make_bundle(tmp_path, pin=cpu_pin, update=4, args=("--shout", "3"))
    run = RunFolder(tmp_path / "run")
    ferry("prepare", bundle, "--server", make_server(tmp_path), "--run", run.path)
    assert compose(run.path, "create", "trainer").returncode == 0
    name = container_name("tiny", run.path)
    stuck = subprocess.Popen(["docker", "start", "--attach", name], stdout=subprocess.PIPE, bufsize=0)
    try:
        deadline = time.monotonic() + 120
        while run.outcome() is None:
            assert time.monotonic() < deadline, "training waits for somebody to read"
            time.sleep(0.05)
        assert client.containers.get(name).status == "running", "nothing was stuck: this test shows nothing"
    finally:
        stuck.kill()  # Not even removing the container gets past a client that is stuck.
        stuck.communicate()
    assert client.containers.get(name).wait(timeout=120)["StatusCode"] == 0
    (log,) = run.output.glob("logs/*/*/attempt_0/0/stdout.log")
    lines = [line for line in log.read_text().splitlines() if line.isdecimal()]
    assert lines == [f"{number:063}" for number in range(3 << 14)]
    assert json.loads(ferry("status", run.path, "--json"))["verdict"] == "finished"


def test_compose_has_nothing_to_say_against_a_prepared_run(tmp_path: Path, cpu_pin: Pin) -> None:
    """`docker compose config` is clean, interpolates nothing of the caller's, and shows the plan's own paths."""
    bundle = make_bundle(tmp_path, pin=cpu_pin, update=4)
    run = tmp_path / "run"
    ferry("prepare", bundle, "--server", make_server(tmp_path), "--run", run)
    checked = compose(run, "config", "--format", "json")
    assert (checked.returncode, checked.stderr) == (0, "")
    services = json.loads(checked.stdout)["services"]
    assert services.keys() == {"trainer"}
    assert str(run / "output") in [
        volume["source"].replace("$$", "$") for volume in services["trainer"]["volumes"]
    ]
