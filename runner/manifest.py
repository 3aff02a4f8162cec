"""The training manifest: a jsonl file, split at LF only, known by a fingerprint that does not depend on paths.

Promises: constant memory; a row that is not one JSON object, ends in CRLF, is cut off, holds NaN or a key twice is
refused with its line number; the fingerprint is SHA-256 over the canonical JSON of each row, LF after each, in which
every path column is given relative to the root.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from runner.errors import Fault, Refusal

_MAKE_AGAIN = "make the manifest again with one JSON object a line, LF after each"
_LIMIT_FAULTS = 20


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
    prefix = root.rstrip("/") + "/"
    for number, line in _lines(path):
        content.update(line)
        rows += 1
        try:
            row = parse_row(line)
            for column in path_columns:
                row[column] = _relative(row, column, prefix)
        except (ValueError, RecursionError) as error:
            faults.append(
                Fault("bad row", f"{path}:{number}", "one JSON object, LF after it", str(error), _MAKE_AGAIN)
            )
            if len(faults) == _LIMIT_FAULTS:
                break
            continue
        fingerprint.update(canonical(row) + b"\n")
    if not rows:
        faults.append(Fault("empty manifest", str(path), "rows", "none", _MAKE_AGAIN))
    if faults:
        raise Refusal(*faults)
    return ManifestFacts(rows, "sha256:" + content.hexdigest(), "sha256:" + fingerprint.hexdigest())


def parse_row(line: bytes) -> dict[str, Any]:
    """Return the object on `line` (with its LF). Raises ValueError saying what is wrong with it."""
    if not line.endswith(b"\n"):
        raise ValueError("the last record is cut off: no line feed after it")
    if line.endswith(b"\r\n"):
        raise ValueError("the line ends in CR LF")
    row = json.loads(line, parse_constant=_no_constant, object_pairs_hook=_no_twins)
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {type(row).__name__}, not an object")  # noqa: TRY004 - bad content, not a bug
    return row


def canonical(row: dict[str, Any]) -> bytes:
    """Return the one form of `row` that fingerprints are made of."""
    return json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            yield from enumerate(file, 1)
    except OSError as error:
        raise Refusal(
            Fault("manifest cannot be read", str(path), "a readable file", str(error), _MAKE_AGAIN)
        ) from error


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
