"""`{output}/train/events.jsonl` and the run's one-line announcements on stdout.

Promise: every event is one line, written whole by rank 0; no event holds an absolute path. Standard library
only.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from trainer.durable import Appender


def announce(line: str) -> None:
    """Write a line to stdout in one piece, so that the lines of several ranks do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _finite_or_name(value: Any) -> Any:
    """JSON has no NaN: a float that is not finite is written as the string "nan", "inf" or "-inf"."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Events:
    """Appends events on the rank that has a file, and does nothing on the others.
    Never trimmed: a history.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = Appender(path) if path is not None else None

    def write(self, event: str, **fields: Any) -> None:
        """Append one event."""
        if self._file is not None:
            told = {name: _finite_or_name(value) for name, value in fields.items()}
            line = json.dumps({"event": event, **told}, ensure_ascii=False, allow_nan=False)
            self._file.append(line.encode("utf-8") + b"\n")
