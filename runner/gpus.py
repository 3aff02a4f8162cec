"""The GPUs of a server as values, read from a recording of NVML's answers (`runner.nvml`).

Promises: pure functions; what NVML does not say (not supported, no permission) is None, never a guess. Memory in
bytes, power in watts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from runner.engine_info import version_tuple
from runner.nvml import Recording, key

_NVLINK = 2
_FABRIC = ("not supported", "not started", "in progress", "completed")
_FABRIC_COMPLETED = 3
_PROHIBITED = 2
# Bits of nvmlDeviceGetCurrentClocksEventReasons that cost speed and that an operator can mend (nvml.h). An idle GPU, an
# application's clocks and the software power cap under load are no fault.
_SLOWDOWNS = {
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "software thermal slowdown",
    0x0000000000000040: "hardware thermal slowdown",
    0x0000000000000080: "power brake",
}
_NO_LIBRARY = {
    "NVMLError_LibraryNotFound": "no NVML library (libnvidia-ml.so.1): no NVIDIA driver is installed here",
    "NVMLError_DriverNotLoaded": "the NVIDIA kernel module is not loaded",
    "NVMLError_LibRmVersionMismatch": "library and kernel module of the driver differ: it was updated, and not restarted",
    "NVMLError_NoPermission": "this user may not open the NVIDIA devices",
}

# The oldest Linux driver of a CUDA release, and of its major version by minor-version compatibility. From NVIDIA's CUDA
# Toolkit release notes (table 3, "CUDA Toolkit and Corresponding Driver Versions"; there was no 12.7) and from CUDA
# Compatibility ("Minor Version Compatibility"). A program of 12.8 runs on a 12.0 driver unless it needs code made from
# PTX at run time.
_NATIVE = {
    (12, 0): (525, 60, 13),
    (12, 1): (530, 30, 2),
    (12, 2): (535, 54, 3),
    (12, 3): (545, 23, 6),
    (12, 4): (550, 54, 14),
    (12, 5): (555, 42, 2),
    (12, 6): (560, 28, 3),
    (12, 8): (570, 26),
    (12, 9): (575, 51, 3),
    (13, 0): (580, 65, 6),
    (13, 1): (590, 44, 1),
    (13, 2): (595, 45, 4),
}
_MAJOR = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}


@dataclasses.dataclass(frozen=True)
class Process:
    """A process that computes on a GPU; its memory is None where the driver does not say."""

    pid: int
    name: str
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU. `links` says of each NVLink whether it is up; `peers` are the indices that it reaches by NVLink.

    `problem` is NVML's own word for a GPU that does not answer (lost, reset required).
    """

    index: int
    problem: str | None
    uuid: str
    name: str
    bus_id: str
    memory_bytes: int | None
    used_bytes: int | None
    ecc: bool | None
    ecc_pending: bool | None
    uncorrected_now: int | None
    uncorrected_ever: int | None
    remap_pending: bool | None
    remap_failed: bool | None
    retirement_pending: bool | None
    mig: bool | None
    mig_devices: tuple[str, ...]
    persistence: bool | None
    prohibited: bool | None
    power_limit_w: float | None
    power_default_w: float | None
    slowdowns: tuple[str, ...]
    fabric: str | None
    links: tuple[bool, ...]
    peers: tuple[int, ...]
    processes: tuple[Process, ...]

    @property
    def fabric_ready(self) -> bool:
        """Whether CUDA can start as far as the NVSwitch fabric goes; true where there is none."""
        return self.fabric in (None, _FABRIC[0], _FABRIC[_FABRIC_COMPLETED])


@dataclasses.dataclass(frozen=True)
class Gpus:
    """What NVML says of a server: why it says nothing (`problem`), or its driver and GPUs.

    `driver` as NVIDIA writes it ('570.124.06'); `cuda` is the newest CUDA that the driver itself knows.
    """

    problem: str | None
    driver: str
    cuda: tuple[int, int] | None
    gpus: tuple[Gpu, ...]

    def named(self, gpu: str) -> Gpu | None:
        """Return the GPU that a CDI id means: '0', 'gpu0', 'GPU-...', or a MIG device '0:1', 'mig0:1', 'MIG-...'."""
        for one in self.gpus:
            if gpu in (str(one.index), f"gpu{one.index}", one.uuid) or gpu in one.mig_devices:
                return one
            place, colon, instance = gpu.removeprefix("mig").partition(":")
            if colon and place == str(one.index) and instance.isdecimal() and one.mig:
                return one
        return None

    def asked(self, ids: tuple[str, ...]) -> tuple[Gpu, ...]:
        """Return the GPUs that `ids` mean, each once, in order of index; all of them for 'all'. Unknown ids give none."""
        if "all" in ids:
            return self.gpus
        found = {one.index: one for one in map(self.named, ids) if one is not None}
        return tuple(found[index] for index in sorted(found))

    def missing(self, ids: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of `ids` that mean no GPU here, in their order."""
        return tuple(gpu for gpu in ids if gpu != "all" and self.named(gpu) is None)


def read(recording: Recording) -> Gpus:
    """Return what the recording says."""
    answers = _Answers(recording)
    start = recording.get("nvmlInit", {"error": "nothing was recorded"})
    if "error" in start:
        problem = str(start["error"])
        return Gpus(_NO_LIBRARY.get(problem, problem), "", None, ())
    cuda = answers.get("nvmlSystemGetCudaDriverVersion_v2")
    count = answers.get("nvmlDeviceGetCount") or 0
    return Gpus(
        None,
        str(answers.get("nvmlSystemGetDriverVersion") or ""),
        None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        tuple(_gpu(answers, index, count) for index in range(count)),
    )


def driver_fits(driver: str, cuda: tuple[int, int]) -> bool | None:
    """Whether `driver` runs programs of `cuda`: True natively, None by minor-version compatibility only, False not."""
    found = version_tuple(driver)
    if found >= needed_driver(cuda):
        return True
    return None if found >= _MAJOR.get(cuda[0], (10**6,)) else False


def needed_driver(cuda: tuple[int, int]) -> tuple[int, ...]:
    """Return the oldest driver that knows `cuda` itself; for a CUDA newer than the table, more than any driver."""
    known = [driver for version, driver in _NATIVE.items() if version >= cuda]
    return min(known) if known else (10**6,)


def oldest_driver(cuda: tuple[int, int]) -> tuple[int, ...]:
    """Return the oldest driver that runs programs of `cuda` at all."""
    return _MAJOR.get(cuda[0], needed_driver(cuda))


def driver_text(driver: tuple[int, ...]) -> str:
    """Return a driver version as NVIDIA writes it."""
    return ".".join([str(driver[0]), *(f"{part:02}" for part in driver[1:])])


class _Answers:
    """The answers of a recording; None for a call that was refused or not made."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def get(self, call: str, *arguments: int) -> Any:
        return self._recording.get(key(call, *arguments), {}).get("value")

    def error(self, call: str, *arguments: int) -> str | None:
        error = self._recording.get(key(call, *arguments), {}).get("error")
        return None if error is None else str(error).removeprefix("NVMLError_")

    def flag(self, call: str, *arguments: int) -> bool | None:
        value = self.get(call, *arguments)
        return None if value is None else bool(value)


def _gpu(answers: _Answers, index: int, count: int) -> Gpu:
    memory = answers.get("nvmlDeviceGetMemoryInfo", index) or {}
    ecc = answers.get("nvmlDeviceGetEccMode", index) or (None, None)
    rows = answers.get("nvmlDeviceGetRemappedRows", index) or (None, None, None, None)
    mig = answers.get("nvmlDeviceGetMigMode", index)
    compute = answers.get("nvmlDeviceGetComputeMode", index)
    fabric = answers.get("nvmlDeviceGetGpuFabricInfoV", index)
    reasons = answers.get("nvmlDeviceGetCurrentClocksEventReasons", index) or 0
    links = (answers.get("nvmlDeviceGetNvLinkState", index, link) for link in range(36))
    return Gpu(
        index=index,
        problem=answers.error("nvmlDeviceGetUUID", index) or answers.error("nvmlDeviceGetMemoryInfo", index),
        uuid=str(answers.get("nvmlDeviceGetUUID", index) or ""),
        name=str(answers.get("nvmlDeviceGetName", index) or "unknown"),
        bus_id=str((answers.get("nvmlDeviceGetPciInfo", index) or {}).get("busId", "")),
        memory_bytes=memory.get("total"),
        used_bytes=memory.get("used"),
        ecc=_bool(ecc[0]),
        ecc_pending=_bool(ecc[1]),
        uncorrected_now=answers.get("nvmlDeviceGetTotalEccErrors", index, 1, 0),
        uncorrected_ever=answers.get("nvmlDeviceGetTotalEccErrors", index, 1, 1),
        remap_pending=_bool(rows[2]),
        remap_failed=_bool(rows[3]),
        retirement_pending=answers.flag("nvmlDeviceGetRetiredPagesPendingStatus", index),
        mig=None if mig is None else bool(mig[0]),
        mig_devices=_mig_devices(answers, index),
        persistence=answers.flag("nvmlDeviceGetPersistenceMode", index),
        prohibited=None if compute is None else compute == _PROHIBITED,
        power_limit_w=_watts(answers.get("nvmlDeviceGetPowerManagementLimit", index)),
        power_default_w=_watts(answers.get("nvmlDeviceGetPowerManagementDefaultLimit", index)),
        slowdowns=tuple(name for bit, name in _SLOWDOWNS.items() if reasons & bit),
        fabric=None if fabric is None else _FABRIC[fabric["state"]] if fabric["state"] < 4 else "unknown",
        links=tuple(bool(link) for link in links if link is not None),
        peers=tuple(
            other
            for other in range(count)
            if answers.get("nvmlDeviceGetP2PStatus", index, other, _NVLINK) == 0
        ),
        processes=_processes(answers, index),
    )


def _mig_devices(answers: _Answers, index: int) -> tuple[str, ...]:
    count = answers.get("nvmlDeviceGetMaxMigDeviceCount", index) or 0
    found = (answers.get("nvmlDeviceGetMigDeviceHandleByIndex", index, instance) for instance in range(count))
    return tuple(str(uuid) for uuid in found if uuid is not None)


def _processes(answers: _Answers, index: int) -> tuple[Process, ...]:
    listed = answers.get("nvmlDeviceGetComputeRunningProcesses", index) or ()
    return tuple(
        Process(
            one["pid"],
            str(answers.get("nvmlSystemGetProcessName", one["pid"]) or "name not shown"),
            one.get("usedGpuMemory"),
        )
        for one in sorted(listed, key=lambda one: int(one["pid"]))
    )


def _bool(value: Any) -> bool | None:
    return None if value is None else bool(value)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
