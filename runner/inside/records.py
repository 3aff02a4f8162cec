"""Every installed package against its own RECORD, and everything that Python could import against both.

Promises: each file of each package has the hash that the package's RECORD gives (PEP 376, PEP 627); nothing lies in the
environment that no package named; byte code was compiled from the source beside it; no further folder is importable;
the standard library is what Debian installed, where Debian did. Everything wrong is told. Standard library only: runs
in an image (`python -I -c` with /opt/ferry on the path), and in an environment outside of one.
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
    """What was looked at, and everything that is wrong with it; `notes` say what could not be looked at."""

    packages: int
    files: int
    byte_code: int
    library_files: int
    faults: list[Fault]
    notes: list[str]


def verify(root: Path, site: Path, folder: Path) -> Report:
    """Look at the environment at `root`, its packages in `site`; its list and its lock lie in `folder`. Reads every byte."""
    faults: list[Fault] = []
    found = installed.scan(root, installed.OWN_NAMES if folder == root else frozenset())
    hashed = hash_files(root, [path for path, item in found.items() if item.kind == "file"])
    try:
        faults += lock.lock_faults(folder / "lock.txt", site)
    except (Refusal, OSError, UnicodeDecodeError) as error:
        faults += _told(error, folder / "lock.txt")
    try:
        faults += _list_faults(folder, root, found, hashed)
    except (Refusal, OSError, ValueError, AttributeError) as error:
        faults += _told(error, folder)
    prefix = site.relative_to(root).as_posix()
    owned, records = _records(root, prefix, hashed, faults)
    byte_code = [path for path in found if _source_of(path) in owned]
    faults += installed.bounded(_byte_code_faults(root, byte_code), str(root))
    strangers = _strangers(root, prefix, found, owned | set(byte_code))
    faults += installed.bounded(strangers, str(root))
    return Report(records, len(hashed), len(byte_code), 0, faults, [])


def _told(error: Exception, where: Path) -> list[Fault]:
    if isinstance(error, Refusal):
        return list(error.faults)
    return [Fault("cannot be read", str(where), "lock, list and IDENTITY", str(error), _REBUILD)]


def _list_faults(
    folder: Path, root: Path, found: Mapping[str, installed.Found], hashed: Mapping[str, Hashed | OSError]
) -> list[Fault]:
    """The environment against the list of its files, and the list against what IDENTITY says of it."""
    path = folder / installed.LIST_NAME
    listed = installed.read_list(path)
    both = {name: entry for name, entry in hashed.items() if listed.is_file(name)}
    faults = [*installed.layout_faults(root, listed, found), *installed.content_faults(root, listed, both)]
    said = str(json.loads((folder / "IDENTITY").read_bytes()).get("files"))
    actual = installed.digest(path)
    if said not in (actual, "host"):
        faults.append(Fault("list of files differs from IDENTITY", str(path), said, actual, _REBUILD))
    return installed.bounded(faults, str(root))


def _records(
    root: Path, prefix: str, hashed: Mapping[str, Hashed | OSError], faults: list[Fault]
) -> tuple[set[str], int]:
    """Return every path that a RECORD names, and how many RECORDs there are; what is wrong goes into `faults`."""
    owned: set[str] = set()
    wrong: list[Fault] = []
    infos = sorted(path.name for path in (root / prefix).glob("*.dist-info"))
    for info in infos:
        record = root / prefix / info / "RECORD"
        try:
            with record.open(encoding="utf-8", newline="") as file:
                rows = list(csv.reader(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            wrong.append(Fault("no RECORD", str(record), "the package's list of files", str(error), _REBUILD))
            continue
        for number, row in enumerate(rows, start=1):
            path = posixpath.normpath(posixpath.join(prefix, row[0])) if len(row) == 3 else ""
            if not path or path.startswith(("/", "../")):
                expected = "path, hash and size of a file of the environment"
                wrong.append(
                    Fault("RECORD is damaged", f"{record}:{number}", expected, ",".join(row), _REBUILD)
                )
                continue
            owned.add(path)
            wrong += _row_faults(f"{root}/{path}", row, hashed.get(path), f"{record}:{number}")
    faults += installed.bounded(wrong, str(root / prefix))
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
            with open(where, "rb") as file:
                header = file.read(16)
            with open(f"{root}/{_source_of(path)}", "rb") as file:
                source = importlib.util.source_hash(file.read())
        except OSError as error:
            yield Fault("cannot be read", where, "byte code and its source", str(error), _REBUILD)
            continue
        expected = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH.to_bytes(4, "little") + source
        if header != expected:
            expected_text = f"header {expected.hex()}, of the source beside it"
            yield Fault("byte code is of another source", where, expected_text, header.hex(), _REBUILD)


def _strangers(
    root: Path, prefix: str, found: Mapping[str, installed.Found], owned: set[str]
) -> Iterator[Fault]:
    """Yield everything that no package brought; an empty folder among packages too, since Python imports that."""
    folders = {str(parent) for path in owned for parent in Path(path).parents}
    for path, item in sorted(found.items()):
        if path in owned or _SKELETON.fullmatch(path):
            continue
        if item.kind == "dir" and (path in folders or not path.startswith(f"{prefix}/")):
            continue
        yield Fault("belongs to no package", f"{root}/{path}", "nothing", item.kind, _REBUILD)


def path_faults(
    root: Path, site: Path, path: list[str], allowed: frozenset[str] = frozenset()
) -> list[Fault]:
    """Return a fault for each folder in `path` (a sys.path) that is neither the standard library nor `site`."""
    library = os.path.dirname(os.__file__)  # noqa: PTH120 - the text, as sys.path has it
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    known = {library, f"{library}/lib-dynload", str(site), f"{os.path.dirname(library)}/python{version}.zip"}  # noqa: PTH120
    faults = [
        Fault("further folder is importable", folder, "the standard library and the locked packages only", folder,
              _REBUILD)
        for folder in path
        if folder not in known | allowed
    ]  # fmt: skip
    config = root / "pyvenv.cfg"
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    if not re.search(r"^include-system-site-packages\s*=\s*false\s*$", text, re.MULTILINE):
        expected = "include-system-site-packages = false"
        faults.append(Fault("further folder is importable", str(config), expected, text, _REBUILD))
    return faults


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
    found = installed.scan(library)
    present = {f"{library}/{name}": item for name, item in found.items() if name != "."}
    byte_code = [name for name in found if f"{library}/{_source_of(name)}" in listed]
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
    return installed.bounded(faults, str(library)), len(sums)


def main() -> None:
    """Print the report of the environment that this Python belongs to, as JSON; its folder is the only argument, if any.

    In an image the list and the lock lie in /opt/ferry, and the standard library is looked at too.
    """
    root = Path(sys.prefix)
    in_image = len(sys.argv) < 2
    folder = Path("/opt/ferry") if in_image else Path(sys.argv[1])
    site = root / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    report = verify(root, site, folder)
    own = frozenset({str(Path(__file__).resolve().parent.parent.parent)})
    faults = [*report.faults, *path_faults(root, site, sys.path, own)]
    notes, count = list(report.notes), 0
    if in_image and _DPKG.is_dir():
        library, count = library_faults(Path(os.__file__).parent)
        faults += library
    elif in_image:
        notes.append(
            "the base has no package database: its standard library is covered by the image's digest alone"
        )
    value = dataclasses.asdict(dataclasses.replace(report, faults=faults, notes=notes, library_files=count))
    sys.stdout.write(json.dumps(value, sort_keys=True) + "\n")
