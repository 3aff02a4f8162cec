"""An image as one stream: a tar that holds an OCI image layout, read strictly and given on in one form.

Promises: nothing but `oci-layout`, `index.json`, `manifest.json` and `blobs/sha256/HEX` is taken, as regular files; every
blob is hashed as it goes by, and what it must be follows from the digests alone; one image, no blob that nothing names;
every fault is told together. What is given on is made here: the same image gives the same bytes, and no name that a
file carries reaches an engine. Not looked at: what a compressed layer unpacks to, which the engine compares.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Callable, Generator, Iterator
from typing import Protocol

from runner.errors import Fault, Refusal, refuse_if
from runner.image_manifest import FIX, LIMIT_JSON_BYTES, Layout, Reading
from runner.inside.digests import BUFFER_BYTES

_BLOCK = tarfile.BLOCKSIZE
_BLOB = re.compile(r"blobs/sha256/([0-9a-f]{64})")
_FOLDERS = frozenset({".", "blobs", "blobs/sha256"})
_NOTES = ("index.json", "manifest.json", "oci-layout")
_LIMIT_FILES = 512
_LIMIT_FILL_BYTES = 1 << 20


# Name, digest in hex ('' for what is no blob), size in bytes, content.
Entry = tuple[str, str, int, Iterator[bytes]]


class Source(Protocol):
    """Where the bytes come from: a file, a decompressor, an engine's answer."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; none at the end."""
        ...


class _Damaged(Exception):
    """The stream cannot be followed any further."""

    def __init__(self, where: str, expected: str, found: str) -> None:
        super().__init__(found)
        self.where, self.expected, self.found = where, expected, found


def one_form(source: Source, where: str, expected: str | None = None) -> Generator[bytes, None, Layout]:
    """Yield the layout in `source` again, in the one form; return what it holds. `where` names it in faults.

    Blobs are yielded while they are read, in the order of the source; the index, without which they are no image,
    only when all was found right and the manifest is the `expected` one. Raises `Refusal` with every fault, then.
    """
    for folder in ("blobs", "blobs/sha256"):
        yield _folder_header(folder)
    seen = _Seen(where)
    try:
        for entry in _entries(source, seen.unsafe):
            yield from seen.passing(entry)
    except _Damaged as error:
        seen.fault("damaged", error.where, error.expected, error.found)
    layout, notes = seen.layout()
    if expected not in (None, layout.digest):
        fix = "get the image that the run pins"
        raise Refusal(Fault("another image", where, str(expected), layout.digest, fix))
    for name in sorted(notes):
        yield _file_header(name, len(notes[name])) + notes[name] + bytes(-len(notes[name]) % _BLOCK)
    yield bytes(2 * _BLOCK)
    return layout


class _Seen:
    """What went by: the size of every file, the content of small ones, and what was wrong."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.sizes: dict[str, int] = {}
        self.small: dict[str, bytes] = {}
        self.unsafe: list[tuple[str, str]] = []
        self.faults: list[Fault] = []

    def fault(self, what: str, place: str, expected: str, found: str) -> None:
        self.faults.append(Fault(what, f"{self._where}: {place}", expected, found, FIX))

    def passing(self, entry: Entry) -> Iterator[bytes]:
        """Yield the entry again if it is a blob."""
        name, digest, size, _ = entry
        if digest and name not in self.sizes:
            yield _file_header(name, size)
            yield from self.hashed(entry)
            yield bytes(-size % _BLOCK)
        else:
            for _ in self.hashed(entry):
                pass

    def hashed(self, entry: Entry) -> Iterator[bytes]:
        """Yield the content; at its end compare its digest, and keep it if it is small. Raises `_Damaged`."""
        name, digest, size, content = entry
        if name in self.sizes:
            self.unsafe.append((name, "stands twice"))
            return
        self.sizes[name] = size
        if len(self.sizes) > _LIMIT_FILES:
            raise _Damaged(name, f"at most {_LIMIT_FILES} files", "more")
        hasher, parts = hashlib.sha256(), list[bytes]()
        for chunk in content:
            hasher.update(chunk)
            if size <= LIMIT_JSON_BYTES:
                parts.append(chunk)
            yield chunk
        if digest and hasher.hexdigest() != digest:
            self.fault("blob differs", name, f"sha256 {digest}", f"sha256 {hasher.hexdigest()}")
        if size <= LIMIT_JSON_BYTES:
            self.small[name] = b"".join(parts)

    def layout(self) -> tuple[Layout, dict[str, bytes]]:
        """Return what went by, and the files beside the blobs in the one form. Raises `Refusal` with every fault."""
        for name, reason in self.unsafe:
            self.fault("unsafe", name, f"{', '.join(_NOTES)} and blobs/sha256/HEX, as plain files", reason)
        refuse_if(self.faults)
        return Reading(self.sizes, self.small, self._where).layout()


def look(source: Source, where: str, see: Callable[[str, Iterator[bytes]], None]) -> Layout:
    """Return what the layout in `source` holds; `see` gets the digest and the content of each blob, as it goes by.

    What `see` has not read when it returns is read here. Nothing was verified yet when it is called: what it makes of
    a blob holds only if this function returns. Raises `Refusal` with every fault.
    """
    seen = _Seen(where)
    try:
        for entry in _entries(source, seen.unsafe):
            content = seen.hashed(entry)
            if entry[1]:
                see(f"sha256:{entry[1]}", content)
            for _ in content:
                pass
    except _Damaged as error:
        seen.fault("damaged", error.where, error.expected, error.found)
    return seen.layout()[0]


def read(
    source: Source, where: str, expected: str | None = None, write: Callable[[bytes], object] | None = None
) -> Layout:
    """Return what the layout in `source` holds; `write` gets its one form. As `one_form`, run to its end."""
    stream = one_form(source, where, expected)
    write = write or (lambda _: None)
    while True:
        try:
            write(next(stream))
        except StopIteration as end:
            layout: Layout = end.value
            return layout


def _entries(source: Source, unsafe: list[tuple[str, str]]) -> Iterator[Entry]:
    """Yield each file that may be there.

    What may not is appended to `unsafe`, as name and reason, and passed over. Raises `_Damaged`.
    """
    last = "its beginning"
    while (block := _exactly(source, _BLOCK, last)).strip(b"\0"):
        try:
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            raise _Damaged(f"after {last}", "the header of a tar entry", str(error)) from error
        last, size = member.name, member.size
        if size < 0:
            raise _Damaged(last, "a size", str(size))
        content = _content(source, size, last)
        name = last.removeprefix("./")
        blob = _BLOB.fullmatch(name)
        if member.type == tarfile.DIRTYPE and size == 0 and name in _FOLDERS:
            continue
        if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and (blob or name in _NOTES):
            yield name, blob[1] if blob else "", size, content
        else:
            plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)
            unsafe.append((last, "another name" if plain else f"an entry of type {member.type!r}"))
            if len(unsafe) > _LIMIT_FILES:
                raise _Damaged(last, f"at most {_LIMIT_FILES} files", "more")
        for _ in content:
            pass
        _exactly(source, -size % _BLOCK, last)
    filled = 0
    while rest := source.read(BUFFER_BYTES):
        filled += len(rest)
        if rest.strip(b"\0") or filled > _LIMIT_FILL_BYTES:
            raise _Damaged("its end", "some zeros after the last entry, and no more", "other bytes, or more")


def _content(source: Source, size: int, name: str) -> Iterator[bytes]:
    left = size
    while left:
        chunk = source.read(min(left, BUFFER_BYTES))
        if not chunk:
            raise _Damaged(name, f"{size} bytes", f"an end after {size - left}")
        left -= len(chunk)
        yield chunk


def _exactly(source: Source, size: int, last: str) -> bytes:
    return b"".join(_content(source, size, f"after {last}"))


def _file_header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o444
    return member.tobuf(tarfile.GNU_FORMAT)


def _folder_header(name: str) -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.mode = tarfile.DIRTYPE, 0o755
    return member.tobuf(tarfile.GNU_FORMAT)
