"""What a line of an image's lock may be: one package, pinned, hashed, and right for the image's platform.

Promises: every line that is anything else is a fault with its line and its package, all at once; a lock without faults
is one that `runner.inside.lock` takes. Reads what it is given, fetches nothing: whether an index has a file for a hash
is found by the build, which installs with `--require-hashes` always.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from packaging.markers import InvalidMarker, Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from runner.errors import Fault, Refusal
from runner.image_spec import ImageSpec
from runner.inside.lock import normalised, requirements

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_PINNED = re.compile(rf"(?P<name>{_NAME.pattern})(?P<extras>\[[^\]]*\])?==(?P<version>[A-Za-z0-9.!+_-]+)")
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
_ADDRESS = re.compile(r"://|^\.{0,2}/|\s@\s|^(?:git|hg|svn|bzr)\+|\.(?:whl|zip|tar\.[a-z0-9]+)(?:[#\s]|$)")
_EDITABLE = re.compile(r"(?:-e|--editable)(?:[\s=]|$)")
_GPU_BUILD = re.compile(r"(?:cu|rocm|xpu)[0-9.]*")
# Bindings that ask the driver, of use without a GPU: no part of a CUDA runtime.
_NEUTRAL = frozenset({"nvidia-ml-py"})
# Where pip ends a line and people see none.
_HIDDEN_END = re.compile("[\\r\\x0b\\x0c\\x1c-\\x1e\\x85\\u2028\\u2029]")


@dataclasses.dataclass(frozen=True)
class Target:
    """What a lock is for: Linux on x86-64 with CPython `python` ('3.11'), and 'cpu' or 'cuda'."""

    python: str
    accelerator: Literal["cpu", "cuda"]

    def marker_environment(self) -> dict[str, str]:
        """Return the values of PEP 508's marker variables in such an image."""
        return {
            "implementation_name": "cpython", "implementation_version": f"{self.python}.0", "os_name": "posix",
            "platform_machine": "x86_64", "platform_python_implementation": "CPython", "platform_release": "",
            "platform_system": "Linux", "platform_version": "", "python_full_version": f"{self.python}.0",
            "python_version": self.python, "sys_platform": "linux", "extra": "",
        }  # fmt: skip


def target_of(spec: ImageSpec) -> Target:
    """Return what the locks of `spec` are for."""
    return Target(spec.python, spec.accelerator)


def lint(text: str, where: str, target: Target, fix: str) -> tuple[dict[str, str], list[Fault]]:
    """Return normalised name -> version of every line that is right, and a fault for each that is not."""
    locked: dict[str, str] = {}
    text = text.replace("\r\n", "\n")
    faults = [
        Fault("line end that nobody sees", f"{where}:{number}", "line feeds only", repr(line), fix)
        for number, line in enumerate(text.split("\n"), start=1)
        if _HIDDEN_END.search(line)
    ]
    for number, line in requirements(text):
        name, version, wrong = _line(line, target)
        place = f"{where}:{number}" + (f": {name}" if name else "")
        faults += [Fault(what, place, expected, found, fix) for what, expected, found in wrong]
        if not name or not version:
            continue
        if name in locked:
            faults.append(Fault("requirement stands twice", place, "one line", "a second one", fix))
        locked[name] = version
    if not locked and not faults:
        faults.append(Fault("lock is empty", where, "at least one requirement", "none", fix))
    return locked, faults


Wrong = tuple[str, str, str]


def _line(line: str, target: Target) -> tuple[str, str, list[Wrong]]:
    """Return name, version (either may be empty) and what is wrong with one joined line, as (what, expected, found)."""
    if _EDITABLE.match(line):
        return _named(line), "", [("requirement is editable", "name==version", line)]
    if line.startswith("-"):
        return "", "", [("option in a lock", "requirements only", line)]
    words = line.split()
    cut = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    head, options = " ".join(words[:cut]), words[cut:]
    if _ADDRESS.search(head.partition(";")[0]):
        return _named(head), "", [("requirement is an address", "name==version", head)]
    wrong: list[Wrong] = []
    requirement, semicolon, marker = head.partition(";")
    if semicolon:
        wrong.append(_conditional(marker.strip(), target))
    match = _PINNED.fullmatch(requirement.strip())
    if match is None:
        name = _named(requirement)
        return name, "", [*wrong, ("requirement is not pinned", "name==version", requirement.strip())]
    name, version = normalised(match["name"]), match["version"]
    if match["extras"]:
        wrong.append(("requirement has extras", "the packages that they stand for", match["extras"]))
    wrong += _version_wrong(name, version, target)
    bad = [word for word in options if not _HASH.fullmatch(word)]
    if not options or bad:
        expected = "only --hash=sha256:... behind the version"
        wrong.append(("requirement is not hashed", expected, " ".join(bad) or "no hash"))
    return name, version, wrong


def _named(text: str) -> str:
    """Return the package that a wrong line is about, as well as that can be told."""
    if egg := re.search(rf"#egg=({_NAME.pattern})", text):
        return normalised(egg[1])
    match = _NAME.match(text.strip())
    alone = match and not re.match(r"[:/\\+]", text.strip()[match.end() :] or " ")
    return normalised(match[0]) if match and alone else ""


def _conditional(marker: str, target: Target) -> Wrong:
    expected = "a lock for one platform, without a marker"
    try:
        holds = Marker(marker).evaluate({**target.marker_environment()})
    except (InvalidMarker, ValueError, KeyError):
        return "requirement is conditional", expected, f"{marker or 'nothing'}, which is no marker"
    if holds:
        return "requirement is conditional", expected, marker
    return "marker is for another platform", f"Linux, x86-64, Python {target.python}", marker


def _version_wrong(name: str, text: str, target: Target) -> list[Wrong]:
    try:
        version = Version(text)
    except InvalidVersion:
        return [("version is no version", "as PEP 440 writes it", text)]
    for_gpu = version.local is not None and _GPU_BUILD.match(version.local) is not None
    for_gpu = for_gpu or (name.startswith("nvidia-") and name not in _NEUTRAL)
    what = "package is for another accelerator"
    if target.accelerator == "cpu" and for_gpu:
        return [(what, "a build for the CPU", f"{name}=={text}")]
    if target.accelerator == "cuda" and version.local == "cpu":
        return [(what, "a build for CUDA", f"{name}=={text}")]
    return []


def image_faults(spec: ImageSpec, project: Path) -> tuple[dict[str, str], list[Fault]]:
    """Return the packages of the lock of `spec`, and every fault of its two locks and of what is expected of them."""
    fix = f"`ferry image lock {spec.name}`, or mend the line"
    locked: dict[str, str] = {}
    faults: list[Fault] = []
    for lock in (spec.lock, spec.build_lock):
        text, unreadable = _text(project / lock, lock, fix)
        faults += unreadable
        if unreadable:
            continue
        # What builds packages from source is not part of the image, and the same for all.
        found, wrong = lint(text, lock, target_of(spec), fix)
        faults += wrong
        faults += _list_faults(project / lock, lock, found, target_of(spec), fix)
        if lock == spec.lock:
            locked = found
    return locked, faults


def _text(path: Path, where: str, fix: str) -> tuple[str, list[Fault]]:
    try:
        return path.read_bytes().decode("utf-8"), []
    except (OSError, UnicodeDecodeError) as error:
        return "", [Fault("lock cannot be read", where, "a text in UTF-8", str(error), fix)]


def _list_faults(path: Path, where: str, locked: Mapping[str, str], target: Target, fix: str) -> list[Fault]:
    """What the list that a lock was made from (`NAME.in`, if there is one) asks for, and the lock does not give."""
    listed = path.with_suffix(".in")
    if not listed.is_file():
        return []
    text, faults = _text(listed, listed.name, fix)
    for number, line in requirements(text):
        place = f"{Path(where).with_suffix('.in')}:{number}"
        try:
            wanted = Requirement(line)
        except InvalidRequirement as error:
            said = str(error).split("\n", maxsplit=1)[0]
            faults.append(Fault("requirement is not understood", place, "a requirement (PEP 508)", said, fix))
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({**target.marker_environment()}):
            continue
        name = normalised(wanted.name)
        version = locked.get(name)
        if version is None or not _satisfies(wanted, version):
            found = f"{name}=={version}" if version else "not in the lock"
            faults.append(Fault("lock is older than its list", f"{place}: {name}", line, found, fix))
    return faults


def _satisfies(wanted: Requirement, version: str) -> bool:
    try:
        return wanted.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def read_lock(spec: ImageSpec, project: Path) -> dict[str, str]:
    """Return normalised name -> version of the lock of `spec`. Raises `Refusal` with every fault of both locks."""
    locked, faults = image_faults(spec, project)
    fix = "lock again, or mend the expectation"
    if not faults:
        faults += [
            Fault(
                "lock is not as expected",
                f"{spec.lock}: {package}",
                version,
                locked.get(normalised(package), "absent"),
                fix,
            )
            for package, version in spec.expect.items()
            if locked.get(normalised(package)) != version
        ]
        faults += [
            Fault(
                "built from source, but not locked",
                f"images/{spec.name}.yaml: {package}",
                "in the lock",
                "absent",
                fix,
            )
            for package in spec.from_source
            if package not in locked
        ]
    if faults:
        raise Refusal(*faults)
    return locked
