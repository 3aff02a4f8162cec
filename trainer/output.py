"""The output folder of a run on this server: every path in it, and making it ready for a start.

Promise: a fresh start never writes over a run that has checkpoints, and a resume at update N leaves nothing
in the folder that is later than N: it is moved below `train/recovery-history/`, never deleted. Only hidden
leftovers of saves and deletions that were cut off are removed. Rank 0 alone calls `prepare_*`. Standard
library only.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import folder_name
from trainer.durable import document_bytes, sync_folder, write_document
from trainer.exposure import next_history, trim_logs
from trainer.refusal import Difference, Refusal
from trainer.stop import REQUEST_NAME

_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]*)", re.ASCII)


@dataclass(frozen=True)
class Prepared:
    """What making ready did: names, relative to the output folder."""

    swept: tuple[str, ...]
    set_aside: tuple[str, ...]


@dataclass(frozen=True)
class Output:
    """Paths below `--output`."""

    folder: Path

    @property
    def train(self) -> Path:
        return self.folder / "train"

    @property
    def request(self) -> Path:
        return self.train / REQUEST_NAME

    @property
    def outcome(self) -> Path:
        return self.train / "OUTCOME.json"

    @property
    def events(self) -> Path:
        return self.train / "events.jsonl"

    @property
    def final(self) -> Path:
        return self.folder / "final"

    def checkpoint(self, update: int) -> Path:
        return self.folder / folder_name(update)

    def checkpoints(self) -> dict[int, Path]:
        """Folders named like a checkpoint, by update, complete or not."""
        named = ((_CHECKPOINT.fullmatch(path.name), path) for path in self.folder.iterdir())
        return {int(match.group(1)): path for match, path in sorted(named, key=lambda n: n[1].name) if match}

    def write_outcome(self, outcome: str, update: int, checkpoint: str, request: str | None) -> None:
        """Say, durably, how this process ended: "finished" or "stopped"."""
        content = {"outcome": outcome, "update": update, "checkpoint": checkpoint, "request": request}
        write_document(self.outcome, document_bytes(content))

    def _start(self) -> tuple[str, ...]:
        (self.train / "exposure").mkdir(parents=True, exist_ok=True)
        swept = [
            p for p in self.folder.iterdir() if p.name.startswith((".saving-", ".deleting-")) and p.is_dir()
        ]
        for path in swept:
            shutil.rmtree(path)
        self.outcome.unlink(missing_ok=True)
        return tuple(sorted(path.name for path in swept))

    def prepare_fresh(self, world: int) -> Prepared:
        """Make ready for update 1. Logs of a start that never reached a checkpoint are set aside.

        Raises:
            Refusal: when the folder holds a checkpoint or `final`; then nothing was changed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        there = [path.name for path in self.checkpoints().values()] + (
            ["final"] if self.final.exists() else []
        )
        if there:
            wrong = [Difference(name, "no such folder", "a folder of an earlier start") for name in there]
            raise Refusal("this output holds a run", wrong, "give --resume-from, or another --output")
        swept = self._start()
        return Prepared(
            swept, tuple(trim_logs(self.train, 0, world, next_history(self.train, 0), fresh=True))
        )

    def prepare_resume(self, update: int, world: int) -> Prepared:
        """Make ready for update N + 1: logs cut to N, everything later set aside.

        Raises:
            Refusal: when a log does not reach N; then nothing was changed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        history = next_history(self.train, update)
        cut = trim_logs(self.train, update, world, history)
        swept = self._start()
        later = [path for number, path in self.checkpoints().items() if number > update]
        for path in later + ([self.final] if self.final.exists() else []):
            history.mkdir(parents=True, exist_ok=True)
            os.rename(path, history / path.name)
            cut.append(path.name)
        sync_folder(self.folder)
        return Prepared(swept, tuple(cut))
