"""Is the code archive what `git archive COMMIT` makes of the git bundle beside it? Proved by making it again.

Promises: git works in a new bare repository that is thrown away, with no hook, no configuration of user or system, no
network and no credential; nothing is checked out; the archive passes only if its tar bytes are git's, every one.
"""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from runner import process
from runner.errors import Fault, Refusal

_FIX = "make the archive with `git archive --format=tar COMMIT`, and the bundle with `git bundle create`, of one repository"
_GZIP = b"\x1f\x8b"
_CHUNK = 1 << 20
_TIMEOUT_S = 600.0


def faults_of(archive: Path, bundle: Path, commit: str | None) -> list[Fault]:
    """Return a fault unless `archive` (tar, or tar in gzip) is exactly `git archive COMMIT` out of the git bundle `bundle`."""
    if commit is None:
        fix = "name the commit in code.commit, or leave code.bundle out"
        return [Fault("no commit", str(bundle), "code.commit beside code.bundle", "none", fix)]
    with tempfile.TemporaryDirectory(prefix="ferry-git-") as folder:
        made = Path(folder) / "made.tar"
        try:
            _archive_again(Path(folder), bundle, commit, made)
        except Refusal as refusal:
            found = refusal.faults[0].found
            return [Fault("git cannot make the archive", str(bundle), f"commit {commit} in it", found, _FIX)]
        difference = _difference(archive, made)
    if difference is None:
        return []
    return [Fault("not the archive of its commit", str(archive), f"git archive {commit}", difference, _FIX)]


def _archive_again(folder: Path, bundle: Path, commit: str, target: Path) -> None:
    """Make `target` of `commit`; git reads the bundle's objects only, none of its references."""
    repository = folder / "repository"
    env = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": str(folder),
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_NO_REPLACE_OBJECTS": "1",
    }
    git = ["git", "-c", "core.hooksPath=/dev/null", "-c", f"safe.directory={repository}"]
    process.run(
        [*git, "init", "--quiet", "--bare", "--template=", repository],
        fix=_FIX,
        env=env,
        timeout_s=_TIMEOUT_S,
    )
    inside = [*git, f"--git-dir={repository}"]
    process.run(
        [*inside, "bundle", "unbundle", bundle.absolute()],
        fix=_FIX,
        env=env,
        cwd=folder,
        timeout_s=_TIMEOUT_S,
    )
    process.run([*inside, "cat-file", "-e", f"{commit}^{{commit}}"], fix=_FIX, env=env, timeout_s=_TIMEOUT_S)
    process.run(
        [*inside, "archive", "--format=tar", f"--output={target}", commit],
        fix=_FIX,
        env=env,
        timeout_s=_TIMEOUT_S,
    )


def _difference(archive: Path, made: Path) -> str | None:
    """Where the two first differ; None if they do not. What unpacks to more than git made is not read further."""
    with archive.open("rb") as file:
        zipped = file.read(len(_GZIP)) == _GZIP
    offset = 0
    try:
        with _open(archive, zipped=zipped) as left, made.open("rb") as right:
            while True:
                ours, theirs = left.read(_CHUNK), right.read(_CHUNK)
                if ours != theirs:
                    pairs = enumerate(zip(ours, theirs, strict=False))
                    at = next((at for at, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
                    return f"another byte, or an end, at {offset + at}"
                if not ours:
                    return None
                offset += len(ours)
    except (OSError, EOFError, zlib.error) as error:
        return f"damaged: {error}"


def _open(path: Path, *, zipped: bool) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, "rb")) if zipped else path.open("rb")
