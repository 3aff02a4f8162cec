"""Signatures of a bundle: whose it is, and that nothing but the right one will do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner import signature, sums, verify
from runner.errors import Refusal
from runner.verify import open_bundle
from tests.builder import make_bundle, relist, snapshot


def whats(refusal: Refusal) -> list[str]:
    return [fault.what for fault in refusal.faults]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Two keys, and an allowed_signers file that names one of them."""
    for name in ("ann", "bob"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(tmp_path / name)],
            check=True,
        )
    public = (tmp_path / "ann.pub").read_text()
    (tmp_path / "signers").write_text(f'ann@example.org namespaces="ferry" {public}')
    return tmp_path


def test_a_signature_names_its_signer(tmp_path: Path, keys: Path) -> None:
    """Signed by a key of the list passes, with and without the name; OpenSSH alone says the same; the root stays."""
    bundle = make_bundle(tmp_path, update=4)
    verified = verify.verify(open_bundle(bundle))
    path = signature.sign(verified, keys / "ann")
    assert path.name == "SHA256SUMS.sig"
    opened = open_bundle(bundle, root=verified.root)
    assert signature.signer_of(opened, keys / "signers") == "ann@example.org"
    assert signature.signer_of(opened, keys / "signers", "ann@example.org") == "ann@example.org"
    verify.verify(opened)
    by_hand = [
        "ssh-keygen",
        "-Y",
        "verify",
        "-f",
        str(keys / "signers"),
        "-I",
        "ann@example.org",
        "-n",
        "ferry",
    ]
    with (bundle / sums.LIST_NAME).open("rb") as listed:
        subprocess.run([*by_hand, "-s", str(path)], stdin=listed, check=True, capture_output=True)
    with pytest.raises(Refusal) as refused:
        signature.sign(verified, keys / "ann")
    assert whats(refused.value) == ["bundle is signed"]


SIGNATURE_BREAKS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "unsigned": (lambda b, k: None, "not signed"),
    "by another key": (
        lambda b, k: signature.sign(verify.verify(open_bundle(b)), k / "bob"),
        "wrong signature",
    ),
    "of another list": (
        lambda b, k: (
            signature.sign(verify.verify(open_bundle(b)), k / "ann"),
            (b / "more").write_bytes(b"x"),
            relist_signed(b),
        ),
        "wrong signature",
    ),
    "garbage": (lambda b, k: (b / "SHA256SUMS.sig").write_bytes(b"x" * 100), "wrong signature"),
    "empty": (lambda b, k: (b / "SHA256SUMS.sig").write_bytes(b""), "wrong signature"),
    "in another namespace": (
        lambda b, k: subprocess.run(
            ["ssh-keygen", "-q", "-Y", "sign", "-f", str(k / "ann"), "-n", "file", str(b / "SHA256SUMS")],
            check=True,
            capture_output=True,
        ),
        "wrong signature",
    ),
}


def relist_signed(bundle: Path) -> None:
    """List anew what is there, but for the signature."""
    kept = (bundle / "SHA256SUMS.sig").read_bytes()
    (bundle / "SHA256SUMS.sig").unlink()
    relist(bundle)
    (bundle / "SHA256SUMS.sig").write_bytes(kept)


@pytest.mark.parametrize("name", SIGNATURE_BREAKS)
def test_without_the_right_signature_it_is_refused(tmp_path: Path, keys: Path, name: str) -> None:
    """Unsigned, another key, another list, another namespace: nothing passes, and nothing is changed."""
    change, expected = SIGNATURE_BREAKS[name]
    bundle = make_bundle(tmp_path, update=4)
    change(bundle, keys)
    before = snapshot(bundle)
    for identity in (None, "ann@example.org"):
        with pytest.raises(Refusal) as refused:
            signature.signer_of(open_bundle(bundle), keys / "signers", identity)
        assert whats(refused.value) == [expected]
    assert snapshot(bundle) == before


def test_another_identity_is_refused(tmp_path: Path, keys: Path) -> None:
    """A good signature by somebody else than who was asked for."""
    bundle = make_bundle(tmp_path, update=4)
    signature.sign(verify.verify(open_bundle(bundle)), keys / "ann")
    with pytest.raises(Refusal) as refused:
        signature.signer_of(open_bundle(bundle), keys / "signers", "bob@example.org")
    assert whats(refused.value) == ["wrong signature"]


def test_a_signature_cannot_be_listed(tmp_path: Path) -> None:
    """Rule B10: the signature is of the list, so the list cannot hold it."""
    with pytest.raises(Refusal, match="unsafe"):
        sums.parse(b"a" * 64 + b"  SHA256SUMS.sig\n", "list")
    bundle = make_bundle(tmp_path, update=4)
    (bundle / "data" / "SHA256SUMS.sig").write_bytes(b"x")
    with pytest.raises(Refusal, match="unexpected"):
        open_bundle(bundle)


def test_the_command_line_signs_and_verifies(tmp_path: Path, keys: Path, plain_env: dict[str, str]) -> None:
    """`ferry sign`, `ferry verify --signers --identity --root --json`; options that contradict are refused."""
    bundle = make_bundle(tmp_path, update=4)
    root = open_bundle(bundle).root

    def ferry(*words: str) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-m", "runner", *words, "--json"],
            env=plain_env | {"PYTHONPATH": str(Path(verify.__file__).parent.parent)},
            capture_output=True,
            check=False,
        )
        return done.returncode, json.loads(done.stdout)

    assert ferry("sign", str(bundle), "--key", str(keys / "ann"))[0] == 0
    status, value = ferry("verify", str(bundle), "--signers", str(keys / "signers"), "--root", root)
    assert (status, value["signed_by"], value["root"], value["notes"]) == (0, "ann@example.org", root, [])
    status, value = ferry("verify", str(bundle), "--quick", "--paranoid", "--root", "x", "--identity", "ann")
    assert status == 2
    assert [fault["what"] for fault in value["refused"]] == ["options contradict", "not a root", "no signers"]
