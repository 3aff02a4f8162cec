"""Lint: whatever a line of a lock may be besides a pin with hashes is named, with its line and package, all at once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from runner.errors import Refusal
from runner.image_inputs import read_inputs
from runner.image_lock import Target, image_faults, lint
from runner.image_spec import load_spec
from runner.inside.lock import normalised, parse_lock
from tests.conftest import PROJECT

CPU = Target("3.11", "cpu")
CUDA = Target("3.11", "cuda")
HASH = "--hash=sha256:" + "0" * 64
FIX = "mend it"

# Line -> package as the fault names it, what is wrong with it, what was expected, what was found.
WRONG = {
    f"pkg>=2 {HASH}": ("pkg", "requirement is not pinned", "name==version", "pkg>=2"),
    f"pkg {HASH}": ("pkg", "requirement is not pinned", "name==version", "pkg"),
    f"pkg==1,<2 {HASH}": ("pkg", "requirement is not pinned", "name==version", "pkg==1,<2"),
    f"pkg===1 {HASH}": ("pkg", "requirement is not pinned", "name==version", "pkg===1"),
    f"pkg==1.* {HASH}": ("pkg", "requirement is not pinned", "name==version", "pkg==1.*"),
    f"pkg==one {HASH}": ("pkg", "version is no version", "as PEP 440 writes it", "one"),
    "Pkg==1": ("pkg", "requirement is not hashed", "only --hash=sha256:... behind the version", "no hash"),
    "pkg==1 --hash=md5:00": (
        "pkg", "requirement is not hashed", "only --hash=sha256:... behind the version", "--hash=md5:00"),
    f"pkg==1 {HASH[:-1]}": (
        "pkg", "requirement is not hashed", "only --hash=sha256:... behind the version", HASH[:-1]),
    f"pkg==1 {HASH} --config-settings=a=b": (
        "pkg", "requirement is not hashed", "only --hash=sha256:... behind the version", "--config-settings=a=b"),
    f"pkg @ file:///x/pkg.whl {HASH}": ("pkg", "requirement is an address", "name==version", "pkg @ file:///x/pkg.whl"),
    f"git+ssh://git@host/pkg#egg=a_Pkg {HASH}": (
        "a-pkg", "requirement is an address", "name==version", "git+ssh://git@host/pkg#egg=a_Pkg"),
    f"./wheels/pkg-1-py3-none-any.whl {HASH}": (
        "", "requirement is an address", "name==version", "./wheels/pkg-1-py3-none-any.whl"),
    "/wheels/pkg": ("", "requirement is an address", "name==version", "/wheels/pkg"),
    "-e .": ("", "requirement is editable", "name==version", "-e ."),
    "--editable=git+ssh://host/x#egg=pkg": (
        "pkg", "requirement is editable", "name==version", "--editable=git+ssh://host/x#egg=pkg"),
    "-r other.txt": ("", "option in a lock", "requirements only", "-r other.txt"),
    "-c constraints.txt": ("", "option in a lock", "requirements only", "-c constraints.txt"),
    "--index-url ftp://host/simple": ("", "option in a lock", "requirements only", "--index-url ftp://host/simple"),
    "--find-links wheels": ("", "option in a lock", "requirements only", "--find-links wheels"),
    f"pkg[fast]==1 {HASH}": ("pkg", "requirement has extras", "the packages that they stand for", "[fast]"),
    f"pkg==1 ; sys_platform == 'linux' {HASH}": (
        "pkg", "requirement is conditional", "a lock for one platform, without a marker", "sys_platform == 'linux'"),
    f"pkg==1 ; sys_platform == 'win32' {HASH}": (
        "pkg", "marker is for another platform", "Linux, x86-64, Python 3.11", "sys_platform == 'win32'"),
    f"pkg==1 ; python_version < '3.11' {HASH}": (
        "pkg", "marker is for another platform", "Linux, x86-64, Python 3.11", "python_version < '3.11'"),
    f"pkg==1 ; platform_machine == 'aarch64' {HASH}": (
        "pkg", "marker is for another platform", "Linux, x86-64, Python 3.11", "platform_machine == 'aarch64'"),
    f"pkg==1 ; nonsense {HASH}": (
        "pkg", "requirement is conditional", "a lock for one platform, without a marker",
        "nonsense, which is no marker"),
    f"pkg==1+cu128 {HASH}": ("pkg", "package is for another accelerator", "a build for the CPU", "pkg==1+cu128"),
    f"nvidia-cublas-cu12==1 {HASH}": (
        "nvidia-cublas-cu12", "package is for another accelerator", "a build for the CPU", "nvidia-cublas-cu12==1"),
}  # fmt: skip


def told(text: str, target: Target = CPU) -> list[tuple[str, str, str, str]]:
    """Return the faults of a lock called `lock`."""
    faults = lint(text, "lock", target, FIX)[1]
    assert all(fault.fix == FIX for fault in faults)
    return [(fault.what, fault.where, fault.expected, fault.found) for fault in faults]


@pytest.mark.parametrize("line", WRONG)
def test_each_wrong_line_is_told_by_line_and_package(line: str) -> None:
    """Unpinned, unhashed, an address, editable, an option, extras, a marker, another accelerator."""
    package, what, expected, found = WRONG[line]
    where = "lock:2" + (f": {package}" if package else "")
    assert told(f"first==1 {HASH}\n{line}\nlast==1 {HASH}\n") == [(what, where, expected, found)]


def test_a_build_for_the_cpu_is_wrong_in_an_image_for_cuda() -> None:
    """And the other way round; what only asks the driver is right in both."""
    text = f"torch==2.13.0+cpu {HASH}\nnvidia-ml-py==13 {HASH}\n"
    found = ("package is for another accelerator", "lock:1: torch", "a build for CUDA", "torch==2.13.0+cpu")
    assert told(text, CUDA) == [found]
    assert told(text, CPU) == []
    assert told(f"torch==2.10.0 {HASH}\nnvidia-cublas-cu12==12.8 {HASH}\n", CUDA) == []


def test_a_line_that_hides_behind_a_comment_is_told() -> None:
    """A carriage return, a form feed, U+2028 end a line for pip: what follows would be installed, and nobody saw it."""
    for end in "\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029":
        text = f"a==1 {HASH}\n# why{end}evil==1 {HASH}\n"
        ((what, where, _, found),) = told(text)
        assert (what, where) == ("line end that nobody sees", "lock:2")
        assert "evil" in found
    assert told(f"a==1 {HASH}\r\nb==1 {HASH}\r\n") == []


names = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,8}[A-Za-z0-9])?", fullmatch=True)
versions = st.from_regex(
    r"[0-9]{1,3}(\.[0-9]{1,3}){0,3}((a|b|rc)[0-9])?(\.post[0-9])?(\+ubuntu[0-9])?", fullmatch=True
)
hashes = st.lists(st.from_regex(r"[0-9a-f]{64}", fullmatch=True), min_size=1, max_size=3)
noise = st.sampled_from(["", "# a comment", "   ", "    # via x"])


@st.composite
def locks(draw: st.DrawFn) -> tuple[list[list[str]], dict[str, str]]:
    """A right lock in pieces, each the lines of one package and of the noise around it, and what it says."""
    said = draw(st.dictionaries(names, versions, min_size=1, max_size=6))
    said = {
        normalised(name): version
        for name, version in said.items()
        if not normalised(name).startswith("nvidia-")
    }
    pieces = []
    for name, version in said.items():
        words = [f"--hash=sha256:{value}" for value in draw(hashes)]
        split = draw(st.booleans())
        lines = [f"{name}=={version} \\", *(f"    {word} \\" for word in words[:-1]), f"    {words[-1]}"]
        pieces.append([*(lines if split else [" ".join([f"{name}=={version}", *words])]), draw(noise)])
    return pieces, said


def text_of(pieces: list[list[str]]) -> str:
    """The lock as a file."""
    return "".join(f"{line}\n" for piece in pieces for line in piece)


@given(locks())
def test_every_right_lock_passes_and_says_what_it_says(lock: tuple[list[list[str]], dict[str, str]]) -> None:
    """Over several lines or on one, with comments between: no fault, and the start program reads the same."""
    pieces, said = lock
    text = text_of(pieces)
    found, faults = lint(text, "lock", CPU, FIX)
    assert faults == []
    assert found == (parse_lock(text) if said else {}) == said


@given(
    locks(), st.lists(st.tuples(st.integers(0, 6), st.sampled_from(sorted(WRONG))), min_size=1, max_size=3)
)
def test_wrong_lines_among_right_ones_are_all_told_in_their_places(
    lock: tuple[list[list[str]], dict[str, str]], wrong: list[tuple[int, str]]
) -> None:
    """Whatever stands around them, every wrong line is told with its own number, together, and nothing else is."""
    pieces, _ = lock
    for place, line in wrong:
        pieces.insert(min(place, len(pieces)), [line])
    lines = text_of(pieces).split("\n")
    expected = {(number, WRONG[line][1]) for number, line in enumerate(lines, start=1) if line in WRONG}
    faults = [fault for fault in told(text_of(pieces)) if fault[0] != "requirement stands twice"]
    assert {(int(where.split(":")[1]), what) for what, where, _, _ in faults} == expected


@given(
    st.text(alphabet=st.sampled_from(list("ab-_.=1<>;[]@#\\/: \n\r\t\"'éﬁ\u2028\0")), max_size=60),
    st.booleans(),
)
def test_no_text_is_too_strange_and_what_passes_is_what_the_start_program_takes(
    text: str, hashed: bool
) -> None:
    """Never a traceback; a lock without a fault is read alike by both, and its versions are versions."""
    found, faults = lint(text.replace("#", HASH) if hashed else text, "lock", CPU, FIX)
    if not faults:
        assert parse_lock(text.replace("#", HASH) if hashed else text) == found
        for version in found.values():
            Version(version)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what images are made from, to be changed."""
    for name in ("Dockerfile", "images", "lockfiles", "runner"):
        source = PROJECT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    return tmp_path


def test_the_committed_locks_pass() -> None:
    """What is in git is what lint wants."""
    for path in sorted((PROJECT / "images").glob("*.yaml")):
        if path.stem != "pins":
            assert image_faults(load_spec(path.stem, PROJECT), PROJECT)[1] == []


def test_a_build_refuses_what_lint_refuses_and_tells_it_all(project: Path) -> None:
    """Both locks of an image, in one refusal; nothing is fetched before."""
    for name in ("cpu", "build"):
        with (project / "lockfiles" / f"{name}.txt").open("a") as file:
            file.write("--pre\nextra>1\n")
    with pytest.raises(Refusal) as caught:
        read_inputs("cpu", project)
    assert [fault.what for fault in caught.value.faults] == [
        "option in a lock", "requirement is not pinned"] * 2  # fmt: skip


def test_a_lock_that_its_list_has_outgrown_is_told(project: Path) -> None:
    """Somebody wrote another version into NAME.in and did not lock: the image would be the old one."""
    path = project / "lockfiles" / "cpu.in"
    path.write_text(path.read_text().replace("transformers==5.11.0", "transformers==5.12.0") + "absent\n")
    faults = image_faults(load_spec("cpu", project), project)[1]
    assert [(fault.what, fault.where, fault.expected, fault.found) for fault in faults] == [
        ("lock is older than its list", "lockfiles/cpu.in:2: transformers", "transformers==5.12.0",
         "transformers==5.11.0"),
        ("lock is older than its list", "lockfiles/cpu.in:7: absent", "absent", "not in the lock"),
    ]  # fmt: skip


def test_a_lock_that_is_no_text_is_told(project: Path) -> None:
    """Neither a missing lock nor one with other bytes gives a traceback."""
    (project / "lockfiles" / "cpu.txt").write_bytes(b"\xff\xfe")
    (project / "lockfiles" / "build.txt").unlink()
    faults = image_faults(load_spec("cpu", project), project)[1]
    assert [(fault.what, fault.where) for fault in faults] == [
        ("lock cannot be read", "lockfiles/cpu.txt"), ("lock cannot be read", "lockfiles/build.txt")]  # fmt: skip


def lint_command(project: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Run `ferry image lint`."""
    command = [sys.executable, "-m", "runner", "image", "lint", *names, "--project", str(project)]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)


def test_the_command_tells_what_is_wrong_with_all_images_together(project: Path) -> None:
    """A bad line of one and a stale expectation of another: one refusal, and nothing on the disk changes."""
    passed = lint_command(project)
    assert (passed.returncode, passed.stdout) == (
        0,
        "LINT PASS cpu: 47 packages\nLINT PASS cuda: 68 packages\n",
    )
    with (project / "lockfiles" / "cpu.txt").open("a") as file:
        file.write("extra>1\n")
    document = project / "images" / "cuda.yaml"
    document.write_text(document.read_text().replace("torch: 2.10.0", "torch: 2.9.0"))
    before = sorted(path.relative_to(project) for path in project.rglob("*"))
    refused = lint_command(project)
    assert refused.returncode == 3
    assert refused.stdout == ""
    told_of = [line for line in refused.stderr.splitlines() if line and not line.startswith(" ")]
    number = (project / "lockfiles" / "cpu.txt").read_text().count("\n")
    assert told_of == [
        "refused (2 faults)",
        f"requirement is not pinned: lockfiles/cpu.txt:{number}: extra",
        "lock is not as expected: lockfiles/cuda.txt: torch",
    ]
    assert sorted(path.relative_to(project) for path in project.rglob("*")) == before


def test_the_command_reads_the_images_that_are_named(project: Path) -> None:
    """Another image's fault is not this one's."""
    with (project / "lockfiles" / "cpu.txt").open("a") as file:
        file.write("extra>1\n")
    assert lint_command(project, "cuda").stdout == "LINT PASS cuda: 68 packages\n"
