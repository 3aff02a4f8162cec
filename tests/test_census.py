"""The census of the second kind, a consolidated optimizer; what trainer state says; interrupted hashing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.errors import Refusal
from runner.inside import census, digests
from runner.inside import spread as workers
from runner.inside.digests import Hashed, hash_files, sha256_bytes
from tests.scripted.saving import pickled, save_checkpoint


def relist(folder: Path) -> None:
    """Write an inventory that fits what the checkpoint holds now."""
    path = folder / census.INVENTORY
    value = json.loads(path.read_bytes())
    names = [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p != path]
    contents = {name: (folder / name).read_bytes() for name in names}
    value["files"] = {
        name: {"bytes": len(raw), "sha256": sha256_bytes(raw)} for name, raw in contents.items()
    }
    path.write_text(json.dumps(value))


def consolidated(output: Path, update: int, world: int) -> Path:
    """What Transformers writes for DDP: optimizer.pt and scheduler.pt once, an RNG state a rank."""
    folder = save_checkpoint(output, update, 40, world, 1.0)
    shutil.rmtree(folder / f"global_step{update}")
    (folder / "latest").unlink()
    (folder / "optimizer.pt").write_bytes(pickled({"state": {}}))
    (folder / "scheduler.pt").write_bytes(pickled({"last_epoch": update, "_step_count": update + 1}))
    if world == 1:
        (folder / "rng_state_0.pth").rename(folder / "rng_state.pth")
    relist(folder)
    return folder


@pytest.mark.parametrize("world", [1, 4])
def test_a_consolidated_checkpoint_is_whole(tmp_path: Path, world: int) -> None:
    """The kind follows from the content; one rank's RNG state has no number in its name."""
    assert census.take_census(consolidated(tmp_path, 20, world), world).kind is census.Kind.CONSOLIDATED
    assert (
        census.take_census(save_checkpoint(tmp_path, 30, 40, world, 1.0), world).kind is census.Kind.SHARDED
    )


def trainer_state(folder: Path, **fields: object) -> None:
    """Write another trainer state."""
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 20} | fields))


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no scheduler": (lambda c: (c / "scheduler.pt").unlink(), "missing"),
    "no optimizer": (lambda c: (c / "optimizer.pt").unlink(), "checkpoint of no known kind"),
    "two kinds": (lambda c: (c / "latest").write_text("global_step20"), "checkpoint of no known kind"),
    "no rank 3": (lambda c: (c / "rng_state_3.pth").unlink(), "RNG state missing"),
    "a stale rank 4": (lambda c: (c / "rng_state_4.pth").write_bytes(b"x"), "RNG state too many"),
    "the name of one rank's": (
        lambda c: (c / "rng_state_0.pth").rename(c / "rng_state.pth"),
        "RNG state missing",
    ),
    "no weights": (lambda c: (c / "model.safetensors").unlink(), "missing"),
    "an empty optimizer": (lambda c: (c / "optimizer.pt").write_bytes(b""), "empty file"),
    "another total": (lambda c: trainer_state(c, max_steps=41), "total of updates differs"),
    "a log of the future": (
        lambda c: trainer_state(c, log_history=[{"step": 20}, {"step": 21}]),
        "update differs",
    ),
    "trainer state is a list": (lambda c: (c / "trainer_state.json").write_text("[]"), "update differs"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_consolidated_checkpoint_that_is_not_whole_is_refused(tmp_path: Path, name: str) -> None:
    """Also when the inventory was written to fit."""
    change, expected = BREAKS[name]
    folder = consolidated(tmp_path, 20, 4)
    change(folder)
    relist(folder)
    with pytest.raises(Refusal) as refused:
        census.take_census(folder, 4)
    assert expected in [fault.what for fault in refused.value.faults]


def test_an_interrupt_ends_the_readers_and_keeps_what_was_told(tmp_path: Path) -> None:
    """An exception out of the caller's thread leaves no thread reading; files hashed before it were told."""
    for number in range(600):
        (tmp_path / f"{number:03}").write_bytes(b"%d" % number)
        os.utime(tmp_path / f"{number:03}", (1, 1))
    told: dict[str, Hashed] = {}

    def on_hashed(name: str, hashed: Hashed) -> None:
        told[name] = hashed
        if len(told) == 300:
            raise KeyboardInterrupt

    names = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        hash_files(tmp_path, names, on_hashed=on_hashed)
    assert len(told) == 300
    assert all(entry.sha256 == sha256_bytes(b"%d" % int(name)) for name, entry in told.items())


def test_small_and_large_files_are_all_told_in_full(tmp_path: Path) -> None:
    """Progress adds up to the size of everything, on both sides of the limit between small and large."""
    sizes = {"empty": 0, "small": 1, "limit": 1 << 18, "over": (1 << 18) + 1, "large": (1 << 24) + 7}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    counts: list[int] = []
    hashed = hash_files(tmp_path, sizes, on_bytes=counts.append)
    assert sum(counts) == sum(sizes.values())
    for name, size in sizes.items():
        entry = hashed[name]
        assert isinstance(entry, Hashed)
        assert (entry.sha256, entry.size_bytes) == (sha256_bytes(bytes(size)), size)


def test_very_many_small_files_are_hashed_by_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same digests and errors; what a worker cannot read, or dies over, is read by the caller."""
    names = [f"{number:03}" for number in range(400)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * 20)
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / "link").symlink_to("000")
    (tmp_path / "large").write_bytes(bytes(1 << 20))
    wanted = [*names, "link", "absent", "large"]
    plain = hash_files(tmp_path, wanted, threads=2)
    monkeypatch.setattr(digests, "SPREAD_FILES", 100)
    counts: list[int] = []
    spread = hash_files(tmp_path, wanted, threads=2, on_bytes=counts.append)
    assert sum(counts) == 400 * 60 + (1 << 20)
    assert list(spread) == wanted
    for name in wanted:
        assert spread[name] == plain[name] or isinstance(spread[name], OSError)
    assert [name for name in wanted if isinstance(spread[name], OSError)] == ["link", "absent"]
    monkeypatch.setattr(workers, "hash_one", lambda *_: os._exit(9))
    assert hash_files(tmp_path, names, threads=2) == {name: plain[name] for name in names}
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_an_absent_folder_is_an_error_of_every_file(tmp_path: Path) -> None:
    """No traceback where a bundle is gone."""
    assert isinstance(hash_files(tmp_path / "absent", ["x"])["x"], OSError)
