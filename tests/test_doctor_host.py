"""What `ferry doctor` says of memory, cgroups, limits, disk and clock; and how these are read."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from runner import host
from runner.doctor import load_peak
from runner.doctor_check import Asked, State
from runner.folder_probe import Folder, kind_of, measure, probe
from tests.builder import snapshot
from tests.doctor_hosts import FOUR, files_say, lines, recorded, refused, warned
from tests.test_reflink import shared_blocks  # noqa: F401 - a fixture

H100 = recorded("h100-sxm-4")
V1 = recorded("cgroup-v1")
PLAIN = Asked(profile=True)
GIB = 1 << 30


def test_a_tight_group_above_is_named() -> None:
    """Cgroup v1: the limit of a parent, not the container's own, with the file system's name of the group."""
    found = warned(V1, PLAIN)
    assert found["cgroups above"] == "8.0 GiB at most, by /sys/fs/cgroup/memory/docker; CPUs 2"
    assert found["processes"] == "1024 at most, by /sys/fs/cgroup/pids/docker"
    assert "job_42; containers are not in that group" in found["scheduler's group"]
    assert "a run gets memory_guard of it, 7.2 GiB" in lines(V1, PLAIN, State.WARNING)["cgroups above"].remedy


def test_a_run_outside_a_container_is_in_the_shells_group() -> None:
    """The venv engine: the scheduler's limit is the run's own."""
    found = warned(V1, Asked(profile=True, engine="venv"))
    assert found["cgroups above"].startswith(
        "4.0 GiB at most, by /sys/fs/cgroup/memory/slurm/uid_1000/job_42"
    )
    assert "scheduler's group" not in found


def test_a_checkpoint_that_cannot_be_loaded_is_refused_with_both_numbers() -> None:
    """The peak of loading against the guard, and against every group above."""
    asked = dataclasses.replace(PLAIN, load_peak_bytes=20 * GIB, peak_rule="2 x 10.0 GiB of optimizer shards")
    check = lines(V1, asked, State.REFUSED)["cgroups above"]
    assert (check.found, check.expected) == (
        "8.0 GiB at most, by /sys/fs/cgroup/memory/docker; CPUs 2",
        "20.0 GiB to load",
    )
    more = dataclasses.replace(asked, load_peak_bytes=40 * GIB)
    check = lines(V1, more, State.REFUSED)["memory"]
    assert check.found == "23.5 GiB, 22.5 GiB free; the guard lets a run take 21.2 GiB"
    assert check.expected == "40.0 GiB: 2 x 10.0 GiB of optimizer shards"


def test_the_limit_of_a_group_in_the_middle_counts() -> None:
    """Cgroup v2: memory.high of a parent, while the leaf has none."""
    seen = files_say(H100, {"/sys/fs/cgroup/system.slice/memory.high": str(100 * GIB)})
    assert warned(seen) == {"cgroups above": "100.0 GiB at most, by /sys/fs/cgroup/system.slice; CPUs 128"}


def test_the_peak_of_loading() -> None:
    """Sharded: twice the shards and the model states of all ranks. Consolidated: the whole file a rank."""
    sharded = {f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": 12 * GIB for rank in range(4)}
    peak, rule = load_peak({**sharded, "mp_rank_00_model_states.pt": 8 * GIB, "rng_state_0.pth": 9}, 4)
    assert peak == 128 * GIB
    assert rule == "2 x 48.0 GiB of optimizer shards + 4 ranks x 8.0 GiB of model states, at least"
    assert load_peak({"optimizer.pt": GIB}, 4)[0] == 4 * GIB
    assert load_peak({"model.safetensors": GIB}, 4) == (None, "")


@pytest.mark.parametrize(
    ("change", "asked", "expected"),
    [
        ({"/proc/sys/kernel/osrelease": "5.4.0-42-generic\n"}, FOUR, {"kernel": "5.4.0-42-generic"}),
        ({"/proc/2113/status": "CapEff:\t000001fffeffffff\n", "/proc/2113/limits": "Max locked memory  65536  65536  bytes\n"}, FOUR, {"locked memory": "0 MiB at most, of the engine"}),
        ({"/proc/swaps": "Filename Type Size Used Priority\n/swap.img file 8388604 0 -2\n"}, Asked(profile=True, engine="venv"), {"swap": "8.0 GiB", "locked memory": "8 MiB at most, of this shell", "compiler": "no Python.h"}),
        ({"/proc/meminfo": "MemTotal: 805306368 kB\nMemAvailable: 100000000 kB\n"}, FOUR, {"memory": "768.0 GiB, 95.4 GiB free; the guard lets a run take 691.2 GiB"}),
        ({}, dataclasses.replace(FOUR, shm_bytes=64 << 20), {"shared memory": "shm_bytes 64 MiB"}),
    ],
)  # fmt: skip
def test_what_is_warned_of(change: dict[str, str], asked: Asked, expected: dict[str, str]) -> None:
    """With the number that was found."""
    assert warned(files_say(H100, change), asked) == expected


def test_shared_memory_counts_as_memory() -> None:
    """More of it than the whole guard is a mistake in the profile."""
    asked = dataclasses.replace(FOUR, shm_bytes=700 * GIB)
    assert refused(H100, asked) == {
        "shared memory": "shm_bytes 700.0 GiB, and all memory of a run is 691.2 GiB"
    }


def test_a_cpu_without_the_images_flags_is_refused() -> None:
    """By name: an op built for another CPU is an illegal instruction."""
    asked = dataclasses.replace(FOUR, cpu_flags=("avx2", "avx512_fp16", "amx_tile"))
    assert refused(H100, asked) == {"CPU": "INTEL(R) XEON(R) PLATINUM 8480C: lacks amx_tile avx512_fp16"}


def test_the_clock() -> None:
    """Never refused: no order hangs on it."""
    assert warned(dataclasses.replace(H100, clock=(1970, True))) == {"clock": "the year is 1970"}
    assert set(warned(dataclasses.replace(H100, clock=(2026, False)))) == {"clock"}
    assert warned(dataclasses.replace(H100, clock=(2026, None))) == {}


@pytest.mark.parametrize(
    ("change", "refuses", "warns"),
    [
        ({"problem": "Read-only file system"}, {"disk": "/data/runs: Read-only file system"}, {}),
        ({"lock": "two hold the same lock"}, {"rename and lock": "lock: two hold the same lock"}, {}),
        ({"kind": "nfs4"}, {}, {"file system": "nfs4, over the network"}),
        ({"free_inodes": 12}, {}, {"inodes": "12 free"}),
        ({"inodes": 0, "free_inodes": 0}, {}, {}),
        ({"free_bytes": GIB}, {}, {"disk": "1.0 GiB of 7168.0 GiB free in /data/runs"}),
        ({"reflink": "Operation not supported"}, {}, {}),
    ],
)
def test_the_disk_of_the_run(
    change: dict[str, object], refuses: dict[str, str], warns: dict[str, str]
) -> None:
    """What makes records or the lease unsafe is refused; what is slow or small is warned of."""
    folder = Folder(**{**dataclasses.asdict(H100.run_folder), **change})  # type: ignore[arg-type]
    seen = dataclasses.replace(H100, run_folder=folder)
    assert (refused(seen), warned(seen)) == (refuses, warns)


def test_room_for_two_checkpoints() -> None:
    """The last one stays whole while the next one is saved."""
    asked = dataclasses.replace(FOUR, checkpoint_bytes=2049 * GIB)
    assert set(refused(H100, asked)) == {"disk"}
    assert refused(H100, dataclasses.replace(FOUR, checkpoint_bytes=2048 * GIB)) == {}


def test_a_probe_leaves_nothing(tmp_path: Path) -> None:
    """Renames and locks are tried for real; a folder that is not there yet is tried where it would be made."""
    before = snapshot(tmp_path)
    found = probe(tmp_path / "not" / "yet")
    assert found.path == str(tmp_path)
    assert (found.problem, found.rename, found.lock) == (None, "works", "works")
    assert found.kind == measure(tmp_path).kind != "unknown"
    assert snapshot(tmp_path) == before


def test_blocks_are_shared_where_they_can_be(shared_blocks: Path) -> None:  # noqa: F811
    """A real try on XFS."""
    found = probe(shared_blocks)
    assert (found.kind, found.reflink) == ("xfs", "works")


def test_a_folder_that_takes_no_file() -> None:
    """/proc, where nobody can make one, whoever he is."""
    assert probe(Path("/proc/sys")).problem is not None


def test_kinds_of_file_systems() -> None:
    """The deepest mount, the latest of two on one place, names with blanks; a name that begins alike is another."""
    text = (
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:1 / /data rw - xfs /dev/sdb rw\n"
        "3 1 0:2 / /data rw shared:1 - nfs4 server:/x rw\n4 1 0:3 / /data/a\\040b rw - tmpfs tmpfs rw\n"
    )
    assert kind_of(Path("/data/a b/c"), text) == "tmpfs"
    assert kind_of(Path("/data/x"), text) == "nfs4"
    assert kind_of(Path("/database"), text) == "ext4"


def lay_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("name", ["h100-sxm-4", "cgroup-v1"])
def test_a_hosts_files_are_read_as_they_were_recorded(name: str, tmp_path: Path) -> None:
    """All groups above shell and engine, by both versions; no file more than is judged."""
    seen = recorded(name)
    lay_files(tmp_path, dict(seen.files))
    lay_files(tmp_path, {"/proc/kmsg": "secret", "/sys/fs/cgroup/memory.stat": "anon 0\n"})
    parent = "/system.slice" if name == "h100-sxm-4" else "/docker"
    assert host.read_files(tmp_path, [parent], ["/etc/cdi"]) == seen.files


def test_a_part_of_the_hierarchy() -> None:
    """In a container only its own group is mounted, and /proc names it from the host's root."""
    files = {
        "/proc/self/cgroup": "0::/docker/abc\n",
        "/proc/self/mountinfo": "9 8 0:2 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
        "/sys/fs/cgroup/memory.max": f"{GIB}\n",
    }
    assert host.own_groups(files).memory == host.Bound(GIB, "/sys/fs/cgroup")


def test_a_group_of_another_controller_does_not_count() -> None:
    """Cgroup v1: this process is in /a for memory, and in /b for processes; /b's memory is not its own."""
    files = {
        "/proc/self/cgroup": "2:memory:/a\n1:pids:/b\n",
        "/proc/self/mountinfo": "1 0 0:1 / /cg/memory rw - cgroup cgroup rw,memory\n2 0 0:2 / /cg/pids rw - cgroup cgroup rw,pids\n",
        "/cg/memory/b/memory.limit_in_bytes": "1\n",
        "/cg/memory/a/memory.limit_in_bytes": "7\n",
        "/cg/pids/a/pids.max": "1\n",
    }
    groups = host.own_groups(files)
    assert (groups.memory, groups.pids.value) == (host.Bound(7, "/cg/memory/a"), None)


def test_a_host_that_tells_nothing(tmp_path: Path) -> None:
    """No file at all: told, and no traceback."""
    files = host.read_files(tmp_path, ["/docker"], ["/etc/cdi"])
    assert files == {}
    seen = dataclasses.replace(H100, files=files)
    assert warned(seen, PLAIN)["memory"] == "/proc/meminfo says nothing"


def test_this_host(tmp_path: Path) -> None:
    """Of the real one: what it must have."""
    files = host.read_files(Path("/"), ["/docker"], ["/etc/cdi"])
    total = host.memory(files, "MemTotal")
    assert total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host.cpu_flags(files)
    assert host.hard_limit(files, "Max open files", of_engine=False) is not None
