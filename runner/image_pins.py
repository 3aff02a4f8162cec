"""The pin file, `images/pins.yaml`: which build of each image is the pinned one.

Promises: written by `ferry image build NAME --pin` only, whole or not at all; the same pins give the same bytes. Whoever
reads it gets digests or a `Refusal`. Does not know whether an image of that digest exists: `image` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from runner import documents
from runner.documents import Document, Name, Sha256
from runner.image_inputs import tag_of
from runner.image_spec import PINS_NAME
from runner.record import write_file

_HEAD = """\
# Which build of an image is the pinned one. Written by `ferry image build NAME --pin`, and by nothing else.
"""


class Pinned(Document):
    """One pinned build: its manifest digest, its config digest, its lock, and the inputs that it was built from."""

    digest: Sha256
    config: Sha256
    lock: Sha256
    inputs: Sha256


class _Pins(Document):
    ferry: Literal[1]
    pins: dict[Name, Pinned]


def pins_path(project: Path) -> Path:
    """Where the pin file lies."""
    return project / "images" / PINS_NAME


def read_pins(project: Path) -> Mapping[str, Pinned]:
    """Return image name -> pin; none when there is no pin file. Raises `Refusal` with every fault of the file."""
    path = pins_path(project)
    if not path.exists():
        return {}
    return documents.load(_Pins, path).pins


def write_pin(project: Path, name: str, pinned: Pinned) -> None:
    """Make `pinned` the pinned build of image `name`. Raises `Refusal`, and writes nothing, when the file is damaged."""
    pins = {**read_pins(project), name: pinned}
    lines = [_HEAD, "ferry: 1\n", "pins:\n"]
    for each in sorted(pins):
        pin = pins[each]
        lines += [
            f"  {each}:\n",
            f"    digest: {pin.digest}  # {tag_of(each, pin.inputs)}\n",
            f"    config: {pin.config}\n",
            f"    lock: {pin.lock}\n",
            f"    inputs: {pin.inputs}\n",
        ]
    write_file(pins_path(project), "".join(lines).encode())
