"""The code archive: made the same every time, and unpacked only when nothing in it can do harm.

Promises: `make` gives the same bytes for the same files, whatever their order, times or owners; `read` takes regular
files and folders only, refuses every other entry by name before a byte is written, and bounds what it unpacks.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Literal

from runner.errors import Fault, Refusal
from runner.inside.tree import blob_id, tree_id
from runner.sums import unsafe_reason

_GZIP = b"\x1f\x8b"
LIMIT_FILES = 100_000
LIMIT_BYTES = 2 << 30
_PACK_AGAIN = "pack the code again with `ferry pack`, or with `git archive`"

Members = Mapping[str, tuple[bool, bytes]]


def make(files: Members) -> bytes:
    """Return a gzipped tar of `files`: relative path -> (executable, content)."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files, key=os.fsencode):
            executable, content = files[name]
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o755 if executable else 0o644
            tar.addfile(member, io.BytesIO(content))
    zipped = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=zipped, compresslevel=9, mtime=0) as file:
        file.write(packed.getvalue())
    return zipped.getvalue()


def collect(
    root: Path, *, skip: frozenset[str] = frozenset({"__pycache__"})
) -> dict[str, tuple[bool, bytes]]:
    """Return every file below `root` in the form that `make` takes, without folders named in `skip`."""
    files: dict[str, tuple[bool, bytes]] = {}
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if skip.intersection(relative.parts) or path.is_dir():
            continue
        if path.is_symlink() or not path.is_file():
            raise Refusal(
                Fault(
                    "not a regular file",
                    str(path),
                    "regular files and folders",
                    "a link or a device",
                    "remove it",
                )
            )
        files[str(relative)] = (os.access(path, os.X_OK), path.read_bytes())
    return files


def read(path: Path) -> dict[str, tuple[bool, bytes]]:
    """Return the files in the archive at `path`; nothing is written.

    Raises `Refusal` with every fault: absolute or climbing names, links, devices, setuid bits, repeated names, a file
    where a folder is needed, more than LIMIT_FILES files or LIMIT_BYTES bytes, or a damaged archive.
    """
    files: dict[str, tuple[bool, bytes]] = {}
    faults: list[Fault] = []
    total = 0
    try:
        # Gzip or none (S2): other compressions unpack to more than a limit on the result can bound.
        with path.open("rb") as raw, tarfile.open(fileobj=raw, mode=_mode_of(raw)) as tar:
            for member in tar:
                name = member.name.removesuffix("/") if member.isdir() else member.name
                if reason := _reason(member, name, files):
                    faults.append(
                        Fault(
                            "unsafe",
                            f"{path}: {name}",
                            "a plain file or folder inside it",
                            reason,
                            _PACK_AGAIN,
                        )
                    )
                    continue
                total += member.size
                if len(files) >= LIMIT_FILES or total > LIMIT_BYTES:
                    limit = f"at most {LIMIT_FILES} files and {LIMIT_BYTES} bytes"
                    raise Refusal(Fault("archive too large", str(path), limit, "more", _PACK_AGAIN))
                if member.isfile():
                    source = tar.extractfile(member)
                    assert source is not None
                    files[name] = (bool(member.mode & 0o100), source.read())
            _read_out(tar, path)
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError) as error:
        raise Refusal(
            Fault("archive damaged", str(path), "a tar archive, gzipped or not", str(error), _PACK_AGAIN)
        ) from error
    faults += [
        Fault("unsafe", f"{path}: {name}", "a file or a folder, not both", "both", _PACK_AGAIN)
        for name in files
        if any(str(parent) in files for parent in Path(name).parents)
    ]
    if faults:
        raise Refusal(*faults)
    return files


def _mode_of(raw: BinaryIO) -> Literal["r:gz", "r:"]:
    zipped = raw.read(len(_GZIP)) == _GZIP
    raw.seek(0)
    return "r:gz" if zipped else "r:"


def tree_of(files: Members) -> str:
    """Return the git tree id of `files`."""
    return tree_id({name: (executable, blob_id(content)) for name, (executable, content) in files.items()})


def unpack(files: Members, target: Path) -> None:
    """Write `files` below the new folder `target`, readable by all and writable by none."""
    target.mkdir(parents=True)
    for name, (executable, content) in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(content)
        path.chmod(0o555 if executable else 0o444)


def _read_out(tar: tarfile.TarFile, path: Path) -> None:
    """Read what follows the last entry: only then does gzip compare its checksum, and tell a cut-off stream."""
    rest = 0
    while chunk := tar.fileobj.read(1 << 20) if tar.fileobj is not None else b"":
        rest += len(chunk)
        if chunk.strip(b"\0") or rest > LIMIT_BYTES:
            raise Refusal(
                Fault("archive damaged", str(path), "zeros after its last entry", "other bytes", _PACK_AGAIN)
            )


def _reason(member: tarfile.TarInfo, name: str, files: Members) -> str | None:
    if reason := unsafe_reason(name):
        return reason
    if not (member.isfile() or member.isdir()):
        return "a link, a device or another special entry"
    if member.mode & 0o6000:
        return "setuid or setgid"
    if name in files:
        return "stands twice"
    return None
