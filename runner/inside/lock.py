"""The environment against its lock: every locked package installed, at the locked version, and nothing else.

Promises: no package is imported and nothing is executed; every difference is named; a lock line that is not pinned, not
hashed, conditional, or an address is refused. Standard library only: runs in the container before anything else.
"""

from __future__ import annotations

import re
from pathlib import Path

from runner.errors import Fault, refuse_if

_PINNED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.!+_-]+)$")
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}$")
_RELOCK = "make the lock again: `uv pip compile --generate-hashes --no-emit-index-url`, see CONTRIBUTING.md"
_REBUILD = "build the environment again from its lock"


def normalised(name: str) -> str:
    """Return a package's name in the one form that indexes use (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(text: str) -> list[tuple[int, str]]:
    """Return (line number, requirement) for each requirement of a lock, continuation lines joined, comments dropped."""
    found: list[tuple[int, str]] = []
    first, parts = 0, list[str]()
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.strip()
        if content.startswith("#"):
            continue
        first = first if parts else number
        parts.append(content.removesuffix("\\").strip())
        if content.endswith("\\"):
            continue
        joined = " ".join(part for part in parts if part)
        if joined:
            found.append((first, joined))
        parts = []
    if any(parts):
        found.append((first, " ".join(part for part in parts if part)))
    return found


def parse_lock(text: str, where: str = "lock", *, markers: bool = False) -> dict[str, str]:
    """Return normalised name -> version for every package of a lock.

    With `markers` a requirement may be conditional (`; sys_platform == ...`); an environment that is to be the same
    everywhere has none. Raises `Refusal` with every line that is not `name==version --hash=sha256:...`.
    """
    faults: list[Fault] = []
    found: dict[str, str] = {}
    for number, line in requirements(text):
        place = f"{where}:{number}"
        condition, _, options = line.partition(" --")
        requirement, semicolon, marker = condition.partition(";")
        if semicolon and not markers:
            faults.append(Fault("requirement is conditional", place, "no marker", marker.strip(), _RELOCK))
        match = _PINNED.match(requirement.strip())
        if match is None:
            faults.append(
                Fault("requirement is not pinned", place, "name==version", requirement.strip(), _RELOCK)
            )
            continue
        name = normalised(match["name"])
        hashes = ("--" + options).split() if options else []
        if not hashes or not all(_HASH.match(word) for word in hashes):
            expected = "only --hash=sha256:... behind the version"
            faults.append(
                Fault(
                    "requirement is not hashed", f"{place}: {name}", expected, options or "no hash", _RELOCK
                )
            )
        if name in found:
            faults.append(
                Fault("requirement stands twice", f"{place}: {name}", "one line", "a second one", _RELOCK)
            )
        found[name] = match["version"]
    if not found and not faults:
        faults.append(Fault("lock is empty", where, "at least one requirement", "none", _RELOCK))
    refuse_if(faults)
    return found


def installed(site_packages: Path) -> dict[str, str]:
    """Return normalised name -> version of what is installed, from each *.dist-info/METADATA.

    Two installations of one name are joined as 'a and b', so that they equal no version.
    """
    found: dict[str, str] = {}
    for metadata in sorted(site_packages.glob("*.dist-info/METADATA")):
        fields: dict[str, str] = {}
        with metadata.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, colon, value = line.partition(":")
                if not colon or len(fields) == 2:
                    break
                if key in ("Name", "Version"):
                    fields[key] = value.strip()
        name = normalised(fields.get("Name", metadata.parent.name))
        version = fields.get("Version", "no version")
        found[name] = f"{found[name]} and {version}" if name in found else version
    return found


def lock_faults(lock_path: Path, site_packages: Path) -> list[Fault]:
    """Return every difference between the lock and what is installed. Raises `Refusal` if the lock itself is damaged."""
    locked = parse_lock(lock_path.read_text(encoding="utf-8"), str(lock_path))
    present = installed(site_packages)
    faults: list[Fault] = []
    for name in sorted(locked.keys() | present.keys()):
        expected, found = locked.get(name), present.get(name)
        where = f"{site_packages}: {name}"
        if expected is None:
            faults.append(Fault("package is not in the lock", where, "absent", str(found), _REBUILD))
        elif found is None:
            faults.append(Fault("package is missing", where, expected, "absent", _REBUILD))
        elif expected != found:
            faults.append(Fault("package differs from the lock", where, expected, found, _REBUILD))
    return faults
