"""Digests, git tree ids and the checkpoint census: what host and container compute alike."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from runner import archive
from runner.errors import Refusal
from runner.inside import census
from runner.inside.digests import Hashed, from_memory, hash_file, hash_files, sha256_bytes, to_memory
from runner.inside.tree import read_tree, tree_id
from tests.scripted.saving import pickled, save_checkpoint


def test_the_tree_id_is_gits(tmp_path: Path) -> None:
    """`git write-tree` gives the same id, with nested folders, executables and names that sort oddly."""
    for name, content in {
        "a/b.py": b"1",
        "a.py": b"2",
        "a0": b"",
        "ab/c": b"4",
        "run.sh": b"#!/bin/sh\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "run.sh").chmod(0o755)
    ours = tree_id(read_tree(tmp_path))
    assert ours == archive.tree_of(archive.collect(tmp_path))
    env = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": "/dev/null", "HOME": str(tmp_path)}
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=tmp_path, env=env, check=True)
    done = subprocess.run(
        ["git", "write-tree"], cwd=tmp_path, env=env, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == ours


def test_links_in_a_code_tree_are_refused(tmp_path: Path) -> None:
    """A code tree holds regular files and folders only."""
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(Refusal, match="not a regular file"):
        read_tree(tmp_path)


def test_a_remembered_digest_saves_the_reading_until_the_file_changes(tmp_path: Path) -> None:
    """The digest is used while the stamp holds; any write ends that, also one that keeps size and mtime."""
    path = tmp_path / "x"
    path.write_bytes(b"first")
    os.utime(path, ns=(1, 1))
    hashed = hash_file(path)
    assert hashed.stamp is None, "a file that was changed a moment ago is too fresh to remember"
    status = path.stat()
    stamp = [0, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    told = from_memory({"x": ["remembered", *stamp[1:]]})
    assert hash_files(tmp_path, ["x"], remembered=told)["x"] == told["x"]
    assert from_memory(json.loads(json.dumps(to_memory(told)))) == told
    path.write_bytes(b"other")
    os.utime(path, ns=(1, 1))
    found = hash_files(tmp_path, ["x"], remembered=told)["x"]
    assert isinstance(found, Hashed)
    assert found.sha256 == sha256_bytes(b"other")


def test_hashing_refuses_what_is_no_regular_file(tmp_path: Path) -> None:
    """A link is not followed, a pipe is not waited for."""
    (tmp_path / "target").write_bytes(b"x")
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "pipe")
    found = hash_files(tmp_path, ["link", "pipe", "absent", "target"])
    assert [isinstance(entry, OSError) for entry in found.values()] == [True, True, True, False]


def test_a_whole_checkpoint_passes(tmp_path: Path) -> None:
    """The census returns update, total, world and the two identities."""
    folder = save_checkpoint(tmp_path, 20, 40, 4, 1.0)
    checkpoint = census.take_census(folder, 4)
    assert (checkpoint.name, checkpoint.update, checkpoint.updates, checkpoint.world) == (
        "checkpoint-20",
        20,
        40,
        4,
    )
    assert checkpoint.inventory == sha256_bytes((folder / census.INVENTORY).read_bytes())
    assert checkpoint.contract == sha256_bytes((folder / census.CONTRACT).read_bytes())
    assert census.hash_faults(checkpoint) == []


def edit_inventory(folder: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Change the inventory of `folder` in one way."""
    path = folder / census.INVENTORY
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))


def drop(folder: Path, name: str) -> None:
    """Remove a file and its entry: what a save that never wrote it would look like."""
    (folder / name).unlink()
    edit_inventory(folder, lambda value: value["files"].pop(name))  # type: ignore[attr-defined]


def add(folder: Path, name: str) -> None:
    """Add a file and its entry."""
    (folder / name).write_bytes(b"x")
    entry = {"bytes": 1, "sha256": sha256_bytes(b"x")}
    edit_inventory(folder, lambda value: value["files"].update({name: entry}))  # type: ignore[attr-defined]


SHARD = "global_step20/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"

BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no inventory": (lambda c: (c / census.INVENTORY).unlink(), "checkpoint incomplete"),
    "inventory cut off": (lambda c: (c / census.INVENTORY).write_text('{"update": 2'), "inventory damaged"),
    "inventory not an object": (lambda c: (c / census.INVENTORY).write_text("[]"), "inventory damaged"),
    "a file is gone": (lambda c: (c / "model.safetensors").unlink(), "missing"),
    "a file too many": (lambda c: (c / "extra").write_bytes(b"x"), "unexpected"),
    "a file is cut off": (lambda c: (c / "latest").write_bytes(b"g"), "size differs"),
    "an empty shard": (lambda c: (c / SHARD.format(1)).write_bytes(b""), "size differs"),
    "rank 3's shard was never written": (lambda c: drop(c, SHARD.format(3)), "optimizer shard missing"),
    "rank 0's RNG was never written": (lambda c: drop(c, "rng_state_0.pth"), "RNG state missing"),
    "a stale shard of rank 4": (lambda c: add(c, SHARD.format(4)), "optimizer shard too many"),
    "no latest": (lambda c: drop(c, "latest"), "missing"),
    "no trainer state": (lambda c: drop(c, "trainer_state.json"), "missing"),
    "no model": (lambda c: drop(c, "model.safetensors"), "missing"),
    "no contract": (lambda c: drop(c, census.CONTRACT), "contract missing"),
    "marked incomplete": (lambda c: add(c, "checkpoint-is-incomplete.txt"), "checkpoint incomplete"),
    "another update": (lambda c: edit_inventory(c, lambda v: v.update(update=21)), "update differs"),
    "another world": (lambda c: edit_inventory(c, lambda v: v.update(world=8)), "world size differs"),
    "a total below": (lambda c: edit_inventory(c, lambda v: v.update(of=3)), "inventory damaged"),
    "a link for a file": (lambda c: ((c / "latest").unlink(), (c / "latest").symlink_to("x")), "unsafe"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_whatever_is_not_whole_is_refused(tmp_path: Path, name: str) -> None:
    """Each way in which a checkpoint can be less, or more, than one."""
    change, expected = BREAKS[name]
    folder = save_checkpoint(tmp_path, 20, 40, 4, 1.0)
    change(folder)
    with pytest.raises(Refusal) as refused:
        census.take_census(folder, 4)
    assert expected in [fault.what for fault in refused.value.faults]
    assert all(fault.fix for fault in refused.value.faults)


def test_a_world_of_another_size_is_named_in_both_numbers(tmp_path: Path) -> None:
    """A checkpoint of 8 ranks on 4: "target 4", "checkpoint 8"."""
    folder = save_checkpoint(tmp_path, 20, 40, 8, 1.0)
    with pytest.raises(Refusal) as refused:
        census.take_census(folder, 4)
    fault = next(fault for fault in refused.value.faults if fault.what == "world size differs")
    assert (fault.expected, fault.found) == ("target 4", "checkpoint 8")


def test_a_changed_byte_is_found_by_hash(tmp_path: Path) -> None:
    """Sizes do not tell; `hash_faults` does, and names the file."""
    folder = save_checkpoint(tmp_path, 20, 40, 4, 1.0)
    (folder / "rng_state_2.pth").write_bytes(pickled({"random state": 3}))
    faults = census.hash_faults(census.take_census(folder, 4))
    assert [(fault.what, fault.where) for fault in faults] == [("mismatch", str(folder / "rng_state_2.pth"))]


def test_the_newest_complete_checkpoint_is_found_by_content(tmp_path: Path) -> None:
    """Half-written, renamed and oddly named ones are passed over, by number and not by name or time."""
    for update in (9900, 10000, 10100, 10200):
        save_checkpoint(tmp_path, update, 20000, 2, 1.0)
    (tmp_path / "checkpoint-10100" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-10200" / SHARD.format(0).replace("20/", "10200/")).write_bytes(b"")
    for odd in (
        "checkpoint-10300.tmp",
        "tmp-checkpoint-x",
        "checkpoint-best",
        "checkpoint-１０４００",
        "checkpoint-010500",
    ):
        shutil.copytree(tmp_path / "checkpoint-10000", tmp_path / odd)
    for age, path in enumerate(sorted(tmp_path.iterdir())):
        os.utime(path, (age, age))
    newest, rejected = census.newest_complete(tmp_path.iterdir(), 2)
    assert newest is not None
    assert newest.name == "checkpoint-10000"
    assert sorted(rejected) == ["checkpoint-10100", "checkpoint-10200"]
