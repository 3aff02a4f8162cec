"""What `ferry doctor` says of drivers and GPUs, on recorded servers that are broken in one way each."""

from __future__ import annotations

import dataclasses

import pynvml
import pytest

from runner import gpus, nvml
from runner.doctor_check import Asked, State
from tests.doctor_hosts import FOUR, Failed, lines, nvml_says, recorded, refused, warned

H100 = recorded("h100-sxm-4")
PCIE = recorded("a100-pcie-3")


def test_a_healthy_server_is_good() -> None:
    """Four H100 with NVLink, asked for by a profile: nothing refused, nothing warned of."""
    assert refused(H100) == {}
    assert warned(H100) == {}
    good = lines(H100, FOUR, State.GOOD)
    assert good["GPUs"].found == "4 x NVIDIA H100 80GB HBM3, 79.6 GiB"
    assert good["NVLink"].found == "18 links up a GPU, every pair connected"
    assert good["driver"].found == "570.124.06 (knows CUDA 12.8)"


def test_a_gpu_that_is_not_there_is_refused_by_name() -> None:
    """4 asked for, 3 present: both the engine and the driver say which one is missing."""
    found = refused(PCIE)
    assert found == {"GPU 3": "no such device; there are 0, 1, 2", "GPU 3 present": "the driver has 0, 1, 2"}


def test_cards_without_nvlink_are_no_fault() -> None:
    """The links of PCIe cards without a bridge are all down, which is how they are."""
    asked = dataclasses.replace(FOUR, gpus=("0", "1", "2"))
    assert refused(PCIE, asked) == {}
    assert set(warned(PCIE, asked)) == {"image store", "driver"}
    assert lines(PCIE, asked, State.NOTE)["NVLink"].found == "no link is up: GPUs talk over PCIe"


BUSY = {
    "nvmlDeviceGetComputeRunningProcesses 2": [
        {
            "pid": 41877,
            "usedGpuMemory": 71 << 30,
            "gpuInstanceId": 4294967295,
            "computeInstanceId": 4294967295,
        }
    ],
    "nvmlSystemGetProcessName 41877": "/opt/venv/bin/python",
}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (
            {"nvmlDeviceGetTotalEccErrors 1 1 0": 2, "nvmlDeviceGetTotalEccErrors 1 1 1": 3},
            {"ECC errors": "GPU 1: 2 uncorrected since the last reset"},
        ),
        (BUSY, {"GPU 2 users": "pid 41877 /opt/venv/bin/python, 71.0 GiB"}),
        (
            {"nvmlDeviceGetRemappedRows 0": [0, 1, 1, 0]},
            {"GPU memory": "GPU 0: a row or page waits to be taken out of use"},
        ),
        ({"nvmlDeviceGetRemappedRows 3": [0, 9, 0, 1]}, {"GPU memory": "GPU 3: a row could not be remapped"}),
        (
            {"nvmlDeviceGetRetiredPagesPendingStatus 0": 1},
            {"GPU memory": "GPU 0: a row or page waits to be taken out of use"},
        ),
        ({"nvmlDeviceGetMigMode 1": [1, 1]}, {"MIG": "on for GPU 1, asked for as a whole"}),
        ({"nvmlDeviceGetComputeMode 1": 2}, {"compute mode": "prohibited on GPU 1"}),
        ({"nvmlDeviceGetUUID 2": Failed("NVMLError_GpuIsLost")}, {"GPU 2 answers": "GpuIsLost"}),
        (
            {"nvmlDeviceGetGpuFabricInfoV 0": {"state": 2, "status": 0}},
            {"NVSwitch fabric": "GPU 0: fabric in progress"},
        ),
        (
            {"nvmlSystemGetDriverVersion": "470.256.02", "nvmlSystemGetCudaDriverVersion_v2": 11040},
            {"driver": "470.256.02 (knows CUDA 11.4)"},
        ),
        ({"nvmlInit": Failed("NVMLError_LibraryNotFound")}, {"driver": "no NVML library (libnvidia-ml.so.1): no NVIDIA driver is installed here"}),
        ({"nvmlInit": Failed("NVML does not answer within 30 s")}, {"driver": "NVML does not answer within 30 s"}),
    ],
)  # fmt: skip
def test_what_no_run_should_start_on_is_refused(answers: dict[str, object], expected: dict[str, str]) -> None:
    """Each with the GPU's index and, where somebody uses it, who."""
    assert refused(nvml_says(H100, answers)) == expected


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"nvmlDeviceGetEccMode 3": [0, 1]}, {"ECC": "off on GPU 3"}),
        ({"nvmlDeviceGetPersistenceMode 0": 0}, {"persistence": "off on GPU 0"}),
        (
            {"nvmlDeviceGetNvLinkState 2 5": 0, "nvmlDeviceGetNvLinkState 2 6": 0},
            {"NVLink": "GPU 2: 2 of 18 links down"},
        ),
        ({"nvmlDeviceGetP2PStatus 0 3 2": 5}, {"NVLink": "not by NVLink: 0-3"}),
        ({"nvmlDeviceGetPowerManagementLimit 1": 400000}, {"power": "capped: GPU 1: 400 of 700 W"}),
        ({"nvmlDeviceGetCurrentClocksEventReasons 1": 0x48}, {"slowdown": "GPU 1: hardware slowdown, hardware thermal slowdown"}),
        (
            {"nvmlDeviceGetMemoryInfo 0": {"total": 85520809984, "reserved": 577896448, "free": 1 << 30, "used": 40 << 30}},
            {"GPU 0 users": "40.0 GiB held by nobody who is seen from here"},
        ),
        ({"nvmlSystemGetDriverVersion": "535.183.01", "nvmlSystemGetCudaDriverVersion_v2": 12020}, {"driver": "535.183.01 (knows CUDA 12.2)"}),
        ({"nvmlDeviceGetName 3": "NVIDIA H200"}, {"GPUs": "3 x NVIDIA H100 80GB HBM3, 79.6 GiB; 1 x NVIDIA H200, 79.6 GiB"}),
    ],
)  # fmt: skip
def test_what_costs_speed_or_safety_is_warned_of(
    answers: dict[str, object], expected: dict[str, str]
) -> None:
    """Nothing of it keeps a run from starting."""
    seen = nvml_says(H100, answers)
    assert warned(seen) == expected
    assert refused(seen) == {}


def test_gpus_that_nobody_asked_for_are_information() -> None:
    """A profile without GPUs: the busiest, oldest server refuses nothing and warns of nothing."""
    seen = nvml_says(H100, {**BUSY, "nvmlSystemGetDriverVersion": "470.256.02"})
    asked = Asked(profile=True)
    assert refused(seen, asked) == {}
    assert warned(seen, asked) == {}
    assert lines(seen, asked, State.NOTE)["GPU 2 users"].found == "pid 41877 /opt/venv/bin/python, 71.0 GiB"


def test_a_general_look_warns_and_does_not_refuse() -> None:
    """Without a profile nobody has asked for GPUs yet, but people look for what is wrong with them."""
    seen = nvml_says(H100, BUSY)
    assert refused(seen, Asked()) == {}
    assert set(warned(seen, Asked())) == {"GPU 2 users"}


def test_only_the_gpus_that_are_asked_for_count() -> None:
    """A neighbour's GPU may be busy."""
    assert refused(nvml_says(H100, BUSY), dataclasses.replace(FOUR, gpus=("0", "1"))) == {}


def test_ranks_and_model_of_the_run() -> None:
    """Fewer GPUs than ranks is refused; another model than the run spec's is warned of."""
    asked = dataclasses.replace(FOUR, gpus=("0", "1"), ranks=4, gpu_model="H100 80GB")
    assert refused(H100, asked) == {"GPUs": "2 asked for"}
    other = dataclasses.replace(FOUR, ranks=4, gpu_model="H200")
    assert set(warned(H100, other)) == {"GPUs"}
    assert warned(H100, dataclasses.replace(other, gpu_model="H100 80GB")) == {}


@pytest.mark.parametrize("name", ["0", "gpu0", "GPU-0f3c1a2e-7b04-4d5e-9a61-0c2d3e4f5a60"])
def test_the_names_of_a_gpu(name: str) -> None:
    """By index, by type and index, by UUID: as CDI specs name them."""
    found = gpus.read(H100.nvml).named(name)
    assert found is not None
    assert found.index == 0


def test_the_names_of_a_part_of_a_gpu() -> None:
    """MIG devices, by index and by UUID; without MIG there are none."""
    mig = nvml_says(
        H100,
        {
            "nvmlDeviceGetMigMode 1": [1, 1],
            "nvmlDeviceGetMaxMigDeviceCount 1": 7,
            "nvmlDeviceGetMigDeviceHandleByIndex 1 0": "MIG-5f1c",
        },
    )
    found = gpus.read(mig.nvml)
    assert [one.index for one in found.asked(("1:0", "MIG-5f1c"))] == [1]
    assert found.missing(("0:0", "1:0", "MIG-5f1d", "7")) == ("0:0", "MIG-5f1d", "7")
    asked = dataclasses.replace(FOUR, gpus=("MIG-5f1c",))
    assert "MIG" not in refused(mig, asked)


@pytest.mark.parametrize(
    ("driver", "cuda", "fits"),
    [
        ("570.26", (12, 8), True),
        ("570.25", (12, 8), None),
        ("580.65.06", (12, 8), True),
        ("525.60.13", (12, 8), None),
        ("525.60.11", (12, 8), False),
        ("570.124.06", (13, 0), False),
        ("580.65.06", (13, 2), None),
        ("560.35.05", (12, 7), None),
        ("999.1", (14, 0), False),
        ("", (12, 8), False),
    ],
)
def test_drivers_against_cuda(driver: str, cuda: tuple[int, int], fits: bool | None) -> None:
    """NVIDIA's tables: natively, by minor-version compatibility (None), or not; a CUDA newer than the tables never."""
    assert gpus.driver_fits(driver, cuda) is fits


class Driver:
    """One H100 with MIG on, used by one process, as NVML's C library answers; what it has not is not supported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended = False
        memory = pynvml.c_nvmlMemory_v2_t()
        memory.total, memory.reserved, memory.used = 80 << 30, 1 << 29, 3 << 30
        pci = pynvml.nvmlPciInfo_t()
        pci.busId = b"00000000:1B:00.0"
        process = pynvml.nvmlFriendlyObject({"pid": 77, "usedGpuMemory": None})
        answers: dict[str, object] = {
            "nvmlInit": None,
            "nvmlSystemGetDriverVersion": "570.124.06",
            "nvmlSystemGetNVMLVersion": "12.570.124.06",
            "nvmlSystemGetCudaDriverVersion_v2": 12080,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetPciInfo": pci,
            "nvmlDeviceGetMemoryInfo": memory,
            "nvmlDeviceGetMigMode": [1, 1],
            "nvmlDeviceGetMaxMigDeviceCount": 2,
            "nvmlDeviceGetComputeRunningProcesses": [process],
            "nvmlSystemGetProcessName": "python",
        }

        def absent(*_: object, **__: object) -> object:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

        for name in dir(pynvml):
            if name.startswith(("nvmlDeviceGet", "nvmlSystemGet", "nvmlInit")) and callable(
                getattr(pynvml, name)
            ):
                monkeypatch.setattr(pynvml, name, absent)
        for name, value in answers.items():
            monkeypatch.setattr(pynvml, name, lambda *_, answer=value, **__: answer)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: ("gpu", index))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMigDeviceHandleByIndex", self.mig)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: "-".join(map(str, handle)))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkState", self.link)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetGpuFabricInfoV", self.fabric)
        monkeypatch.setattr(pynvml, "nvmlShutdown", self.end)

    def mig(self, handle: tuple[str, int], index: int) -> tuple[str, int]:
        if index:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "MIG", handle[1]

    def link(self, _: object, link: int) -> int:
        if link == 18:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return 1

    def fabric(self, _: object, reference: object) -> None:
        reference._obj.state = 3  # type: ignore[attr-defined]

    def end(self) -> None:
        self.ended = True


def test_a_driver_is_recorded_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Structures, errors, links up to where they end, MIG devices, processes: through nvidia-ml-py's own types."""
    driver = Driver(monkeypatch)
    recording = nvml.record()
    assert driver.ended
    assert recording["nvmlDeviceGetEccMode 0"] == {"error": "NVMLError_NotSupported"}
    assert recording["nvmlDeviceGetNvLinkState 0 18"] == {"error": "NVMLError_InvalidArgument"}
    (gpu,) = gpus.read(recording).gpus
    assert gpu == gpus.Gpu(
        index=0, problem=None, uuid="gpu-0", name="NVIDIA H100 80GB HBM3", bus_id="00000000:1B:00.0",
        memory_bytes=80 << 30, used_bytes=3 << 30, ecc=None, ecc_pending=None, uncorrected_now=None,
        uncorrected_ever=None, remap_pending=None, remap_failed=None, retirement_pending=None, mig=True,
        mig_devices=("MIG-0",), persistence=None, prohibited=None, power_limit_w=None, power_default_w=None,
        slowdowns=(), fabric="completed", links=(True,) * 18, peers=(), processes=(gpus.Process(77, "python", None),),
    )  # fmt: skip


def test_an_old_driver_is_asked_in_the_old_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 510 there is no second version of the call for memory."""
    Driver(monkeypatch)
    old = pynvml.c_nvmlMemory_t()
    old.total, old.used = 16 << 30, 1 << 20

    def memory(_: object, version: int | None = None) -> object:
        if version is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return old

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory)
    (gpu,) = gpus.read(nvml.record()).gpus
    assert (gpu.memory_bytes, gpu.used_bytes) == (16 << 30, 1 << 20)
