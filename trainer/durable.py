"""Files that survive a power cut: written aside, synced, renamed, and the folder synced.

Promise: after `write_document` or `rename_folder` returns, the new content is on disk under its final name;
at no moment does a half-written file bear that name. Standard library only. It does not decide what is
written.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class FileIdentity:
    """Size in bytes and SHA-256 (64 lower-case hex digits) of one file."""

    size_bytes: int
    sha256: str


def document_bytes(value: Any) -> bytes:
    """JSON as UTF-8: indent 2, sorted keys, no NaN, one newline at the end; equal values give equal bytes."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode("utf-8")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_document(path: Path, content: bytes) -> None:
    """Put `content` at `path`, all or nothing, replacing what was there."""
    aside = path.with_name(f".{path.name}.part")
    with open(aside, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(aside, path)
    sync_folder(path.parent)


class Appender:
    """A file that only grows; it stays open for the life of the process. Made if it is not there."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def append(self, content: bytes) -> None:
        """Give all of `content` to the kernel. Raises `OSError`, e.g. when the disk is full."""
        while content:
            content = content[os.write(self._descriptor, content) :]

    def sync(self) -> None:
        """Put everything appended so far on disk."""
        os.fsync(self._descriptor)


def rename_folder(aside: Path, final: Path) -> None:
    """Give a finished folder its name. Raises `OSError` if a non-empty folder bears it already."""
    sync_folder(aside)
    os.rename(aside, final)
    sync_folder(final.parent)


def identify(path: Path, *, sync: bool = False) -> FileIdentity:
    """Read a file once and give its size and SHA-256; `sync` flushes it to disk as well."""
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as stream:
        if sync:
            os.fsync(stream.fileno())
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileIdentity(size, digest.hexdigest())


def files_below(folder: Path) -> Iterator[str]:
    """Relative POSIX paths of everything below `folder` that is not a folder, sorted;
    links are not followed.
    """
    found: list[str] = []
    for base, _folders, names in os.walk(folder):
        found.extend(Path(base, name).relative_to(folder).as_posix() for name in names)
    yield from sorted(found)


def identify_all(folder: Path, names: list[str], *, sync: bool = False) -> dict[str, FileIdentity]:
    """Identities of the named files, read in parallel (hashlib releases the GIL)."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        identities = pool.map(lambda name: identify(folder / name, sync=sync), names)
        return dict(zip(names, identities, strict=True))


@contextmanager
def plain_path(folder: Path) -> Iterator[str]:
    """A link in the temporary folder through which `folder` has a plain ASCII path.

    Transformers and DeepSpeed put a checkpoint's path into glob patterns, so that one with `[` in it is not
    found; and torch.save writes other bytes below a path that is not ASCII.
    """
    with tempfile.TemporaryDirectory(prefix="ferry-") as place:
        link = Path(place, "checkpoint")
        link.symlink_to(folder, target_is_directory=True)
        yield str(link)
