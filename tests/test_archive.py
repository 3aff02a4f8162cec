"""The code archive: the same bytes for the same files, and nothing in one can do harm."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner import archive, sums
from runner.errors import Refusal

FILES = {"b/run.sh": (True, b"#!/bin/sh\n"), "a.py": (False, b"print(1)\n")}

safe = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=12
).filter(lambda name: sums.unsafe_reason(name) is None and "/" not in name)


@given(st.dictionaries(safe, st.tuples(st.booleans(), st.binary(max_size=50)), max_size=5))
def test_what_is_packed_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, files: archive.Members
) -> None:
    """Names, content and the executable bit survive; the order of the files does not matter."""
    raw = archive.make(files)
    assert archive.make(dict(reversed(files.items()))) == raw
    path = tmp_path_factory.mktemp("archive") / "code.tar.gz"
    path.write_bytes(raw)
    assert archive.read(path) == files


def test_an_archive_of_git_is_read(tmp_path: Path) -> None:
    """`git archive` gives the tree that git says."""
    source = tmp_path / "source"
    archive.unpack(FILES, source)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y", "-c", "init.defaultBranch=main"]
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["commit", "-qm", "x"],
        ["archive", "-o", "../code.tar", "HEAD"],
    ):
        subprocess.run([*git, *command], cwd=source, check=True, capture_output=True)
    tree = subprocess.run(
        [*git, "rev-parse", "HEAD^{tree}"], cwd=source, check=True, capture_output=True, text=True
    )
    assert archive.tree_of(archive.read(tmp_path / "code.tar")) == tree.stdout.strip()


def member(name: str, **fields: object) -> tarfile.TarInfo:
    """Return a tar entry with `fields`."""
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


HOSTILE = {
    "climbing": ([member("../x")], "has an empty, '.' or '..' part"),
    "absolute": ([member("/etc/x")], "absolute"),
    "symbolic link": (
        [member("x", type=tarfile.SYMTYPE, linkname="/etc")],
        "a link, a device or another special entry",
    ),
    "hard link": (
        [member("x", type=tarfile.LNKTYPE, linkname="y")],
        "a link, a device or another special entry",
    ),
    "device": ([member("x", type=tarfile.CHRTYPE)], "a link, a device or another special entry"),
    "pipe": ([member("x", type=tarfile.FIFOTYPE)], "a link, a device or another special entry"),
    "setuid": ([member("x", mode=0o4755)], "setuid or setgid"),
    "deep": ([member("a/" * 3000 + "x")], "lies more than 100 folders deep"),
    "twice": ([member("x"), member("x")], "stands twice"),
    "file and folder": ([member("x"), member("x/y")], "both"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_could_do_harm_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Nothing but plain files and folders inside the archive is taken."""
    members, reason = HOSTILE[name]
    path = tmp_path / "code.tar"
    with tarfile.open(path, "w") as tar:
        for entry in members:
            tar.addfile(entry, io.BytesIO())
    with pytest.raises(Refusal) as refused:
        archive.read(path)
    assert [fault.found for fault in refused.value.faults] == [reason]


@pytest.mark.parametrize("how", ["xz", "bz2"])
def test_another_compression_is_refused(tmp_path: Path, how: str) -> None:
    """Only gzip or none: what may come out of others cannot be bounded as they are read (rule S2)."""
    path = tmp_path / "code.tar"
    with tarfile.open(path, f"w:{how}") as tar:  # type: ignore[call-overload]
        tar.addfile(member("x"), io.BytesIO())
    with pytest.raises(Refusal, match="gzipped or not"):
        archive.read(path)


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would unpack to more than the limit is refused before it is held."""
    monkeypatch.setattr(archive, "LIMIT_BYTES", 1000)
    path = tmp_path / "code.tar.gz"
    path.write_bytes(archive.make({"zeros": (False, bytes(2000))}))
    with pytest.raises(Refusal, match="archive too large"):
        archive.read(path)


@pytest.mark.parametrize("cut", [0, 1, 20, 60, -1, -9])
def test_a_damaged_archive_is_refused(tmp_path: Path, cut: int) -> None:
    """A cut-off archive is not an archive with fewer files."""
    path = tmp_path / "code.tar.gz"
    path.write_bytes(archive.make(FILES)[:cut])
    with pytest.raises(Refusal, match="archive damaged"):
        archive.read(path)


def test_unpacked_code_is_read_only(tmp_path: Path) -> None:
    """The run cannot change its code by accident."""
    archive.unpack(FILES, tmp_path / "code")
    assert (tmp_path / "code" / "b" / "run.sh").stat().st_mode & 0o777 == 0o555
    assert (tmp_path / "code" / "a.py").stat().st_mode & 0o777 == 0o444
