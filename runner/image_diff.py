"""Why two images differ: setting by setting, layer by layer, file by file. Also two archives of a base's root.

Promises: every difference is told, or the two are the same; what comes out of a file or an engine is verified on the
way (`image_layout`) before anything is said of it; nothing is unpacked. Images with one digest are not even read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from runner import image_layout, image_tree
from runner.errors import Fault, Refusal
from runner.image_file import Chunks, image_file, unpacked
from runner.image_layout import Source
from runner.image_manifest import Layout
from runner.image_present import asking, size_bytes
from runner.image_tree import Item, Layer

OnBytes = Callable[[int], None]
_READ_BYTES = 1 << 20
_MEMBERS = ("mode", "owner", "time_s", "attributes")


@dataclasses.dataclass(frozen=True)
class Difference:
    """One difference: `what` ('only in A', 'only in B', 'differs', and of what), where, and how, in words."""

    what: str
    where: str
    how: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what}: {self.where}" + "".join(f"\n    {line}" for line in self.how)


@dataclasses.dataclass(frozen=True)
class Content:
    """What is compared: settings (key path -> JSON), and layers from the bottom up with the digest of each."""

    settings: Mapping[str, str]
    layers: tuple[tuple[str, Layer], ...]


class Origin(Protocol):
    """Where an image, or a base's root, can be read from."""

    def digest(self) -> str | None:
        """Return the manifest's digest, if it is known without reading; None otherwise."""
        ...

    def size_bytes(self) -> int:
        """Return how much there is to read, about."""
        ...

    def read(self, known: dict[str, Layer], on_bytes: OnBytes) -> Content:
        """Return the content. Layers in `known` are not looked into again, new ones are added."""
        ...


@dataclasses.dataclass(frozen=True)
class InEngine:
    """An image in the engine."""

    client: Any
    reference: str

    def digest(self) -> str | None:
        """Its digest."""
        return self.reference

    def size_bytes(self) -> int:
        """As the engine says."""
        return size_bytes(self.client, self.reference)

    def read(self, known: dict[str, Layer], on_bytes: OnBytes) -> Content:
        """As `Origin` says."""
        where = f"image {self.reference}"
        with asking("save", self.reference):
            source = Chunks(self.client.api.get_image(self.reference), on_bytes)
            return _of_layout(source, where, known)


@dataclasses.dataclass(frozen=True)
class InFile:
    """The file of an image, or an archive of a root file system (a tar, or one in gzip or zstd)."""

    path: Path

    def digest(self) -> str | None:
        """Not known without reading."""
        return None

    def size_bytes(self) -> int:
        """The file's size; opening it says what is wrong."""
        return self.path.stat().st_size if self.path.is_file() else 0

    def read(self, known: dict[str, Layer], on_bytes: OnBytes) -> Content:
        """As `Origin` says."""
        with image_file(self.path) as file:
            name = unpacked(file, self.path).read(100).split(b"\0")[0].removeprefix(b"./")
            source = unpacked(file, self.path, on_bytes)
            if name.startswith((b"blobs", b"oci-layout", b"index.json", b"manifest.json")):
                return _of_layout(source, str(self.path), known)
            return Content({}, (_of_root(source, str(self.path)),))


def _of_root(source: Source, where: str) -> tuple[str, Layer]:
    """An archive of a root file system as a layer, with the digest of the tar."""
    hasher = hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        while chunk := source.read(_READ_BYTES):
            hasher.update(chunk)
            yield chunk

    content = chunks()
    layer = image_tree.read_layer(content, where)
    if layer is None:
        fix = "give an image by name or digest, its file, or the tar of a base"
        raise Refusal(Fault("not an image", where, "a tar", "something else", fix))
    for _ in content:
        pass
    return f"sha256:{hasher.hexdigest()}", layer


def _of_layout(source: Source, where: str, known: dict[str, Layer]) -> Content:
    refused: dict[str, Refusal] = {}

    def see(digest: str, content: Iterator[bytes]) -> None:
        if digest in known:
            return
        try:
            layer = image_tree.read_layer(content, f"{where}: {digest}")
        except Refusal as refusal:
            # Told only if it is a layer, and was not damaged on the way.
            refused[digest] = refusal
            return
        if layer is not None:
            found[digest] = layer

    found: dict[str, Layer] = {}
    layout = image_layout.look(source, where, see)
    known.update(found)
    return Content(dict(_settings(layout)), tuple(_layers(layout, known, refused, where)))


def _layers(
    layout: Layout, known: Mapping[str, Layer], refused: Mapping[str, Refusal], where: str
) -> Iterator[tuple[str, Layer]]:
    for entry in layout.layers:
        if entry.digest in refused:
            raise refused[entry.digest]
        if entry.digest not in known:
            fix = "build or fetch it again"
            raise Refusal(
                Fault("layer cannot be read", f"{where}: {entry.digest}", "a tar", "something else", fix)
            )
        yield entry.digest, known[entry.digest]


def _settings(layout: Layout) -> Iterator[tuple[str, str]]:
    """Every leaf of the configuration but the layers' digests, which are compared as layers."""
    rest: list[tuple[str, Any]] = [
        ("", {key: value for key, value in layout.document.items() if key != "rootfs"})
    ]
    while rest:
        path, value = rest.pop()
        if isinstance(value, dict) and value:
            rest += [(f"{path}/{key}" if path else key, entry) for key, entry in value.items()]
        elif isinstance(value, list) and value:
            rest += [(f"{path}/{index}", entry) for index, entry in enumerate(value)]
        else:
            yield path, json.dumps(value, sort_keys=True, ensure_ascii=False)


def differences(a: Origin, b: Origin, on_bytes: OnBytes) -> list[Difference]:
    """Return every difference of the two, sorted; none if they are the same. Raises `Refusal` if one cannot be read."""
    if a.digest() is not None and a.digest() == b.digest():
        return []
    known: dict[str, Layer] = {}
    return compared(a.read(known, on_bytes), b.read(known, on_bytes))


def compared(a: Content, b: Content) -> list[Difference]:
    """Return every difference of `a` and `b`: settings, then layers, then files."""
    found = [
        _of("setting", key, a.settings.get(key), b.settings.get(key))
        for key in sorted(a.settings.keys() | b.settings.keys())
        if a.settings.get(key) != b.settings.get(key)
    ]
    found += _layers_differ(a, b)
    one, two = (image_tree.stack(layer for _, layer in content.layers) for content in (a, b))
    for path in sorted(one.keys() | two.keys()):
        left, right = one.get(path), two.get(path)
        if left is None or right is None:
            item, number = left or right  # type: ignore[misc]
            side = "B" if left is None else "A"
            found.append(Difference(f"file only in {side}", path, (f"{_summary(item)}, layer {number}",)))
        elif left[0] != right[0]:
            found.append(Difference("file differs", path, tuple(_how(left[0], right[0], left[1], right[1]))))
    return found


def _of(kind: str, where: str, a: str | None, b: str | None) -> Difference:
    if a is None:
        return Difference(f"{kind} only in B", where, (f"B {b}",))
    if b is None:
        return Difference(f"{kind} only in A", where, (f"A {a}",))
    return Difference(f"{kind} differs", where, (f"A {a}", f"B {b}"))


def _layers_differ(a: Content, b: Content) -> Iterator[Difference]:
    for index in range(max(len(a.layers), len(b.layers))):
        pair = [content.layers[index] if index < len(content.layers) else None for content in (a, b)]
        left, right = pair
        where = f"{index + 1} of {len(a.layers)} and {len(b.layers)}"
        if left is None or right is None:
            yield _of("layer", where, left and left[0], right and right[0])
        elif left[0] != right[0]:
            how = (f"A {left[0]}", f"B {right[0]}", *_same_files(left[1], right[1]))
            yield Difference("layer differs", where, how)


def _same_files(a: Layer, b: Layer) -> tuple[str, ...]:
    """What is to be said of two layers whose files are the same: those alone do not explain the difference."""
    if (a.items, a.removed, a.opaque) != (b.items, b.removed, b.opaque):
        return ()
    if list(a.items) != list(b.items):
        one, two = next(pair for pair in zip(a.items, b.items, strict=True) if pair[0] != pair[1])
        return (f"the same files in another order: {one} where B has {two}",)
    return ("the same files in the same order: the headers of the tar, or its compression, differ",)


def _summary(item: Item) -> str:
    size = f" of {item.size_bytes} bytes" if item.kind == "file" else ""
    target = f" to {item.content}" if item.kind in ("link", "hard link") else ""
    return f"{item.kind}{size}{target}"


def _how(a: Item, b: Item, layer_a: int, layer_b: int) -> Iterator[str]:
    if a.kind != b.kind:
        yield f"kind: {_summary(a)} -> {_summary(b)}"
    elif a.content != b.content:
        if a.kind == "file":
            yield f"content: {a.size_bytes} bytes {a.content[:12]} -> {b.size_bytes} bytes {b.content[:12]}"
        else:
            yield f"target: {a.content} -> {b.content}"
    for name in _MEMBERS:
        left, right = getattr(a, name), getattr(b, name)
        if left != right:
            yield f"{name.removesuffix('_s')}: {left} -> {right}"
    yield f"layer {layer_a}" + (f" and {layer_b}" if layer_a != layer_b else "")
