"""Hashing files, once, in parallel, and remembering what was hashed.

Promises: every byte is read one time; all CPUs hash (hashlib gives the interpreter lock away), large files one by one
and small ones in batches; what was hashed is told as it happens, so that an interrupted reader can remember it; a
remembered digest is used only while device, inode, size, mtime and ctime of the file are what they were, and never for
a file that changed too shortly before it was hashed for its timestamps to tell a later change.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# Measured (docs/benchmarks.md): from 128 KiB to 512 KiB a buffer stays in a core's own cache between read and hash.
BUFFER_BYTES = 1 << 18
# The kernel's read-ahead is often 128 KiB; this much is asked for beyond it.
AHEAD_BYTES = 1 << 26
# A file up to this size is read in one call; a task holds this many files, or this many bytes, of them.
_SMALL_BYTES = 1 << 18
_BATCH_FILES = 256
_BATCH_BYTES = 1 << 24
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


def sha256_bytes(raw: bytes) -> str:
    """Return the SHA-256 of `raw` in hex."""
    return hashlib.sha256(raw).hexdigest()


def hash_file(path: str | os.PathLike[str], on_bytes: OnBytes | None = None) -> Hashed:
    """Read the regular file `path` once and return its digest; `on_bytes` hears of the bytes as they are read.

    Symbolic links are not followed. Raises OSError when the file cannot be read, is not a regular file, or changes
    while it is read.
    """
    return _hash(os.fspath(path), None, on_bytes or _silent, threading.Event())


def hash_files(
    root: Path,
    names: Iterable[str],
    *,
    remembered: Mapping[str, Hashed] | None = None,
    sizes: Mapping[str, int] | None = None,
    on_bytes: OnBytes | None = None,
    on_hashed: Callable[[str, Hashed], None] | None = None,
    threads: int | None = None,
) -> dict[str, Hashed | OSError]:
    """Hash `names` below `root` in parallel, the largest first; return digest or error for each, in the order given.

    `remembered` digests stand in for reading where the stamp still holds; `on_bytes` (called from several threads)
    then still hears of the size. `on_hashed` hears, in the caller's thread, of every file that was read, as soon as it
    was. `sizes`, where the caller has them, only decide the order. `threads` defaults to the CPUs this process may use. An
    exception in the caller's thread (Ctrl-C) ends the
    readers at their next buffer.
    """
    wanted = list(names)
    tell = on_bytes or _silent
    results: dict[str, Hashed | OSError] = {}
    try:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        return dict.fromkeys(wanted, error)
    ended = threading.Event()
    pool = concurrent.futures.ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)))

    def work(batch: Sequence[str]) -> list[Hashed | OSError]:
        if len(batch) == 1:
            return [_hash_or_error(batch[0], folder, tell, ended)]
        done = [_hash_or_error(name, folder, _silent, ended) for name in batch]
        tell(sum(entry.size_bytes for entry in done if isinstance(entry, Hashed)))
        return done

    try:
        found = _sizes(folder, wanted, remembered or {}, sizes or {}, tell, results)
        tasks = {pool.submit(work, batch): batch for batch in _batches(found)}
        for task in concurrent.futures.as_completed(tasks):
            for name, entry in zip(tasks[task], task.result(), strict=True):
                results[name] = entry
                if on_hashed is not None and isinstance(entry, Hashed):
                    on_hashed(name, entry)
    finally:
        ended.set()
        pool.shutdown(cancel_futures=True)
        os.close(folder)
    return {name: results[name] for name in wanted}


def _sizes(
    folder: int,
    names: Iterable[str],
    known: Mapping[str, Hashed],
    given: Mapping[str, int],
    tell: OnBytes,
    results: dict[str, Hashed | OSError],
) -> dict[str, int]:
    """Name -> size of what must be read; the others go into `results`."""
    sizes: dict[str, int] = {}
    for name in names:
        if name in given and name not in known:
            sizes[name] = given[name]
            continue
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            results[name] = error
            continue
        memory = known.get(name)
        if memory is not None and memory.stamp is not None and memory.stamp == Stamp.of(status):
            results[name] = memory
            tell(memory.size_bytes)
        else:
            sizes[name] = status.st_size
    return sizes


def _batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield large files alone, the largest first, then small ones together, in the order of their names."""
    large = [name for name, size in sizes.items() if size > _SMALL_BYTES]
    for name in sorted(large, key=lambda name: (-sizes[name], name)):
        yield [name]
    batch: list[str] = []
    total = 0
    for name in sorted(sizes.keys() - set(large)):
        if len(batch) >= _BATCH_FILES or total >= _BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += sizes[name]
    if batch:
        yield batch


def _hash_or_error(name: str, folder: int, tell: OnBytes, ended: threading.Event) -> Hashed | OSError:
    try:
        return _hash(name, folder, tell, ended)
    except OSError as error:
        return error


def _hash(name: str, folder: int | None, tell: OnBytes, ended: threading.Event) -> Hashed:
    began = time.time_ns()
    descriptor = os.open(name, _FLAGS, dir_fd=folder)
    try:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            raise OSError(f"not a regular file: {name}")
        if before.st_size <= _SMALL_BYTES:
            content = os.read(descriptor, before.st_size + 1)
            while len(content) < before.st_size and (more := os.read(descriptor, _SMALL_BYTES)):
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


def _silent(count: int) -> None:
    """Hears of `count` bytes and says nothing."""


def to_memory(hashed: Mapping[str, Hashed]) -> dict[str, list[object]]:
    """Return what JSON can hold of the digests that may be remembered."""
    return {name: [entry.sha256, *entry.stamp] for name, entry in hashed.items() if entry.stamp is not None}


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
