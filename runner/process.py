"""The one module that starts host processes.

Promises: no shell, arguments as a list, the environment named in full by the caller or inherited on purpose, output
captured or streamed line by line; a missing program or a failure is a `Refusal` that shows the end of the output.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from runner.errors import ExitCode, Fault, Refusal

_TAIL_LINES = 25


@dataclasses.dataclass(frozen=True)
class Finished:
    """A process that has ended: its exit status and everything that it printed (stdout and stderr together)."""

    status: int
    output: str


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    fix: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    check: bool = True,
    timeout_s: float | None = None,
    stdin: Path | None = None,
) -> Finished:
    """Run `command` to its end and return it.

    `env` replaces the environment; None inherits it. `on_line` sees every line as it comes. With `check`, a status
    other than 0 raises `Refusal` whose fault carries the last lines of the output and `fix`. `timeout_s` bounds a
    process that is not followed by `on_line`. `stdin` is a file that it reads; without one it reads nothing.
    """
    words = [os.fspath(word) for word in command]
    try:
        with Path(os.devnull if stdin is None else stdin).open("rb") as source:
            process = subprocess.Popen(
                words,
                cwd=cwd,
                env=None if env is None else dict(env),
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="backslashreplace",
            )
    except OSError as error:
        raise Refusal(
            Fault("program does not start", words[0], "an executable program", str(error), fix),
            exit_code=ExitCode.FAILED,
        ) from error
    with process:
        if on_line is None:
            output = _collect(process, words, timeout_s, fix)
        else:
            lines = []
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                on_line(line.rstrip("\n"))
            output = "".join(lines)
    finished = Finished(process.returncode, output)
    if check and finished.status != 0:
        raise Refusal(
            Fault(
                "command failed",
                " ".join(words[:6]) + (" ..." if len(words) > 6 else ""),
                "exit status 0",
                f"exit status {finished.status}\n" + tail(output),
                fix,
            ),
            exit_code=ExitCode.FAILED,
        )
    return finished


def run_for_bytes(
    command: Sequence[str | os.PathLike[str]], *, fix: str, check: bool = True, timeout_s: float = 600.0
) -> bytes | None:
    """Run `command` to its end and return the bytes of its standard output; None if it failed and that is not `check`ed.

    For what is hashed: nothing is decoded, and nothing that it says on the side gets in. Raises `Refusal` as `run` does.
    """
    words = [os.fspath(word) for word in command]
    shown = " ".join(words[:6]) + (" ..." if len(words) > 6 else "")
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        fault = Fault("command failed", shown, "exit status 0", str(error), fix)
        raise Refusal(fault, exit_code=ExitCode.FAILED) from error
    if done.returncode == 0:
        return done.stdout
    if not check:
        return None
    found = f"exit status {done.returncode}\n" + tail(done.stderr.decode("utf-8", "backslashreplace"))
    raise Refusal(Fault("command failed", shown, "exit status 0", found, fix), exit_code=ExitCode.FAILED)


def _collect(process: subprocess.Popen[str], words: list[str], timeout_s: float | None, fix: str) -> str:
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.communicate()
        raise Refusal(
            Fault(
                "command hangs",
                words[0],
                f"an end within {timeout_s:g} s",
                "still running; it was killed",
                fix,
            ),
            exit_code=ExitCode.FAILED,
        ) from error


def tail(output: str, lines: int = _TAIL_LINES) -> str:
    """Return the last `lines` lines of `output`, indented as part of a fault."""
    return "\n".join("      | " + line for line in output.rstrip("\n").split("\n")[-lines:])
