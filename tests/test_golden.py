"""The golden bundle: made once, never again; and a short, fixed stretch of the fuzzer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from runner import signature
from runner.verify import open_bundle, verify
from tests.fuzz import readers

GOLDEN = Path(__file__).parent / "golden"
ROOT = "sha256:ede70d15c16d0f5d15f7d8bd654e9eb28d9f7df77618063bfd8eefb129bd059f"


def test_the_golden_bundle_still_verifies(tmp_path: Path) -> None:
    """Whatever changes in Ferry, a bundle of the first format is read, and is the same bundle."""
    verified = verify(open_bundle(GOLDEN / "bundle", root=ROOT))
    assert verified.root == ROOT
    assert verified.spec.name == "tiny"
    assert verified.spec.code.tree == "ec4fc2d55bbda74fb649982a5eb0abbce938c0e6"
    assert verified.checkpoint is not None
    assert (verified.checkpoint.update, verified.checkpoint.world) == (4, 2)
    assert verified.notes == ()
    shutil.copytree(GOLDEN / "bundle", tmp_path / "copy")
    assert verify(open_bundle(tmp_path / "copy", root=ROOT)).root == ROOT


def test_the_golden_bundle_is_signed() -> None:
    """By a key that exists no more: nobody can sign another one in its place."""
    assert (
        signature.signer_of(open_bundle(GOLDEN / "bundle"), GOLDEN / "allowed_signers")
        == "golden@example.org"
    )


@pytest.mark.parametrize("target", readers.TARGETS)
def test_readers_answer_or_refuse(target: str) -> None:
    """A thousand inputs each, always the same; CI's fuzz step goes on from there by the clock."""
    assert readers.fuzz(target, 7, lambda count: count < 1000) == 1000
