"""`ferry doctor`: whether this host can do what is asked of it, line by line, with the remedy.

Promises: `diagnose` is a pure function of observations (`runner.observe`, or a recording of another host) and of what is
asked; refuses only what the asked run would need. Nothing is changed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from runner import documents
from runner.bundle import Bundle, open_bundle, read_listed
from runner.doctor_check import Asked, Check, State, size
from runner.doctor_engine import engine_checks, wiring_checks
from runner.doctor_gpus import gpu_checks
from runner.doctor_host import cpu_checks, disk_checks, limit_checks, memory_checks, surroundings_checks
from runner.engine_info import version_tuple
from runner.errors import printable
from runner.image_spec import load_spec
from runner.inside.lock import requirements
from runner.observations import Observations
from runner.server import ServerProfile
from runner.spec import RunSpec

_SPEC = "run.yaml"
_CUDA = re.compile(r"nvidia-cuda-runtime(?:-cu[0-9]+)?==([0-9.]+)")
_SHARD = re.compile(r"(?:bf16_)?zero_pp_rank_[0-9]+_mp_rank_[0-9]+_optim_states\.pt")
_MODEL = re.compile(r"mp_rank_[0-9]+_model_states\.pt")
_STYLE = {State.GOOD: "green", State.NOTE: "dim", State.WARNING: "yellow", State.REFUSED: "bold red"}


def asked_of(server: Path | None, image: str | None, bundle: Path | None, project: Path) -> Asked:
    """Return what the documents ask of a host. Raises `Refusal` with the faults of a document."""
    asked = Asked()
    if server is not None:
        profile = documents.load(ServerProfile, server)
        asked = dataclasses.replace(
            asked,
            profile=True,
            engine=profile.engine,
            gpus=_gpus(profile),
            memory_guard=profile.memory_guard,
            shm_bytes=profile.shm_bytes,
        )
    if bundle is not None:
        asked, name = _with_bundle(asked, open_bundle(bundle.absolute()))
        image = image or name
    return asked if image is None else _with_image(asked, image, project)


def _gpus(profile: ServerProfile) -> tuple[str, ...]:
    """The GPUs that the profile names; of a count, those that a run takes on a host of its own."""
    if profile.gpus is None:
        return ()
    return profile.gpus.ids or tuple(map(str, range(profile.gpus.count or 0)))


def diagnose(seen: Observations, asked: Asked) -> list[Check]:
    """Return every check, in the order in which people read them."""
    parts = (
        engine_checks,
        wiring_checks,
        gpu_checks,
        memory_checks,
        limit_checks,
        cpu_checks,
        disk_checks,
        surroundings_checks,
    )
    return [check for part in parts for check in part(seen, asked)]


def is_refused(checks: Iterable[Check]) -> bool:
    """Whether any of `checks` refuses."""
    return any(check.state is State.REFUSED for check in checks)


def render(checks: list[Check]) -> Group:
    """Return `checks` as a table for people, and a last line that counts them."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True, min_width=max(len(state.value) for state in State))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        style = _STYLE[check.state]
        told = Text(printable(check.found))
        if check.remedy:
            told.append(f"\nexpected  {printable(check.expected)}", style="dim")
            told.append(f"\nremedy    {printable(check.remedy)}", style="default")
        table.add_row(Text(check.state.value, style=style), Text(printable(check.check)), told)
    counts = [(state, sum(check.state is state for check in checks)) for state in reversed(State)]
    last = Text("\n" + ", ".join(f"{count} {state.value}" for state, count in counts if count))
    return Group(table, last)


def as_json(checks: list[Check]) -> list[dict[str, str]]:
    """Return `checks` as a list for programs."""
    return [dataclasses.asdict(check) | {"state": check.state.value} for check in checks]


def _with_image(asked: Asked, name: str, project: Path) -> Asked:
    spec = load_spec(name, project)
    cuda: tuple[int, int] | None = None
    if spec.accelerator == "cuda":
        text = (project / spec.lock).read_text(encoding="utf-8")
        found = (_CUDA.match(line) for _, line in requirements(text))
        versions = [version_tuple(match[1]) for match in found if match]
        cuda = (versions[0][0], versions[0][1]) if versions and len(versions[0]) > 1 else None
    return dataclasses.replace(
        asked, image=name, accelerator=spec.accelerator, cuda=cuda, cpu_flags=spec.cpu_flags
    )


def _with_bundle(asked: Asked, bundle: Bundle) -> tuple[Asked, str | None]:
    """Add what the bundle's checkpoint takes: sizes as they lie there; its bytes are for `ferry verify`."""
    spec = None
    if _SPEC in bundle.digests:
        raw = read_listed(bundle, _SPEC)
        spec = documents.parse(RunSpec, raw, str(bundle.path / _SPEC))
    checkpoint = "" if spec is None or spec.checkpoint == "fresh" else f"{spec.checkpoint.path}/"
    sizes = {Path(name).name: count for name, count in bundle.sizes.items() if name.startswith(checkpoint)}
    ranks = spec.world.ranks if spec else sum(bool(_SHARD.fullmatch(name)) for name in sizes) or None
    peak, rule = load_peak(sizes, ranks or 1)
    if spec and spec.needs and spec.needs.host_memory_gib << 30 > (peak or 0):
        peak, rule = spec.needs.host_memory_gib << 30, "what the run spec says that it needs"
    return (
        dataclasses.replace(
            asked,
            ranks=ranks,
            gpu_model=spec.world.gpu if spec else None,
            load_peak_bytes=peak,
            peak_rule=rule,
            checkpoint_bytes=sum(sizes.values()) if checkpoint else None,
        ),
        spec.image.name if spec else None,
    )


def load_peak(sizes: dict[str, int], ranks: int) -> tuple[int | None, str]:
    """Return an estimate of the host memory that loading a checkpoint takes, and its rule; None if it has no optimizer.

    All ranks load at once. Sharded (DeepSpeed): each rank's shard is read whole beside the offloaded state that it
    fills, so every shard counts twice, and each rank reads the model states. Consolidated (DDP, ZeRO-1): each rank reads
    the whole optimizer file. A lower bound: Python, CUDA and the model's own copies come on top.
    """
    shards = sum(count for name, count in sizes.items() if _SHARD.fullmatch(name))
    model = sum(count for name, count in sizes.items() if _MODEL.fullmatch(name))
    if shards:
        rule = f"2 x {size(shards)} of optimizer shards + {ranks} ranks x {size(model)} of model states, at least"
        return 2 * shards + ranks * model, rule
    whole = sizes.get("optimizer.pt")
    if whole is None:
        return None, ""
    return ranks * whole, f"{ranks} ranks x {size(whole)} of optimizer.pt, at least"
