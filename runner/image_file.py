"""An image in a file: saved by digest, loaded only when every byte was found right.

Promises: a file is verified whole before the engine sees a byte of it, and the engine then gets what was verified,
under no name but Ferry's own; the same image gives the same file, which appears when it is whole and durable.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import docker
import zstandard

from runner import image_layout
from runner.aside import growing_file
from runner.errors import Fault, Refusal
from runner.image_layout import Source
from runner.image_manifest import Layout
from runner.image_present import Present, asking, inspected, raise_on, tag_of, tagged

OnBytes = Callable[[int], None]

_READ_BYTES = 1 << 20
_ZSTD = b"\x28\xb5\x2f\xfd"
_GZIP = b"\x1f\x8b"


def save(client: docker.DockerClient, image: Present, target: Path, on_bytes: OnBytes) -> Layout:
    """Put the image into the new file `target`, compressed if its name ends in `.zst`; the same image, the same bytes.

    The engine's answer is verified while it is written; `target` appears when it is whole and durable. Raises `Refusal`
    if `target` exists or the answer is not that image; nothing is left then.
    """
    if os.path.lexists(target):
        fix = "name another file, or remove this one"
        raise Refusal(Fault("file exists", str(target), "a new file", "one that is there", fix))
    with asking("save", image.digest), growing_file(target, "saving") as file:
        answer = Chunks(client.api.get_image(image.digest), on_bytes)
        where = f"the engine's {image.digest}"
        with _compressed(file, target) as writer:
            layout = image_layout.read(answer, where, image.digest, writer.write)
        if not layout.in_order:
            fix = "use an engine with the containerd image store"
            raise Refusal(Fault("blobs are not in order", where, "sorted by digest", "another order", fix))
    return layout


@contextlib.contextmanager
def _compressed(file: BinaryIO, target: Path) -> Iterator[Any]:
    if target.suffix != ".zst":
        yield file
        return
    # Several threads or one: the same bytes, as long as their number is given.
    compressor = zstandard.ZstdCompressor(level=3, threads=-1, write_checksum=True)
    with compressor.stream_writer(file, closefd=False) as writer:
        yield writer


@contextlib.contextmanager
def image_file(path: Path) -> Iterator[BinaryIO]:
    """Open the file of an image for reading. Raises `Refusal` if it is no readable regular file; no pipe is waited for."""
    fix = "give the file that `ferry image save` made"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Refusal(Fault("cannot be read", str(path), "a readable file", str(error), fix)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Refusal(Fault("cannot be read", str(path), "a regular file", "something else", fix))
    with open(descriptor, "rb", buffering=0) as file:
        yield cast("BinaryIO", file)


def unpacked(file: BinaryIO, path: Path, on_bytes: OnBytes | None = None) -> Source:
    """Return the content of the open `file` from its beginning, decompressed if it is zstd or gzip."""
    file.seek(0)
    start = file.read(4)
    file.seek(0)
    counted = _Counted(file, on_bytes or (lambda _: None))
    if start == _ZSTD:
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
            cast("BinaryIO", counted), read_across_frames=True
        )
        return _Careful(reader, path)
    if start.startswith(_GZIP):
        return _Careful(gzip.GzipFile(fileobj=io.BufferedReader(counted, _READ_BYTES)), path)
    return counted


def verify(file: BinaryIO, path: Path, expected: str | None, on_bytes: OnBytes | None = None) -> Layout:
    """Return what the open image file holds, every byte of it verified.

    Raises `Refusal` with every fault; also if it is not the image with the digest `expected`, or not Ferry's.
    """
    layout = image_layout.read(unpacked(file, path, on_bytes), str(path), expected)
    tag_of(layout.labels, str(path))
    return layout


def load(
    client: docker.DockerClient, file: BinaryIO, path: Path, layout: Layout, on_bytes: OnBytes
) -> Present:
    """Give the engine the image in `file`, which `verify` found to be `layout`; tag it, and prove that it is there.

    Every byte is hashed again on its way: if the file changes meanwhile, the engine gets no index, and so no image.
    """
    if _found(client, layout) is None:
        stream = image_layout.one_form(unpacked(file, path, on_bytes), str(path), layout.digest)
        api: Any = client.api
        with asking("load", str(path)):
            for event in api.load_image(_joined(stream)):
                raise_on(event, f"load {path}")
    found = _found(client, layout)
    if found is None:
        fix = "load it again; `docker image ls --digests` shows what the engine has"
        raise Refusal(Fault("engine did not keep the image", str(path), layout.digest, "no such image", fix))
    return tagged(client, found, layout.digest, str(path))


def _found(client: docker.DockerClient, layout: Layout) -> dict[str, Any] | None:
    """The image as the engine has it: by its manifest or, in an engine without the containerd store, its config."""
    return inspected(client, layout.digest) or inspected(client, layout.config)


def _joined(stream: Iterator[bytes]) -> Iterator[bytes]:
    """The chunks of `stream`, small ones joined: each goes over the socket by itself."""
    held = bytearray()
    for chunk in stream:
        held += chunk
        if len(held) >= _READ_BYTES:
            yield bytes(held)
            held.clear()
    yield bytes(held)


class Chunks:
    """An iterable of bytes, as something to read from."""

    def __init__(self, chunks: Iterable[bytes], on_bytes: OnBytes) -> None:
        self._chunks, self._on_bytes = iter(chunks), on_bytes
        self._held, self._at = b"", 0

    def read(self, size: int, /) -> bytes:
        """As a file does."""
        while self._at == len(self._held):
            self._held, self._at = next(self._chunks, b""), 0
            if not self._held:
                return b""
            self._on_bytes(len(self._held))
        taken = self._held[self._at : self._at + size]
        self._at += len(taken)
        return taken


class _Counted(io.RawIOBase):
    """A file that tells how much of it was read."""

    def __init__(self, file: BinaryIO, on_bytes: OnBytes) -> None:
        self._file, self._on_bytes = file, on_bytes

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        chunk = self._file.read(size)
        self._on_bytes(len(chunk))
        return chunk

    def readinto(self, buffer: Any, /) -> int:
        chunk = self.read(len(buffer))
        buffer[: len(chunk)] = chunk
        return len(chunk)


class _Careful:
    """A decompressor whose complaints are faults."""

    def __init__(self, reader: Any, path: Path) -> None:
        self._reader, self._path = reader, path

    def read(self, size: int, /) -> bytes:
        try:
            return bytes(self._reader.read(size))
        except (zstandard.ZstdError, zlib.error, EOFError, OSError) as error:
            fix = "get the file again: it was cut off or changed"
            raise Refusal(Fault("damaged", str(self._path), "a compressed file", str(error), fix)) from error
