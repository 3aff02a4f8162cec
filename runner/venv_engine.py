"""The embedded engine, for machines without a container engine: the same lock and the same checks, no isolation.

Promises: the run starts in its own session, so that a signal reaches all of it; its environment is the plan's and
nothing else; assets appear at their origin by symbolic links that are made only where nothing is. What it cannot give
(no network, a read-only root, memory limits) it does not pretend to: `ferry resume` says so each time.
"""

from __future__ import annotations

import json
import os
import shutil
import signal as signals
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from runner.engine import Lines, Phase, State
from runner.errors import ExitCode, Fault, Refusal, refuse_if
from runner.plan import LaunchPlan
from runner.record import to_json, write_file

_POLL_S = 0.2
_PARENT = Path(__file__).resolve().parent.parent
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from runner.inside.start import main; main()"
# Reaps the run and records how it ended, also when the process that started it is gone.
_WARDEN = (
    "import json, os, subprocess, sys; log, ended, *argv = sys.argv[1:]; "
    "out = open(log, 'ab'); "
    "code = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT).returncode; "
    "aside = ended + '.new'; open(aside, 'w').write(json.dumps({'exit_code': code})); os.replace(aside, ended)"
)


class VenvEngine:
    """`engine.Engine` for a locked virtual environment. `folder` is the run folder: state lies in its `scratch`."""

    def __init__(self, folder: Path) -> None:
        self._scratch = folder / "scratch"
        self._process = self._scratch / "process.json"
        self._ended = self._scratch / "ended.json"
        self._log = self._scratch / "console.log"
        self._links = self._scratch / "links.json"

    def prepare(self, plan: LaunchPlan) -> None:
        """Make the links that stand in for mounts; `remove` takes them away again, as a container's mounts go with it.

        Raises `Refusal` naming each that cannot be made, and then leaves none.
        """
        faults: list[Fault] = []
        made = self._made()  # Those of a run that was killed are ours still.
        for link, target in plan.links.items():
            if Path(link).resolve() == Path(target).resolve():
                continue  # It is there already.
            fault = self._link_fault(Path(link), target)
            if fault is None:
                made[link] = target
            else:
                faults.append(fault)
        write_file(self._links, to_json(made))
        if faults:
            self._unlink()
        refuse_if(faults)

    def _link_fault(self, link: Path, target: str) -> Fault | None:
        if link.is_symlink() or (link.exists() and not _is_empty_folder(link)):
            fix = f"move it away, or use the docker engine, which mounts {target} there"
            return Fault(
                "origin is taken", str(link), f"nothing, or a link to {target}", "something else", fix
            )
        try:
            if link.exists():
                link.rmdir()
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
        except OSError as error:
            fix = f"as root: ln -s {target} {link}; or use the docker engine, which mounts it"
            return Fault("origin cannot be linked", str(link), f"a link to {target}", str(error), fix)
        return None

    def _made(self) -> dict[str, str]:
        """The recorded links that are still what was made."""
        try:
            recorded = json.loads(self._links.read_bytes())
        except (OSError, ValueError):
            return {}
        return {
            link: target
            for link, target in recorded.items()
            if os.path.islink(link) and os.readlink(link) == target  # noqa: PTH114, PTH115 - the text, not a path
        }

    def _unlink(self) -> None:
        for link in self._made():
            Path(link).unlink()
        self._links.unlink(missing_ok=True)

    def start(self, plan: LaunchPlan) -> None:
        """Start the start program in the venv of the plan, in a session of its own."""
        if self.inspect(plan.name).phase is Phase.RUNNING:
            fault = Fault(
                "the run is running",
                plan.name,
                "no such process",
                "a running one",
                "end it with `ferry stop`",
            )
            raise Refusal(fault, exit_code=ExitCode.LEASE_HELD)
        # New at each start: a build that was killed leaves a lock there, for which every later one waits.
        shutil.rmtree(self._scratch / "torch-extensions", ignore_errors=True)
        for folder in ("home", "huggingface", "torch-extensions"):
            (self._scratch / folder).mkdir(parents=True, exist_ok=True)
        self._ended.unlink(missing_ok=True)
        self._log.unlink(missing_ok=True)
        self._log.touch()
        python = plan.image.python
        inner = [python, "-I", "-c", _START, str(_PARENT), *plan.command]
        environment = {
            **plan.environment,
            "PATH": f"{Path(python).parent}:/usr/bin:/bin",
            **plan.image.environment,
        }
        process = subprocess.Popen(
            [python, "-I", "-c", _WARDEN, str(self._log), str(self._ended), *inner],
            env=environment,
            cwd=self._scratch,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        write_file(
            self._process, to_json({"pid": process.pid, "born": psutil.Process(process.pid).create_time()})
        )

    def follow(self, name: str, on_line: Callable[[str], None]) -> State:
        """Follow the console file, from its beginning, until the process has ended."""
        lines = Lines(on_line)
        with self._log.open("rb") as log:
            while True:
                running = self.inspect(name).phase is Phase.RUNNING
                while chunk := log.read(1 << 16):
                    lines.feed(chunk)
                if not running:
                    lines.close()
                    return self.inspect(name)
                time.sleep(_POLL_S)

    def signal(self, name: str, signal: str) -> None:  # noqa: ARG002 - the engine's Protocol
        """Send `signal` to the start program (torchrun hands SIGTERM on); SIGKILL goes to the whole session."""
        process = self._alive()
        if process is None:
            return
        number = signals.Signals[signal]
        if number == signals.SIGKILL:
            os.killpg(process.pid, number)
        else:
            for child in process.children():
                child.send_signal(number)

    def inspect(self, name: str) -> State:  # noqa: ARG002 - the engine's Protocol
        """Read how the process ended, or see that it runs; one that vanished without a word has no exit code."""
        if self._alive() is not None:
            return State(Phase.RUNNING)
        if self._ended.exists():
            return State(Phase.ENDED, json.loads(self._ended.read_bytes())["exit_code"])
        return State(Phase.ENDED) if self._process.exists() else State(Phase.ABSENT)

    def remove(self, name: str) -> None:  # noqa: ARG002 - the engine's Protocol
        """Forget the ended process, and take its links away."""
        self._unlink()
        self._process.unlink(missing_ok=True)
        self._ended.unlink(missing_ok=True)

    def _alive(self) -> psutil.Process | None:
        try:
            record = json.loads(self._process.read_bytes())
            process = psutil.Process(record["pid"])
            alive = process.create_time() == record["born"] and process.status() != psutil.STATUS_ZOMBIE
        except (OSError, ValueError, KeyError, TypeError, psutil.Error):
            return None
        return process if alive else None


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())
