"""Starting a prepared run, following it to its end, and asking it to stop.

Promises: everything is checked again before a container exists (bytes by their stamps, assets by hash, image by
digest); the verdict comes from engine, outcome and census together; a container is removed only after its state was
recorded in the lineage.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from runner import verify
from runner.engine import Engine, Phase, State
from runner.errors import ExitCode, Fault, Refusal, Verdict
from runner.facts import host_facts
from runner.image import ReadyImage
from runner.plan import LaunchPlan, plan_launch
from runner.prepare import make_caches, write_control
from runner.rebase import RebasedInputs, known_files, rebase
from runner.record import write_file
from runner.run import RunFolder, settle
from runner.sums import LIST_NAME

_POLL_S = 0.2
_LEASE_LINGERS_S = 10.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a segment ended; `exit_code` is what the command ends with."""

    verdict: Verdict
    exit_code: ExitCode
    update: int


@dataclasses.dataclass(frozen=True)
class StopProgress:
    """Where a stop is: waiting for the checkpoint, or done."""

    update: int
    waited_s: float


def replan(folder: RunFolder, image: ReadyImage) -> LaunchPlan:
    """Check the prepared run in `folder` again and return its plan; nothing is written.

    Raises `Refusal` if it is sealed, if a byte of the bundle changed since it was prepared, or an asset did.
    """
    folder.refuse_if_sealed()
    _, plan = _checked(folder, image)
    return plan


def _checked(folder: RunFolder, image: ReadyImage) -> tuple[RebasedInputs, LaunchPlan]:
    facts = host_facts(folder.server())
    prepared = folder.prepared()
    opened = verify.open_bundle(folder.bundle_path())
    if opened.root != prepared["bundle"]["root"]:
        fix = "fetch the bundle again; another bundle is prepared into a run folder of its own"
        where, expected = str(opened.path / LIST_NAME), str(prepared["bundle"]["root"])
        raise Refusal(Fault("bundle was exchanged", where, f"root {expected}", f"root {opened.root}", fix))
    outside = None if verify.SPEC_NAME in opened.digests else folder.spec_file.read_bytes()
    bundle = verify.verify(opened, use_memory=True, spec_bytes=outside)
    server = folder.server()
    inputs = rebase(
        bundle,
        server,
        mode=prepared["mode"],
        output=None if server.engine == "docker" else str(folder.output),
        known=known_files(prepared["rebased"]),
    )
    return inputs, plan_launch(inputs, image, folder.path, facts)


def start(folder: RunFolder, image: ReadyImage, engine: Engine) -> LaunchPlan:
    """Check the run again, refresh what both doors read, and start its container. Raises `Refusal` as `replan` does."""
    folder.refuse_if_sealed()
    inputs, plan = _checked(folder, image)
    holder = folder.lease_holder()
    if holder is not None:
        fix = "follow it with `ferry status`, or end it with `ferry stop`"
        raise Refusal(
            Fault("lease is held", str(folder.lease), "a run that nobody trains", holder, fix),
            exit_code=ExitCode.LEASE_HELD,
        )
    with folder.starting():
        settle(folder, engine.inspect(plan.name), int(time.time()))
        engine.prepare(plan)
        write_control(inputs, plan, folder)
        make_caches(plan)
        engine.start(plan)
    return plan


def follow(folder: RunFolder, name: str, engine: Engine, on_line: Callable[[str], None]) -> Ended:
    """Follow the container `name` to its end, close its segment, and remove it.

    Raises `Refusal` if the start program refused: nothing was trained then.
    """
    engine.follow(name, on_line)
    return close(folder, name, engine)


def close(folder: RunFolder, name: str, engine: Engine) -> Ended:
    """Close the segment of the container `name`, which has ended, and remove it; return how it ended.

    Whoever comes second (`ferry stop` beside `ferry resume`) finds the segment closed, and returns the same verdict.
    """
    records = folder.segment_records()
    state = close_if_open(folder, engine, name)
    link = next((link for link in folder.links() if records and link.segment == records[-1].segment), None)
    refused = state.exit_code in (int(ExitCode.REFUSED), int(ExitCode.LEASE_HELD))
    if link is None or refused:
        engine.remove(name)
        raise _not_started(name, state)
    engine.remove(name)
    verdict = Verdict(link.verdict)
    return Ended(verdict, verdict.exit_code, link.last_update)


def close_if_open(folder: RunFolder, engine: Engine, name: str) -> State:
    """Close what is open and return the container's last state.

    The lease may outlive the container's first process by a moment; the state is asked for after that, since another
    segment may have run in between.
    """
    deadline = time.monotonic() + _LEASE_LINGERS_S
    while folder.lease_holder() is not None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    state = engine.inspect(name)
    settle(folder, state, int(time.time()))
    return state


def _not_started(name: str, state: State) -> Refusal:
    known = {int(ExitCode.REFUSED): ExitCode.REFUSED, int(ExitCode.LEASE_HELD): ExitCode.LEASE_HELD}
    fault = Fault(
        "the start program refused",
        name,
        "an identity line, then torchrun",
        f"exit code {state.exit_code}; its reasons stand in the lines above",
        "mend what it names, then resume again",
    )
    return Refusal(fault, exit_code=known.get(state.exit_code or -1, ExitCode.FAILED))


def refuse_unless_running(folder: RunFolder, state: State) -> None:
    """Raise `Refusal` if the run's container does not run: a request would be forgotten at its next start."""
    if state.phase is Phase.RUNNING:
        return
    links = folder.links()
    where = f"; its last segment {links[-1].verdict} at update {links[-1].last_update}" if links else ""
    fix = "nothing has to be stopped; `ferry resume` goes on, `ferry pack` makes a bundle of it"
    raise Refusal(
        Fault("the run does not run", str(folder.path), "a running one", f"{state.phase.value}{where}", fix)
    )


def refuse_links(root: Path, path: Path) -> None:
    """Raise `Refusal` if a folder between `root` and `path` is a link: the container may write there, we must not follow."""
    for parent in path.parents:
        if parent == root:
            return
        if parent.is_symlink():
            fix = "remove the link: nothing is written outside of the run folder"
            raise Refusal(Fault("unsafe", str(parent), "a folder", f"a link to {parent.readlink()}", fix))


def request_stop(folder: RunFolder, at_update: int | None = None) -> Path:
    """Ask the running segment to save a complete checkpoint and end: at its next update, or not before `at_update`."""
    request = folder.output / folder.spec().outputs.request
    refuse_links(folder.output, request)
    records = folder.segment_records()
    segment = records[-1].segment if records else folder.spec().name
    lines = [segment] + ([f"at_update: {at_update}"] if at_update is not None else [])
    write_file(request, ("\n".join(lines) + "\n").encode())
    return request


def stop(
    folder: RunFolder,
    name: str,
    engine: Engine,
    *,
    grace_s: float,
    on_progress: Callable[[StopProgress], None],
) -> State:
    """Ask, wait, force: request file, then SIGTERM after `grace_s`, then SIGKILL after as long again.

    Returns the state the container ended in. A run that does not run is a `Refusal`.
    """
    refuse_unless_running(folder, engine.inspect(name))
    request_stop(folder)
    began = time.monotonic()
    for signal in (None, "SIGTERM", "SIGKILL"):
        if signal is not None:
            engine.signal(name, signal)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline:
            state = engine.inspect(name)
            if state.phase is not Phase.RUNNING:
                return state
            on_progress(StopProgress(folder.last_update(), time.monotonic() - began))
            time.sleep(_POLL_S)
    return engine.inspect(name)
