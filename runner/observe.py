"""Looking at this host: engine, NVML, files, folders, clock, environment.

Promises: nothing is written but the probe of the run's folder, which is removed again; whatever does not answer in time
is given up and told, so a hanging engine, driver or file server never hangs the caller; NVML is asked by a process of
its own.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import shutil
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from runner import host, process
from runner.docker_engine import connect
from runner.engine_info import read_info
from runner.errors import Refusal
from runner.folder_probe import Folder, measure, probe
from runner.nvml import Recording
from runner.observations import EngineSeen, HubCache, Observations, engine_seen

T = TypeVar("T")

ENGINE_S = 20.0
NVML_S = 30.0
FOLDER_S = 20.0
HUB_S = 5.0
_SECRETS = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HUGGINGFACE_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
)
CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")
# adjtimex(2): the return value of a clock that nothing disciplines.
_TIME_ERROR = 5
_TIMEX_BYTES = 256


def observe(run_folder: Path, *, root: Path = Path("/"), on_step: Callable[[str], None]) -> Observations:
    """Look at everything once; `on_step` hears what is looked at. `root` is where the host's files lie."""
    on_step("the engine")
    engine = _engine()
    on_step("the GPUs")
    nvml = ask_nvml()
    on_step("memory and limits")
    info = read_info(engine.info, engine.version)
    files = host.read_files(root, [info.cgroup_parent], info.cdi_folders or CDI_FOLDERS)
    on_step("the file systems")
    place = Path(info.root) if info.root else None
    return Observations(
        engine=engine,
        nvml=nvml,
        files=files,
        missing=tuple(path for path in host.cdi_paths(files) if _is_missing(root / path.lstrip("/"))),
        run_folder=_folder(probe, run_folder),
        engine_folder=None if place is None else _folder(measure, place),
        shm=_folder(measure, Path("/dev/shm")),  # noqa: S108 - looked at, not written to
        hub=_hub(),
        secrets=tuple(name for name in _SECRETS if os.environ.get(name)),
        clock=(datetime.datetime.now(datetime.UTC).year, _synchronised()),
        build=_build_tools(),
    )


def within(limit_s: float, function: Callable[[], T], late: T) -> T:
    """Return what `function` returns, or `late` if it takes longer than `limit_s`; what it raises is raised.

    What hangs is left behind in a thread that does not keep the program from ending.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(function())
        except Exception as error:  # noqa: BLE001 - raised again where it was asked for
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    return results[0] if results else late


def _is_missing(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False  # It cannot be seen by this user, which says nothing.
    return False


def _engine() -> EngineSeen:
    def ask() -> EngineSeen:
        client = connect()
        buildx, compose = (
            _says("docker", "buildx", "version"),
            _says("docker", "compose", "version", "--short"),
        )
        return engine_seen(client.info(), client.version(), buildx, compose)

    late = EngineSeen(f"does not answer within {ENGINE_S:g} s", {}, {}, None, None)
    try:
        return within(ENGINE_S, ask, late)
    except Refusal as refusal:
        return EngineSeen(refusal.faults[0].found, {}, {}, None, None)


def _says(*command: str) -> str | None:
    try:
        finished = process.run(command, fix="install it", check=False, timeout_s=ENGINE_S / 3)
    except Refusal:
        return None
    return finished.output.strip() if finished.status == 0 else None


def ask_nvml() -> Recording:
    """Return NVML's answers, asked by a process of its own: an ill driver blocks in the kernel, where no signal reaches."""
    command = [sys.executable, "-P", "-m", "runner.nvml"]

    def ask() -> Recording:
        finished = process.run(command, fix="see its message", check=False, timeout_s=NVML_S - 1)
        try:
            value = json.loads(finished.output)
        except ValueError:
            value = {"nvmlInit": {"error": f"asking failed: {process.tail(finished.output, 3).strip()}"}}
        return dict(value)

    late = {"nvmlInit": {"error": f"NVML does not answer within {NVML_S:g} s"}}
    try:
        return within(NVML_S, ask, late)
    except Refusal:
        return late


def _folder(look: Callable[[Path], Folder], path: Path) -> Folder:
    late = Folder(str(path), f"the file system does not answer within {FOLDER_S:g} s")
    return within(FOLDER_S, lambda: look(path), late)


def _hub() -> HubCache:
    home = os.environ.get("HF_HOME") or str(
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    path = Path(home).expanduser()
    if not within(HUB_S, path.is_dir, late=False):
        return HubCache(str(path), exists=False, size_bytes=None)

    def size() -> int | None:
        try:
            return sum(
                (Path(folder) / name).lstat().st_size for folder, _, names in os.walk(path) for name in names
            )
        except OSError:
            return None

    return HubCache(str(path), exists=True, size_bytes=within(HUB_S, size, late=None))


def _synchronised() -> bool | None:
    """Whether the kernel holds the clock for synchronised, by adjtimex(2) with nothing to change."""
    adjtimex = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)
    if adjtimex is None:
        return None
    state = int(adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
    return None if state < 0 else state != _TIME_ERROR


def _build_tools() -> dict[str, bool]:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return {"g++": shutil.which("g++") is not None, "Python.h": header.is_file()}
