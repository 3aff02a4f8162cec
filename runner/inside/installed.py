"""An environment against the list of its files: nothing changed, nothing added, nothing missing, byte code included.

The list is written once, when the environment is made, in the form of mtree(5), which libarchive reads too: every
folder, link and file with mode, size and SHA-256. The list of an image lies in /opt/ferry, speaks of paths from '/' and
has the time of each file; the list of a venv lies in the venv, speaks of paths below it and has no times.

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
from runner.inside.digests import Hashed, Stamp, hash_files, sha256_bytes, to_memory

LIST_NAME = "FILES.mtree"
STAMPS_NAME = "STAMPS.json"
IDENTITY_NAME = "IDENTITY"
# What lies beside a list and need not be in it: itself and IDENTITY, which names its digest; and what a venv has.
OWN_NAMES = frozenset({IDENTITY_NAME, "RECIPE", "lock.txt", LIST_NAME, STAMPS_NAME})
LIMIT_FAULTS = 40

_REBUILD = "build the environment again: one that was changed is not the one that is pinned"
_ESCAPED = re.compile(rb"[^!-~]|[\\#*?\[]")
_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")
_HEAD = "#mtree\n/set type=file mode=0644"
_LINE = re.compile(
    r"(?P<path>\.(?:/[!-~]+)?)(?: type=(?P<kind>dir|link))?(?: mode=(?P<mode>0[0-7]+))?"
    r"(?: time=(?P<time>[0-9]+)\.0)?"
    r"(?: size=(?P<size>[0-9]+) sha256digest=(?P<sha256>[0-9a-f]{64})| link=(?P<target>[!-~]+))?"
)


class Entry(NamedTuple):
    """One listed thing: kind ('file', 'dir', 'link'), permission bits, size in bytes, SHA-256 in hex, target of a link.

    `time_s` is when a file was last changed, in seconds of the epoch; None where that is not listed. A named tuple, not
    a dataclass: an environment has 50,000.
    """

    kind: str
    mode: int
    size: int = 0
    sha256: str = ""
    target: str = ""
    time_s: int | None = None


class Found(NamedTuple):
    """One thing as it lies there; kind is 'special' for what is no file, folder or link."""

    kind: str
    mode: int
    size: int
    target: str
    stamp: Stamp


@dataclasses.dataclass(frozen=True)
class FileList:
    """The list of an environment's files, by path below where it counts from ('.' is that place itself)."""

    entries: Mapping[str, Entry]

    @property
    def roots(self) -> list[str]:
        """Return what the list covers: every path in it whose folder is not in it."""
        return sorted(
            path
            for path in self.entries
            if path == "." or (path.rpartition("/")[0] or ".") not in self.entries
        )

    @property
    def timed(self) -> bool:
        """Return whether every file has its time, so that a change shows without a byte read."""
        return all(entry.time_s is not None for entry in self.entries.values() if entry.kind == "file")

    def to_bytes(self) -> bytes:
        """Return the list as it is written."""
        lines = [_HEAD]
        for path in sorted(self.entries, key=os.fsencode):
            entry = self.entries[path]
            words = [_escape(path if path == "." else f"./{path}")]
            words += [f"type={entry.kind}"] if entry.kind != "file" else []
            words += [f"mode=0{entry.mode:o}"] if entry.mode != 0o644 else []
            words += [f"time={entry.time_s}.0"] if entry.time_s is not None else []
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
    text = raw.decode("ascii", "replace")
    lines = text.removeprefix(_HEAD + "\n").split("\n")
    if not text.startswith(_HEAD + "\n") or lines[-1] != "" or len(lines) < 2:
        raise _damaged(where, "#mtree, a /set line, entries, and a whole last line", repr(text[:40]))
    entries: dict[str, Entry] = {}
    for number, line in enumerate(lines[:-1], start=3):
        match = _LINE.fullmatch(line)
        entry = match and _entry(match)
        if match is None or entry is None:
            raise _damaged(f"{where}:{number}", "an entry of an mtree specification", line[:120])
        path = _unescape(match["path"])
        entries[path if path == "." else path[2:]] = entry
    if len(entries) != len(lines) - 1:
        raise _damaged(where, "every path once", f"{len(entries)} paths in {len(lines) - 1} lines")
    return FileList(entries)


def _entry(match: re.Match[str]) -> Entry | None:
    _, kind, mode, time_s, size, sha256, target = match.groups()
    kind = kind or "file"
    if (kind == "file") != (size is not None) or (kind == "link") != (target is not None):
        return None
    if time_s is not None and kind != "file":
        return None
    return Entry(
        kind,
        int(mode or "0644", 8),
        int(size or 0),
        sha256 or "",
        _unescape(target or ""),
        None if time_s is None else int(time_s),
    )


def _damaged(where: str, expected: str, found: str) -> Refusal:
    return Refusal(Fault("list of files is damaged", where, expected, found, _REBUILD))


def read_list(path: Path) -> tuple[FileList, str]:
    """Return the list at `path` and its digest, 'sha256:...'. Raises `Refusal` when it is absent or damaged."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        expected = "the list of the environment's files"
        raise Refusal(Fault("no list of files", str(path), expected, str(error), _REBUILD)) from error
    return parse(raw, str(path)), "sha256:" + sha256_bytes(raw)


def scan(base: Path, roots: Iterable[str]) -> dict[str, Found]:
    """Return everything at and below `roots`, which are paths below `base`; links are not followed.

    A root that is not there is not returned. Raises OSError for a folder that cannot be read.
    """
    found: dict[str, Found] = {}
    for root in roots:
        place = os.path.normpath(os.path.join(base, root))  # noqa: PTH118 - texts, not paths
        try:
            found[root] = _found(os.lstat(place), place, None)
        except FileNotFoundError:
            continue
        pending = ["" if root == "." else f"{root}/"] if found[root].kind == "dir" else []
        while pending:
            folder = pending.pop()
            # By descriptor: half the time of asking for each of 50,000 by its whole path.
            descriptor = os.open(
                f"{base}/{folder}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            )
            try:
                with os.scandir(descriptor) as inside:
                    for item in inside:
                        path = folder + item.name
                        entry = _found(item.stat(follow_symlinks=False), item.name, descriptor)
                        found[path] = entry
                        if entry.kind == "dir":
                            pending.append(f"{path}/")
            finally:
                os.close(descriptor)
    return found


def _found(status: os.stat_result, name: str, folder: int | None) -> Found:
    mode = status.st_mode
    kind = "file" if stat.S_ISREG(mode) else "dir" if stat.S_ISDIR(mode) else "special"
    target = ""
    if stat.S_ISLNK(mode):
        kind, target = "link", os.readlink(name, dir_fd=folder)
    size = status.st_size if kind == "file" else 0
    return Found(kind, stat.S_IMODE(mode), size, target, Stamp.of(status))


def list_of(
    base: Path, roots: Iterable[str], *, timed: bool, leave_out: frozenset[str] = frozenset()
) -> tuple[FileList, dict[str, list[object]]]:
    """Return the list of what lies at and below `roots`, and the stamps to remember its files by. Reads every byte.

    `leave_out` are paths. Raises `Refusal` for what cannot be listed: a device, a file that cannot be read, and where
    times are wanted, one that is not of a whole second.
    """
    found = {path: item for path, item in scan(base, roots).items() if path not in leave_out}
    hashed = hash_files(base, [path for path, item in found.items() if item.kind == "file"])
    entries: dict[str, Entry] = {}
    for path, item in found.items():
        read = hashed.get(path)
        second, rest = divmod(item.stamp.mtime_ns, 1_000_000_000)
        if item.kind == "special" or isinstance(read, OSError) or (timed and read is not None and rest):
            expected = "files, folders and links that can be read" + (", of whole seconds" if timed else "")
            shown = str(read) if isinstance(read, OSError) else f"{item.kind}, {second}.{rest:09} s"
            raise Refusal(Fault("cannot be listed", f"{base}/{path}", expected, shown, _REBUILD))
        mode = 0o777 if item.kind == "link" else item.mode
        sha256 = read.sha256 if read is not None else ""
        entries[path] = Entry(
            item.kind, mode, item.size, sha256, item.target, second if timed and read is not None else None
        )
    return FileList(entries), to_memory(_only_hashed(hashed))


def _only_hashed(hashed: Mapping[str, Hashed | OSError]) -> dict[str, Hashed]:
    return {path: entry for path, entry in hashed.items() if isinstance(entry, Hashed)}


def bounded(faults: Iterable[Fault], where: str) -> list[Fault]:
    """Return the first LIMIT_FAULTS of `faults`, and one that counts the others."""
    told = list(faults)
    if len(told) <= LIMIT_FAULTS:
        return told
    more = Fault("more like these", where, "none", f"{len(told) - LIMIT_FAULTS} further faults", _REBUILD)
    return [*told[:LIMIT_FAULTS], more]


@dataclasses.dataclass(frozen=True)
class Listed:
    """A list as it lies in `folder`, and where its paths count from: the folder itself, or '/' for an image."""

    folder: Path
    base: Path
    files: FileList
    digest: str

    @property
    def own(self) -> frozenset[str]:
        """Return the paths beside the list that need not be in it."""
        prefix = "" if self.folder == self.base else f"{self.folder.relative_to(self.base).as_posix()}/"
        return frozenset(f"{prefix}{name}" for name in OWN_NAMES) - self.files.entries.keys()

    def scan(self) -> dict[str, Found]:
        """Return everything that lies where the list looks. Raises `Refusal` for a folder that cannot be read."""
        try:
            found = scan(self.base, self.files.roots)
        except OSError as error:
            where = str(error.filename or self.base)
            raise Refusal(
                Fault("cannot be read", where, "a readable folder", str(error), _REBUILD)
            ) from error
        own = self.own
        return {path: item for path, item in found.items() if path not in own}


def open_list(folder: Path, root: Path = Path("/")) -> Listed:
    """Return the list in `folder`; `root` stands for '/'. Raises `Refusal` when it is absent, damaged, or not IDENTITY's.

    The IDENTITY of an image names the list's digest; that of a venv cannot, since its files hold the venv's own path.
    """
    path = folder / LIST_NAME
    files, digest = read_list(path)
    if "." in files.entries:
        return Listed(folder, folder, files, digest)
    try:
        identity = json.loads((folder / IDENTITY_NAME).read_bytes())
        said = identity["files"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        said = f"{type(error).__name__}: {error}"
    if said != digest:
        expected = f"{said}, as IDENTITY says"
        raise Refusal(Fault("list of files is another one", str(path), expected, digest, _REBUILD))
    return Listed(folder, root, files, digest)


def layout_faults(listed: Listed, found: Mapping[str, Found]) -> Iterator[Fault]:
    """Yield what is missing, added, or of another kind, size, mode, target or time; reads no file's content."""
    entries = listed.files.entries
    wrong = [path for path, entry in entries.items() if path not in found or _differs(entry, found[path])]
    for path in sorted(wrong + list(found.keys() - entries.keys())):
        entry, item = entries.get(path), found.get(path)
        where = str(listed.base / path)
        if item is None:
            yield Fault("missing from the environment", where, str(entry and entry.kind), "nothing", _REBUILD)
        elif entry is None:
            yield Fault("not in the environment's list", where, "nothing", item.kind, _REBUILD)
        else:
            what, expected, actual = _difference(entry, item)
            yield Fault(f"environment differs: {what}", where, expected, actual, _REBUILD)


def _differs(entry: Entry, item: Found) -> bool:
    """Whether `_difference` has anything to say; in one expression, for each of 50,000 at every start."""
    return not (
        entry.kind == item.kind
        and entry.size == item.size
        and entry.target == item.target
        and (entry.mode == item.mode or entry.kind == "link")
        and (entry.time_s is None or item.stamp.mtime_ns == entry.time_s * 1_000_000_000)
    )


def _difference(entry: Entry, item: Found) -> tuple[str, str, str]:
    if entry.kind != item.kind:
        return "kind", entry.kind, item.kind
    if entry.size != item.size:
        return "size", f"{entry.size} bytes", f"{item.size} bytes"
    if entry.target != item.target:
        return "target", entry.target, item.target
    if entry.kind != "link" and entry.mode != item.mode:
        return "mode", f"{entry.mode:04o}", f"{item.mode:04o}"
    second, rest = divmod(item.stamp.mtime_ns, 1_000_000_000)
    return "time of change", f"{entry.time_s}.000000000 s", f"{second}.{rest:09} s"


def files_as_listed(listed: Listed, found: Mapping[str, Found]) -> list[str]:
    """Return every file that `layout_faults` has found nothing wrong with: what remains to be seen is its content."""
    entries = listed.files.entries
    return [
        path
        for path, item in found.items()
        if item.kind == "file" and path in entries and not _differs(entries[path], item)
    ]


def content_faults(listed: Listed, hashed: Mapping[str, Hashed | OSError]) -> Iterator[Fault]:
    """Yield every file of `hashed` whose content is not the listed one, or cannot be read; each must be listed."""
    for path, entry in hashed.items():
        expected = f"sha256 {listed.files.entries[path].sha256}"
        where = str(listed.base / path)
        if isinstance(entry, OSError):
            yield Fault("cannot be read", where, expected, str(entry), _REBUILD)
        elif f"sha256 {entry.sha256}" != expected:
            yield Fault("environment differs: content", where, expected, f"sha256 {entry.sha256}", _REBUILD)


def start_faults(folder: Path, root: Path = Path("/")) -> list[Fault]:
    """Return every difference between an environment and the list in `folder`, as quickly as each start can pay for.

    An image is read-only and known by its digest: there a change shows in size or time. In a venv every file is hashed
    but for those whose stamp is the remembered one. Raises `Refusal` if the list is absent or damaged.
    """
    listed = open_list(folder, root)
    found = listed.scan()
    faults = list(layout_faults(listed, found))
    if not listed.files.timed:
        # Compared as it was written, row by row: making objects of 30,000 would take longer than all the rest.
        remembered = _stamps(folder)
        entries = listed.files.entries
        unknown = [
            path
            for path in files_as_listed(listed, found)
            if remembered.get(path) != [entries[path].sha256, *found[path].stamp]
        ]
        faults += content_faults(listed, hash_files(listed.base, unknown))
    return bounded(faults, str(listed.base))


def _stamps(folder: Path) -> dict[str, object]:
    """The rows of `to_memory` that were written beside the list; none where they are lost: then everything is read."""
    try:
        value = json.loads((folder / STAMPS_NAME).read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
