"""Pickles by opcode: what real checkpoints hold passes, everything else is named, and nothing is ever run."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner import pickles

RAN = "this pickle was run"


def file_of(folder: Path, raw: bytes, name: str = "state.pt") -> Path:
    """A file that holds `raw`."""
    path = folder / name
    path.write_bytes(raw)
    return path


def zipped(raw: bytes, *more: tuple[str, bytes]) -> bytes:
    """`raw` as the pickle of torch's zip format."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in (("a/data.pkl", raw), *more):
            archive.writestr(name, content)
    return out.getvalue()


class Evil:
    """Runs what it is made of when it is loaded."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def fault_texts(path: Path, **options: Any) -> list[tuple[str, str]]:
    return [(fault.what, fault.found) for fault in pickles.faults_of(path, **options)]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_call_of_the_system_is_named_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    """GLOBAL and STACK_GLOBAL, in torch's zip, its older format and a plain pickle."""
    raw = pickle.dumps({"state": [1.0, Evil(os.system, "false")]}, protocol)
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
    legacy = magic + pickle.dumps(1001, 2) + pickle.dumps({}, 2) + raw + pickle.dumps([], 2) + b"raw storages"
    for content in (raw, zipped(raw), legacy):
        assert ("unsafe pickle", "posix.system") in fault_texts(file_of(tmp_path, content))


def test_plain_state_passes(tmp_path: Path) -> None:
    """Numbers, text, lists, sets, ordered dictionaries: what a scheduler or an RNG state is made of."""
    value = {"a": [1, 2.5, None, True, "x" * 300], "b": (1, 2, 3, 4), "c": collections.OrderedDict(x={1, 2})}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for raw in (pickle.dumps(value, protocol), zipped(pickle.dumps(value, protocol))):
            assert pickles.faults_of(file_of(tmp_path, raw)) == []


ENUM = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
GETATTR = b"c__builtin__\ngetattr\n"
TRICKS: dict[str, tuple[bytes, str]] = {
    "INST": (b"(S'true'\nios\nsystem\n.", "os.system"),
    "OBJ": (b"(cos\nsystem\nS'true'\no.", "os.system"),
    "named through the memo": (
        b"\x80\x04\x8c\x02os\x94\x8c\x06system\x940h\x00h\x01\x93\x8c\x04true\x85R.",
        "os.system",
    ),
    "a dotted name": (
        b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93.",
        "collections.OrderedDict.__init__",
    ),
    "a computed name": (
        b"\x80\x04ccollections\nOrderedDict\n)R\x8c\x06system\x93.",
        "a global whose name is computed",
    ),
    "another getattr": (
        GETATTR + b"(ccollections\nOrderedDict\nS'pop'\ntR.",
        "getattr of something else than the member of a known enumeration",
    ),
    "a hidden member": (
        GETATTR + b"(" + ENUM + b"S'__init__'\ntR.",
        "getattr of something else than the member of a known enumeration",
    ),
    "a call of what a call gave": (
        GETATTR + b"(" + ENUM + b"S'mro'\ntR(tR.",
        "it calls what is not a global",
    ),
    "a process group": (b"caccelerate.state\nPartialState\n(tR.", "it calls accelerate.state.PartialState"),
    "a settings class with arguments": (
        b"\x80\x02caccelerate.state\nPartialState\nI1\n\x85\x81.",
        "it calls accelerate.state.PartialState",
    ),
    "a class that is changed": (
        ENUM + b"}S'x'\nI1\nsb.",
        "it changes deepspeed.runtime.zero.config.ZeroStageEnum itself",
    ),
    "an extension code": (b"\x80\x02\x82\x01.", "opcode EXT1"),
    "a buffer from outside": (b"\x80\x05\x97.", "opcode NEXT_BUFFER"),
    "an empty stack": (b".", "the stack runs empty"),
    "no mark": (b"N\x90.", "no mark on the stack"),
    "no end": (b"N", "not a pickle, or a damaged one: pickle exhausted before seeing STOP"),
    "an absent memo": (b"g7\n.", "memo 7 was never written"),
    "a pickle in a pickle": (b"c_pickle\nloads\n(S'x'\ntR.", "_pickle.loads"),
    "torch.load in a pickle": (
        b"ctorch.storage\n_load_from_bytes\n(S'x'\ntR.",
        "torch.storage._load_from_bytes",
    ),
}


@pytest.mark.parametrize("name", TRICKS)
def test_every_trick_is_refused(tmp_path: Path, name: str) -> None:
    """By the global's name, or by what cannot be followed."""
    raw, found = TRICKS[name]
    assert found in [text for _, text in fault_texts(file_of(tmp_path, raw))]


def test_members_of_known_enumerations_pass(tmp_path: Path) -> None:
    """Python 3.11 saves ZeroStageEnum in every ZeRO-2 shard as getattr(ZeroStageEnum, 'gradients')."""
    raw = GETATTR + b"(" + ENUM + b"S'gradients'\ntR."
    assert pickles.faults_of(file_of(tmp_path, raw)) == []


def test_odd_zips_are_refused(tmp_path: Path) -> None:
    """TorchScript, two pickles, two entries of one name, a cut-off archive, bytes after the pickle."""
    raw = pickle.dumps(1)
    with pytest.warns(UserWarning, match="Duplicate name"):
        twice = zipped(raw, ("a/data.pkl", raw))
    odd = {
        "a TorchScript archive: it holds code": zipped(raw, ("a/constants.pkl", raw)),
        "2 pickles in the archive, not one data.pkl": zipped(raw, ("a/x/data.pkl", raw)),
        "a zip archive with two entries of one name": twice,
        "damaged zip archive: BadZipFile: File is not a zip file": zipped(raw)[:-30],
        "bytes after the end of the pickle": zipped(raw + b"x"),
    }
    for reason, content in odd.items():
        assert fault_texts(file_of(tmp_path, content)) == [("pickle cannot be followed", reason)]


def test_an_oversize_pickle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb is not held in memory, however small its archive is."""
    monkeypatch.setattr(pickles, "LIMIT_BYTES", 1000)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", pickle.dumps(bytes(5000)))
    assert fault_texts(file_of(tmp_path, out.getvalue())) == [
        ("pickle cannot be followed", "a pickle of more than 1000 bytes")
    ]
    assert fault_texts(file_of(tmp_path, pickle.dumps(bytes(5000))))


def test_plain_data_may_be_called_bin(tmp_path: Path) -> None:
    """Outside a checkpoint; but not if a loader would run a part of it before it noticed."""
    assert fault_texts(file_of(tmp_path, struct.pack("<9d", *range(9)), "x.bin"), must_be_pickle=False) == []
    cut_off = b"cos\nsystem\n(S'true'\ntR"
    found = fault_texts(file_of(tmp_path, cut_off, "x.bin"), must_be_pickle=False)
    assert ("unsafe pickle", "os.system") in found


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(values, st.integers(0, pickle.HIGHEST_PROTOCOL), st.integers(0, 40))
def test_what_names_no_unsafe_global_passes_and_what_does_never_does(
    tmp_path_factory: pytest.TempPathFactory, value: object, protocol: int, depth: int
) -> None:
    """Wherever in a value the call lies."""
    folder = tmp_path_factory.mktemp("pickles")
    assert all(
        "unsafe" not in what for what, _ in fault_texts(file_of(folder, pickle.dumps(value, protocol)))
    )
    hidden: object = [value, Evil(os.system, RAN)]
    for _ in range(depth % 4):
        hidden = {"deeper": (value, hidden, hidden)}
    found = fault_texts(file_of(folder, pickle.dumps(hidden, protocol)))
    assert ("unsafe pickle", "posix.system") in found


@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 255))
def test_no_bytes_get_anything_but_an_answer(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, position: int, byte: int
) -> None:
    """Any bytes, and good files with one byte changed, give faults or none: never another exception."""
    folder = tmp_path_factory.mktemp("bytes")
    good = bytearray(zipped(pickle.dumps({"x": [1, "y"]}, 2)))
    good[position % len(good)] = byte
    for content in (raw, b"\x80\x04" + raw, bytes(good), pickles._ZIP + raw):
        pickles.faults_of(file_of(folder, content))
