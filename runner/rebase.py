"""This server's data in the place of the origin's, and the proof that nothing else changed.

Promises: an asset is used only when it is what the run spec says (kind, and hash of a file); by mount, no byte of
contract, manifest or checkpoint changes, so that they are identical on every server; what was done stands in
REBASE_RECORD.json, as JSON Patch (RFC 6902) with hashes before and after.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.errors import Fault, refuse_if
from runner.inside.digests import hash_file
from runner.server import ServerProfile
from runner.spec import Asset
from runner.verify import VerifiedBundle

# Folders of the container that belong to the image, the kernel or the launch plan: no asset is mounted over them.
RESERVED = (
    "/ferry",
    "/opt/ferry",
    "/opt/venv",
    "/proc",
    "/sys",
    "/dev",
    "/etc",
    "/usr",
    "/bin",
    "/lib",
    "/lib64",
    "/tmp",
)


@dataclasses.dataclass(frozen=True)
class RebasedAsset:
    """An asset that was found on this server: `host` stands in for `origin`."""

    name: str
    kind: str
    origin: str
    host: Path
    sha256: str | None


@dataclasses.dataclass(frozen=True)
class RebasedInputs:
    """A verified bundle and the assets of this server that it will run with. Only `rebase` makes one."""

    bundle: VerifiedBundle
    server: ServerProfile
    assets: tuple[RebasedAsset, ...]

    def record(self) -> dict[str, Any]:
        """Return what REBASE_RECORD.json holds."""
        spec = self.bundle.spec
        checkpoint = self.bundle.checkpoint
        unchanged = {
            "manifest": {"before": spec.data.sha256, "after": spec.data.sha256},
            "fingerprint": {"before": spec.data.fingerprint, "after": spec.data.fingerprint},
        }
        if checkpoint is not None:
            contract = f"sha256:{checkpoint.contract}"
            inventory = f"sha256:{checkpoint.inventory}"
            unchanged["contract"] = {"before": contract, "after": contract}
            unchanged["checkpoint"] = {"before": inventory, "after": inventory}
        return {
            "ferry": 1,
            "bundle": self.bundle.root,
            "server": self.server.name,
            "mode": "mount",
            "patch": [],
            "unchanged": unchanged,
            "mounts": [
                {"asset": asset.name, "origin": asset.origin, "host": str(asset.host), "sha256": asset.sha256}
                for asset in self.assets
            ],
        }


def rebase(
    bundle: VerifiedBundle, server: ServerProfile, on_bytes: Callable[[int], None] | None = None
) -> RebasedInputs:
    """Find every asset of `bundle` on `server`. Reads the files among them once, to know them by their hash.

    Raises `Refusal` with every asset that the profile does not name, or that is absent, of another kind or hash.
    """
    faults: list[Fault] = []
    found: list[RebasedAsset] = []
    for name, asset in sorted(bundle.spec.assets.items()):
        host = server.assets.get(name)
        if host is None:
            fix = f"add to the server profile, under assets: '{name}: PATH', this server's copy of {asset.origin}"
            faults.append(
                Fault(
                    "asset not in the profile", f"server {server.name}: assets", f"'{name}'", "nothing", fix
                )
            )
            continue
        faults += _origin_faults(name, asset)
        faults += _asset_faults(name, asset, Path(host), on_bytes)
        found.append(RebasedAsset(name, asset.kind, asset.origin, Path(host), asset.sha256))
    refuse_if(faults)
    return RebasedInputs(bundle, server, tuple(found))


def _origin_faults(name: str, asset: Asset) -> list[Fault]:
    if asset.origin == "/" or any(
        asset.origin == folder or asset.origin.startswith(folder + "/") for folder in RESERVED
    ):
        fix = "no run should know its data by such a path; rewrite the field instead of mounting"
        where = f"run.yaml: assets.{name}.origin"
        return [
            Fault(
                "origin cannot be mounted over",
                where,
                "a path outside of " + ", ".join(RESERVED),
                asset.origin,
                fix,
            )
        ]
    return []


def _asset_faults(name: str, asset: Asset, host: Path, on_bytes: Callable[[int], None] | None) -> list[Fault]:
    where = f"asset '{name}' at {host}"
    right_kind = host.is_file() if asset.kind == "file" else host.is_dir()
    if not right_kind:
        found = "nothing" if not host.exists() else "another kind of entry"
        return [
            Fault(
                "asset missing",
                where,
                f"a {asset.kind}",
                found,
                "bring it to this server, or mend the profile's path",
            )
        ]
    if asset.sha256 is None:
        return []
    try:
        sha256 = "sha256:" + hash_file(host.resolve(), on_bytes).sha256
    except OSError as error:
        return [Fault("asset cannot be read", where, asset.sha256, str(error), "mend its permissions")]
    if sha256 != asset.sha256:
        fix = "bring the very file that the run was trained with; another version is another run"
        return [Fault("asset is another one", where, asset.sha256, sha256, fix)]
    return []
