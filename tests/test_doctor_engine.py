"""What `ferry doctor` says of container engines and of their way to give GPUs."""

from __future__ import annotations

import dataclasses

import pytest

from runner.doctor import diagnose
from runner.doctor_check import Asked, State
from runner.engine_info import cdi_devices, gpu_ids, missing_gpus, version_tuple
from tests.doctor_hosts import (
    FOUR,
    files_say,
    info_says,
    lines,
    no_engine,
    nvml_says,
    recorded,
    refused,
    warned,
)

H100 = recorded("h100-sxm-4")
PCIE = recorded("a100-pcie-3")
SPEC = "/etc/cdi/nvidia.yaml"


def test_an_engine_that_does_not_answer_is_refused() -> None:
    """With what it said; the lines that would need it are not made up."""
    checks = {check.check: check for check in diagnose(no_engine(H100, "Permission denied"), FOUR)}
    assert checks["engine"].state is State.REFUSED
    assert checks["engine"].found == "Permission denied"
    assert "just engine" in checks["engine"].remedy
    assert not {"image store", "GPU wiring", "compose"} & checks.keys()


def test_the_venv_engine_needs_no_container_engine() -> None:
    """What nobody asked for is told and refuses nothing."""
    asked = Asked(profile=True, engine="venv")
    assert refused(no_engine(H100, "no such file"), asked) == {}
    assert lines(no_engine(H100, "no such file"), asked, State.NOTE)["engine"].found == "no such file"


def test_an_engine_that_is_too_old_is_refused() -> None:
    """Docker 20.10, as Debian 12 has it."""
    engine = dataclasses.replace(H100.engine, version={"ApiVersion": "1.41"}, compose=None, buildx=None)
    seen = info_says(
        dataclasses.replace(H100, engine=engine), ServerVersion="20.10.24+dfsg1", DiscoveredDevices=None
    )
    assert refused(seen) == {"engine": "Docker 20.10.24+dfsg1, API 1.41, cgroup v2"}
    assert warned(seen)["compose"] == "none"


@pytest.mark.parametrize(
    ("said", "good"),
    [("2.40.3-3", True), ("v2.20.0", True), ("2.19.1", False), ("1.29.2", False), ("", False)],
)
def test_compose_versions(said: str, good: bool) -> None:
    """`include` came with 2.20."""
    seen = dataclasses.replace(H100, engine=dataclasses.replace(H100.engine, compose=said))
    assert ("compose" not in warned(seen)) is good


def test_no_way_to_give_gpus_is_refused_and_explained() -> None:
    """Neither CDI nor the runtime: the words that `docker run --gpus all` would end in are said."""
    seen = info_says(H100, DiscoveredDevices=None, Runtimes={"runc": {}})
    assert refused(seen) == {
        "GPU wiring": "neither CDI devices nor the NVIDIA runtime; `--gpus all` would end in: "
        'could not select device driver "" with capabilities: [[gpu]]'
    }
    assert refused(seen, Asked(profile=True)) == {}
    remedy = lines(seen, FOUR, State.REFUSED)["GPU wiring"].remedy
    assert "nvidia-ctk cdi generate" in remedy


def test_the_runtime_alone_is_warned_of() -> None:
    """GPUs then vanish when systemd reloads its units: nvidia-container-toolkit 48."""
    seen = info_says(H100, DiscoveredDevices=None)
    assert refused(seen) == {}
    assert set(warned(seen)) == {"GPU wiring", "GPU loss"}
    assert set(warned(info_says(seen, CgroupDriver="cgroupfs"))) == {"GPU wiring"}


def test_cdi_that_is_off_is_turned_on() -> None:
    """Docker 25 to 28.1 read no specs until they are told to, whatever lies in /etc/cdi."""
    seen = info_says(PCIE, CDISpecDirs=[], Runtimes={"runc": {}})
    check = lines(seen, FOUR, State.REFUSED)["GPU wiring"]
    assert '{"features": {"cdi": true}}' in check.remedy


def test_every_missing_device_is_named() -> None:
    """One line each, with what there is."""
    asked = dataclasses.replace(FOUR, gpus=("0", "5", "GPU-x"))
    found = refused(H100, asked)
    assert found["GPU 5"] == found["GPU GPU-x"] == "no such device; there are 0, 1, 2, 3"


def test_a_stale_cdi_spec_is_refused() -> None:
    """After an update of the driver the specs name libraries that are gone: no container would start."""
    gone = ("/usr/lib/x86_64-linux-gnu/libcuda.so.570.124.06",)
    seen = dataclasses.replace(H100, missing=gone)
    assert refused(seen) == {"CDI specs": f"{SPEC} is stale: no {gone[0]}"}
    assert refused(seen, Asked(profile=True)) == {}


def test_a_spec_that_is_no_yaml_or_of_another_device_is_left_alone() -> None:
    """The engine tells of the first; the second is nobody's GPU."""
    seen = files_say(
        H100, {"/etc/cdi/x.json": "{", "/etc/cdi/nic.yaml": "kind: intel.com/nic\n", "/etc/cdi/l.yaml": "[]"}
    )
    assert set(seen.cdi) == {SPEC}
    assert refused(seen) == {}


def test_limits_that_the_engine_cannot_enforce_are_warned_of() -> None:
    """A memory guard that is ignored is none."""
    assert "MemoryLimit" in warned(info_says(H100, MemoryLimit=False))["engine limits"]


def test_a_gpu_is_good_for_both_or_named_by_both() -> None:
    """An engine that lists four devices on a server whose driver has three."""
    seen = nvml_says(H100, {"nvmlDeviceGetCount": 3})
    assert refused(seen) == {"GPU 3 present": "the driver has 0, 1, 2"}


def test_devices_as_an_engine_lists_them() -> None:
    """The answer of Docker 28.5 to a CDI spec; an older engine has no such key."""
    info = {
        "DiscoveredDevices": [
            {"Source": "cdi", "ID": "nvidia.com/gpu=1"},
            {"Source": "cdi", "ID": "nvidia.com/gpu=0"},
            {"Source": "cdi", "ID": "nvidia.com/gpu=all"},
            {"Source": "cdi", "ID": "vendor.com/nic=0"},
        ]
    }
    devices = cdi_devices(info)
    assert gpu_ids(devices) == ("0", "1")
    assert missing_gpus(devices, ("0", "2", "vendor.com/nic=0", "all")) == ("2",)
    assert cdi_devices({"DiscoveredDevices": None}) == cdi_devices({}) == ()


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("28.5.2+dfsg4", (28, 5, 2)), ("v0.24.0", (0, 24, 0)), ("1.51", (1, 51)), ("2.40.3-3", (2, 40, 3)), ("dev", ()), ("", ())],
)  # fmt: skip
def test_versions(text: str, numbers: tuple[int, ...]) -> None:
    """The leading numbers, whatever a packager has put behind them."""
    assert version_tuple(text) == numbers
