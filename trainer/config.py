"""The run's configuration: one JSON file, read strictly into frozen types.

Promise: every key is present and known, every value has its declared type and range; everything wrong is
reported at once with JSON pointers. Nothing has a default, so the file says all there is to say. Standard
library only.
"""

from __future__ import annotations

import json
import math
import re
import types
import typing
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from trainer.refusal import Difference, Refusal

T = TypeVar("T")
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_FIX = "write the config with exactly the keys of trainer/config.py"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model: images are square, `image_size` pixels;
    `text_bytes` is the longest text that is kept.
    """

    image_size: int
    patch: int
    hidden: int
    layers: int
    heads: int
    text_bytes: int
    teacher_width: int
    dropout: float


@dataclass(frozen=True)
class DataConfig:
    """What the manifest must be:
    its image root as recorded, row count, SHA-256 of its bytes, and fingerprint.
    """

    image_root: str
    rows: int
    sha256: str
    fingerprint: str


@dataclass(frozen=True)
class TeacherConfig:
    """The frozen teacher: where its weights lie, what they must hash to, and how its loss is weighted."""

    path: str
    sha256: str
    weight: float
    ramp_updates: int


@dataclass(frozen=True)
class LearningRates:
    """Peak learning rates of the three parts of the model."""

    body: float
    adapter: float
    head: float


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW on the CPU. One pair of betas for all groups: the kit's exactness cure rests on it.
    `clip` is a norm.
    """

    lr: LearningRates
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float


@dataclass(frozen=True)
class ScheduleConfig:
    """Length of the run: exactly one of `epochs` and `total` (updates) is given, the other is null."""

    epochs: int | None
    total: int | None
    warmup: int
    floor: float


@dataclass(frozen=True)
class LoaderConfig:
    """Loader processes a rank (0 = none) and batches each of them fetches ahead (unused with 0 workers)."""

    workers: int
    prefetch: int


@dataclass(frozen=True)
class BatchConfig:
    """Rows a rank and micro-batch, micro-batches an update, and ranks."""

    per_device: int
    accumulation: int
    world: int


@dataclass(frozen=True)
class SavesConfig:
    """A recovery checkpoint every `every` updates;
    the newest `keep` that this process wrote are kept (null = all).
    """

    every: int
    keep: int | None


@dataclass(frozen=True)
class RunConfig:
    """All of it. `transformers` is the only version that may train this run; `precision` is "bf16"."""

    name: str
    seed: int
    transformers: str
    precision: str
    model: ModelConfig
    data: DataConfig
    teacher: TeacherConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loader: LoaderConfig
    batch: BatchConfig
    saves: SavesConfig

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values, as it stands in a resume contract."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


def _scalar(kind: Any, value: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is kind


def _build(kind: Any, value: Any, at: str, wrong: list[Difference]) -> Any:
    """`value` as `kind`, or None after noting what is wrong with it."""
    if is_dataclass(kind) and isinstance(kind, type):
        return _build_section(kind, value, at, wrong)
    if isinstance(kind, types.UnionType):
        inner = next(option for option in typing.get_args(kind) if option is not type(None))
        return None if value is None else _build(inner, value, at, wrong)
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)
        if isinstance(value, list) and len(value) == len(inner):
            return tuple(
                _build(k, v, f"{at}/{i}", wrong) for i, (k, v) in enumerate(zip(inner, value, strict=True))
            )
        wrong.append(Difference(at, f"a list of {len(inner)} values", json.dumps(value)))
        return None
    if _scalar(kind, value):
        return float(value) if kind is float else value
    wrong.append(Difference(at, kind.__name__, json.dumps(value)))
    return None


def _build_section(kind: type[T], value: Any, at: str, wrong: list[Difference]) -> T | None:
    if not isinstance(value, dict):
        wrong.append(Difference(at or "/", "an object", json.dumps(value)))
        return None
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    wrong.extend(
        Difference(f"{at}/{name}", "no such key", "an unknown key") for name in value if name not in names
    )
    wrong.extend(Difference(f"{at}/{name}", "a value", "no such key") for name in names if name not in value)
    hints = get_type_hints(kind)
    built = {name: _build(hints[name], value[name], f"{at}/{name}", wrong) for name in names if name in value}
    return kind(**built) if len(built) == len(names) else None


Rule = tuple[str, bool, str, Any]


def _count_rules(config: RunConfig) -> list[Rule]:
    """Counts: where, whether it holds, what is expected, what was found."""
    model, batch, schedule, saves = config.model, config.batch, config.schedule, config.saves
    at_least_1 = [("/model", asdict(model)[name], name) for name in ("layers", "hidden", "text_bytes")]
    at_least_1 += [("/model", model.teacher_width, "teacher_width"), ("/model", model.patch, "patch")]
    at_least_1 += [("/batch", value, name) for name, value in asdict(batch).items()]
    at_least_1 += [("/loader", config.loader.prefetch, "prefetch"), ("/saves", saves.every, "every")]
    optional = [("/saves", saves.keep, "keep"), ("/schedule", schedule.epochs, "epochs")]
    optional += [("/schedule", schedule.total, "total")]
    at_least_0 = [("/loader", config.loader.workers, "workers"), ("/schedule", schedule.warmup, "warmup")]
    at_least_0 += [("/teacher", config.teacher.ramp_updates, "ramp_updates")]
    rules: list[Rule] = [(f"{at}/{key}", value > 0, "at least 1", value) for at, value, key in at_least_1]
    rules += [(f"{at}/{key}", value is None or value > 0, "at least 1", value) for at, value, key in optional]
    rules += [(f"{at}/{key}", value >= 0, "at least 0", value) for at, value, key in at_least_0]
    return rules


def _size_rules(config: RunConfig) -> list[Rule]:
    """What fits together, and numbers within bounds. Reads sizes that may be 0."""
    model, batch, schedule = config.model, config.batch, config.schedule
    given = f"epochs {schedule.epochs}, total {schedule.total}"
    one_length = (schedule.epochs is None) != (schedule.total is None)
    whole_patches = (
        model.patch > 0 and model.image_size >= model.patch and model.image_size % model.patch == 0
    )
    whole_heads = model.heads > 0 and model.hidden % model.heads == 0
    global_batch = batch.per_device * batch.accumulation * batch.world
    beta1, beta2 = config.optimizer.betas
    return [
        ("/seed", 0 <= config.seed < 2**32, "0 to 2^32 - 1", config.seed),
        ("/model/image_size", whole_patches, "a multiple of patch", model.image_size),
        ("/model/heads", whole_heads, "a divisor of hidden", model.heads),
        ("/model/dropout", 0.0 <= model.dropout < 1.0, "in [0, 1)", model.dropout),
        (
            "/optimizer/betas",
            0.0 <= min(beta1, beta2) <= max(beta1, beta2) < 1.0,
            "in [0, 1)",
            [beta1, beta2],
        ),
        ("/optimizer/clip", config.optimizer.clip > 0.0, "above 0", config.optimizer.clip),
        ("/schedule/epochs", one_length, "exactly one of epochs and total", given),
        ("/schedule/floor", 0.0 <= schedule.floor <= 1.0, "in [0, 1]", schedule.floor),
        (
            "/data/rows",
            config.data.rows >= max(1, global_batch),
            "one global batch or more",
            config.data.rows,
        ),
    ]


def _text_rules(config: RunConfig) -> list[Rule]:
    """Names, paths and hashes."""
    data, teacher = config.data, config.teacher
    mark = data.fingerprint.partition("sha256:")
    good_mark = mark[0] == "" and _HEX.fullmatch(mark[2]) is not None
    return [
        ("/name", config.name != "" and config.name.isprintable(), "a printable name", config.name),
        ("/precision", config.precision == "bf16", '"bf16"', config.precision),
        ("/data/image_root", data.image_root.startswith("/"), "an absolute path", data.image_root),
        ("/data/sha256", _HEX.fullmatch(data.sha256) is not None, "64 hex digits", data.sha256),
        ("/data/fingerprint", good_mark, "sha256: and 64 hex digits", data.fingerprint),
        ("/teacher/path", teacher.path.startswith("/"), "an absolute path", teacher.path),
        ("/teacher/sha256", _HEX.fullmatch(teacher.sha256) is not None, "64 hex digits", teacher.sha256),
    ]


def _ranges(config: RunConfig) -> list[Difference]:
    """What types alone do not say."""
    rules = _text_rules(config) + _count_rules(config) + _size_rules(config)
    return [Difference(at, expected, json.dumps(found)) for at, good, expected, found in rules if not good]


def parse_config(value: Any) -> RunConfig:
    """The config of an already decoded JSON value.

    Raises:
        Refusal: listing every unknown key, missing key, wrong type and value out of range.
    """
    wrong: list[Difference] = []
    config = _build_section(RunConfig, value, "", wrong)
    if not wrong and config is not None:
        wrong = _ranges(config)
    if wrong or config is None:
        raise Refusal("the config does not fit", wrong, _FIX)
    return config


def read_config(path: Path) -> RunConfig:
    """The config in a file; a file that is not JSON is refused too."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a key occurs twice in one object")
        return dict(pairs)

    try:
        value = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=unique)
    except (OSError, ValueError) as error:
        found = error.strerror or "unreadable" if isinstance(error, OSError) else str(error)
        raise Refusal(
            "the config cannot be read", [Difference(path.name, "a JSON file", found)], _FIX
        ) from error
    return parse_config(value)
