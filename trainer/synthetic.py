"""A small made-up data set, teacher and config, so that the trainer can be shown without anybody's data.

Promise: the same arguments give the same bytes on every machine: pictures are drawn and packed here, with
stored (uncompressed) deflate blocks, and every number comes from SHA-256. Standard library only, so that it
runs without the image. Each text describes its picture, so there is something to learn.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.manifest import fingerprint

IMAGE_SIZE = 32
PATCH = 8
TEACHER_WIDTH = 32
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
SHAPES = ("square", "disc", "cross", "stripe")
PLACES = {"top left": (9, 9), "top right": (22, 9), "bottom left": (9, 22), "bottom right": (22, 22)}


def _numbers(label: str, count: int) -> Iterator[int]:
    """`count` 32-bit numbers that depend on the label alone."""
    made = 0
    for block in range((count + 7) // 8):
        digest = hashlib.sha256(f"ferry-synthetic-1:{label}:{block}".encode()).digest()
        for (number,) in struct.iter_unpack(">I", digest):
            if made < count:
                made += 1
                yield number


def _inside(shape: str, dx: int, dy: int, size: int) -> bool:
    if shape == "square":
        return abs(dx) <= size and abs(dy) <= size
    if shape == "disc":
        return dx * dx + dy * dy <= size * size
    if shape == "cross":
        return max(abs(dx), abs(dy)) <= size and min(abs(dx), abs(dy)) <= 1
    return abs(dx) <= size and abs(dy) <= 2


def _png(pixels: bytes, size: int) -> bytes:
    """An 8-bit RGB PNG. Stored deflate blocks: zlib versions differ in how they compress."""
    rows = b"".join(b"\0" + pixels[y * size * 3 : (y + 1) * size * 3] for y in range(size))
    parts = [rows[start : start + 0xFFFF] for start in range(0, len(rows), 0xFFFF)]
    body = b"\x78\x01"
    for index, part in enumerate(parts):
        body += struct.pack("<BHH", index == len(parts) - 1, len(part), len(part) ^ 0xFFFF) + part
    body += struct.pack(">I", zlib.adler32(rows))

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def _scene(row: int, seed: int) -> tuple[str, str, str, int]:
    colour, shape, place, size = _numbers(f"scene:{seed}:{row}", 4)
    names = list(COLOURS)[colour % 4], SHAPES[shape % 4], list(PLACES)[place % 4]
    return *names, 4 + size % 4


def _picture(row: int, seed: int) -> bytes:
    colour, shape, place, size = _scene(row, seed)
    centre_x, centre_y = PLACES[place]
    noise = list(_numbers(f"noise:{seed}:{row}", IMAGE_SIZE * IMAGE_SIZE))
    pixels = bytearray()
    for y in range(IMAGE_SIZE):
        for x in range(IMAGE_SIZE):
            inside = _inside(shape, x - centre_x, y - centre_y, size)
            grey = 16 + noise[y * IMAGE_SIZE + x] % 16
            pixels += bytes(COLOURS[colour] if inside else (grey, grey, grey))
    return _png(bytes(pixels), IMAGE_SIZE)


def image_name(row: int) -> str:
    """File name of a row's picture below the image root."""
    return f"{row:06d}.png"


def write_dataset(folder: Path, rows: int, seed: int) -> None:
    """Write the pictures of all rows into `folder` (made if it is not there)."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in range(rows):
        (folder / image_name(row)).write_bytes(_picture(row, seed))


def manifest_bytes(rows: int, image_root: str, seed: int) -> bytes:
    """The manifest of that data set, with paths below `image_root` (which need not exist here)."""
    lines = []
    for row in range(rows):
        colour, shape, place, size = _scene(row, seed)
        text = f"a {'big' if size > 5 else 'small'} {colour} {shape}, {place}"
        record = {"id": f"ep-{row:06d}", "image": f"{image_root.rstrip('/')}/{image_name(row)}", "text": text}
        lines.append(json.dumps(record) + "\n")
    return "".join(lines).encode("utf-8")


def write_manifest(path: Path, rows: int, image_root: str, seed: int = 429) -> None:
    """Write `manifest_bytes`; `seed` must be the data set's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(manifest_bytes(rows, image_root, seed))


def teacher_shapes(patch: int = PATCH, width: int = TEACHER_WIDTH) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the teacher's tensors, all float32."""
    return {"mix.weight": (width, width), "patch.bias": (width,), "patch.weight": (width, 3 * patch * patch)}


def teacher_bytes(seed: int) -> bytes:
    """A safetensors file with the teacher's weights:
    header length, JSON header, little-endian float32 data.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, shape in teacher_shapes().items():
        count = 1
        for side in shape:
            count *= side
        scale = (shape[-1] ** -0.5) / 2**31
        values = [(number - 2**31) * scale * 2.0 for number in _numbers(f"teacher:{seed}:{name}", count)]
        header[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + 4 * count],
        }
        data += struct.pack(f"<{count}f", *values)
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write_teacher(path: Path, seed: int) -> None:
    """Write `teacher_bytes`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(teacher_bytes(seed))


def demo_config(
    *,
    image_root: str,
    teacher_path: str,
    rows: int = 320,
    seed: int = 429,
    name: str = "demo",
    epochs: int | None = 1,
    total: int | None = None,
    workers: int = 0,
    save_every: int = 10,
    keep: int | None = None,
) -> dict[str, Any]:
    """The demo's config: 320 rows at a global batch of 8 are 40 updates in one true epoch.

    `image_root` and `teacher_path` are origin paths: they are what the trainer will open, not where the files
    were written. `seed` must be the one that the data set and the teacher were made with.
    """
    manifest = manifest_bytes(rows, image_root, seed)
    return {
        "name": name,
        "seed": seed,
        "transformers": "5.11.0",
        "precision": "bf16",
        "model": {
            "image_size": IMAGE_SIZE,
            "patch": PATCH,
            "hidden": 64,
            "layers": 2,
            "heads": 4,
            "text_bytes": 48,
            "teacher_width": TEACHER_WIDTH,
            "dropout": 0.1,
        },
        "data": {
            "image_root": image_root,
            "rows": rows,
            "sha256": hashlib.sha256(manifest).hexdigest(),
            "fingerprint": fingerprint(manifest, image_root),
        },
        "teacher": {
            "path": teacher_path,
            "sha256": hashlib.sha256(teacher_bytes(seed)).hexdigest(),
            "weight": 0.5,
            "ramp_updates": 24,
        },
        "optimizer": {
            "lr": {"body": 2e-3, "adapter": 3e-3, "head": 4e-3},
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": 0.01,
            "clip": 1.0,
        },
        "schedule": {"epochs": epochs, "total": total, "warmup": 4, "floor": 0.1},
        "loader": {"workers": workers, "prefetch": 2},
        "batch": {"per_device": 1, "accumulation": 2, "world": 4},
        "saves": {"every": save_every, "keep": keep},
    }
