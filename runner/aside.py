"""A folder, or a file, that grows beside the name it will have, and gets that name when it is whole.

Promises: under `target` there is either nothing or all of it; whatever goes wrong, nothing that was made stays; what a
killed process left behind is removed by the next one, and what a living one is making is not. A copy that takes long
can stay, if it is interrupted, for the next attempt to go on from.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from runner.errors import ExitCode, Fault, Refusal
from runner.inside.digests import sha256_bytes
from runner.record import sync_folder


@contextlib.contextmanager
def growing(target: Path, doing: str) -> Iterator[Path]:
    """Give a new folder beside `target` (same file system, hidden, named after what is being `doing`).

    At the end it is renamed to `target` and its entry is durable; an exception removes it, and each parent of `target`
    that did not exist. The caller has seen that `target` is free: what appears there meanwhile is an OSError.
    """
    missing = [parent for parent in target.absolute().parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target, doing)
    folder = target.with_name(f".{target.name[:200]}.{doing}-{secrets.token_hex(4)}")
    try:
        folder.mkdir()
        with _held(folder):
            yield folder
            folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise
    sync_folder(target.parent)


@contextlib.contextmanager
def growing_file(target: Path, doing: str) -> Iterator[BinaryIO]:
    """Give a new file beside `target` to write; at the end it is durable and renamed. As `growing`, for one file."""
    _sweep(target, doing)
    path = target.with_name(f".{target.name[:200]}.{doing}-{secrets.token_hex(4)}")
    try:
        with path.open("xb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            os.fsync(file.fileno())
            path.rename(target)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


@contextlib.contextmanager
def going_on(target: Path, doing: str, key: str) -> Iterator[Path]:
    """Give the folder beside `target` in which an interrupted attempt at the same `key` may have left its work.

    It stays when Ctrl-C or SIGTERM interrupt (and after a kill or a power loss), and is removed by any other exception.
    At the end the caller has moved it. Raises `Refusal` if another process works in it, or it is not the caller's own.
    """
    folder = target.with_name(f".{target.name}.{doing}-{sha256_bytes(key.encode())[:12]}")
    folder.mkdir(mode=0o755, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.geteuid():
        fix = "remove it, or choose another --run: what lies there could be anybody's"
        raise Refusal(Fault("unsafe", str(folder), "a folder of this user", "another's, or a link", fix))
    try:
        with _held(folder):
            yield folder
    except BlockingIOError as error:
        fix = "wait until it has ended"
        fault = Fault("another one is at it", str(folder), "nobody", "a process that works there", fix)
        raise Refusal(fault, exit_code=ExitCode.LEASE_HELD) from error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _sweep(target: Path, doing: str) -> None:
    """Remove what processes that live no more had begun to make for `target`."""
    for found in target.parent.glob(f".{glob.escape(target.name[:200])}.{doing}-????????"):
        with contextlib.suppress(OSError), _held(found):
            if found.is_dir():
                shutil.rmtree(found, ignore_errors=True)
            else:
                found.unlink()


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Hold the lock of `path`; the kernel gives it back however the holder ends. Raises BlockingIOError if it is held."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
