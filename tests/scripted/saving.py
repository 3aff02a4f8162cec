"""Saves a checkpoint with the names and the inventory of a real one; the tensors follow from the state."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

CONTRACT = {"seed": 429, "teacher": "/mnt/origin/teacher.bin", "world": "as the inventory says"}


def pickled(value: object) -> bytes:
    """`value` in torch's zip format, the same bytes each time."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), pickle.dumps(value, protocol=2))
    return raw.getvalue()


def save_checkpoint(output: Path, update: int, updates: int, world: int, state: float) -> Path:
    """Write `output/checkpoint-UPDATE`, aside first, the inventory last."""
    aside = output / f".saving-{update}"
    tag = f"global_step{update}"
    header = b'{"weight":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}'
    files = {
        "model.safetensors": struct.pack("<Q", len(header)) + header + struct.pack("<d", state),
        "latest": tag.encode(),
        "trainer_state.json": json.dumps({"global_step": update}).encode(),
        "resume_contract.json": json.dumps(CONTRACT).encode(),
        "navigation.json": b"{}",
        f"{tag}/mp_rank_00_model_states.pt": pickled({"module": state}),
    }
    for rank in range(world):
        files[f"{tag}/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = pickled(
            {"shard": rank, "state": state}
        )
        files[f"rng_state_{rank}.pth"] = pickled({"random state": rank})
    for name, content in files.items():
        path = aside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    inventory = {
        "ferry": 1,
        "update": update,
        "of": updates,
        "world": world,
        "contract": "sha256:" + hashlib.sha256(files["resume_contract.json"]).hexdigest(),
        "files": {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in files.items()
        },
    }
    (aside / "RECOVERY_COMPLETE.json").write_text(json.dumps(inventory, indent=2, sort_keys=True) + "\n")
    final = output / f"checkpoint-{update}"
    os.replace(aside, final)
    return final
