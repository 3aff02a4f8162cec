"""Hashing files, once, in parallel, and remembering what was hashed.

Promises: every byte is read one time; all CPUs hash (hashlib gives the interpreter lock away), large files one by one,
small ones in batches, very many small ones in processes; what was hashed is told as it happens, so that an interrupted
reader can remember it; a remembered digest is used only while device, inode, size, mtime and ctime of the file are what
they were, and never for a file that changed too shortly before it was hashed for its timestamps to tell a later change.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from runner.inside.reading import (
    BUFFER_BYTES,
    SMALL_BYTES,
    Hashed,
    OnBytes,
    Stamp,
    hash_one,
    hash_or_error,
    silent,
)
from runner.inside.spread import Workers

__all__ = [
    "BUFFER_BYTES", "Hashed", "Stamp", "from_memory", "hash_file", "hash_files", "sha256_bytes", "to_memory",
]  # fmt: skip

# A task holds this many small files, or this many bytes of them.
_BATCH_FILES = 256
_BATCH_BYTES = 1 << 24
# From this many small files on, processes are worth their start (some 20 ms each).
SPREAD_FILES = 10_000

OnHashed = Callable[[str, Hashed], None]
Keep = Callable[[str, Hashed | OSError], None]


def sha256_bytes(raw: bytes) -> str:
    """Return the SHA-256 of `raw` in hex."""
    return hashlib.sha256(raw).hexdigest()


def hash_file(path: str | os.PathLike[str], on_bytes: OnBytes | None = None) -> Hashed:
    """Read the regular file `path` once and return its digest; `on_bytes` hears of the bytes as they are read.

    Symbolic links are not followed. Raises OSError when the file cannot be read, is not a regular file, or changes
    while it is read.
    """
    return hash_one(os.fspath(path), None, on_bytes or silent, threading.Event())


def hash_files(
    root: Path,
    names: Iterable[str],
    *,
    remembered: Mapping[str, Hashed] | None = None,
    sizes: Mapping[str, int] | None = None,
    on_bytes: OnBytes | None = None,
    on_hashed: OnHashed | None = None,
    threads: int | None = None,
) -> dict[str, Hashed | OSError]:
    """Hash `names` below `root` in parallel, the largest first; return digest or error for each, in the order given.

    `remembered` digests stand in for reading where the stamp still holds; `on_bytes` (called from several threads)
    then still hears of the size. `on_hashed` hears, in the caller's thread, of every file that was read, as soon as it
    was. `sizes`, where the caller has them, only decide the order. `threads` defaults to the CPUs this process may use.
    An exception in the caller's thread (Ctrl-C) ends the readers at their next buffer.
    """
    wanted = list(names)
    tell = on_bytes or silent
    count = threads or len(os.sched_getaffinity(0))
    results: dict[str, Hashed | OSError] = {}
    try:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        return dict.fromkeys(wanted, error)

    def keep(name: str, entry: Hashed | OSError) -> None:
        results[name] = entry
        if on_hashed is not None and isinstance(entry, Hashed):
            on_hashed(name, entry)

    try:
        found = _sizes(folder, wanted, remembered or {}, sizes or {}, tell, results)
        small = sorted(name for name, size in found.items() if size <= SMALL_BYTES)
        if count > 1 and len(small) >= SPREAD_FILES:
            _spread(folder, small, count, tell, keep)
        _read(folder, {name: size for name, size in found.items() if name not in results}, count, tell, keep)
    finally:
        os.close(folder)
    return {name: results[name] for name in wanted}


def _spread(folder: int, small: Sequence[str], count: int, tell: OnBytes, keep: Keep) -> None:
    """Hash with processes; what they do not tell is left for `_read`."""
    untold = 0
    with Workers(folder, small, count) as workers:
        for name, entry in workers.results():
            keep(name, entry)
            untold += entry.size_bytes
            if untold >= _BATCH_BYTES:
                tell(untold)
                untold = 0
    tell(untold)


def _read(folder: int, sizes: Mapping[str, int], count: int, tell: OnBytes, keep: Keep) -> None:
    """Hash with threads."""
    ended = threading.Event()

    def work(batch: Sequence[str]) -> list[Hashed | OSError]:
        if len(batch) == 1:
            return [hash_or_error(batch[0], folder, tell, ended)]
        done = [hash_or_error(name, folder, silent, ended) for name in batch]
        tell(sum(entry.size_bytes for entry in done if isinstance(entry, Hashed)))
        return done

    pool = concurrent.futures.ThreadPoolExecutor(count)
    try:
        tasks = {pool.submit(work, batch): batch for batch in _batches(sizes)}
        for task in concurrent.futures.as_completed(tasks):
            for name, entry in zip(tasks[task], task.result(), strict=True):
                keep(name, entry)
    finally:
        ended.set()
        pool.shutdown(cancel_futures=True)


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
    large = [name for name, size in sizes.items() if size > SMALL_BYTES]
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
