"""SHA256SUMS: what is written passes the standard tool, and every odd form is decided once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner import sums
from runner.errors import Refusal
from runner.inside.digests import sha256_bytes

A = "a" * 64
B = "b" * 64

names = (
    st.binary(min_size=1, max_size=40).map(os.fsdecode).filter(lambda name: sums.unsafe_reason(name) is None)
)


@given(st.dictionaries(names, st.sampled_from([A, B]), min_size=1, max_size=6))
def test_a_written_list_reads_back_byte_for_byte(digests: dict[str, str]) -> None:
    """Names of any bytes survive: backslash, newline, spaces, a leading dash, bytes that are not UTF-8."""
    raw = sums.render(digests)
    assert sums.parse(raw, "list") == digests
    assert sums.render(dict(reversed(digests.items()))) == raw


HOSTILE = [
    "-n", " lead", "trail ", "back\\slash", "new\nline", "tab\t", "snow\u2603", "\u00e9", "e\u0301",
    "\udcff\udcfe", "a  b", "*x",
]  # fmt: skip


def test_our_list_passes_the_standard_tool(tmp_path: Path) -> None:
    """`sha256sum -c --strict` agrees with a list over hostile names."""
    digests = {}
    for name in HOSTILE:
        (tmp_path / name).write_bytes(os.fsencode(name))
        digests[name] = sha256_bytes(os.fsencode(name))
    (tmp_path / "SHA256SUMS").write_bytes(sums.render(digests))
    done = subprocess.run(
        ["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"OK") == len(HOSTILE)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "empty list: list\n    expected a line for every file\n    found    0 bytes"),
        (b"\xef\xbb\xbf" + A.encode() + b"  x\n", "byte-order mark: list"),
        (A.encode() + b"  x", "list is cut off: list"),
        (A.encode() + b"  x\r\n", "not a line of the list: list:1"),
        (A.encode() + b" x\n", "not a line of the list: list:1"),
        (A.upper().encode() + b"  x\n", "not a line of the list: list:1"),
        (A.encode() + b"  x\n\n", "not a line of the list: list:2"),
        (b"# comment\n", "not a line of the list: list:1"),
        (A.encode() + b"  ../x\n", "unsafe: list:1"),
        (A.encode() + b"  /x\n", "unsafe: list:1"),
        (A.encode() + b"  a//x\n", "unsafe: list:1"),
        (A.encode() + b"  a/./x\n", "unsafe: list:1"),
        (A.encode() + b"  " + b"a/" * 100 + b"x\n", "unsafe: list:1"),
        (A.encode() + b"  SHA256SUMS\n", "unsafe: list:1"),
        (b"\\" + A.encode() + b"  x\\q\n", "unknown escape: list:1"),
        (A.encode() + b"  x\n" + B.encode() + b" *x\n", "listed twice: list:2"),
    ],
)
def test_every_odd_form_is_refused_by_line(raw: bytes, message: str) -> None:
    """Each form that `sha256sum -c` lets pass, or decides by its version, is refused."""
    with pytest.raises(Refusal) as refused:
        sums.parse(raw, "list")
    assert str(refused.value).startswith(message)


def test_the_binary_marker_is_taken() -> None:
    """GNU's `*` before a name means the same file."""
    assert sums.parse(A.encode() + b" *x\n", "list") == {"x": A}


def test_all_faults_come_together() -> None:
    """One refusal names every bad line."""
    with pytest.raises(Refusal) as refused:
        sums.parse(b"x\n" + A.encode() + b"  ../y\n", "list")
    assert [fault.where for fault in refused.value.faults] == ["list:1", "list:2"]


@given(
    st.one_of(
        st.binary(max_size=300),
        st.lists(st.sampled_from([b".", b"..", b"a", b"", b"x" * 255, b"x" * 256])).map(b"/".join),
    )
)
def test_the_short_way_to_safe_is_the_long_way(raw: bytes) -> None:
    """A name that passes in one step has nothing against it, and the other way round."""
    short = sums._SAFE.match(raw) is not None and raw not in sums._OWN
    assert short == (sums.unsafe_reason(os.fsdecode(raw)) is None)
