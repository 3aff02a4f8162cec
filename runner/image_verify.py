"""Whether an environment is, byte for byte, the one that is pinned: `ferry image verify NAME`.

Promises: an image is looked at from inside, in a container with a run's own authority (no network, read-only root, no
capability, the caller's uid), by a Python that imports nothing of what it looks at; a venv likewise, by this host's
Python. Nothing is built, pulled or changed. Everything that differs is named, all of it at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pydantic

from runner import image, process
from runner.docker_engine import connect, look_inside
from runner.errors import Fault, Refusal, refuse_if
from runner.image import ImagePin
from runner.image_build import host_python
from runner.image_inputs import Identity, read_inputs
from runner.inside.records import Report
from runner.process import tail

_PARENT = Path(__file__).resolve().parent.parent
_LOOK = "import sys; sys.path.insert(0, sys.argv.pop(1)); from runner.inside.records import main; main()"
# -I: nothing of the caller's; -S: no .pth is run, no package importable; -B: no byte code is written.
_FLAGS = ("-I", "-S", "-B", "-c", _LOOK)
_REPORT: pydantic.TypeAdapter[Report] = pydantic.TypeAdapter(Report)
_IDENTITY: pydantic.TypeAdapter[Identity] = pydantic.TypeAdapter(Identity)


@dataclasses.dataclass(frozen=True)
class Verified:
    """An environment that passed: its pin, what names that pin, and what was looked at."""

    pin: ImagePin
    pinned_by: str
    report: Report


def verify_image(name: str, project: Path) -> Verified:
    """Look at the pinned image `name` in the engine. Raises `Refusal` with everything that differs.

    Pinned is what `images/pins.yaml` names; without an entry there, the image that was built here from the project's files.
    """
    pin, pinned_by = image.known_pin(name, project)
    with contextlib.closing(connect()) as client:
        ready = image.check_in_engine(pin, project, client)
        command = [ready.python, *_FLAGS, "/opt/ferry", "/opt/ferry", "/opt/venv"]
        answer = look_inside(client, ready.reference, command)
        labels = dict(client.images.get(ready.reference).labels or {})
    where = f"image {ready.reference}"
    fix = f"an older Ferry made it, or it is damaged: `ferry image build {name}`"
    report = _report(answer.status, answer.output, answer.errors, where, fix)
    refuse_if([*report.faults, *_label_faults(report.identity, labels, where, fix)])
    return Verified(pin, pinned_by, report)


def verify_venv(name: str, project: Path, folder: Path) -> Verified:
    """Look at the environment `name` in `folder`, made for the venv engine. Raises `Refusal` with everything that differs."""
    inputs = read_inputs(name, project)
    wanted = inputs.identity("host", "host").to_json()
    ready = image.check_venv(image.venv_pin(inputs), folder)
    python = host_python(inputs.spec.python)
    done = process.run(
        [python, *_FLAGS, _PARENT, folder, folder], fix="see its output", env={"LANG": "C.UTF-8"}, check=False
    )
    where = str(folder)
    fix = f"an older Ferry made it, or it is damaged: `ferry image build {name} --venv {folder}`"
    report = _report(done.status, done.output, "", where, fix)
    faults = list(report.faults)
    if report.identity.encode() != wanted:
        expected = f"what images/{name}.yaml says:\n{wanted.decode()}"
        faults.append(Fault("environment differs", f"{where}/IDENTITY", expected, report.identity, fix))
    refuse_if(faults)
    return Verified(ready.pin, f"images/{name}.yaml", report)


def _report(status: int, output: str, errors: str, where: str, fix: str) -> Report:
    try:
        report = _REPORT.validate_json(output)
    except pydantic.ValidationError:
        found = f"exit status {status}\n{tail(output + errors)}"
        raise Refusal(Fault("environment cannot look at itself", where, "a report", found, fix)) from None
    if status != 0:
        found = f"exit status {status}\n{tail(errors)}"
        raise Refusal(Fault("environment cannot look at itself", where, "exit status 0", found, fix))
    return report


def _label_faults(text: str, labels: Mapping[str, str], where: str, fix: str) -> list[Fault]:
    """What the image says of itself inside, against what the engine says of it."""
    try:
        said = _IDENTITY.validate_json(text).labels()
    except pydantic.ValidationError as error:
        return [Fault("IDENTITY is damaged", f"{where}: /opt/ferry/IDENTITY", "an identity", str(error), fix)]
    return [
        Fault("IDENTITY differs from label", f"{where}: {key}", labels.get(key, "no label"), value, fix)
        for key, value in sorted(said.items())
        if labels.get(key) != value
    ]
