"""Assets of a server, and the launch plan that follows from them: pure, complete, least authority."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from runner import compose, documents, screen
from runner.errors import Refusal
from runner.image import ImagePin, ReadyImage
from runner.plan import HostFacts, LaunchPlan, container_name, plan_launch
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


def plan_of(folder: Path, **profile: object) -> LaunchPlan:
    """Return the plan of that."""
    return plan_launch(inputs_of(folder, **profile), IMAGE, folder / "run", HOST)


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
    """Only output, segments and lease are writable; nothing of the caller's environment comes along."""
    plan = plan_of(tmp_path)
    assert {mount.target for mount in plan.mounts if not mount.read_only} == {
        "/ferry/run",
        "/ferry/segments",
        "/ferry/lease",
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
    plan = plan_of(tmp_path, gpus={"ids": ["0", "3"]})
    service = yaml.safe_load(compose.render(plan))["services"]["trainer"]
    assert service["network_mode"] == "none"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pull_policy"] == "never"
    assert "$HOME" in str(tmp_path)
    assert all("$$HOME" in volume["source"] for volume in service["volumes"])
    assert service["devices"] == ["nvidia.com/gpu=0", "nvidia.com/gpu=3"]


def test_the_equivalent_command_is_shown(tmp_path: Path) -> None:
    """`--dry-run` gives what a person could type."""
    command = screen.docker_command(plan_of(tmp_path))
    for words in ("--network none", "--read-only", "--cap-drop ALL", "--init", "--user 1234:99"):
        assert words in command


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
