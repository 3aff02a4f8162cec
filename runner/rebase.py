"""This server's data in the place of the origin's, and the proof that nothing else changed.

Promises: an asset is used only when it is what the run spec says; by mount, no byte of contract, manifest or checkpoint
changes, so that they are identical on every server; by rewriting, only declared fields change; what was done stands in
REBASE_RECORD.json, as JSON Patch (RFC 6902) with hashes before and after.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from runner import assets, changes, origin_paths
from runner.changes import CONTAINER_ROOT, Places, RewrittenFile
from runner.errors import Fault, refuse_if
from runner.invariants import invariant_faults
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
# How the bundle's checkpoint comes into the run folder: not at all (mount), or as files of its own.
Mode = Literal["mount", "hardlink", "reflink", "copy"]


@dataclasses.dataclass(frozen=True)
class RebasedAsset:
    """An asset that was found on this server: `host` stands in for `origin`, and the run finds it at `inside`."""

    name: str
    kind: str
    origin: str
    host: Path
    inside: str
    sha256: str | None


@dataclasses.dataclass(frozen=True)
class RebasedInputs:
    """A verified bundle and what of it differs on this server. Only `rebase` makes one.

    `warnings` name what the run may stumble over later, and what to do about it.
    """

    bundle: VerifiedBundle
    server: ServerProfile
    assets: tuple[RebasedAsset, ...]
    files: tuple[RewrittenFile, ...] = ()
    mode: Mode = "mount"
    warnings: tuple[Fault, ...] = ()

    @property
    def digests(self) -> dict[str, str]:
        """Path -> SHA-256 in hex of every file of the bundle as the run sees it."""
        return dict(self.bundle.digests) | {file.path: file.sha256_after for file in self.files}

    @property
    def checkpoint(self) -> str | None:
        """The path in the bundle of the checkpoint's folder, if there is one."""
        checkpoint = self.bundle.spec.checkpoint
        return None if checkpoint == "fresh" else checkpoint.path

    @property
    def inventory(self) -> str | None:
        """The SHA-256 in hex of the checkpoint's inventory, as the run sees it."""
        from runner.inside.census import INVENTORY

        return self.digests[f"{self.checkpoint}/{INVENTORY}"] if self.checkpoint else None

    @property
    def contract(self) -> str | None:
        """The SHA-256 in hex of the resume contract, as the run sees it."""
        from runner.inside.census import CONTRACT

        return self.digests[f"{self.checkpoint}/{CONTRACT}"] if self.checkpoint else None

    def record(self) -> dict[str, Any]:
        """Return what REBASE_RECORD.json holds."""
        data = self.bundle.spec.data
        checkpoint = self.bundle.checkpoint
        after = self.digests
        compared = {
            "manifest": (data.sha256, f"sha256:{after[data.manifest]}"),
            # The root is all that changes in a row, and the fingerprint is taken relative to it.
            "fingerprint": (data.fingerprint, data.fingerprint),
        }
        if checkpoint is not None:
            compared["contract"] = (f"sha256:{checkpoint.contract}", f"sha256:{self.contract}")
            compared["checkpoint"] = (f"sha256:{checkpoint.inventory}", f"sha256:{self.inventory}")
        pairs = {name: {"before": old, "after": new} for name, (old, new) in compared.items()}
        return {
            "ferry": 1,
            "bundle": self.bundle.root,
            "server": self.server.name,
            "mode": self.mode,
            "files": [_file_record(file) for file in self.files],
            "unchanged": {name: pair for name, pair in pairs.items() if pair["before"] == pair["after"]},
            "changed": {name: pair for name, pair in pairs.items() if pair["before"] != pair["after"]},
            "assets": [
                {
                    "asset": asset.name,
                    "origin": asset.origin,
                    "host": str(asset.host),
                    "inside": asset.inside,
                    "sha256": asset.sha256,
                }
                for asset in self.assets
            ],
            "warnings": [dataclasses.asdict(warning) for warning in self.warnings],
        }


def rebase(
    bundle: VerifiedBundle,
    server: ServerProfile,
    on_bytes: Callable[[int], None] | None = None,
    *,
    mode: Mode = "mount",
    output: str | None = None,
    known: Mapping[str, RewrittenFile] | None = None,
    drafts: Path | None = None,
) -> RebasedInputs:
    """Find every asset of `bundle` on `server`, and work out what the declared fields become there.

    Reads the assets that have a hash once. `output` is the run's output folder as it sees it itself (needed without
    containers); `known` is the manifest as it was rewritten before; `drafts` a folder on the run folder's file system,
    for a manifest that is rewritten now (in a file without a name). Raises `Refusal` with every asset that the profile
    does not name, or that is absent, of another kind or hash; then with every field that cannot be rewritten.
    """
    faults = invariant_faults(bundle.path, bundle.spec)
    found: list[RebasedAsset] = []
    mounted = set(bundle.spec.rebase.mount)
    docker = server.engine == "docker"
    for name, asset in sorted(bundle.spec.assets.items()):
        host = server.assets.get(name)
        if host is None:
            fix = f"add to the server profile, under assets: '{name}: PATH', this server's copy of {asset.origin}"
            where = f"server {server.name}: assets"
            faults.append(Fault("asset not in the profile", where, f"'{name}'", "nothing", fix))
            continue
        faults += _origin_faults(name, asset) if docker and name in mounted else []
        faults += assets.asset_faults(name, asset, Path(host), on_bytes)
        at_home = f"{CONTAINER_ROOT}/assets/{name}" if docker else host
        inside = asset.origin if name in mounted else at_home
        found.append(RebasedAsset(name, asset.kind, asset.origin, Path(host), inside, asset.sha256))
    faults += _nested_faults(
        {name: bundle.spec.assets[name] for name in sorted(mounted & bundle.spec.assets.keys())}
    )
    refuse_if(faults)
    places = Places({asset.name: asset.inside for asset in found}, output or f"{CONTAINER_ROOT}/run", drafts)
    files = changes.rewritten(bundle, server, places, known or {}, on_bytes)
    if files and not docker and mode == "mount":
        fix = "prepare with --mode hardlink, reflink or copy; or use the docker engine, which mounts them"
        names = ", ".join(file.path for file in files)
        refuse_if(
            [
                Fault(
                    "nothing to mount with",
                    f"server {server.name}: engine",
                    "docker",
                    f"venv, while {names} change",
                    fix,
                )
            ]
        )
    warnings = origin_paths.paths_left(bundle, files, places)
    return RebasedInputs(bundle, server, tuple(found), files, mode, warnings)


def _origin_faults(name: str, asset: Asset) -> list[Fault]:
    """A mount at `origin` must neither lie in a folder of the container's own, nor hide one."""
    if any(_within(asset.origin, folder) or _within(folder, asset.origin) for folder in RESERVED):
        fix = "no run should know its data by such a path; rewrite the field instead of mounting"
        where = f"run.yaml: assets.{name}.origin"
        expected = "a path outside of, and not above, " + ", ".join(RESERVED)
        return [Fault("origin cannot be mounted over", where, expected, asset.origin, fix)]
    return []


def _nested_faults(mounted: Mapping[str, Asset]) -> list[Fault]:
    """Mounts inside one another, or twice at one path: what the run would see depends on their order."""
    return [
        Fault(
            "origins lie inside one another",
            f"run.yaml: assets.{inner}.origin",
            f"a path outside of {mounted[outer].origin} (asset '{outer}')",
            mounted[inner].origin,
            "rewrite one of the two fields instead of mounting",
        )
        for outer in mounted
        for inner in mounted
        if inner != outer and _within(mounted[inner].origin, mounted[outer].origin)
    ]


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _file_record(file: RewrittenFile) -> dict[str, Any]:
    record: dict[str, Any] = {
        "path": file.path,
        "sha256": {"before": f"sha256:{file.sha256_before}", "after": f"sha256:{file.sha256_after}"},
        "bytes": file.size_bytes,
    }
    if file.moved is not None:
        record["columns"] = {
            "names": list(file.moved.columns),
            "rows": file.moved.rows,
            "root": {"before": file.moved.before, "after": file.moved.after},
            "written": {
                "after": file.moved.text_after,
                "before": [dataclasses.asdict(run) for run in file.moved.runs],
            },
        }
        return record
    # `test` first: the patch fits no document but the one that it was made of. Members that RFC 6902 does not know are
    # passed over by whoever applies it; `written` brings back the very bytes.
    record["patch"] = [
        operation
        for edit in file.edits
        for operation in (
            {"op": "test", "path": edit.pointer, "value": edit.before},
            {
                "op": "replace",
                "path": edit.pointer,
                "value": edit.after,
                "why": file.why[edit.pointer],
                "written": {"before": edit.text_before, "after": edit.text_after},
            },
        )
    ]
    return record


def known_files(rebased: Mapping[str, Any]) -> dict[str, RewrittenFile]:
    """Return the manifest in what `prepare` recorded of the rewritten files, for `rebase` to take as it is."""
    return {
        path: RewrittenFile(path, str(entry["before"]), str(entry["after"]), int(entry["bytes"]))
        for path, entry in rebased.items()
        if entry["manifest"]
    }


def to_known(files: tuple[RewrittenFile, ...]) -> dict[str, dict[str, Any]]:
    """Return what `known_files` reads, of `files`."""
    return {
        file.path: {
            "before": file.sha256_before,
            "after": file.sha256_after,
            "bytes": file.size_bytes,
            "manifest": file.content is None,
        }
        for file in files
    }
