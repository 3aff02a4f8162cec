"""What NVML answers, asked through nvidia-ml-py, and recorded: one JSON object from call to answer.

Promises: a recording holds plain JSON values and is complete: what `runner.gpus` reads, it reads from a recording, of
this host or of another. A call that NVML refuses is recorded with the name of its error. Changes nothing on a GPU.
A driver that is ill can block for ever: `python -m runner.nvml` prints the recording of this host, so that whoever asks
can do so in a process of its own, with a time limit.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Mapping
from typing import Any

Recording = Mapping[str, Mapping[str, Any]]

_UNCORRECTED = 1
_VOLATILE = 0
_AGGREGATE = 1
_P2P_NVLINK = 2
# H100 has 18 links, B200 18; NVML's own limit is 36. A GPU says itself where its links end.
_MAX_LINKS = 36
_DEVICE_CALLS = (
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceGetPowerManagementDefaultLimit",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetComputeRunningProcesses",
)


def key(call: str, *arguments: int) -> str:
    """Return the key that a recording has for `call` with `arguments`; a GPU is named by its index."""
    return " ".join([call, *map(str, arguments)])


def record() -> dict[str, dict[str, Any]]:
    """Ask this host's NVML everything that `runner.gpus` reads, and return the recording. May block."""
    import pynvml

    recorder = _Recorder(pynvml)
    if recorder.ask("nvmlInit") is _Refused:
        return recorder.calls
    try:
        _ask_all(recorder)
    finally:
        pynvml.nvmlShutdown()
    return recorder.calls


class _Refused:
    """Stands for the answer of a call that NVML refused."""


class _Recorder:
    """Asks NVML and keeps every answer."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.calls: dict[str, dict[str, Any]] = {}

    def ask(self, call: str, *arguments: int) -> Any:
        """Return the answer of a call that takes numbers, or `_Refused`."""
        return self._keep(key(call, *arguments), lambda: getattr(self._library, call)(*arguments))

    def ask_device(self, call: str, index: int, *arguments: int) -> Any:
        """Return the answer of a call whose first argument is the handle of the GPU `index`, or `_Refused`."""
        library = self._library
        return self._keep(
            key(call, index, *arguments),
            lambda: getattr(library, call)(library.nvmlDeviceGetHandleByIndex(index), *arguments),
        )

    def ask_peer(self, index: int, other: int) -> None:
        """Ask whether two GPUs reach each other by NVLink."""
        library = self._library
        handle = library.nvmlDeviceGetHandleByIndex
        self._keep(
            key("nvmlDeviceGetP2PStatus", index, other, _P2P_NVLINK),
            lambda: library.nvmlDeviceGetP2PStatus(handle(index), handle(other), _P2P_NVLINK),
        )

    def ask_memory(self, index: int) -> None:
        """Ask for the GPU's memory: the newer call tells what is in use from what the driver keeps for itself."""
        library = self._library

        def memory() -> Any:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            try:
                return library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2)
            except library.NVMLError_FunctionNotFound:  # Drivers before 510.
                return library.nvmlDeviceGetMemoryInfo(handle)

        self._keep(key("nvmlDeviceGetMemoryInfo", index), memory)

    def ask_fabric(self, index: int) -> None:
        """Ask how far the GPU is with the NVSwitch fabric, which CUDA waits for on servers that have one."""
        library = self._library

        def fabric() -> Any:
            answer = library.c_nvmlGpuFabricInfo_v2_t()
            library.nvmlDeviceGetGpuFabricInfoV(
                library.nvmlDeviceGetHandleByIndex(index), ctypes.byref(answer)
            )
            return {"state": answer.state, "status": answer.status}

        self._keep(key("nvmlDeviceGetGpuFabricInfoV", index), fabric)

    def ask_mig_device(self, index: int, instance: int) -> Any:
        """Ask for the UUID of a MIG device: a handle is of no use in a recording."""
        library = self._library
        return self._keep(
            key("nvmlDeviceGetMigDeviceHandleByIndex", index, instance),
            lambda: library.nvmlDeviceGetUUID(
                library.nvmlDeviceGetMigDeviceHandleByIndex(
                    library.nvmlDeviceGetHandleByIndex(index), instance
                )
            ),
        )

    def _keep(self, name: str, function: Any) -> Any:
        try:
            value = _plain(function())
        except self._library.NVMLError as error:
            self.calls[name] = {"error": type(error).__name__}
            return _Refused
        self.calls[name] = {"value": value}
        return value


def _ask_all(recorder: _Recorder) -> None:
    for call in (
        "nvmlSystemGetDriverVersion",
        "nvmlSystemGetNVMLVersion",
        "nvmlSystemGetCudaDriverVersion_v2",
    ):
        recorder.ask(call)
    count = recorder.ask("nvmlDeviceGetCount")
    for index in range(0 if count is _Refused else count):
        for call in _DEVICE_CALLS:
            recorder.ask_device(call, index)
        recorder.ask_memory(index)
        for counter in (_VOLATILE, _AGGREGATE):
            recorder.ask_device("nvmlDeviceGetTotalEccErrors", index, _UNCORRECTED, counter)
        for other in range(count):
            if other != index:
                recorder.ask_peer(index, other)
        _ask_fabric_and_parts(recorder, index)


def _ask_fabric_and_parts(recorder: _Recorder, index: int) -> None:
    recorder.ask_fabric(index)
    for link in range(_MAX_LINKS):
        if recorder.ask_device("nvmlDeviceGetNvLinkState", index, link) is _Refused:
            break
    for process in recorder.calls[key("nvmlDeviceGetComputeRunningProcesses", index)].get("value", ()):
        recorder.ask("nvmlSystemGetProcessName", process["pid"])
    mig = recorder.calls[key("nvmlDeviceGetMigMode", index)].get("value", (0, 0))
    instances = recorder.ask_device("nvmlDeviceGetMaxMigDeviceCount", index) if mig[0] else 0
    for instance in range(0 if instances is _Refused else instances):
        recorder.ask_mig_device(index, instance)


def _plain(value: Any) -> Any:
    """Return `value` as JSON has it: structures as objects, without their format version."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    fields = getattr(value, "_fields_", None)
    if fields is not None:
        return {name: _plain(getattr(value, name)) for name, *_ in fields if name != "version"}
    if hasattr(value, "__dict__"):
        return {name: _plain(item) for name, item in vars(value).items()}
    return value


if __name__ == "__main__":
    json.dump(record(), sys.stdout, indent=1, sort_keys=True)
