"""Laying a bundle's files into a run folder: as links, as clones or as copies, never another way than was asked for.

Promises: a copy is what the list says (`copying`); a link or clone that the file system cannot make is refused with the
remedy; sources are never written to.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import fcntl
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from runner.copying import copy_all
from runner.errors import Fault, Refusal, refuse_if
from runner.inside.digests import Hashed, Stamp

Progress = Callable[[int], None]

# linux/fs.h: _IOW(0x94, 9, int)
_FICLONE = 0x40049409
_OTHER_FILE_SYSTEM = (errno.EXDEV,)
_UNABLE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS, errno.EPERM)
_SETTLED_NS = 2_000_000_000


def lay(
    source: Path,
    digests: Mapping[str, str],
    target: Path,
    mode: str,
    *,
    known: Mapping[str, Hashed],
    on_bytes: Progress | None = None,
    go_on: bool = False,
) -> dict[str, Hashed]:
    """Lay the files of `digests` (path -> SHA-256 in hex) below `source` into the folder `target`, by `mode`.

    Returns what lies there now; `known` are the sources as they were verified: a link or clone is taken to be what its
    source was. With `go_on`, copying goes on from what an earlier call left in `target`. Raises `Refusal` with every
    file that cannot be laid, or whose copy is not what its digest says.
    """
    if mode == "copy":
        files = {name: source / name for name in digests}
        return copy_all(files, target, expected=digests, on_bytes=on_bytes, go_on=go_on)
    for folder in sorted({(target / name).parent for name in digests}):
        folder.mkdir(parents=True, exist_ok=True)
    step = {"hardlink": _hardlink, "reflink": _reflink}[mode]
    order = sorted(digests, key=lambda name: (-(source / name).lstat().st_size, name))

    def work(name: str) -> Hashed | Fault:
        try:
            return step(source / name, target / name, digests[name], known.get(name), on_bytes)
        except Refusal as refusal:
            return refusal.faults[0]

    with concurrent.futures.ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
        results = dict(zip(order, pool.map(work, order), strict=True))
    refuse_if(found for found in results.values() if isinstance(found, Fault))
    return {name: found for name, found in results.items() if isinstance(found, Hashed)}


def _hardlink(
    source: Path, target: Path, digest: str, known: Hashed | None, on_bytes: Progress | None
) -> Hashed:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        fix = (
            "put the run folder on the bundle's file system, or use --mode mount (which needs no link) or copy"
            if error.errno in _OTHER_FILE_SYSTEM
            else "use --mode mount, which needs no link, or copy"
        )
        raise Refusal(
            Fault("cannot be linked", str(target), f"a link to {source}", str(error), fix)
        ) from error
    return _as_known(target, digest, known, on_bytes)


def _reflink(
    source: Path, target: Path, digest: str, known: Hashed | None, on_bytes: Progress | None
) -> Hashed:
    reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(reading, "rb", buffering=0), target.open("xb", buffering=0) as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reading)
            os.fsync(writer.fileno())
        except OSError as error:
            expected = (
                "a file system that shares blocks (XFS, Btrfs, bcachefs), the same for bundle and run folder"
            )
            fix = "use --mode mount, which copies nothing, or copy; a clone is never replaced by a copy in silence"
            what = "cannot be cloned" if error.errno in _UNABLE else "cannot be read or written"
            raise Refusal(Fault(what, str(target), expected, str(error), fix)) from error
    return _as_known(target, digest, known, on_bytes)


def _as_known(target: Path, digest: str, known: Hashed | None, on_bytes: Progress | None) -> Hashed:
    """The digest of what `target` shares its bytes with, if those are the verified ones still."""
    status = target.lstat()
    if on_bytes is not None:
        on_bytes(status.st_size)
    if known is None or known.size_bytes != status.st_size:
        return Hashed(digest, status.st_size, None)
    return Hashed(digest, status.st_size, Stamp.of(status) if _unchanged(known, status) else None)


def _unchanged(known: Hashed, status: os.stat_result) -> bool:
    """Whether `status` is of the very file in `known`, which nothing but a new link has touched since."""
    stamp = known.stamp
    return stamp is not None and (stamp.device, stamp.inode, stamp.mtime_ns) == (
        status.st_dev,
        status.st_ino,
        status.st_mtime_ns,
    )


def settled(hashed: Mapping[str, Hashed], now_ns: int) -> dict[str, Hashed]:
    """Return `hashed` without the stamps that are too fresh to tell a later change."""
    return {
        name: entry
        if entry.stamp is None or now_ns - max(entry.stamp.mtime_ns, entry.stamp.ctime_ns) > _SETTLED_NS
        else dataclasses.replace(entry, stamp=None)
        for name, entry in hashed.items()
    }
