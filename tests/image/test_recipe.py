"""The recipe of an image: its document, what identifies it, and the scripts that make it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.errors import Refusal
from runner.image import cpu_faults
from runner.image_build import package_drift
from runner.image_inputs import environment_part, read_inputs
from runner.image_spec import ImageSpec, load_spec
from tests.conftest import PROJECT

RECIPE = ("Dockerfile", "images", "lockfiles", "runner")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what images are made from, to be changed."""
    for name in RECIPE:
        source = PROJECT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


def test_the_cpu_image_is_what_its_document_says() -> None:
    """Ops become DeepSpeed's build variables; the CPU level becomes the flags that a server must have."""
    spec = load_spec("cpu", PROJECT)
    assert spec.build_environment == {"DS_BUILD_CPU_ADAM": "1", "DS_BUILD_SHM_COMM": "1"}
    assert spec.cpu_flags == ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave")
    assert isinstance(spec, ImageSpec)


@pytest.mark.parametrize(
    ("old", "new", "what", "where"),
    [
        ("arch: x86-64-v3", "arch: native", "wrong value", "arch"),
        ("ferry: 1", "ferry: 2", "wrong value", "ferry"),
        ("ops:", "opps:", "unknown key", "opps"),
        ("lock: lockfiles/cpu.txt", "lock: ../cpu.txt", "wrong value", "lock"),
        ("base: {recipe: images/base}", "base: {image: debian, toolchain: debian}", "wrong value", "base"),
        ("base: {recipe: images/base}", "base: {recipe: images/base, variant: big}", "wrong value", "base"),
        ("  - [torch]", "  - [torch]\n  - []\n  - []\n  - []", "wrong value", "layers"),
        ("name: cpu", "name: gpu", "name differs", "name"),
    ],
)
def test_a_wrong_document_is_refused_by_key(project: Path, old: str, new: str, what: str, where: str) -> None:
    """Each wrong field is named with its key path; `native` is no architecture."""
    path = project / "images" / "cpu.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(Refusal) as caught:
        load_spec("cpu", project)
    assert (what, True) in {
        (fault.what, fault.where.startswith(f"{path}: {where}")) for fault in caught.value.faults
    }


def test_an_unknown_image_is_refused_with_those_that_exist(project: Path) -> None:
    """The whole message, once."""
    with pytest.raises(Refusal) as caught:
        load_spec("gpu", project)
    assert str(caught.value) == (
        f"no such image: {project}/images/gpu.yaml\n    expected one of cpu, cuda\n    found    gpu\n"
        "    fix      check the name, or write it"
    )


def test_a_lock_that_does_not_resolve_to_what_is_expected_is_refused(project: Path) -> None:
    """A lock that was made again with another torch does not become an image unnoticed."""
    path = project / "images" / "cpu.yaml"
    path.write_text(path.read_text().replace("torch: 2.13.0+cpu", "torch: 2.14.0+cpu"))
    with pytest.raises(Refusal) as caught:
        read_inputs("cpu", project)
    assert str(caught.value) == (
        "lock is not as expected: lockfiles/cpu.txt: torch\n    expected 2.14.0+cpu\n    found    2.13.0+cpu\n"
        "    fix      lock again, or mend the expectation"
    )


def test_a_layer_that_no_package_would_be_in_is_refused(project: Path) -> None:
    """A pattern that a new lock has left behind does not stay unnoticed."""
    path = project / "images" / "cuda.yaml"
    path.write_text(path.read_text().replace("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"))
    with pytest.raises(Refusal) as caught:
        read_inputs("cuda", project)
    assert str(caught.value) == (
        f"layer of no package: {path}: layers\n    expected a package of lockfiles/cuda.txt\n"
        "    found    nvidia-cudnn-cu13\n    fix      mend the pattern, or take it away"
    )


def test_the_inputs_are_the_same_in_another_folder_and_change_with_each_file(project: Path) -> None:
    """The hashes depend on contents alone; the start program does not touch the environment's hash."""
    here, there = read_inputs("cpu", PROJECT), read_inputs("cpu", project)
    assert (here.recipe, here.inputs) == (there.recipe, there.inputs)
    with (project / "runner" / "inside" / "lock.py").open("a") as file:
        file.write("# changed\n")
    changed = read_inputs("cpu", project)
    assert changed.recipe == there.recipe
    assert changed.inputs != there.inputs
    for name in (
        "images/venv.sh",
        "images/base/bootstrap.sh",
        "lockfiles/build.txt",
        "images/cpu.yaml",
    ):
        before = read_inputs("cpu", project)
        with (project / name).open("a") as file:
            file.write("# changed\n")
        assert read_inputs("cpu", project).recipe != before.recipe, name


DOCKERFILE = b"""\
# all of it
FROM base AS packages
RUN one

FROM packages AS environment
RUN two
ENV three


# the start program
FROM environment
RUN four
"""


def test_the_environment_depends_on_the_dockerfile_as_far_as_its_stage(project: Path) -> None:
    """What puts the start program on it changes the image, and compiles nothing again."""
    part = environment_part(DOCKERFILE)
    assert part.endswith(b"ENV three\n")
    for change in ((b"four", b"five"), (b"the start", b"another"), (b"three\n\n", b"three\n")):
        assert environment_part(DOCKERFILE.replace(*change)) == part
    for change in ((b"two", b"five"), (b"one", b"five"), (b"all", b"part"), (b"three", b"three \\\n  four")):
        assert environment_part(DOCKERFILE.replace(*change)) != part
    before = read_inputs("cpu", project)
    with (project / "Dockerfile").open("a") as file:
        file.write("LABEL changed=1\n")
    after = read_inputs("cpu", project)
    assert (after.recipe, after.inputs != before.inputs) == (before.recipe, True)


@pytest.mark.parametrize("text", [b"", DOCKERFILE.replace(b"AS environment", b""), DOCKERFILE + DOCKERFILE])
def test_a_dockerfile_with_no_such_stage_is_refused(project: Path, text: bytes) -> None:
    """Or with two: then nobody can say what the environment depends on."""
    (project / "Dockerfile").write_bytes(text)
    with pytest.raises(Refusal, match="no environment"):
        read_inputs("cpu", project)


BUILDER = """
def get_accelerator():
    class Accelerator:
        _name = RUNS
    return Accelerator

class OpBuilder:
    def __init__(self, name):
        self.name = name
    def cpu_arch(self):
        return 'x'
    def simd_width(self):
        return 'y'
    def load(self, installed_ops, accelerator_name):
        if installed_ops.get(self.name, False) and accelerator_name == get_accelerator()._name:
            return 'prebuilt'
        return 'compiled'
"""
ALL_OPS = "ALL_OPS = {op.name: op for op in __op_builders__ if op is not None}\n"
FOLDERS = ("op_builder", "deepspeed/ops/op_builder")


def patch(source: Path, arch: str = "x86-64-v3") -> subprocess.CompletedProcess[str]:
    """Run the script as the build does."""
    command = [sys.executable, str(PROJECT / "images" / "deepspeed_source.py"), str(source), arch]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def deepspeed(folder: Path, text: str) -> list[Path]:
    """Lay down the files of DeepSpeed's source that the script changes, `text` as its builder."""
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
        (folder / name / "builder.py").write_text(text)
        (folder / name / "all_ops.py").write_text(ALL_OPS)
    return [folder / name / "builder.py" for name in FOLDERS]


@pytest.mark.parametrize(("arch", "width"), [("x86-64-v3", "-D__AVX256__"), ("x86-64-v4", "-D__AVX512__")])
def test_deepspeed_compiles_for_the_named_architecture(tmp_path: Path, arch: str, width: str) -> None:
    """Whatever CPU builds, both answers are those of the named level, where ops are built and where they are loaded."""
    paths = deepspeed(tmp_path, BUILDER)
    assert patch(tmp_path, arch).returncode == 0
    for path in paths:
        space: dict[str, type] = {}
        exec(path.read_text(), space)  # noqa: S102 - the patched source is what is tested
        made = space["OpBuilder"]("cpu_adam")
        assert (made.cpu_arch(), made.simd_width()) == (f"-march={arch}", width)


@pytest.mark.parametrize(
    ("op", "built", "runs", "found"),
    [
        ("cpu_adam", "cuda", "cuda", "prebuilt"),
        ("cpu_adam", "cuda", "cpu", "prebuilt"),
        ("deepspeed_shm_comm", "cuda", "cpu", "prebuilt"),
        ("fused_adam", "cuda", "cpu", "compiled"),
        ("fused_adam", "cuda", "cuda", "prebuilt"),
    ],
)
def test_an_op_of_the_host_is_used_under_any_accelerator(
    tmp_path: Path, op: str, built: str, runs: str, found: str
) -> None:
    """Those whose binary is the same; an op that has a GPU's kernels stays with its accelerator, as DeepSpeed has it."""
    paths = deepspeed(tmp_path, BUILDER)
    assert patch(tmp_path).returncode == 0
    space: dict[str, Any] = {"RUNS": runs}
    exec(paths[1].read_text(), space)  # noqa: S102 - the patched source is what is tested
    assert space["OpBuilder"](op).load({op: 1}, built) == found


@pytest.mark.parametrize(
    ("text", "arch", "says"),
    [
        (
            BUILDER.replace("simd_width", "vector_width"),
            "x86-64-v3",
            "expected 'def simd_width(self):' exactly once, found it 0",
        ),
        (BUILDER + BUILDER, "x86-64-v3", "expected 'def cpu_arch(self):' exactly once, found it 2"),
        (BUILDER.replace("accelerator_name ==", "name is"), "x86-64-v3", "exactly once, found it 0"),
        (BUILDER, "native", "architecture 'native': expected one of x86-64-v3, x86-64-v4 (never native)"),
    ],
)
def test_a_deepspeed_that_changed_stops_the_build(tmp_path: Path, text: str, arch: str, says: str) -> None:
    """The script fails loudly, and every file stays as it was."""
    paths = deepspeed(tmp_path, text)
    done = patch(tmp_path, arch)
    assert done.returncode != 0
    assert says in done.stderr
    assert [path.read_text() for path in paths] == [text, text]
    assert (tmp_path / FOLDERS[0] / "all_ops.py").read_text() == ALL_OPS


def test_a_base_that_differs_from_its_list_is_told_package_by_package(tmp_path: Path) -> None:
    """A mirror that moved on is shown with each version and with the remedy."""
    listed, made = tmp_path / "listed", tmp_path / "made"
    listed.write_text("a=1\nb=1:2-3\ngone=1\n")
    made.write_text("a=1\nb=1:2-4\nnew=1\n")
    assert package_drift(listed, listed) == []
    assert package_drift(listed, made) == [
        "b is 1:2-4, listed is 1:2-3",
        "gone is absent, listed is 1",
        "new is 1, listed is none",
        f"differs from {listed}: the digest will be another one; accept with `just base-relock`",
    ]


def test_a_cpu_without_the_needed_flags_is_refused_with_their_names(tmp_path: Path) -> None:
    """An op for another CPU would end in an illegal instruction in the middle of a step."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx sse\n\nprocessor\t: 1\nflags\t\t: fpu avx2\n")
    assert cpu_faults(["avx"], "image x", cpuinfo) == []
    (fault,) = cpu_faults(["avx", "avx2", "fma"], "image x", cpuinfo)
    assert str(fault) == (
        "CPU cannot run the ops: image x\n    expected avx avx2 fma\n    found    this CPU lacks avx2 fma\n"
        "    fix      use a server whose CPU has them, or build an image for a lower `arch`"
    )


def test_no_file_of_the_recipe_names_a_package_index_or_mirror() -> None:
    """Where packages come from is the machine's business; only the engine's install page is named."""
    named = ["Dockerfile", "just", "Justfile", "bin/engine", "bin/lock", ".ci/run", "pyproject.toml"]
    paths = [PROJECT / name for name in named]
    paths += [
        path for name in ("images", "lockfiles") for path in (PROJECT / name).rglob("*") if path.is_file()
    ]
    for path in paths:
        found = re.findall(r"https?://[^\s)\"']+", path.read_text())
        assert set(found) <= {"https://docs.docker.com/engine/install/"}, path
