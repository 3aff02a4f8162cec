"""Do the parts of one checkpoint agree? Scheduler, engine state, trainer state and RNG, each against the others.

Promises: reads only what is small and plain, with stand-ins for every object of a pickle, after the pickles were judged
(`runner.pickles`); what contradicts is a fault, what is odd and may be meant is a note. Rules C10 to C12 of
docs/reference/bundle-format.md; arithmetic as in Transformers 5.11.0 and DeepSpeed 0.19.8.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.errors import Fault, Note, Refusal
from runner.inside.census import Checkpoint, Kind
from runner.tensors import inert_class, read_leaves

_FIX = "the checkpoint is put together from two saves: resume from another, or fetch this one again"
_NEAR = 1e-6


@dataclasses.dataclass(frozen=True)
class Found:
    """What comparing the parts of a checkpoint gave."""

    faults: tuple[Fault, ...]
    notes: tuple[Note, ...]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Samples a rank and micro-batch, and micro-batches an update."""

    per_rank: int
    accumulation: int


def compare(checkpoint: Checkpoint, rows: int) -> Found:
    """Compare the parts of `checkpoint`, whose bytes are those of its inventory; `rows` are those of the manifest."""
    faults: list[Fault] = []
    engine = _engine_state(checkpoint, faults)
    faults += _engine_faults(checkpoint, engine)
    faults += _scheduler_faults(checkpoint, engine)
    state = _json(checkpoint.path / "trainer_state.json")
    batch = _batch(engine, _json(checkpoint.path / "resume_contract.json"))
    faults += _trainer_faults(checkpoint, state, batch)
    notes = [*_epoch_notes(checkpoint, state, batch, rows), *_rng_notes(checkpoint)]
    return Found(tuple(faults), tuple(notes))


def epoch_of(update: int, rows: int, world: int, batch: Batch) -> float:
    """Return the epoch that Transformers records after `update` updates over `rows` rows.

    Its rule: an epoch is ceil(rows / (per rank x world)) micro-batches, the last update of an epoch may take fewer, and
    the fraction counts micro-batches (`epoch + (step + 1) / steps_in_epoch`).
    """
    micros = math.ceil(rows / (batch.per_rank * world))
    updates = math.ceil(micros / batch.accumulation)
    whole = (update - 1) // updates
    return whole + min((update - whole * updates) * batch.accumulation, micros) / micros


def plain_state(path: Path) -> Any:
    """Return the value in torch's zip file `path`, every object and tensor of it replaced by an inert stand-in.

    Raises ValueError where the file has another form.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            return _Plain(io.BytesIO(archive.read(name))).load()
    except Exception as error:
        # An unpickler over damaged input raises nearly anything; nothing of the input was run.
        raise ValueError(f"{type(error).__name__}: {error}") from error


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return inert_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        del pid
        return None


def _json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _engine_state(checkpoint: Checkpoint, faults: list[Fault]) -> Mapping[str, Any]:
    """What DeepSpeed says of the whole run; nothing for a consolidated checkpoint."""
    if checkpoint.kind is not Kind.SHARDED:
        return {}
    path = checkpoint.path / f"global_step{checkpoint.update}" / "mp_rank_00_model_states.pt"
    return _state(path, faults)


def _state(path: Path, faults: list[Fault]) -> Mapping[str, Any]:
    try:
        value = plain_state(path)
    except ValueError as error:
        faults.append(Fault("state cannot be read", str(path), "torch's zip format", str(error), _FIX))
        return {}
    return value if isinstance(value, dict) else {}


def _number(state: Mapping[str, Any], name: str) -> int | None:
    value = state.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _engine_faults(checkpoint: Checkpoint, engine: Mapping[str, Any]) -> list[Fault]:
    """DeepSpeed's counters against folder and world (rule C10)."""
    config = engine.get("ds_config")
    batch = _number(config, "train_batch_size") if isinstance(config, dict) else None
    wanted = {"global_steps": checkpoint.update, "dp_world_size": checkpoint.world}
    if batch is not None:
        wanted["global_samples"] = checkpoint.update * batch
    where = f"{checkpoint.path}/global_step{checkpoint.update}/mp_rank_00_model_states.pt"
    return [
        Fault("engine state differs", where, f"{name} {value}", f"{name} {found}", _FIX)
        for name, value in wanted.items()
        if (found := _number(engine, name)) not in (None, value)
    ]


def _scheduler_faults(checkpoint: Checkpoint, engine: Mapping[str, Any]) -> list[Fault]:
    """The scheduler took as many steps as the optimizer did (rule C10): it waits where an update was skipped."""
    faults: list[Fault] = []
    found: dict[str, Mapping[str, Any]] = {}
    if "scheduler.pt" in checkpoint.files:
        found["scheduler.pt"] = _state(checkpoint.path / "scheduler.pt", faults)
    if isinstance(engine.get("lr_scheduler"), dict):
        found[f"global_step{checkpoint.update}/mp_rank_00_model_states.pt: lr_scheduler"] = engine[
            "lr_scheduler"
        ]
    steps = checkpoint.update - (_number(engine, "skipped_steps") or 0)
    for name, state in found.items():
        last = _number(state, "last_epoch")
        scaled = "scaler.pt" in checkpoint.files and last is not None and last < steps
        if last not in (None, steps) and not scaled:
            where = f"{checkpoint.path}/{name}"
            faults.append(
                Fault("scheduler differs", where, f"last_epoch {steps}", f"last_epoch {last}", _FIX)
            )
    return faults


def _batch(engine: Mapping[str, Any], contract: Mapping[str, Any]) -> Batch | None:
    """Batch sizes as DeepSpeed's configuration has them, or the contract in the reference trainer's form."""
    config = engine.get("ds_config")
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    if not isinstance(config, dict):
        config, names = contract.get("batch"), ("per_device", "accumulation")
    if not isinstance(config, dict):
        return None
    per_rank, accumulation = _number(config, names[0]), _number(config, names[1])
    return Batch(per_rank, accumulation) if per_rank and accumulation else None


def _trainer_faults(checkpoint: Checkpoint, state: Mapping[str, Any], batch: Batch | None) -> list[Fault]:
    """Trainer state against the batch, and its epoch against the epochs in its own log (rule C11)."""
    where = str(checkpoint.path / "trainer_state.json")
    faults = []
    size = _number(state, "train_batch_size")
    if batch is not None and size not in (None, batch.per_rank):
        faults.append(Fault("batch differs", where, f"{batch.per_rank} a rank", f"{size} a rank", _FIX))
    epoch = state.get("epoch")
    rate = _logged_rate(state)
    if isinstance(epoch, (int, float)) and not isinstance(epoch, bool) and rate is not None:
        # The last update of an epoch may be a short one: that moves the rate by less than an update an epoch.
        expected = checkpoint.update * rate
        if not math.isclose(epoch, expected, rel_tol=max(_NEAR, rate), abs_tol=_NEAR):
            found = f"epoch {epoch}"
            expected_text = f"epoch {expected:.6g}, as its own log goes on"
            faults.append(Fault("epoch differs", where, expected_text, found, _FIX))
    return faults


def _logged_rate(state: Mapping[str, Any]) -> float | None:
    """Epochs an update, by the last line of the log."""
    history = state.get("log_history")
    for entry in reversed(history) if isinstance(history, list) else ():
        match entry:
            case {"step": int(step), "epoch": int() | float() as epoch} if step > 0 and epoch > 0:
                return float(epoch) / step
    return None


def _epoch_notes(
    checkpoint: Checkpoint, state: Mapping[str, Any], batch: Batch | None, rows: int
) -> list[Note]:
    """The epoch against the manifest's rows (rule C11): a note, since a trainer may hold rows back."""
    epoch = state.get("epoch")
    if batch is None or not isinstance(epoch, (int, float)):
        return []
    expected = epoch_of(checkpoint.update, rows, checkpoint.world, batch)
    if math.isclose(epoch, expected, rel_tol=_NEAR):
        return []
    meaning = (
        f"{rows} rows at {batch.per_rank} a rank, {checkpoint.world} ranks, {batch.accumulation} micro-batches an "
        f"update give epoch {expected:.6g}: the trainer saw another number of rows (filtered, held out?)"
    )
    where = str(checkpoint.path / "trainer_state.json")
    return [Note("epoch is not the manifest's", where, f"epoch {epoch}", meaning)]


def _rng_notes(checkpoint: Checkpoint) -> list[Note]:
    """Two ranks with the same random state draw the same augmentation and dropout (rule C12; transformers 17829)."""
    seen: dict[object, str] = {}
    notes = []
    for name in sorted(checkpoint.files):
        if not name.startswith("rng_state") or "/" in name:
            continue
        try:
            key: object = tuple(
                sorted((leaf, str(value)) for leaf, value in read_leaves(checkpoint.path / name).items())
            )
        except Refusal:
            key = checkpoint.files[name].sha256
        if key in seen:
            meaning = (
                "both ranks draw the same random numbers: meant, or a save that wrote one rank's state twice"
            )
            notes.append(
                Note("same RNG state", str(checkpoint.path), f"{seen[key]} and {name} hold the same", meaning)
            )
        else:
            seen[key] = name
    return notes
