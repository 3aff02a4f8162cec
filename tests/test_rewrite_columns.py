"""Moving a manifest's paths: only the root in the named columns, in every row, and back again byte for byte."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner import columns, manifest
from runner.errors import Refusal
from runner.manifest import read_facts

ROOTS = st.sampled_from(
    ["/mnt/a", "/data/run", "/d/é", '/q"uote', "/back\\slash", "/sp ace/$HOME", "/\u2028"]
)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=6).filter(
    lambda name: name not in (".", "..")
)


def spelled(value: str, how: str) -> str:
    """One JSON spelling of many."""
    text = json.dumps(value, ensure_ascii=how != "utf-8")
    if how == "slashes":
        return text.replace("/", "\\/")
    if how == "hex":
        return (
            '"'
            + "".join(f"\\u{ord(char):04x}" if ord(char) < 128 else json.dumps(char)[1:-1] for char in value)
            + '"'
        )
    return text


@st.composite
def manifests(draw: st.DrawFn) -> tuple[str, list[bytes], list[dict[str, Any]]]:
    """A root, and rows with paths below it among decoys: look-alike keys, look-alike paths, the same key nested."""
    root = draw(ROOTS)
    lines, rows = [], []
    for number in range(draw(st.integers(1, 12))):
        path = root + "/" + draw(NAMES)
        decoys = {
            "id": number, "image2": root + "2/x", "text": draw(st.sampled_from(["", f'"image": "{root}/x', root, "\u2028", "é", "\\u0069"])),
            "more": draw(st.sampled_from([{}, {"image": root + "/nested"}, [root + "/list"], None, 2e-5, "image"])),
        }  # fmt: skip
        how = draw(st.sampled_from(["plain", "plain", "plain", "utf-8", "slashes", "hex"]))
        key = draw(st.sampled_from(['"image"', '"image"', '"image"', '"im\\u0061ge"']))
        space = draw(st.sampled_from(["", " ", " ", " "]))
        others = json.dumps(decoys, ensure_ascii=draw(st.booleans()))
        mine = f"{key}{space}:{space}{spelled(path, how)}"
        line = f"{others[:-1]}, {mine}}}" if draw(st.booleans()) else f"{{{mine}, {others[1:]}"
        lines.append(line.encode() + b"\n")
        rows.append(decoys | {"image": path})
    return root, lines, rows


@given(manifests(), ROOTS)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_only_the_root_of_the_column_moves(
    tmp_path_factory: pytest.TempPathFactory, made: tuple[str, list[bytes], list[dict[str, Any]]], after: str
) -> None:
    """Rows parse to the same, but for the column; the fingerprint stays; taking it back gives the bytes."""
    root, lines, rows = made
    folder = tmp_path_factory.getbasetemp()
    before, there = folder / "a.jsonl", folder / "b.jsonl"
    before.write_bytes(b"".join(lines))
    with there.open("wb") as file:
        moved = columns.move(before, ("image",), (root, after), file.write)
    parsed = [json.loads(line) for line in there.read_bytes().split(b"\n")[:-1]]
    assert parsed == [row | {"image": after + row["image"].removeprefix(root)} for row in rows]
    assert b"".join(columns.take_back(there, moved)) == before.read_bytes()
    old, new = read_facts(before, ("image",), root), read_facts(there, ("image",), after)
    assert (old.fingerprint, old.rows) == (new.fingerprint, new.rows)
    assert (
        moved.sha256_after
        == hashlib.sha256(there.read_bytes()).hexdigest()
        == new.sha256.removeprefix("sha256:")
    )
    assert moved.sha256_before == hashlib.sha256(before.read_bytes()).hexdigest()
    assert (moved.rows, moved.size_bytes) == (len(rows), there.stat().st_size)


def test_chunks_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the reads end, and whichever chunks go the fast way: the same bytes."""
    rows = [
        {"id": number, "image": f"/mnt/a/{number}.png", "other": f"/mnt/a2/{number}"} for number in range(200)
    ]
    rows[77]["nested"] = {"image": "/mnt/a/keep.png"}
    source = tmp_path / "m.jsonl"
    source.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    results = set()
    for size in (1, 7, 100, 1000, 1 << 20):
        monkeypatch.setattr(columns, "_PIECE_BYTES", size)
        pieces: list[bytes] = []
        moved = columns.move(source, ("image",), ("/mnt/a", "/elsewhere/b"), pieces.append)
        results.add((b"".join(pieces), moved))
    assert len(results) == 1
    whole, moved = results.pop()
    assert whole.count(b"/elsewhere/b/") == 200
    assert whole.count(b"/mnt/a/") == 1
    assert moved.runs == (columns.Run("image", 1, "/mnt/a"),)


def test_two_columns_and_the_memory_of_both(tmp_path: Path) -> None:
    """Every declared column moves; each is taken back as it was spelled."""
    source, there = tmp_path / "m.jsonl", tmp_path / "n.jsonl"
    source.write_bytes(b'{"a": "/m/1", "b": "\\/m\\/2"}\n{"a": "/m/1", "b": "/m/2"}\n')
    with there.open("wb") as file:
        moved = columns.move(source, ("a", "b"), ("/m", "/x"), file.write)
    assert there.read_bytes() == b'{"a": "/x/1", "b": "/x\\/2"}\n{"a": "/x/1", "b": "/x/2"}\n'
    assert b"".join(columns.take_back(there, moved)) == source.read_bytes()


@pytest.mark.parametrize("path", ["/data/run2/x.png", "/data/run", "data/run/x", "/other", ""])
def test_a_path_outside_of_the_root_is_refused_with_its_row(tmp_path: Path, path: str) -> None:
    """Whole segments only, and no row is left as it was."""
    source = tmp_path / "m.jsonl"
    source.write_bytes(b'{"image": "/data/run/1"}\n' + json.dumps({"image": path}).encode() + b"\n")
    with pytest.raises(ValueError, match=r"row 2: .* does not lie below /data/run"):
        columns.move(source, ("image",), ("/data/run", "/x"))


def test_several_processes_find_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, digests and bad rows by their number, wherever the pieces end."""
    good = tmp_path / "good.jsonl"
    good.write_bytes(b"".join(b'{"image": "/m/%d", "b": [%d, 1e-5]}\n' % (n, n) for n in range(3000)))
    bad = tmp_path / "bad.jsonl"
    lines = good.read_bytes().split(b"\n")
    lines[17], lines[2900] = b'{"image": "/m/1", "image": "/m/2"}', b'{"image": NaN}'
    bad.write_bytes(b"\n".join(lines))
    facts = read_facts(good, ("image",), "/m")
    monkeypatch.setattr(manifest, "chunks", functools.partial(manifest.chunks, size_bytes=5000))
    monkeypatch.setattr(manifest, "_SHARE_BYTES", 1000)
    assert read_facts(good, ("image",), "/m") == facts
    assert facts.rows == 3000
    with pytest.raises(Refusal) as refused:
        read_facts(bad, ("image",), "/m")
    assert [fault.where for fault in refused.value.faults] == [f"{bad}:18", f"{bad}:2901"]
