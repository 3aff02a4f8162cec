"""All benchmarks, one after the other, into docs/benchmarks.md: `python -m bench` (as root, on a quiet machine)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
PARTS = (
    ("bench.bundles", "--gib", "4", "--files", "100000"),
    ("bench.preparing", "--gib", "4", "--rows", "3000000"),
)


def main() -> None:
    """Run every part with the sizes that the design's budgets speak of; `--work DIR` and the like go to each."""
    for name, *sizes in PARTS:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", name, *sizes, "--write", str(DOCUMENT), *sys.argv[1:]]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
