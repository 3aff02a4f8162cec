"""Lineage and packing without an engine: chains that show every edit, and bundles that come out the same."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from runner import lineage, pack
from runner.engine import Phase, State
from runner.errors import Refusal, Verdict
from runner.inside.digests import sha256_bytes
from runner.prepare import prepare
from runner.run import RunFolder, judge, settle
from runner.verify import open_bundle, verify
from tests.builder import UPDATES, WORLD, snapshot
from tests.scripted.saving import pickled, save_checkpoint
from tests.test_rebase_plan import HOST, IMAGE, inputs_of, plan_launch


def links_of(count: int) -> list[lineage.Link]:
    """Return a chain of `count` links."""
    links: list[lineage.Link] = []
    for number in range(count):
        links.append(
            lineage.Link(
                previous=lineage.head(links),
                run="tiny",
                segment=f"tiny-{number}",
                server="a",
                engine="docker",
                image="sha256:x",
                lock="sha256:y",
                code="z",
                contract="c",
                checkpoint_in="fresh",
                checkpoint_out="none",
                first_update=1,
                last_update=2,
                started=3,
                ended=4,
                verdict="stopped",
            )
        )
    return links


def test_a_chain_reads_back() -> None:
    """What is rendered is what is parsed."""
    links = links_of(3)
    assert lineage.parse(lineage.render(links), "lineage") == tuple(links)
    assert lineage.parse(b"", "lineage") == ()


@pytest.mark.parametrize("number", [0, 1])
def test_an_edited_dropped_or_moved_link_is_found(number: int) -> None:
    """Every link holds the hash of the one before."""
    links = links_of(3)
    edited = [*links]
    edited[number] = dataclasses.replace(links[number], last_update=99)
    swapped = [*links]
    swapped[number], swapped[number + 1] = swapped[number + 1], swapped[number]
    for wrong in (edited, swapped, links[:number] + links[number + 1 :]):
        with pytest.raises(Refusal, match="lineage broken"):
            lineage.parse(lineage.render(wrong), "lineage")


def run_at(folder: Path, update: int, *, outcome: str = "stopped", exit_code: int | None = 0) -> RunFolder:
    """Return a run folder in which one segment trained to `update`, as the scripted trainer would leave it."""
    inputs = inputs_of(folder)
    run = RunFolder(folder / "run")
    prepare(inputs, plan_launch(inputs, IMAGE, run.path, HOST), run, (folder / "server-a.yaml").read_bytes())
    record = {
        "segment": "tiny-0001", "run": "tiny", "server": "server-a", "engine": "docker", "from_update": 4, "started": 7,
        "image": "i", "lock": "l", "code": "c", "contract": "k", "checkpoint": "p",
    }  # fmt: skip
    (run.segments / "0001.json").write_text(json.dumps(record))
    save_checkpoint(run.output, update, UPDATES, WORLD, state=2.5)
    exposure = run.output / "train" / "exposure"
    exposure.mkdir(parents=True)
    rows = "".join(
        json.dumps({"update": at, "ids": [], "loss": "0x1p0"}) + "\n" for at in range(1, update + 1)
    )
    for rank in range(WORLD):
        (exposure / f"rank_{rank}.jsonl").write_text(rows)
    value = {"outcome": outcome, "update": update, "checkpoint": f"checkpoint-{update}", "request": "x"}
    (run.output / "train" / "OUTCOME.json").write_text(json.dumps(value))
    settle(run, State(Phase.ENDED, exit_code), now_s=9)
    return run


@pytest.mark.parametrize(
    ("outcome", "exit_code", "verdict"),
    [
        ("stopped", 0, Verdict.STOPPED),
        ("stopped", 1, Verdict.FAILED),
        ("stopped", None, Verdict.LOST),
        ("stopped", 137, Verdict.FORCED),
        ("nonsense", 0, Verdict.FAILED),
        ("finished", 0, Verdict.FAILED),
    ],
)
def test_unknown_is_not_success(
    tmp_path: Path, outcome: str, exit_code: int | None, verdict: Verdict
) -> None:
    """Success needs exit code 0, the trainer's word, and the complete checkpoint it names."""
    run = run_at(tmp_path, 5, outcome=outcome, exit_code=exit_code)
    assert run.links()[-1].verdict == verdict.value


def test_out_of_memory_wins_over_the_exit_code(tmp_path: Path) -> None:
    """137 and OOMKilled both lie alone; the engine's counter is asked first."""
    run = run_at(tmp_path, 5)
    assert judge(run, State(Phase.ENDED, 137, out_of_memory=True)) is Verdict.OUT_OF_MEMORY


def test_settling_twice_adds_one_link(tmp_path: Path) -> None:
    """A segment is closed once, whoever comes second."""
    run = run_at(tmp_path, 5)
    assert settle(run, State(Phase.ENDED, 0), now_s=10) is None
    assert len(run.links()) == 1
    assert run.links()[0].first_update == 5
    assert run.links()[0].last_update == 5


def test_a_packed_run_verifies_and_is_sealed(tmp_path: Path) -> None:
    """The bundle is at the new update, holds lineage and logs, and the source refuses to train."""
    run = run_at(tmp_path, 5)
    packed = pack.pack(run, tmp_path / "packed")
    verified = verify(open_bundle(packed.path))
    assert verified.spec.from_update == 5
    assert verified.spec.logs == "run"
    assert [link.segment for link in verified.lineage] == ["tiny-0001"]
    assert "run/train/exposure/rank_1.jsonl" in verified.digests
    assert not any(name.startswith("checkpoint-4/") for name in verified.digests)
    with pytest.raises(Refusal, match="run folder is sealed"):
        run.refuse_if_sealed()


def test_the_same_run_packs_to_the_same_bytes(tmp_path: Path) -> None:
    """Packed twice, into folders of other names: the same files, the same root."""
    run = run_at(tmp_path, 5)
    first, second = pack.pack(run, tmp_path / "one"), pack.pack(run, tmp_path / "two")
    assert first.root == second.root
    assert snapshot(first.path) == snapshot(second.path)


def test_the_copied_files_are_the_bundles_own(tmp_path: Path) -> None:
    """Code and manifest go on byte for byte; what the run does not own is never rewritten."""
    run = run_at(tmp_path, 5)
    before = verify(open_bundle(tmp_path / "bundle"))
    after = verify(open_bundle(pack.pack(run, tmp_path / "packed").path))
    for name in ("source/code.tar.gz", "data/train.jsonl"):
        assert before.digests[name] == after.digests[name]


def test_a_sealed_run_that_changed_is_not_packed_again(tmp_path: Path) -> None:
    """What was packed is what lives; a later change of the folder is no second life."""
    run = run_at(tmp_path, 5)
    pack.pack(run, tmp_path / "one")
    (run.output / "train" / "note.txt").write_text("changed")
    with pytest.raises(Refusal, match="run folder is sealed"):
        pack.pack(run, tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_a_checkpoint_with_a_flipped_byte_is_not_packed(tmp_path: Path) -> None:
    """The inventory is checked by hash before a byte is written, and nothing is sealed."""
    run = run_at(tmp_path, 5)
    (run.output / "checkpoint-5" / "rng_state_0.pth").write_bytes(pickled({"random state": 9}))
    before = snapshot(tmp_path)
    with pytest.raises(Refusal, match="mismatch"):
        pack.pack(run, tmp_path / "packed")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["checkpoint-5/x", "link"])
def test_links_are_not_packed(tmp_path: Path, name: str) -> None:
    """Content is packed; a link is refused by name."""
    run = run_at(tmp_path, 5)
    (run.output / name).symlink_to("/etc/passwd")
    with pytest.raises(Refusal):
        pack.pack(run, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_a_failed_prepare_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills in the middle leaves no half run folder."""
    inputs = inputs_of(tmp_path)
    run = RunFolder(tmp_path / "runs" / "run")
    before = snapshot(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    monkeypatch.setattr("runner.prepare.write_control", full)
    with pytest.raises(OSError, match="No space left"):
        prepare(inputs, plan_launch(inputs, IMAGE, run.path, HOST), run, b"{}")
    assert snapshot(tmp_path) == before


def test_preparing_copies_no_checkpoint_and_keeps_the_bundle(tmp_path: Path) -> None:
    """The run folder holds an empty mount point where the checkpoint will be; the bundle is untouched."""
    inputs = inputs_of(tmp_path)
    before = snapshot(tmp_path / "bundle")
    run = RunFolder(tmp_path / "run")
    prepare(
        inputs, plan_launch(inputs, IMAGE, run.path, HOST), run, (tmp_path / "server-a.yaml").read_bytes()
    )
    assert list((run.output / "checkpoint-4").iterdir()) == []
    assert snapshot(tmp_path / "bundle") == before
    assert run.spec_file.read_bytes() == (tmp_path / "bundle" / "run.yaml").read_bytes()
    newest, _ = run.checkpoints()
    assert newest is not None
    assert newest.path == tmp_path / "bundle" / "checkpoint-4"
    assert sha256_bytes((tmp_path / "bundle" / "SHA256SUMS").read_bytes()) in run.prepared_file.read_text()


def test_a_verdict_that_does_not_exist_is_refused() -> None:
    """A chain whose hashes fit, written by whoever does not know what a segment's end is called."""
    raw = lineage.render([dataclasses.replace(links_of(1)[0], verdict="nonsense")])
    with pytest.raises(Refusal, match="finished, stopped, forced"):
        lineage.parse(raw, "lineage.jsonl")
