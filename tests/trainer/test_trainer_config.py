"""A config is read strictly, and everything wrong with it is said at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.config import parse_config, read_config
from trainer.refusal import Refusal
from trainer.synthetic import demo_config


@pytest.fixture
def value() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(
        json.dumps(demo_config(image_root="/mnt/a", teacher_path="/mnt/t", rows=16))
    )
    return made


def test_all_faults_together(value: dict[str, Any]) -> None:
    """Unknown key, missing key, wrong type, a bool for a number: one refusal with four pointers."""
    value["extra"] = 1
    del value["loader"]["prefetch"]
    value["seed"] = "429"
    value["optimizer"]["lr"]["head"] = True
    with pytest.raises(Refusal) as caught:
        parse_config(value)
    assert {d.where: d.found for d in caught.value.differences} == {
        "/extra": "an unknown key",
        "/loader/prefetch": "no such key",
        "/seed": '"429"',
        "/optimizer/lr/head": "true",
    }


@pytest.mark.parametrize(
    ("section", "key", "bad"),
    [
        ("schedule", "total", 40),
        ("schedule", "floor", 2.0),
        ("data", "sha256", "abc"),
        ("data", "image_root", "images"),
        ("data", "rows", 7),
        ("batch", "world", 0),
        ("model", "patch", 5),
        ("saves", "every", 0),
        ("saves", "keep", 0),
        ("loader", "workers", -1),
        ("teacher", "path", "teacher.safetensors"),
    ],
)
def test_ranges(value: dict[str, Any], section: str, key: str, bad: object) -> None:
    """Values of the right type that cannot be."""
    value[section][key] = bad
    with pytest.raises(Refusal, match=f"/{section}"):
        parse_config(value)


def test_round_trip(value: dict[str, Any]) -> None:
    """What is read is what stands in the contract, with every number in one form."""
    value["optimizer"]["clip"] = 1
    config = parse_config(value)
    assert parse_config(config.as_json()) == config
    assert config.optimizer.clip == 1.0


@pytest.mark.parametrize("content", [b"", b"{", b'{"name": 1, "name": 2}', b"\xff"])
def test_files_that_are_not_json(tmp_path: Path, content: bytes) -> None:
    """A file that cannot be read is refused by name."""
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(Refusal, match=r"^REFUSED: the config cannot be read\n  config\.json: "):
        read_config(tmp_path / "config.json")
