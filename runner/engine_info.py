"""What a Docker engine says of itself, read: `docker info` and `docker version` as values, and what follows from them.

Promises: pure functions of the engine's own answers (`DockerClient.info()`, `.version()`); a key that is missing, as in
older engines, is the answer "not said", never a traceback. Talks to no engine: `docker_engine` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

CDI_KIND = "nvidia.com/gpu"
# `docker info` lists CDI devices since API 1.50 (engine 28.2, which also turned CDI on by default; since engine 25
# it can be turned on). From the engine's API history and release notes.
LISTS_DEVICES = (1, 50)
# Engine 25, the first that takes CDI devices and whose image store can be containerd's.
MINIMUM_API = (1, 44)


@dataclasses.dataclass(frozen=True)
class EngineInfo:
    """The facts of an engine that Ferry's containers depend on; `devices` is None where it does not list any.

    `devices` and `runtimes` are names as the engine has them ('nvidia.com/gpu=0', 'nvidia').
    """

    version: str
    api: tuple[int, ...]
    containerd_store: bool
    runtimes: tuple[str, ...]
    default_runtime: str
    cdi_folders: tuple[str, ...]
    devices: tuple[str, ...] | None
    cgroup_driver: str
    cgroup_version: str
    root: str
    rootless: bool

    @property
    def cgroup_parent(self) -> str:
        """The cgroup that the engine puts containers into."""
        return "/system.slice" if self.cgroup_driver == "systemd" else "/docker"


def read_info(info: Mapping[str, Any], version: Mapping[str, Any]) -> EngineInfo:
    """Return the facts in the engine's answers `info` and `version`."""
    api = version_tuple(str(version.get("ApiVersion", "")))
    security = _strings(info.get("SecurityOptions"))
    return EngineInfo(
        version=str(info.get("ServerVersion") or version.get("Version") or "unknown"),
        api=api,
        containerd_store=containerd_store(info),
        runtimes=tuple(sorted(info.get("Runtimes") or {})),
        default_runtime=str(info.get("DefaultRuntime", "")),
        cdi_folders=_strings(info.get("CDISpecDirs")),
        devices=cdi_devices(info) if api >= LISTS_DEVICES or "DiscoveredDevices" in info else None,
        cgroup_driver=str(info.get("CgroupDriver", "")),
        cgroup_version=str(info.get("CgroupVersion", "")),
        root=str(info.get("DockerRootDir", "")),
        rootless=any(option == "name=rootless" for option in security),
    )


def cdi_devices(info: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the CDI devices that `docker info` lists, 'vendor/class=name' each, sorted; none if it lists none."""
    listed = info.get("DiscoveredDevices") or ()
    return tuple(sorted(str(one["ID"]) for one in listed if one.get("Source") == "cdi" and "ID" in one))


def gpu_device(gpu: str) -> str:
    """Return the CDI device of the GPU with the id `gpu` of a server profile; a full device name is itself."""
    return gpu if "=" in gpu else f"{CDI_KIND}={gpu}"


def gpu_ids(devices: Iterable[str]) -> tuple[str, ...]:
    """Return the ids of the GPUs among the CDI `devices`, in their order, without 'all'."""
    prefix = f"{CDI_KIND}="
    return tuple(
        name.removeprefix(prefix) for name in devices if name.startswith(prefix) and name != f"{prefix}all"
    )


def missing_gpus(devices: Iterable[str], gpus: Iterable[str]) -> tuple[str, ...]:
    """Return the ids of `gpus` that have no CDI device among `devices`, in their order."""
    present = frozenset(devices)
    return tuple(gpu for gpu in gpus if gpu_device(gpu) not in present)


def has_nvidia_runtime(info: Mapping[str, Any]) -> bool:
    """Whether the engine knows the NVIDIA runtime, which `--gpus` and device requests by it need."""
    return "nvidia" in (info.get("Runtimes") or {})


def containerd_store(info: Mapping[str, Any]) -> bool:
    """Whether images lie in containerd's store: only there does an image keep the digest of its manifest."""
    status = info.get("DriverStatus") or ()
    return any(list(pair[:1]) == ["driver-type"] and "containerd" in str(pair[1:]) for pair in status)


def version_tuple(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version ('28.5.2+dfsg4' -> (28, 5, 2)); () if it has none."""
    numbers = []
    for part in text.strip().removeprefix("v").split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def _strings(value: Any) -> tuple[str, ...]:
    return tuple(str(item) for item in value or ())
