"""Reading tensors without torch: files are made here in torch's format, by hand."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.errors import Refusal
from runner.inside.digests import sha256_bytes
from runner.tensors import Tensor, read_leaves


class Storage:
    """Stands for a storage when pickling, as torch's persistent ids do."""

    def __init__(self, key: str, count: int) -> None:
        self.key, self.count = key, count


class FakeTensor:
    """Pickles as a torch tensor does."""

    def __init__(
        self, storage: Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> None:
        self.parts = (storage, offset, shape, stride, False, {})

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return sys.modules["torch._utils"]._rebuild_tensor_v2, self.parts


@pytest.fixture
def torch_names() -> Iterator[types.ModuleType]:
    """The global names that torch's files use, for the pickler to find."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    torch.FloatStorage = type("FloatStorage", (), {"__module__": "torch"})  # type: ignore[attr-defined]

    def _rebuild_tensor_v2(*_: object) -> None:
        raise AssertionError("never called")

    _rebuild_tensor_v2.__module__ = "torch._utils"
    _rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2  # type: ignore[attr-defined]
    sys.modules.update({"torch": torch, "torch._utils": utils})
    yield torch
    del sys.modules["torch"], sys.modules["torch._utils"]


def write(path: Path, value: object, storages: dict[str, bytes], torch: types.ModuleType) -> Path:
    """Write `value` as torch.save would."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, entry: object) -> object:
            if isinstance(entry, Storage):
                return ("storage", torch.FloatStorage, entry.key, "cpu", entry.count)
            return None

    raw = io.BytesIO()
    Pickler(raw, protocol=2).dump(value)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", raw.getvalue())
        for key, content in storages.items():
            archive.writestr(f"archive/data/{key}", content)
    return path


def floats(*values: float) -> bytes:
    """Return the bytes of float32 `values`."""
    return struct.pack(f"<{len(values)}f", *values)


def test_tensors_come_out_by_their_elements(tmp_path: Path, torch_names: types.ModuleType) -> None:
    """Views, transposes and scalars are read in row-major order, whatever storage they share."""
    storage = Storage("0", 6)
    value = {
        "whole": FakeTensor(storage, 0, (2, 3), (3, 1)),
        "transposed": FakeTensor(storage, 0, (3, 2), (1, 3)),
        "row": FakeTensor(storage, 3, (3,), (1,)),
        "scalar": FakeTensor(storage, 5, (), ()),
        "none": FakeTensor(storage, 0, (0, 3), (3, 1)),
        "nested": [1.5, {"beta": True}],
    }
    leaves = read_leaves(write(tmp_path / "x.pt", value, {"0": floats(1, 2, 3, 4, 5, 6)}, torch_names))
    expected = {
        "/whole": (2, 3, floats(1, 2, 3, 4, 5, 6)),
        "/transposed": (3, 2, floats(1, 4, 2, 5, 3, 6)),
        "/row": (3, floats(4, 5, 6)),
        "/scalar": (floats(6),),
        "/none": (0, 3, b""),
    }
    for name, (*shape, content) in expected.items():
        assert leaves[name] == Tensor("Float", tuple(shape), sha256_bytes(content))  # type: ignore[arg-type]
    assert leaves["/nested/0"] == (1.5).hex()
    assert leaves["/nested/1/beta"] == "True"


def test_a_tensor_beyond_its_storage_is_refused(tmp_path: Path, torch_names: types.ModuleType) -> None:
    """A damaged file never reads as other values."""
    path = write(
        tmp_path / "x.pt", FakeTensor(Storage("0", 6), 4, (3,), (1,)), {"0": floats(*range(6))}, torch_names
    )
    with pytest.raises(Refusal, match="tensors cannot be read"):
        read_leaves(path)


class Hostile:
    """Runs a command when unpickled by a pickle that obeys."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def test_nothing_in_a_pickle_runs(tmp_path: Path, torch_names: types.ModuleType) -> None:
    """A hostile file is read as what it says, and does nothing."""
    mark = tmp_path.parent / "mark"
    leaves = read_leaves(write(tmp_path / "x.pt", {"x": Hostile(f"touch '{mark}'")}, {}, torch_names))
    assert leaves["/x()"] == "posix.system"
    assert not mark.exists()


def test_safetensors_are_read(tmp_path: Path) -> None:
    """Names, types, shapes and bytes."""
    header = b'{"__metadata__":{"a":"b"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + floats(1, 2))
    assert read_leaves(path) == {"w": Tensor("F32", (2,), sha256_bytes(floats(1, 2)))}


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
@pytest.mark.parametrize("content", [b"", b"x" * 7, b"\xff" * 64, b"PK\x03\x04" + bytes(40)])
def test_damage_is_refused_without_a_traceback(tmp_path: Path, name: str, content: bytes) -> None:
    """Whatever lies there, the answer is a refusal."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(Refusal, match="tensors cannot be read"):
        read_leaves(path)
