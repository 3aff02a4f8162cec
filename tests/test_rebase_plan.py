"""Assets of a server, and the launch plan that follows from them: pure, complete, least authority."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from runner import compose, documents, screen
from runner.errors import Refusal
from runner.image import ImagePin, ReadyImage
from runner.plan import HostFacts, LaunchPlan, account_files, container_name, plan_launch
from runner.rebase import RebasedInputs, rebase
from runner.server import ServerProfile
from runner.verify import open_bundle, verify
from tests.builder import IMAGES, TEACHER, make_bundle, make_server

IMAGE = ReadyImage(
    pin=ImagePin("cpu", "sha256:" + "b" * 64, "sha256:" + "c" * 64, "sha256:" + "a" * 64),
    reference="sha256:" + "b" * 64,
    lock_file="/opt/ferry/lock.txt",
    site_packages="/opt/venv/lib/python3.11/site-packages",
    python="/opt/venv/bin/python",
    environment={},
)
HOST = HostFacts(uid=1234, gid=99, memory_bytes=100 << 30)


def inputs_of(folder: Path, **profile: object) -> RebasedInputs:
    """Return a bundle at update 4, rebased onto a made-up server."""
    bundle = make_bundle(folder, update=4)
    server = documents.load(ServerProfile, make_server(folder, **profile))
    return rebase(verify(open_bundle(bundle)), server)


def plan_of(folder: Path, host: HostFacts = HOST, **profile: object) -> LaunchPlan:
    """Return the plan of that."""
    return plan_launch(inputs_of(folder, **profile), IMAGE, folder / "run", host)


def test_the_record_says_what_was_mounted_and_that_nothing_changed(tmp_path: Path) -> None:
    """By mount, contract, checkpoint, manifest and fingerprint are what they were; the patch is empty."""
    record = inputs_of(tmp_path).record()
    assert record["files"] == []
    assert record["changed"] == {}
    assert set(record["unchanged"]) == {"contract", "checkpoint", "manifest", "fingerprint"}
    assert all(entry["before"] == entry["after"] for entry in record["unchanged"].values())
    assert [entry["origin"] for entry in record["assets"]] == [IMAGES, TEACHER]


def test_every_asset_fault_is_named_at_once(tmp_path: Path) -> None:
    """A wrong teacher and a missing folder: both, with the hashes."""
    bundle = verify(open_bundle(make_bundle(tmp_path)))
    path = make_server(tmp_path)
    server = documents.load(ServerProfile, path)
    Path(server.assets["teacher"]).write_bytes(b"another teacher")
    moved = Path(server.assets["images"])
    moved.rename(moved.with_name("elsewhere"))
    with pytest.raises(Refusal) as refused:
        rebase(bundle, server)
    assert [fault.what for fault in refused.value.faults] == ["asset missing", "asset is another one"]


def test_an_asset_that_the_profile_lacks_is_asked_for(tmp_path: Path) -> None:
    """The fix is the line to add."""
    bundle = verify(open_bundle(make_bundle(tmp_path)))
    server = documents.load(ServerProfile, make_server(tmp_path)).model_copy(update={"assets": {}})
    with pytest.raises(Refusal) as refused:
        rebase(bundle, server)
    assert "'images: PATH'" in refused.value.faults[0].fix
    assert len(refused.value.faults) == 2


@pytest.mark.parametrize("origin", ["/", "/opt", "/ferry/run", "/opt/venv", "/etc/x", "/tmp/x", "/proc/1"])
def test_no_asset_is_mounted_over_the_containers_own_folders(tmp_path: Path, origin: str) -> None:
    """A bundle is untrusted: its origins cannot cover image, control files or kernel."""

    def change(spec: dict[str, object]) -> None:
        spec["assets"]["teacher"]["origin"] = origin  # type: ignore[index]

    bundle = verify(open_bundle(make_bundle(tmp_path, change=change)))
    with pytest.raises(Refusal, match="origin cannot be mounted over"):
        rebase(bundle, documents.load(ServerProfile, make_server(tmp_path)))


def test_the_plan_is_a_pure_function(tmp_path: Path) -> None:
    """The same inputs give the same plan and the same compose file, byte for byte."""
    inputs = inputs_of(tmp_path)
    first = plan_launch(inputs, IMAGE, tmp_path / "run", HOST)
    assert first == plan_launch(inputs, IMAGE, tmp_path / "run", HOST)
    assert compose.render(first) == compose.render(plan_launch(inputs, IMAGE, tmp_path / "run", HOST))


def test_the_plan_gives_least_authority(tmp_path: Path) -> None:
    """Only output, segments, lease and caches are writable; nothing of the caller's environment comes along."""
    plan = plan_of(tmp_path)
    assert {mount.target for mount in plan.mounts if not mount.read_only} == {
        "/ferry/run",
        "/ferry/segments",
        "/ferry/lease",
        "/tmp/caches",
    }
    assert plan.user == "1234:99"
    assert plan.memory_bytes == 90 << 30
    assert plan.environment["HOME"] == "/tmp/home"
    assert "PATH" not in plan.environment


def test_the_bundles_checkpoint_lies_read_only_in_the_output(tmp_path: Path) -> None:
    """The trainer finds it where it saves; rotation cannot delete it."""
    plan = plan_of(tmp_path)
    targets = [mount.target for mount in plan.mounts]
    mount = plan.mounts[targets.index("/ferry/run/checkpoint-4")]
    assert mount.read_only
    assert targets.index("/ferry/run") < targets.index("/ferry/run/checkpoint-4")


def test_two_run_folders_have_two_containers(tmp_path: Path) -> None:
    """The name follows from the run and its folder."""
    assert container_name("tiny", tmp_path / "a") != container_name("tiny", tmp_path / "b")


def test_the_compose_file_says_all_of_it(tmp_path: Path) -> None:
    """Nothing is interpolated: a dollar sign in a path stays one."""
    plan = plan_of(tmp_path, dataclasses.replace(HOST, gpus=("0", "3")), gpus={"ids": ["0", "3"]})
    service = yaml.safe_load(compose.render(plan))["services"]["trainer"]
    assert service["network_mode"] == "none"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pull_policy"] == "never"
    assert "$HOME" in str(tmp_path)
    assert all("$$HOME" in volume["source"] for volume in service["volumes"])
    assert service["devices"] == ["nvidia.com/gpu=0", "nvidia.com/gpu=3"]
    assert "gpus" not in service


def test_the_equivalent_command_is_shown(tmp_path: Path) -> None:
    """`--dry-run` gives what a person could type."""
    command = screen.docker_command(plan_of(tmp_path))
    for words in ("--network none", "--read-only", "--cap-drop ALL", "--init", "--user 1234:99"):
        assert words in command


def test_gpus_are_asked_for_in_one_way(tmp_path: Path) -> None:
    """By the runtime: one device request in each door, and no CDI device beside it; without GPUs, neither."""
    host = dataclasses.replace(HOST, gpus=("0", "3"))
    plan = plan_of(tmp_path, host, gpus={"by": "runtime", "count": 2})
    service = yaml.safe_load(compose.render(plan))["services"]["trainer"]
    request = {"driver": "nvidia", "device_ids": ["0", "3"], "capabilities": ["compute", "utility"]}
    assert service["gpus"] == [request]
    assert "devices" not in service
    command = screen.docker_command(plan)
    assert """--gpus 'driver=nvidia,"device=0,3","capabilities=compute,utility"'""" in command
    assert "--device" not in command
    none = plan_of(tmp_path / "none")
    service = yaml.safe_load(compose.render(none))["services"]["trainer"]
    assert not {"gpus", "devices"} & service.keys()
    assert "--gpus" not in screen.docker_command(none)


def test_as_many_gpus_as_ranks(tmp_path: Path) -> None:
    """Two ranks on one GPU is another run."""
    with pytest.raises(Refusal) as caught:
        plan_of(tmp_path, dataclasses.replace(HOST, gpus=("3",)), gpus={"count": 1})
    assert "fewer GPUs than ranks: server server-a: gpus\n    expected 2 GPUs\n    found    1: 3" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("hard", "limits"),
    [
        ({"memlock": -1, "nofile": -1, "stack": -1}, {"memlock": -1, "nofile": 65536, "stack": 64 << 20}),
        ({"memlock": 8 << 20, "nofile": 4096, "stack": 1 << 20}, {"memlock": 8 << 20, "nofile": 4096, "stack": 1 << 20}),
        ({"stack": 1 << 30}, {"stack": 64 << 20}),
    ],
)  # fmt: skip
def test_limits_stay_within_the_hosts_hard_limits(
    tmp_path: Path, hard: dict[str, int], limits: dict[str, int]
) -> None:
    """An engine without CAP_SYS_RESOURCE refuses to start a container that asks for more; one that is not known is not asked for."""
    assert plan_of(tmp_path, dataclasses.replace(HOST, hard_limits=hard)).limits == limits


def test_caches_are_kept_and_builds_are_not(tmp_path: Path) -> None:
    """Triton's and inductor's on scratch; extensions, whose locks outlive a kill, in the container's own /tmp."""
    plan = plan_of(tmp_path)
    assert plan.caches == tmp_path / "run" / "caches"
    assert plan.environment["TRITON_CACHE_DIR"] == "/tmp/caches/triton"
    assert plan.environment["TORCHINDUCTOR_CACHE_DIR"] == "/tmp/caches/inductor"
    assert plan.environment["TORCH_EXTENSIONS_DIR"] == "/tmp/torch-extensions"
    elsewhere = plan_of(tmp_path / "2", scratch="/local/ferry")
    assert elsewhere.caches == Path("/local/ferry") / elsewhere.name
    assert elsewhere.caches in [mount.source for mount in elsewhere.mounts if not mount.read_only]


@pytest.mark.parametrize(
    ("user", "passwd", "group"),
    [
        (
            "1234:99",
            "ferry:x:1234:99:ferry:/tmp/home:/usr/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
            "ferry:x:99:\nnogroup:x:65534:\n",
        ),
        ("65534:65534", "ferry:x:65534:65534:ferry:/tmp/home:/usr/sbin/nologin\n", "ferry:x:65534:\n"),
    ],
)
def test_the_caller_has_a_name_inside(user: str, passwd: str, group: str) -> None:
    """A uid without a name breaks whatever asks who it is (pytorch 140765)."""
    assert account_files(user) == {"passwd": passwd.encode(), "group": group.encode()}


def test_a_venv_run_sees_its_gpus_only(tmp_path: Path) -> None:
    """No engine hands out devices there: CUDA shows those of the profile, counted as NVML counts them, or none."""
    host = dataclasses.replace(HOST, gpus=("1", "3"), hard_limits={"memlock": -1})
    plan = plan_of(tmp_path, host, engine="venv", venv="/opt/elsewhere", gpus={"count": 2})
    assert (plan.environment["CUDA_VISIBLE_DEVICES"], plan.limits) == ("1,3", {})
    assert plan.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    none = plan_of(tmp_path / "none", engine="venv", venv="/opt/elsewhere")
    assert none.environment["CUDA_VISIBLE_DEVICES"] == ""


def test_a_venv_plan_has_links_and_no_mounts(tmp_path: Path) -> None:
    """Without containers, links stand in for mounts; paths are the host's."""
    plan = plan_of(tmp_path, engine="venv", venv="/opt/elsewhere")
    assert plan.mounts == ()
    assert set(plan.links) == {IMAGES, TEACHER, f"{tmp_path}/run/output/checkpoint-4"}
    assert plan.launch.output == f"{tmp_path}/run/output"


def test_types_are_frozen(tmp_path: Path) -> None:
    """A plan cannot be changed after it was made."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan_of(tmp_path).user = "0:0"  # type: ignore[misc]
