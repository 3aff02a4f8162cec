"""`ferry image lock`: from a list to a lock, by real uv and a folder of made-up wheels, without any index."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from runner.image_resolve import changes, indexes
from runner.image_spec import load_spec
from tests.conftest import PROJECT

DOCUMENT = """\
ferry: 1
name: tiny
base: {recipe: images/base}
python: "3.11"
lock: lockfiles/tiny.txt
build_lock: lockfiles/build.txt
accelerator: ACCELERATOR
arch: x86-64-v3
expect: {}
"""


def wheel(folder: Path, name: str, version: str, *requires: str) -> str:
    """Put a wheel with no code into `folder`; return its hash as a lock has it."""
    needs = "".join(f"Requires-Dist: {entry}\n" for entry in requires)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip('=')},{len(text)}\n"
        for path, text in files.items()
    )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for path, text in {**files, f"{info}/RECORD": record + f"{info}/RECORD,,\n"}.items():
            made.writestr(zipfile.ZipInfo(path), text)
    (folder / f"{name}-{version}-py3-none-any.whl").write_bytes(buffer.getvalue())
    return f"--hash=sha256:{hashlib.sha256(buffer.getvalue()).hexdigest()}"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with one image and a folder of wheels."""
    for name in ("images", "lockfiles", "wheels"):
        (tmp_path / name).mkdir()
    (tmp_path / "images" / "tiny.yaml").write_text(DOCUMENT.replace("ACCELERATOR", "cpu"))
    shutil.copy(PROJECT / "lockfiles" / "build.txt", tmp_path / "lockfiles")
    (tmp_path / "lockfiles" / "tiny.in").write_text("alpha\n")
    wheel(tmp_path / "wheels", "alpha", "1.0", "beta>=1", 'gamma; sys_platform == "win32"')
    wheel(tmp_path / "wheels", "beta", "1.0")
    return tmp_path


def lock(project: Path, plain_env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run `ferry image lock tiny`; nothing but the folder of wheels is asked."""
    command = [sys.executable, "-m", "runner", "image", "lock", "tiny", "--project", str(project), *words]
    # A folder whose name has no space: pip's variable is a list.
    folder = Path("/tmp") / f"ferry-wheels-{hashlib.sha256(str(project).encode()).hexdigest()[:12]}"
    folder.symlink_to(project / "wheels")
    try:
        return subprocess.run(
            command,
            cwd=PROJECT,
            env={**plain_env, "PIP_FIND_LINKS": str(folder), "UV_NO_INDEX": "1", "UV_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    finally:
        folder.unlink()


def test_a_list_becomes_a_lock_that_lints(project: Path, plain_env: dict[str, str]) -> None:
    """Pinned, hashed, for one platform, without an address; the second time nothing changes."""
    path = project / "lockfiles" / "tiny.txt"
    planned = lock(project, plain_env, "--dry-run")
    assert planned.stdout == "+ alpha 1.0\n+ beta 1.0\nWOULD LOCK lockfiles/tiny.txt: 2 packages changed\n", (
        planned.stderr
    )
    assert not path.exists()
    done = lock(project, plain_env)
    assert done.stdout == "+ alpha 1.0\n+ beta 1.0\nLOCKED lockfiles/tiny.txt: 2 packages changed\n", (
        done.stderr
    )
    text = path.read_text()
    assert "gamma" not in text
    assert "://" not in text
    assert str(project) not in text
    assert "wheels" not in text
    again = lock(project, plain_env)
    assert again.stdout == "LOCKED lockfiles/tiny.txt: as it was\n"
    assert path.read_text() == text


def test_versions_stay_until_an_upgrade_is_asked_for(project: Path, plain_env: dict[str, str]) -> None:
    """A newer version on an index changes nothing by itself; one package can be renewed alone, or all."""
    lock(project, plain_env)
    wheel(project / "wheels", "alpha", "1.1", "beta>=1")
    wheel(project / "wheels", "beta", "1.1")
    assert lock(project, plain_env).stdout == "LOCKED lockfiles/tiny.txt: as it was\n"
    one = lock(project, plain_env, "-P", "beta", "--json")
    assert json.loads(one.stdout) == {
        "changes": [{"after": "1.1", "before": "1.0", "package": "beta"}],
        "lock": "lockfiles/tiny.txt",
        "written": True,
    }
    both = lock(project, plain_env, "--upgrade")
    assert both.stdout.startswith("~ alpha 1.0 -> 1.1\n"), both.stderr


@pytest.mark.parametrize(
    ("listed", "status", "says"),
    [
        ("absent-package\n", 1, "absent-package"),
        ("alpha==3\n", 1, "alpha"),
        ("alpha @ file:///nowhere\n", 1, "nowhere"),
        ("-e .\n", 1, "command failed"),
        (None, 3, "no list of requirements"),
    ],
)
def test_what_gives_no_lock_leaves_the_old_one(
    project: Path, plain_env: dict[str, str], listed: str | None, status: int, says: str
) -> None:
    """No solution, no list, an address: told, and the lock is as it was."""
    path = project / "lockfiles" / "tiny.txt"
    path.write_text("old==1 --hash=sha256:" + "0" * 64 + "\n")
    old, listing = path.read_bytes(), project / "lockfiles" / "tiny.in"
    if listed is None:
        listing.unlink()
    else:
        listing.write_text(listed)
    done = lock(project, plain_env)
    assert (done.returncode, says in done.stderr) == (status, True), done.stderr
    assert path.read_bytes() == old


def test_what_is_no_lock_for_the_image_is_not_written(project: Path, plain_env: dict[str, str]) -> None:
    """A package by its address is solved by uv, and refused by the lint."""
    wheel(project / "wheels", "delta", "1.0+cu128")
    (project / "lockfiles" / "tiny.in").write_text("delta\n")
    done = lock(project, plain_env)
    assert (done.returncode, "package is for another accelerator" in done.stderr) == (3, True), done.stderr
    assert not (project / "lockfiles" / "tiny.txt").exists()


def test_changes_are_told_by_package() -> None:
    """Added, removed, renewed, and the same version with other files."""
    one, two = "--hash=sha256:" + "1" * 64, "--hash=sha256:" + "2" * 64
    before = f"a==1 \\\n    {one}\nb==1 {one}\nc==1 {one} {two}\nd==1 {one}\n"
    after = f"# note\nB==2 {one}\nc==1 {two} {one}\nd==1 {two}\ne==1 {one}\n"
    assert [str(change) for change in changes(before, after)] == [
        "- a 1", "~ b 1 -> 2", "~ d 1: other hashes", "+ e 1",
    ]  # fmt: skip


def test_indexes_are_those_that_pip_was_told_of() -> None:
    """Uv does not read pip's variables; a folder of CPU wheels is not offered to an image for CUDA."""
    told = {"PIP_INDEX_URL": "a:b", "PIP_EXTRA_INDEX_URL": "c:d e:f", "PIP_FIND_LINKS": "/x /y"}
    both = ["--default-index=a:b", "--index=c:d", "--index=e:f", "--index-strategy=unsafe-best-match"]
    assert indexes(load_spec("cpu", PROJECT), told) == [*both, "--find-links=/x", "--find-links=/y"]
    assert indexes(load_spec("cuda", PROJECT), told) == both
    assert indexes(load_spec("cpu", PROJECT), {}) == []
