"""Moving the paths in a column of a jsonl manifest from the origin's root to this server's, row by row, in the bytes.

Promises: whole path segments only (`/data/run` never touches `/data/run2`); of each row, only the bytes of the root in
the named columns change, so that order, ids, targets and the fingerprint relative to the root stay; constant memory;
each chunk is taken back and compared before it is handed on. Takes a manifest that `manifest.read_facts` has passed.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from runner.manifest import chunks, lines_of, parse_row
from runner.rewrite import json_span

# Measured (2 cores, 584 MiB): 1.5 s with these two; 1.9 s with 512 KiB and one waiting, or with 4 MiB and four.
_PIECE_BYTES = 1 << 20
_WAITING = 4
_LIMIT_RUNS = 10_000
_CLOSE_BYTES = 2048
_PLAIN = re.compile(r"[A-Za-z0-9_-]+\Z", re.ASCII)
# An escaped ASCII letter, digit, '_' or '-': only then can a key be written otherwise than in plain.
_ODD = re.compile(rb"\\u00[2-7]")
_UNIT = re.compile(r"\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Run:
    """From row `first_row` (counted from 1) of `column` on, the origin's root was written as `text`."""

    column: str
    first_row: int
    text: str


@dataclasses.dataclass(frozen=True)
class Moved:
    """A manifest whose `columns` lie below `after` now. Digests in hex; `runs` hold what taking it back needs."""

    columns: tuple[str, ...]
    before: str
    after: str
    text_after: str
    rows: int
    size_bytes: int
    sha256_before: str
    sha256_after: str
    runs: tuple[Run, ...]


def move(
    source: Path,
    columns: Sequence[str],
    roots: tuple[str, str],
    write: Callable[[bytes], object] | None = None,
    on_bytes: Callable[[int], None] | None = None,
    sha256_before: str | None = None,
) -> Moved:
    """Move `columns` of the manifest at `source` from the first of `roots` to the second; hand each chunk to `write`.

    `write` is called from another thread, in order. `sha256_before` is the digest of `source` in hex, from a caller that
    knows it. Raises ValueError naming the row whose path does not lie below the first root, or is spelled anew in every
    row.
    """
    before, after = roots
    works = [_Column(name, before, after) for name in columns]
    rows = size = 0
    with _Aside() as old, _Aside(write) as new:
        for chunk in chunks(source, _PIECE_BYTES):
            moved = chunk
            here = chunk.count(b"\n")
            for work in works:
                moved = work.move(moved, rows, here)
            if sha256_before is None:
                old.put(chunk)
            new.put(moved)
            rows += here
            size += len(moved)
            if on_bytes is not None:
                on_bytes(len(chunk))
        digests = sha256_before or old.hexdigest(), new.hexdigest()
    runs = tuple(run for work in works for run in work.runs)
    return Moved(tuple(columns), before, after, _text(after), rows, size, *digests, runs)


def take_back(source: Path, moved: Moved) -> Iterator[bytes]:
    """Yield the manifest as it was before `moved` was made of it; `source` is what was made."""
    starts = {
        column: {run.first_row: run.text for run in moved.runs if run.column == column}
        for column in moved.columns
    }
    texts: dict[str, str] = {}
    row = 0
    for chunk in chunks(source):
        for line in lines_of(chunk):
            row += 1
            whole = line
            for column in moved.columns:
                texts[column] = starts[column].get(row, texts.get(column, ""))
                whole = _with_root(whole, column, moved.text_after, texts[column])
            yield whole


class _Column:
    """One column: learns from a row how key and root are written, and looks closely wherever that does not hold."""

    def __init__(self, name: str, before: str, after: str) -> None:
        self.runs: list[Run] = []
        self._name = name
        self._before = before
        self._text_after = _text(after)
        self._key = json.dumps(name).encode()
        self._plain = _PLAIN.match(name) is not None
        self._text = ""
        self._needle = b""
        self._put = b""

    def move(self, chunk: bytes, rows_before: int, rows: int) -> bytes:
        """Return `chunk`, of `rows` rows after `rows_before` others, with the root exchanged in every row."""
        moved = self._at_once(chunk, rows)
        return self._in_parts(chunk, rows_before) if moved is None else moved

    def _in_parts(self, chunk: bytes, rows_before: int) -> bytes:
        done: list[bytes] = []
        waiting = [chunk]
        while waiting:
            part = waiting.pop()
            moved = self._at_once(part, part.count(b"\n"))
            middle = part.find(b"\n", len(part) // 2 if self._needle else 0) + 1
            if moved is None and self._plain and 0 < middle < len(part) and len(part) > _CLOSE_BYTES:
                # An odd row is in one half; and one row looked at closely shows how the next ones are written.
                first, rest = part[:middle], part[middle:]
                if self._needle:
                    waiting += [rest, first]
                    continue
                done.append(self._closely(first, rows_before))
                rows_before += 1
                moved = self._at_once(rest, rest.count(b"\n"))
                if moved is None and self._needle:
                    waiting.append(rest)
                    continue
                part = rest
            done.append(self._closely(part, rows_before) if moved is None else moved)
            rows_before += part.count(b"\n")
        return b"".join(done)

    def _closely(self, part: bytes, rows_before: int) -> bytes:
        lines = []
        for number, line in enumerate(lines_of(part), rows_before + 1):
            try:
                lines.append(self._move_row(line, number))
            except ValueError as error:
                raise ValueError(f"row {number}: {error}") from error
        return b"".join(lines)

    def _at_once(self, chunk: bytes, rows: int) -> bytes | None:
        """The whole chunk in one replacement, where that is certain to be the same; else None.

        Every row has the column. If no key can be written with escapes, key and root stand together once a row, and the
        key's text stands nowhere else, then each is the column's own key and there is nothing else to exchange. The key
        is counted in what comes out: there too it stands only where the root was put, so that putting the old root
        there gives the chunk again.
        """
        if not self._needle or (b"\\" in chunk and _ODD.search(chunk) is not None):
            return None
        parts = chunk.split(self._needle)
        if len(parts) - 1 != rows:
            return None
        moved = self._put.join(parts)
        return moved if moved.count(self._key) == rows else None

    def _move_row(self, line: bytes, number: int) -> bytes:
        parse_row(line)
        start, end = json_span(line, (self._name,), self._name)
        text = _root_text(line[start:end].decode("utf-8"), self._before)
        if not self.runs or text != self._text:
            self._note(text, number)
        moved = _with_root(line, self._name, text, self._text_after)
        if _with_root(moved, self._name, self._text_after, text) != line:
            raise ValueError(f"column '{self._name}' could not be taken back")
        self._learn(line, start)
        return moved

    def _note(self, text: str, number: int) -> None:
        if len(self.runs) == _LIMIT_RUNS:
            raise ValueError(
                f"the root in column '{self._name}' is spelled in too many ways to take them back"
            )
        self._text = text
        self.runs.append(Run(self._name, number, text))

    def _learn(self, line: bytes, start: int) -> None:
        key = line.rfind(self._key, 0, start)
        between = line[key + len(self._key) : start]
        if not self._plain or key < 0 or between.strip(b" \t") != b":":
            self._needle = b""
            return
        head = line[key:start] + b'"'
        root = self._text.encode("utf-8")
        slash = b"/" if line[start + 1 + len(root) :].startswith(b"/") else b"\\/"
        self._needle = head + root + slash
        self._put = head + self._text_after.encode("utf-8") + slash


class _Aside:
    """SHA-256, and `write`, in a thread of their own: they take no time from rewriting."""

    def __init__(self, write: Callable[[bytes], object] | None = None) -> None:
        self._digest = hashlib.sha256()
        self._write = write
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._waiting: deque[concurrent.futures.Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def put(self, chunk: bytes) -> None:
        """Take `chunk` after those before it; few wait. Raises what `write` raised."""
        while len(self._waiting) >= _WAITING:
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(self._take, chunk))

    def hexdigest(self) -> str:
        """Return the digest of all chunks, when all are written."""
        while self._waiting:
            self._waiting.popleft().result()
        return self._digest.hexdigest()

    def _take(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        if self._write is not None:
            self._write(chunk)


def _text(root: str) -> str:
    return json.dumps(root)[1:-1]


def _root_text(token: str, root: str) -> str:
    """Return how `root` is written at the beginning of the JSON string `token`."""
    value: Any = json.loads(token)
    if not isinstance(value, str) or not value.startswith(root + "/"):
        raise ValueError(f"{value!r} does not lie below {root}")
    plain = _text(root)
    if token.startswith(plain, 1):
        return plain
    at = 1
    while json.loads(f'"{token[1:at]}"') != root:
        match = _UNIT.match(token, at)
        assert match is not None
        at = match.end()
    return token[1:at]


def _with_root(line: bytes, column: str, old: str, new: str) -> bytes:
    start, _ = json_span(line, (column,), column)
    root = old.encode("utf-8")
    if line[start + 1 : start + 1 + len(root)] != root:
        raise ValueError(f"column '{column}' does not begin with {old}")
    return line[: start + 1] + new.encode("utf-8") + line[start + 1 + len(root) :]
