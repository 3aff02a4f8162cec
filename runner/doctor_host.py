"""The checks of the host: memory, cgroups, limits, disk, clock, CPU, what the caller's environment holds.

Promises: pure functions of observations; a limit is always told with the cgroup or the file that sets it.
"""

from __future__ import annotations

from collections.abc import Iterator

from runner import host
from runner.doctor_check import Asked, Check, State, size
from runner.engine_info import read_info, version_tuple
from runner.folder_probe import Folder
from runner.host import Groups
from runner.observations import Observations

# What accelerate asks for: below, a process can hang (its own warning at start).
_KERNEL = (5, 5)
# torchrun, 4 ranks with loader workers, and the threads of each: a few hundred; a limit of 1024 has been met.
_PIDS = 4096
_OPEN_FILES = 4096
_LOCKED_BYTES = 1 << 30
_ROOM_BYTES = 20 << 30
_INODES = 10_000
_SHM_BYTES = 1 << 30
_YEARS = range(2025, 2100)


def memory_checks(seen: Observations, asked: Asked) -> Iterator[Check]:
    """Yield the lines about RAM, swap, shared memory and the cgroups above."""
    total, free = host.memory(seen.files, "MemTotal"), host.memory(seen.files, "MemAvailable")
    if total is None or free is None:
        remedy = "see that /proc is mounted"
        yield Check("memory", State.WARNING, "/proc/meminfo says nothing", "its size", remedy)
        return
    guard = int(total * asked.memory_guard)
    yield from _memory(total, free, guard, asked)
    yield from _groups(seen, guard, asked)
    swap = host.swap_bytes(seen.files)
    if swap and asked.engine == "venv":
        remedy = "`swapoff -a`: a rank that is swapped out makes all others wait"
        yield Check("swap", State.WARNING, size(swap), "none, for runs outside a container", remedy)
    else:
        found = f"{size(swap)}; a container gets none of it" if swap else "none"
        yield Check("swap", State.GOOD, found, "none for the run")
    yield from _shm(seen, guard, asked)


def limit_checks(seen: Observations, asked: Asked) -> Iterator[Check]:
    """Yield the lines about what a process may ask for, and about the kernel."""
    docker = asked.engine == "docker"
    whose = "the engine" if docker else "this shell"
    for name, label, least, text in (
        ("Max locked memory", "locked memory", _LOCKED_BYTES, size),
        ("Max open files", "open files", _OPEN_FILES, str),
    ):
        value = host.hard_limit(seen.files, name, of_engine=docker)
        expected = f"{text(least)} or more; a container cannot ask for more than {whose} may"
        if value is None:
            yield Check(label, State.NOTE, f"the limit of {whose} cannot be seen by this user", expected)
        elif 0 <= value < least:
            remedy = (
                f"raise it for {whose} (systemd: Limit{'MEMLOCK' if least == _LOCKED_BYTES else 'NOFILE'}=infinity)"
                + ("; pinned buffers and RDMA need it" if least == _LOCKED_BYTES else "")
            )
            yield Check(label, State.WARNING, f"{text(value)} at most, of {whose}", expected, remedy)
        else:
            yield Check(label, State.GOOD, "no limit" if value < 0 else text(value), expected)
    release = seen.files.get("/proc/sys/kernel/osrelease", "").strip()
    old = bool(release) and version_tuple(release) < _KERNEL
    remedy = "use a newer kernel: accelerate warns that ranks can hang on this one" if old else ""
    yield Check("kernel", State.WARNING if old else State.GOOD, release or "unknown", "5.5 or newer", remedy)
    nodes = seen.files.get("/sys/devices/system/node/online", "0").strip()
    if nodes not in ("", "0") and seen.files.get("/proc/sys/kernel/numa_balancing", "0").strip() != "0":
        found = f"NUMA balancing is on, over nodes {nodes}: pages of offloaded optimizer state move about"
        yield Check(
            "NUMA", State.NOTE, found, "nothing; `sysctl kernel.numa_balancing=0` if updates vary in time"
        )


def cpu_checks(seen: Observations, asked: Asked) -> Iterator[Check]:
    """Yield the line about the CPU, and those about build tools for runs outside a container."""
    missing = sorted(set(asked.cpu_flags) - host.cpu_flags(seen.files))
    model = host.cpu_model(seen.files)
    expected = (
        f"what the ops of image {asked.image} need" if asked.image else "--image NAME says what it needs"
    )
    if missing:
        remedy = "use a server whose CPU has them, or build an image for a lower `arch`: else an illegal instruction ends the run"
        yield Check("CPU", State.REFUSED, f"{model}: lacks {' '.join(missing)}", expected, remedy)
    else:
        yield Check("CPU", State.GOOD, model, expected)
    if asked.engine == "venv":
        lacking = sorted(name for name, there in seen.build.items() if not there)
        remedy = (
            "apt-get install g++ python3-dev: Triton compiles small launchers at run time" if lacking else ""
        )
        state = State.WARNING if lacking else State.GOOD
        found = f"no {', no '.join(lacking)}" if lacking else "g++ and Python's headers"
        yield Check("compiler", state, found, "g++ and Python.h, for the venv engine", remedy)


def disk_checks(seen: Observations, asked: Asked) -> Iterator[Check]:
    """Yield the lines about the file system that the run folder is on."""
    folder = seen.run_folder
    if folder.problem is not None:
        remedy = "name a folder that this user may write to, with --run"
        yield Check("disk", State.REFUSED, f"{folder.path}: {folder.problem}", "a folder to write to", remedy)
        return
    yield _room(folder, asked)
    if folder.inodes and folder.free_inodes < _INODES:
        remedy = "remove small files: a disk without inodes is full, whatever room there is"
        yield Check("inodes", State.WARNING, f"{folder.free_inodes} free", f"{_INODES} free", remedy)
    if folder.network:
        remedy = "put the run folder on a local disk: a stalled file server stalls every save, and a lease may not hold"
        yield Check("file system", State.WARNING, f"{folder.kind}, over the network", "a local one", remedy)
    else:
        yield Check("file system", State.GOOD, folder.kind, "a local one")
    expected = "records are replaced in one step; a lease is held by one"
    broken = [
        (word, said) for word, said in (("rename", folder.rename), ("lock", folder.lock)) if said != "works"
    ]
    if broken:
        found = "; ".join(f"{word}: {said}" for word, said in broken)
        remedy = (
            "put the run folder on another file system: neither records nor the lease are safe on this one"
        )
        yield Check("rename and lock", State.REFUSED, found, expected, remedy)
    else:
        yield Check("rename and lock", State.GOOD, "both work", expected)
    shared = folder.reflink == "works"
    found = "works" if shared else f"{folder.reflink}: --mode reflink is refused; mount copies nothing either"
    yield Check("reflink", State.GOOD if shared else State.NOTE, found, "nothing: an option of prepare")


def surroundings_checks(seen: Observations, _: Asked) -> Iterator[Check]:
    """Yield the lines about clock, hub cache and secrets."""
    year, synchronised = seen.clock
    expected = "synchronised; times are told to people and never decide an order"
    if year not in _YEARS:
        yield Check(
            "clock",
            State.WARNING,
            f"the year is {year}",
            expected,
            "set the clock: `timedatectl set-ntp true`",
        )
    elif synchronised is False:
        remedy = "`timedatectl set-ntp true`, or start chrony"
        yield Check("clock", State.WARNING, "the kernel holds it for unsynchronised", expected, remedy)
    else:
        yield Check("clock", State.GOOD, "synchronised" if synchronised else f"the year is {year}", expected)
    hub = seen.hub
    what = "size not known in time" if hub.size_bytes is None else size(hub.size_bytes)
    found = f"{hub.path}, {what}" if hub.exists else f"{hub.path}: not there"
    yield Check(
        "hub cache", State.NOTE, found, "nothing: a run is offline and sees only what server.yaml names"
    )
    if seen.secrets:
        found = f"{', '.join(seen.secrets)} set here; no run sees them"
        yield Check("tokens", State.NOTE, found, "nothing of this environment goes into a run")


def _memory(total: int, free: int, guard: int, asked: Asked) -> Iterator[Check]:
    found = f"{size(total)}, {size(free)} free; the guard lets a run take {size(guard)}"
    peak = asked.load_peak_bytes
    if peak is not None and guard < peak:
        remedy = "prepare on a host with more memory: resuming needs more than training does"
        yield Check("memory", State.REFUSED, found, f"{size(peak)}: {asked.peak_rule}", remedy)
        return
    needed = peak if peak is not None else guard
    expected = f"{size(peak)}: {asked.peak_rule}" if peak is not None else "what the guard promises is free"
    if free < needed:
        remedy = (
            "see who uses it (`ps aux --sort -rss | head`); the run may be killed before it reaches its guard"
        )
        yield Check("memory", State.WARNING, found, expected, remedy)
    else:
        yield Check("memory", State.GOOD, found, expected)


def _groups(seen: Observations, guard: int, asked: Asked) -> Iterator[Check]:
    own = host.own_groups(seen.files)
    groups, whose = own, "this shell"
    if asked.engine == "docker":
        parent = read_info(seen.engine.info, seen.engine.version).cgroup_parent
        groups, whose = host.groups_above(seen.files, parent), "containers"
    yield _bounded(groups, whose, guard, asked)
    pids = groups.pids
    if pids.value is not None and pids.value < _PIDS:
        remedy = "raise pids.max there: threads count, and a rank that cannot start one ends in `can't start new thread`"
        yield Check("processes", State.WARNING, f"{pids.value} at most, by {pids.group}", f"{_PIDS}", remedy)
    if asked.engine == "docker" and own.memory.value is not None:
        found = f"this shell is held to {size(own.memory.value)} by {own.memory.group}; containers are not in that group"
        remedy = "under a scheduler, ask for the memory that the guard takes: the scheduler does not count containers"
        yield Check("scheduler's group", State.WARNING, found, "one limit for shell and run", remedy)


def _bounded(groups: Groups, whose: str, guard: int, asked: Asked) -> Check:
    bound = groups.memory
    cpus = f"; CPUs {groups.cpus.value}" if groups.cpus.value is not None else ""
    if bound.value is None or bound.value >= guard:
        limit = "no limit of memory" if bound.value is None else f"{size(bound.value)} by {bound.group}"
        return Check(
            "cgroups above", State.GOOD, f"{limit} above {whose}{cpus}", f"the guard's {size(guard)} or more"
        )
    peak = asked.load_peak_bytes
    share = int(bound.value * asked.memory_guard)
    state = State.REFUSED if peak is not None and share < peak else State.WARNING
    found = f"{size(bound.value)} at most, by {bound.group}{cpus}"
    expected = (
        f"{size(peak)} to load" if state is State.REFUSED and peak else f"the guard's {size(guard)} or more"
    )
    remedy = f"raise the limit of that group; as it is, a run gets memory_guard of it, {size(share)}"
    return Check("cgroups above", state, found, expected, remedy)


def _shm(seen: Observations, guard: int, asked: Asked) -> Iterator[Check]:
    wanted = asked.shm_bytes
    remedy = "set shm_bytes in server.yaml: loader workers and NCCL end in a bus error when it is full"
    if asked.engine == "venv":
        there = seen.shm.total_bytes
        few = there < wanted
        fix = f"`mount -o remount,size={wanted} /dev/shm`: loader workers end in a bus error when it is full"
        yield Check(
            "shared memory",
            State.WARNING if few else State.GOOD,
            f"{seen.shm.path} has {size(there)}",
            f"{size(wanted)}, the profile's shm_bytes",
            fix if few else "",
        )
    elif wanted >= guard:
        found = f"shm_bytes {size(wanted)}, and all memory of a run is {size(guard)}"
        yield Check("shared memory", State.REFUSED, found, "less than the guard: it counts as memory", remedy)
    elif wanted < _SHM_BYTES:
        yield Check(
            "shared memory", State.WARNING, f"shm_bytes {size(wanted)}", f"{size(_SHM_BYTES)}", remedy
        )
    else:
        yield Check(
            "shared memory", State.GOOD, f"a container gets {size(wanted)}", f"{size(_SHM_BYTES)} or more"
        )


def _room(folder: Folder, asked: Asked) -> Check:
    found = f"{size(folder.free_bytes)} of {size(folder.total_bytes)} free in {folder.path}"
    if asked.checkpoint_bytes is not None:
        least, expected = (
            2 * asked.checkpoint_bytes,
            "two checkpoints: the last one stays whole while the next is saved",
        )
        state = State.REFUSED if folder.free_bytes < least else State.GOOD
        expected = f"{size(least)}, {expected}"
    else:
        state = State.WARNING if folder.free_bytes < _ROOM_BYTES else State.GOOD
        expected = f"{size(_ROOM_BYTES)}; --bundle says what its checkpoints need"
    remedy = "make room, or name a folder on another disk with --run" if state is not State.GOOD else ""
    return Check("disk", state, found, expected, remedy)
