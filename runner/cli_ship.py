"""The command line of images on their way: `ferry image save`, `load`, `push`, `pull`.

Promises: as `runner.cli`, which holds the other commands.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import typer

from runner import image as images
from runner import image_diff, image_file, image_present, image_registry, screen
from runner.cli_image import PROJECT, ProjectOption
from runner.cli_verify import DryRunOption, JsonOption, emit
from runner.docker_engine import connect
from runner.errors import ExitCode, Fault, Refusal, printable
from runner.image_present import DIGEST

_TIMEOUT_S = 3600
_SHOWN = 40
_SIDE_HELP = "a name of images/, sha256:HEX, a tag in the engine (ferry/cpu:...), or a file"
ImageArgument = Annotated[
    str, typer.Argument(metavar="IMAGE", help="a name of images/ (what was built of it), or sha256:HEX")
]


def register(app: typer.Typer) -> None:
    """Add these commands to `ferry image`."""
    app.command("save")(save_command)
    app.command("load")(load_command)
    app.command("push")(push_command)
    app.command("pull")(pull_command)
    app.command("diff")(diff_command)


def save_command(
    image: ImageArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="the file; compressed if it ends in .zst", metavar="FILE")
    ],
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    project: ProjectOption = PROJECT,
) -> None:
    """Write an image into a file: the same image, the same bytes."""
    client = connect(_TIMEOUT_S)
    found = image_present.present(client, digest_of(image, project))
    if dry_run:
        emit(as_json, {"digest": found.digest}, f"would save {found.tag} {found.digest} to {output}")
        return
    with screen.bytes_progress("saving", image_present.size_bytes(client, found.digest)) as advance:
        layout = image_file.save(client, found, output, advance)
    value = {"digest": layout.digest, "config": layout.config, "file": str(output)}
    emit(as_json, value, f"SAVED {output} digest={layout.digest} config={layout.config}")


def load_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="what `ferry image save` made")],
    digest: Annotated[
        str | None,
        typer.Option("--digest", help="refuse the file unless it holds this image", metavar="sha256:HEX"),
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Verify the file of an image, every byte; then give the image to the engine, and see that it is there."""
    with image_file.image_file(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        with screen.bytes_progress("verifying", size) as advance:
            layout = image_file.verify(opened, file, digest, advance)
        if dry_run:
            emit(as_json, {"digest": layout.digest}, f"would load {layout.digest} from {file}")
            return
        with screen.bytes_progress("loading", size) as advance:
            loaded = image_file.load(connect(_TIMEOUT_S), opened, file, layout, advance)
    value = {"digest": loaded.digest, "config": layout.config, "tag": loaded.tag}
    emit(as_json, value, f"LOADED {loaded.tag} digest={loaded.digest} config={layout.config}")


def push_command(
    image: ImageArgument,
    repository: Annotated[
        str, typer.Argument(metavar="REPOSITORY", help="as in registry.example/team/ferry-cpu")
    ],
    tag: Annotated[str | None, typer.Option("--tag", help="[default: that of the image's inputs]")] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    project: ProjectOption = PROJECT,
) -> None:
    """Push an image to a registry, and read back that it is there under its digest."""
    client = connect(_TIMEOUT_S)
    repository = image_registry.repository_of(repository)
    found = image_present.present(client, digest_of(image, project))
    reference = f"{repository}@{found.digest}"
    if dry_run:
        emit(as_json, {"reference": reference}, f"would push {found.tag} to {reference}")
        return
    with screen.layers_progress("pushing") as show:
        image_registry.push(client, found, repository, tag, show)
    emit(as_json, {"reference": reference}, f"PUSHED {reference}")


def pull_command(
    reference: Annotated[str, typer.Argument(metavar="REPOSITORY@sha256:HEX", help="what `push` printed")],
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Pull an image by its digest, and see that it is the one."""
    _, digest = image_registry.reference_of(reference)
    if dry_run:
        emit(as_json, {"reference": reference}, f"would pull {reference}")
        return
    with screen.layers_progress("pulling") as show:
        pulled = image_registry.pull(connect(_TIMEOUT_S), reference, show)
    emit(as_json, {"digest": digest, "tag": pulled.tag}, f"PULLED {pulled.tag} digest={digest}")


def diff_command(
    a: Annotated[str, typer.Argument(metavar="A", help=_SIDE_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help="as A")],
    as_json: JsonOption = False,
    project: ProjectOption = PROJECT,
) -> None:
    """Say why two images differ, file by file; exit 0 only if they are the same. Also two tars of a base's root."""
    origins = [_origin(side, project) for side in (a, b)]
    with screen.bytes_progress("reading", sum(origin.size_bytes() for origin in origins)) as advance:
        found = image_diff.differences(origins[0], origins[1], advance)
    if as_json:
        emit(as_json, {"equal": not found, "differences": [dataclasses.asdict(entry) for entry in found]}, "")
    else:
        for difference in found[:_SHOWN]:
            screen.out.print(printable(str(difference)), markup=False)
        if (more := len(found) - _SHOWN) > 0:
            screen.out.print(f"and {more} more: --json has all")
        screen.out.print(f"DIFFERENT: {len(found)} differences" if found else "SAME")
    raise typer.Exit(ExitCode.DIFFERENT if found else ExitCode.OK)


def _origin(text: str, project: Path) -> image_diff.Origin:
    """What a side of `diff` names: a file, an image by digest or by a tag in the engine, or a name of images/."""
    path = Path(text)
    named = "/" in text or DIGEST.fullmatch(text) is not None
    if path.exists() or (not named and path.suffix):
        return image_diff.InFile(path)
    client = connect(_TIMEOUT_S)
    if not named:
        return image_diff.InEngine(client, digest_of(text, project))
    found = image_present.inspected(client, text)
    if found is None:
        fix = "`docker image ls --digests` shows what is there"
        raise Refusal(Fault("no such image or file", text, "a file, or an image in the engine", "none", fix))
    return image_diff.InEngine(client, str(found["Id"]))


def digest_of(image: str, project: Path) -> str:
    """Return the digest that `image` is, or that of the built image of this name. Raises `Refusal`."""
    return image if DIGEST.fullmatch(image) else images.built(image, project).digest
