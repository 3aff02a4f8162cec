"""Locks: what a line may be, and how an installed environment is compared with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.errors import Refusal
from runner.inside.lock import installed, lock_faults, parse_lock
from tests.conftest import PROJECT

HASH = "--hash=sha256:" + "0" * 64
FIX = "make the lock again: `uv pip compile --generate-hashes --no-emit-index-url`, see CONTRIBUTING.md"


def message(what: str, where: str, expected: str, found: str, fix: str = FIX) -> str:
    """Return a fault as people see it."""
    return f"{what}: {where}\n    expected {expected}\n    found    {found}\n    fix      {fix}"


def test_names_are_normalised_and_comments_and_continuations_understood() -> None:
    """A lock as uv writes it: one package over several lines, comments between them."""
    text = (
        f"# header\nHjson_Py.x==1.0 \\\n    {HASH} \\\n    {HASH}\n    # via a\n\ntorch==2.13.0+cpu {HASH}\n"
    )
    assert parse_lock(text) == {"hjson-py-x": "1.0", "torch": "2.13.0+cpu"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"torch>=2 {HASH}", message("requirement is not pinned", "lock:1", "name==version", "torch>=2")),
        (f"a==1 {HASH}\nb", message("requirement is not pinned", "lock:2", "name==version", "b")),
        (f"a==1.* {HASH}", message("requirement is not pinned", "lock:1", "name==version", "a==1.*")),
        (
            f"a @ file:///x/a.whl {HASH}",
            message("requirement is not pinned", "lock:1", "name==version", "a @ file:///x/a.whl"),
        ),
        ("-e .", message("requirement is not pinned", "lock:1", "name==version", "-e .")),
        (
            "a==1",
            message(
                "requirement is not hashed",
                "lock:1: a",
                "only --hash=sha256:... behind the version",
                "no hash",
            ),
        ),
        (
            "a==1 --hash=md5:00",
            message(
                "requirement is not hashed",
                "lock:1: a",
                "only --hash=sha256:... behind the version",
                "hash=md5:00",
            ),
        ),
        (
            f"a==1 ; sys_platform == 'win32' {HASH}",
            message("requirement is conditional", "lock:1", "no marker", "sys_platform == 'win32'"),
        ),
        (
            f"a_b==1 {HASH}\nA-b==2 {HASH}",
            message("requirement stands twice", "lock:2: a-b", "one line", "a second one"),
        ),
        ("# nothing\n", message("lock is empty", "lock", "at least one requirement", "none")),
    ],
)
def test_a_line_that_could_mean_two_things_is_refused(text: str, expected: str) -> None:
    """Unpinned, unhashed, conditional, editable, by address, twice: each refused with its line."""
    with pytest.raises(Refusal) as caught:
        parse_lock(text)
    assert str(caught.value) == expected


def test_all_faults_are_told_together() -> None:
    """One reading of a lock names every line of it that is wrong."""
    with pytest.raises(Refusal) as caught:
        parse_lock("a==1\nb\n")
    assert [fault.where for fault in caught.value.faults] == ["lock:1: a", "lock:2"]


def install(site: Path, name: str, version: str, folder: str = "") -> None:
    """Lay down what an installer writes for a package."""
    info = site / f"{folder or name}-{version}.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\nName: other\n"
    )


def test_every_difference_between_lock_and_environment_is_named(tmp_path: Path) -> None:
    """Missing, unexpected and different packages, all at once; names compare in their normal form."""
    lock = tmp_path / "lock.txt"
    lock.write_text("".join(f"{line} {HASH}\n" for line in ("Good_Name==1", "gone==2", "torch==2.13.0+cpu")))
    site = tmp_path / "site-packages"
    install(site, "good.name", "1")
    install(site, "torch", "2.13.0")
    install(site, "pip", "23")
    fix = "build the environment again from its lock"
    assert [str(fault) for fault in lock_faults(lock, site)] == [
        message("package is missing", f"{site}: gone", "2", "absent", fix),
        message("package is not in the lock", f"{site}: pip", "absent", "23", fix),
        message("package differs from the lock", f"{site}: torch", "2.13.0+cpu", "2.13.0", fix),
    ]


def test_a_package_installed_twice_equals_no_version(tmp_path: Path) -> None:
    """The leftovers of a half-made upgrade are a difference, whichever of the two Python would import."""
    install(tmp_path, "a", "1")
    install(tmp_path, "a", "2")
    assert installed(tmp_path) == {"a": "1 and 2"}


@pytest.mark.parametrize(("name", "markers"), [("cpu", False), ("build", False), ("runner", True)])
def test_the_committed_locks_are_pinned_hashed_and_without_an_address(name: str, markers: bool) -> None:
    """Every line of lockfiles/*.txt is a pin with hashes; where a package comes from is the caller's business."""
    path = PROJECT / "lockfiles" / f"{name}.txt"
    text = path.read_text()
    assert len(parse_lock(text, str(path), markers=markers)) >= 3
    assert not re.search(r"://|--(extra-)?index|--find-links|-i ", text)
