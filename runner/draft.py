"""A file that has no name until its place is known.

Promises: nothing has to be cleaned up, whatever happens before it has its name: the system removes it; it is given its
name as it lies, and no byte is copied.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

# The kernel is asked to begin writing this often: else all of it waits in memory until the fsync.
_WRITE_OUT_BYTES = 64 << 20
_NOT_HERE = (errno.EXDEV, errno.ENOENT, errno.EPERM, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def open_draft(folder: Path) -> BinaryIO | None:
    """Return a new file on the file system of `folder`, or None where files must have a name."""
    with contextlib.suppress(OSError):
        # Not tempfile's: that opens with O_EXCL, which means that the file can never have a name.
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), "w+b", buffering=0)
    return None


def written_out(draft: BinaryIO) -> Callable[[bytes], None]:
    """Return a function that writes all of a piece to the end of `draft`, and keeps the disk busy meanwhile."""
    size = pushed = 0

    def write(piece: bytes) -> None:
        nonlocal size, pushed
        rest = memoryview(piece)
        while rest:
            rest = rest[draft.write(rest) :]
        size += len(piece)
        if size - pushed >= _WRITE_OUT_BYTES:
            os.posix_fadvise(draft.fileno(), pushed, size - pushed, os.POSIX_FADV_DONTNEED)
            pushed = size

    return write


def name_draft(draft: BinaryIO, path: Path) -> os.stat_result | None:
    """Give `draft`, all of it on the disk, the name `path`; return what the system knows of it then.

    None where this system or this file system cannot do that; then nothing is at `path`. Raises OSError if the disk
    refuses, or something is at `path` already.
    """
    os.fsync(draft.fileno())
    try:
        open_files = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.link(str(draft.fileno()), path, src_dir_fd=open_files, follow_symlinks=True)
        finally:
            os.close(open_files)
    except OSError as error:
        if error.errno in _NOT_HERE:
            return None
        raise
    return os.fstat(draft.fileno())
