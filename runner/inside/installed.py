"""An environment against the list of its files: nothing changed, nothing added, nothing missing, byte code included.

The list is written once, when the environment is made, and is an mtree(5) specification, which `mtree` and libarchive
read too: every folder, link and file with mode, size and SHA-256, and one time for all where the environment has one.

Promises: one walk and one comparison, nothing imported and nothing executed; every difference is named (the first
LIMIT_FAULTS, then how many more); the same environment gives the same bytes of list. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from runner.errors import Fault, Refusal
from runner.inside.digests import Hashed, Stamp, from_memory, hash_files, sha256_bytes, to_memory

LIST_NAME = "FILES.mtree"
STAMPS_NAME = "STAMPS.json"
# What lies in the folder of an environment outside a container, and is not part of it.
OWN_NAMES = frozenset({"IDENTITY", "RECIPE", "lock.txt", LIST_NAME, STAMPS_NAME})
LIMIT_FAULTS = 40

_REBUILD = "build the environment again: one that was changed is not the one that is pinned"
_PLAIN = re.compile(r"[!-~]+")
_ESCAPED = re.compile(rb"[^!-~]|[\\#*?\[]")
_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")
_SET = re.compile(r"/set type=file mode=0644(?: uid=0 gid=0 time=(?P<time>[0-9]+)\.0)?")
_LINE = re.compile(
    r"(?P<path>\.(?:/[!-~]+)?)(?: type=(?P<kind>dir|link))?(?: mode=(?P<mode>0[0-7]+))?"
    r"(?: size=(?P<size>[0-9]+) sha256digest=(?P<sha256>[0-9a-f]{64})| link=(?P<target>[!-~]+))?"
)


class Entry(NamedTuple):
    """One listed thing: kind ('file', 'dir', 'link'), permission bits, size in bytes, SHA-256 in hex, target of a link.

    A named tuple, not a dataclass: an environment has 50,000.
    """

    kind: str
    mode: int
    size: int = 0
    sha256: str = ""
    target: str = ""


class Found(NamedTuple):
    """One thing as it lies there; kind is 'special' for what is no file, folder or link."""

    kind: str
    mode: int
    size: int
    target: str
    stamp: Stamp


@dataclasses.dataclass(frozen=True)
class FileList:
    """The list of an environment's files, by path below its root ('.' is the root); `time_s` is theirs, if they share one."""

    entries: Mapping[str, Entry]
    time_s: int | None

    def is_file(self, path: str) -> bool:
        """Return whether `path` is listed as a file."""
        return path in self.entries and self.entries[path].kind == "file"

    def to_bytes(self) -> bytes:
        """Return the list as it is written."""
        shared = "" if self.time_s is None else f" uid=0 gid=0 time={self.time_s}.0"
        lines = ["#mtree", f"/set type=file mode=0644{shared}"]
        for path in sorted(self.entries, key=os.fsencode):
            entry = self.entries[path]
            words = [_escape(path if path == "." else f"./{path}")]
            words += [f"type={entry.kind}"] if entry.kind != "file" else []
            words += [f"mode={entry.mode:#05o}".replace("0o", "0")] if entry.mode != 0o644 else []
            if entry.kind == "file":
                words += [f"size={entry.size}", f"sha256digest={entry.sha256}"]
            elif entry.kind == "link":
                words.append(f"link={_escape(entry.target)}")
            lines.append(" ".join(words))
        return ("\n".join(lines) + "\n").encode("ascii")


def _escape(text: str) -> str:
    return _ESCAPED.sub(lambda match: b"\\%03o" % match[0][0], os.fsencode(text)).decode("ascii")


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), text.encode("ascii")))


def parse(raw: bytes, where: str) -> FileList:
    """Return the list in `raw`, as `FileList.to_bytes` writes it. Raises `Refusal` at the first line that is anything else."""
    lines = raw.decode("ascii", "replace").split("\n")
    head = _SET.fullmatch(lines[1]) if len(lines) > 2 and lines[0] == "#mtree" else None
    if head is None or lines[-1] != "":
        raise _damaged(where, "#mtree, a /set line, and a whole last line", repr(lines[0][:40]))
    entries: dict[str, Entry] = {}
    for number, line in enumerate(lines[2:-1], start=3):
        match = _LINE.fullmatch(line)
        entry = match and _entry(match)
        if match is None or entry is None:
            raise _damaged(f"{where}:{number}", "an entry of an mtree specification", line[:120])
        path = _unescape(match["path"])
        entries[path if path == "." else path[2:]] = entry
    if len(entries) != len(lines) - 3 or "." not in entries:
        raise _damaged(
            where, "the root, and every path once", f"{len(entries)} paths in {len(lines) - 3} lines"
        )
    return FileList(entries, int(head["time"]) if head["time"] else None)


def _entry(match: re.Match[str]) -> Entry | None:
    kind, mode = match["kind"] or "file", int(match["mode"] or "0644", 8)
    if (kind == "file") != (match["size"] is not None) or (kind == "link") != (match["target"] is not None):
        return None
    return Entry(kind, mode, int(match["size"] or 0), match["sha256"] or "", _unescape(match["target"] or ""))


def _damaged(where: str, expected: str, found: str) -> Refusal:
    return Refusal(Fault("list of files is damaged", where, expected, found, _REBUILD))


def read_list(path: Path) -> FileList:
    """Return the list at `path`. Raises `Refusal` when it is absent or damaged."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        expected = "the list of the environment's files"
        raise Refusal(Fault("no list of files", str(path), expected, str(error), _REBUILD)) from error
    return parse(raw, str(path))


def scan(root: Path, leave_out: frozenset[str] = frozenset()) -> dict[str, Found]:
    """Return everything below `root`, links not followed; `leave_out` are names directly below it."""
    found = {".": _found(os.lstat(root), "")}
    pending = [""]
    while pending:
        folder = pending.pop()
        with os.scandir(f"{os.fspath(root)}/{folder}") as inside:
            for item in inside:
                path = folder + item.name
                if not folder and item.name in leave_out:
                    continue
                entry = _found(item.stat(follow_symlinks=False), item.path)
                found[path] = entry
                if entry.kind == "dir":
                    pending.append(f"{path}/")
    return found


def _found(status: os.stat_result, path: str) -> Found:
    mode = status.st_mode
    kind = "file" if stat.S_ISREG(mode) else "dir" if stat.S_ISDIR(mode) else "special"
    target = ""
    if stat.S_ISLNK(mode):
        kind, target = "link", os.readlink(path)  # noqa: PTH115 - the text, not a path
    size = status.st_size if kind == "file" else 0
    return Found(kind, stat.S_IMODE(mode), size, target, Stamp.of(status))


def list_of(root: Path) -> tuple[FileList, dict[str, list[object]]]:
    """Return the list of the environment at `root`, and the stamps to remember its files by. Reads every byte.

    Raises `Refusal` for what cannot be listed: a device, a file that cannot be read.
    """
    found = scan(root, OWN_NAMES)
    hashed = hash_files(root, [path for path, item in found.items() if item.kind == "file"])
    entries: dict[str, Entry] = {}
    for path, item in found.items():
        entry = hashed.get(path)
        if item.kind == "special" or isinstance(entry, OSError):
            expected = "files, folders and links that can be read"
            raise Refusal(
                Fault("cannot be listed", f"{root}/{path}", expected, str(entry or item.kind), _REBUILD)
            )
        sha256 = entry.sha256 if entry is not None else ""
        entries[path] = Entry(
            item.kind, 0o777 if item.kind == "link" else item.mode, item.size, sha256, item.target
        )
    return FileList(entries, None), to_memory(_only_hashed(hashed))


def _only_hashed(hashed: Mapping[str, Hashed | OSError]) -> dict[str, Hashed]:
    return {path: entry for path, entry in hashed.items() if isinstance(entry, Hashed)}


def bounded(faults: Iterable[Fault], where: str) -> list[Fault]:
    """Return the first LIMIT_FAULTS of `faults`, and one that counts the others."""
    told = list(faults)
    if len(told) <= LIMIT_FAULTS:
        return told
    more = Fault("more like these", where, "none", f"{len(told) - LIMIT_FAULTS} further faults", _REBUILD)
    return [*told[:LIMIT_FAULTS], more]


def layout_faults(root: Path, listed: FileList, found: Mapping[str, Found]) -> Iterator[Fault]:
    """Yield what is missing, added, or of another kind, size, mode, target or time; reads no file's content."""
    for path in sorted(listed.entries.keys() | found.keys()):
        entry, item = listed.entries.get(path), found.get(path)
        where = f"{root}/{path}"
        if item is None:
            yield Fault("missing from the environment", where, str(entry and entry.kind), "nothing", _REBUILD)
        elif entry is None:
            yield Fault("not in the environment's list", where, "nothing", item.kind, _REBUILD)
        elif difference := _difference(entry, item, listed.time_s):
            what, expected, actual = difference
            yield Fault(f"environment differs: {what}", where, expected, actual, _REBUILD)


def _difference(entry: Entry, item: Found, time_s: int | None) -> tuple[str, str, str] | None:
    if entry.kind != item.kind:
        return "kind", entry.kind, item.kind
    if entry.size != item.size:
        return "size", f"{entry.size} bytes", f"{item.size} bytes"
    if entry.target != item.target:
        return "target", entry.target, item.target
    if entry.kind != "link" and entry.mode != item.mode:
        return "mode", f"{entry.mode:04o}", f"{item.mode:04o}"
    if time_s is not None and entry.kind == "file" and item.stamp.mtime_ns != time_s * 1_000_000_000:
        return "time of change", f"{time_s} s", f"{item.stamp.mtime_ns / 1e9:.9f} s"
    return None


def content_faults(root: Path, listed: FileList, hashed: Mapping[str, Hashed | OSError]) -> Iterator[Fault]:
    """Yield every file whose content is not the listed one, or cannot be read."""
    for path, entry in hashed.items():
        expected = f"sha256 {listed.entries[path].sha256}"
        if isinstance(entry, OSError):
            yield Fault("cannot be read", f"{root}/{path}", expected, str(entry), _REBUILD)
        elif f"sha256 {entry.sha256}" != expected:
            yield Fault(
                "environment differs: content", f"{root}/{path}", expected, f"sha256 {entry.sha256}", _REBUILD
            )


def check(folder: Path, root: Path, *, sealed: bool) -> tuple[list[Fault], dict[str, Hashed]]:
    """Return every difference between the environment at `root` and the list in `folder`, and what was hashed.

    `sealed`: content is known otherwise (a read-only image whose digest was checked), so that layout and times are
    enough. Else every file is hashed, but for those whose stamp is the one remembered in `folder`. Raises `Refusal` if
    the list is absent or damaged.
    """
    listed = read_list(folder / LIST_NAME)
    found = scan(root, OWN_NAMES if folder == root else frozenset())
    faults = list(layout_faults(root, listed, found))
    if sealed:
        return bounded(faults, str(root)), {}
    remembered = from_memory(_stamps(folder))
    hashed: dict[str, Hashed | OSError] = {}
    unknown: list[str] = []
    for path, item in found.items():
        if item.kind != "file" or not listed.is_file(path):
            continue
        memory = remembered.get(path)
        if memory is not None and memory.stamp == item.stamp:
            hashed[path] = memory
        else:
            unknown.append(path)
    hashed |= hash_files(root, unknown)
    faults += content_faults(root, listed, hashed)
    return bounded(faults, str(root)), _only_hashed(hashed)


def _stamps(folder: Path) -> object:
    try:
        return json.loads((folder / STAMPS_NAME).read_bytes())
    except (OSError, ValueError):
        return {}  # Nothing is remembered then, and everything is read.


def digest(path: Path) -> str:
    """Return the digest of the list at `path` as IDENTITY names it."""
    return "sha256:" + sha256_bytes(path.read_bytes())
