"""Taking turns: two ways to do the same, measured side by side, as a ratio; and a table of such ratios.

Promises: ours and the peer's runs alternate, so that a machine that others use too treats both alike; the median counts;
the rest of a document stays as it is when its table is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

RUNS = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """One measure: seconds of ours and of the peer, the ratio that the budget speaks of, and the budget."""

    what: str
    ours_s: float
    peer: str
    peer_s: float
    ratio: str
    budget: str

    def __str__(self) -> str:
        cells = (
            self.what,
            f"{self.ours_s:.2f} s",
            self.peer,
            f"{self.peer_s:.2f} s",
            self.ratio,
            self.budget,
        )
        return "| " + " | ".join(cells) + " |"


HEAD = "| what | ours | peer | peer's | ratio | budget |\n| --- | --- | --- | --- | --- | --- |"


def in_turns(
    ours: Callable[[], object],
    peer: Callable[[], object],
    *,
    runs: int = RUNS,
    before: Callable[[], object] | None = None,
) -> tuple[float, float]:
    """Return the median seconds of `ours` and of `peer`, in turns; `before` is run before each and not measured."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs):
        for work, taken in zip((ours, peer), seconds, strict=True):
            if before is not None:
                before()
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def times_as_fast(what: str, peer: str, seconds: tuple[float, float], budget: str) -> Row:
    """A row whose ratio is how many times as fast as the peer ours is."""
    return Row(what, seconds[0], peer, seconds[1], f"{seconds[1] / seconds[0]:.2f} x as fast", budget)


def times_as_long(what: str, peer: str, seconds: tuple[float, float], budget: str) -> Row:
    """A row whose ratio is how many times as long as the peer ours takes."""
    return Row(what, seconds[0], peer, seconds[1], f"{seconds[0] / seconds[1]:.2f} x as long", budget)


def peak_mib(command: Sequence[str]) -> float:
    """Run `command` and return the most memory that it held at once, in MiB, asked for every 5 ms.

    Not `ru_maxrss`: that counts what this process held when it started the command.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    status = Path(f"/proc/{process.pid}/status")
    peak_kib = 0
    while process.poll() is None:
        with contextlib.suppress(OSError, StopIteration):
            text = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
            peak_kib = max(peak_kib, int(text.split()[1]))
        time.sleep(0.005)
    if process.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}")
    return peak_kib / 1024


def write_section(document: Path, name: str, text: str) -> None:
    """Put `text` between the marks of `name` in `document`; what stands outside of them stays."""
    begin, end = f"<!-- {name}: made by bench -->", f"<!-- end of {name} -->"
    old = document.read_text("utf-8")
    if begin not in old or end not in old:
        raise ValueError(f"{document} has no place for {name}")
    head, _, rest = old.partition(begin)
    tail = rest.partition(end)[2]
    document.write_text(f"{head}{begin}\n\n{text}\n\n{end}{tail}", "utf-8")
