"""Making an image's lock from its list: `lockfiles/NAME.in` to `NAME.txt`, by uv, for the image's platform.

Promises: every package pinned and hashed, no address of an index, no marker; what uv gives is linted before it is
taken, and told as a difference from the lock that is there; a version is kept where the list allows it, unless an
upgrade is asked for. Which indexes are asked is the caller's configuration, of pip or of uv.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner import process
from runner.errors import Fault, Refusal, refuse_if
from runner.image_lock import lint, target_of
from runner.image_spec import ImageSpec
from runner.inside.lock import normalised, requirements
from runner.record import write_file

_PLATFORM = "x86_64-manylinux_2_28"
_FIX = "see the last lines; PyTorch's CPU wheels come from PyTorch's own index (PIP_EXTRA_INDEX_URL) or a folder (PIP_FIND_LINKS)"


@dataclasses.dataclass(frozen=True)
class Change:
    """One package of a lock: its version before and after, None where it is not locked. Equal: its hashes changed."""

    package: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"+ {self.package} {self.after}"
        if self.after is None:
            return f"- {self.package} {self.before}"
        if self.before == self.after:
            return f"~ {self.package} {self.after}: other hashes"
        return f"~ {self.package} {self.before} -> {self.after}"


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A lock that was made, and not written yet: where it belongs, its text, and what it changes."""

    path: Path
    text: str
    changes: tuple[Change, ...]
    differs: bool

    def write(self) -> None:
        """Put it in place, whole; a lock of the same bytes is left as it is."""
        if self.differs:
            write_file(self.path, self.text.encode())


def resolve(spec: ImageSpec, project: Path, upgrade: Sequence[str] | None = None) -> Resolved:
    """Return the lock that the list of `spec` resolves to. `upgrade` names packages to renew; an empty one means all.

    Nothing is written. Raises `Refusal`: no list, uv finds no solution, or the result is no lock for this image.
    """
    lock = project / spec.lock
    listed = lock.with_suffix(".in")
    if not listed.is_file():
        fix = f"write what the image needs into {listed.name}, one requirement a line"
        raise Refusal(Fault("no list of requirements", str(listed), "a file", "none", fix))
    before = lock.read_text(encoding="utf-8") if lock.exists() else ""
    with tempfile.TemporaryDirectory(prefix="ferry-lock-") as folder:
        made = Path(folder) / lock.name
        # uv keeps the versions that it finds in the file that it writes.
        made.write_text(before, encoding="utf-8")
        command: list[str | Path] = [
            sys.executable, "-m", "uv", "pip", "compile", "--quiet", f"--python-version={spec.python}",
            f"--python-platform={_PLATFORM}", "--generate-hashes", "--no-header", "--no-emit-index-url",
            "--no-emit-find-links", *indexes(spec, os.environ), *_renewed(upgrade), listed.name, "-o", made,
        ]  # fmt: skip
        process.run(command, cwd=listed.parent, fix=_FIX)
        text = made.read_text(encoding="utf-8")
    _, faults = lint(text, f"{spec.lock}, as resolved", target_of(spec), f"mend {listed.name}")
    refuse_if(faults)
    return Resolved(lock, text, tuple(changes(before, text)), text != before)


def _renewed(upgrade: Sequence[str] | None) -> list[str]:
    if upgrade is None:
        return []
    return [f"--upgrade-package={name}" for name in upgrade] or ["--upgrade"]


def indexes(spec: ImageSpec, environment: Mapping[str, str]) -> list[str]:
    """Return what pip was told of indexes in `environment`, as words for uv, which reads its own variables only."""
    words: list[str] = []
    if index := environment.get("PIP_INDEX_URL"):
        words.append(f"--default-index={index}")
    more = environment.get("PIP_EXTRA_INDEX_URL", "").split()
    words += [f"--index={index}" for index in more]
    if more:
        # As pip has it: the best version of all indexes, not the first index's. What is taken is pinned by its hash.
        words.append("--index-strategy=unsafe-best-match")
    # PyTorch's CUDA wheels are the index's own: a folder of CPU wheels must not offer its own in their place.
    if spec.accelerator == "cpu":
        words += [f"--find-links={place}" for place in environment.get("PIP_FIND_LINKS", "").split()]
    return words


def changes(before: str, after: str) -> list[Change]:
    """Return what differs between two locks, by package."""
    old, new = _packages(before), _packages(after)
    return [
        Change(name, old[name][0] if name in old else None, new[name][0] if name in new else None)
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _packages(text: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name -> version and sorted hashes; a line that is no pinned requirement stands under its own text."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for _, line in requirements(text):
        head, *options = line.split()
        name, pinned, version = head.partition("==")
        found[normalised(name) if pinned else line] = version, tuple(sorted(options))
    return found
