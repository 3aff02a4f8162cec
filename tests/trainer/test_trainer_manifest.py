"""A manifest is read strictly, and its fingerprint follows its meaning and not its place."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.manifest import fingerprint, read_manifest, records, relative_to_root
from trainer.refusal import Refusal


def line(number: int = 0, root: str = "/mnt/a", **more: object) -> bytes:
    record = {"id": f"ep-{number}", "image": f"{root}/{number}.png", "text": "t", **more}
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def test_fingerprint_is_the_one_that_was_agreed() -> None:
    """Sorted keys, no spaces, UTF-8 as it is, path below the root, one LF a row."""
    content = b'{"text": "caf\xc3\xa9", "id": "x", "image": "/r/a/b.png", "n": 1.50}\n'
    canonical = '{"id":"x","image":"a/b.png","n":1.5,"text":"café"}\n'.encode()
    assert fingerprint(content, "/r") == "sha256:" + hashlib.sha256(canonical).hexdigest()
    assert fingerprint(content, "/r/") == fingerprint(content, "/r")


@given(st.lists(st.text(st.characters(codec="utf-8")), min_size=1, max_size=5))
def test_fingerprint_does_not_depend_on_the_root(texts: list[str]) -> None:
    """Two roots, the same rows: the same fingerprint;
    another order: another one (unless the rows are equal).
    """
    here = b"".join(line(n, "/mnt/a", text=t) for n, t in enumerate(texts))
    there = b"".join(line(n, "/local/other root", text=t) for n, t in enumerate(texts))
    assert fingerprint(here, "/mnt/a") == fingerprint(there, "/local/other root")
    turned = b"".join(line(n, "/mnt/a", text=t) for n, t in reversed(list(enumerate(texts))))
    assert (fingerprint(turned, "/mnt/a") == fingerprint(here, "/mnt/a")) == (len(texts) == 1)


def test_line_separators_inside_text_split_nothing() -> None:
    """U+2028 and U+0085 stand in a text; only LF ends a record."""
    content = line(0, text="a\u2028b\u0085c")
    assert [number for number, _ in records(content + line(1))] == [1, 2]


@pytest.mark.parametrize(
    ("content", "where", "found"),
    [
        (line(0) + line(1)[:-1], "manifest line 2", "a cut last record"),
        (line(0) + line(1)[:-1] + b"\r\n", "manifest line 2", "CRLF"),
        (b"\xef\xbb\xbf" + line(0), "manifest line 1", "EF BB BF"),
        (line(0) + b"\n", "manifest line 2", "an empty line"),
        (line(0) + b'{"id": NaN}\n', "manifest line 2", "NaN is not JSON"),
        (line(0) + b'{"id": -Infinity}\n', "manifest line 2", "-Infinity is not JSON"),
        (b'{"id": "a", "id": "b"}\n', "manifest line 1", "duplicate key 'id'"),
        (b'{"x": {"y": 1, "y": 2}}\n', "manifest line 1", "duplicate key 'y'"),
        (b"[1]\n", "manifest line 1", "list"),
        (line(0) + line(0), "manifest line 2, column 'id'", "'ep-0'"),
        (line(0, text=3), "manifest line 1, column 'text'", "3"),
        (line(0, root="/mnt/ab"), "manifest line 1, column 'image'", "'/mnt/ab/0.png'"),
        (line(0, root="/mnt/a/.."), "manifest line 1, column 'image'", "'/mnt/a/../0.png'"),
        (line(0, image=None), "manifest line 1, column 'image'", "None"),
        (b'{"id": "a", "image": "/mnt/a/1", "text": "\\ud800"}\n', "manifest line 1", "a lone surrogate"),
    ],
)
def test_refusals_name_the_line(tmp_path: Path, content: bytes, where: str, found: str) -> None:
    """Each way in which a manifest is not what it seems."""
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    with pytest.raises(Refusal) as caught:
        read_manifest(path, "/mnt/a")
    (difference,) = caught.value.differences
    assert (difference.where, difference.found) == (where, found)
    assert "fix:" in str(caught.value)


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """Bytes are not guessed at."""
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(Refusal, match="manifest line 1"):
        read_manifest(path, "/mnt/a")


@pytest.mark.parametrize(
    ("path", "rest"),
    [
        ("/a/b/c", "b/c"),
        ("/ab/c", None),
        ("/a", None),
        ("/a/", None),
        ("/a//b", None),
        ("/a/./b", None),
        ("a/b", None),
    ],
)
def test_roots_are_whole_segments(path: str, rest: str | None) -> None:
    """`/data/run` is not a root of `/data/run2`."""
    assert relative_to_root(path, "/a") == rest
