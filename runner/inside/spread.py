"""Hashing very many small files: with processes, since Python's threads take turns where the work is mostly calls.

Promises: the same results as one after the other; a worker that dies costs time and nothing else, since the caller reads
whatever it did not tell; no worker outlives the caller's interest. Workers are forked before any other thread of the
caller's reads files; they only read, hash and write to their pipe, and never return.
"""

from __future__ import annotations

import os
import selectors
import signal
import struct
import threading
import warnings
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from runner.inside.reading import Hashed, Stamp, hash_one, silent

# Index, digest, size, whether there is a stamp, device, inode, mtime, ctime.
_RECORD = struct.Struct("<I32sQ?QQqq")
_STEP = 512
# So long without a word from any worker, the caller reads the rest itself.
_PATIENCE_S = 60.0


class Workers:
    """Processes that hash `names` below the open `folder`, each its share; a context that ends them."""

    def __init__(self, folder: int, names: Sequence[str], count: int) -> None:
        self._names = names
        self._selector = selectors.DefaultSelector()
        self._processes: list[int] = []
        for share in range(count):
            reader, writer = os.pipe2(os.O_CLOEXEC)
            with warnings.catch_warnings():
                # Python warns of forking beside threads: what a child does here needs no lock that they could hold.
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
            if process == 0:
                _work(folder, names, range(share, len(names), count), writer)
            os.close(writer)
            self._processes.append(process)
            self._selector.register(reader, selectors.EVENT_READ, bytearray())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            os.close(key.fd)
        self._selector.close()
        for process in self._processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)

    def results(self) -> Iterator[tuple[str, Hashed]]:
        """Yield every file that was hashed, as it comes; one that could not be read, or was not told, is not among them."""
        while self._selector.get_map():
            ready = self._selector.select(_PATIENCE_S)
            if not ready:
                return
            for key, _ in ready:
                rest: bytearray = key.data
                chunk = os.read(key.fd, 1 << 20)
                if not chunk:
                    self._selector.unregister(key.fileobj)
                    os.close(key.fd)
                    continue
                rest += chunk
                whole = len(rest) // _RECORD.size * _RECORD.size
                for record in _RECORD.iter_unpack(bytes(rest[:whole])):
                    yield self._result(record)
                del rest[:whole]

    def _result(self, record: tuple[int, bytes, int, bool, int, int, int, int]) -> tuple[str, Hashed]:
        index, digest, size, stamped, device, inode, mtime, ctime = record
        stamp = Stamp(device, inode, size, mtime, ctime) if stamped else None
        return self._names[index], Hashed(digest.hex(), size, stamp)


def _work(folder: int, names: Sequence[str], share: range, writer: int) -> None:
    """What a child does; it never returns."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        ended = threading.Event()
        told: list[bytes] = []
        for index in share:
            try:
                entry = hash_one(names[index], folder, silent, ended)
            except OSError:
                continue  # The caller reads it again, and has the error itself.
            device, inode, _, mtime, ctime = entry.stamp or (0, 0, 0, 0, 0)
            digest = bytes.fromhex(entry.sha256)
            stamped = entry.stamp is not None
            told.append(_RECORD.pack(index, digest, entry.size_bytes, stamped, device, inode, mtime, ctime))
            if len(told) == _STEP:
                _write(writer, b"".join(told))
                told.clear()
        _write(writer, b"".join(told))
    finally:
        os._exit(0)


def _write(writer: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(writer, view) :]
