"""What preparing costs, in every mode, and what moving a manifest's paths costs; as ratios against named peers.

    python -m bench.preparing [--gib N] [--rows N] [--work DIR] [--write docs/benchmarks.md]

The image is not looked at: that is the same for every mode. Cloning is measured on an XFS in a file of its own, which
needs root and xfsprogs. Holds at most two copies of the bundle on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from bench.measure import HEAD, Row, in_turns, peak_mib, times_as_fast, times_as_long, write_section
from runner import documents, pack
from runner.manifest import CHUNK_BYTES
from runner.plan import plan_launch
from runner.prepare import prepare
from runner.rebase import Mode, RebasedInputs, rebase
from runner.run import RunFolder
from runner.server import ServerProfile
from runner.verify import open_bundle, verify
from tests.builder import IMAGES, grow, make_bundle, make_draft, make_server
from tests.test_rewrite_bundle import HOST, IMAGE

SHARES = (0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05)
_PIECE_ROWS = 100_000


def main() -> None:
    """Make bundles, measure, print, and write the section of the document if asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0, help="0 leaves the modes out")
    parser.add_argument("--rows", type=int, default=3_000_000, help="0 leaves the manifest out")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--write", type=Path, help="the document to put the table into")
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        rewritten(options.once)
        return
    lines: list[str] = []

    def say(line: object) -> None:
        print(line, flush=True)
        lines.append(str(line))

    with tempfile.TemporaryDirectory(dir=options.work) as name:
        work = Path(name)
        os.environ["XDG_CACHE_HOME"] = f"{work}/cache"
        cores = len(os.sched_getaffinity(0))
        say(
            f"A checkpoint of {options.gib:g} GiB, a manifest of {options.rows} rows, {cores} cores.\n\n{HEAD}"
        )
        if options.gib:
            modes(work / "modes", options.gib, say)
            with shared_blocks(work, options.gib) as place:
                if place is not None:
                    cloned(place, options.gib, say)
        if options.rows:
            manifest(work / "manifest", options.rows, say)
    if options.write:
        write_section(options.write, "preparing", "\n".join(lines))


def modes(work: Path, gib: float, say: Callable[[object], None]) -> None:
    """Mount, hardlink and copy."""
    inputs = made(work, gib)
    run, peer = work / "run", work / "peer"
    checkpoint = inputs.bundle.path / "checkpoint-4"
    remembered = [
        lambda: prepared(again(inputs, "mount"), run),
        lambda: shutil.rmtree(peer, ignore_errors=True),
    ]
    seconds = in_turns(*remembered)
    say(Row("prepare --mode mount, after verify", seconds[0], "none", 0.0, "absolute", "under 1 s"))
    links = in_turns(
        lambda: prepared(again(inputs, "hardlink"), run),
        lambda: shell(f"cp -rl {checkpoint} {peer}", peer),
        before=lambda: forgotten(inputs, run, peer),
    )
    say(Row("prepare --mode hardlink, after verify", *with_peer(links, "cp -rl"), "absolute", "none"))
    durable = f"cp -r {checkpoint} {peer} && sync -f {peer}"
    copies = in_turns(
        lambda: prepared(again(inputs, "copy"), run),
        lambda: shell(durable, peer),
        before=lambda: settle(run, peer),
    )
    say(times_as_long("prepare --mode copy, after verify", "cp -r, then sync", copies, "at most 1.15"))
    check = "cd {} && find . -type f -exec sha256sum {{}} + > /dev/null"
    hashed = in_turns(
        lambda: prepared(again(inputs, "copy"), run),
        lambda: shell(f"{durable} && {check.format(peer)}", peer),
        before=lambda: settle(run, peer),
        runs=1,
    )
    say(times_as_fast("prepare --mode copy, after verify", "cp -r, sync, then sha256sum", hashed, "none"))
    shutil.rmtree(work)


def cloned(place: Path, gib: float, say: Callable[[object], None]) -> None:
    """Reflink, on a file system that has it."""
    inputs = made(place, gib)
    run, peer = place / "run", place / "peer"
    command = f"cp -r --reflink=always {inputs.bundle.path / 'checkpoint-4'} {peer}"
    seconds = in_turns(lambda: prepared(again(inputs, "reflink"), run), lambda: shell(command, peer))
    say(
        Row(
            "prepare --mode reflink, after verify",
            *with_peer(seconds, "cp -r --reflink=always"),
            "absolute",
            "none",
        )
    )


def with_peer(seconds: tuple[float, float], peer: str) -> tuple[float, str, float]:
    """The middle of a row whose times are too short for a ratio."""
    return seconds[0], peer, seconds[1]


def made(work: Path, gib: float) -> RebasedInputs:
    """Return a verified bundle with a checkpoint of `gib`, rebased."""
    work.mkdir(exist_ok=True)
    server = documents.load(ServerProfile, make_server(work))
    bundle = make_bundle(work, update=4)
    shutil.rmtree(work / "draft")
    sizes = (int(gib * (1 << 30) * share) for share in SHARES)
    grow(bundle, {f"model-{number:05}.safetensors": size for number, size in enumerate(sizes, 1)})
    os.sync()
    time.sleep(2.1)  # Old enough to be remembered.
    return rebase(verify(open_bundle(bundle)), server)


def again(inputs: RebasedInputs, mode: Mode) -> RebasedInputs:
    """What `ferry prepare` checks first, after `ferry verify`."""
    return rebase(verify(open_bundle(inputs.bundle.path), use_memory=True), inputs.server, mode=mode)


def prepared(inputs: RebasedInputs, path: Path) -> None:
    """Prepare `inputs` into a new run folder at `path`."""
    shutil.rmtree(path, ignore_errors=True)
    run = RunFolder(path)
    prepare(inputs, plan_launch(inputs, IMAGE, run.path, HOST), run, b"")


def forgotten(inputs: RebasedInputs, *places: Path) -> None:
    """Remove what was made, and verify again: a link, made or removed, changes the ctime that a digest is remembered by."""
    settle(*places)
    time.sleep(2.1)
    verify(open_bundle(inputs.bundle.path))


def settle(*places: Path) -> None:
    """Remove what the last one made, and let the disk come to rest."""
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
    os.sync()


def shell(command: str, made_there: Path) -> None:
    """Run a command line of the shell's that makes `made_there` anew."""
    shutil.rmtree(made_there, ignore_errors=True)
    subprocess.run(["sh", "-c", command], check=True)


@contextlib.contextmanager
def shared_blocks(work: Path, gib: float) -> Iterator[Path | None]:
    """Give a mounted XFS with room for the bundle, or None where it cannot be made."""
    if os.geteuid() != 0 or shutil.which("mkfs.xfs") is None:
        yield None
        return
    image, place = work / "xfs.img", work / "xfs"
    with image.open("wb") as file:
        file.truncate(int((gib + 1) * (1 << 30)))
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], check=True)
    place.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
        image.unlink()


def manifest(work: Path, rows: int, say: Callable[[object], None]) -> None:
    """Moving the paths of every row, against reading and writing the file."""
    work.mkdir()
    bundle = rows_bundle(work, rows)
    make_server(work)
    time.sleep(2.1)  # Old enough to be remembered.
    verify(open_bundle(bundle))
    source, peer = bundle / "data" / "train.jsonl", work / "peer.jsonl"
    subprocess.run(["cat", str(source)], stdout=subprocess.DEVNULL, check=True)
    work_of = {
        "one thread, 4 MiB at a time, fsync": lambda: plain(source, peer),
        "cp, then sync": lambda: subprocess.run(
            ["sh", "-c", f"cp {source} {peer} && sync {peer}"], check=True
        ),
    }
    for name, peers in work_of.items():
        seconds = in_turns(lambda: rewritten(bundle), peers, before=lambda: settle(work / "run"))
        say(times_as_long(f"rebase of {rows} rows: check, move, prove", name, seconds, "at most 3"))
    size = source.stat().st_size >> 20
    most = peak_mib([sys.executable, "-m", "bench.preparing", "--once", str(bundle)])
    idle = peak_mib([sys.executable, "-c", "import bench.preparing"])
    say(
        f"\nPeak memory: {most:.0f} MiB for a manifest of {size} MiB; the program alone takes {idle:.0f} MiB."
    )


def rows_bundle(work: Path, rows: int) -> Path:
    """Return a bundle whose manifest has `rows` rows like those of a navigation data set, paths to be rewritten."""

    def change(spec: dict[str, Any]) -> None:
        spec["rebase"] = {
            "mount": ["teacher"],
            "rewrite": [{"asset": "images", "at": ["data/train.jsonl#[]/image"]}],
        }

    draft = make_draft(work / "draft", update=4, change=change)
    path = draft / "data" / "train.jsonl"
    with path.open("wb") as file:
        for first in range(0, rows, _PIECE_ROWS):
            file.write(b"".join(row(number) for number in range(first, min(rows, first + _PIECE_ROWS))))
    spec = yaml.safe_load((draft / "run.yaml").read_bytes())
    spec["data"] |= pack.describe_manifest(path, ("image",), IMAGES)
    (draft / "run.yaml").write_text(json.dumps(spec))
    bundle = pack.pack_draft(draft, work / "bundle").path
    shutil.rmtree(draft)
    return bundle


def rewritten(bundle: Path) -> None:
    """All that a manifest's rebase takes: check and hash, write, and prove what was written."""
    server = documents.load(ServerProfile, bundle.parent / "server-a.yaml")
    prepared(
        rebase(verify(open_bundle(bundle), use_memory=True), server, drafts=bundle.parent),
        bundle.parent / "run",
    )


def plain(source: Path, target: Path) -> None:
    """Read the file and write it, and have it on the disk."""
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        while chunk := reader.read(CHUNK_BYTES):
            writer.write(chunk)
        os.fsync(writer.fileno())


def row(number: int) -> bytes:
    """One record of about 230 bytes."""
    record = {
        "id": f"ep-{number:08}",
        "image": f"{IMAGES}/scene-{number % 97:03}/{number:08}.png",
        "instruction": f"walk past the table, turn left at door {number % 31} and stop beside the window",
        "target": [round(number % 101 * 0.01, 2), round(number % 53 * 0.02, 2), number % 4],
        "weight": 1.0,
    }
    return json.dumps(record).encode() + b"\n"


if __name__ == "__main__":
    main()
