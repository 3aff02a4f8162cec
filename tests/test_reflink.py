"""Preparing by reflink, on a file system that shares blocks: XFS, in a file of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import documents
from runner.plan import plan_launch
from runner.prepare import prepare
from runner.rebase import rebase
from runner.run import RunFolder
from runner.server import ServerProfile
from runner.verify import open_bundle, verify
from tests.builder import grow, make_bundle, make_server, snapshot
from tests.test_rewrite_bundle import HOST, IMAGE

BYTES = 64 << 20


@pytest.fixture
def shared_blocks(tmp_path: Path) -> Iterator[Path]:
    """A mounted XFS of 400 MiB, which costs the disk what is written to it."""
    if os.geteuid() != 0 or shutil.which("mkfs.xfs") is None:
        pytest.skip("needs root and mkfs.xfs (xfsprogs), to mount a file system that shares blocks")
    image, place = tmp_path / "xfs.img", tmp_path / "xfs"
    with image.open("wb") as file:
        file.truncate(400 << 20)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], check=True)
    place.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_clone_takes_no_space_and_is_not_the_bundles_file(shared_blocks: Path) -> None:
    """Same bytes, another inode, no blocks of its own; writing to it leaves the bundle as it was."""
    bundle = make_bundle(shared_blocks, update=4)
    grow(bundle, {"model.safetensors": BYTES})
    server = documents.load(ServerProfile, make_server(shared_blocks))
    os.sync()
    before = snapshot(bundle)
    free = os.statvfs(shared_blocks).f_bfree
    inputs = rebase(verify(open_bundle(bundle)), server, mode="reflink")
    run = RunFolder(shared_blocks / "run")
    profile = (shared_blocks / "server-a.yaml").read_bytes()
    prepare(inputs, plan_launch(inputs, IMAGE, run.path, HOST), run, profile)
    os.sync()
    taken = (free - os.statvfs(shared_blocks).f_bfree) * os.statvfs(shared_blocks).f_frsize
    assert taken < BYTES // 8
    checkpoint = run.output / "checkpoint-4"
    assert snapshot(checkpoint) == snapshot(bundle / "checkpoint-4")
    clone = checkpoint / "model.safetensors"
    assert clone.stat().st_ino != (bundle / "checkpoint-4/model.safetensors").stat().st_ino
    with clone.open("r+b") as file:
        file.write(b"overwritten")
    assert snapshot(bundle) == before
