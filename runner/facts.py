"""What a launch plan must know of this host and of the caller, looked up: ids, memory, limits, GPUs.

Promises: nothing is written; the GPUs were seen to be there, and to be the scheduler's own in its job; memory is never
more than the tightest cgroup above allows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from runner import gpus, host
from runner.allocation import Allotment, choose, read_allotment
from runner.docker_engine import connect
from runner.engine_info import EngineInfo, gpu_device, gpu_ids, read_info
from runner.errors import Fault, Refusal
from runner.observe import CDI_FOLDERS, ask_nvml
from runner.plan import HostFacts
from runner.server import Gpus, ServerProfile

T = TypeVar("T")

_LIMITS = {"memlock": "Max locked memory", "nofile": "Max open files", "stack": "Max stack size"}
_RUNTIME = (
    "`nvidia-ctk runtime configure --runtime=docker` and restart the engine; or prefer CDI (gpus: by: cdi)"
)


def host_facts(server: ServerProfile) -> HostFacts:
    """Return what the plan of a run on `server` must know, asked of this host now.

    Raises `Refusal` if a GPU cannot be had, the scratch folder is not there, or the engine does not answer.
    """
    faults: list[Fault] = []
    allotment = _try(faults, lambda: read_allotment(os.environ))
    docker = server.engine == "docker"
    info = _engine() if docker else None
    folders = (info.cdi_folders if info is not None else ()) or CDI_FOLDERS
    files = host.read_files(Path("/"), [info.cgroup_parent] if info is not None else [], folders)
    faults += _scratch_faults(server)
    chosen: tuple[str, ...] = ()
    if server.gpus is not None and not faults:
        wanted = server.gpus
        if docker:
            assert info is not None
            chosen = _try(faults, lambda: _in_container(wanted, allotment, info, files, server.name)) or ()
        else:
            chosen = _try(faults, lambda: _on_host(wanted, allotment, server.name)) or ()
    if faults:
        raise Refusal(*faults)
    limits = {
        name: limit
        for name, line in _LIMITS.items()
        if (limit := host.hard_limit(files, line, of_engine=docker)) is not None
    }
    memory = min(_memory_bounds(files, info, allotment))
    return HostFacts(os.getuid(), os.getgid(), memory, chosen, limits)


def _engine() -> EngineInfo:
    client = connect()
    return read_info(client.info(), client.version())


def _try(faults: list[Fault], step: Callable[[], T]) -> T | None:
    try:
        return step()
    except Refusal as refusal:
        faults.extend(refusal.faults)
        return None


def _scratch_faults(server: ServerProfile) -> Iterator[Fault]:
    if server.scratch is None:
        return
    place = Path(server.scratch)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        fix = "make the folder for this user, or leave `scratch` out: caches then lie in the run folder"
        found = "one that this user may not write to" if place.is_dir() else "no folder"
        yield Fault(
            "no scratch", f"server {server.name}: scratch: {place}", "a folder to write to", found, fix
        )


def _in_container(
    wanted: Gpus, allotment: Allotment | None, info: EngineInfo, files: host.Files, server: str
) -> tuple[str, ...]:
    """The GPUs that the engine hands to a container, by CDI or by the NVIDIA runtime as the profile says."""
    where = f"server {server}: gpus"
    if wanted.by == "runtime":
        if "nvidia" not in info.runtimes:
            found = f"runtimes {', '.join(info.runtimes) or 'unknown'}"
            raise Refusal(Fault("no NVIDIA runtime", where, "the runtime 'nvidia'", found, _RUNTIME))
        return choose(wanted, allotment, _driver_names(where), server, "GPU {} of the driver")
    devices = host.cdi_devices(files) if info.devices is None else info.devices
    if not info.cdi_folders:
        fix = 'put {"features": {"cdi": true}} into /etc/docker/daemon.json (Docker 25 and newer), or gpus: by: runtime'
        raise Refusal(Fault("the engine takes no CDI devices", where, "an engine with CDI on", "off", fix))
    return choose(wanted, allotment, gpu_ids(devices), server, f"the CDI device {gpu_device('{}')}")


def _on_host(wanted: Gpus, allotment: Allotment | None, server: str) -> tuple[str, ...]:
    """Without containers a run counts GPUs as this process does: where Slurm holds devices in a cgroup, from 0."""
    if allotment is not None:
        allotment = Allotment(
            allotment.job, allotment.visible, allotment.visible, by_place=False, memory_bytes=None
        )
    return choose(wanted, allotment, _driver_names(f"server {server}: gpus"), server, "GPU {} of the driver")


def _driver_names(where: str) -> tuple[str, ...]:
    """Every name that the driver's GPUs have: indices, UUIDs, MIG devices."""
    found = gpus.read(ask_nvml())
    if found.problem is not None:
        fix = "install the NVIDIA driver, or mend what `nvidia-smi` says; `ferry doctor` has more"
        raise Refusal(Fault("no GPUs here", where, "a driver that answers", found.problem, fix))
    return tuple(name for one in found.gpus for name in (str(one.index), one.uuid, *one.mig_devices) if name)


def _memory_bounds(files: host.Files, info: EngineInfo | None, allotment: Allotment | None) -> Iterator[int]:
    """What bounds a run's memory, in bytes: the RAM, the groups that the run would be in, and a job that it belongs to.

    A container is in the engine's groups and not in the job's; the job's limit counts all the same.
    """
    yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    inside = [host.groups_above(files, info.cgroup_parent)] if info is not None and not info.rootless else []
    if not inside or allotment is not None:
        inside.append(host.own_groups(files))
    yield from (groups.memory.value for groups in inside if groups.memory.value is not None)
    if allotment is not None and allotment.memory_bytes is not None:
        yield allotment.memory_bytes
