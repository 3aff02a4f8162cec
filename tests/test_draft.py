"""Files without a name: they get one as they lie, or nothing is left of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.draft import name_draft, open_draft, written_out


def test_a_draft_is_given_its_name_as_it_lies(tmp_path: Path) -> None:
    draft = open_draft(tmp_path)
    assert draft is not None
    write = written_out(draft)
    write(b"one\n")
    write(b"two\n")
    inode = os.fstat(draft.fileno()).st_ino
    assert list(tmp_path.iterdir()) == []

    status = name_draft(draft, tmp_path / "named")

    assert status is not None
    named = (tmp_path / "named").stat()
    assert (named.st_ino, named.st_size, named.st_ctime_ns) == (inode, 8, status.st_ctime_ns)
    assert (tmp_path / "named").read_bytes() == b"one\ntwo\n"


def test_a_large_draft_is_whole(tmp_path: Path) -> None:
    draft = open_draft(tmp_path)
    assert draft is not None
    write = written_out(draft)
    pieces = [bytes([number]) * (40 << 20) for number in range(3)]
    for piece in pieces:
        write(piece)

    assert name_draft(draft, tmp_path / "named") is not None
    assert (tmp_path / "named").read_bytes() == b"".join(pieces)


def test_a_draft_that_gets_no_name_leaves_nothing(tmp_path: Path) -> None:
    draft = open_draft(tmp_path)
    assert draft is not None
    written_out(draft)(b"one\n")
    draft.close()

    assert list(tmp_path.iterdir()) == []


def test_a_draft_never_takes_the_place_of_another_file(tmp_path: Path) -> None:
    (tmp_path / "named").write_bytes(b"mine")
    draft = open_draft(tmp_path)
    assert draft is not None

    with pytest.raises(FileExistsError):
        name_draft(draft, tmp_path / "named")
    assert (tmp_path / "named").read_bytes() == b"mine"


def test_a_draft_of_another_file_system_gets_no_name(tmp_path: Path) -> None:
    draft = open_draft(Path("/dev/shm"))
    if draft is None or os.fstat(draft.fileno()).st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is not another file system that can hold files without a name")

    assert name_draft(draft, tmp_path / "named") is None
    assert list(tmp_path.iterdir()) == []
