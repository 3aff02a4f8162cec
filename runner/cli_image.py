"""The command line of images: `ferry image ...`.

Promises: as `runner.cli`, which holds the other commands.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from runner import image as images
from runner import screen
from runner.cli_verify import JsonOption, emit

PROJECT = Path(__file__).resolve().parent.parent
ProjectOption = Annotated[Path, typer.Option("--project", help="Ferry's own folder: images/ and lockfiles/")]

image_app = typer.Typer(no_args_is_help=True, help="Pinned images: the environment of a run.")


@image_app.command("build")
def image_build_command(name: str, as_json: JsonOption = False, project: ProjectOption = PROJECT) -> None:
    """Build the image images/NAME.yaml, or see that it is there already."""
    pin = images.build(name, project, on_line=lambda line: screen.err.print(line, markup=False, style="dim"))
    emit(
        as_json,
        dataclasses.asdict(pin),
        f"IMAGE {pin.name} digest={pin.digest} config={pin.config} lock={pin.lock}",
    )
