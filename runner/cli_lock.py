"""The command line of locks: `ferry image lock` and `ferry image from-bundle`.

Promises: as `runner.cli`, which holds the other commands.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from runner import image_resolve, screen
from runner.cli_image import PROJECT, ProjectOption
from runner.cli_verify import DryRunOption, JsonOption, emit
from runner.image_spec import load_spec


def register(app: typer.Typer) -> None:
    """Add these commands to `ferry image`."""
    app.command("lock")(lock_command)


def lock_command(
    name: str,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="take the newest of everything that the list allows")
    ] = False,
    package: Annotated[
        list[str] | None,
        typer.Option("--package", "-P", help="take the newest of this package; again for more"),
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    project: ProjectOption = PROJECT,
) -> None:
    """Resolve the list of an image (lockfiles/NAME.in) to its lock, every package with its hashes; show what changes."""
    renewed = [] if upgrade else package or None
    spec = load_spec(name, project)
    with screen.err.status("resolving"):
        resolved = image_resolve.resolve(spec, project, renewed)
    if not dry_run:
        resolved.write()
    value = {
        "lock": spec.lock,
        "changes": [dataclasses.asdict(change) for change in resolved.changes],
        "written": resolved.differs and not dry_run,
    }
    if not as_json:
        for change in resolved.changes:
            screen.out.print(str(change), markup=False)
    what = "WOULD LOCK" if dry_run else "LOCKED"
    count = len(resolved.changes)
    said = (
        f"{count} packages changed"
        if count
        else "only the text around the packages"
        if resolved.differs
        else "as it was"
    )
    emit(as_json, value, f"{what} {spec.lock}: {said}")
