"""A trainer of the standard library only, for tests of everything around a trainer.

Its "loss" is a recurrence over the update and the rank, so that a wrong resume shows in every later update.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import time
from pathlib import Path

from scripted.look import look
from scripted.saving import save_checkpoint

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])


def main() -> None:
    """Train to the end, or until asked to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--resume-from", type=Path)
    parser.add_argument("--seconds", type=float, default=0.02)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--crash-at", type=int)
    parser.add_argument("--look", action="store_true", help="write what the container looks like from inside")
    parser.add_argument("--shout", type=int, default=0, help="MiB of lines to print first")
    options = parser.parse_args()
    for line in range(options.shout << 14):
        print(f"{line:063}")
    if options.look and RANK == 0:
        path = options.output / f"seen-{os.environ['FERRY_SEGMENT']}.json"
        path.write_text(json.dumps(look()))
    rows = [json.loads(line) for line in options.manifest.read_text().splitlines()]
    for row in rows:
        Path(row["image"]).read_bytes()
    Path("/mnt/origin/teacher.bin").read_bytes()
    update, state = 0, 0.0
    if options.resume_from is not None:
        raw = (options.resume_from / "model.safetensors").read_bytes()
        state = struct.unpack("<d", raw[-8:])[0]
        update = json.loads((options.resume_from / "trainer_state.json").read_text())["global_step"]
        trim(options.output, update)
        print(f"RESUMED update={update}", flush=True)
    print(f"SCHEDULE_GATE_PASS ({options.updates}, 0)", flush=True)
    while update < options.updates:
        update += 1
        state = state * 0.5 + update
        log(options.output, update, state, rows, options.updates)
        time.sleep(options.seconds)
        if options.crash_at == update:
            raise SystemExit("asked to crash")
        request = stop_requested(options.output, update)
        if RANK == 0 and (update % options.save_every == 0 or update == options.updates or request):
            save_checkpoint(options.output, update, options.updates, WORLD, state)
        if request:
            end(options.output, "stopped", update, request)
            return
    if RANK == 0:
        final = options.output / "final"
        final.mkdir(exist_ok=True)
        (final / "model.safetensors").write_bytes(
            (options.output / f"checkpoint-{update}/model.safetensors").read_bytes()
        )
    end(options.output, "finished", update, None)


def trim(output: Path, update: int) -> None:
    """Keep the logged updates up to `update`."""
    path = output / "train" / "exposure" / f"rank_{RANK}.jsonl"
    lines = (
        [line for line in path.read_text().splitlines() if json.loads(line)["update"] <= update]
        if path.exists()
        else []
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))


def log(output: Path, update: int, state: float, rows: list[dict[str, str]], updates: int) -> None:
    """Append to this rank's exposure log, and on rank 0 to the events."""
    exposure = output / "train" / "exposure"
    exposure.mkdir(parents=True, exist_ok=True)
    loss = state / (RANK + 1)
    row = {"update": update, "ids": [rows[(update * WORLD + RANK) % len(rows)]["id"]], "loss": loss.hex()}
    with (exposure / f"rank_{RANK}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    if RANK == 0:
        event = {
            "event": "update",
            "update": update,
            "of": updates,
            "loss": loss,
            "lr": 1e-3,
            "epoch": 0.1,
            "seconds": 0.02,
        }
        with (output / "train" / "events.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")


def stop_requested(output: Path, update: int) -> str | None:
    """The job id of a request that holds at `update`; ranks agree because rank 0 decides and the others wait for it."""
    decisions = output / "train" / "decisions"
    decisions.mkdir(parents=True, exist_ok=True)
    decision = decisions / f"{update}-{os.environ['FERRY_SEGMENT']}"
    if RANK == 0:
        path = output / "train" / "REQUEST_CHECKPOINT_AND_STOP"
        lines = path.read_text().splitlines() if path.exists() else []
        due = bool(lines) and (len(lines) < 2 or update >= int(lines[1].removeprefix("at_update: ")))
        aside = decision.with_suffix(".new")
        aside.write_text(lines[0] if due else "")
        aside.rename(decision)
    while not decision.exists():
        time.sleep(0.005)
    return decision.read_text() or None


def end(output: Path, outcome: str, update: int, request: str | None) -> None:
    """Write how it ended."""
    if RANK == 0:
        value = {
            "outcome": outcome,
            "update": update,
            "checkpoint": f"checkpoint-{update}",
            "request": request,
        }
        aside = output / "train" / ".outcome"
        aside.write_text(json.dumps(value))
        aside.rename(output / "train" / "OUTCOME.json")
        (output / "train" / "REQUEST_CHECKPOINT_AND_STOP").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
