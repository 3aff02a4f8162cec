"""`ferry image smoke`: what its probe says is judged in full, and a real image passes it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.errors import Refusal
from runner.image_smoke import faults_of, kernel_faults
from runner.image_smoke import smoke as smoke_test
from runner.image_spec import load_spec
from tests.conftest import PROJECT

SITE = "/opt/venv/lib/python3.11/site-packages/deepspeed/ops"


def good(name: str) -> dict[str, Any]:
    """Return the answer of a probe in which everything is as the image's document says."""
    spec = load_spec(name, PROJECT)
    loaded = {"ops": {op: f"{SITE}/{op}.so" for op in spec.ops}, "calls": [], "extensions": []}
    return {
        "versions": dict(spec.expect),
        "not_imported": {},
        "loads": {accelerator: copy.deepcopy(loaded) for accelerator in sorted({spec.accelerator, "cpu"})},
        "launcher": "built" if name == "cuda" else "FileNotFoundError: gcc",
        "unmet": [],
    }


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_an_image_that_is_as_its_document_says_has_no_fault(name: str) -> None:
    """Both images, each with what is right for it."""
    assert faults_of(good(name), load_spec(name, PROJECT)) == []


def test_everything_that_is_wrong_is_told_at_once() -> None:
    """One fault for each difference, with the accelerator under which it was seen."""
    answer = good("cuda")
    answer["versions"]["torch"] = "2.10.0+cpu"
    answer["not_imported"] = {"fla": "ImportError: no"}
    answer["unmet"] = ["deepspeed: nvidia-ml-py, found absent"]
    answer["loads"]["cuda"]["ops"]["cpu_adam"] = "/tmp/extensions/cpu_adam.so"
    answer["loads"]["cpu"]["calls"] = ["/tmp/hidden/c++ -march=native"]
    answer["loads"]["cpu"]["extensions"] = ["cpu_adam"]
    answer["launcher"] = "fatal error: Python.h: No such file or directory"
    found = [
        (fault.what, fault.where, fault.found) for fault in faults_of(answer, load_spec("cuda", PROJECT))
    ]
    assert found == [
        ("version differs", "image cuda: torch", "2.10.0+cpu"),
        ("module does not import", "image cuda: fla", "ImportError: no"),
        ("requirement does not hold", "image cuda", "deepspeed: nvidia-ml-py, found absent"),
        ("a compiler was called", "image cuda: DS_ACCELERATOR=cpu", "/tmp/hidden/c++ -march=native"),
        ("a compiler was called", "image cuda: DS_ACCELERATOR=cpu", "cpu_adam was made"),
        ("op is not prebuilt", "image cuda: DS_ACCELERATOR=cuda: cpu_adam", "/tmp/extensions/cpu_adam.so"),
        ("Triton could compile nothing", "image cuda", "fatal error: Python.h: No such file or directory"),
    ]


def test_a_compiler_in_the_cpu_image_is_a_fault() -> None:
    """It has nothing to compile."""
    answer = good("cpu") | {"launcher": "built"}
    (fault,) = faults_of(answer, load_spec("cpu", PROJECT))
    assert (fault.what, fault.where) == ("a compiler is in the image", "image cpu")


KERNELS = {
    "gpus": ["NVIDIA H100"] * 4,
    "distances": [0.0004] * 4,
    "files": ["A/chunk.cubin", "B/launcher.so"],
}


def test_kernels_that_are_right_and_kept_have_no_fault() -> None:
    """Four GPUs, four results near the definition, and nothing compiled by the second run."""
    assert kernel_faults(KERNELS, KERNELS, "image cuda") == []


def test_everything_that_is_wrong_with_kernels_is_told_at_once() -> None:
    """A GPU too few, a result that is no number, a kernel that was compiled again; by run and GPU."""
    first = KERNELS | {"gpus": ["NVIDIA H100"] * 3, "distances": [0.0004, float("nan"), 0.02]}
    second = KERNELS | {"files": ["A/chunk.cubin", "C/launcher.so"]}
    found = [(fault.what, fault.where, fault.found) for fault in kernel_faults(first, second, "image cuda")]
    assert found == [
        ("GPUs differ", "image cuda: first run", "3"),
        ("kernel is wrong", "image cuda: first run: GPU 1", "nan"),
        ("kernel is wrong", "image cuda: first run: GPU 2", "0.02"),
        ("kernel is not kept", "image cuda: second run", "B/launcher.so"),
        ("kernel is not kept", "image cuda: second run", "C/launcher.so"),
    ]


def test_a_cache_that_stays_empty_is_a_fault() -> None:
    """Both runs agree, and neither has shown anything: it is elsewhere, and lost with the container."""
    empty = KERNELS | {"files": []}
    assert [fault.what for fault in kernel_faults(empty, empty, "image cuda")] == [
        "nothing in Triton's cache"
    ]


def test_an_image_for_cpus_is_not_tested_on_gpus(tmp_path: Path) -> None:
    """It is refused before anything is built or laid out."""
    with pytest.raises(Refusal) as caught:
        smoke_test("cpu", PROJECT, tmp_path / "smoke", print, gpu=True)
    assert str(caught.value) == (
        "image has no CUDA: image cpu: accelerator\n    expected cuda\n    found    cpu\n"
        "    fix      leave out --gpu, or smoke-test the image 'cuda'"
    )
    assert list(tmp_path.iterdir()) == []


def smoke(name: str, work: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `ferry image smoke`."""
    command = [sys.executable, "-m", "runner", "image", "smoke", name, "--work", str(work), *options]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=2400)


@pytest.mark.engine
def test_the_cpu_image_passes(tmp_path: Path) -> None:
    """The real thing: nothing compiled, and the moved run is EXACT."""
    done = smoke("cpu", tmp_path / "smoke", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["verdict"].startswith("EXACT: 40 of 40 updates")
    assert said["found"]["loads"]["cpu"]["calls"] == []
