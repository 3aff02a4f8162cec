"""What only real GPUs can show: ops and kernels under a real CUDA, and a moved run of four GPUs. Skipped elsewhere, by name.

Until they ran on a server with GPUs, nothing in here is more than written: what runs on CPUs is in test_image_smoke.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import docker
import pytest

from runner import image
from runner.image_smoke import NO_COMPILER, kernel_faults
from runner.image_spec import load_spec
from tests.conftest import PROJECT

# The optimizer's state lies on the host, gradients come from the GPU and parameters go back there, as ZeRO's offload does it.
OFFLOADED_STEP = """
import json, os, torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
assert get_accelerator()._name == "cuda" and torch.cuda.is_available(), "no GPU"
weights = torch.linspace(-1, 1, 1003, device="cuda")
host = torch.nn.Parameter(weights.float().cpu())
twin = torch.nn.Parameter(host.detach().clone().double())
ours, theirs = DeepSpeedCPUAdam([host], lr=0.01), torch.optim.AdamW([twin], lr=0.01, weight_decay=0.0)
for step in range(5):
    gradient = torch.sin(weights * (step + 1))
    host.grad, twin.grad = gradient.cpu(), gradient.double().cpu()
    ours.step(), theirs.step()
    weights.copy_(host.detach())
far = (host.double() - twin).abs().max().item()
print("STEP " + json.dumps({"file": ours.ds_opt_adam.__file__, "far": far, "made": os.listdir(os.environ["TORCH_EXTENSIONS_DIR"])}))
"""


@pytest.fixture(scope="module")
def cuda() -> str:
    """The image 'cuda', built if it is not there."""
    return image.build("cuda", PROJECT, on_line=print).digest


def said(client: docker.DockerClient, reference: str, word: str, code: str, **options: Any) -> dict[str, Any]:
    """Return the JSON that `code` prints behind `word`, in a container like a run's that has the first GPU."""
    container = client.containers.create(
        reference,
        entrypoint=["/opt/venv/bin/python", "-I", "-c", code],
        device_requests=[docker.types.DeviceRequest(driver="cdi", device_ids=["nvidia.com/gpu=0"])],
        network_mode="none",
        read_only=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        tmpfs={"/tmp": "rw,exec,mode=1777", "/tmp/extensions": "rw,exec,mode=1777"},
        **options,
    )
    try:
        container.start()
        status = container.wait()["StatusCode"]
        output = container.logs().decode()
    finally:
        container.remove(force=True)
    assert status == 0, output
    (line,) = [line for line in output.splitlines() if line.startswith(f"{word} ")]
    answer: dict[str, Any] = json.loads(line.removeprefix(f"{word} "))
    return answer


@pytest.mark.engine
@pytest.mark.gpu(1)
def test_the_prebuilt_op_steps_with_gradients_of_a_gpu_and_nothing_is_compiled(
    client: docker.DockerClient, cuda: str
) -> None:
    """DeepSpeed compares accelerator and CUDA version with what it was built for: under a real CUDA it must take the op."""
    environment = {"HOME": "/tmp", "TORCH_EXTENSIONS_DIR": "/tmp/extensions", **NO_COMPILER}
    answer = said(client, cuda, "STEP", OFFLOADED_STEP, environment=environment)
    assert answer["file"].startswith("/opt/venv/lib/")
    assert answer["made"] == []
    assert answer["far"] < 1e-5


@pytest.mark.engine
@pytest.mark.gpu(1)
def test_a_kernel_is_compiled_once_and_found_again_without_a_compiler(
    client: docker.DockerClient, cuda: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Triton's cache lies on scratch and outlives the container, as it does between two segments of a run."""
    scratch = tmp_path_factory.mktemp("scratch")
    scratch.chmod(0o777)
    script = (PROJECT / "images" / "kernels.py").read_text()
    mount = docker.types.Mount("/tmp/caches", str(scratch), type="bind")
    environment = {"HOME": "/tmp", "TRITON_CACHE_DIR": "/tmp/caches/triton"}
    first = said(client, cuda, "KERNELS", script, mounts=[mount], environment=environment)
    second = said(client, cuda, "KERNELS", script, mounts=[mount], environment=environment | NO_COMPILER)
    wrong = [fault for fault in kernel_faults(first, second, "cuda") if fault.what != "GPUs differ"]
    assert wrong == []
    assert (len(first["gpus"]), len(second["gpus"])) == (1, 1)


@pytest.mark.engine
@pytest.mark.gpu(4)
def test_a_run_of_four_gpus_that_moved_is_the_run_that_never_moved(tmp_path: Path, cuda: str) -> None:
    """The whole road on GPUs: probe, kernels on each, stop, pack, move, resume; EXACT."""
    command = [sys.executable, "-m", "runner", "image", "smoke", "cuda", "--gpu", "--json"]
    command += ["--work", str(tmp_path / "smoke")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert value["verdict"].startswith("EXACT: 40 of 40 updates")
    assert value["image"]["digest"] == cuda
    assert set(value["found"]["loads"]["cuda"]["ops"]) == set(load_spec("cuda", PROJECT).ops)
    assert len(value["found"]["kernels"]["gpus"]) == 4
