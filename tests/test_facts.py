"""What is looked up of a host for a launch plan: memory by every bound, limits, scratch, GPUs without a driver."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner import facts
from runner.allocation import Allotment
from runner.engine_info import read_info
from runner.errors import Refusal
from runner.server import Gpus, ServerProfile
from tests.doctor_hosts import files_say, recorded

V1 = recorded("cgroup-v1")
JOB = Allotment("42", (), (), by_place=False, memory_bytes=None)
ALL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
GIB = 1 << 30


def profile(**fields: object) -> ServerProfile:
    """Return a profile without an engine to ask."""
    value = {"ferry": 1, "name": "a", "engine": "venv", "venv": "/opt/v", "assets": {}, **fields}
    return ServerProfile.model_validate(value)


def test_memory_is_what_the_tightest_group_above_allows() -> None:
    """A container is in the engine's groups; in a job, the job's limit counts too, though the container is not in its group."""
    info = read_info(V1.engine.info, V1.engine.version)
    assert sorted(facts._memory_bounds(V1.files, info, None)) == sorted([8 * GIB, ALL])
    assert sorted(facts._memory_bounds(V1.files, info, JOB)) == sorted([4 * GIB, 8 * GIB, ALL])
    asked = Allotment("42", (), (), by_place=False, memory_bytes=GIB)
    assert min(facts._memory_bounds(V1.files, info, asked)) == GIB


def test_without_containers_the_shells_groups_count() -> None:
    """And a host without limits gives all of its RAM."""
    assert min(facts._memory_bounds(V1.files, None, None)) == 4 * GIB
    unlimited = {name: "9223372036854771712\n" for name in V1.files if name.endswith("memory.limit_in_bytes")}
    assert list(facts._memory_bounds(files_say(V1, unlimited).files, None, None)) == [ALL]


def test_this_host_and_its_caller(tmp_path: Path) -> None:
    """For real: ids of the caller, the hard limits that it has itself without an engine, no GPUs where none are asked for."""
    found = facts.host_facts(profile(scratch=str(tmp_path)))
    assert (found.uid, found.gid, found.gpus) == (os.getuid(), os.getgid(), ())
    assert 0 < found.memory_bytes <= ALL
    assert found.hard_limits.keys() == {"memlock", "nofile", "stack"}


def test_every_fault_of_the_host_comes_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scratch folder that is not there, and what Slurm says twice."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_GPUS", "0,1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    with pytest.raises(Refusal) as caught:
        facts.host_facts(profile(scratch=str(tmp_path / "none"), gpus={"count": 2}))
    assert [fault.what for fault in caught.value.faults] == ["the scheduler's words disagree", "no scratch"]
    assert not (tmp_path / "none").exists()


def test_what_the_engine_cannot_give_is_refused_by_name() -> None:
    """No NVIDIA runtime; CDI turned off; and an engine too old to list devices is read by its specs."""
    info = read_info({"Runtimes": {"runc": {}}, "ServerVersion": "26"}, {"ApiVersion": "1.45"})
    spec = 'cdiVersion: "0.6.0"\nkind: nvidia.com/gpu\ndevices: [{name: "0"}, {name: "1"}]\n'
    with pytest.raises(Refusal, match="no NVIDIA runtime: server a: gpus"):
        facts._in_container(Gpus(by="runtime", count=1), None, info, {}, "a")
    with pytest.raises(Refusal, match="the engine takes no CDI devices: server a: gpus"):
        facts._in_container(Gpus(count=1), None, info, {"/etc/cdi/x.yaml": spec}, "a")
    on = read_info({"CDISpecDirs": ["/etc/cdi"]}, {"ApiVersion": "1.45"})
    assert on.devices is None
    assert facts._in_container(Gpus(count=2), None, on, {"/etc/cdi/x.yaml": spec}, "a") == ("0", "1")
    broken = {"/etc/cdi/x.yaml": "kind: nvidia.com/gpu\ndevices: 7\n", "/etc/cdi/y.json": "[" * 9}
    with pytest.raises(Refusal, match="fewer GPUs than asked for"):
        facts._in_container(Gpus(count=2), None, on, broken, "a")
