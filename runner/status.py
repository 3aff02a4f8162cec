"""One screen about a run: where it is, how fast, what was saved, who holds it, and where it trained before.

Promises: reads only what the run wrote; a run that has not logged anything has a status too; numbers are what the
trainer logged last, with the rate measured over its last 20 updates.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from runner.engine import Phase, State
from runner.errors import printable
from runner.run import RunFolder

_TAIL_BYTES = 1 << 16
_RATE_OVER = 20
# As the start program writes it: Unix seconds, in a file that programs read too.
_SINCE = re.compile(r"since ([0-9]+)\Z", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Status:
    """The state of a run; None where nothing is known. Times in seconds."""

    run: str
    server: str
    phase: str
    holder: str | None
    sealed_as: str | None
    update: int
    updates: int
    epoch: float | None
    loss: float | None
    learning_rate: float | None
    seconds_per_update: float | None
    seconds_left: float | None
    checkpoint: str | None
    incomplete: dict[str, str]
    verdict: str | None
    segments: tuple[str, ...]


def read_status(folder: RunFolder, state: State) -> Status:
    """Return the status of the run in `folder`, whose container the engine says is in `state`."""
    spec = folder.spec()
    events = _events(folder.output / spec.outputs.events)
    updates = [event for event in events if event.get("event") == "update"]
    last = updates[-1] if updates else {}
    newest, rejected = folder.checkpoints()
    links = folder.links()
    seconds = [
        float(event["seconds"])
        for event in updates[-_RATE_OVER:]
        if isinstance(event.get("seconds"), (int, float))
    ]
    rate = sum(seconds) / len(seconds) if seconds else None
    update = int(last.get("update", newest.update if newest else 0))
    seal = folder.seal()
    running = state.phase is Phase.RUNNING
    return Status(
        run=spec.name,
        server=folder.server().name,
        phase=state.phase.value,
        holder=folder.lease_holder(),
        sealed_as=str(seal["bundle"]) if seal else None,
        update=update,
        updates=spec.updates,
        epoch=_number(last.get("epoch")),
        loss=_number(last.get("loss")),
        learning_rate=_number(last.get("lr")),
        seconds_per_update=rate,
        seconds_left=rate * (spec.updates - update) if rate and running else None,
        checkpoint=newest.name if newest else None,
        incomplete={name: refusal.faults[0].what for name, refusal in rejected.items()},
        verdict=links[-1].verdict if links and not running else None,
        segments=tuple(
            f"{link.segment} on {link.server}: updates {link.first_update} to {link.last_update}, {link.verdict}"
            for link in links
        ),
    )


def latest(folder: RunFolder) -> tuple[int, float | None]:
    """Return the last update that the trainer logged (0: none yet) and its loss; reads the end of one file."""
    updates = [
        event
        for event in _events(folder.output / folder.spec().outputs.events)
        if event.get("event") == "update"
    ]
    return (int(updates[-1]["update"]), _number(updates[-1].get("loss"))) if updates else (0, None)


def render(status: Status) -> RenderableType:
    """Return the screen for `status`."""
    title = Text(f"{status.run} on {status.server}: {_word(status)}", style="bold")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("", ProgressBar(total=status.updates, completed=status.update, width=50))
    rows = [
        (
            "update",
            f"{status.update} of {status.updates}"
            + (f", epoch {status.epoch:.4f}" if status.epoch is not None else ""),
        ),
        ("loss", _shown(status.loss, ".4f")),
        ("learning rate", _shown(status.learning_rate, ".4g")),
        ("rate", f"{status.seconds_per_update:.2f} s per update" if status.seconds_per_update else "-"),
        ("time left", duration(status.seconds_left) if status.seconds_left is not None else "-"),
        ("last complete checkpoint", status.checkpoint or "none yet"),
    ]
    rows += [("incomplete", f"{name}: {reason}") for name, reason in status.incomplete.items()]
    if status.holder:
        rows.append(("lease", _SINCE.sub(_as_date, status.holder)))
    if status.sealed_as:
        rows.append(("packed as", status.sealed_as))
    rows += [("lineage" if index == 0 else "", line) for index, line in enumerate(status.segments)]
    for name, value in rows:
        table.add_row(name, Text(printable(value), overflow="fold"))
    return Group(title, table)


def duration(seconds: float) -> str:
    """Return `seconds` as a person would say it: '45 s', '12 min 5 s', '3 h 20 min'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _as_date(match: re.Match[str]) -> str:
    try:
        when = datetime.datetime.fromtimestamp(int(match[1]), datetime.UTC)
    except (OverflowError, OSError, ValueError):
        return match[0]
    return f"since {when:%Y-%m-%d %H:%M:%S} UTC"


def _word(status: Status) -> str:
    if status.sealed_as:
        return "packed; it lives elsewhere now"
    if status.phase == Phase.RUNNING.value:
        return "running"
    return status.verdict or "prepared"


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _number(value: object) -> float | None:
    if isinstance(value, str):
        try:
            return float.fromhex(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, (int, float)) else None


def _events(path: Path) -> list[dict[str, Any]]:
    """The last events of the log; a line that is not whole JSON is skipped: it is being written, or was cut off."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and (event.get("event") != "update" or type(event.get("update")) is int):
            events.append(event)
    return events
