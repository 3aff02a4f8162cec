"""What all tests share: hostile temporary paths, one image, and no timing."""

from __future__ import annotations

import os
from pathlib import Path

import docker
import hypothesis
import pytest

from runner import gpus, image, nvml
from runner.docker_engine import connect
from tests.builder import Pin

PROJECT = Path(__file__).resolve().parent.parent

hypothesis.settings.register_profile("ferry", deadline=None, max_examples=60, database=None)
hypothesis.settings.load_profile("ferry")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more GPUs than are here, each with its reason: the summary names and counts them."""
    wanted = [(item, marker) for item in items for marker in item.iter_markers("gpu")]
    if not wanted:
        return
    seen = gpus.read(nvml.record())
    for item, marker in wanted:
        (count,) = marker.args
        if len(seen.gpus) < count:
            found = seen.problem or f"{len(seen.gpus)} here"
            item.add_marker(pytest.mark.skip(reason=f"needs {count} NVIDIA GPU(s): {found}"))


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose name is as awkward as a user's may be."""
    return tmp_path_factory.mktemp("it's a [hostile] $HOME é")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a test verifies is remembered outside of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def client() -> docker.DockerClient:
    """The engine; tests that need it fail without one, they are not skipped."""
    return connect()


@pytest.fixture(scope="session")
def cpu_pin() -> Pin:
    """The pin of the image 'cpu', built if it is not there."""
    pin = image.build("cpu", PROJECT, on_line=print)
    return Pin(pin.name, pin.lock, pin.digest, pin.config)


@pytest.fixture
def plain_env() -> dict[str, str]:
    """An environment for the commands of a user."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "XDG_CACHE_HOME") if name in os.environ}
