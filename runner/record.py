"""Writing what must survive a crash: whole or not at all, and in one form only.

Promises: `write_file` leaves the old content or the new, never a mixture, also after a power loss; `to_json` gives the
same bytes for the same value.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import rfc8785

from runner.errors import Fault, Refusal


def write_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Put `content` at `path`: written aside, fsynced, renamed, and the folder fsynced. Missing parents are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append_line(path: Path, line: bytes) -> None:
    """Append `line` and a line feed to `path` in one write, and fsync it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    with open(descriptor, "ab", buffering=0) as file:
        file.write(line + b"\n")
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the entries of `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(value: Any) -> bytes:
    """Return `value` as indented JSON with sorted keys and a final line feed, for people and for machines."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=True).encode() + b"\n"


def canonical(value: Any) -> bytes:
    """Return `value` as canonical JSON (RFC 8785), for hashing and signing."""
    return rfc8785.dumps(value)


def read_json(path: Path, what: str, fix: str) -> dict[str, Any]:
    """Return the JSON object at `path`. Raises `Refusal` calling it `what` when it is absent or damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(Fault(f"no {what}", str(path), "a JSON object", str(error), fix)) from error
    if not isinstance(value, dict):
        raise Refusal(Fault(f"no {what}", str(path), "a JSON object", type(value).__name__, fix))
    return value


def cache_folder() -> Path:
    """Return the folder for what may be lost: `$XDG_CACHE_HOME/ferry`, by default `~/.cache/ferry`.

    Raises OSError if there is none: a shared folder such as /tmp would let others plant what is remembered.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = os.environ.get("HOME", "")
    if base.startswith("/"):
        return Path(base) / "ferry"
    if home.startswith("/"):
        return Path(home) / ".cache" / "ferry"
    raise FileNotFoundError("neither HOME nor XDG_CACHE_HOME names a folder for what may be lost")
