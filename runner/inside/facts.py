"""What an environment holds, written down when an image is built: the list of its files, and of its packages.

Promises: the same environment gives the same bytes; nothing of it is imported. `FILES.mtree` covers all that Python
runs or imports: the environment, the standard library, the interpreter, Debian's site customisation. `packages.json`
holds name, version and licence of each Python package, and name, version and architecture of each Debian package.
Standard library only: runs in the image's build (`python -I -S`), with what it writes to as its second argument.
"""

from __future__ import annotations

import email.parser
import email.policy
import json
import os
import platform
import sys
from pathlib import Path

from runner.inside import installed

_LICENCE_WORDS = 64
_CLASSIFIER = "License :: "


def python_packages(site: Path) -> list[dict[str, object]]:
    """Return name, version, licence expression (SPDX, or '') and licence names of every package in `site`, sorted."""
    parser = email.parser.HeaderParser(policy=email.policy.compat32)
    found: list[dict[str, object]] = []
    for path in sorted(site.glob("*.dist-info/METADATA")):
        fields = parser.parsestr(path.read_text(encoding="utf-8", errors="replace"))
        names = [
            value.removeprefix(_CLASSIFIER).rpartition(" :: ")[2]
            for value in fields.get_all("Classifier", [])
            if value.startswith(_CLASSIFIER)
        ]
        free = str(fields.get("License", "")).strip()
        # Some packages put a licence's whole text there.
        if not names and free and len(free) <= _LICENCE_WORDS and "\n" not in free:
            names = [free]
        found.append({
            "name": str(fields["Name"]), "version": str(fields["Version"]),
            "expression": str(fields.get("License-Expression", "")), "licences": sorted(set(names)),
        })  # fmt: skip
    return found


def debian_packages(status: Path) -> list[dict[str, str]]:
    """Return name, version and architecture of every package that dpkg has installed, sorted; none without dpkg."""
    if not status.is_file():
        return []
    parser = email.parser.HeaderParser(policy=email.policy.compat32)
    paragraphs = (
        parser.parsestr(text) for text in status.read_text(encoding="utf-8").split("\n\n") if text.strip()
    )
    return sorted(
        (
            {
                "name": str(one["Package"]),
                "version": str(one["Version"]),
                "architecture": str(one["Architecture"]),
            }
            for one in paragraphs
            if str(one["Status"]).endswith(" installed")
        ),
        key=lambda package: (package["name"], package["architecture"]),
    )


def roots(venv: Path, library: Path) -> list[str]:
    """Return all that Python runs or imports in an image, as paths below '/'."""
    interpreter = (venv / "bin" / "python").resolve()
    customised = Path("/etc") / library.name
    return [str(path)[1:] for path in (venv, library, interpreter, customised) if path.exists()]


def main() -> None:
    """Write both files: `VENV OUT`."""
    venv, out = (Path(word) for word in sys.argv[1:])
    library = Path(os.__file__).parent
    listed, _ = installed.list_of(Path("/"), roots(venv, library), timed=True)
    (out / installed.LIST_NAME).write_bytes(listed.to_bytes())
    value = {
        "python": python_packages(venv / "lib" / library.name / "site-packages"),
        "debian": debian_packages(Path("/var/lib/dpkg/status")),
        "release": platform.freedesktop_os_release().get("VERSION_CODENAME", ""),
    }
    (out / "packages.json").write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
