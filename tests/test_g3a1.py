"""A bundle from elsewhere: run G of the field notes, described from outside, verified, drafted and prepared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner import documents
from runner.describe import TODO, describe
from runner.errors import Refusal
from runner.plan import plan_launch
from runner.prepare import prepare
from runner.rebase import rebase
from runner.run import RunFolder
from runner.server import ServerProfile
from runner.spec import RunSpec
from runner.verify import open_bundle, verify
from tests import g3a1
from tests.builder import snapshot
from tests.test_rebase_plan import HOST, IMAGE


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small directory of run G's layout; no test writes to it."""
    return g3a1.make(tmp_path_factory.mktemp("g3a1") / "published")


@pytest.fixture(scope="module")
def spec(made: Path) -> bytes:
    """The example's spec with the digests of that directory."""
    return g3a1.spec_bytes(made)


def test_the_example_is_a_run_spec() -> None:
    """Every number of the field notes stands where a later step looks for it."""
    spec = documents.load(RunSpec, g3a1.EXAMPLE)
    assert (spec.updates, spec.from_update, spec.world.ranks, spec.data.rows) == (3852, 2100, 4, 30815)
    assert [gate.line for gate in spec.gates] == ["SCHEDULE_GATE_PASS (3852, 116)", "TRAINING_CONTRACT"]
    assert spec.first_update is not None
    assert (spec.first_update.learning_rate, spec.first_update.loss) == (2.531e-06, (0.1, 0.3))
    assert spec.needs is not None
    assert spec.needs.host_memory_gib == 512


def test_it_verifies_and_prepares_with_the_spec_from_outside(made: Path, spec: bytes, tmp_path: Path) -> None:
    """The three rebase points: two mounted, the loader's workers rewritten; nothing else differs."""
    before = snapshot(made)
    bundle = verify(open_bundle(made), spec_bytes=spec)
    path = g3a1.make_server(tmp_path)
    inputs = rebase(bundle, documents.load(ServerProfile, path))
    assert [file.path for file in inputs.files] == [
        "checkpoint-2100/RECOVERY_COMPLETE.json",
        "checkpoint-2100/resume_contract.json",
        "run/resolved_config.json",
    ]
    assert inputs.warnings == ()
    run = RunFolder(tmp_path / "run")
    plan = plan_launch(inputs, IMAGE, run.path, HOST)
    prepare(inputs, plan, run, path.read_bytes())
    contract = (run.rebased / "checkpoint-2100/resume_contract.json").read_text()
    assert contract == g3a1.CONTRACT.replace('"num_workers": 12', '"num_workers": 8')
    assert {"/gpfs/g/images", "/gpfs/g/teacher.safetensors", "/gpfs/g/teacher-src"} <= {
        mount.target for mount in plan.mounts
    }
    assert snapshot(made) == before


def test_another_run_is_refused_by_its_invariants(made: Path, spec: bytes, tmp_path: Path) -> None:
    """Every one that does not hold is named, with both values."""
    value = documents.yaml_value(spec.decode())
    value["invariants"][0]["equals"] = 430
    value["invariants"].append({"at": "{checkpoint}/resume_contract.json#/gone", "equals": 1})
    bundle = verify(open_bundle(made), spec_bytes=json.dumps(value).encode())
    with pytest.raises(Refusal) as refused:
        rebase(bundle, documents.load(ServerProfile, g3a1.make_server(tmp_path)))
    found = [(fault.what, fault.expected, fault.found) for fault in refused.value.faults]
    assert found[0] == ("invariant does not hold", "430", "429")
    assert found[1][0] == "invariant cannot be read"


def test_without_a_spec_the_fix_says_how_to_get_one(made: Path) -> None:
    """`ferry describe`, then --spec."""
    with pytest.raises(Refusal) as refused:
        verify(open_bundle(made))
    assert "ferry describe" in refused.value.faults[0].fix
    assert "--spec" in refused.value.faults[0].fix


def test_the_draft_holds_what_lies_in_the_bundle(made: Path, spec: bytes) -> None:
    """Checkpoint, ranks, totals, code and manifest are read; image and launch stay open, and do not pass."""
    draft = describe(open_bundle(made), "g3a1")
    value = documents.yaml_value(draft.text.decode())
    wanted = documents.yaml_value(spec.decode())
    assert value["checkpoint"] == wanted["checkpoint"]
    assert (value["updates"], value["world"]["ranks"], value["logs"]) == (3852, 4, "run")
    assert value["data"] == wanted["data"]
    assert {key: value["code"][key] for key in ("archive", "sha256", "tree")} == {
        key: wanted["code"][key] for key in ("archive", "sha256", "tree")
    }
    assert value["image"]["digest"] == TODO
    with pytest.raises(Refusal, match="wrong value"):
        documents.parse(RunSpec, draft.text, "draft")
