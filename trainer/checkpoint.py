"""A recovery checkpoint on disk: sealing it, judging it, and forgetting old ones.

Promise: a folder named `checkpoint-N` is written aside as `.saving-N`; all its files are synced, then the
inventory is written and synced, then the folder gets its name. So the inventory's presence means that
everything is there, and `verify` proves it by a census of names, sizes and hashes. Rotation deletes only what
this process wrote. Standard library only: what the files contain is the trainer's business.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.contract import CONTRACT_NAME, METADATA_NAME
from trainer.durable import (
    document_bytes,
    files_below,
    identify_all,
    rename_folder,
    sync_folder,
    write_document,
)
from trainer.refusal import Difference, Refusal

INVENTORY_NAME = "RECOVERY_COMPLETE.json"
FINAL_INVENTORY_NAME = "FINAL_COMPLETE.json"
_FIX = "resume from a complete checkpoint; this one was cut off or changed"


@dataclass(frozen=True)
class Seal:
    """What an inventory says besides its files."""

    update: int
    of: int
    world: int
    contract: str


def folder_name(update: int) -> str:
    """`checkpoint-N`."""
    return f"checkpoint-{update}"


def aside_for(output: Path, name: str) -> Path:
    """The hidden sibling in which `name` is written before it is complete."""
    return output / f".saving-{name.removeprefix('checkpoint-')}"


def seal(aside: Path, final: Path, inventory: str, seal_of: Seal) -> None:
    """Sync every file, write the inventory last, and give the folder its name.
    No other process may still write.
    """
    names = list(files_below(aside))
    identities = identify_all(aside, names, sync=True)
    for folder in sorted(path for path in aside.rglob("*") if path.is_dir()):
        sync_folder(folder)
    content = {
        "ferry": 1,
        "update": seal_of.update,
        "of": seal_of.of,
        "world": seal_of.world,
        "contract": seal_of.contract,
        "files": {name: {"bytes": i.size_bytes, "sha256": i.sha256} for name, i in identities.items()},
    }
    write_document(aside / inventory, document_bytes(content))
    rename_folder(aside, final)


def expected_names(update: int, world: int) -> list[str]:
    """Files without which a bf16 ZeRO-2 checkpoint of `world` ranks cannot be resumed exactly."""
    step = f"global_step{update}"
    return [
        "model.safetensors",
        "config.json",
        "trainer_state.json",
        "scheduler.pt",
        "latest",
        CONTRACT_NAME,
        METADATA_NAME,
        f"{step}/mp_rank_00_model_states.pt",
        *(f"{step}/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(world)),
        *(f"rng_state_{rank}.pth" for rank in range(world)),
    ]


def _read_inventory(folder: Path) -> dict[str, Any]:
    try:
        value = json.loads((folder / INVENTORY_NAME).read_bytes())
        files = value["files"]
        numbers = [value[key] for key in ("ferry", "update", "of", "world")]
        entries = [(entry["bytes"], entry["sha256"]) for entry in files.values()]
        good = all(type(n) is int for n in numbers) and all(
            type(b) is int and type(s) is str for b, s in entries
        )
        if not good or value["ferry"] != 1 or type(value["contract"]) is not str:
            raise ValueError("wrong types")  # noqa: TRY301 - the same answer as for damaged JSON
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        wrong = Difference(
            f"{folder.name}/{INVENTORY_NAME}", "a version 1 inventory", "none that can be read"
        )
        raise Refusal(f"{folder.name} is not a complete checkpoint", [wrong], _FIX) from error
    inventory: dict[str, Any] = value
    return inventory


def _census(folder: Path, inventory: dict[str, Any], world: int) -> list[Difference]:
    update, listed = inventory["update"], inventory["files"]
    present = [name for name in files_below(folder) if name != INVENTORY_NAME]
    wrong = [Difference(name, "this file", "missing") for name in sorted(set(listed) - set(present))]
    wrong += [Difference(name, "no such file", "unexpected") for name in sorted(set(present) - set(listed))]
    needed = set(expected_names(update, world))
    wrong += [
        Difference(name, "listed in the inventory", "not listed") for name in sorted(needed - set(listed))
    ]
    both = [name for name in present if name in listed]
    for name, identity in identify_all(folder, both).items():
        size, sha256 = listed[name]["bytes"], listed[name]["sha256"]
        if identity.size_bytes != size:
            wrong.append(Difference(name, f"{size} bytes", f"{identity.size_bytes} bytes"))
        elif identity.sha256 != sha256:
            wrong.append(Difference(name, f"sha256 {sha256}", f"sha256 {identity.sha256}"))
    return wrong


def verify(folder: Path, world: int, total: int) -> Seal:
    """Read every byte of a checkpoint and prove that it is whole and of this run's shape.

    Raises:
        Refusal: naming every missing, unexpected, mismatched file and every wrong number.
    """
    inventory = _read_inventory(folder)
    found = Seal(inventory["update"], inventory["of"], inventory["world"], inventory["contract"])
    wrong = []
    if re.fullmatch(r"checkpoint-[0-9]+", folder.name, re.ASCII) and folder.name != folder_name(found.update):
        wrong.append(Difference(f"{INVENTORY_NAME}#/update", f"that of {folder.name}", str(found.update)))
    if found.world != world:
        wrong.append(Difference(f"{INVENTORY_NAME}#/world", f"checkpoint {found.world}", f"target {world}"))
    if found.of != total:
        wrong.append(Difference(f"{INVENTORY_NAME}#/of", f"checkpoint {found.of}", f"target {total}"))
    wrong += _census(folder, inventory, found.world)
    if not wrong:
        listed = f"sha256:{inventory['files'][CONTRACT_NAME]['sha256']}"
        if listed != found.contract:
            wrong.append(Difference(f"{INVENTORY_NAME}#/contract", listed, found.contract))
        wrong += _pointers(folder, found.update)
    if wrong:
        raise Refusal(f"{folder.name} is not a complete checkpoint of this run", wrong, _FIX)
    return found


def _pointers(folder: Path, update: int) -> list[Difference]:
    """`latest` and the trainer's state must speak of the inventory's update."""
    wrong = []
    latest = (folder / "latest").read_text("utf-8").strip()
    if latest != f"global_step{update}":
        wrong.append(Difference("latest", f"global_step{update}", latest))
    step = json.loads((folder / "trainer_state.json").read_bytes()).get("global_step")
    if step != update:
        wrong.append(Difference("trainer_state.json#/global_step", str(update), json.dumps(step)))
    return wrong


class Rotation:
    """Keeps the newest `keep` checkpoints of those that this process wrote itself (None = all)."""

    def __init__(self, keep: int | None) -> None:
        self._keep = keep
        self._written: list[Path] = []

    def wrote(self, checkpoint: Path) -> list[str]:
        """Note a complete checkpoint and delete what is too old. Gives the names that were deleted."""
        self._written.append(checkpoint)
        deleted = []
        while self._keep is not None and len(self._written) > self._keep:
            old = self._written.pop(0)
            doomed = old.with_name(f".deleting-{old.name}")
            rename_folder(old, doomed)
            shutil.rmtree(doomed)
            deleted.append(old.name)
        return deleted
