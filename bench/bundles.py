"""What bundles cost, as ratios against named peers on the same files in the same run.

    python -m bench.bundles [--gib N] [--work DIR]

Prints a line a measure: ours, the peer's, the ratio, and the budget of it. The page cache is warm.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from runner import documents, pack
from runner.inside.digests import BUFFER_BYTES, hash_files
from runner.rebase import rebase
from runner.server import ServerProfile
from runner.verify import open_bundle, verify
from tests.builder import make_draft, make_server

RUNS = 3


def main() -> None:
    """Make a bundle and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        os.environ["XDG_CACHE_HOME"] = f"{work}/cache"
        measure(Path(work), options.gib)


def measure(work: Path, gib: float) -> None:
    """Print every measure on a bundle of `gib` GiB below `work`."""
    bundle = make(work, gib)
    print(
        f"bundle of {open_bundle(bundle).size_bytes / (1 << 30):.2f} GiB, {os.cpu_count()} CPUs, median of {RUNS}"
    )
    ours = median(lambda: verify(open_bundle(bundle)))
    stock = median(
        lambda: subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=bundle, check=True), runs=1
    )
    row("verify against sha256sum -c: times as fast", stock / ours, "at least 8", stock, ours)
    row(
        "verify against all cores hashing: share reached",
        hash_bound(bundle) / ours,
        "at least 0.85",
        hash_bound(bundle),
        ours,
    )
    time.sleep(2.1)  # Files are remembered once their timestamps are old enough to tell a later change.
    verify(open_bundle(bundle))
    server = documents.load(ServerProfile, make_server(work / "server"))
    again = median(lambda: rebase(verify(open_bundle(bundle), use_memory=True), server))
    print(
        f"{'verify and rebase again, remembered':55} {again:8.3f} s            (budget of prepare: under 1 s)"
    )
    copied = median(lambda: copy(bundle, work / "cp"))
    packed = median(lambda: repack(bundle, work / "packed"))
    row("copy, hash and verify against cp -r", packed / copied, "none yet", copied, packed)


def make(work: Path, gib: float) -> Path:
    """Return a bundle whose weight lies in files of very different sizes."""
    draft = make_draft(work / "draft", update=4)
    source = random.Random(0)
    left = int(gib * (1 << 30))
    block = source.randbytes(1 << 24)
    for number, share in enumerate((0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05)):
        with (draft / "data" / f"blob-{number}.bin").open("wb") as file:
            for _ in range(max(1, int(left * share) >> 24)):
                file.write(block)
    bundle = pack.pack_draft(draft, work / "bundle").path
    shutil.rmtree(draft)
    return bundle


def hash_bound(bundle: Path) -> float:
    """Seconds that all cores need to hash as many bytes from memory: no verifier can be faster."""
    total = open_bundle(bundle).size_bytes
    buffer = bytes(BUFFER_BYTES)
    cores = len(os.sched_getaffinity(0))

    def work(_: int) -> None:
        digest = hashlib.sha256()
        for _ in range(total // cores // BUFFER_BYTES):
            digest.update(buffer)

    def together() -> None:
        with concurrent.futures.ThreadPoolExecutor(cores) as pool:
            list(pool.map(work, range(cores)))

    return median(together)


def copy(bundle: Path, target: Path) -> None:
    """`cp -r`."""
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-r", str(bundle), str(target)], check=True)


def repack(bundle: Path, target: Path) -> None:
    """What packing does with every file: copy and hash in one pass, fsync, read again and compare."""
    shutil.rmtree(target, ignore_errors=True)
    files = {name: bundle / name for name in open_bundle(bundle).digests}
    pack.write_bundle(pack.Contents(files, {}, 0), target, None)
    hash_files(target, files)


def median(work: Callable[[], object], runs: int = RUNS) -> float:
    """Seconds that `work` takes, the median of `runs` after one that is not counted (of one, if `runs` is 1)."""
    if runs > 1:
        work()
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def row(name: str, ratio: float, budget: str, peer: float, ours: float) -> None:
    """Print one measure."""
    print(f"{name:55} {ratio:8.2f}   peer {peer:7.2f} s, ours {ours:7.2f} s   (budget: {budget})")


if __name__ == "__main__":
    main()
