"""The command line: `ferry`. Parses words, calls one function of a lower layer, shows what came of it.

Promises: everything that acts has `--dry-run` and `--json`; a refusal shows all of its faults and ends with its exit
code; bad input never gives a traceback.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from runner import demo as demonstration
from runner import pack as packing
from runner import resume as resuming
from runner import screen
from runner.cli_doctor import doctor_command
from runner.cli_image import PROJECT, ProjectOption, image_app
from runner.cli_lock import register as register_locks
from runner.cli_ship import register as register_shipping
from runner.cli_verify import (
    BundleArgument,
    DryRunOption,
    JsonOption,
    SpecOption,
    emit,
    sign_command,
    verify_command,
)
from runner.compare import compare as compare_runs
from runner.describe import describe
from runner.engine import Phase, State
from runner.engines import engine_for, ready_image
from runner.errors import ExitCode, Fault, Refusal, Verdict
from runner.plan import LaunchPlan, container_name
from runner.ready import Wish, make_ready, mode_of
from runner.run import RunFolder
from runner.schemas import write_schemas
from runner.status import read_status
from runner.status import render as render_status
from runner.verify import open_bundle

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Moves a training run between GPU servers, mid-epoch, so that the moved run is the run that never moved.",
)
register_locks(image_app)
register_shipping(image_app)
app.add_typer(image_app, name="image")

_SHOWN_DIFFERENCES = 10
RunArgument = Annotated[Path, typer.Argument(help="the run folder", metavar="RUN")]
ServerOption = Annotated[Path, typer.Option("--server", help="this server's profile, server.yaml")]
ModeOption = Annotated[
    str,
    typer.Option(
        "--mode", help="mount (copies nothing), hardlink, reflink or copy: how the checkpoint comes to RUN"
    ),
]
CheckImagesOption = Annotated[
    bool, typer.Option("--check-images", help="see that every file that the manifest names is on this server")
]


def main() -> NoReturn:
    """Run the command line; the one place that turns an error into text and an exit code."""
    try:
        app(prog_name="ferry")
    except Refusal as refusal:
        _refused(refusal)
    except OSError as error:
        fix = "mend what the system names, then run the command again"
        where = str(error.filename or "the system")
        fault = Fault("the system refuses", where, "to succeed", str(error), fix)
        _refused(Refusal(fault, exit_code=ExitCode.FAILED))
    except KeyboardInterrupt:
        screen.err.print("interrupted")
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 - the last resort: a defect of ours is said, not thrown at people
        trace = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(trace.filename).name}:{trace.lineno} in {trace.name}"
        fix = "this is a defect of Ferry, or a damaged file that it did not expect: report it with this line"
        _refused(
            Refusal(
                Fault("unexpected", where, "no such case", f"{type(error).__name__}: {error}", fix),
                exit_code=ExitCode.FAILED,
            )
        )
    sys.exit(ExitCode.OK)


def _refused(refusal: Refusal) -> NoReturn:
    """Show `refusal`, as JSON if that was asked for, and end with its exit code."""
    if "--json" in sys.argv:
        faults = [dataclasses.asdict(fault) for fault in refusal.faults]
        print(json.dumps({"refused": faults, "exit_code": int(refusal.exit_code)}, indent=2))
    else:
        screen.show_refusal(refusal)
    sys.exit(refusal.exit_code)


app.command("verify")(verify_command)
app.command("sign")(sign_command)
app.command("doctor")(doctor_command)


@app.command("describe")
def describe_command(bundle: BundleArgument, name: Annotated[str, typer.Option("--name")] = "run") -> None:
    """Draft a run spec for a bundle that has none, from what lies in it, on standard output."""
    sys.stdout.write(describe(open_bundle(bundle.absolute()), name).text.decode())


@app.command("prepare")
def prepare_command(
    bundle: BundleArgument,
    server: ServerOption,
    run: Annotated[Path, typer.Option("--run", help="where the run folder shall appear")],
    mode: ModeOption = "mount",
    check_images: CheckImagesOption = False,
    spec: SpecOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    project: ProjectOption = PROJECT,
) -> None:
    """Verify a bundle, put this server's data in its place, and make a run folder that can start."""
    _prepare(bundle, server, run, Wish(mode_of(mode), check_images, dry_run, project, spec), as_json)


@app.command("resume")
def resume_command(
    run: RunArgument,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="prepare this bundle first, if RUN does not exist")
    ] = None,
    server: Annotated[
        Path | None, typer.Option("--server", help="with --bundle: this server's profile")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="start the run and return")] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    project: ProjectOption = PROJECT,
) -> None:
    """Start a prepared run, or continue it from its newest complete checkpoint, and follow it to its end."""
    folder = RunFolder(run)
    if bundle is not None and not folder.path.exists():
        if server is None:
            fix = "add --server SERVER.yaml"
            raise Refusal(
                Fault("no server profile", "--server", "a profile, since --bundle is given", "nothing", fix)
            )
        _prepare(bundle, server, run, Wish("mount", False, dry_run, project), as_json)
        if dry_run:
            return
    elif bundle is not None and bundle.resolve() != folder.bundle_path().resolve():
        fix = "leave out --bundle to resume what lies there, or name another run folder"
        found = f"one prepared from {folder.bundle_path()}"
        raise Refusal(Fault("run folder exists", str(folder.path), f"one prepared from {bundle}", found, fix))
    folder.refuse_if_sealed()
    image = ready_image(folder.server(), folder.spec().image, project)
    engine = engine_for(folder)
    if dry_run:
        _show_plan(resuming.replan(folder, image), as_json)
        return
    if folder.server().engine == "venv":
        screen.err.print(
            "[bold yellow]engine venv: no isolation[/] (network, file system and memory are this host's)"
        )
    plan = resuming.start(folder, image, engine)
    if detach:
        emit(as_json, {"container": plan.name}, f"STARTED {plan.name}")
        return
    with screen.updates_progress(folder, plan.launch.run) as show:
        try:
            ended = resuming.follow(folder, plan.name, engine, show)
        except KeyboardInterrupt:
            show(
                "asked to stop at the next update; the checkpoint is being saved (once more: leave it to itself)"
            )
            resuming.request_stop(folder)
            ended = resuming.follow(folder, plan.name, engine, lambda _: None)
    value = {"verdict": ended.verdict.value, "update": ended.update, "exit_code": int(ended.exit_code)}
    emit(as_json, value, f"{ended.verdict.value.upper()} at update {ended.update} of {plan.launch.updates}")
    raise typer.Exit(ended.exit_code)


@app.command("stop")
def stop_command(
    run: RunArgument,
    at_update: Annotated[
        int | None,
        typer.Option("--at-update", min=1, help="ask only: not before this update; returns at once"),
    ] = None,
    grace_s: Annotated[
        float | None, typer.Option("--grace", help="seconds to wait before each harder step")
    ] = None,
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Ask a run to save a complete checkpoint and end; wait for it; force it only after the grace."""
    folder = RunFolder(run)
    engine = engine_for(folder)
    name = container_name(folder.spec().name, folder.path)
    request = folder.output / folder.spec().outputs.request
    if dry_run:
        emit(
            as_json,
            {"request": str(request)},
            f"would write {request} and wait; the run is {engine.inspect(name).phase.value}",
        )
        return
    if at_update is not None:
        resuming.refuse_unless_running(folder, engine.inspect(name))
        resuming.request_stop(folder, at_update)
        emit(as_json, {"request": str(request)}, f"REQUESTED a stop at update {at_update}")
        return
    grace = grace_s if grace_s is not None else float(folder.server().stop_grace_s)
    with screen.err.status("waiting for the checkpoint") as waiting:
        resuming.stop(
            folder,
            name,
            engine,
            grace_s=grace,
            on_progress=lambda at: waiting.update(
                f"waiting for the checkpoint: update {at.update}, {at.waited_s:.0f} s"
            ),
        )
    ended = resuming.close(folder, name, engine)
    newest, _ = folder.checkpoints()
    value = {"verdict": ended.verdict.value, "checkpoint": newest.name if newest else None}
    emit(
        as_json,
        value,
        f"{ended.verdict.value.upper()}; resume continues from {newest.name if newest else 'nothing'}",
    )
    if ended.verdict not in (Verdict.STOPPED, Verdict.FINISHED):
        raise typer.Exit(ended.exit_code)


@app.command("status")
def status_command(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show where a run is."""
    folder = RunFolder(run)
    status = read_status(folder, _settled_state(folder))
    if as_json:
        emit(as_json, dataclasses.asdict(status), "")
    else:
        screen.out.print(render_status(status))


@app.command("pack")
def pack_command(
    run: RunArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="where the bundle shall appear")],
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a bundle of a stopped run, verify it, and seal the run folder so that it cannot train twice.

    RUN may also be a draft: a folder with a complete run.yaml and all that it names.
    """
    folder = RunFolder(run)
    if not folder.prepared_file.exists() and folder.spec_file.exists():
        if dry_run:
            names = sorted(str(path.relative_to(run)) for path in run.rglob("*") if not path.is_dir())
            emit(as_json, {"files": names}, "\n".join(names))
            return
        packed = packing.pack_draft(folder.path, output)
    else:
        _settled_state(folder)
        with folder.hold_lease("ferry pack"):
            contents = packing.gather(folder)
        for line in contents.left_out:
            screen.err.print(f"left out, not complete: {line}", markup=False, style="yellow")
        if dry_run:
            names = sorted(contents.files.keys() | contents.made.keys())
            emit(
                as_json,
                {"files": names, "update": contents.update},
                "\n".join([*names, f"at update {contents.update}"]),
            )
            return
        with screen.bytes_progress("packing", contents.size_bytes) as advance:
            packed = packing.pack(folder, output, advance)
    value = {"bundle": str(packed.path), "root": packed.root, "update": packed.update}
    emit(as_json, value, f"PACKED {packed.path} at update {packed.update}, root {packed.root}")


@app.command("compare")
def compare_command(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B")],
    as_json: JsonOption = False,
) -> None:
    """Compare two runs bit for bit; exit 0 only if they are equal."""
    comparison = compare_runs(RunFolder(run_a), RunFolder(run_b))
    if as_json:
        emit(as_json, dataclasses.asdict(comparison) | {"equal": comparison.equal}, "")
    else:
        for difference in comparison.differences[:_SHOWN_DIFFERENCES]:
            screen.out.print(difference, markup=False)
        if (more := len(comparison.differences) - _SHOWN_DIFFERENCES) > 0:
            screen.out.print(f"and {more} more: --json has all")
        screen.out.print(comparison.verdict)
    raise typer.Exit(ExitCode.OK if comparison.equal else ExitCode.DIFFERENT)


@app.command("demo")
def demo_command(
    work: Annotated[Path, typer.Option("--work", help="where the demo lives; made anew each time")] = PROJECT
    / ".ferry"
    / "demo",
    project: ProjectOption = PROJECT,
) -> None:
    """Move a small real run between two servers, and compare it with one that never moved."""
    comparison = demonstration.run(work, project)
    raise typer.Exit(ExitCode.OK if comparison.equal else ExitCode.DIFFERENT)


@app.command("schema", hidden=True)
def schema_command(folder: Path) -> None:
    """Write the JSON schemas of the documents into FOLDER, for editors."""
    for path in write_schemas(folder):
        screen.out.print(str(path), markup=False)


def _prepare(bundle: Path, server: Path, run: Path, wish: Wish, as_json: bool) -> None:
    inputs, plan = make_ready(bundle, server, run, wish)
    if wish.dry_run:
        _show_plan(plan, as_json)
        return
    path = RunFolder(run).path
    value = {"run": str(path), "bundle": inputs.bundle.root, "update": inputs.bundle.spec.from_update}
    emit(as_json, value, f"PREPARE_OK {path}")
    if not as_json:
        screen.err.print(
            f"next: ferry resume {shlex.quote(str(path))}", markup=False, style="dim", soft_wrap=True
        )


def _show_plan(plan: LaunchPlan, as_json: bool) -> None:
    if as_json:
        value = dataclasses.asdict(plan) | {"docker_run": screen.docker_words(plan) if plan.mounts else []}
        print(json.dumps(value, indent=2, sort_keys=True, default=str))
        return
    screen.out.print(screen.plan_table(plan))
    if plan.mounts:
        screen.out.print("\nthe same by hand:\n" + screen.docker_command(plan), markup=False)


def _settled_state(folder: RunFolder) -> State:
    """The container's state; a segment that ended without a `ferry` beside it (compose) is closed on the way."""
    engine = engine_for(folder)
    name = container_name(folder.spec().name, folder.path)
    state = engine.inspect(name)
    if state.phase is not Phase.RUNNING:
        resuming.close_if_open(folder, engine, name)
    return state
