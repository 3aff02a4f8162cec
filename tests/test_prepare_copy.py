"""Preparing by copy: what is interrupted goes on, and whatever goes wrong, nothing but that is left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from runner import aside, documents
from runner.errors import ExitCode, Refusal
from runner.plan import plan_launch
from runner.prepare import prepare
from runner.rebase import RebasedInputs, rebase
from runner.run import RunFolder
from runner.server import ServerProfile
from runner.verify import open_bundle, verify
from tests.builder import grow, make_bundle, make_server, snapshot
from tests.test_rewrite_bundle import HOST, IMAGE

BIG = "model.safetensors"
PIECE = 1 << 20


class Stopped(Exception):
    """Stands for whatever else can go wrong."""


@pytest.fixture
def inputs(tmp_path: Path) -> RebasedInputs:
    """A bundle whose checkpoint has a file of 12 MiB, to be copied."""
    server = documents.load(ServerProfile, make_server(tmp_path))
    bundle = make_bundle(tmp_path, update=4)
    grow(bundle, {BIG: 12 * PIECE})
    return rebase(verify(open_bundle(bundle)), server, mode="copy")


def attempt(
    tmp_path: Path, inputs: RebasedInputs, on_bytes: Callable[[int], None] | None = None
) -> RunFolder:
    """Prepare `inputs` under `tmp_path/there/run`."""
    run = RunFolder(tmp_path / "there" / "run")
    server = (tmp_path / "server-a.yaml").read_bytes()
    prepare(inputs, plan_launch(inputs, IMAGE, run.path, HOST), run, server, on_bytes)
    return run


def interrupt(error: type[BaseException], after: int = 5) -> Callable[[int], None]:
    """What hears of progress, and raises `error` at piece `after`; but only in the copying thread's `on_bytes`."""
    heard = [0]

    def on_bytes(count: int) -> None:
        heard[0] += count
        if heard[0] > after * PIECE:
            raise error

    return on_bytes


def places(tmp_path: Path) -> list[Path]:
    """Everything beside the run folder that is not it."""
    return sorted(path for path in (tmp_path / "there").iterdir() if path.name != "run")


def same(run: RunFolder, inputs: RebasedInputs) -> bool:
    """Whether the checkpoint was copied to the last byte, and nothing else."""
    return snapshot(run.output / "checkpoint-4") == snapshot(inputs.bundle.path / "checkpoint-4")


@pytest.mark.parametrize("damage", ["none", "a byte", "longer", "shorter"])
def test_an_interrupted_copy_goes_on(tmp_path: Path, inputs: RebasedInputs, damage: str) -> None:
    """In the file that was begun, from where it was; unless what lies there is not its beginning."""
    with pytest.raises(KeyboardInterrupt):
        attempt(tmp_path, inputs, interrupt(KeyboardInterrupt))
    (place,) = places(tmp_path)
    begun = place / BIG
    held = begun.stat().st_size
    assert 0 < held < 12 * PIECE
    if damage == "a byte":
        content = bytearray(begun.read_bytes())
        content[held // 2] ^= 1
        begun.write_bytes(content)
    elif damage == "longer":
        begun.write_bytes(bytes(13 * PIECE))
    elif damage == "shorter":
        os.truncate(begun, held // 3)
    (place / "stranger").write_bytes(b"of an older attempt")
    inode = begun.stat().st_ino
    run = attempt(tmp_path, inputs)
    assert same(run, inputs)
    assert places(tmp_path) == []
    if damage in ("none", "shorter"):
        assert (run.output / "checkpoint-4" / BIG).stat().st_ino == inode


def test_what_fails_leaves_nothing(tmp_path: Path, inputs: RebasedInputs) -> None:
    """Neither the run folder, nor a beginning of it, nor the folder above that was made for it."""
    with pytest.raises(Stopped):
        attempt(tmp_path, inputs, interrupt(Stopped))
    assert not (tmp_path / "there").exists()


def test_a_source_that_changed_is_refused_and_leaves_nothing(tmp_path: Path, inputs: RebasedInputs) -> None:
    """Its copy is not what was verified."""
    path = inputs.bundle.path / "checkpoint-4" / "latest"
    path.write_bytes(path.read_bytes().replace(b"4", b"5"))
    with pytest.raises(Refusal, match="copy differs"):
        attempt(tmp_path, inputs)
    assert not (tmp_path / "there").exists()


def test_a_killed_one_is_gone_on_with_and_swept_up(tmp_path: Path, inputs: RebasedInputs) -> None:
    """No handler runs when a process is killed."""
    child = os.fork()
    if child == 0:
        attempt(tmp_path, inputs, interrupt_hard)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    assert {path.name.split("-")[0] for path in places(tmp_path)} == {".run.copying", ".run.preparing"}
    assert same(attempt(tmp_path, inputs), inputs)
    assert places(tmp_path) == []


def interrupt_hard(_: int) -> None:
    """End this process at the first piece, without a word."""
    os.kill(os.getpid(), 9)


def test_two_at_once_do_not_write_one_copy(tmp_path: Path, inputs: RebasedInputs) -> None:
    """The second is refused, and what the first has made stays."""
    key = f"{inputs.bundle.root} checkpoint-4/"
    (tmp_path / "there").mkdir()
    with aside.going_on(tmp_path / "there" / "run", "copying", key) as place:
        (place / BIG).write_bytes(b"begun")
        with pytest.raises(Refusal, match="another one is at it") as caught:
            attempt(tmp_path, inputs)
        assert caught.value.exit_code == ExitCode.LEASE_HELD
        assert (place / BIG).read_bytes() == b"begun"
    assert not (tmp_path / "there" / "run").exists()


def test_a_link_in_its_place_is_refused(tmp_path: Path, inputs: RebasedInputs) -> None:
    """Nothing is written where somebody else's link leads."""
    with pytest.raises(KeyboardInterrupt):
        attempt(tmp_path, inputs, interrupt(KeyboardInterrupt))
    (place,) = places(tmp_path)
    treasure = tmp_path / "treasure"
    treasure.write_bytes(b"mine")
    (place / BIG).unlink()
    (place / BIG).symlink_to(treasure)
    assert same(attempt(tmp_path, inputs), inputs)
    assert treasure.read_bytes() == b"mine"


def test_a_link_in_the_folders_place_is_refused(tmp_path: Path, inputs: RebasedInputs) -> None:
    """Nor through a folder that is a link."""
    with pytest.raises(KeyboardInterrupt):
        attempt(tmp_path, inputs, interrupt(KeyboardInterrupt))
    (place,) = places(tmp_path)
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    before = snapshot(tmp_path / "elsewhere")
    with pytest.raises(Refusal, match="unsafe"):
        attempt(tmp_path, inputs)
    assert snapshot(tmp_path / "elsewhere") == before
