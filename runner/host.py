"""A Linux host as its own files tell it: memory, cgroups, limits, CPU, kernel, CDI specs.

Promises: `read_files` reads and changes nothing; everything else is a pure function of what it returned, so a recording
of another host is read the same way. A file that is not there is absent from the result, and the fact None.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

Files = Mapping[str, str]

_PLAIN = (
    "/proc/meminfo",
    "/proc/swaps",
    "/proc/self/cgroup",
    "/proc/self/limits",
    "/proc/sys/kernel/osrelease",
    "/proc/sys/kernel/numa_balancing",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/devices/system/node/online",
    "/var/run/docker.pid",
)
_LIMIT_BYTES = 1 << 20
# A cgroup's files, by version: what may bound a run.
_GROUP_FILES = {
    2: ("memory.max", "memory.high", "pids.max", "cpuset.cpus.effective"),
    1: ("memory.limit_in_bytes", "pids.max", "cpuset.cpus"),
}
_CONTROLLERS = ("memory", "pids", "cpuset")
# Version 1 writes "no limit" as the largest page-aligned number.
_UNLIMITED = 1 << 62
_CAP_SYS_RESOURCE = 1 << 24
# A group's path in the hierarchies of these controllers: none of them in version 2, None for all hierarchies.
_Group = tuple[frozenset[str] | None, str]


@dataclasses.dataclass(frozen=True)
class Bound:
    """A limit and the cgroup that sets it; None means that no cgroup does."""

    value: int | None
    group: str


@dataclasses.dataclass(frozen=True)
class Groups:
    """The tightest limits of a chain of cgroups, each with the group that sets it. Memory in bytes."""

    memory: Bound
    pids: Bound
    cpus: Bound


def read_files(root: Path, cgroup_parents: Iterable[str], cdi_folders: Iterable[str]) -> dict[str, str]:
    """Return path -> text of every file below `root` that is of interest here.

    `cgroup_parents` are the groups that an engine puts containers into; with them come all groups above, and those
    above this process. Of /proc/cpuinfo and /proc/self/mountinfo only what is needed is kept.
    """
    found: dict[str, str] = {}
    _read(root, _PLAIN, found)
    cpuinfo = _text(root, "/proc/cpuinfo")
    if cpuinfo is not None:
        lines = cpuinfo.split("\n\n", 1)[0].split("\n")
        kept = [line for line in lines if line.startswith(("model name", "flags"))]
        found["/proc/cpuinfo"] = "\n".join(kept) + "\n"
    mounts = _text(root, "/proc/self/mountinfo")
    if mounts is not None:
        kept = [line for line in mounts.splitlines() if " - cgroup" in line]
        found["/proc/self/mountinfo"] = "".join(f"{line}\n" for line in kept)
    parents = [(None, parent) for parent in cgroup_parents]
    for version, mount, path in _chain(found, [*_own_groups(found), *parents]):
        _read(root, [str(mount.joinpath(*path.parts[1:], name)) for name in _GROUP_FILES[version]], found)
    pid = found.get("/var/run/docker.pid", "").strip()
    if pid.isdecimal():
        _read(root, [f"/proc/{pid}/limits"], found)
        status = _text(root, f"/proc/{pid}/status") or ""
        found[f"/proc/{pid}/status"] = "".join(
            f"{line}\n" for line in status.splitlines() if line.startswith("CapEff")
        )
    for folder in cdi_folders:
        place = root / folder.lstrip("/")
        names = sorted(path.name for path in place.glob("*") if path.suffix in (".json", ".yaml", ".yml"))
        _read(root, [f"{folder}/{name}" for name in names], found)
    return found


def own_groups(files: Files) -> Groups:
    """Return the tightest limits of the cgroups above this process."""
    return _groups(files, _own_groups(files))


def groups_above(files: Files, parent: str) -> Groups:
    """Return the tightest limits of the cgroup `parent` (as an engine names it, '/docker') and of those above it."""
    return _groups(files, [(None, parent)])


def memory(files: Files, field: str) -> int | None:
    """Return a field of /proc/meminfo ('MemTotal', 'MemAvailable') in bytes."""
    match = re.search(rf"^{field}:\s+([0-9]+) kB$", files.get("/proc/meminfo", ""), re.MULTILINE)
    return None if match is None else int(match[1]) << 10


def swap_bytes(files: Files) -> int:
    """Return the size of all swap areas together."""
    lines = files.get("/proc/swaps", "").splitlines()[1:]
    return sum(int(line.split()[2]) << 10 for line in lines if len(line.split()) >= 3)


def cpu_flags(files: Files) -> frozenset[str]:
    """Return the CPU's flags, as Linux names them."""
    match = re.search(r"^flags\s*:(.*)$", files.get("/proc/cpuinfo", ""), re.MULTILINE)
    return frozenset(match[1].split() if match else ())


def cpu_model(files: Files) -> str:
    """Return the CPU's model."""
    match = re.search(r"^model name\s*:\s*(.*)$", files.get("/proc/cpuinfo", ""), re.MULTILINE)
    return match[1] if match else "unknown CPU"


def hard_limit(files: Files, name: str, *, of_engine: bool) -> int | None:
    """Return the hard limit `name` ('Max locked memory', 'Max open files') of the engine or of this process.

    An unlimited one is -1. None if it could not be read. An engine with CAP_SYS_RESOURCE may give any limit: -1.
    """
    process = "/proc/self"
    if of_engine:
        process = f"/proc/{files.get('/var/run/docker.pid', 'none').strip()}"
        match = re.search(r"^CapEff:\s*([0-9a-f]+)$", files.get(f"{process}/status", ""), re.MULTILINE)
        if match and int(match[1], 16) & _CAP_SYS_RESOURCE:
            return -1
    match = re.search(rf"^{name}\s+\S+\s+(\S+)", files.get(f"{process}/limits", ""), re.MULTILINE)
    if match is None:
        return None
    return -1 if match[1] == "unlimited" else int(match[1])


def cdi_paths(files: Mapping[str, str]) -> tuple[str, ...]:
    """Return every device node and library of the host that the NVIDIA CDI specs among `files` name, sorted."""
    return tuple(sorted({path for spec in cdi_specs(files).values() for path in _host_paths(spec)}))


def cdi_devices(files: Mapping[str, str]) -> tuple[str, ...]:
    """Return the devices that the NVIDIA CDI specs among `files` name ('nvidia.com/gpu=0'), sorted."""
    found = set()
    for spec in cdi_specs(files).values():
        devices = spec.get("devices")
        for device in devices if isinstance(devices, list) else ():
            if isinstance(device, dict):
                found.add(f"{spec['kind']}={device.get('name')}")
    return tuple(sorted(found))


def cdi_specs(files: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the NVIDIA CDI specs among `files`, by path; what is not YAML is left out (the engine tells of it)."""
    found = {}
    for path, text in files.items():
        if Path(path).suffix not in (".json", ".yaml", ".yml"):
            continue
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            continue
        if isinstance(value, dict) and str(value.get("kind", "")).startswith("nvidia.com/"):
            found[path] = value
    return found


def _host_paths(spec: Mapping[str, Any]) -> Iterator[str]:
    parts = [spec, *(device for device in spec.get("devices") or () if isinstance(device, dict))]
    for part in parts:
        edits = part.get("containerEdits") or {}
        for node in edits.get("deviceNodes") or ():
            yield str(node.get("hostPath") or node.get("path"))
        for mount in edits.get("mounts") or ():
            yield str(mount.get("hostPath"))


def _own_groups(files: Files) -> list[_Group]:
    lines = [line.split(":", 2) for line in files.get("/proc/self/cgroup", "").splitlines()]
    return [(frozenset(filter(None, controllers.split(","))), path) for _, controllers, path in lines]


def _mounts(files: Files) -> Iterator[tuple[int, frozenset[str], PurePosixPath, PurePosixPath]]:
    """Yield (version, controllers, root, mount point) of every cgroup file system."""
    for line in files.get("/proc/self/mountinfo", "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        root, place = PurePosixPath(fields[3]), PurePosixPath(fields[4])
        if kind[0] == "cgroup2":
            yield 2, frozenset(), root, place
        elif kind[0] == "cgroup" and (controllers := frozenset(kind[2].split(",")) & set(_CONTROLLERS)):
            yield 1, controllers, root, place


def _chain(files: Files, groups: Iterable[_Group]) -> Iterator[tuple[int, PurePosixPath, PurePosixPath]]:
    """Yield (version, mount point, group) of each of `groups` and of all groups above, once each, outermost first."""
    seen: set[tuple[PurePosixPath, PurePosixPath]] = set()
    groups = list(groups)
    for version, mounted, root, place in _mounts(files):
        for controllers, group in groups:
            if controllers is not None and not (controllers & mounted if mounted else not controllers):
                continue
            # Where only a part of the hierarchy is mounted (in a container), groups are named from its root.
            path = PurePosixPath("/", group)
            inside = PurePosixPath("/", path.relative_to(root)) if path.is_relative_to(root) else path
            for one in reversed([inside, *inside.parents]):
                if (place, one) not in seen:
                    seen.add((place, one))
                    yield version, place, one


def _groups(files: Files, groups: Iterable[_Group]) -> Groups:
    bounds: dict[str, Bound] = {name: Bound(None, "") for name in _CONTROLLERS}
    for version, place, path in _chain(files, groups):
        group = str(place.joinpath(*path.parts[1:]))
        for name in _GROUP_FILES[version]:
            controller = name.split(".", 1)[0]
            text = files.get(f"{group}/{name}", "")
            value = _cpus(text) if controller == "cpuset" else _number(text)
            known = bounds[controller].value
            if value is not None and value < _UNLIMITED and (known is None or value < known):
                bounds[controller] = Bound(value, group)
    return Groups(bounds["memory"], bounds["pids"], bounds["cpuset"])


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _cpus(text: str) -> int | None:
    """Return how many CPUs a list like '0-7,16' names; None if it is empty, which means all."""
    count = 0
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count or None


def _read(root: Path, names: Iterable[str], found: dict[str, str]) -> None:
    for name in names:
        text = _text(root, name)
        if text is not None:
            found[name] = text


def _text(root: Path, name: str) -> str | None:
    try:
        with (root / name.lstrip("/")).open("rb") as file:
            return file.read(_LIMIT_BYTES).decode("utf-8", "backslashreplace")
    except OSError:
        return None
