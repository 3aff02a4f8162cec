"""Documents people write, and pages that must say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner import documents
from runner.errors import ExitCode, Refusal, Verdict, printable
from runner.schemas import DOCUMENTS, write_schemas
from runner.server import ServerProfile
from tests.conftest import PROJECT

GOOD = b"ferry: 1\nname: a\nassets: {images: /data}\n"


def refusal_of(raw: bytes) -> Refusal:
    """Parse `raw` as a server profile, which must be refused."""
    with pytest.raises(Refusal) as refused:
        documents.parse(ServerProfile, raw, "server.yaml")
    return refused.value


def test_a_good_document_is_read() -> None:
    """Defaults are filled in; the model is frozen."""
    profile = documents.parse(ServerProfile, GOOD, "server.yaml")
    assert (profile.engine, profile.memory_guard, profile.assets) == ("docker", 0.9, {"images": "/data"})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "wrong value: server.yaml: (the whole document)"),
        (b"\xff", "document is not YAML: server.yaml"),
        (b"a: [", "document is not YAML: server.yaml"),
        (GOOD + b"name: b\n", "document is not YAML: server.yaml"),
        (b"a: &x [1]\nb: *x\n", "document is not YAML: server.yaml"),
        (b"1: 2\n", "document is not YAML: server.yaml"),
        (GOOD + b"memory_gard: 0.5\n", "unknown key: server.yaml: memory_gard"),
        (GOOD + b"memory_guard: 2\n", "wrong value: server.yaml: memory_guard"),
        (GOOD + b"memory_guard: '0.5'\n", "wrong value: server.yaml: memory_guard"),
        (GOOD + b"gpus: {by: cdi}\n", "wrong value: server.yaml: gpus"),
        (GOOD.replace(b"/data", b"data"), "wrong value: server.yaml: assets.images"),
        (GOOD.replace(b"/data", b"/data/../x"), "wrong value: server.yaml: assets.images"),
        (GOOD.replace(b"ferry: 1", b"ferry: 2"), "wrong value: server.yaml: ferry"),
        (GOOD + b"engine: venv\n", "wrong value: server.yaml: (the whole document)"),
        (b"- " * 3000 + b"x", "document is not YAML: server.yaml"),
    ],
)
def test_a_bad_document_is_refused_by_key(raw: bytes, message: str) -> None:
    """Never a traceback, always the key path and a fix."""
    refusal = refusal_of(raw)
    assert str(refusal).startswith(message)
    assert all(fault.fix for fault in refusal.faults)


def test_all_faults_of_a_document_come_together() -> None:
    """Three things wrong: three faults."""
    refusal = refusal_of(b"ferry: 1\nnam: x\nassets: {images: x}\n")
    assert sorted(fault.what for fault in refusal.faults) == ["missing key", "unknown key", "wrong value"]


def test_numbers_are_read_as_a_trainer_means_them() -> None:
    """YAML 1.1 takes 2e-5 for text; here it is a number."""
    profile = documents.parse(ServerProfile, GOOD + b"memory_guard: 5e-1\n", "server.yaml")
    assert profile.memory_guard == 0.5


def test_the_schemas_in_docs_are_those_of_the_models(tmp_path: Path) -> None:
    """`ferry schema docs/reference` was run after the last change of a model."""
    for path in write_schemas(tmp_path):
        assert (PROJECT / "docs" / "reference" / path.name).read_bytes() == path.read_bytes()
    assert len(DOCUMENTS) == 3


def test_the_table_of_exit_codes_is_the_enumeration() -> None:
    """docs/reference/exit-codes.md lists every code, once, under its name; verdicts have distinct codes."""
    page = (PROJECT / "docs" / "reference" / "exit-codes.md").read_text()
    rows = {name: int(code) for code, name in re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", page, re.MULTILINE)}
    assert rows == {code.name: int(code) for code in ExitCode}
    assert len({verdict.exit_code for verdict in Verdict}) == len(Verdict)


def test_a_hostile_name_cannot_steer_a_terminal() -> None:
    """Control characters and lone surrogates are shown escaped."""
    assert printable("a\x1b[2Jb\udcff\n") == "a\\x1b[2Jb\\udcff\n"
