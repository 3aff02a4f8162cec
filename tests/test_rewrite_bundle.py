"""Rebasing a bundle by rewriting: only what the spec declares, with its consequences, its proof and the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner import columns, documents, rewrite
from runner.compose import render
from runner.errors import Refusal
from runner.inside import census
from runner.inside.digests import sha256_bytes
from runner.manifest import read_facts
from runner.plan import plan_launch
from runner.prepare import prepare
from runner.rebase import Mode, RebasedInputs, rebase
from runner.run import RunFolder
from runner.server import ServerProfile
from runner.verify import open_bundle, verify
from tests.builder import IMAGES, TEACHER, WORLD, make_bundle, make_server, relist, snapshot
from tests.test_rebase_plan import HOST, IMAGE

CONTRACT = {
    "lr": 2e-5,
    "loader": {"workers": 4, "note": f"reads {IMAGES}/0.png and {TEACHER}2"},
    "teacher": {"path": TEACHER},
    "images": f"{IMAGES}/train",
}
RULES: list[dict[str, Any]] = [
    {
        "name": "loader_workers",
        "runtime_only": True,
        "at": ["{checkpoint}/resume_contract.json#/loader/workers"],
    },
    {"asset": "teacher", "at": ["checkpoint-4/resume_contract.json#/teacher/path"]},
    {
        "asset": "images",
        "at": [
            "{checkpoint}/resume_contract.json#/images",
            "data/info.json#/root",
            "data/train.jsonl#[]/image",
        ],
    },
    {"digest_of": "data/train.jsonl", "at": ["data/info.json#/sha256"]},
    {"output": "/mnt/origin/out", "at": ["{checkpoint}/trainer_state.json#/best_model_checkpoint"]},
]


def make(
    folder: Path, rules: list[dict[str, Any]] | None = None, best: str = "/mnt/origin/out/checkpoint-4"
) -> Path:
    """Return a bundle at update 4 whose contract holds paths and a loader setting, with `rules` for rewriting."""
    bundle = make_bundle(folder, update=4)
    checkpoint = bundle / "checkpoint-4"
    spec = documents.yaml_value((bundle / "run.yaml").read_text())
    spec["rebase"] = {"mount": [], "rewrite": RULES if rules is None else rules}
    moved = {rule.get("asset") for rule in spec["rebase"]["rewrite"]}
    spec["rebase"]["mount"] = [name for name in ("images", "teacher") if name not in moved]
    (bundle / "run.yaml").write_text(json.dumps(spec))
    # 2e-5 as its author wrote it; json.dumps would make 2e-05 of it.
    contract = json.dumps(CONTRACT, indent=1).replace("2e-05", "2e-5").encode()
    state = json.dumps(
        {"global_step": 4, "best_model_checkpoint": best, "log_history": [{"loss": 1e-3}]}
    ).encode()
    manifest = (bundle / "data/train.jsonl").read_bytes()
    info = json.dumps({"sha256": sha256_bytes(manifest), "root": IMAGES, "rows": 16}).encode()
    (bundle / "data/info.json").write_bytes(info)
    inventory = json.loads((checkpoint / "RECOVERY_COMPLETE.json").read_bytes())
    for name, content in {"resume_contract.json": contract, "trainer_state.json": state}.items():
        (checkpoint / name).write_bytes(content)
        inventory["files"][name] = {"bytes": len(content), "sha256": sha256_bytes(content)}
    inventory["contract"] = "sha256:" + sha256_bytes(contract)
    (checkpoint / "RECOVERY_COMPLETE.json").write_text(json.dumps(inventory, indent=2) + "\n")
    relist(bundle)
    return bundle


def inputs_of(folder: Path, bundle: Path, mode: Mode = "mount", **profile: Any) -> RebasedInputs:
    """Return `bundle` rebased onto a server that wants 8 loader workers."""
    path = make_server(folder, **{"values": {"loader_workers": 8}, **profile})
    output = str(folder / "run" / "output") if profile.get("engine") == "venv" else None
    return rebase(verify(open_bundle(bundle)), documents.load(ServerProfile, path), mode=mode, output=output)


def prepared(folder: Path, inputs: RebasedInputs) -> RunFolder:
    """Return the run folder of `inputs`."""
    run = RunFolder(folder / "run")
    plan = plan_launch(inputs, IMAGE, run.path, HOST)
    prepare(inputs, plan, run, (folder / "server-a.yaml").read_bytes())
    return run


def test_the_declared_fields_change_and_no_other_byte(tmp_path: Path) -> None:
    """Workers, paths and digests; the note, the number's spelling and the look-alike path stay."""
    bundle = make(tmp_path)
    before = snapshot(bundle)
    run = prepared(tmp_path, inputs_of(tmp_path, bundle))
    assert snapshot(bundle) == before
    old = (bundle / "checkpoint-4/resume_contract.json").read_bytes()
    new = (run.rebased / "checkpoint-4/resume_contract.json").read_bytes()
    assert new == old.replace(b'"workers": 4', b'"workers": 8').replace(
        json.dumps(TEACHER).encode(), b'"/ferry/assets/teacher"'
    ).replace(f'"{IMAGES}/train"'.encode(), b'"/ferry/assets/images/train"')
    assert b'"lr": 2e-5' in new
    assert (run.rebased / "checkpoint-4/resume_contract.json.orig").read_bytes() == old
    manifest = (run.rebased / "data/train.jsonl").read_bytes()
    assert manifest == (bundle / "data/train.jsonl").read_bytes().replace(
        IMAGES.encode(), b"/ferry/assets/images"
    )
    info = json.loads((run.rebased / "data/info.json").read_bytes())
    assert info == {"sha256": sha256_bytes(manifest), "root": "/ferry/assets/images", "rows": 16}
    state = json.loads((run.rebased / "checkpoint-4/trainer_state.json").read_bytes())
    assert state["best_model_checkpoint"] == "/ferry/run/checkpoint-4"


def test_the_record_is_a_json_patch_with_its_proof(tmp_path: Path) -> None:
    """Hashes before and after, reasons, and enough to get the original bytes back from what was made."""
    bundle = make(tmp_path)
    run = prepared(tmp_path, inputs_of(tmp_path, bundle))
    record = json.loads(run.rebase_record.read_bytes())
    assert [file["path"] for file in record["files"]] == [
        "checkpoint-4/RECOVERY_COMPLETE.json",
        "checkpoint-4/resume_contract.json",
        "checkpoint-4/trainer_state.json",
        "data/info.json",
        "data/train.jsonl",
    ]
    assert record["unchanged"].keys() == {"fingerprint"}
    for file in record["files"]:
        made = (run.rebased / file["path"]).read_bytes()
        original = (bundle / file["path"]).read_bytes()
        assert file["sha256"] == {
            "before": "sha256:" + sha256_bytes(original),
            "after": "sha256:" + sha256_bytes(made),
        }
        if "columns" in file:
            runs = tuple(columns.Run(**entry) for entry in file["columns"]["written"]["before"])
            moved = columns.Moved(
                ("image",), "", "", file["columns"]["written"]["after"], 16, 0, "", "", runs
            )
            assert b"".join(columns.take_back(run.rebased / file["path"], moved)) == original
            continue
        pairs = zip(file["patch"][::2], file["patch"][1::2], strict=True)
        edits = [
            rewrite.Edit(
                to["path"], was["value"], to["value"], to["written"]["before"], to["written"]["after"]
            )
            for was, to in pairs
        ]
        assert rewrite.undo(made, "json", edits) == original
    reasons = {op["why"] for file in record["files"] for op in file.get("patch", []) if op["op"] == "replace"}
    assert "consequence of checkpoint-4/resume_contract.json" in reasons
    assert "digest of data/train.jsonl" in reasons


def test_the_patch_is_one_of_rfc_6902(tmp_path: Path) -> None:
    """Operations in order, `test` before `replace`, applied to the parsed original: the parsed result."""
    bundle = make(tmp_path)
    run = prepared(tmp_path, inputs_of(tmp_path, bundle))
    for file in json.loads(run.rebase_record.read_bytes())["files"]:
        if "patch" not in file:
            continue
        document = json.loads((bundle / file["path"]).read_bytes())
        for operation in file["patch"]:
            *parents, last = rewrite.parse_pointer(operation["path"])
            parent = rewrite.value_at(document, rewrite.to_pointer(parents))
            if operation["op"] == "test":
                assert parent[last] == operation["value"]
            else:
                parent[last] = operation["value"]
        assert document == json.loads((run.rebased / file["path"]).read_bytes())


def test_the_run_sees_a_complete_checkpoint_and_the_start_program_knows_its_hashes(tmp_path: Path) -> None:
    """The inventory follows; launch, list and mounts name what the run sees; the fingerprint is the old one."""
    bundle = make(tmp_path)
    inputs = inputs_of(tmp_path, bundle, mode="copy")
    run = prepared(tmp_path, inputs)
    seen = census.take_census(run.output / "checkpoint-4", WORLD)
    assert census.hash_faults(seen) == []
    launch = json.loads(run.launch_file.read_bytes())
    assert launch["inventory"] == f"sha256:{seen.inventory}"
    assert launch["contract"] == f"sha256:{seen.contract}"
    assert launch["checkpoint_lies"] == "in the run folder"
    facts = read_facts(run.rebased / "data/train.jsonl", ("image",), "/ferry/assets/images")
    assert facts.fingerprint == inputs.bundle.spec.data.fingerprint
    digests = json.loads(run.verified_file.read_bytes())["digests"]
    assert "sha256:" + digests["data/train.jsonl"] == facts.sha256


def test_rewritten_files_are_mounted_over_the_bundles(tmp_path: Path) -> None:
    """Read-only, file by file, in the bundle and in the checkpoint that the trainer resumes from."""
    plan = plan_launch(inputs_of(tmp_path, make(tmp_path)), IMAGE, tmp_path / "run", HOST)
    mounts = {mount.target: mount for mount in plan.mounts}
    for target in ("/ferry/bundle/data/train.jsonl", "/ferry/bundle/checkpoint-4/resume_contract.json",
                   "/ferry/run/checkpoint-4/resume_contract.json", "/ferry/run/checkpoint-4/RECOVERY_COMPLETE.json",
                   "/ferry/assets/images", "/ferry/assets/teacher"):  # fmt: skip
        assert mounts[target].read_only
    assert (
        mounts["/ferry/run/checkpoint-4/resume_contract.json"].source
        == tmp_path / "run/rebased/checkpoint-4/resume_contract.json"
    )
    assert IMAGES not in mounts
    assert render(plan) == render(plan)


def test_a_server_that_wants_nothing_else_changes_no_loader(tmp_path: Path) -> None:
    """A declared field without a value in the profile stays as it is."""
    rules = [RULES[0]]
    inputs = inputs_of(tmp_path, make(tmp_path, rules), values={})
    assert inputs.files == ()
    assert inputs.record()["changed"] == {}


@pytest.mark.parametrize("mode", ["hardlink", "copy"])
def test_without_containers_the_bundle_is_laid_beside(tmp_path: Path, mode: Mode) -> None:
    """The venv engine gets a bundle of its own with the rewritten files in it; the first is never written to."""
    bundle = make(tmp_path)
    before = snapshot(bundle)
    inputs = inputs_of(tmp_path, bundle, mode, engine="venv", venv="/opt/elsewhere")
    run = prepared(tmp_path, inputs)
    assert snapshot(bundle) == before
    for name, digest in inputs.digests.items():
        assert sha256_bytes((run.path / "bundle" / name).read_bytes()) == digest
    images = json.loads((tmp_path / "server-a.yaml").read_text())["assets"]["images"]
    first = json.loads((run.path / "bundle/data/train.jsonl").read_bytes().split(b"\n")[0])
    assert first["image"] == f"{images}/0.png"


def test_without_containers_nothing_can_be_mounted(tmp_path: Path) -> None:
    """The fix names the modes that work."""
    with pytest.raises(Refusal, match="nothing to mount with"):
        inputs_of(tmp_path, make(tmp_path), engine="venv", venv="/opt/elsewhere")


def test_a_value_that_the_spec_does_not_declare_is_refused(tmp_path: Path) -> None:
    """Both undeclared ones are named."""
    with pytest.raises(Refusal) as refused:
        inputs_of(tmp_path, make(tmp_path), values={"learning_rate": 1, "seed": 2})
    assert [fault.what for fault in refused.value.faults] == ["change not declared"] * 2
    assert "values.learning_rate" in refused.value.faults[0].where


@pytest.mark.parametrize(
    ("place", "value", "found"),
    [
        ("{checkpoint}/resume_contract.json#/loader/gone", 8, "names nothing"),
        ("{checkpoint}/resume_contract.json#/loader", 8, "another kind"),
        ("{checkpoint}/resume_contract.json#/loader/workers", "8", "another kind"),
        ("{checkpoint}/resume_contract.json#/loader/workers", True, "another kind"),
        ("data/absent.json#/a", 8, "no such file"),
    ],
)
def test_a_field_that_is_not_as_declared_is_refused(
    tmp_path: Path, place: str, value: Any, found: str
) -> None:
    """Absent, of another kind, or in a file that is not there: named, and nothing is guessed."""
    rules = [{"name": "loader_workers", "runtime_only": True, "at": [place]}]
    with pytest.raises(Refusal) as refused:
        inputs_of(tmp_path, make(tmp_path, rules), values={"loader_workers": value})
    assert any(found in fault.found for fault in refused.value.faults)


def test_a_path_of_another_asset_is_refused(tmp_path: Path) -> None:
    """/mnt/origin/teacher.bin2 does not lie below /mnt/origin/teacher.bin; prose holds no path."""
    rules = [{"asset": "teacher", "at": ["{checkpoint}/resume_contract.json#/loader/note"]}]
    with pytest.raises(Refusal, match="cannot be rewritten"):
        inputs_of(tmp_path, make(tmp_path, rules))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"asset": "teacher", "at": ["a.json#b"]}], "begins with '/'"),
        ([{"asset": "teacher", "at": ["a.txt#/b"]}], "rewritten in .json"),
        ([{"asset": "teacher", "at": ["../a.json#/b"]}], "relative, without"),
        ([{"asset": "teacher", "at": ["a.json"]}], "FILE#POINTER"),
        ([{"asset": "teacher", "at": []}], "at least 1 item"),
        ([{"asset": "nobody", "at": ["a.json#/b"]}], "not among assets"),
        ([{"name": "w", "at": ["a.json#/b"]}], "is a continuation"),
        ([{"name": "w", "asset": "teacher", "at": ["a.json#/b"]}], "exactly one"),
        ([{"asset": "teacher", "at": ["a.json#/b", "a.json#/b"]}], "more than once"),
        ([{"asset": "teacher", "at": ["data/train.jsonl#[]/image"]}], "columns are rewritten in data.manifest"),
        ([{"asset": "images", "at": ["a.json#/b"]}], "name data/train.jsonl#[]/image"),
        ([{"asset": "teacher", "at": ["checkpoint-2/a.json#/b"]}], "the checkpoint of this bundle is checkpoint-4"),
        ([{"asset": "teacher", "at": ["{checkpoint}/x/RECOVERY_COMPLETE.json#/b"]}], "not a server's to change"),
    ],
)  # fmt: skip
def test_a_declaration_that_cannot_hold_is_refused_when_it_is_read(
    tmp_path: Path, rules: list[dict[str, Any]], message: str
) -> None:
    """Before any server asks for it."""
    with pytest.raises(Refusal) as refused:
        verify(open_bundle(make(tmp_path, rules)))
    assert any(message in str(fault) for fault in refused.value.faults)


@pytest.mark.parametrize("best", ["/mnt/origin/out/checkpoint-4", "/other/place/checkpoint-2"])
def test_the_best_checkpoint_of_another_server_is_found(tmp_path: Path, best: str) -> None:
    """Undeclared, it is a warning that names file and field, and what to declare."""
    inputs = inputs_of(tmp_path, make(tmp_path, [], best), values={})
    (warning,) = inputs.warnings
    assert warning.where.endswith("checkpoint-4/trainer_state.json#/best_model_checkpoint")
    assert warning.found == best
    assert f"{{output: {best.rpartition('/')[0]}" in warning.fix
    assert inputs.record()["warnings"][0]["found"] == best


def test_a_changed_rebased_file_is_refused_before_a_start(tmp_path: Path) -> None:
    """What was proved is what is started."""
    from runner.prepare import write_control

    inputs = inputs_of(tmp_path, make(tmp_path))
    run = prepared(tmp_path, inputs)
    path = run.rebased / "checkpoint-4/resume_contract.json"
    path.write_bytes(path.read_bytes().replace(b"8", b"9"))
    with pytest.raises(Refusal, match="rebased file differs"):
        write_control(inputs, plan_launch(inputs, IMAGE, run.path, HOST), run)
