"""The command line of images: `ferry image ...`.

Promises: as `runner.cli`, which holds the other commands.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from runner import image as images
from runner import image_smoke as smoking
from runner import image_verify as verifying
from runner import screen
from runner.cli_verify import JsonOption, emit
from runner.errors import Fault, Refusal, refuse_if
from runner.image_inputs import read_inputs
from runner.image_lock import read_lock
from runner.image_spec import image_names

PROJECT = Path(__file__).resolve().parent.parent
ProjectOption = Annotated[Path, typer.Option("--project", help="Ferry's own folder: images/ and lockfiles/")]

image_app = typer.Typer(no_args_is_help=True, help="Pinned images: the environment of a run.")


@image_app.command("build")
def image_build_command(
    name: str,
    pin_it: Annotated[
        bool, typer.Option("--pin", help="write its digests to images/pins.yaml: it is the pinned one then")
    ] = False,
    venv: Annotated[
        Path | None,
        typer.Option("--venv", help="make the same environment in this folder instead, for the venv engine"),
    ] = None,
    as_json: JsonOption = False,
    project: ProjectOption = PROJECT,
) -> None:
    """Build the image images/NAME.yaml, or see that it is there already."""
    if venv is not None:
        if pin_it:
            raise typer.BadParameter("--pin is of images: what holds for a venv is its lock")
        made = images.build_venv(name, project, venv.absolute(), on_line=on_line)
        emit(as_json, dataclasses.asdict(made), f"VENV {made.name} in {venv} lock={made.lock}")
        return
    pin = images.build(name, project, on_line=on_line)
    if pin_it:
        images.set_pin(pin, project)
    known, pinned_by = images.known_pin(name, project)
    if known != pin:
        on_line(
            f"{pinned_by} names another build, {known.digest}; `ferry image build {name} --pin` names this one"
        )
    emit(
        as_json,
        dataclasses.asdict(pin),
        f"IMAGE {pin.name} digest={pin.digest} config={pin.config} lock={pin.lock}",
    )


def on_line(line: str) -> None:
    """Show a line of progress."""
    screen.err.print(line, markup=False, style="dim")


@image_app.command("lint")
def image_lint_command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="[default: all of images/]")
    ] = None,
    as_json: JsonOption = False,
    project: ProjectOption = PROJECT,
) -> None:
    """Refuse every line of an image's locks that is not one pinned, hashed package for its platform; fetches nothing."""
    found: dict[str, int] = {}
    faults: list[Fault] = []
    for name in names or image_names(project):
        try:
            found[name] = len(read_lock(read_inputs(name, project).spec, project))
        except Refusal as refusal:
            faults += refusal.faults
    refuse_if(faults)
    text = "\n".join(f"LINT PASS {name}: {count} packages" for name, count in found.items())
    emit(as_json, {"packages": found}, text)


@image_app.command("verify")
def image_verify_command(
    name: str,
    venv: Annotated[
        Path | None, typer.Option("--venv", help="look at the environment in this folder, of the venv engine")
    ] = None,
    as_json: JsonOption = False,
    project: ProjectOption = PROJECT,
) -> None:
    """See that an environment is the pinned one, byte for byte: its lock, its packages' own records, every file."""
    done = (
        verifying.verify_venv(name, project, venv.absolute())
        if venv
        else verifying.verify_image(name, project)
    )
    report = done.report
    for note in report.notes:
        on_line(note)
    value = {
        "image": dataclasses.asdict(done.pin),
        "pinned_by": done.pinned_by,
        "packages": report.packages,
        "files": report.files,
        "byte_code": report.byte_code,
        "library_files": report.library_files,
        "notes": report.notes,
    }
    text = f"{report.packages} packages, {report.files} files, {report.byte_code} of them byte code"
    emit(as_json, value, f"VERIFY PASS {done.pin.name} digest={done.pin.digest} by {done.pinned_by}: {text}")


@image_app.command("smoke")
def image_smoke_command(
    name: str,
    work: Annotated[
        Path | None,
        typer.Option("--work", help="where its runs live; made anew [default: .ferry/smoke/NAME]"),
    ] = None,
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="train on GPUs of this server, one a rank, and compile a kernel there"),
    ] = False,
    as_json: JsonOption = False,
    project: ProjectOption = PROJECT,
) -> None:
    """See that an image does what it is for: imports, ops without a compiler, and a moved 4-rank run that is EXACT."""
    done = smoking.smoke(name, project, work or project / ".ferry" / "smoke" / name, on_line, gpu=gpu)
    value = {
        "image": dataclasses.asdict(done.pin),
        "found": dict(done.found),
        "verdict": done.comparison.verdict,
    }
    emit(as_json, value, f"SMOKE PASS {done.pin.name} digest={done.pin.digest}: {done.comparison.verdict}")
