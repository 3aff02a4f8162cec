"""Every installed package against its own RECORD, and everything that Python could import against all of them.

Promises: each file of each package has the hash that the package's RECORD gives (PEP 376, PEP 627); nothing lies in the
environment that no package named; byte code names the source beside it; no further folder is importable; the standard
library is what Debian installed, where Debian did; and all of it is what the environment's own list says. Everything
wrong is told. Reads every byte, imports nothing of what it looks at: run it with `python -I -S`. Standard library only.
"""

from __future__ import annotations

import base64
import binascii
import csv
import dataclasses
import hashlib
import importlib.util
import json
import os
import posixpath
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from runner.errors import Fault, Refusal
from runner.inside import installed, lock
from runner.inside.digests import Hashed, hash_files
from runner.inside.installed import Found, Listed, bounded

_REBUILD = "build the environment again from its lock"
_DPKG = Path("/var/lib/dpkg/info")
# What `python -m venv` makes, and no package's RECORD names.
_SKELETON = re.compile(
    r"pyvenv\.cfg|lib64|bin/(?:python|python3|python3\.[0-9]+|activate|activate\.csh|activate\.fish|Activate\.ps1)"
)
_UNHASHED = ("/RECORD", "/RECORD.jws", "/RECORD.p7s")
# PEP 552: byte code that names the hash of its source, which nobody checks at run time.
_UNCHECKED_HASH = 1


@dataclasses.dataclass(frozen=True)
class Report:
    """What was looked at, and everything that is wrong with it. `notes` say what could not be looked at.

    `library_files` are those of the standard library that a Debian package vouches for; `identity` is the text of
    IDENTITY, as it lies there.
    """

    packages: int
    files: int
    byte_code: int
    library_files: int
    identity: str
    faults: list[Fault]
    notes: list[str]


def verify(folder: Path, root: Path, base: Path = Path("/")) -> Report:
    """Look at the environment at `root`; its list and its lock lie in `folder`. `base` stands for '/' in a list."""
    faults: list[Fault] = []
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefix = f"lib/{version}/site-packages"
    found = installed.scan(root, ["."])
    own = {"."} | (installed.OWN_NAMES if folder == root else set())
    found = {path: item for path, item in found.items() if path not in own}
    hashed = hash_files(root, [path for path, item in found.items() if item.kind == "file"])
    try:
        faults += lock.lock_faults(folder / "lock.txt", root / prefix)
    except (Refusal, OSError, UnicodeDecodeError) as error:
        faults += _told(error, folder / "lock.txt")
    try:
        faults += _list_faults(installed.open_list(folder, base), root, hashed)
    except (Refusal, OSError) as error:
        faults += _told(error, folder / installed.LIST_NAME)
    owned, records = _records(root, prefix, hashed, faults)
    byte_code = [path for path, item in found.items() if item.kind == "file" and _source_of(path) in owned]
    faults += bounded(_byte_code_faults(root, byte_code), str(root))
    faults += bounded(_strangers(root, prefix, found, owned | set(byte_code)), str(root))
    faults += _path_faults(root)
    identity = ""
    try:
        identity = (folder / installed.IDENTITY_NAME).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        faults += _told(error, folder / installed.IDENTITY_NAME)
    return Report(records, len(hashed), len(byte_code), 0, identity, faults, [])


def _told(error: Exception, where: Path) -> list[Fault]:
    if isinstance(error, Refusal):
        return list(error.faults)
    return [Fault("cannot be read", str(where), "lock, list and IDENTITY", str(error), _REBUILD)]


def _list_faults(listed: Listed, root: Path, hashed: Mapping[str, Hashed | OSError]) -> list[Fault]:
    """Everything against the list; what was hashed below `root` is not read again."""
    found = listed.scan()
    below = root.relative_to(listed.base).as_posix()
    known = {name if below == "." else f"{below}/{name}": entry for name, entry in hashed.items()}
    files = installed.files_as_listed(listed, found)
    known |= hash_files(listed.base, [path for path in files if path not in known])
    content = installed.content_faults(listed, {path: known[path] for path in files})
    return bounded([*installed.layout_faults(listed, found), *content], str(listed.base))


def _records(
    root: Path, prefix: str, hashed: Mapping[str, Hashed | OSError], faults: list[Fault]
) -> tuple[set[str], int]:
    """Return every path that a RECORD names, and how many RECORDs there are; what is wrong goes into `faults`."""
    owned: set[str] = set()
    wrong: list[Fault] = []
    infos = sorted(path.name for path in (root / prefix).glob("*.dist-info"))
    for info in infos:
        name = f"{prefix}/{info}/RECORD"
        record = root / name
        try:
            if name not in hashed:
                raise FileNotFoundError("no such file")
            with record.open(encoding="utf-8", newline="") as file:
                rows = list(csv.reader(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            wrong.append(Fault("no RECORD", str(record), "the package's list of files", str(error), _REBUILD))
            continue
        for number, row in enumerate(rows, start=1):
            path = posixpath.normpath(posixpath.join(prefix, row[0])) if len(row) == 3 else ""
            if not path or path.startswith(("/", "../")):
                expected = "path, hash and size of a file of the environment"
                place = f"{record}:{number}"
                wrong.append(Fault("RECORD is damaged", place, expected, ",".join(row), _REBUILD))
                continue
            owned.add(path)
            wrong += _row_faults(f"{root}/{path}", row, hashed.get(path), f"{record}:{number}")
    faults += bounded(wrong, str(root / prefix))
    return owned, len(infos)


def _row_faults(where: str, row: list[str], entry: Hashed | OSError | None, place: str) -> Iterator[Fault]:
    name, said, size = row
    if entry is None or isinstance(entry, OSError):
        yield Fault("missing from a package", where, f"as {place} says", str(entry or "nothing"), _REBUILD)
    elif not said:
        if not f"/{name}".endswith(_UNHASHED) and not name.endswith(".pyc"):
            yield Fault("file without a hash", where, f"a hash in {place}", "none", _REBUILD)
    elif said != "sha256=" + _urlsafe(entry.sha256):
        yield Fault("file differs from RECORD", where, said, "sha256=" + _urlsafe(entry.sha256), _REBUILD)
    elif size and size != str(entry.size_bytes):
        yield Fault("file differs from RECORD", where, f"{size} bytes", f"{entry.size_bytes} bytes", _REBUILD)


def _urlsafe(sha256: str) -> str:
    return base64.urlsafe_b64encode(binascii.unhexlify(sha256)).rstrip(b"=").decode("ascii")


def _source_of(path: str) -> str:
    """Return the source whose byte code `path` would be for this Python, or an empty text."""
    head, mark, name = path.rpartition("__pycache__/")
    tail = f".{sys.implementation.cache_tag}.pyc"
    return f"{head}{name.removesuffix(tail)}.py" if mark and name.endswith(tail) and "/" not in name else ""


def _byte_code_faults(root: Path, paths: list[str]) -> Iterator[Fault]:
    """Yield byte code that Python would run although it is for another Python or was compiled from another source."""
    for path in sorted(paths):
        where = f"{root}/{path}"
        try:
            beside = f"{root}/{_source_of(path)}"
            # A pipe would be waited for; a link is fine, Debian's library has some.
            if not os.path.isfile(beside):  # noqa: PTH113 - 10,000 texts, not paths
                raise FileNotFoundError(f"no file {beside}")
            with open(where, "rb") as file:
                header = file.read(16)
            with open(beside, "rb") as file:
                source = importlib.util.source_hash(file.read())
        except OSError as error:
            yield Fault("cannot be read", where, "byte code and its source", str(error), _REBUILD)
            continue
        expected = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH.to_bytes(4, "little") + source
        if header != expected:
            expected_text = f"header {expected.hex()}, of the source beside it"
            yield Fault("byte code is of another source", where, expected_text, header.hex(), _REBUILD)


def _strangers(root: Path, prefix: str, found: Mapping[str, Found], owned: set[str]) -> Iterator[Fault]:
    """Yield everything that no package brought; an empty folder among packages too, since Python imports that."""
    folders = {parent for path in owned for parent in _parents(path)}
    for path, item in sorted(found.items()):
        if path in owned or _SKELETON.fullmatch(path):
            continue
        if item.kind == "dir" and (path in folders or not path.startswith(f"{prefix}/")):
            continue
        yield Fault("belongs to no package", f"{root}/{path}", "nothing", item.kind, _REBUILD)


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def _path_faults(root: Path) -> Iterator[Fault]:
    """Yield whatever makes more importable than the standard library and the locked packages.

    What a .pth adds is none of this: each .pth is a file of a package, or a stranger.
    """
    library = os.path.dirname(os.__file__)  # noqa: PTH120 - the text, as sys.path has it
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    archive = f"{os.path.dirname(library)}/python{version}.zip"  # noqa: PTH120
    if os.path.lexists(archive):
        yield Fault("further folder is importable", archive, "nothing", "an archive of modules", _REBUILD)
    config = root / "pyvenv.cfg"
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "nothing"
    if not re.search(r"^include-system-site-packages\s*=\s*false\s*$", text, re.MULTILINE):
        expected = "include-system-site-packages = false"
        yield Fault("further folder is importable", str(config), expected, text, _REBUILD)


def library_faults(library: Path, info: Path = _DPKG) -> tuple[list[Fault], int]:
    """Return what differs between the standard library in `library` and what dpkg's lists in `info` say, and a count.

    Every file must be one that a package installed, with the MD5 that it gives (dpkg has no other), or byte code of one.
    """
    listed: set[str] = set()
    sums: dict[str, str] = {}
    for path in sorted(info.glob("*.list")):
        listed |= {line for line in path.read_text().split("\n") if line.startswith(f"{library}/")}
    for path in sorted(info.glob("*.md5sums")):
        lines = (line.split("  ", 1) for line in path.read_text().splitlines())
        sums |= {f"/{pair[1]}": pair[0] for pair in lines if f"/{pair[-1]}".startswith(f"{library}/")}
    found = installed.scan(library, ["."])
    present = {f"{library}/{name}": item for name, item in found.items() if name != "."}
    byte_code = [
        name
        for name, item in found.items()
        if item.kind == "file" and f"{library}/{_source_of(name)}" in listed
    ]
    faults = list(_byte_code_faults(library, byte_code))
    compiled = {f"{library}/{name}" for name in byte_code}
    for where, item in sorted(present.items()):
        if where in compiled or (item.kind == "dir" and where.endswith("/__pycache__")):
            continue
        if where not in listed:
            faults.append(Fault("belongs to no package", where, "nothing", item.kind, _REBUILD))
        elif where in sums and item.kind == "file":
            actual = hashlib.md5(Path(where).read_bytes(), usedforsecurity=False).hexdigest()
            if actual != sums[where]:
                faults.append(Fault("file differs from its package", where, sums[where], actual, _REBUILD))
    faults += [
        Fault("missing from a package", where, "a file", "nothing", _REBUILD)
        for where in sorted(sums.keys() - present.keys())
    ]
    return bounded(faults, str(library)), len(sums)


def main() -> None:
    """Print the report of an environment as JSON: `FOLDER ROOT`, where its list and lock lie, and where it is itself.

    In an image, where the two differ, the standard library is part of it and is looked at too.
    """
    folder, root = (Path(word) for word in sys.argv[1:])
    report = verify(folder, root)
    library = Path(os.__file__).parent
    if folder == root:
        note = "the standard library is this host's, and no part of the environment"
        report = dataclasses.replace(report, notes=[note])
    elif _DPKG.is_dir():
        faults, count = library_faults(library)
        report = dataclasses.replace(report, faults=[*report.faults, *faults], library_files=count)
    else:
        note = "the base has no Debian packages: its standard library is compared with the list alone"
        report = dataclasses.replace(report, notes=[note])
    sys.stdout.write(json.dumps(dataclasses.asdict(report), sort_keys=True) + "\n")
