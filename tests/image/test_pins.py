"""The pin file: one writer, one form, and nothing is taken from a damaged one."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner import image
from runner.errors import Refusal
from runner.image_pins import Pinned, pins_path, read_pins, write_pin
from runner.image_spec import load_spec
from tests.builder import snapshot
from tests.conftest import PROJECT

A = Pinned(
    digest="sha256:" + "a" * 64,
    config="sha256:" + "b" * 64,
    lock="sha256:" + "c" * 64,
    inputs="sha256:" + "d" * 64,
)
B = A.model_copy(update={"digest": "sha256:" + "e" * 64})
TEXT = f"""\
# Which build of an image is the pinned one. Written by `ferry image build NAME --pin`, and by nothing else.
ferry: 1
pins:
  cpu:
    digest: {A.digest}  # ferry/cpu:dddddddddddd
    config: {A.config}
    lock: {A.lock}
    inputs: {A.inputs}
  cuda:
    digest: {B.digest}  # ferry/cuda:dddddddddddd
    config: {B.config}
    lock: {B.lock}
    inputs: {B.inputs}
"""


def test_the_file_is_the_same_bytes_in_whatever_order_it_was_written(tmp_path: Path) -> None:
    """Sorted, digests in full, the tag as a comment for people."""
    for names in (("cpu", "cuda"), ("cuda", "cpu"), ("cpu", "cuda", "cpu")):
        pins_path(tmp_path).unlink(missing_ok=True)
        for name in names:
            write_pin(tmp_path, name, A if name == "cpu" else B)
        assert pins_path(tmp_path).read_text() == TEXT
    assert read_pins(tmp_path) == {"cpu": A, "cuda": B}


def test_a_new_pin_takes_the_place_of_the_old_one_and_of_no_other(tmp_path: Path) -> None:
    """The other image's stays."""
    write_pin(tmp_path, "cpu", A)
    write_pin(tmp_path, "cuda", A)
    write_pin(tmp_path, "cuda", B)
    assert read_pins(tmp_path) == {"cpu": A, "cuda": B}


@pytest.mark.parametrize(
    ("old", "new"),
    [("ferry: 1", "ferry: 2"), ("sha256:aaaa", "sha256:aaa"), ("lock:", "lokc:"), ("  cuda:", "  cpu:")],
)
def test_a_damaged_file_is_refused_and_stays_as_it_is(tmp_path: Path, old: str, new: str) -> None:
    """A digest cut short, an unknown key, an image twice: neither read nor written over."""
    path = pins_path(tmp_path)
    path.parent.mkdir()
    path.write_text(TEXT.replace(old, new, 1))
    before = snapshot(tmp_path)
    with pytest.raises(Refusal):
        read_pins(tmp_path)
    with pytest.raises(Refusal):
        write_pin(tmp_path, "cpu", A)
    assert snapshot(tmp_path) == before


def test_the_pin_file_is_no_image(tmp_path: Path) -> None:
    """It lies among the documents of images, and is not one."""
    write_pin(tmp_path, "cpu", A)
    (tmp_path / "images" / "cpu.yaml").touch()
    with pytest.raises(Refusal, match="no such image") as caught:
        load_spec("pins", tmp_path)
    assert caught.value.faults[0].expected == "one of cpu"


def test_what_the_pin_file_names_is_the_pin_and_else_the_last_build_of_these_inputs(tmp_path: Path) -> None:
    """A record of other inputs is none; without either, the fix is to build."""
    for name in ("Dockerfile", "images", "lockfiles", "runner"):
        (tmp_path / name).symlink_to(PROJECT / name)
    with pytest.raises(Refusal) as caught:
        image.known_pin("cpu", tmp_path)
    assert caught.value.faults[0].fix == "`ferry image build cpu`"
    (tmp_path / "images").unlink()
    write_pin(tmp_path, "cpu", A)
    assert image.known_pin("cpu", tmp_path) == (
        image.ImagePin("cpu", A.digest, A.config, A.lock),
        "images/pins.yaml",
    )
