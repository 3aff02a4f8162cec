"""What a container looks like from inside, told by the trainer in it; and what it leaves for the next segment."""

from __future__ import annotations

import getpass
import grp
import os
import pwd
import resource
import time
from pathlib import Path
from typing import Any

FOLDERS = (
    "/",
    "/etc",
    "/opt/venv",
    "/ferry/bundle",
    "/ferry/code",
    "/ferry/control",
    "/ferry/run",
    "/tmp/caches",
)
LOCK = "lock"


def look() -> dict[str, Any]:
    """Return everything that the launch plan decides, as this process finds it."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    shm = os.statvfs("/dev/shm")
    return {
        "user": [os.getuid(), os.getgid(), getpass.getuser(), pwd.getpwuid(os.getuid()).pw_name,
                 grp.getgrgid(os.getgid()).gr_name],
        "gpus": sorted(path.name for path in Path("/dev").glob("nvidia*")),
        "shm_bytes": shm.f_blocks * shm.f_frsize,
        "limits": {
            name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
            for name in ("memlock", "nofile", "stack")
        },
        "authority": {name: status[name] for name in ("CapEff", "CapBnd", "NoNewPrivs")},
        "init": Path("/proc/1/comm").read_text().strip(),
        "zombies": zombies(),
        "interfaces": sorted(path.name for path in Path("/sys/class/net").iterdir()),
        "environment": dict(os.environ),
        "writable": [folder for folder in FOLDERS if writable(Path(folder))],
        "extensions": left_in("TORCH_EXTENSIONS_DIR"),
        "kernels": left_in("TRITON_CACHE_DIR"),
    }  # fmt: skip


def left_in(name: str) -> list[str]:
    """What lies in the folder of that variable; then leave a file there, as a build that is killed leaves its lock."""
    folder = Path(os.environ[name])
    found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOCK).touch()
    return found


def writable(folder: Path) -> bool:
    """Whether a file can be made in `folder`."""
    try:
        (folder / ".written").touch()
        (folder / ".written").unlink()
    except OSError:
        return False
    return True


def zombies() -> int:
    """Leave an orphan behind that ends, and return how many dead processes nobody has buried a while later."""
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 10
    while (dead := orphans()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return dead


def orphans() -> int:
    """How many dead children process 1 has."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # It has just been buried.
        count += state == "Z" and parent == "1"
    return count
