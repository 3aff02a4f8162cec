"""Rewriting and preflight with real containers: the run sees the rewritten files, and its own validation is heard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.errors import ExitCode
from runner.run import RunFolder
from tests.builder import IMAGES, TEACHER, Pin, make_bundle, make_server, snapshot
from tests.test_road import _no_container_left, compose, ferry

__all__ = ["_no_container_left"]
pytestmark = pytest.mark.engine

RULES: list[dict[str, Any]] = [
    {"asset": "images", "at": ["data/train.jsonl#[]/image"]},
    {"name": "workers", "runtime_only": True, "at": ["{checkpoint}/trainer_state.json#/global_step_shown"]},
]
SEES = (
    "import json, os, sys; row = json.loads(open('/ferry/bundle/data/train.jsonl').readline()); "
    "print(row['image'], os.path.exists(row['image']), os.getcwd()); "
    "sys.exit(0 if row['image'].startswith('/ferry/assets/images/') and os.path.exists(row['image']) else 5)"
)


def bundle_at(folder: Path, pin: Pin, preflight: list[str]) -> Path:
    """Return a bundle at update 4 whose image paths are rewritten, with a preflight command."""

    def change(spec: dict[str, Any]) -> None:
        spec["rebase"] = {"mount": ["teacher"], "rewrite": RULES[:1]}
        spec["preflight"] = preflight

    return make_bundle(folder, pin=pin, update=4, change=change)


@pytest.mark.parametrize("mode", ["mount", "copy", "hardlink"])
def test_a_run_trains_on_rewritten_files_through_both_doors(tmp_path: Path, cpu_pin: Pin, mode: str) -> None:
    """Preflight passes inside, the manifest is this server's, and the start program accepts its very hashes."""
    bundle = bundle_at(tmp_path, cpu_pin, ["python", "-c", SEES])
    before = snapshot(bundle)
    run = tmp_path / "run"
    shown = ferry(
        "prepare", bundle, "--server", make_server(tmp_path), "--run", run, "--mode", mode, "--check-images"
    )
    assert shown.index("/ferry/assets/images/0.png True /ferry/code") < shown.index("PREFLIGHT: PASS")
    assert "PREPARE_OK" in shown
    assert IMAGES not in (run / "rebased/data/train.jsonl").read_text()
    assert "FINISHED" in ferry("resume", run)
    assert snapshot(bundle) == before
    assert json.loads(ferry("status", run, "--json"))["checkpoint"] == "checkpoint-6"
    assert RunFolder(run).links()[-1].verdict == "finished"


def test_a_changed_rewritten_file_is_refused_inside(tmp_path: Path, cpu_pin: Pin) -> None:
    """The start program knows the hash of what was rewritten, by whichever door."""
    bundle = bundle_at(tmp_path, cpu_pin, ["true"])
    run = tmp_path / "run"
    ferry("prepare", bundle, "--server", make_server(tmp_path), "--run", run)
    path = run / "rebased/data/train.jsonl"
    path.write_bytes(path.read_bytes().replace(b"row 1", b"row 9"))
    up = compose(run, "up", "trainer")
    assert "/ferry/bundle/data/train.jsonl" in up.stdout + up.stderr
    assert "rebased file differs" in ferry("resume", run, code=ExitCode.REFUSED)
    assert RunFolder(run).links() == ()


def test_a_preflight_that_fails_leaves_nothing(tmp_path: Path, cpu_pin: Pin) -> None:
    """Its last lines are the reason; it could write nowhere; no run folder appears, whole or half."""
    script = (
        "import os, sys\n"
        "for path in ('/ferry/run', '/ferry/bundle', '/ferry/code', '/ferry/segments'):\n"
        "    assert not os.access(path, os.W_OK) or os.statvfs(path).f_flag & os.ST_RDONLY, path\n"
        f"assert os.path.exists({TEACHER!r})\n"
        "print('contract: seed differs'); sys.exit(9)"
    )
    bundle = bundle_at(tmp_path, cpu_pin, ["python", "-c", script])
    server = make_server(tmp_path)
    before = snapshot(tmp_path)
    shown = ferry(
        "prepare", bundle, "--server", server, "--run", tmp_path / "runs" / "run", code=ExitCode.REFUSED
    )
    assert "exit status 9" in shown
    assert "contract: seed differs" in shown
    assert "PREFLIGHT: PASS" not in shown
    assert snapshot(tmp_path) == before
