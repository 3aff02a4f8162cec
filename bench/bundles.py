"""What verifying and copying bundles cost, as ratios against named peers on the same files in the same run.

    python -m bench.bundles [--gib N] [--files N] [--work DIR] [--write docs/benchmarks.md]

Needs root for the cold measures (it empties the page cache). Peers that are not installed are left out. Holds at most two
copies of the bundle on disk.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.measure import HEAD, Row, in_turns, peak_mib, times_as_fast, times_as_long, write_section
from runner import documents, pack, sums
from runner.inside.digests import BUFFER_BYTES, Hashed, hash_files
from runner.rebase import rebase
from runner.server import ServerProfile
from runner.verify import open_bundle, verify
from tests.builder import make_draft, make_server

SHARES = (0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05)
DROP = Path("/proc/sys/vm/drop_caches")
SMALL_BYTES = 4096


def main() -> None:
    """Make bundles, measure, print, and write the section of the document if asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--files", type=int, default=100_000, help="small files; 0 leaves them out")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--write", type=Path, help="the document to put the table into")
    options = parser.parse_args()
    lines: list[str] = []

    def say(line: object) -> None:
        print(line, flush=True)
        lines.append(str(line))

    with tempfile.TemporaryDirectory(dir=options.work) as work:
        os.environ["XDG_CACHE_HOME"] = f"{work}/cache"
        cores = len(os.sched_getaffinity(0))
        say(
            f"A bundle of {options.gib:g} GiB, {cores} cores; the median of three runs, taken in turns.\n\n{HEAD}"
        )
        large(Path(work), options.gib, say)
        if options.files:
            small(Path(work), options.files, say)
    if options.write:
        write_section(options.write, "bundles", "\n".join(lines))


def large(work: Path, gib: float, say: Callable[[object], None]) -> None:
    """Measures on few large files."""
    bundle = make(
        work / "large", {f"data/blob-{n}": int(gib * (1 << 30) * share) for n, share in enumerate(SHARES)}
    )

    def ours() -> None:
        verify(open_bundle(bundle))

    warm(bundle)
    for name, peer, budget, runs in peers(bundle):
        say(times_as_fast("verify, warm", name, in_turns(ours, peer, runs=runs), budget))
    seconds = in_turns(ours, lambda: hash_from_memory(bundle))
    bound = f"{seconds[1] / seconds[0]:.2f} of the bound"
    say(Row("verify, warm", seconds[0], "all cores hashing memory", seconds[1], bound, "at least 0.85"))
    if os.access(DROP, os.W_OK):
        plain = in_turns(ours, lambda: read_all(bundle), before=drop)
        say(times_as_long("verify, cold", "cat of the same files", plain, "at most 1.15"))
    again(work, bundle, say)
    target = work / "packed"
    packed = in_turns(lambda: pack_again(bundle, target), lambda: copy_and_check(bundle, target), runs=1)
    say(times_as_fast("pack: copy, hash, fsync, read again", "cp -r, then sha256sum -c", packed, "none"))
    shutil.rmtree(target)
    memory(bundle, say)
    shutil.rmtree(bundle)


def small(work: Path, count: int, say: Callable[[object], None]) -> None:
    """Measures on very many small files."""
    bundle = make(work / "small", {f"data/{n // 1000:03}/{n % 1000:03}": SMALL_BYTES for n in range(count)})
    what = f"verify {count} files of {SMALL_BYTES} bytes"

    def ours() -> None:
        verify(open_bundle(bundle))

    warm(bundle)
    say(
        times_as_long(
            what + ", warm", "find -exec cat {} +", in_turns(ours, lambda: read_all(bundle)), "at most 1.5"
        )
    )
    checked = in_turns(ours, lambda: sha256sum(bundle), runs=1)
    say(times_as_fast(what + ", warm", "sha256sum -c", checked, "none"))
    if os.access(DROP, os.W_OK):
        plain = in_turns(ours, lambda: read_all(bundle), before=drop)
        say(times_as_long(what + ", cold", "find -exec cat {} +", plain, "at most 1.5"))
    shutil.rmtree(bundle)


def make(folder: Path, files: dict[str, int]) -> Path:
    """Return a bundle at `folder` with `files` (name -> size) beside its usual ones. No file is like another."""
    make_draft(folder, update=4)
    source = random.Random(0)
    for name, size in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for _ in range(max(1, size >> 24)):
                file.write(source.randbytes(min(size, 1 << 24)))
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    hashed = hash_files(folder, names)
    digests = {name: entry.sha256 for name, entry in hashed.items() if isinstance(entry, Hashed)}
    (folder / sums.LIST_NAME).write_bytes(sums.render(digests))
    subprocess.run(["sync"], check=True)
    return folder


def peers(bundle: Path) -> list[tuple[str, Callable[[], object], str, int]]:
    """Name, work, budget and runs of each program that checks files, and is here."""
    cores = str(len(os.sched_getaffinity(0)))
    # OpenSSL does not check lists: it hashes every file, and comparing is left out in its favour.
    find = "find . -type f -print0 | xargs -0 -n 1 -P " + cores + " "
    rclone = ["rclone", "checksum", "sha256", "SHA256SUMS", ".", "--quiet", "--exclude", "/SHA256SUMS"]
    found: list[tuple[str, Callable[[], object], str, int]] = [
        ("sha256sum -c", lambda: sha256sum(bundle), "at least 8", 1)
    ]
    if shutil.which("openssl"):
        command = find + "openssl dgst -sha256 > /dev/null"
        found.append((f"openssl dgst, xargs -P {cores}", lambda: shell(bundle, command), "none", 3))
    if shutil.which("b3sum"):
        found.append(
            (
                "b3sum (another hash)",
                lambda: shell(bundle, "find . -type f -exec b3sum {} + > /dev/null"),
                "none",
                3,
            )
        )
    if shutil.which("rclone"):
        found.append(("rclone checksum", lambda: subprocess.run(rclone, cwd=bundle, check=True), "none", 1))
    return found


def shell(folder: Path, command: str) -> None:
    """Run a pipeline of the shell's in `folder`."""
    subprocess.run(["sh", "-c", command], cwd=folder, check=True)


def sha256sum(folder: Path) -> None:
    """What people do today."""
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=folder, check=True)


def read_all(folder: Path) -> None:
    """Find every file and read it, and nothing else."""
    shell(folder, "find . -type f -exec cat {} + > /dev/null")


def warm(folder: Path) -> None:
    """Have all of it in the page cache, and old enough to be remembered."""
    read_all(folder)
    time.sleep(2.1)


def drop() -> None:
    """Empty the page cache."""
    subprocess.run(["sync"], check=True)
    DROP.write_text("3\n")


def hash_from_memory(bundle: Path) -> None:
    """All cores hash as many bytes as the bundle has, from one buffer: no verifier can be faster."""
    total = open_bundle(bundle).size_bytes
    buffer = bytes(BUFFER_BYTES)
    cores = len(os.sched_getaffinity(0))

    def work(_: int) -> None:
        digest = hashlib.sha256()
        for _ in range(total // cores // BUFFER_BYTES):
            digest.update(buffer)

    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        list(pool.map(work, range(cores)))


def again(work: Path, bundle: Path, say: Callable[[object], None]) -> None:
    """What `ferry prepare` checks after `ferry verify`."""
    server = documents.load(ServerProfile, make_server(work / "server"))
    verify(open_bundle(bundle))
    began = time.perf_counter()
    rebase(verify(open_bundle(bundle), use_memory=True), server)
    seconds = time.perf_counter() - began
    say(Row("verify and rebase, remembered", seconds, "none", 0.0, "absolute", "under 1 s"))


def copy(bundle: Path, target: Path) -> None:
    """`cp -r`, made durable."""
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-r", str(bundle), str(target)], check=True)
    subprocess.run(["sync", "-f", str(target)], check=True)


def copy_and_check(bundle: Path, target: Path) -> None:
    """What people do today: copy, then read the copy again to hash it."""
    copy(bundle, target)
    sha256sum(target)


def pack_again(bundle: Path, target: Path) -> None:
    """What packing does with every file: copy and hash in one pass, fsync, read again and compare."""
    shutil.rmtree(target, ignore_errors=True)
    files = {name: bundle / name for name in open_bundle(bundle).digests}
    pack.write_bundle(pack.Contents(files, {}, 0), target, None)
    verify(open_bundle(target), paranoid=True)


def memory(bundle: Path, say: Callable[[object], None]) -> None:
    """Peak memory of the whole command, and of the peer."""
    ours = peak_mib([sys.executable, "-m", "runner", "verify", "--paranoid", str(bundle)])
    plain = peak_mib([sys.executable, "-m", "runner", "verify", "--help"])
    summed = peak_mib(["sh", "-c", f"cd {shlex.quote(str(bundle))} && exec sha256sum -c --quiet SHA256SUMS"])
    say(
        f"\nPeak memory of `ferry verify`: {ours:.0f} MiB, of which the program that only prints its help has "
        f"{plain:.0f} MiB; of `sha256sum -c`: {summed:.0f} MiB.\n\n{HEAD}"
    )


if __name__ == "__main__":
    main()
