"""Copying files and hashing them in the same pass, several at a time, so that what landed is known and durable.

Promises: every source byte is read once; a link is not followed and a pipe not waited for; what is returned is on the
disk (fsync) and, where a digest was expected, is what that digest says. A copy that was interrupted goes on from the
byte where it was, if asked to. Whoever calls gives the folder its name, when all of it is there.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from runner.errors import Fault, Refusal, refuse_if
from runner.inside.digests import BUFFER_BYTES, Hashed, Stamp

OnBytes = Callable[[int], None]

_READ_BYTES = 4 * BUFFER_BYTES
# The kernel is asked to begin writing this often: else a large file waits in memory until its fsync.
_WRITE_OUT_BYTES = 64 << 20


def copy_all(
    files: Mapping[str, Path],
    target: Path,
    *,
    expected: Mapping[str, str] | None = None,
    on_bytes: OnBytes | None = None,
    go_on: bool = False,
) -> dict[str, Hashed]:
    """Copy `files` (path below `target` -> source), the largest first; return what lies there now, in the order given.

    `expected` holds the SHA-256 in hex that each must have. With `go_on`, what an earlier call left in `target` is
    read, and copied on from there. `on_bytes` is called from several threads, and hears of every byte once. Raises
    `Refusal` with every source that is no readable regular file, and every copy that is not as expected; OSError when
    the disk refuses. An exception in the caller's thread (Ctrl-C) ends the copies at their next buffer.
    """
    for folder in sorted({(target / name).parent for name in files}):
        folder.mkdir(parents=True, exist_ok=True)
    job = _Job(expected or {}, on_bytes or (lambda _: None), go_on, threading.Event())
    sizes = {name: _size(source) for name, source in files.items()}
    order = sorted(files, key=lambda name: (-sizes[name], name))
    pool = concurrent.futures.ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0))))
    try:
        tasks = {name: pool.submit(_copy_or_fault, name, files[name], target / name, job) for name in order}
        results = {name: tasks[name].result() for name in files}
    finally:
        job.ended.set()
        pool.shutdown(cancel_futures=True)
    refuse_if(found for found in results.values() if isinstance(found, Fault))
    return {name: found for name, found in results.items() if isinstance(found, Hashed)}


@dataclasses.dataclass(frozen=True)
class _Job:
    """What all files of one call share."""

    expected: Mapping[str, str]
    on_bytes: OnBytes
    go_on: bool
    ended: threading.Event


def _size(source: Path) -> int:
    try:
        return source.lstat().st_size
    except OSError:
        return 0  # Opening it says what is wrong.


def _copy_or_fault(name: str, source: Path, target: Path, job: _Job) -> Hashed | Fault:
    fix = "only regular files can be copied: put the content in its place"
    try:
        reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        return Fault("cannot be read", str(source), "a readable regular file", str(error), fix)
    try:
        if not stat.S_ISREG(os.fstat(reading).st_mode):
            return Fault("unsafe", str(source), "a regular file", "a folder, device, socket or pipe", fix)
        return _copy(reading, name, target, job)
    except Refusal as refusal:
        return refusal.faults[0]
    finally:
        os.close(reading)


def _copy(reading: int, name: str, target: Path, job: _Job) -> Hashed:
    wanted = job.expected.get(name)
    begun = job.go_on and target.exists()
    found = _pour(reading, target, job, begun=begun)
    if begun and found.sha256 != wanted:
        # The beginning that lay there was not this file's, or a power loss took some of it.
        target.unlink()
        os.lseek(reading, 0, os.SEEK_SET)
        found = _pour(reading, target, dataclasses.replace(job, on_bytes=lambda _: None), begun=False)
    if wanted in (None, found.sha256):
        return found
    fix = "the source changes while it is copied, or is not what was verified: verify it again"
    where = f"sha256 {found.sha256}, {found.size_bytes} bytes"
    raise Refusal(Fault("copy differs", str(target), f"sha256 {wanted}", where, fix))


def _pour(reading: int, target: Path, job: _Job, *, begun: bool) -> Hashed:
    """Write the rest of the open file `reading` into `target`, which holds its beginning if it was `begun`."""
    digest = hashlib.sha256()
    os.posix_fadvise(reading, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    with (
        open(target, "r+b" if begun else "xb", buffering=0, opener=_no_link) as writer,
        concurrent.futures.ThreadPoolExecutor(1) as hasher,
    ):
        buffer = memoryview(bytearray(_READ_BYTES))
        size = 0
        while begun and (count := writer.readinto(buffer)):
            digest.update(buffer[:count])
            size += count
        if begun:
            job.on_bytes(size)
            os.lseek(reading, size, os.SEEK_SET)
        pushed = size
        while count := os.readv(reading, [buffer]):
            hashing = hasher.submit(digest.update, buffer[:count])
            rest = buffer[:count]
            while rest:
                rest = rest[writer.write(rest) :]
            hashing.result()
            size += count
            job.on_bytes(count)
            if size - pushed >= _WRITE_OUT_BYTES:
                os.posix_fadvise(writer.fileno(), pushed, size - pushed, os.POSIX_FADV_DONTNEED)
                pushed = size
            if job.ended.is_set():
                raise OSError("interrupted")
        os.fsync(writer.fileno())
        status = os.fstat(writer.fileno())
    if status.st_size != size:
        raise OSError(f"{target}: {status.st_size} bytes are there, {size} were written")
    return Hashed(digest.hexdigest(), size, Stamp.of(status))


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
