"""What the file system of a folder can do, found by trying.

Promises: writes one folder with three small files beside nothing of the user's, and removes it whatever happens; says
what failed in the system's own words; never raises for a file system that cannot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# linux/fs.h: _IOW(0x94, 9, int)
_FICLONE = 0x40049409
_BLOCK = b"ferry doctor\n" * 1024
_PREFIX = ".ferry-doctor-"
NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p", "afs", "fuse.sshfs",
     "fuse.s3fs", "fuse.juicefs", "fuse.gcsfuse", "fuse.mount-s3", "fuse.rclone", "wekafs", "panfs", "vastnfs"}
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder and what was seen there. Sizes in bytes; `inodes` is 0 where the file system does not count them.

    `problem` says why nothing could be seen. `reflink`, `rename` and `lock` are 'works', or what the system said.
    """

    path: str
    problem: str | None
    kind: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    inodes: int = 0
    free_inodes: int = 0
    reflink: str = ""
    rename: str = ""
    lock: str = ""

    @property
    def network(self) -> bool:
        """Whether it lies on another machine."""
        return self.kind in NETWORK


def measure(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> Folder:
    """Return kind, size and room of the file system of `folder`, or of the nearest folder above it that exists."""
    path = folder.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    try:
        state = os.statvfs(path)
        return Folder(
            path=str(path),
            problem=None,
            kind=kind_of(path.resolve(), mountinfo.read_text(encoding="utf-8", errors="surrogateescape")),
            total_bytes=state.f_blocks * state.f_frsize,
            free_bytes=state.f_bavail * state.f_frsize,
            inodes=state.f_files,
            free_inodes=state.f_favail,
        )
    except OSError as error:
        return Folder(str(path), os.strerror(error.errno or 0))


def probe(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> Folder:
    """Measure, and try what a run needs, in `folder` or in the nearest folder above it that exists."""
    measured = measure(folder, mountinfo)
    if measured.problem is not None:
        return measured
    try:
        with _scratch(Path(measured.path)) as scratch:
            return dataclasses.replace(
                measured,
                reflink=_try(_clone, scratch),
                rename=_try(_rename, scratch),
                lock=_try(_lock, scratch),
            )
    except OSError as error:
        return dataclasses.replace(measured, problem=os.strerror(error.errno or 0))


def kind_of(path: Path, mountinfo: str) -> str:
    """Return the type of the file system that holds `path` (without links), from the text of a mountinfo file."""
    best, kind = -1, "unknown"
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        place = Path(_unescape(before.split()[4]))
        if path.is_relative_to(place) and len(place.parts) >= best:
            best, kind = len(place.parts), after.split()[0]
    return kind


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made)


def _try(step: Callable[[Path], None], scratch: Path) -> str:
    try:
        step(scratch)
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return "works"


def _clone(scratch: Path) -> None:
    source, target = scratch / "source", scratch / "clone"
    source.write_bytes(_BLOCK)
    with source.open("rb") as reader, target.open("wb") as writer:
        fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
    if target.read_bytes() != _BLOCK:
        raise OSError("a clone does not hold what its source does")


def _rename(scratch: Path) -> None:
    """Replace a file, and a reader that has it open keeps the old one: how every record of Ferry is written."""
    old, new = scratch / "record", scratch / "record.new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    with old.open("rb") as reader:
        os.replace(new, old)
        if reader.read() != b"old":
            raise OSError("an open file changes when another takes its name")
    if old.read_bytes() != b"new":
        raise OSError("the old file is still there after another took its name")


def _lock(scratch: Path) -> None:
    """A second holder is turned away, and the lock ends with its file: what a lease stands on."""
    path = scratch / "lock"
    path.touch()
    with path.open("r+b") as first, path.open("r+b") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
    raise OSError("two hold the same lock")


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
