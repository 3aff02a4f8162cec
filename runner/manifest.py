"""The training manifest: a jsonl file, split at LF only, known by a fingerprint that does not depend on paths.

Promises: constant memory; a row that is not one JSON object, ends in CRLF, is cut off, holds NaN or a key twice is
refused with its line number; the fingerprint is SHA-256 over the canonical JSON of each row, LF after each, in which
every path column is given relative to the root.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from runner.errors import Fault, Refusal
from runner.forked import Forked

_MAKE_AGAIN = "make the manifest again with one JSON object a line, LF after each"
_LIMIT_FAULTS = 20
CHUNK_BYTES = 4 << 20
# Less than this is parsed before it would be handed out.
_SHARE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class ManifestFacts:
    """What identifies a manifest: rows, SHA-256 of its bytes, path-independent fingerprint ('sha256:...' both)."""

    rows: int
    sha256: str
    fingerprint: str


def read_facts(path: Path, path_columns: Sequence[str], root: str) -> ManifestFacts:
    """Read the manifest at `path` once; `root` is the absolute folder that its `path_columns` lie below.

    Raises `Refusal` with the first 20 bad rows by line number.
    """
    content = hashlib.sha256()
    fingerprint = hashlib.sha256()
    faults: list[Fault] = []
    rows = 0
    work = functools.partial(_read_part, columns=tuple(path_columns), prefix=root.rstrip("/") + "/")
    for part in _parts(path, work, content.update):
        for number, error in part.bad:
            where = f"{path}:{rows + number}"
            faults.append(Fault("bad row", where, "one JSON object, LF after it", error, _MAKE_AGAIN))
        rows += part.rows
        fingerprint.update(part.canonical)
        if len(faults) >= _LIMIT_FAULTS:
            break
    if not rows:
        faults.append(Fault("empty manifest", str(path), "rows", "none", _MAKE_AGAIN))
    if faults:
        raise Refusal(*faults[:_LIMIT_FAULTS])
    return ManifestFacts(rows, "sha256:" + content.hexdigest(), "sha256:" + fingerprint.hexdigest())


def chunks(source: Path, size_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the bytes of `source` in pieces of whole lines (split at LF only), about `size_bytes` each."""
    with source.open("rb") as file:
        while piece := file.read(size_bytes):
            yield piece if piece.endswith(b"\n") else piece + file.readline()


def lines_of(chunk: bytes) -> Iterator[bytes]:
    """Yield the lines of `chunk`, each with its LF; the last may lack one."""
    start = 0
    while start < len(chunk):
        end = chunk.find(b"\n", start) + 1 or len(chunk)
        yield chunk[start:end]
        start = end


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a piece of the manifest gave: rows, their canonical bytes, and the bad ones (number in the piece, why)."""

    rows: int
    canonical: bytes
    bad: tuple[tuple[int, str], ...]


def _read_part(chunk: bytes, columns: tuple[str, ...], prefix: str) -> _Part:
    rows = 0
    good: list[bytes] = []
    bad: list[tuple[int, str]] = []
    for line in lines_of(chunk):
        rows += 1
        try:
            row = parse_row(line)
            for column in columns:
                row[column] = _relative(row, column, prefix)
            good.append(canonical(row))
        except (ValueError, RecursionError) as error:
            bad.append((rows, str(error)))
            if len(bad) == _LIMIT_FAULTS:
                break
    return _Part(rows, b"".join(line + b"\n" for line in good), tuple(bad))


def _parts(
    path: Path, work: Callable[[bytes], _Part], on_chunk: Callable[[bytes], object]
) -> Iterator[_Part]:
    """Yield what `work` makes of each piece, in order; of a large file, by processes: parsing holds Python's lock."""

    def pieces() -> Iterator[bytes]:
        for chunk in chunks(path):
            on_chunk(chunk)
            yield chunk

    try:
        processes = min(len(os.sched_getaffinity(0)), path.stat().st_size // _SHARE_BYTES)
        if processes < 2:
            yield from map(work, pieces())
            return
        with Forked(work, processes) as forked:
            yield from forked.results(pieces())
    except OSError as error:
        raise Refusal(
            Fault("manifest cannot be read", str(path), "a readable file", str(error), _MAKE_AGAIN)
        ) from error


def parse_row(line: bytes) -> dict[str, Any]:
    """Return the object on `line` (with its LF). Raises ValueError saying what is wrong with it."""
    if not line.endswith(b"\n"):
        raise ValueError("the last record is cut off: no line feed after it")
    if line.endswith(b"\r\n"):
        raise ValueError("the line ends in CR LF")
    row = _decode(line.decode("utf-8", "surrogatepass"))
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {type(row).__name__}, not an object")  # noqa: TRY004 - bad content, not a bug
    return row


def canonical(row: dict[str, Any]) -> bytes:
    """Return the one form of `row` that fingerprints are made of."""
    return _encode(row).encode("utf-8", "surrogatepass")


def _relative(row: dict[str, Any], column: str, prefix: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise ValueError(f"column '{column}' holds {value!r}, not a path")  # noqa: TRY004 - bad content, not a bug
    if not value.startswith(prefix) or any(
        part in ("", ".", "..") for part in value[len(prefix) :].split("/")
    ):
        raise ValueError(f"column '{column}' holds {value!r}, which does not lie below {prefix}")
    return value[len(prefix) :]


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return row


# Made once: making them takes as long as reading a row.
_decode = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_no_twins).decode
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode
