"""A bundle as it lies on disk: its list, and the set of its files. The first two stages of verifying, and cheap.

Promises: what `open_bundle` returns has a well-formed list (rules B3 to B8), exactly the files of the list (B1), and
nothing but regular files and folders (B2); no byte of a listed file was read.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from runner import sums
from runner.errors import Fault, Refusal, refuse_if
from runner.inside.digests import sha256_bytes

FETCH_AGAIN = "fetch this file again from where the bundle was packed"


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A directory with a well-formed list whose files are all there, and no others. Not yet trusted."""

    path: Path
    digests: Mapping[str, str]
    sizes: Mapping[str, int]
    root: str

    @property
    def size_bytes(self) -> int:
        """The size of all listed files together."""
        return sum(self.sizes.values())


def open_bundle(path: Path, *, root: str | None = None) -> Bundle:
    """Read the list of the bundle at `path` and compare it with the files that are there.

    `root` ('sha256:...') is what the list must hash to, where the user knows it. Raises `Refusal` with every fault: no
    list, another list than `root` says, a bad list (see `sums.parse`), files missing, unexpected or unsafe.
    """
    where = path / sums.LIST_NAME
    try:
        raw = where.read_bytes()
    except OSError as error:
        fix = "give the folder that holds SHA256SUMS; a bundle without one is not complete"
        raise Refusal(
            Fault("not a bundle", str(where), "the list of its files", os.strerror(error.errno or 0), fix)
        ) from error
    found = "sha256:" + sha256_bytes(raw)
    if root not in (None, found):
        fix = "this is another bundle, or its list was changed: fetch it again from where the root came from"
        raise Refusal(Fault("root differs", str(where), str(root), found, fix))
    digests = sums.parse(raw, str(where))
    faults: list[Fault] = []
    sizes = _walk(path, faults)
    for name in (sums.LIST_NAME, sums.SIGNATURE_NAME):
        sizes.pop(name, None)
    unsafe = {fault.where for fault in faults}
    for name in digests.keys() - sizes.keys():
        if str(path / name) not in unsafe:
            faults.append(
                Fault("missing", str(path / name), "a file, as listed", "no such file", FETCH_AGAIN)
            )
    for name in sizes.keys() - digests.keys():
        fix = "move it out of the bundle; a bundle is never written to"
        faults.append(Fault("unexpected", str(path / name), "only listed files", f"{sizes[name]} bytes", fix))
    refuse_if(sorted(faults, key=lambda fault: fault.where))
    return Bundle(path, digests, sizes, found)


def read_listed(bundle: Bundle, name: str) -> bytes:
    """Return the bytes of a small file, which must be those that were hashed: what is used is what was verified."""
    raw = (bundle.path / name).read_bytes()
    if sha256_bytes(raw) != bundle.digests[name]:
        where, fix = str(bundle.path / name), "it changes while it is read: stop that, then verify again"
        raise Refusal(
            Fault("mismatch", where, f"sha256 {bundle.digests[name]}", f"sha256 {sha256_bytes(raw)}", fix)
        )
    return raw


def _walk(root: Path, faults: list[Fault]) -> dict[str, int]:
    """Relative path -> size of every regular file below `root`; links, devices and unreadable folders are faults."""
    sizes: dict[str, int] = {}
    pending = [("", root)]
    while pending:
        prefix, folder = pending.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            faults.append(
                Fault("cannot be read", str(folder), "a readable folder", str(error), "mend its permissions")
            )
            continue
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                pending.append((f"{prefix}{entry.name}/", Path(entry.path)))
            elif stat.S_ISREG(status.st_mode):
                sizes[prefix + entry.name] = status.st_size
            else:
                found = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "a device, socket or pipe"
                faults.append(Fault("unsafe", entry.path, "a regular file or a folder", found, FETCH_AGAIN))
    return sizes
