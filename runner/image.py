"""The run's environment: its pin, and the proof that what lies ready is what the pin names.

Promises: a `ReadyImage` is made only here, after its digest, its lock and the host's CPU were checked, all faults
together; nothing is ever pulled; what is built is what the project's files say, and is not built twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import docker
import docker.errors

from runner import image_build, image_pins, process
from runner.errors import ExitCode, Fault, Refusal, refuse_if
from runner.image_build import OnLine
from runner.image_inputs import ImageInputs, read_inputs
from runner.inside import installed
from runner.inside.digests import sha256_bytes
from runner.record import to_json, write_file


@dataclasses.dataclass(frozen=True)
class ImagePin:
    """Which environment: manifest digest, config digest and hash of the lock, each as 'sha256:...'.

    Engines with the containerd store know an image by the manifest, others by the config; either is taken. Outside a
    container both are the hash of the environment's IDENTITY.
    """

    name: str
    digest: str
    config: str
    lock: str


@dataclasses.dataclass(frozen=True)
class ReadyImage:
    """A pinned environment that lies ready on this server, and where things are in it.

    `reference` is what an engine starts; `python`, `lock_file` and `site_packages` are paths as the run sees them;
    `environment` is what the environment itself must add (an image has its own).
    """

    pin: ImagePin
    reference: str
    lock_file: str
    site_packages: str
    python: str
    environment: Mapping[str, str]


def check_in_engine(pin: ImagePin, project: Path, client: docker.DockerClient) -> ReadyImage:
    """Return the pinned image as the engine has it. Raises `Refusal` with all faults; never pulls, never builds."""
    fix = f"`ferry image build {pin.name}` in {project}, from the commit that the bundle was packed with"
    found = _in_engine(client, pin.digest) or _in_engine(client, pin.config)
    if found is None:
        others = client.images.list(filters={"label": f"ferry.name={pin.name}"})
        state = ", ".join(sorted(str(other.id) for other in others)) or "no image of that name"
        raise Refusal(
            Fault(
                "image is not in the engine", pin.name, f"{pin.digest} (or config {pin.config})", state, fix
            )
        )
    labels: Mapping[str, str] = found.labels or {}
    where = f"image {found.id}"
    faults = [
        Fault("image differs", f"{where}: label {label}", expected, labels.get(label, "no label"), fix)
        for label, expected in (("ferry.lock", pin.lock), ("ferry.name", pin.name))
        if labels.get(label) != expected
    ]
    faults += cpu_faults(labels.get("ferry.cpu_flags", "").split(), where)
    refuse_if(faults)
    python = labels.get("ferry.python", "3")
    return ReadyImage(
        pin=pin,
        reference=str(found.id),
        lock_file="/opt/ferry/lock.txt",
        site_packages=f"/opt/venv/lib/python{python}/site-packages",
        python="/opt/venv/bin/python",
        environment={},
    )


def _in_engine(client: docker.DockerClient, reference: str) -> Any:
    try:
        return client.images.get(reference)
    except docker.errors.NotFound:
        return None


def check_venv(pin: ImagePin, folder: Path) -> ReadyImage:
    """Return the pinned environment in `folder`, made by `build_venv`. Raises `Refusal` with all faults.

    What holds between servers is the lock; the pinned digests are of an image, which a venv has none of.
    """
    fix = f"`ferry image build {pin.name} --venv {folder}`, from the commit that the bundle was packed with"
    identity = _venv_identity(folder)
    if identity is None:
        raise Refusal(
            Fault(
                "no environment",
                str(folder / "IDENTITY"),
                f"lock {pin.lock}",
                "nothing, or not finished",
                fix,
            )
        )
    where = str(folder / "IDENTITY")
    faults = [
        Fault("environment differs", f"{where}: {key}", expected, str(identity.get(key)), fix)
        for key, expected in (("lock", pin.lock), ("name", pin.name))
        if identity.get(key) != expected
    ]
    faults += cpu_faults(list(identity["cpu_flags"]), where)
    refuse_if(faults)
    return ReadyImage(
        pin=pin,
        reference=str(folder),
        lock_file=str(folder / "lock.txt"),
        site_packages=str(folder / "lib" / f"python{identity['python']}" / "site-packages"),
        python=str(folder / "bin" / "python"),
        # As the Dockerfile sets it.
        environment={
            "DS_ACCELERATOR": str(identity["accelerator"]),
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
        },
    )


def _venv_identity(folder: Path) -> dict[str, Any] | None:
    try:
        value = json.loads((folder / "IDENTITY").read_bytes())
    except (OSError, ValueError):
        return None
    return (
        value if isinstance(value, dict) and {"lock", "name", "cpu_flags", "python"} <= value.keys() else None
    )


def cpu_faults(flags: list[str], where: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> list[Fault]:
    """Return a fault if this CPU lacks a flag that the prebuilt ops need: they would end in an illegal instruction."""
    match = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    missing = sorted(set(flags) - set(match[1].split() if match else ()))
    if not missing:
        return []
    fix = "use a server whose CPU has them, or build an image for a lower `arch`"
    return [
        Fault("CPU cannot run the ops", where, " ".join(flags), f"this CPU lacks {' '.join(missing)}", fix)
    ]


def build(name: str, project: Path, on_line: OnLine) -> ImagePin:
    """Return the pin of the image that the project's files describe, built if the engine does not have it.

    Two callers at once take turns. The pin is kept in `.ferry/images/NAME.json`. Raises `Refusal`.
    """
    inputs = read_inputs(name, project)
    record = _record(project, name)
    with _turn(project, on_line):
        pin = _built(inputs, record)
        if pin is None:
            digest, config = image_build.image(inputs, image_build.base(inputs, on_line), on_line)
            pin = ImagePin(name, digest, config, inputs.lock)
            write_file(record, to_json({**dataclasses.asdict(pin), "inputs": inputs.inputs}))
    return pin


def built(name: str, project: Path) -> ImagePin:
    """Return the pin of the image that `build` made of the project's files as they are now. Raises `Refusal`: none."""
    pin = _built(read_inputs(name, project), _record(project, name))
    if pin is None:
        fix = f"`ferry image build {name}` first, or name an image by its digest"
        raise Refusal(Fault("image is not built", name, "one of these inputs in the engine", "none", fix))
    return pin


def known_pin(name: str, project: Path) -> tuple[ImagePin, str]:
    """Return the pin of image `name`, and what names it: `images/pins.yaml`, or else the last build here of these inputs.

    Raises `Refusal` when neither does. Asks no engine.
    """
    pinned = image_pins.read_pins(project).get(name)
    if pinned is not None:
        return ImagePin(name, pinned.digest, pinned.config, pinned.lock), "images/pins.yaml"
    pin = _recorded(read_inputs(name, project), _record(project, name))
    if pin is None:
        expected = f"an entry '{name}', or an image built here from the project's files as they are"
        where = str(image_pins.pins_path(project))
        raise Refusal(Fault("image is not pinned", where, expected, "neither", f"`ferry image build {name}`"))
    return pin, "the last build"


def set_pin(pin: ImagePin, project: Path) -> None:
    """Write `pin`, just returned by `build`, to `images/pins.yaml`. Raises `Refusal` when that file is damaged."""
    inputs = read_inputs(pin.name, project).inputs
    image_pins.write_pin(
        project,
        pin.name,
        image_pins.Pinned(digest=pin.digest, config=pin.config, lock=pin.lock, inputs=inputs),
    )


def _record(project: Path, name: str) -> Path:
    return image_build.store(project) / "images" / f"{name}.json"


def _recorded(inputs: ImageInputs, record: Path) -> ImagePin | None:
    """Return the recorded pin, if it was made from these inputs."""
    try:
        value = json.loads(record.read_bytes())
        pin = ImagePin(value["name"], value["digest"], value["config"], value["lock"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pin if value.get("inputs") == inputs.inputs else None


def _built(inputs: ImageInputs, record: Path) -> ImagePin | None:
    """Return the recorded pin, if it was made from these inputs and the engine still has that image."""
    pin = _recorded(inputs, record)
    if pin is None:
        return None
    for reference in (pin.digest, pin.config):
        command = [
            "docker",
            "image",
            "inspect",
            "--format",
            '{{index .Config.Labels "ferry.inputs"}}',
            reference,
        ]
        seen = process.run(command, fix="`just engine` installs and starts an engine", check=False)
        if seen.status == 0 and seen.output.strip() == inputs.inputs:
            return pin
    return None


def build_venv(name: str, project: Path, folder: Path, on_line: OnLine) -> ImagePin:
    """Return the pin of the same environment outside a container, in `folder`, made if it is not there.

    An older or unfinished environment in `folder` is replaced; a folder that is not one is refused.
    """
    inputs = read_inputs(name, project)
    pin = venv_pin(inputs)
    recipe = folder / "RECIPE"
    with _turn(project, on_line):
        listed = folder / installed.LIST_NAME
        made = _venv_identity(folder) is not None and listed.is_file() and recipe.is_file()
        if made and recipe.read_text() == inputs.recipe:
            return pin
        _clear(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        image_build.venv(inputs, folder, on_line)
        write_file(recipe, inputs.recipe.encode())
        write_file(folder / "lock.txt", (project / inputs.spec.lock).read_bytes())
        files, stamps = installed.list_of(folder, ["."], timed=False, leave_out=installed.OWN_NAMES)
        write_file(listed, files.to_bytes())
        write_file(folder / installed.STAMPS_NAME, to_json(stamps))
        # Last: an environment without it is not finished.
        write_file(folder / "IDENTITY", inputs.identity("host", "host").to_json())
    return pin


def venv_pin(inputs: ImageInputs) -> ImagePin:
    """Return the pin of the environment outside a container: the hash of its IDENTITY."""
    digest = "sha256:" + sha256_bytes(inputs.identity("host", "host").to_json())
    return ImagePin(inputs.spec.name, digest, digest, inputs.lock)


def _clear(folder: Path) -> None:
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / "pyvenv.cfg").is_file():
        fix = "give an empty folder, or one of an older environment"
        fault = Fault("folder is not an environment", str(folder), "pyvenv.cfg", "other files", fix)
        raise Refusal(fault, exit_code=ExitCode.REFUSED)
    shutil.rmtree(folder)


@contextlib.contextmanager
def _turn(project: Path, on_line: OnLine) -> Iterator[None]:
    """Hold the project's build lock; the kernel gives it back when this process ends, however it ends."""
    path = image_build.store(project) / "build.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_line("another build of this project is running: waiting for its end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
