"""`python -m trainer.train --config FILE --manifest FILE --output DIR [--resume-from DIR]`, under torchrun.

Promise: everything that can be refused is refused before a weight is loaded and before the output folder is
changed; exit 0 means that OUTCOME.json says "finished" or "stopped" and names a complete checkpoint; a
refusal exits 3.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from trainer.config import RunConfig, read_config
from trainer.manifest import Manifest, read_manifest
from trainer.refusal import Difference, Refusal, Refused, refuse
from trainer.sampler import Order
from trainer.stop import StopSignals

EXIT_REFUSED = 3
LIBRARIES = ("accelerate", "deepspeed", "torch", "transformers")


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    config: Path
    manifest: Path
    output: Path
    resume_from: Path | None


def parse_arguments(words: list[str]) -> Arguments:
    """Read the command line; paths are made absolute."""
    parser = argparse.ArgumentParser(prog="trainer.train", allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, help="the run's config (JSON)")
    parser.add_argument("--manifest", type=Path, required=True, help="where the data manifest lies now")
    parser.add_argument("--output", type=Path, required=True, help="where checkpoints and logs go")
    parser.add_argument("--resume-from", type=Path, help="a complete recovery checkpoint")
    given = parser.parse_args(words)
    resume = given.resume_from.absolute() if given.resume_from else None
    return Arguments(given.config.absolute(), given.manifest.absolute(), given.output.absolute(), resume)


def require_versions(config: RunConfig) -> dict[str, str]:
    """Versions of the libraries that matter, with their local parts.

    Raises:
        Refusal: when Transformers is not the one that the config requires.
    """
    versions = {name: metadata.version(name) for name in LIBRARIES}
    if versions["transformers"] != config.transformers:
        fix = "run in the image that the run is pinned to"
        raise refuse(
            "another Transformers", "/transformers", config.transformers, versions["transformers"], fix
        )
    return versions


def require_manifest(config: RunConfig, path: Path) -> Manifest:
    """The rows, if the manifest is the one that the config names."""
    if not path.is_file():
        raise refuse("the manifest is not there", "--manifest", "a file", "none", "give the run's manifest")
    found_sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    fix = "give the manifest that the run was packed with"
    if found_sha256 != config.data.sha256:
        raise refuse("this is another manifest", "/data/sha256", config.data.sha256, found_sha256, fix)
    manifest = read_manifest(path, config.data.image_root)
    wrong = []
    if manifest.fingerprint != config.data.fingerprint:
        wrong.append(Difference("/data/fingerprint", config.data.fingerprint, manifest.fingerprint))
    if len(manifest.rows) != config.data.rows:
        wrong.append(Difference("/data/rows", str(config.data.rows), str(len(manifest.rows))))
    if wrong:
        raise Refusal("the config does not describe its manifest", wrong, fix)
    return manifest


def order_of(config: RunConfig) -> Order:
    """The order of rows, refusing a world that is not the one that was started."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != config.batch.world:
        fix = f"start with --nproc_per_node={config.batch.world}"
        raise refuse("another number of ranks", "/batch/world", str(config.batch.world), str(world), fix)
    batch = config.batch
    return Order(config.seed, config.data.rows, batch.world, batch.per_device, batch.accumulation)


def total_updates(config: RunConfig, order: Order) -> int:
    """Length of the run in updates."""
    schedule = config.schedule
    total = schedule.total if schedule.total is not None else (schedule.epochs or 0) * order.updates_per_epoch
    if schedule.warmup >= total:
        fix = "shorten the warm-up"
        raise refuse(
            "the schedule does not fit", "/schedule/warmup", f"below {total}", str(schedule.warmup), fix
        )
    return total


def train(words: list[str]) -> None:
    """Train one segment of the run; see the module's promise."""
    given = parse_arguments(words)
    signals = StopSignals()
    signals.install()
    config = read_config(given.config)
    versions = require_versions(config)
    manifest = require_manifest(config, given.manifest)
    order = order_of(config)
    total = total_updates(config, order)

    from trainer.output import Output
    from trainer.segment import Inputs, run_segment

    inputs = Inputs(config, versions, manifest, order, total, Output(given.output), given.resume_from)
    run_segment(inputs, signals)


def main() -> int:
    """Exit code: 0 done, 3 refused; anything else is a crash."""
    try:
        train(sys.argv[1:])
    except Refused as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
