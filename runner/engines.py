"""Which engine a server profile names, and the run's environment as that engine has it. Never another in its place."""

from __future__ import annotations

from pathlib import Path

from runner import image
from runner.docker_engine import DockerEngine, connect
from runner.engine import Engine
from runner.image import ImagePin, ReadyImage
from runner.run import RunFolder
from runner.server import ServerProfile
from runner.spec import ImageRef
from runner.venv_engine import VenvEngine


def engine_for(folder: RunFolder) -> Engine:
    """Return the engine that the run in `folder` was prepared for. Raises `Refusal` if it does not answer."""
    return VenvEngine(folder.path) if folder.server().engine == "venv" else DockerEngine(connect())


def ready_image(server: ServerProfile, wanted: ImageRef, project: Path) -> ReadyImage:
    """Return the pinned environment as the server's engine has it. Raises `Refusal` if it is absent or another one."""
    pin = ImagePin(wanted.name, wanted.digest, wanted.config, wanted.lock)
    if server.engine == "venv":
        return image.check_venv(pin, Path(str(server.venv)))
    return image.check_in_engine(pin, project, connect())
