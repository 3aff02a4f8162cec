"""Makes a tiny good bundle, so that a test can break it in one named way.

The code in it is `tests/scripted`: a trainer of the standard library only, that writes what the reference trainer
writes (same names, same events, made-up tensors), so that starting it costs seconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runner import documents, pack
from runner.inside.digests import hash_file, sha256_bytes
from runner.spec import RunSpec
from tests.scripted.saving import save_checkpoint

SCRIPTED = Path(__file__).parent / "scripted"
IMAGES = "/mnt/origin/images"
TEACHER = "/mnt/origin/teacher.bin"
TEACHER_BYTES = b"the teacher's weights"
ROWS = 16
UPDATES = 6
WORLD = 2


@dataclasses.dataclass(frozen=True)
class Pin:
    """An image pin as the spec writes it; the default is of no image."""

    name: str = "cpu"
    lock: str = "sha256:" + "a" * 64
    digest: str = "sha256:" + "b" * 64
    config: str = "sha256:" + "c" * 64


def manifest_bytes(rows: int = ROWS, root: str = IMAGES) -> bytes:
    """Rows of a manifest with paths below `root`."""
    records = ({"id": f"ep-{row}", "image": f"{root}/{row}.png", "text": f"row {row}"} for row in range(rows))
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def make_draft(
    draft: Path, *, update: int | None = None, pin: Pin | None = None, updates: int = UPDATES, world: int = WORLD,
    args: tuple[str, ...] = (), change: Callable[[dict[str, Any]], None] | None = None,
) -> Path:  # fmt: skip
    """Lay out a draft at `draft`: fresh, or with a checkpoint at `update`. `change` alters the run spec."""
    (draft / "data").mkdir(parents=True)
    (draft / "source").mkdir()
    manifest = draft / "data" / "train.jsonl"
    manifest.write_bytes(manifest_bytes())
    archive, code = pack.describe_code({"scripted": SCRIPTED})
    (draft / "source" / "code.tar.gz").write_bytes(archive)
    pinned = pin or Pin()
    spec: dict[str, Any] = {
        "ferry": 1,
        "name": "tiny",
        "image": dataclasses.asdict(pinned),
        "code": {"archive": "source/code.tar.gz", **code},
        "world": {"ranks": world},
        "updates": updates,
        "checkpoint": "fresh",
        "launch": {
            "module": "scripted.train",
            "args": ["--manifest", "{bundle}/data/train.jsonl", "--output", "{output}",
                     "--updates", str(updates), *args],
            "resume_args": ["--resume-from", "{checkpoint}"],
            "env": {},
        },
        "data": {
            "manifest": "data/train.jsonl", "root": "images", "path_columns": ["image"],
            **pack.describe_manifest(manifest, ("image",), IMAGES),
        },
        "assets": {
            "images": {"origin": IMAGES, "kind": "folder"},
            "teacher": {"origin": TEACHER, "kind": "file", "sha256": "sha256:" + sha256_bytes(TEACHER_BYTES)},
        },
        "rebase": {"mount": ["images", "teacher"]},
    }  # fmt: skip
    if update is not None:
        spec["checkpoint"] = {"path": f"checkpoint-{update}", "update": update}
        save_checkpoint(draft, update, updates, world, state=float(update))
        (draft / "lineage.jsonl").write_bytes(b"")
    if change is not None:
        change(spec)
    parsed = documents.parse(RunSpec, json.dumps(spec).encode(), "draft")
    (draft / "run.yaml").write_bytes(pack.render_spec(parsed))
    return draft


def make_bundle(folder: Path, **options: Any) -> Path:
    """Return a bundle at `folder/bundle`; `options` are those of `make_draft`."""
    draft = make_draft(folder / "draft", **options)
    return pack.pack_draft(draft, folder / "bundle").path


def make_server(folder: Path, name: str = "server-a", **fields: Any) -> Path:
    """Return the profile of a server whose images and teacher lie under `folder`."""
    images = folder / f"{name} files" / "images"
    images.mkdir(parents=True)
    for row in range(ROWS):
        (images / f"{row}.png").write_bytes(b"picture %d" % row)
    teacher = folder / f"{name} files" / "teacher.bin"
    teacher.write_bytes(TEACHER_BYTES)
    profile = {"ferry": 1, "name": name, "assets": {"images": str(images), "teacher": str(teacher)}, **fields}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(profile))
    return path


def grow(bundle: Path, sizes: Mapping[str, int]) -> None:
    """Give the checkpoint-4 of `bundle` files of weights (name -> bytes of numbers), and say so wherever it is listed.

    No block is like another, and the same call gives the same bytes.
    """
    checkpoint = bundle / "checkpoint-4"
    inventory = json.loads((checkpoint / "RECOVERY_COMPLETE.json").read_bytes())
    source = random.Random(0)  # noqa: S311 - numbers, not secrets
    for name, size in sizes.items():
        layout = {"weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
        header = json.dumps(layout, separators=(",", ":")).encode()
        digest = hashlib.sha256()
        with (checkpoint / name).open("wb") as file:
            pieces = (source.randbytes(min(1 << 24, size - at)) for at in range(0, size, 1 << 24))
            for piece in itertools.chain([struct.pack("<Q", len(header)) + header], pieces):
                file.write(piece)
                digest.update(piece)
            inventory["files"][name] = {"bytes": file.tell(), "sha256": digest.hexdigest()}
    (checkpoint / "RECOVERY_COMPLETE.json").write_text(json.dumps(inventory, indent=2, sort_keys=True) + "\n")
    relist(bundle)


def relist(bundle: Path) -> None:
    """Write a list that fits what the bundle holds now, as a forger would."""
    from runner import sums

    names = [str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()]
    digests = {name: hash_file(bundle / name).sha256 for name in names if name != sums.LIST_NAME}
    (bundle / sums.LIST_NAME).write_bytes(sums.render(digests))


def snapshot(folder: Path) -> dict[str, str]:
    """Return everything below `folder`, for a test that says that nothing changed."""
    state = {}
    for path in sorted(folder.rglob("*")):
        kind = f"-> {path.readlink()}" if path.is_symlink() else "folder" if path.is_dir() else ""
        state[str(path.relative_to(folder))] = kind or hashlib.sha256(path.read_bytes()).hexdigest()
    return state
