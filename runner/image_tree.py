"""What lies in an image's layers, file by file: kind, owner, mode, time, content; and how layers add up.

Promises: nothing is unpacked or written; a layer is read once, as a stream; whiteouts take away what lower layers hold,
as the image specification has it. Reads tars that anybody may have made: what cannot be followed is a `Refusal`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, cast

import zstandard

from runner.errors import Fault, Refusal
from runner.inside.digests import BUFFER_BYTES

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_KINDS = {
    tarfile.REGTYPE: "file", tarfile.AREGTYPE: "file", tarfile.CONTTYPE: "file", tarfile.DIRTYPE: "folder",
    tarfile.SYMTYPE: "link", tarfile.LNKTYPE: "hard link", tarfile.CHRTYPE: "character device",
    tarfile.BLKTYPE: "block device", tarfile.FIFOTYPE: "pipe",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Item:
    """One path in a layer. `time_s` counts from 1970; `content` is a file's SHA-256 in hex, else where a link points, or ''."""

    kind: str
    mode: str
    owner: str
    time_s: int
    size_bytes: int
    content: str
    attributes: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The paths of one layer, in the order of its tar; what it takes away, and the folders whose older content it hides."""

    items: Mapping[str, Item]
    removed: frozenset[str]
    opaque: frozenset[str]


class _Content(io.RawIOBase):
    """Chunks, as a file that is read once."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks, self._held = iter(chunks), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object, /) -> int:
        into = memoryview(buffer)  # type: ignore[arg-type]
        while not self._held:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._held = memoryview(chunk)
        count = min(len(into), len(self._held))
        into[:count] = self._held[:count]
        self._held = self._held[count:]
        return count


def read_layer(chunks: Iterable[bytes], where: str) -> Layer | None:
    """Return what lies in a tar: plain, gzip or zstd. None if it is none of these, which is not judged here.

    Raises `Refusal`, naming `where`, if it begins like one and cannot be followed.
    """
    file = io.BufferedReader(_Content(chunks), BUFFER_BYTES)
    start = file.peek(512)
    opened: IO[bytes]
    if start.startswith(b"\x28\xb5\x2f\xfd"):
        opened = cast("IO[bytes]", zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(file))
        mode = "r|"
    elif start.startswith(b"\x1f\x8b"):
        opened, mode = file, "r|gz"
    elif start[257:262] == b"ustar" or not start.strip(b"\0"):
        opened, mode = file, "r|"
    else:
        return None
    try:
        with tarfile.open(fileobj=opened, mode=mode, errors="surrogateescape") as tar:  # type: ignore[call-overload]
            return _layer(tar)
    except (tarfile.TarError, zstandard.ZstdError, zlib.error, EOFError, ValueError) as error:
        fix = "build or fetch it again: it is damaged, or not what an image is made of"
        raise Refusal(Fault("layer cannot be read", where, "a tar", str(error), fix)) from error


def _layer(tar: tarfile.TarFile) -> Layer:
    items: dict[str, Item] = {}
    removed, opaque = set[str](), set[str]()
    for member in tar:
        path = member.name.removeprefix("./").strip("/") or "."
        folder, _, name = path.rpartition("/")
        if name == _OPAQUE:
            opaque.add(folder)
        elif name.startswith(_WHITEOUT):
            removed.add(f"{folder}/{name.removeprefix(_WHITEOUT)}".lstrip("/"))
        else:
            items[path] = _item(tar, member)
    return Layer(items, frozenset(removed), frozenset(opaque))


def _item(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Item:
    content = member.linkname
    if member.isreg():
        source = tar.extractfile(member)
        assert source is not None
        hasher = hashlib.sha256()
        while chunk := source.read(BUFFER_BYTES):
            hasher.update(chunk)
        content = hasher.hexdigest()
    elif member.isdev() and not member.isfifo():
        content = f"{member.devmajor}:{member.devminor}"
    extended = ((key, value) for key, value in member.pax_headers.items() if key.startswith("SCHILY.xattr."))
    return Item(
        kind=_KINDS.get(member.type, f"type {member.type!r}"),
        mode=f"{member.mode:04o}",
        owner=f"{member.uid}:{member.gid}",
        time_s=int(member.mtime),
        size_bytes=member.size if member.isreg() else 0,
        content=content,
        attributes=tuple(sorted((key.removeprefix("SCHILY.xattr."), value) for key, value in extended)),
    )


def stack(layers: Iterable[Layer]) -> dict[str, tuple[Item, int]]:
    """Return what is left when `layers` lie on each other: path -> item, and the number of its layer, counted from 1."""
    tree: dict[str, tuple[Item, int]] = {}
    for number, layer in enumerate(layers, start=1):
        if layer.removed or layer.opaque or any(path in tree for path in _not_folders(layer)):
            hidden = set(_not_folders(layer))
            tree = {path: entry for path, entry in tree.items() if not _gone(path, layer, hidden)}
        tree.update((path, (item, number)) for path, item in layer.items.items())
    return tree


def _not_folders(layer: Layer) -> Iterator[str]:
    return (path for path, item in layer.items.items() if item.kind != "folder")


def _gone(path: str, layer: Layer, hidden: set[str]) -> bool:
    """Does `layer` take `path` of a lower layer away: itself, or with a folder that it was in?"""
    if path in layer.removed:
        return True
    while path and path != ".":
        path = path.rpartition("/")[0]
        if path in layer.removed or path in hidden or path in layer.opaque:
            return True
    return False
