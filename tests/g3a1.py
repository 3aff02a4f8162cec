"""Makes a small directory of exactly the layout of run G in the field notes, and the spec that describes it.

    python -m tests.g3a1 FOLDER

Layout, names, updates, rows and ranks are the run's own; weights, images and code are a few bytes. It has no run.yaml.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from runner import archive, documents
from runner.inside.digests import sha256_bytes
from runner.manifest import read_facts
from tests.builder import Pin, relist
from tests.conftest import PROJECT
from tests.scripted.saving import save_checkpoint

EXAMPLE = PROJECT / "examples" / "g3a1" / "run.yaml"
ROOT = "/gpfs/g/images"
TEACHER = b"a gated teacher's weights"
TEACHER_SOURCE = {"teacher/__init__.py": (False, b""), "teacher/model.py": (False, b"class Teacher: ...\n")}
CODE = {
    "navigation/train.py": (False, b"print('train')\n"),
    "configs/run_g.json": (False, b'{"seed": 429}\n'),
}
CONTRACT = """{
 "seed": 429, "world_size": 4, "gradient_accumulation_steps": 2, "global_batch_size": 8,
 "loader": {"num_workers": 12, "pin_memory": true},
 "teacher": {"weights": "/gpfs/g/teacher.safetensors", "source": "/gpfs/g/teacher-src"},
 "image_root": "/gpfs/g/images",
 "schedule": {"total": 3852, "warmup": 116, "peak": 5e-6, "floor": 0.1, "head": 1e-4, "adapter": 5e-5},
 "versions": {"transformers": "5.11.0"}
}
"""


def make(folder: Path) -> Path:
    """Make the directory at `folder` and return it."""
    (folder / "data").mkdir(parents=True)
    (folder / "source").mkdir()
    rows = (
        {
            "episode": f"ep-{number:05d}",
            "image": f"{ROOT}/{number % 97:02d}/{number}.png",
            "target": number % 7,
        }
        for number in range(30815)
    )
    manifest = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    facts_of = {"sha256": sha256_bytes(manifest), "image_root": ROOT, "episodes": 30815}
    logs = {
        f"run/train/exposure/rank_{rank}.jsonl": b"".join(
            json.dumps({"update": update, "ids": [], "loss": "0x1p-2"}).encode() + b"\n"
            for update in (1, 501, 502, 2100)
        )
        for rank in range(4)
    }
    files = {
        "data/train.jsonl": manifest,
        "data/manifest_info.json": json.dumps(facts_of, indent=2).encode(),
        "data/training_progress.json": b'{"update": 2100, "of": 3852}\n',
        "source/code.tar": archive.make(CODE),
        "source/branch.bundle": b"# v2 git bundle\n",
        "source/source_manifest.json": b"{}\n",
        "run/resolved_config.json": b'{"lr": 5e-6, "loader": {"num_workers": 12}}\n',
        "run/history/jobs.json": b'[{"updates": [1, 501]}, {"updates": [502, 2100]}]\n',
        **logs,
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    _checkpoint(folder)
    relist(folder)
    return folder


def spec_bytes(folder: Path, pin: Pin | None = None) -> bytes:
    """Return the example's spec with the digests of the directory `folder` in place of the publication's."""
    spec: dict[str, Any] = documents.yaml_value(EXAMPLE.read_text("utf-8"))
    code = (folder / "source/code.tar").read_bytes()
    facts = read_facts(folder / "data/train.jsonl", ("image",), ROOT)
    spec["code"] |= {"sha256": "sha256:" + sha256_bytes(code), "tree": archive.tree_of(CODE)}
    spec["data"] |= dataclasses.asdict(facts)
    spec["assets"]["teacher"]["sha256"] = "sha256:" + sha256_bytes(TEACHER)
    spec["assets"]["teacher-source"]["tree"] = archive.tree_of(TEACHER_SOURCE)
    if pin is not None:
        spec["image"] = dataclasses.asdict(pin)
    return yaml.safe_dump(spec, sort_keys=False).encode()


def make_server(folder: Path, **fields: Any) -> Path:
    """Make what a server must bring below `folder`, and its profile."""
    images, source = folder / "files" / "images", folder / "files" / "teacher-src"
    images.mkdir(parents=True)
    archive.unpack(TEACHER_SOURCE, source)
    teacher = folder / "files" / "teacher.safetensors"
    teacher.write_bytes(TEACHER)
    paths = {"images": str(images), "teacher": str(teacher), "teacher-source": str(source)}
    profile = {"ferry": 1, "name": "h100-b", "assets": paths, "values": {"loader_workers": 8}, **fields}
    (folder / "server.yaml").write_text(json.dumps(profile))
    return folder / "server.yaml"


def _checkpoint(folder: Path) -> None:
    """The checkpoint, with its inventory over all that the run keeps in it."""
    checkpoint = save_checkpoint(folder, 2100, 3852, 4, state=1.0)
    (checkpoint / "resume_contract.json").write_text(CONTRACT)
    state = json.loads((checkpoint / "trainer_state.json").read_bytes())
    best = {"best_model_checkpoint": None, "log_history": [{"step": 2100, "learning_rate": 2.532e-06}]}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state | best))
    for name in ("tokenizer.json", "processor_config.json", "config.json"):
        (checkpoint / name).write_bytes(b"{}\n")
    path = checkpoint / "RECOVERY_COMPLETE.json"
    inventory = json.loads(path.read_bytes())
    names = [file for file in sorted(checkpoint.rglob("*")) if file.is_file() and file != path]
    inventory["files"] = {
        str(file.relative_to(checkpoint)): {
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in names
    }
    inventory["contract"] = "sha256:" + inventory["files"]["resume_contract.json"]["sha256"]
    path.write_text(json.dumps(inventory, indent=2))


if __name__ == "__main__":
    made = make(Path(sys.argv[1]))
    (made.parent / f"{made.name}.run.yaml").write_bytes(spec_bytes(made))
    print(made)
