"""What people see while Ferry works: progress with bytes, rate and time left; faults; plans as tables.

Promises: results go to standard output, everything else to standard error; nothing moves on a screen that is not a
terminal.
"""

from __future__ import annotations

import contextlib
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from runner.compare import Comparison
from runner.compose import LOG_DRIVER, LOG_OPTIONS, RUNTIME_CAPABILITIES, RUNTIME_DRIVER, tmpfs
from runner.errors import Refusal, printable
from runner.plan import LaunchPlan
from runner.run import RunFolder
from runner.status import latest

_POLL_S = 0.5

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def bytes_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress over `total` bytes; yields what to call with every count of bytes done (from any thread)."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda count: progress.advance(task, count)


@contextlib.contextmanager
def layers_progress(label: str) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Show progress over the bytes of an image's layers; yields what to call with every event of an engine's answer."""
    done: dict[str, int] = {}
    totals: dict[str, int] = {}
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(label, total=None)

        def show(event: Mapping[str, Any]) -> None:
            detail = event.get("progressDetail") or {}
            current, total = detail.get("current"), detail.get("total")
            # What is unpacked afterwards is counted from nothing again.
            if event.get("status") not in ("Pushing", "Downloading") or not isinstance(current, int):
                return
            layer = str(event.get("id"))
            done[layer] = current
            totals[layer] = total if isinstance(total, int) else current
            progress.update(task, completed=sum(done.values()), total=sum(totals.values()))

        yield show


@contextlib.contextmanager
def rows_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress over `total` rows; yields what to call with every count of rows done."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda count: progress.advance(task, count)


@contextlib.contextmanager
def updates_progress(folder: RunFolder, label: str) -> Iterator[Callable[[str], None]]:
    """Show a bar over the updates of the run in `folder`; yields what to call with lines to show above it."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("updates {task.fields[loss]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    ended = threading.Event()
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(label, total=folder.spec().updates, loss="")

        def poll() -> None:
            while not ended.wait(_POLL_S):
                update, loss = latest(folder)
                progress.update(task, completed=update, loss="" if loss is None else f"loss {loss:.4f}")

        watcher = threading.Thread(target=poll, daemon=True)
        watcher.start()
        try:
            yield lambda line: progress.console.print(printable(line), markup=False)
        finally:
            ended.set()
            watcher.join()


def show_refusal(refusal: Refusal) -> None:
    """Print every fault of `refusal`."""
    count = len(refusal.faults)
    err.print(f"[bold red]refused[/] ({count} fault{'s' if count > 1 else ''})", markup=True)
    err.print(printable(str(refusal)), markup=False)


def plan_table(plan: LaunchPlan) -> Table:
    """Return `plan` as a table for people."""
    table = Table(title=f"launch plan of {plan.name}", show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")

    def row(name: str, value: str) -> None:
        # As text: a path may look like markup.
        table.add_row(name, Text(printable(value)))

    row("image", f"{plan.launch.image} (lock {plan.launch.lock})")
    row("code", f"tree {plan.launch.code_tree}")
    row("checkpoint", f"{plan.launch.checkpoint} ({plan.launch.inventory})")
    row("ranks", str(plan.launch.world))
    row("torchrun", shlex.join([*plan.launch.torchrun, *plan.launch.args]))
    row("on resume", shlex.join(plan.launch.resume_args))
    for mount in plan.mounts:
        row("mount, read-only" if mount.read_only else "mount, writable", f"{mount.source} -> {mount.target}")
    for link, target in plan.links.items():
        row("link", f"{link} -> {target}")
    for name, value in sorted(plan.environment.items()):
        row("environment", f"{name}={value}")
    row("user", plan.user)
    row("GPUs", _gpus(plan))
    row("memory, shm, /tmp", ", ".join(_size(n) for n in (plan.memory_bytes, plan.shm_bytes, plan.tmp_bytes)))
    row("limits", ", ".join(f"{name} {_limit(name, value)}" for name, value in sorted(plan.limits.items())))
    row("kept caches", str(plan.caches))
    if plan.launch.engine == "docker":
        row("authority", "no network, read-only root, no capabilities, no new privileges, init as process 1")
    row("stop grace", f"{plan.stop_grace_s} s")
    return table


def docker_command(plan: LaunchPlan) -> str:
    """Return the `docker run` command that is equivalent to `plan`, for a shell."""
    return shlex.join(docker_words(plan))


def docker_words(plan: LaunchPlan) -> list[str]:
    """Return the words of the `docker run` command that is equivalent to `plan`."""
    words = [
        "docker",
        "run",
        "--detach",
        "--name",
        plan.name,
        "--user",
        plan.user,
        "--network",
        "none",
        "--read-only",
    ]
    words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges:true", "--init", "--restart", "no"]
    words += ["--pull", "never", "--tmpfs", tmpfs(plan), "--shm-size", str(plan.shm_bytes)]
    words += ["--log-driver", LOG_DRIVER]
    for name, value in sorted(LOG_OPTIONS.items()):
        words += ["--log-opt", f"{name}={value}"]
    words += ["--memory", str(plan.memory_bytes), "--memory-swap", str(plan.memory_bytes)]
    words += ["--stop-signal", "SIGTERM", "--stop-timeout", str(plan.stop_grace_s)]
    for name, limit in sorted(plan.limits.items()):
        words += ["--ulimit", f"{name}={limit}:{limit}"]
    if plan.gpus is not None:
        for device in plan.gpus.devices:
            words += ["--device", device]
        if plan.gpus.by == "runtime":
            capabilities = f"capabilities={','.join(RUNTIME_CAPABILITIES)}"
            fields = (f"device={','.join(plan.gpus.ids)}", capabilities)
            words += ["--gpus", f"driver={RUNTIME_DRIVER},{','.join(map(_quoted, fields))}"]
    for mount in plan.mounts:
        read_only = ",readonly" if mount.read_only else ""
        source, target = _quoted(f"source={mount.source}"), _quoted(f"target={mount.target}")
        words += ["--mount", f"type=bind,{source},{target}{read_only}"]
    for name, value in sorted(plan.environment.items()):
        words += ["--env", f"{name}={value}"]
    for name, value in sorted(plan.labels.items()):
        words += ["--label", f"{name}={value}"]
    return [*words, plan.image.reference, *plan.command]


def comparison_table(comparison: Comparison, names: tuple[str, str]) -> Table:
    """Return the updates of `comparison` as a table, the runs called `names`."""
    table = Table(title="the same run?")
    for column in ("update", f"{names[0]} loss", f"{names[1]} loss"):
        table.add_column(column, justify="right")
    table.add_column("equal?")
    for row in comparison.rows:
        mark = "[green]equal[/]" if row.equal else "[bold red]DIFFERENT[/]"
        table.add_row(str(row.update), f"{row.loss_a:.6f}", f"{row.loss_b:.6f}", mark)
    return table


def _quoted(field: str) -> str:
    """Return a field of the comma-separated values that docker's options are."""
    return '"' + field.replace('"', '""') + '"'


def _gpus(plan: LaunchPlan) -> str:
    if plan.gpus is None:
        return "none"
    how = "CDI" if plan.gpus.by == "cdi" else "the NVIDIA runtime"
    return (
        f"{', '.join(plan.gpus.ids)} by {how if plan.launch.engine == 'docker' else 'CUDA_VISIBLE_DEVICES'}"
    )


def _limit(name: str, value: int) -> str:
    if value < 0:
        return "unlimited"
    return str(value) if name == "nofile" else f"{value / (1 << 20):g} MiB"


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
