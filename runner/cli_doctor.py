"""The command line of the host's checks: `ferry doctor`.

Promises: as `runner.cli`, which holds the other commands. Ends with 3 if a line is refused, else with 0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from runner import doctor, screen
from runner.cli_image import PROJECT, ProjectOption
from runner.cli_verify import JsonOption
from runner.errors import ExitCode
from runner.observations import from_json, to_json
from runner.observe import observe
from runner.record import write_file


def doctor_command(
    server: Annotated[
        Path | None, typer.Option("--server", help="judge what this profile needs, and only that")
    ] = None,
    image: Annotated[str | None, typer.Option("--image", help="an image that shall run here")] = None,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", help="a bundle that shall be resumed here; its bytes are not read"),
    ] = None,
    run: Annotated[Path, typer.Option("--run", help="where the run folder shall be")] = Path(),
    record: Annotated[
        Path | None,
        typer.Option("--record", help="write what was seen into this file, to be sent to somebody"),
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option("--recorded", help="judge such a file instead of this host")
    ] = None,
    as_json: JsonOption = False,
    project: ProjectOption = PROJECT,
) -> None:
    """Look whether this host can do what is asked of it: engine, GPUs, memory, disk, clock; with the remedies."""
    asked = doctor.asked_of(server, image, bundle, project)
    if recorded is not None:
        seen = from_json(recorded.read_bytes(), str(recorded))
    else:
        with screen.err.status("looking") as looking:
            seen = observe(run, on_step=lambda what: looking.update(f"looking at {what}"))
    if record is not None:
        write_file(record, to_json(seen))
    checks = doctor.diagnose(seen, asked)
    if as_json:
        print(json.dumps(doctor.as_json(checks), indent=2, sort_keys=True))
    else:
        screen.out.print(doctor.render(checks))
    if doctor.is_refused(checks):
        raise typer.Exit(ExitCode.REFUSED)
