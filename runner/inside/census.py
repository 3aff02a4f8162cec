"""Is this checkpoint complete? Answered from its content, never from its name, its age or DeepSpeed's `latest` alone.

Promises: a checkpoint passes only if its inventory lists exactly the files that are there, with their sizes, and the
files are those of every rank of the recorded world; all that is missing or too much is named together. Hashes are
checked by `hash_faults`, apart, because that reads every byte. Rules for two kinds, told apart by their content:
Transformers + DeepSpeed ZeRO-2 (a shard of the optimizer a rank), and DDP or ZeRO-1 with a consolidated optimizer.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from runner.errors import Fault, Refusal
from runner.inside.digests import Hashed, hash_files, sha256_bytes

INVENTORY = "RECOVERY_COMPLETE.json"
CONTRACT = "resume_contract.json"
# ASCII digits only: int() and \d take every script's digits, and a name with those is not ours.
_NAME = re.compile(r"checkpoint-([1-9][0-9]{0,11})\Z", re.ASCII)
_TAKE_ANOTHER = "resume from another complete checkpoint, or fetch this one again from where it was made"
_INVENTORY_LIMIT = 64 << 20


class Kind(enum.Enum):
    """How a checkpoint holds its optimizer: a shard a rank (DeepSpeed ZeRO-2), or one file (DDP, ZeRO-1)."""

    SHARDED = "sharded"
    CONSOLIDATED = "consolidated"


@dataclasses.dataclass(frozen=True)
class Listed:
    """What the inventory says of one file: its size and its SHA-256 in hex."""

    size_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that passed the census; only `take_census` makes one. `inventory` identifies it (SHA-256, hex)."""

    path: Path
    update: int
    updates: int
    world: int
    inventory: str
    contract: str
    files: Mapping[str, Listed]
    kind: Kind

    @property
    def name(self) -> str:
        """The folder's name, `checkpoint-N`."""
        return self.path.name


def update_of(name: str) -> int | None:
    """Return N if `name` is `checkpoint-N` in plain ASCII, else None."""
    match = _NAME.match(name)
    return int(match[1]) if match else None


def take_census(folder: Path, world: int) -> Checkpoint:
    """Return the checkpoint in `folder` if it is a complete one of `world` ranks.

    Reads the inventory and the small state files, and the size of all others. Raises `Refusal` with every fault.
    """
    update = update_of(folder.name)
    if update is None:
        raise Refusal(
            Fault(
                "not a checkpoint's name",
                str(folder),
                "checkpoint-N, N in plain digits",
                folder.name,
                _TAKE_ANOTHER,
            )
        )
    present = _files_below(folder)
    raw, inventory = _read_inventory(folder)
    faults: list[Fault] = []
    listed = _listed(folder, inventory, faults)
    faults += _set_faults(folder, listed, present)
    faults += _recorded_faults(folder, inventory, update, world)
    kind = _kind(folder, present, faults)
    if kind is not None:
        faults += _rank_faults(folder, present, world, _rank_patterns(kind, world, update))
        faults += _part_faults(folder, present, kind, update)
    faults += _state_faults(folder, present, update, inventory)
    contract = listed[CONTRACT].sha256 if CONTRACT in listed else ""
    if not contract:
        faults.append(
            _fault("contract missing", folder / CONTRACT, "the resume contract, in the inventory", "nothing")
        )
    elif inventory.get("contract") not in (None, f"sha256:{contract}"):
        faults.append(
            _fault(
                "inventory contradicts itself",
                folder / INVENTORY,
                f"contract sha256:{contract}",
                str(inventory["contract"]),
            )
        )
    if faults:
        raise Refusal(*faults)
    assert kind is not None
    total = int(str(inventory["of"]))
    return Checkpoint(folder, update, total, world, sha256_bytes(raw), contract, listed, kind)


def hash_faults(
    checkpoint: Checkpoint,
    *,
    remembered: Mapping[str, Hashed] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> list[Fault]:
    """Read every file of `checkpoint` and return a fault for each that is not what its inventory says."""
    hashed = hash_files(checkpoint.path, checkpoint.files, remembered=remembered, on_bytes=on_bytes)
    faults = []
    for name, found in hashed.items():
        wanted = checkpoint.files[name].sha256
        if isinstance(found, OSError):
            faults.append(
                _fault("file cannot be read", checkpoint.path / name, f"sha256 {wanted}", str(found))
            )
        elif found.sha256 != wanted:
            faults.append(
                _fault("mismatch", checkpoint.path / name, f"sha256 {wanted}", f"sha256 {found.sha256}")
            )
    return faults


def newest_complete(folders: Iterable[Path], world: int) -> tuple[Checkpoint | None, dict[str, Refusal]]:
    """Return the complete checkpoint of the highest update among `folders`, and why each newer one is not complete."""
    rejected: dict[str, Refusal] = {}
    candidates = [folder for folder in folders if update_of(folder.name) is not None]
    for folder in sorted(candidates, key=lambda path: -(update_of(path.name) or 0)):
        try:
            return take_census(folder, world), rejected
        except Refusal as refusal:
            rejected[folder.name] = refusal
    return None, rejected


def _fault(what: str, where: Path, expected: str, found: str, fix: str = _TAKE_ANOTHER) -> Fault:
    return Fault(what, str(where), expected, found, fix)


def _files_below(folder: Path) -> dict[str, int]:
    """Relative path -> size of every file; a link or device is a Refusal, as is an unreadable folder."""
    found: dict[str, int] = {}
    faults: list[Fault] = []

    def walk(path: Path, prefix: str) -> None:
        try:
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            faults.append(_fault("checkpoint cannot be read", path, "a readable folder", str(error)))
            return
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                walk(Path(entry.path), f"{prefix}{entry.name}/")
            elif stat.S_ISREG(status.st_mode):
                found[prefix + entry.name] = status.st_size
            else:
                faults.append(
                    _fault("unsafe", Path(entry.path), "a regular file or a folder", "a link or a device")
                )

    walk(folder, "")
    if faults:
        raise Refusal(*faults)
    return found


def _read_inventory(folder: Path) -> tuple[bytes, dict[str, object]]:
    path = folder / INVENTORY
    try:
        with path.open("rb") as file:
            raw = file.read(_INVENTORY_LIMIT)
    except OSError as error:
        text = "no such file: the save was cut off" if isinstance(error, FileNotFoundError) else str(error)
        raise Refusal(
            _fault("checkpoint incomplete", path, "the inventory that a complete save writes last", text)
        ) from error
    try:
        inventory = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refusal(_fault("inventory damaged", path, "JSON", str(error))) from error
    if not isinstance(inventory, dict):
        raise Refusal(_fault("inventory damaged", path, "a JSON object", type(inventory).__name__))
    return raw, inventory


def _listed(folder: Path, inventory: Mapping[str, object], faults: list[Fault]) -> dict[str, Listed]:
    files = inventory.get("files")
    listed: dict[str, Listed] = {}
    if not isinstance(files, dict) or not files:
        faults.append(
            _fault(
                "inventory damaged", folder / INVENTORY, "'files': path -> bytes and sha256", repr(files)[:80]
            )
        )
        return listed
    for name, entry in files.items():
        match entry:
            case {"bytes": int(size), "sha256": str(sha256)} if (
                re.fullmatch(r"[0-9a-f]{64}", sha256) and size >= 0
            ):
                listed[name] = Listed(size, sha256)
            case _:
                faults.append(
                    _fault(
                        "inventory damaged",
                        folder / INVENTORY,
                        f"bytes and sha256 of {name}",
                        repr(entry)[:80],
                    )
                )
    return listed


def _set_faults(folder: Path, listed: Mapping[str, Listed], present: Mapping[str, int]) -> list[Fault]:
    faults = []
    for name in sorted(listed.keys() - present.keys()):
        faults.append(
            _fault(
                "missing", folder / name, f"{listed[name].size_bytes} bytes, as inventoried", "no such file"
            )
        )
    for name in sorted(present.keys() - listed.keys() - {INVENTORY}):
        faults.append(
            _fault("unexpected", folder / name, "only files of the inventory", f"{present[name]} bytes")
        )
    for name in sorted(listed.keys() & present.keys()):
        if present[name] != listed[name].size_bytes:
            faults.append(
                _fault(
                    "size differs",
                    folder / name,
                    f"{listed[name].size_bytes} bytes",
                    f"{present[name]} bytes",
                )
            )
    return faults


def _recorded_faults(folder: Path, inventory: Mapping[str, object], update: int, world: int) -> list[Fault]:
    where = folder / INVENTORY
    faults = []
    if inventory.get("update") != update:
        faults.append(
            _fault(
                "update differs",
                where,
                f"update {update}, as the folder's name says",
                str(inventory.get("update")),
            )
        )
    found = inventory.get("world")
    if found != world:
        fix = f"run it with {found} ranks" if isinstance(found, int) else _TAKE_ANOTHER
        faults.append(_fault("world size differs", where, f"target {world}", f"checkpoint {found}", fix))
    total = inventory.get("of")
    if not isinstance(total, int) or isinstance(total, bool) or total < update:
        faults.append(
            _fault("inventory damaged", where, f"'of': the run's updates, at least {update}", repr(total))
        )
    return faults


def _kind(folder: Path, present: Mapping[str, int], faults: list[Fault]) -> Kind | None:
    """The kind that the files are of (rule C9); a fault if they are of none, or of both."""
    sharded = "latest" in present or any(name.startswith("global_step") for name in present)
    consolidated = "optimizer.pt" in present
    if sharded != consolidated:
        return Kind.SHARDED if sharded else Kind.CONSOLIDATED
    expected = "DeepSpeed's global_step folder and latest, or optimizer.pt; not both"
    found = "both" if sharded else "neither"
    faults.append(_fault("checkpoint of no known kind", folder, expected, found))
    return None


def _rank_patterns(kind: Kind, world: int, update: int) -> tuple[tuple[str, re.Pattern[str]], ...]:
    states = r"rng_state_([0-9]+)\.pth\Z"
    if kind is Kind.CONSOLIDATED:
        # Transformers leaves the rank out of the name when there is one.
        return (("RNG state", re.compile(r"rng_state()\.pth\Z" if world == 1 else states, re.ASCII)),)
    shards = rf"global_step{update}/(?:bf16_)?zero_pp_rank_([0-9]+)_mp_rank_00_optim_states\.pt\Z"
    if world == 1:
        states = r"rng_state(?:_([0-9]+))?\.pth\Z"
    return ("optimizer shard", re.compile(shards, re.ASCII)), ("RNG state", re.compile(states, re.ASCII))


def _rank_faults(
    folder: Path, present: Mapping[str, int], world: int, kinds: Iterable[tuple[str, re.Pattern[str]]]
) -> list[Fault]:
    """The files of each rank, not one fewer and not one more (OpenTau 396, DeepSpeed 2898)."""
    faults = []
    for kind, pattern in kinds:
        ranks = [int(match[1] or 0) for name in present if (match := pattern.match(name))]
        for rank in sorted(set(range(world)) - set(ranks)):
            faults.append(
                _fault(
                    f"{kind} missing", folder, f"one of each rank of 0..{world - 1}", f"none of rank {rank}"
                )
            )
        for rank in sorted(set(ranks) - set(range(world))):
            fix = (
                "a run of another world size left it; run with that world size, or fetch the checkpoint again"
            )
            faults.append(
                _fault(
                    f"{kind} too many", folder, f"target {world}: ranks 0..{world - 1}", f"rank {rank}", fix
                )
            )
        for rank in sorted({rank for rank in ranks if ranks.count(rank) > 1}):
            faults.append(
                _fault(f"{kind} twice", folder, "one of each rank", f"more than one of rank {rank}")
            )
    return faults


def _part_faults(folder: Path, present: Mapping[str, int], kind: Kind, update: int) -> list[Fault]:
    """What every checkpoint of the kind has once, whatever its world."""
    faults = []
    wanted = ["trainer_state.json"]
    if kind is Kind.SHARDED:
        wanted += [f"global_step{update}/mp_rank_00_model_states.pt", "latest"]
    else:
        wanted += ["scheduler.pt"]
    weights = re.compile(r"(model.*\.safetensors|pytorch_model.*\.bin)\Z")
    if not any(weights.match(name) for name in present):
        wanted.append("model.safetensors")
    for name in wanted:
        if name not in present:
            faults.append(
                _fault("missing", folder / name, "part of every checkpoint of this kind", "no such file")
            )
    for name in sorted(name for name, size in present.items() if size == 0):
        faults.append(_fault("empty file", folder / name, "content", "0 bytes"))
    if "checkpoint-is-incomplete.txt" in present:
        marker = "checkpoint-is-incomplete.txt"
        faults.append(
            _fault("checkpoint incomplete", folder / marker, "no such marker", "a cut-off save left it")
        )
    return faults


def _state_faults(
    folder: Path, present: Mapping[str, int], update: int, inventory: Mapping[str, object]
) -> list[Fault]:
    faults = []
    if "latest" in present:
        tag = (folder / "latest").read_bytes()[:200].decode("utf-8", "backslashreplace").strip()
        if tag != f"global_step{update}":
            faults.append(_fault("tag differs", folder / "latest", f"global_step{update}", tag))
    if "trainer_state.json" in present:
        path = folder / "trainer_state.json"
        try:
            state = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            faults.append(_fault("trainer state damaged", path, "JSON", str(error)))
        else:
            faults += _trainer_faults(path, state if isinstance(state, dict) else {}, update, inventory)
    return faults


def _trainer_faults(
    path: Path, state: Mapping[str, object], update: int, inventory: Mapping[str, object]
) -> list[Fault]:
    """Trainer state against folder and inventory: the update, the total, and no log of what was not trained yet."""
    faults = []
    if state.get("global_step") != update:
        faults.append(_fault("update differs", path, f"global_step {update}", repr(state.get("global_step"))))
    if state.get("max_steps", inventory.get("of")) != inventory.get("of"):
        total = f"max_steps {inventory.get('of')}, as the inventory says"
        faults.append(_fault("total of updates differs", path, total, repr(state["max_steps"])))
    history = state.get("log_history")
    steps = (
        [entry.get("step") for entry in history if isinstance(entry, dict)]
        if isinstance(history, list)
        else []
    )
    late = [step for step in steps if isinstance(step, int) and step > update]
    if late:
        faults.append(
            _fault("update differs", path, f"a log of updates up to {update}", f"one of update {max(late)}")
        )
    return faults
