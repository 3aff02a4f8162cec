"""The made-up data set is the same everywhere, and fits the config that comes with it."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path

from trainer import synthetic
from trainer.config import parse_config
from trainer.manifest import read_manifest


def digest_of(folder: Path) -> str:
    """One digest over names and bytes."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def write(folder: Path, seed: int = 429) -> None:
    synthetic.write_dataset(folder / "images", 12, seed)
    synthetic.write_manifest(folder / "train.jsonl", 12, "/mnt/origin/images", seed)
    synthetic.write_teacher(folder / "teacher.safetensors", seed)


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    """On any machine: the digest is a golden value. Another seed gives other bytes."""
    write(tmp_path / "a")
    write(tmp_path / "other place")
    write(tmp_path / "c", seed=1)
    assert digest_of(tmp_path / "a") == digest_of(tmp_path / "other place") == GOLDEN
    assert digest_of(tmp_path / "c") != GOLDEN


def test_config_describes_what_was_written(tmp_path: Path) -> None:
    """Manifest and teacher have the identities that the config names, and 320 rows are 40 updates."""
    synthetic.write_manifest(tmp_path / "train.jsonl", 320, "/mnt/origin/images")
    synthetic.write_teacher(tmp_path / "teacher.safetensors", 429)
    value = synthetic.demo_config(
        image_root="/mnt/origin/images", teacher_path="/mnt/origin/teacher.safetensors"
    )
    config = parse_config(json.loads(json.dumps(value)))
    manifest = read_manifest(tmp_path / "train.jsonl", config.data.image_root)
    teacher = (tmp_path / "teacher.safetensors").read_bytes()
    assert (manifest.sha256, manifest.fingerprint) == (config.data.sha256, config.data.fingerprint)
    assert hashlib.sha256(teacher).hexdigest() == config.teacher.sha256
    assert (
        len(manifest.rows) // (config.batch.world * config.batch.accumulation * config.batch.per_device) == 40
    )
    assert manifest.rows[17].id == "ep-000017"
    assert manifest.rows[17].image == "/mnt/origin/images/000017.png"


def test_pictures_are_png(tmp_path: Path) -> None:
    """Signature and size as a reader expects them."""
    synthetic.write_dataset(tmp_path, 1, 429)
    content = (tmp_path / "000000.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (32, 32)


def test_teacher_is_safetensors() -> None:
    """Header length, header, and exactly the data that the header speaks of."""
    content = synthetic.teacher_bytes(429)
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert {
        name: tuple(header[name]["shape"]) for name in synthetic.teacher_shapes()
    } == synthetic.teacher_shapes()
    assert (
        max(header[name]["data_offsets"][1] for name in synthetic.teacher_shapes())
        == len(content) - 8 - length
    )


def test_needs_only_the_standard_library() -> None:
    """The demo imports it with a plain Python: no torch, no NumPy, no Pillow."""
    program = (
        "import sys, trainer.synthetic, trainer.manifest, trainer.schedule, trainer.config\n"
        "print([name for name in ('torch', 'numpy', 'PIL', 'transformers') if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


GOLDEN = "4ea0127698d57eabff7bba000a0662e7f3fc992f173d071f8d0fbbfc3fc1b681"
