"""What an adversary tried against the road, each as a rule that holds since."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from runner import documents, lineage, pack, screen
from runner.compare import compare
from runner.engine import Phase, State
from runner.errors import ExitCode, Refusal, Verdict
from runner.prepare import prepare
from runner.resume import refuse_unless_running, request_stop
from runner.run import RunFolder, judge
from runner.server import ServerProfile
from runner.status import read_status
from runner.verify import open_bundle, verify
from tests.builder import make_bundle, snapshot
from tests.test_lineage_pack import links_of, run_at
from tests.test_rebase_plan import HOST, IMAGE, inputs_of, plan_launch, plan_of


def test_a_run_is_not_trained_while_it_is_packed(tmp_path: Path) -> None:
    """Packing holds the lease from the first look to the seal; a second packer is refused with the holder's name."""
    run = run_at(tmp_path, 5)
    before = snapshot(tmp_path)
    with run.hold_lease("ferry pack"):
        assert run.lease_holder() == f"ferry pack, process {os.getpid()}"
        with pytest.raises(Refusal, match="the run is running") as refused:
            pack.pack(run, tmp_path / "packed")
        assert refused.value.exit_code is ExitCode.LEASE_HELD
    assert snapshot(tmp_path) == before
    assert run.lease_holder() is None


def test_two_starts_at_once_are_one(tmp_path: Path) -> None:
    """The second is refused before it can touch the first one's container."""
    run = run_at(tmp_path, 5)
    with run.starting(), pytest.raises(Refusal, match="being started") as refused, run.starting():
        pass
    assert refused.value.exit_code is ExitCode.LEASE_HELD


def test_looking_at_the_lease_takes_nothing_from_anybody(tmp_path: Path) -> None:
    """A look holds the lock shared: another look sees nobody."""
    import fcntl

    run = run_at(tmp_path, 5)
    with run.lease.open("rb") as looker:
        fcntl.flock(looker, fcntl.LOCK_SH)
        assert run.lease_holder() is None


@pytest.mark.parametrize("what", ["nothing logged", "a rank's log is gone", "updates are missing"])
def test_what_was_not_logged_is_not_equal(tmp_path: Path, what: str) -> None:
    """Two runs that lack the same rows are not shown to be equal."""
    first = run_at(tmp_path, 5)
    second = RunFolder(tmp_path / "second")
    shutil.copytree(first.path, second.path)
    assert compare(first, second).equal
    for run in (first, second):
        logs = sorted((run.output / "train" / "exposure").iterdir())
        match what:
            case "nothing logged":
                for log in logs:
                    log.write_text("")
            case "a rank's log is gone":
                logs[1].unlink()
            case "updates are missing":
                for log in logs:
                    log.write_text(log.read_text().splitlines(keepends=True)[0])
    assert not compare(first, second).equal


def test_no_link_of_the_container_leads_the_host_astray(tmp_path: Path) -> None:
    """The output folder is the container's: a link in it is not followed when the stop request is written."""
    run = run_at(tmp_path, 5)
    victim = tmp_path / "victim"
    victim.mkdir()
    shutil.rmtree(run.output / "train")
    (run.output / "train").symlink_to(victim)
    with pytest.raises(Refusal, match="unsafe"):
        request_stop(run, 3)
    assert list(victim.iterdir()) == []


@pytest.mark.parametrize("place", ["bundle/packed", "run/output/packed", "run/packed"])
def test_a_bundle_is_not_packed_into_what_it_comes_from(tmp_path: Path, place: str) -> None:
    """A bundle is never written to, and a run folder does not hold its own bundle."""
    run = run_at(tmp_path, 5)
    before = snapshot(tmp_path)
    with pytest.raises(Refusal, match="inside another folder"):
        pack.pack(run, tmp_path / place)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("place", ["bundle/run", "server-a files/images/run"])
def test_a_run_folder_does_not_appear_in_its_bundle_or_data(tmp_path: Path, place: str) -> None:
    """One there would make the bundle fail its own list."""
    inputs = inputs_of(tmp_path)
    run = RunFolder(tmp_path / place)
    before = snapshot(tmp_path)
    with pytest.raises(Refusal, match="run folder lies in the"):
        prepare(inputs, plan_launch(inputs, IMAGE, run.path, HOST), run, b"{}")
    assert snapshot(tmp_path) == before


def test_a_pipe_in_the_output_is_not_packed_as_an_empty_file(tmp_path: Path) -> None:
    """What is no regular file is refused by name, a link to a folder too."""
    run = run_at(tmp_path, 5)
    os.mkfifo(run.output / "pipe")
    with pytest.raises(Refusal, match="unsafe"):
        pack.pack(run, tmp_path / "packed")
    (run.output / "pipe").unlink()
    (run.output / "linked").symlink_to(tmp_path)
    with pytest.raises(Refusal, match="unsafe"):
        pack.pack(run, tmp_path / "packed")


def test_a_checkpoint_with_other_bytes_is_no_success(tmp_path: Path) -> None:
    """The trainer's word and the right sizes are not enough: the verdict reads every byte."""
    run = run_at(tmp_path, 5)
    assert judge(run, State(Phase.ENDED, 0)) is Verdict.STOPPED
    path = run.output / "checkpoint-5" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert judge(run, State(Phase.ENDED, 0)) is Verdict.FAILED


def test_the_bundles_own_checkpoint_is_no_stop(tmp_path: Path) -> None:
    """A trainer that says "stopped" without a save of its own did not stop with a checkpoint."""
    run = run_at(tmp_path, 5)
    shutil.rmtree(run.output / "checkpoint-5")
    value = {"outcome": "stopped", "update": 4, "checkpoint": "checkpoint-4", "request": None}
    (run.output / "train" / "OUTCOME.json").write_text(json.dumps(value))
    assert judge(run, State(Phase.ENDED, 0)) is Verdict.FAILED


def test_a_stop_of_what_does_not_run_is_refused(tmp_path: Path) -> None:
    """The request would be forgotten at the next start."""
    run = run_at(tmp_path, 5)
    with pytest.raises(Refusal, match="the run does not run"):
        refuse_unless_running(run, State(Phase.ENDED, 0))


@pytest.mark.parametrize(
    "tag", ['!!int ""', '!!float ""', "!!bool maybe", "!!timestamp x", "!!map [a, b]", "!!python/x y"]
)
def test_yaml_tags_give_no_traceback(tag: str) -> None:
    """An explicit tag that does not fit its value is a fault of the document."""
    with pytest.raises(Refusal):
        documents.parse(ServerProfile, f"ferry: {tag}\n".encode(), "server.yaml")


def test_a_pipe_for_a_document_does_not_hang(tmp_path: Path) -> None:
    """It is refused at once."""
    os.mkfifo(tmp_path / "server.yaml")
    with pytest.raises(Refusal, match="document cannot be read"):
        documents.load(ServerProfile, tmp_path / "server.yaml")


@pytest.mark.parametrize("change", [{"ended": 2**60}, {"run": "\ud800"}])
def test_a_lineage_beyond_json_is_damaged(change: dict[str, object]) -> None:
    """Numbers and text that canonical JSON does not have."""
    value = {**json.loads(links_of(1)[0].line), **change}
    with pytest.raises(Refusal, match="lineage damaged"):
        lineage.parse(json.dumps(value).encode() + b"\n", "lineage")
    with pytest.raises(Refusal, match="lineage damaged"):
        lineage.parse(b"[" * 100_000 + b"\n", "lineage")


def test_a_path_that_looks_like_markup_is_shown_as_it_is(tmp_path: Path) -> None:
    """The plan on the screen is the plan."""
    plan = plan_of(tmp_path / "[bold]x[/y]")
    console = Console(width=400, record=True)
    with open(os.devnull, "w") as nowhere:
        console.file = nowhere
        console.print(screen.plan_table(plan))
    assert "[bold]x[/y]" in console.export_text()


@pytest.mark.parametrize(
    "line", ['{"event": "update", "update": "x"}', "[" * 100_000, '{"event": "update"}', "\x00"]
)
def test_a_strange_event_does_not_hide_the_status(tmp_path: Path, line: str) -> None:
    """The log is the container's: what is not an update is passed over."""
    run = run_at(tmp_path, 5)
    good = {"event": "update", "update": 5, "loss": "nan", "lr": 1, "epoch": None, "seconds": None}
    (run.output / "train" / "events.jsonl").write_text(json.dumps(good) + "\n" + line + "\n")
    assert read_status(run, State(Phase.ENDED, 0)).update == 5


def test_without_a_home_there_is_no_memory_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verifying needs no cache; a shared folder is never one."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    verify(open_bundle(make_bundle(tmp_path)), use_memory=True)
