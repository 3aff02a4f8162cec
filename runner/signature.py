"""Who vouches for a bundle: a signature of its list, made and checked by `ssh-keygen -Y` with keys that people have.

Promises: only a verified bundle is signed; the signature is of the list's bytes, so of the root; it lies beside the list
as `SHA256SUMS.sig` (rule B10) and can be checked with OpenSSH alone; a signature proves nothing unless the caller names
who may sign.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from runner import process, sums
from runner.bundle import Bundle
from runner.errors import ExitCode, Fault, Refusal, refuse_if
from runner.inside.digests import sha256_bytes
from runner.record import write_file
from runner.verify import VerifiedBundle

NAMESPACE = "ferry"
_LIMIT_BYTES = 64 << 10
_TIMEOUT_S = 600.0
_ROOT = re.compile("sha256:[0-9a-f]{64}")


def sign(bundle: VerifiedBundle, key: Path) -> Path:
    """Write the signature of `bundle` by `key` (a private key, or the public key of one that an agent holds).

    Returns the signature's path. Raises `Refusal` if one is there already, the list is no longer the one that was
    verified, or ssh-keygen does not sign.
    """
    target = bundle.path / sums.SIGNATURE_NAME
    if target.exists() or target.is_symlink():
        fix = "a signature is never written over: move it out of the bundle, then sign again"
        raise Refusal(Fault("bundle is signed", str(target), "no signature yet", "one", fix))
    raw = _list(bundle.path, bundle.root)
    with tempfile.TemporaryDirectory(prefix="ferry-sign-") as folder:
        copy = Path(folder) / sums.LIST_NAME
        copy.write_bytes(raw)
        fix = "give a private key that ssh-keygen can read, or the public key of one that your agent holds"
        process.run(
            ["ssh-keygen", "-Y", "sign", "-f", key.absolute(), "-n", NAMESPACE, copy],
            fix=fix, timeout_s=_TIMEOUT_S,
        )  # fmt: skip
        write_file(target, copy.with_name(sums.SIGNATURE_NAME).read_bytes())
    return target


def signer_of(bundle: Bundle, signers: Path, identity: str | None = None) -> str:
    """Return who signed `bundle`: a principal of the allowed-signers file `signers`, and `identity` if that is given.

    Raises `Refusal` if the bundle is not signed, or not by one of them, or another list was signed.
    """
    path = bundle.path / sums.SIGNATURE_NAME
    raw = _list(bundle.path, bundle.root)
    wanted = f"a signature by {identity or 'one of ' + str(signers)}"
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            signature = file.read(_LIMIT_BYTES)
    except OSError as error:
        fix = "fetch SHA256SUMS.sig too, or have the bundle signed with `ferry sign`"
        raise Refusal(Fault("not signed", str(path), wanted, os.strerror(error.errno or 0), fix)) from error
    with tempfile.TemporaryDirectory(prefix="ferry-sign-") as folder:
        signed, listed = Path(folder) / "signature", Path(folder) / "list"
        signed.write_bytes(signature)
        listed.write_bytes(raw)
        who = identity or _principal(signed, signers, path, wanted)
        command: list[str | Path] = [
            "ssh-keygen",
            "-Y",
            "verify",
            "-f",
            signers.absolute(),
            "-I",
            who,
            "-n",
            NAMESPACE,
            "-s",
            signed,
        ]
        done = process.run(command, fix=_FIX, check=False, stdin=listed, timeout_s=_TIMEOUT_S)
    if done.status != 0:
        raise Refusal(Fault("wrong signature", str(path), wanted, done.output.strip() or "another", _FIX))
    return who


_FIX = "do not use this bundle before you know who made it; fetch list and signature again from its packer"


def refuse_odd_trust(
    *, quick: bool, paranoid: bool, root: str | None, signers: Path | None, identity: str | None
) -> None:
    """Raise `Refusal` for options of a verification that contradict each other, or that could not protect anyone."""
    faults = []
    if quick and paranoid:
        faults.append(
            Fault("options contradict", "--quick", "one of --quick and --paranoid", "both", "leave one out")
        )
    if root is not None and not _ROOT.fullmatch(root):
        fix = "copy it from the packer's output, or from `sha256sum SHA256SUMS` there"
        faults.append(Fault("not a root", "--root", "sha256: and 64 hex digits", root, fix))
    if identity is not None and signers is None:
        fix = "add --signers ALLOWED_SIGNERS: a name alone proves nothing"
        faults.append(Fault("no signers", "--identity", "--signers beside it", "nothing", fix))
    if signers is not None and not signers.is_file():
        fix = 'see ALLOWED SIGNERS in `man ssh-keygen`: a name, namespaces="ferry", a public key; one a line'
        faults.append(Fault("no signers", str(signers), "an allowed_signers file", "no such file", fix))
    refuse_if(faults, ExitCode.USAGE)


def _principal(signature: Path, signers: Path, shown: Path, wanted: str) -> str:
    """The principal in `signers` that the key of `signature` belongs to."""
    command: list[str | Path] = [
        "ssh-keygen",
        "-Y",
        "find-principals",
        "-s",
        signature,
        "-f",
        signers.absolute(),
    ]
    done = process.run(command, fix=_FIX, check=False, timeout_s=_TIMEOUT_S)
    found = done.output.strip()
    if done.status != 0 or not found:
        raise Refusal(Fault("wrong signature", str(shown), wanted, found or "a key that is not there", _FIX))
    return found.splitlines()[0].split(",")[0]


def _list(folder: Path, root: str) -> bytes:
    """The list's bytes, if they are still those of `root`."""
    path = folder / sums.LIST_NAME
    raw = path.read_bytes()
    found = "sha256:" + sha256_bytes(raw)
    if found != root:
        fix = "it changes while it is read: stop that, then verify again"
        raise Refusal(Fault("root differs", str(path), root, found, fix))
    return raw
