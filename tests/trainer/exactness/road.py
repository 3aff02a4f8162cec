"""`python -m tests.trainer.exactness.road --work DIR`: is a run that was moved the run that never moved?

Runs the reference trainer with 4 ranks on made-up data, whole and in legs, and prints one line a case:
`CASE name EXACT|DIFFERS updates=.. tensors=.. expected=..`. Exit 0 only if each came out as expected. Every
resume point is one at which the kit's cure matters: a resume without it must differ. About 5 minutes on
2 idle cores.

    control    40 updates in one leg; a checkpoint every 8
    split      stopped by request at 20, where control saves nothing, in a folder with an odd name; resumed
    uncured    the same resume with the cure switched off: expected to differ
    workers    2 loader processes instead of none, stopped by SIGTERM to torchrun after 20: as control
    border     25 updates over 2.5 epochs of 83 rows (each ends in a cut batch): resumed in mid-epoch 1,
               and exactly between epochs 1 and 2
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from tests.trainer.exactness.compare import Verdict, compare_runs, exposures, leaves, same
from trainer import synthetic
from trainer.config import LoaderConfig, read_config
from trainer.data import Rows, RunLoader
from trainer.exact import WITHOUT_REPLAY
from trainer.manifest import read_manifest
from trainer.sampler import Order

WORLD = 4
SEED = 429
STOP_AT = 20
SKIP = frozenset({"RECOVERY_COMPLETE.json", "FINAL_COMPLETE.json"})
#: The contract names the number of loader processes, so it differs between runs with 0 and 2 of them.
SKIP_WITH_CONTRACT = SKIP | {"resume_contract.json"}
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True)
class Data:
    """A made-up data set on disk with its config."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, rows: int, **config: Any) -> Data:
        images, teacher = folder / "images", folder / "teacher.safetensors"
        synthetic.write_dataset(images, rows, SEED)
        synthetic.write_teacher(teacher, SEED)
        synthetic.write_manifest(folder / "train.jsonl", rows, str(images), SEED)
        value = synthetic.demo_config(
            image_root=str(images), teacher_path=str(teacher), rows=rows, seed=SEED, **config
        )
        (folder / "config.json").write_text(json.dumps(value), "utf-8")
        return cls(folder)


def start(data: Data, output: Path, resume: Path | None, extra: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start one leg; what it prints goes to `{output}.log`."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        f"--nproc_per_node={WORLD}",
    ]
    command += ["-m", "trainer.train", "--config", str(data.folder / "config.json")]
    command += ["--manifest", str(data.folder / "train.jsonl"), "--output", str(output)]
    command += ["--resume-from", str(resume)] if resume else []
    with open(output.with_name(output.name + ".log"), "ab") as log:
        return subprocess.Popen(
            command, env=os.environ | ENVIRONMENT | extra, stdout=log, stderr=subprocess.STDOUT
        )


def leg(data: Data, output: Path, resume: Path | None = None, **extra: str) -> None:
    """Run one leg to its end; raises with the end of its log if it fails."""
    began = time.monotonic()
    process = start(data, output, resume, extra)
    code = process.wait()
    print(f"  leg {output.name}: {time.monotonic() - began:.1f} s", flush=True)
    if code != 0:
        log = output.with_name(output.name + ".log").read_text("utf-8", errors="replace")
        raise RuntimeError(f"a leg ended with {code}:\n{log[-4000:]}")


def outcome(output: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((output / "train" / "OUTCOME.json").read_bytes())
    return value


def require(condition: bool, message: str) -> None:
    """Like assert, but also under -O."""
    if not condition:
        raise RuntimeError(message)


def stop_by_request(data: Data, output: Path) -> None:
    """First leg, stopped at `STOP_AT` by a request that was there from the start."""
    (output / "train").mkdir(parents=True)
    request = output / "train" / "REQUEST_CHECKPOINT_AND_STOP"
    request.write_text(f"job 17\nat_update: {STOP_AT}\n", "utf-8")
    leg(data, output)
    expected = {
        "outcome": "stopped",
        "update": STOP_AT,
        "checkpoint": f"checkpoint-{STOP_AT}",
        "request": "job 17",
    }
    require(outcome(output) == expected, f"outcome {outcome(output)}")
    require(not request.exists(), "the request is still there")


def stop_by_signal(data: Data, output: Path) -> int:
    """First leg, stopped by SIGTERM to torchrun as soon as `STOP_AT` was logged;
    gives the update it stopped at.
    """
    process = start(data, output, None, {})
    events = output / "train" / "events.jsonl"
    mark = f'"event": "update", "update": {STOP_AT},'
    deadline = time.monotonic() + 300
    while not (events.exists() and mark in events.read_text("utf-8")):
        require(
            process.poll() is None and time.monotonic() < deadline, "the leg ended before it could be stopped"
        )
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.wait()
    found = outcome(output)
    require(found["outcome"] == "stopped" and found["request"] == "SIGTERM", f"outcome {found}")
    return int(found["update"])


def global_random_states() -> dict[str, Any]:
    """The states of torch's, Python's and NumPy's global generators, flat."""
    states = [torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=False)]
    return dict(leaves(states))


def fork(source: Path, target: Path) -> None:
    """A new output folder with the logs of another; the checkpoint itself stays where it is."""
    shutil.copytree(source / "train" / "exposure", target / "train" / "exposure")


class Road:
    """The cases, in order; each may use the folders of those before it."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.good = True
        self.main = Data.make(work / "data", 320, save_every=8)
        self.control = work / "control"
        self.split = work / "split [1] it's"

    def case(self, name: str, expected: str, run: Callable[[], Verdict]) -> None:
        verdict = run()
        counts = f"updates={verdict.updates} tensors={verdict.tensors}"
        print(f"CASE {name} {verdict.word} {counts} expected={expected}", flush=True)
        for difference in verdict.differences[:3]:
            print(f"  first differences: {difference}", flush=True)
        self.good = self.good and verdict.word == expected

    def run_split(self) -> Verdict:
        stop_by_request(self.main, self.split)
        leg(self.main, self.split, self.split / f"checkpoint-{STOP_AT}")
        return compare_runs(self.control, self.split, WORLD, SKIP)

    def run_uncured(self) -> Verdict:
        output = self.work / "uncured"
        fork(self.split, output)
        leg(self.main, output, self.split / f"checkpoint-{STOP_AT}", **{WITHOUT_REPLAY: "1"})
        return compare_runs(self.control, output, WORLD, SKIP)

    def run_workers(self) -> Verdict:
        data = Data.make(self.work / "data", 320, save_every=8, workers=2)
        output = self.work / "workers"
        update = stop_by_signal(data, output)
        leg(data, output, output / f"checkpoint-{update}")
        return compare_runs(self.control, output, WORLD, SKIP_WITH_CONTRACT)

    def run_border(self) -> None:
        data = Data.make(self.work / "odd", 83, epochs=None, total=25, save_every=5)
        whole = self.work / "border"
        leg(data, whole)
        for update, name in ((15, "border-mid-epoch-1"), (20, "border-between-epochs")):
            output = self.work / name

            def run(update: int = update, output: Path = output) -> Verdict:
                fork(whole, output)
                leg(data, output, whole / f"checkpoint-{update}")
                return compare_runs(whole, output, WORLD, SKIP)

            self.case(name, "EXACT", run)

    def require_learning(self) -> None:
        """The control is a real run: 40 updates, all rows once, and a loss that falls."""
        ranks = exposures(self.control, WORLD)
        ids = [name for rank in ranks for record in rank for name in record["ids"]]
        losses = [
            sum(float.fromhex(r["loss"]) for r in update) / WORLD for update in zip(*ranks, strict=True)
        ]
        print(
            f"CONTROL updates={len(losses)} first_loss={losses[0]:.4f} last_loss={losses[-1]:.4f}", flush=True
        )
        require(
            len(losses) == 40 and len(set(ids)) == len(ids) == 320, "the control did not see each row once"
        )
        require(losses[-1] < 0.5 * losses[0], "the control learned nothing")

    def require_quiet_loader(self) -> None:
        """Iterating draws nothing from the global generators, and 2 loader processes give what none give."""
        manifest = read_manifest(self.main.folder / "train.jsonl", str(self.main.folder / "images"))
        config = read_config(self.main.folder / "config.json")
        order = Order(SEED, len(manifest.rows), WORLD, 1, 2)
        rows = Rows(manifest.rows, config.model.image_size)
        before = global_random_states()
        streams = [
            list(RunLoader(rows, order, 1, config.model, LoaderConfig(workers, 2), lambda: 30))
            for workers in (0, 2)
        ]
        after = global_random_states()
        require(all(same(before[at], after[at]) for at in before), "the loader draws from a global generator")
        one, two = (dict(leaves(stream)) for stream in streams)
        require(one.keys() == two.keys(), "2 loader processes give other batches")
        require(all(same(one[at], two[at]) for at in one), "2 loader processes give other batches")
        print(f"LOADER quiet batches={len(streams[0])}", flush=True)

    def run(self) -> bool:
        self.require_quiet_loader()
        leg(self.main, self.control)
        self.require_learning()
        self.case("split", "EXACT", self.run_split)
        self.case("uncured", "DIFFERS", self.run_uncured)
        self.case("workers", "EXACT", self.run_workers)
        self.run_border()
        return self.good


def main() -> int:
    """Exit 0 when every case came out as expected."""
    parser = argparse.ArgumentParser(prog="tests.trainer.exactness.road", allow_abbrev=False)
    parser.add_argument("--work", type=Path, required=True, help="an empty folder for data and runs")
    work = parser.parse_args().work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    require(not any(work.iterdir()), f"{work} is not empty")
    began = time.monotonic()
    good = Road(work).run()
    print(f"ROAD {'PASS' if good else 'FAIL'} seconds={time.monotonic() - began:.0f}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
