"""Work on bytes by several processes, in order: for what is mostly Python, whose threads take turns.

Promises: the same results as one after the other; a process that dies costs time and nothing else, since the caller does
its piece itself; none outlives the context; a few pieces for each wait at most, so that memory stays constant. Processes
are forked: they only read their pipe, work, and write to it, and never return.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
import pickle
import queue
import signal
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import BinaryIO, Generic, NoReturn, Self, TypeVar

Result = TypeVar("Result")
_LENGTH = struct.Struct("<Q")


class Forked(Generic[Result]):
    """`count` processes that do `work`; its results must be what pickle takes. A context that ends them."""

    def __init__(self, work: Callable[[bytes], Result], count: int) -> None:
        self._work = work
        self._count = count
        self._processes: list[int] = []
        self._idle: queue.SimpleQueue[tuple[BinaryIO, BinaryIO]] = queue.SimpleQueue()
        self._pipes: list[BinaryIO] = []
        for _ in range(count):
            self._fork()
        self._pool = concurrent.futures.ThreadPoolExecutor(count)

    def _fork(self) -> None:
        ask_reader, ask_writer = os.pipe2(os.O_CLOEXEC)
        tell_reader, tell_writer = os.pipe2(os.O_CLOEXEC)
        with warnings.catch_warnings():
            # Python warns of forking beside threads: what a child does here needs no lock that they could hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process == 0:
            _serve(self._work, ask_reader, tell_writer, [ask_writer, tell_reader, *self._open()])
        os.close(ask_reader)
        os.close(tell_writer)
        pipes = os.fdopen(ask_writer, "wb", buffering=0), os.fdopen(tell_reader, "rb", buffering=1 << 16)
        self._processes.append(process)
        self._pipes += pipes
        self._idle.put(pipes)

    def _open(self) -> list[int]:
        return [pipe.fileno() for pipe in self._pipes]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        self._pool.shutdown(cancel_futures=True)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()

    def results(self, pieces: Iterable[bytes]) -> Iterator[Result]:
        """Yield what `work` gives for each of `pieces`, in their order; its exceptions are raised here."""
        waiting: collections.deque[concurrent.futures.Future[Result]] = collections.deque()
        for piece in pieces:
            waiting.append(self._pool.submit(self._ask, piece))
            if len(waiting) > 2 * self._count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _ask(self, piece: bytes) -> Result:
        asking, telling = self._idle.get()
        try:
            _write(asking.fileno(), piece)
            answer = _read(telling)
        except OSError:
            return self._work(piece)
        finally:
            self._idle.put((asking, telling))
        result: Result = pickle.loads(answer)  # noqa: S301 - from our own process
        return result


def _serve(work: Callable[[bytes], object], reader: int, writer: int, others: list[int]) -> NoReturn:
    """What a child does: an answer for each piece, until there are no more."""
    try:
        for number in (signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        # Ctrl-C reaches every process of the terminal; the one that people see answers it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for descriptor in others:
            os.close(descriptor)
        with open(reader, "rb", buffering=1 << 16) as pieces:
            while True:
                _write(writer, pickle.dumps(work(_read(pieces)), protocol=pickle.HIGHEST_PROTOCOL))
    finally:
        # Whatever went wrong, the caller does this piece itself, and has the error.
        os._exit(0)


def _write(descriptor: int, content: bytes) -> None:
    for part in (_LENGTH.pack(len(content)), content):
        view = memoryview(part)
        while view:
            view = view[os.write(descriptor, view) :]


def _read(pipe: BinaryIO) -> bytes:
    head = pipe.read(_LENGTH.size)
    if len(head) != _LENGTH.size:
        raise OSError("the process at the other end is gone")
    (length,) = _LENGTH.unpack(head)
    content = pipe.read(length)
    if len(content) != length:
        raise OSError("the process at the other end is gone")
    return content
