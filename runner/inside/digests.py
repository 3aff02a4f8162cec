"""Hashing files, once, in parallel, and remembering what was hashed.

Promises: every byte is read one time; all CPUs hash (hashlib gives the interpreter lock away); a remembered digest is
used only while device, inode, size, mtime and ctime of the file are what they were, and never for a file that changed
too shortly before it was hashed for its timestamps to tell a later change.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

BUFFER_BYTES = 1 << 20
# Coarse file clocks (network file systems, the kernel's own tick) may give a change the timestamp of the one before.
_TOO_FRESH_NS = 2_000_000_000


@dataclasses.dataclass(frozen=True)
class Stamp:
    """What identifies one state of a file without reading it; times in nanoseconds."""

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


def sha256_bytes(raw: bytes) -> str:
    """Return the SHA-256 of `raw` in hex."""
    return hashlib.sha256(raw).hexdigest()


def hash_file(path: str | os.PathLike[str], on_bytes: Callable[[int], None] | None = None) -> Hashed:
    """Read the regular file `path` once and return its digest; `on_bytes` hears of every buffer.

    Symbolic links are not followed. Raises OSError when the file cannot be read, is not a regular file, or changes
    while it is read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as file:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            raise OSError(f"not a regular file: {os.fspath(path)}")
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        digest = hashlib.sha256()
        size = 0
        buffer = bytearray(BUFFER_BYTES)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            digest.update(view[:count])
            size += count
            if on_bytes is not None:
                on_bytes(count)
        after = os.fstat(descriptor)
    stamp = Stamp.of(after)
    if Stamp.of(before) != stamp or size != after.st_size:
        raise OSError(f"the file changes while it is read: {os.fspath(path)}")
    settled = time.time_ns() - max(stamp.mtime_ns, stamp.ctime_ns) > _TOO_FRESH_NS
    return Hashed(digest.hexdigest(), size, stamp if settled else None)


def hash_files(
    root: Path,
    names: Iterable[str],
    *,
    remembered: Mapping[str, Hashed] | None = None,
    on_bytes: Callable[[int], None] | None = None,
    threads: int | None = None,
) -> dict[str, Hashed | OSError]:
    """Hash `names` below `root` in parallel, the largest first; return digest or error for each, in the order given.

    `remembered` digests stand in for reading where the stamp still holds; `on_bytes` (called from several threads)
    then still hears of the size. `threads` defaults to the CPUs this process may use.
    """
    wanted = list(names)
    known = remembered or {}
    results: dict[str, Hashed | OSError] = {}
    sizes: dict[str, int] = {}
    for name in wanted:
        try:
            status = os.lstat(root / name)
        except OSError as error:
            results[name] = error
            continue
        memory = known.get(name)
        if memory is not None and memory.stamp is not None and memory.stamp == Stamp.of(status):
            results[name] = memory
            if on_bytes is not None:
                on_bytes(memory.size_bytes)
        else:
            sizes[name] = status.st_size
    order = sorted(sizes, key=lambda name: (-sizes[name], name))

    def work(name: str) -> Hashed | OSError:
        try:
            return hash_file(root / name, on_bytes)
        except OSError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        results.update(zip(order, pool.map(work, order), strict=True))
    return {name: results[name] for name in wanted}


def to_memory(hashed: Mapping[str, Hashed]) -> dict[str, list[object]]:
    """Return what JSON can hold of the digests that may be remembered."""
    return {
        name: [entry.sha256, *dataclasses.astuple(entry.stamp)]
        for name, entry in hashed.items()
        if entry.stamp is not None
    }


def from_memory(memory: object) -> dict[str, Hashed]:
    """Return the digests in `memory` (made by `to_memory`); whatever does not have its form is not remembered."""
    result: dict[str, Hashed] = {}
    if not isinstance(memory, dict):
        return result
    for name, row in memory.items():
        match row:
            case [str(sha256), int(device), int(inode), int(size), int(mtime), int(ctime)]:
                result[name] = Hashed(sha256, size, Stamp(device, inode, size, mtime, ctime))
    return result
