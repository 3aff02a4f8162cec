"""Reading the tensors of a checkpoint without torch, and without running anything that a pickle asks for.

Promises: no global of a pickle is ever imported or called: each becomes an inert stand-in, so that reading an
untrusted file can at worst fail; a file's leaves (tensors by their bytes, and plain values) come out under stable
names. Reads safetensors and torch's zip format; anything else is a `Refusal`.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import json
import math
import pickle
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from runner.errors import Fault, Refusal
from runner.inside.digests import sha256_bytes

_DAMAGED = "fetch the file again, or resume from another checkpoint"
_HEADER_LIMIT = 100 << 20
_ELEMENT_BYTES = {
    "DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2, "LongStorage": 8, "IntStorage": 4,
    "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1, "BoolStorage": 1, "UntypedStorage": 1,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor as it lies in a file: type, shape, and the SHA-256 of its elements' bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} {self.sha256[:12]}"


Leaf = Tensor | str


def read_leaves(path: Path) -> dict[str, Leaf]:
    """Return every leaf of the file at `path` by name: tensors, and other values by their repr.

    Raises `Refusal` when the file is of neither format, or damaged.
    """
    try:
        if path.name.endswith(".safetensors"):
            return _safetensors(path)
        return _torch_zip(path)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _damaged(path, error) from error
    except (
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        RuntimeError,
        MemoryError,
    ) as error:
        # RuntimeError: too deep, encrypted, or compressed in a way that nobody knows.
        raise _damaged(path, error) from error


def _damaged(path: Path, error: BaseException) -> Refusal:
    found = f"{type(error).__name__}: {error}"
    return Refusal(
        Fault("tensors cannot be read", str(path), "safetensors, or torch's zip format", found, _DAMAGED)
    )


def _safetensors(path: Path) -> dict[str, Leaf]:
    leaves: dict[str, Leaf] = {}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_LIMIT:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(file.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            content = file.read(end - begin)
            if len(content) != end - begin:
                raise ValueError(f"tensor {name} is cut off")
            leaves[name] = Tensor(entry["dtype"], tuple(entry["shape"]), sha256_bytes(content))
    return leaves


class _Inert:
    """Stands in for any object of a pickle: keeps what it was made of, does nothing."""

    parts: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Not __init__: a pickle may make an object without calling that.
        self = super().__new__(cls)
        self.parts = [*args, *([kwargs] if kwargs else [])]
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes whatever a pickle says; `__new__` has kept it."""

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts.append((key, value))

    def append(self, value: Any) -> None:
        self.parts.append(value)

    def extend(self, values: Any) -> None:
        self.parts.extend(values)

    def add(self, value: Any) -> None:
        self.parts.append(value)


def inert_class(module: str, name: str) -> type[_Inert]:
    """Return a class that stands in for the global `name` of `module`: its objects keep their parts and do nothing."""
    return type(name, (_Inert,), {"__module__": module})


@dataclasses.dataclass(frozen=True)
class _Storage:
    kind: str
    key: str


class _Reader(pickle.Unpickler):
    """An unpickler that knows dictionaries and tensors, and holds everything else at arm's length."""

    def __init__(self, archive: zipfile.ZipFile, prefix: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{prefix}/data.pkl")))
        self._archive = archive
        self._prefix = prefix
        self._contents: dict[str, bytes] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._tensor
        if (module, name) in {
            ("torch._utils", "_rebuild_parameter"),
            ("torch._utils", "_rebuild_parameter_with_state"),
        }:
            return lambda data, *_: data
        return inert_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case ("storage", kind, str(key), _, _):
                return _Storage(getattr(kind, "__name__", "UntypedStorage"), key)
        raise pickle.UnpicklingError(f"unknown persistent id {pid!r}")

    def _tensor(
        self, storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any
    ) -> Tensor:
        if storage.key not in self._contents:
            self._contents[storage.key] = self._archive.read(f"{self._prefix}/data/{storage.key}")
        content = self._contents[storage.key]
        size = _ELEMENT_BYTES[storage.kind]
        dtype = storage.kind.removesuffix("Storage")
        elements = b"".join(_rows(memoryview(content), offset, shape, stride, size))
        if len(elements) != math.prod(shape) * size:
            raise ValueError("a tensor reaches beyond its storage")
        return Tensor(dtype, tuple(shape), sha256_bytes(elements))


def _rows(
    content: memoryview, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], size: int
) -> Iterator[memoryview]:
    """Yield the elements in row-major order, in pieces as long as the strides allow."""
    if 0 in shape:
        return
    run, inner = 1, len(shape)
    while inner and (shape[inner - 1] == 1 or stride[inner - 1] == run):
        inner -= 1
        run *= shape[inner]
    if inner == 0:
        yield content[offset * size : (offset + run) * size]
        return
    for index in range(shape[0]):
        yield from _rows(content, offset + index * stride[0], shape[1:], stride[1:], size)


def _torch_zip(path: Path) -> dict[str, Leaf]:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise ValueError(f"{len(names)} pickles in the archive")
        value = _Reader(archive, names[0].removesuffix("/data.pkl")).load()
    return dict(_leaves("", value, set()))


def _leaves(name: str, value: Any, above: set[int]) -> Iterator[tuple[str, Leaf]]:
    """Yield the leaves of `value`; a value that contains itself is named once, as a cycle."""
    if id(value) in above:
        yield name, "a cycle"
        return
    deeper = above | {id(value)}
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        yield name + "{}", f"{len(value)} entries"
        inner = value.items()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield name + "[]", f"{type(value).__name__} of {len(value)}"
        inner = enumerate(sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value)
    elif isinstance(value, _Inert):
        yield name + "()", f"{type(value).__module__}.{type(value).__name__}"
        inner = enumerate(value.parts)
    elif isinstance(value, type):
        yield name, f"class {value.__module__}.{value.__name__}"
    elif isinstance(value, float):
        yield name, value.hex()
    else:
        yield name, repr(value)
    for key, entry in inner:
        yield from _leaves(f"{name}/{key}", entry, deeper)
