"""The command line of trust: `ferry verify` and `ferry sign`; and the words that all commands share.

Promises: as `runner.cli`, which holds the other commands.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from runner import screen, signature
from runner.ready import verified as verified_bundle
from runner.verify import Bundle

BundleArgument = Annotated[Path, typer.Argument(help="the bundle's folder", metavar="BUNDLE")]
SpecOption = Annotated[
    Path | None, typer.Option("--spec", help="the run spec of a bundle from elsewhere, which has none inside")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="check everything, show the plan, change nothing")
]


def emit(as_json: bool, value: Any, text: str) -> None:
    """Print `value` as JSON (a number that is not finite as null: JSON has none), or `text`."""
    if as_json:
        print(json.dumps(_finite(value), indent=2, sort_keys=True, allow_nan=False))
    else:
        screen.out.print(text, markup=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def verify_command(
    bundle: BundleArgument,
    quick: Annotated[
        bool, typer.Option("--quick", help="trust files that did not change since they were verified")
    ] = False,
    paranoid: Annotated[
        bool, typer.Option("--paranoid", help="read every byte, also what an interrupted verify had read")
    ] = False,
    root: Annotated[
        str | None, typer.Option("--root", help="refuse any other bundle than that of this root, sha256:...")
    ] = None,
    signers: Annotated[
        Path | None,
        typer.Option("--signers", help="refuse unless signed by one of this allowed_signers file"),
    ] = None,
    identity: Annotated[
        str | None, typer.Option("--identity", help="with --signers: refuse unless signed by this one")
    ] = None,
    spec: SpecOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every byte of a bundle and check what the bytes mean; go on where an interrupted verify was."""
    signature.refuse_odd_trust(quick=quick, paranoid=paranoid, root=root, signers=signers, identity=identity)
    by: list[str] = []

    def check(opened: Bundle) -> None:
        if signers is not None:
            by.append(signature.signer_of(opened, signers, identity))

    verified = verified_bundle(
        bundle, use_memory=quick, spec=spec, paranoid=paranoid, root=root, on_opened=check
    )
    value = {
        "bundle": str(verified.path),
        "root": verified.root,
        "files": len(verified.digests),
        "signed_by": by[0] if by else None,
        "notes": [dataclasses.asdict(note) for note in verified.notes],
        "verdict": "verified",
    }
    described = verified.spec
    state = f"update {described.from_update} of {described.updates}"
    emit(
        as_json,
        value | {"run": described.name, "update": described.from_update},
        f"VERIFIED {described.name} at {state}, root {verified.root}"
        + "".join(f", signed by {who}" for who in by),
    )


def sign_command(
    bundle: BundleArgument,
    key: Annotated[Path, typer.Option("--key", help="an SSH private key, or the public one of an agent's")],
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Verify a bundle, then sign its list with an SSH key: SHA256SUMS.sig appears beside the list."""
    verified = verified_bundle(bundle, use_memory=True)
    if dry_run:
        emit(as_json, {"root": verified.root}, f"would sign root {verified.root} with {key}")
        return
    path = signature.sign(verified, key)
    emit(as_json, {"root": verified.root, "signature": str(path)}, f"SIGNED {path}, root {verified.root}")
