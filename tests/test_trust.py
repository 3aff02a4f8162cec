"""Trust in a bundle: its root, sizes before hashes, and what an interrupted verification leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runner import sums, verify
from runner.errors import Refusal
from runner.verify import open_bundle
from tests.builder import make_bundle, relist


def whats(refusal: Refusal) -> list[str]:
    return [fault.what for fault in refusal.faults]


def test_the_root_that_the_user_knows_must_be_the_lists(tmp_path: Path) -> None:
    """`--root` refuses any other bundle before a byte of it is read."""
    bundle = make_bundle(tmp_path, update=4)
    root = open_bundle(bundle).root
    assert open_bundle(bundle, root=root).root == root
    with pytest.raises(Refusal) as refused:
        open_bundle(bundle, root="sha256:" + "0" * 64)
    assert whats(refused.value) == ["root differs"]


def test_sizes_come_before_hashes(tmp_path: Path) -> None:
    """A shard that was cut off is found by the inventory's size, and no file is read for it."""
    bundle = make_bundle(tmp_path, update=4)
    shard = bundle / "checkpoint-4" / "rng_state_1.pth"
    shard.write_bytes(shard.read_bytes()[:-1])
    (bundle / "data" / "train.jsonl").write_bytes(b"")
    read: list[int] = []
    with pytest.raises(Refusal) as refused:
        verify.verify(open_bundle(bundle), on_bytes=read.append)
    assert [(fault.what, fault.where) for fault in refused.value.faults] == [("size differs", str(shard))]
    assert read == []


def old(bundle: Path) -> None:
    """Let the timestamps of all files lie far enough back to be remembered: wait for the clock that tells."""
    time.sleep(2.1)
    assert bundle.exists()


def test_an_interrupted_verification_goes_on_where_it_was(tmp_path: Path) -> None:
    """What was read is not read again; --paranoid reads it; another list forgets it; a finished one leaves nothing."""
    bundle = make_bundle(tmp_path, update=4)
    old(bundle)
    size = open_bundle(bundle).size_bytes

    def read_of(**options: Any) -> int:
        opened, read = open_bundle(bundle), []
        remembered = {} if options.get("paranoid") else verify._recall(opened, finished=False)
        known = sum(opened.sizes[name] for name in remembered)
        verify.verify(opened, on_bytes=read.append, **options)
        assert sum(read) == size
        return size - known

    # The first batch ends with the first callback; what was hashed before an interrupt is told file by file.
    keep = verify.hash_files

    def cut_off(*args: Any, **options: Any) -> Any:
        told = options["on_hashed"]
        count = 0

        def on_hashed(name: str, entry: Any) -> None:
            nonlocal count
            told(name, entry)
            count += 1
            if count == 5:
                raise KeyboardInterrupt

        return keep(*args, **(options | {"on_hashed": on_hashed}))

    def be_cut_off() -> None:
        opened = open_bundle(bundle)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verify, "hash_files", cut_off)
            with pytest.raises(KeyboardInterrupt):
                verify.verify(opened)

    for options, whole in (({}, False), ({"paranoid": True}, True)):
        be_cut_off()
        assert len(verify._recall(open_bundle(bundle), finished=False)) == 5
        assert (read_of(**options) == size) is whole
        assert verify._recall(open_bundle(bundle), finished=False) == {}
    be_cut_off()
    (bundle / "more").write_bytes(b"x")
    relist(bundle)
    assert verify._recall(open_bundle(bundle), finished=False) == {}


def test_sigterm_leaves_what_was_read_remembered(tmp_path: Path) -> None:
    """`ferry verify` ends on SIGTERM with no traceback and no verdict, and the memory of what it read."""
    bundle = make_bundle(tmp_path, update=4)
    with (bundle / "data" / "large").open("wb") as file:
        file.truncate(16 << 30)
    digests = open_bundle_digests(bundle) | {"data/large": "0" * 64}
    (bundle / sums.LIST_NAME).write_bytes(sums.render(digests))
    old(bundle)
    env = os.environ | {"PYTHONPATH": str(Path(verify.__file__).parent.parent)}
    command = [sys.executable, "-m", "runner", "verify", str(bundle)]
    memory = verify._memory_path(open_bundle(bundle), verify._UNFINISHED)
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        # Files are read the largest first, one a thread: with two, the others are done long before a part of it is.
        counted = Path(f"/proc/{process.pid}/io")
        while int(counted.read_text().split()[1]) < 1 << 30:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert out == b""
    assert b"interrupted" in err
    assert b"Traceback" not in err
    assert process.returncode == 128 + signal.SIGTERM
    assert len(json.loads(memory.read_bytes())["files"]) >= (5 if len(os.sched_getaffinity(0)) > 1 else 0)


def open_bundle_digests(bundle: Path) -> dict[str, str]:
    """The list as it is."""
    return sums.parse((bundle / sums.LIST_NAME).read_bytes(), "list")
