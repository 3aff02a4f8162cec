"""The data manifest (JSON lines): strict reading, and a fingerprint that does not depend on where the images
lie.

Promise: bytes are split at LF only; CRLF, a cut last record, NaN, duplicate keys and duplicate ids are
refused with the line number; two manifests that differ only in the image root have the same fingerprint, and
any other difference in meaning or order gives another one. Standard library only. It does not look at the
images.

`python -m trainer.manifest FILE IMAGE_ROOT` prints the fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.refusal import Refusal, refuse

PATH_COLUMNS = ("image",)
_FIX = "give the manifest exactly as it was packed, or make it anew with one JSON object per LF-ended line"


@dataclass(frozen=True)
class Row:
    """One training example. `image` is an absolute path as the manifest records it."""

    id: str
    image: str
    text: str


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read whole: its rows in file order and its two identities."""

    rows: tuple[Row, ...]
    sha256: str
    fingerprint: str


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"duplicate key {key!r}")
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def records(content: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number (from 1) and object of every line.

    Raises: Refusal: for a byte-order mark, CR before LF, a last line without LF, an empty line, text that is
        not UTF-8, anything that is not one JSON object, NaN or infinity, duplicate keys.
    """

    def bad(line: int, expected: str, found: str) -> Refusal:
        return refuse("the manifest cannot be read", f"manifest line {line}", expected, found, _FIX)

    if content.startswith(b"\xef\xbb\xbf"):
        raise bad(1, "no byte-order mark", "EF BB BF")
    lines = content.split(b"\n")
    if lines.pop() != b"":
        raise bad(len(lines) + 1, "a record that ends in LF", "a cut last record")
    for number, line in enumerate(lines, start=1):
        if line.endswith(b"\r"):
            raise bad(number, "LF", "CRLF")
        if not line.strip():
            raise bad(number, "one JSON object", "an empty line")
        try:
            value = json.loads(line.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
        except ValueError as error:
            raise bad(number, "one JSON object with unique keys and finite numbers", str(error)) from error
        if not isinstance(value, dict):
            raise bad(number, "a JSON object", type(value).__name__)
        yield number, value


def relative_to_root(path: str, image_root: str) -> str | None:
    """`path` below `image_root` in whole segments, or None when it is not there (or leaves it by `..`)."""
    root = image_root.rstrip("/") + "/"
    if not path.startswith(root):
        return None
    rest = path[len(root) :]
    segments = rest.split("/")
    return None if any(segment in ("", ".", "..") for segment in segments) else rest


def fingerprint(content: bytes, image_root: str, path_columns: Sequence[str] = PATH_COLUMNS) -> str:
    """`sha256:<hex>` over the rows' canonical JSON with path columns made relative to `image_root`."""
    return _read(content, image_root, path_columns)[1]


def _relative(record: dict[str, Any], number: int, root: str, columns: Sequence[str]) -> dict[str, Any]:
    row = dict(record)
    for column in columns:
        value = row.get(column)
        rest = relative_to_root(value, root) if isinstance(value, str) else None
        if rest is None:
            where = f"manifest line {number}, column {column!r}"
            raise refuse(
                "a path is not below the image root", where, f"a path below {root!r}", repr(value), _FIX
            )
        row[column] = rest
    return row


def _read(content: bytes, root: str, columns: Sequence[str]) -> tuple[list[tuple[int, dict[str, Any]]], str]:
    digest = hashlib.sha256()
    kept = []
    for number, record in records(content):
        text = json.dumps(
            _relative(record, number, root, columns),
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
        )
        try:
            digest.update(text.encode("utf-8") + b"\n")
        except UnicodeEncodeError as error:
            where = f"manifest line {number}"
            raise refuse(
                "the manifest cannot be read", where, "Unicode text", "a lone surrogate", _FIX
            ) from error
        kept.append((number, record))
    return kept, f"sha256:{digest.hexdigest()}"


def read_manifest(path: Path, image_root: str) -> Manifest:
    """Read a manifest whole.

    Raises: Refusal: for anything `records` refuses, a path outside `image_root`, a missing or non-text `id`,
        `image` or `text`, or an id that occurs twice.
    """
    content = path.read_bytes()
    kept, mark = _read(content, image_root, PATH_COLUMNS)
    rows, seen = [], set()
    for number, record in kept:
        for column in ("id", "image", "text"):
            if not isinstance(record.get(column), str):
                where = f"manifest line {number}, column {column!r}"
                raise refuse("the manifest cannot be read", where, "text", repr(record.get(column)), _FIX)
        if record["id"] in seen:
            where = f"manifest line {number}, column 'id'"
            raise refuse("the manifest cannot be read", where, "an id that is new", repr(record["id"]), _FIX)
        seen.add(record["id"])
        rows.append(Row(record["id"], record["image"], record["text"]))
    return Manifest(tuple(rows), hashlib.sha256(content).hexdigest(), mark)


if __name__ == "__main__":
    print(fingerprint(Path(sys.argv[1]).read_bytes(), sys.argv[2]))
