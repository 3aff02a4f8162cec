"""A server's copies of what a bundle does not carry: found, and known by their content.

Promises: an asset is used only when it is what the run spec says (kind, and hash where it has one); a link inside a
model cache that leads nowhere or outside of it is refused by name; nothing is written.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from runner import sums
from runner.errors import Fault
from runner.inside.digests import hash_file, hash_files, sha256_bytes
from runner.inside.tree import blob_id, tree_id
from runner.manifest import parse_row
from runner.spec import Asset, RunSpec

Progress = Callable[[int], None]

_BRING = "bring it to this server, or mend the profile's path"
_ANOTHER = "bring the very one that the run was trained with; another version is another run"
_LIMIT_FAULTS = 20
_STEP_ROWS = 500


@dataclasses.dataclass(frozen=True)
class Content:
    """The files of an asset: relative path -> where its bytes lie."""

    files: Mapping[str, Path]

    def list_digest(self, on_bytes: Progress | None) -> str:
        """Return the SHA-256 of the sorted list of the files. Raises OSError if one cannot be read."""
        digests = {}
        targets = {name: os.fspath(path) for name, path in self.files.items()}
        hashed = hash_files(Path("/"), set(targets.values()), on_bytes=on_bytes)
        for name, path in targets.items():
            found = hashed[path]
            if isinstance(found, OSError):
                raise found
            digests[name] = found.sha256
        return "sha256:" + sha256_bytes(sums.render(digests))


def asset_faults(name: str, asset: Asset, host: Path, on_bytes: Progress | None) -> list[Fault]:
    """Return what is wrong with `host` as this server's copy of `asset`."""
    where = f"asset '{name}' at {host}"
    if not (host.is_file() if asset.kind == "file" else host.is_dir()):
        found = "another kind of entry" if host.exists() else "nothing"
        return [Fault("asset missing", where, f"a {_noun(asset)}", found, _BRING)]
    faults: list[Fault] = []
    try:
        expected, found = _identity(asset, host, where, faults, on_bytes)
    except OSError as error:
        return [Fault("asset cannot be read", where, "readable files", str(error), "mend its permissions")]
    if not faults and expected != found:
        faults.append(Fault("asset is another one", where, expected, found, _ANOTHER))
    return faults


def size_of(asset: Asset, host: Path) -> int:
    """Return how many bytes identifying `asset` will read; 0 for what is not there."""
    if asset.kind == "file":
        return host.stat().st_size if host.is_file() else 0
    if asset.kind == "folder" or not host.is_dir():
        return 0
    root = host / "snapshots" / str(asset.revision) if asset.kind == "hub" else host
    ignored: list[Fault] = []
    return sum(path.stat().st_size for path in files_below(root, host / "blobs", "", ignored).values())


def images_faults(
    manifest: Path, spec: RunSpec, host: Path, on_rows: Callable[[int], None] | None = None
) -> list[Fault]:
    """Return a fault for the first 20 files that the rows of `manifest` name and `host` does not hold, and a count."""
    prefix = len(spec.assets[spec.data.root].origin.rstrip("/")) + 1
    faults: list[Fault] = []
    missing = 0
    with manifest.open("rb") as file:
        for number, line in enumerate(file, 1):
            row = parse_row(line)
            for column in spec.data.path_columns:
                path = host / row[column][prefix:]
                if path.is_file():
                    continue
                missing += 1
                if missing <= _LIMIT_FAULTS:
                    where = f"{manifest}:{number}: {column}"
                    faults.append(Fault("image missing", where, "a file", f"none at {path}", _BRING))
            if on_rows is not None and number % _STEP_ROWS == 0:
                on_rows(_STEP_ROWS)
    if missing > _LIMIT_FAULTS:
        found = f"{missing} files missing, of which the first {_LIMIT_FAULTS} are named"
        faults.append(Fault("images missing", str(host), "every file that the manifest names", found, _BRING))
    return faults


def files_below(root: Path, blobs: Path | None, where: str, faults: list[Fault]) -> dict[str, Path]:
    """Return the files below `root`: relative path -> where the bytes lie. What is no plain file becomes a fault.

    With `blobs`, a link that leads to a regular file in that folder stands for its content. A `.git` at the top is
    not part of a tree.
    """
    found: dict[str, Path] = {}
    pending = [("", root)]
    while pending:
        prefix, folder = pending.pop()
        for entry in os.scandir(folder):
            name = prefix + entry.name
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                if name != ".git":
                    pending.append((name + "/", Path(entry.path)))
            elif stat.S_ISREG(mode):
                found[name] = Path(entry.path)
            elif stat.S_ISLNK(mode) and blobs is not None:
                target = _blob(Path(entry.path), blobs)
                if isinstance(target, Path):
                    found[name] = target
                else:
                    fix = "download the model again: a cache's links lead into its own blobs/"
                    faults.append(Fault("unsafe", f"{where}: {name}", f"a link into {blobs}", target, fix))
            else:
                kind = "a link" if stat.S_ISLNK(mode) else "a device, socket or pipe"
                faults.append(
                    Fault("unsafe", f"{where}: {name}", "regular files and folders", kind, "remove it")
                )
    return found


def _blob(link: Path, blobs: Path) -> Path | str:
    """Where `link` leads, if that is a file in `blobs`; else what is wrong with it."""
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):
        return f"a link to {link.readlink()}, which is not there"
    if not target.is_relative_to(blobs.resolve()):
        return f"a link to {target}, outside of it"
    return target if target.is_file() else f"a link to {target}, not a file"


def _identity(
    asset: Asset, host: Path, where: str, faults: list[Fault], on_bytes: Progress | None
) -> tuple[str, str]:
    """What `asset` must be, and what `host` is."""
    match asset.kind:
        case "file":
            return str(asset.sha256), "sha256:" + hash_file(host.resolve(), on_bytes).sha256
        case "tree":
            files = files_below(host, None, where, faults)
            if asset.tree is None:
                return str(asset.sha256), Content(files).list_digest(on_bytes)
            blobs = {
                name: (os.access(path, os.X_OK), blob_id(path.read_bytes())) for name, path in files.items()
            }
            return f"tree {asset.tree}", f"tree {tree_id(blobs)}"
        case "hub":
            snapshot = host / "snapshots" / str(asset.revision)
            if not snapshot.is_dir():
                revisions = sorted(path.name for path in (host / "snapshots").glob("*")) or ["none"]
                return f"revision {asset.revision}", f"revisions {', '.join(revisions)}"
            files = files_below(snapshot, host / "blobs", where, faults)
            return str(asset.sha256), Content(files).list_digest(on_bytes) if not faults else ""
        case _:
            return "", ""


def _noun(asset: Asset) -> str:
    return {"hub": "model's folder in a cache", "tree": "source tree"}.get(asset.kind, asset.kind)
