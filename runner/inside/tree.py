"""The identity of a code tree: the object id that git gives to it.

Promises: equal to `git write-tree` for the same files; regular files and folders only, as a code archive may hold.
Source of the format: git's object model (tree entries sorted as bytes, folders as if their names ended in "/").
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from runner.errors import Fault, Refusal

Files = Mapping[str, tuple[bool, str]]


def blob_id(content: bytes) -> str:
    """Return git's object id, in hex, of a file with `content`."""
    return _object_id(b"blob", content)


def tree_id(files: Files) -> str:
    """Return git's object id, in hex, of the tree of `files`: relative path -> (executable, blob id)."""
    folders: dict[str, dict[str, tuple[bool, str]]] = {}
    entries: list[tuple[bytes, bytes, str]] = []
    for path, (executable, blob) in files.items():
        first, slash, rest = path.partition("/")
        if slash:
            folders.setdefault(first, {})[rest] = (executable, blob)
        else:
            entries.append((os.fsencode(first), b"100755" if executable else b"100644", blob))
    entries.extend((os.fsencode(name), b"40000", tree_id(inner)) for name, inner in folders.items())
    entries.sort(key=lambda entry: entry[0] + b"/" if entry[1] == b"40000" else entry[0])
    return _object_id(
        b"tree", b"".join(mode + b" " + name + b"\0" + bytes.fromhex(sha) for name, mode, sha in entries)
    )


def read_tree(root: Path) -> dict[str, tuple[bool, str]]:
    """Return the files below `root` in the form that `tree_id` takes.

    Raises `Refusal` naming every entry that is neither a regular file nor a folder, or cannot be read.
    """
    files: dict[str, tuple[bool, str]] = {}
    faults: list[Fault] = []
    for path in _walk(root, faults):
        status = path.lstat()
        name = str(path.relative_to(root))
        if not stat.S_ISREG(status.st_mode):
            faults.append(
                Fault(
                    "not a regular file",
                    str(path),
                    "regular files and folders",
                    "something else",
                    "remove it",
                )
            )
            continue
        try:
            files[name] = (bool(status.st_mode & stat.S_IXUSR), blob_id(path.read_bytes()))
        except OSError as error:
            faults.append(
                Fault(
                    "code file cannot be read",
                    str(path),
                    "a readable file",
                    str(error),
                    "mend its permissions",
                )
            )
    if faults:
        raise Refusal(*faults)
    return files


def _walk(root: Path, faults: list[Fault]) -> Iterable[Path]:
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError as error:
        faults.append(
            Fault(
                "code folder cannot be read",
                str(root),
                "a readable folder",
                str(error),
                "prepare the run again",
            )
        )
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), faults)
        else:
            yield Path(entry.path)


def _object_id(kind: bytes, content: bytes) -> str:
    return hashlib.sha1(
        kind + b" " + str(len(content)).encode() + b"\0" + content, usedforsecurity=False
    ).hexdigest()
