"""From a bundle and a server profile to a run folder that can start, with what people see on the way.

Promises: nothing is written before everything was checked; all that is wrong is said; what was asked to be only shown
is only shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, cast, get_args

from runner import assets, prepare, screen, verify
from runner.documents import load
from runner.engines import ready_image
from runner.errors import ExitCode, Fault, Refusal, printable, refuse_if
from runner.facts import host_facts
from runner.plan import HostFacts, LaunchPlan, plan_launch
from runner.preflight import refuse_if_impossible, run_preflight
from runner.rebase import Mode, RebasedInputs, rebase
from runner.run import RunFolder
from runner.server import ServerProfile

_VERIFYING = "the next `ferry verify` goes on from here"
_COPYING = "nothing was prepared; the same `ferry prepare --mode copy` goes on from here"


@dataclasses.dataclass(frozen=True)
class Wish:
    """How a run shall be prepared; `project` is Ferry's own folder, `spec` a run spec from outside."""

    mode: Mode
    check_images: bool
    dry_run: bool
    project: Path
    spec: Path | None = None


def mode_of(word: str) -> Mode:
    """Return the mode of preparing that is called `word`. Raises `Refusal` if there is none."""
    if word not in get_args(Mode):
        fix = "mount copies nothing and is the default"
        fault = Fault("unknown mode", "--mode", ", ".join(get_args(Mode)), word, fix)
        raise Refusal(fault, exit_code=ExitCode.USAGE)
    return cast("Mode", word)


def verified(
    bundle: Path,
    *,
    use_memory: bool,
    spec: Path | None = None,
    paranoid: bool = False,
    root: str | None = None,
    on_opened: Callable[[verify.Bundle], None] = lambda _: None,
) -> verify.VerifiedBundle:
    """Verify the bundle at `bundle`, described by `spec` if it has no run spec inside, with progress; show its notes.

    `on_opened` may refuse it before a byte is read. Raises `Refusal` as `verify.open_bundle` and `verify.verify` do.
    Ctrl-C and SIGTERM leave what was read remembered, so that the next verification goes on from there.
    """
    opened = verify.open_bundle(bundle.absolute(), root=root)
    on_opened(opened)
    with screen.bytes_progress("verifying", opened.size_bytes) as advance, _interruptible(_VERIFYING):
        given = None if spec is None else spec.read_bytes()
        found = verify.verify(
            opened, use_memory=use_memory, paranoid=paranoid, on_bytes=advance, spec_bytes=given
        )
    for note in found.notes:
        screen.err.print(f"note: {note}", markup=False, style="yellow")
    return found


@contextlib.contextmanager
def _interruptible(word: str) -> Iterator[None]:
    """SIGTERM is Ctrl-C in here; either ends the program with `word`, and the shell's exit code for it."""
    ended_by = [signal.SIGINT]

    def interrupt(number: int, _: object) -> NoReturn:
        ended_by[0] = signal.Signals(number)
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, interrupt) if main else None
    try:
        yield
    except KeyboardInterrupt:
        screen.err.print(f"interrupted: {word}")
        raise SystemExit(128 + ended_by[0]) from None
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def make_ready(bundle: Path, server: Path, run: Path, wish: Wish) -> tuple[RebasedInputs, LaunchPlan]:
    """Prepare `bundle` on the server of the profile `server` into the run folder `run`, unless it is a dry run.

    Raises `Refusal` with every reason, and then leaves nothing behind.
    """
    folder = RunFolder(run)
    prepare.refuse_if_taken(folder)
    profile = load(ServerProfile, server)
    facts = host_facts(profile)
    inputs = _rebased(bundle, profile, folder, wish)
    refuse_if_impossible(inputs)
    _refuse_if_too_small(inputs, facts)
    image = ready_image(profile, inputs.bundle.spec.image, wish.project)
    plan = plan_launch(inputs, image, folder.path, facts)
    for warning in inputs.warnings:
        screen.err.print(f"warning: {printable(str(warning))}", markup=False, style="yellow")
    if wish.dry_run:
        return inputs, plan

    def check(aside: RunFolder) -> None:
        output = run_preflight(inputs, image, aside, facts)
        if output:
            screen.err.print(printable(output.rstrip("\n")), markup=False, style="dim")
        screen.err.print("PREFLIGHT: PASS")

    word = _COPYING if inputs.mode == "copy" else "nothing was prepared"
    with screen.bytes_progress(inputs.mode, prepare.laid_bytes(inputs)) as advance, _interruptible(word):
        prepare.prepare(inputs, plan, folder, server.read_bytes(), advance, check)
    return inputs, plan


def _rebased(bundle: Path, profile: ServerProfile, folder: RunFolder, wish: Wish) -> RebasedInputs:
    found = verified(bundle, use_memory=True, spec=wish.spec)
    spec = found.spec
    hosts = {name: Path(path) for name, path in profile.assets.items() if name in spec.assets}
    total = sum(assets.size_of(spec.assets[name], path) for name, path in hosts.items())
    total += found.path.joinpath(spec.data.manifest).stat().st_size if spec.columns else 0
    output = None if profile.engine == "docker" else str(folder.output)
    with screen.bytes_progress("assets", total) as advance:
        drafts = None if wish.dry_run else next(p for p in folder.path.parents if p.exists())
        inputs = rebase(found, profile, advance, mode=wish.mode, output=output, drafts=drafts)
    if wish.check_images:
        manifest = found.path / spec.data.manifest
        with screen.rows_progress("images", spec.data.rows) as advance:
            refuse_if(assets.images_faults(manifest, spec, hosts[spec.data.root], advance))
    return inputs


def _refuse_if_too_small(inputs: RebasedInputs, facts: HostFacts) -> None:
    needs = inputs.bundle.spec.needs
    found = facts.memory_bytes >> 30
    if needs is not None and found < needs.host_memory_gib:
        fix = "prepare on a host with more memory: resuming needs more than training does"
        where = f"server {inputs.server.name}: memory"
        raise Refusal(Fault("host too small", where, f"{needs.host_memory_gib} GiB", f"{found} GiB", fix))
