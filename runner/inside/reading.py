"""Reading one file once: its digest, its size, and the stamp to remember it by.

Promises: every byte is read one time, ahead of the hash; a link is not followed and a pipe not waited for; a file that
changes while it is read is an error; one that changed too shortly before for its timestamps to tell has no stamp.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

# Measured (docs/benchmarks.md): from 128 KiB to 512 KiB a buffer stays in a core's own cache between read and hash.
BUFFER_BYTES = 1 << 18
# The kernel's read-ahead is often 128 KiB; this much is asked for beyond it.
AHEAD_BYTES = 1 << 26
# A file up to this size is read in one call.
SMALL_BYTES = 1 << 18
# Callers hear of progress this often: a progress bar costs more than hashing a buffer does.
_TELL_BYTES = 1 << 23
# Coarse file clocks (network file systems, the kernel's own tick) may give a change the timestamp of the one before.
_TOO_FRESH_NS = 2_000_000_000
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

OnBytes = Callable[[int], None]


class Stamp(NamedTuple):
    """What identifies one state of a file without reading it; times in nanoseconds.

    A named tuple, not a dataclass: one is made for every file, and bundles of 100,000 files exist.
    """

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """Return the stamp in `status`."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclasses.dataclass(frozen=True)
class Hashed:
    """A file as it was read: SHA-256 in hex, size, and the stamp to remember it by (None: too fresh to remember)."""

    sha256: str
    size_bytes: int
    stamp: Stamp | None


def hash_or_error(name: str, folder: int, tell: OnBytes, ended: threading.Event) -> Hashed | OSError:
    """Return what `hash_one` does, or the error that it raises."""
    try:
        return hash_one(name, folder, tell, ended)
    except OSError as error:
        return error


def hash_one(name: str, folder: int | None, tell: OnBytes, ended: threading.Event) -> Hashed:
    """Read the file `name` below the open `folder` (None: where the process is) and return its digest.

    `tell` hears of the bytes as they are read; once `ended` is set, a large file is given up at its next piece. Raises
    OSError when the file cannot be read, is not a regular file, or changes while it is read.
    """
    began = time.time_ns()
    descriptor = os.open(name, _FLAGS, dir_fd=folder)
    try:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            raise OSError(f"not a regular file: {name}")
        if before.st_size <= SMALL_BYTES:
            content = os.read(descriptor, before.st_size + 1)
            while len(content) < before.st_size and (more := os.read(descriptor, SMALL_BYTES)):
                content += more
            after = os.fstat(descriptor)
            sha256, size = hashlib.sha256(content).hexdigest(), len(content)
            tell(size)
        else:
            sha256, size = _stream(descriptor, tell, ended)
            after = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    mtime, ctime = after.st_mtime_ns, after.st_ctime_ns
    if before.st_ctime_ns != ctime or before.st_mtime_ns != mtime or size != after.st_size:
        raise OSError(f"the file changes while it is read: {name}")
    latest = max(ctime, mtime)
    stamp = Stamp.of(after) if began - latest > _TOO_FRESH_NS else None
    return Hashed(sha256, size, stamp)


def _stream(descriptor: int, tell: OnBytes, ended: threading.Event) -> tuple[str, int]:
    """Return digest and size of an open file, reading ahead of the hash; `tell` hears of it in large pieces."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    digest = hashlib.sha256()
    buffer = bytearray(BUFFER_BYTES)
    view = memoryview(buffer)
    size = told = ahead = 0
    while True:
        if size + AHEAD_BYTES // 2 >= ahead:
            os.posix_fadvise(descriptor, ahead, AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            ahead += AHEAD_BYTES
        count = os.readv(descriptor, [buffer])
        if count == 0:
            break
        digest.update(view[:count])
        size += count
        if size - told >= _TELL_BYTES:
            tell(size - told)
            told = size
            if ended.is_set():
                raise OSError("interrupted")
    tell(size - told)
    return digest.hexdigest(), size


def silent(count: int) -> None:
    """Hears of `count` bytes and says nothing."""
