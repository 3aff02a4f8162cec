"""What was seen of a host, all of it, as one value that can be written down and read again elsewhere.

Promises: `to_json` gives the same bytes for the same observations; it holds of an engine's answers only the keys that
are read (no registry, no proxy, no label), and of the environment names only, never a value.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from runner.errors import Fault, Refusal
from runner.folder_probe import Folder
from runner.host import cdi_specs
from runner.nvml import Recording

_FORMAT = 1
_INFO_KEYS = (
    "CDISpecDirs", "CgroupDriver", "CgroupVersion", "DefaultRuntime", "DiscoveredDevices", "DockerRootDir", "Driver",
    "DriverStatus", "KernelVersion", "MemTotal", "MemoryLimit", "NCPU", "OperatingSystem", "PidsLimit", "SecurityOptions",
    "ServerVersion", "SwapLimit", "Warnings",
)  # fmt: skip
_VERSION_KEYS = ("ApiVersion", "Arch", "MinAPIVersion", "Os", "Version")


@dataclasses.dataclass(frozen=True)
class EngineSeen:
    """An engine's answers, or the `problem` that kept it from answering; `buildx` and `compose` as they print themselves."""

    problem: str | None
    info: Mapping[str, Any]
    version: Mapping[str, Any]
    buildx: str | None
    compose: str | None


@dataclasses.dataclass(frozen=True)
class HubCache:
    """The caller's Hugging Face cache; its size is None where it took too long to add up."""

    path: str
    exists: bool
    size_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Observations:
    """Everything that was seen. Sizes in bytes.

    `files` are texts of the host's own files; `missing` are the paths that CDI specs name and that are not there;
    `secrets` are names of environment variables that hold tokens; `clock` is the year, and whether the kernel says that
    the clock is synchronised (None where it does not say); `build` says for each build tool whether it is there.
    """

    engine: EngineSeen
    nvml: Recording
    files: Mapping[str, str]
    missing: tuple[str, ...]
    run_folder: Folder
    engine_folder: Folder | None
    shm: Folder
    hub: HubCache
    secrets: tuple[str, ...]
    clock: tuple[int, bool | None]
    build: Mapping[str, bool]

    @property
    def cdi(self) -> dict[str, dict[str, Any]]:
        """The NVIDIA CDI specs of the host, by path."""
        return cdi_specs(self.files)


def engine_seen(
    info: Mapping[str, Any], version: Mapping[str, Any], buildx: str | None, compose: str | None
) -> EngineSeen:
    """Return what is kept of an engine's answers."""
    kept = {name: info[name] for name in _INFO_KEYS if name in info}
    kept["Runtimes"] = {name: {} for name in info.get("Runtimes") or {}}
    return EngineSeen(
        None, kept, {name: version[name] for name in _VERSION_KEYS if name in version}, buildx, compose
    )


def to_json(seen: Observations) -> bytes:
    """Return the recording of `seen`."""
    value = {"ferry_doctor": _FORMAT, **dataclasses.asdict(seen)}
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True).encode() + b"\n"


def from_json(raw: bytes, where: str) -> Observations:
    """Return the observations that `to_json` wrote. Raises `Refusal` if `raw` is no such recording."""
    try:
        value = json.loads(raw)
        if value.pop("ferry_doctor") != _FORMAT:
            raise ValueError("another format")  # noqa: TRY301 - one place says what is wrong
        folder = value["engine_folder"]
        year, synchronised = value["clock"]
        return Observations(
            engine=EngineSeen(**value["engine"]),
            nvml=value["nvml"],
            files=value["files"],
            missing=tuple(value["missing"]),
            run_folder=Folder(**value["run_folder"]),
            engine_folder=None if folder is None else Folder(**folder),
            shm=Folder(**value["shm"]),
            hub=HubCache(**value["hub"]),
            secrets=tuple(value["secrets"]),
            clock=(year, synchronised),
            build=value["build"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fix = "make it with `ferry doctor --record FILE`, by this version of Ferry"
        found = f"{type(error).__name__}: {error}"
        raise Refusal(
            Fault("not a recording", where, f"ferry_doctor: {_FORMAT}, and every field", found, fix)
        ) from error
