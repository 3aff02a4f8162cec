"""A real registry (Debian's docker-registry) on loopback, for one test session, with its own folder and port."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

CONFIG = """\
version: 0.1
log: {{level: error}}
storage:
  filesystem: {{rootdirectory: '{root}'}}
  delete: {{enabled: true}}
http:
  addr: 127.0.0.1:{port}
"""


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Start a registry that keeps its blobs in `folder`; yields HOST:PORT, ends it by its pid."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = folder / "blobs"
    settings = folder / "config.yml"
    settings.write_text(CONFIG.format(root=str(root).replace("'", "''"), port=port))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(settings)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    host = f"127.0.0.1:{port}"
    try:
        _wait(process, host, folder / "log")
        yield host
    finally:
        process.terminate()
        process.wait()


def _wait(process: subprocess.Popen[bytes], host: str, log: Path) -> None:
    while True:
        try:
            with urllib.request.urlopen(f"http://{host}/v2/", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
