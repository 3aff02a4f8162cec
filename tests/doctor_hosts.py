"""Recorded hosts for the tests of `ferry doctor`, each to be broken in one named way.

`h100-sxm-4` and `a100-pcie-3` have the shape that `ferry doctor --record` writes on such servers, with values as NVML and
Docker give them there; `cgroup-v1` was recorded on a real host without a GPU, its limits and names then changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.doctor import diagnose
from runner.doctor_check import Asked, Check, State
from runner.observations import EngineSeen, Observations, from_json

FIXTURES = Path(__file__).parent / "fixtures" / "doctor"
HOSTS = ("h100-sxm-4", "a100-pcie-3", "cgroup-v1")
FOUR = Asked(profile=True, gpus=("0", "1", "2", "3"), image="cuda", accelerator="cuda", cuda=(12, 8))


def recorded(name: str) -> Observations:
    """Return the recorded host `name`."""
    path = FIXTURES / f"{name}.json"
    return from_json(path.read_bytes(), str(path))


@dataclasses.dataclass(frozen=True)
class Failed:
    """An answer of NVML that is an error."""

    error: str


def nvml_says(seen: Observations, changes: Mapping[str, Any]) -> Observations:
    """Return `seen` with other answers of NVML."""
    answers = {
        key: {"error": value.error} if isinstance(value, Failed) else {"value": value}
        for key, value in changes.items()
    }
    return dataclasses.replace(seen, nvml={**seen.nvml, **answers})


def info_says(seen: Observations, **changes: Any) -> Observations:
    """Return `seen` with other values in `docker info`; None takes a key away."""
    info = {key: value for key, value in {**seen.engine.info, **changes}.items() if value is not None}
    return dataclasses.replace(seen, engine=dataclasses.replace(seen.engine, info=info))


def no_engine(seen: Observations, problem: str) -> Observations:
    """Return `seen` with an engine that does not answer."""
    return dataclasses.replace(seen, engine=EngineSeen(problem, {}, {}, None, None))


def files_say(seen: Observations, changes: Mapping[str, str]) -> Observations:
    """Return `seen` with other texts in the host's files."""
    return dataclasses.replace(seen, files={**seen.files, **changes})


def lines(seen: Observations, asked: Asked, state: State) -> dict[str, Check]:
    """Return the checks of `seen` that are in `state`, by name; two of one name are an error of the test."""
    found = [check for check in diagnose(seen, asked) if check.state is state]
    assert len({check.check for check in found}) == len(found)
    return {check.check: check for check in found}


def refused(seen: Observations, asked: Asked = FOUR) -> dict[str, str]:
    """Return what is refused: the check's name -> what was found."""
    return {name: check.found for name, check in lines(seen, asked, State.REFUSED).items()}


def warned(seen: Observations, asked: Asked = FOUR) -> dict[str, str]:
    """Return what is warned of: the check's name -> what was found."""
    return {name: check.found for name, check in lines(seen, asked, State.WARNING).items()}
