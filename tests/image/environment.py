"""Makes a tiny good environment, as venv, pip and the build leave one, so that a test can break it in one named way."""

from __future__ import annotations

import base64
import hashlib
import os
import py_compile
import sys
from pathlib import Path

from runner.inside import installed
from runner.record import to_json

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
SITE = f"lib/python{VERSION}/site-packages"
HASH = "--hash=sha256:" + "0" * 64
# Package -> its files, by path below site-packages.
PACKAGES = {
    "good": {
        "good/__init__.py": b"VALUE = 1\n",
        "good/deep/__init__.py": b"from good import VALUE\n",
        "good/op.so": b"\x7fELF machine code",
        "good/data file [1].txt": "schön\n".encode(),
        "good-hook.pth": b"import good\n",
        "../../../bin/good": b"#!/opt/venv/bin/python\nimport good\n",
    },
    "other": {"other.py": b"import good\n"},
}


def compiled(source: Path) -> Path:
    """Write the byte code of `source` as the build does: never checked again at run time."""
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    return Path(
        py_compile.compile(str(source), dfile=source.name, doraise=True, invalidation_mode=mode) or ""
    )


def write_record(site: Path, package: str, files: dict[str, bytes]) -> None:
    """Write the RECORD of `package`, as an installer does."""
    info = f"{package}-1.dist-info"
    rows = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(content)}\n")
    (site / info / "RECORD").write_text("".join([*rows, f"{info}/RECORD,,\n"]))


def make_environment(root: Path) -> Path:
    """Lay out an environment at `root`, with lock, IDENTITY and list beside it; return it."""
    site = root / SITE
    for package, contents in PACKAGES.items():
        info = f"{package}-1.dist-info"
        metadata = f"Metadata-Version: 2.4\nName: {package}\nVersion: 1\nLicense-Expression: MIT\n"
        files = {**contents, f"{info}/METADATA": metadata.encode(), f"{info}/INSTALLER": b"pip\n"}
        for name, content in files.items():
            path = site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        write_record(site, package, files)
    for source in sorted(site.rglob("*.py")):
        compiled(source)
    (root / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    (root / "bin" / "python3").symlink_to("/usr/bin/python3")
    (root / "bin" / "python").symlink_to("python3")
    (root / "lib64").symlink_to("lib")
    (root / "include").mkdir()
    (root / "lock.txt").write_text("".join(f"{name}==1 {HASH}\n" for name in PACKAGES))
    write_list(root)
    return root


def make_image(root: Path) -> Path:
    """Lay out an image's file system at `root`, as far as its list goes: the environment, a library, /opt/ferry."""
    make_environment(root / "opt" / "venv")
    (root / "opt" / "ferry").mkdir()
    for name in (*installed.OWN_NAMES - {"RECIPE"},):
        path = root / "opt" / "venv" / name
        if name == "lock.txt":
            path.rename(root / "opt" / "ferry" / name)
        else:
            path.unlink()
    library = root / "usr" / "lib" / "python3"
    library.mkdir(parents=True)
    (library / "os.py").write_text("# the library\n")
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.utime(path, ns=(0, 5_000_000_000))
    write_image_list(root)
    return root


def write_image_list(root: Path) -> None:
    """Write the list of what lies in the image at `root` now, and an IDENTITY that names it."""
    own = frozenset(f"opt/ferry/{name}" for name in (installed.LIST_NAME, installed.IDENTITY_NAME))
    roots = ["opt/ferry", "opt/venv", "usr/lib/python3"]
    raw = installed.list_of(root, roots, timed=True, leave_out=own)[0].to_bytes()
    (root / "opt" / "ferry" / installed.LIST_NAME).write_bytes(raw)
    identity = {"files": f"sha256:{hashlib.sha256(raw).hexdigest()}"}
    (root / "opt" / "ferry" / installed.IDENTITY_NAME).write_bytes(to_json(identity))


def write_list(root: Path) -> None:
    """Write the list of what lies at `root` now, its stamps and an IDENTITY, as the build does at its end."""
    listed, stamps = installed.list_of(root, ["."], timed=False, leave_out=installed.OWN_NAMES)
    (root / installed.LIST_NAME).write_bytes(listed.to_bytes())
    (root / installed.STAMPS_NAME).write_bytes(to_json(stamps))
    (root / "IDENTITY").write_bytes(to_json({"files": "host"}))
