"""An image's last layer, /opt/ferry: the start program, the lock, the SBOM, the list of all files, and IDENTITY.

Promises: the same inputs and the same facts give the same bytes. The list covers all that Python runs or imports in the
image, this layer included; IDENTITY names the list's digest, and the image's labels repeat IDENTITY.
"""

from __future__ import annotations

import dataclasses
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from runner.image_inputs import EPOCH_S, Identity, ImageInputs, read_file
from runner.inside import installed
from runner.inside.digests import sha256_bytes

SBOM_NAME = "sbom.cdx.json"
_HOME = "opt/ferry"
# What `runner.inside.facts` needs: the engine looks at an environment again only when one of these changes.
_LOOKS = (
    "runner/__init__.py", "runner/errors.py", "runner/inside/__init__.py", "runner/inside/digests.py",
    "runner/inside/facts.py", "runner/inside/installed.py", "runner/inside/reading.py", "runner/inside/spread.py",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Layer:
    """The layer as a tar, and what the image says of itself."""

    tar: bytes
    identity: Identity


def look_tar(inputs: ImageInputs) -> bytes:
    """Return the program that looks at an environment, as a tar."""
    return _tar({f"{_HOME}/{name}": inputs.start[name] for name in _LOOKS})


def make_layer(inputs: ImageInputs, base: str, facts: Path) -> Layer:
    """Return the last layer for the environment that `facts` (the folder that `runner.inside.facts` filled) tells of.

    Raises `Refusal` when the facts are damaged.
    """
    # Slow to import, and needed by a build only.
    from runner import image_sbom

    name = facts / "packages.json"
    packages = image_sbom.read_packages(read_file(name), str(name))
    properties = {"lock": inputs.lock, "base": base, "recipe": inputs.recipe, "inputs": inputs.inputs}
    files = {
        f"{_HOME}/{name}": content for name, content in inputs.start.items() if name.startswith("runner/")
    }
    files |= {
        f"{_HOME}/start": inputs.start["images/start.py"],
        f"{_HOME}/lock.txt": read_file(inputs.project / inputs.spec.lock),
        f"{_HOME}/{SBOM_NAME}": image_sbom.to_json(
            inputs.spec.name, inputs.version, properties, packages, EPOCH_S
        ),
    }
    listed = _listed(files, facts / installed.LIST_NAME)
    identity = inputs.identity(base, "sha256:" + sha256_bytes(listed))
    files |= {
        f"{_HOME}/{installed.LIST_NAME}": listed,
        f"{_HOME}/{installed.IDENTITY_NAME}": identity.to_json(),
    }
    return Layer(_tar(files), identity)


def _listed(files: Mapping[str, bytes], environment: Path) -> bytes:
    """The list of the environment's files with those of this layer, which lie outside of it."""
    entries = dict(installed.parse(read_file(environment), str(environment)).entries)
    for folder in _folders(files):
        if folder.startswith(_HOME):
            entries[folder] = installed.Entry("dir", 0o755)
    for name, content in files.items():
        entries[name] = installed.Entry("file", 0o644, len(content), sha256_bytes(content), time_s=EPOCH_S)
    return installed.FileList(entries).to_bytes()


def _folders(files: Mapping[str, bytes]) -> set[str]:
    return {parent.as_posix() for name in files for parent in Path(name).parents} - {"."}


def _tar(files: Mapping[str, bytes]) -> bytes:
    """Same content, same bytes: no time, owner or mode of the builder's checkout gets in."""
    folders = _folders(files)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in sorted(folders | files.keys()):
            member = tarfile.TarInfo(name)
            member.mtime = EPOCH_S
            member.mode = 0o644
            if name in folders:
                member.type, member.mode = tarfile.DIRTYPE, 0o755
            member.size = len(files.get(name, b""))
            tar.addfile(member, io.BytesIO(files.get(name, b"")))
    return buffer.getvalue()
