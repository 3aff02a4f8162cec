"""A stop request is understood, whatever is in it, and never lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.stop import RequestFile, StopRequest, StopSignals, deaf_children, parse_request


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"4711\n", StopRequest("4711", 0)),
        (b"4711", StopRequest("4711", 0)),
        (b"job 7\nat_update: 20\n", StopRequest("job 7", 20)),
        (b"job 7\r\nat_update: 20\r\n", StopRequest("job 7", 20)),
        (b"job 7\nat_update:20", StopRequest("job 7", 20)),
        (b"job 7\nat_update: soon\n", StopRequest("job 7", 0)),
        (b"job 7\nat_update: -3\n", StopRequest("job 7", 0)),
        ("job\nat_update: \u0665\n".encode(), StopRequest("job", 0)),
        (b"\xff\n", StopRequest("\ufffd", 0)),
        (b"", StopRequest("", 0)),
    ],
)
def test_forms(content: bytes, expected: StopRequest) -> None:
    """The first line is the job; a second line that is not understood means now."""
    assert parse_request(content) == expected


@given(st.binary(max_size=200))
def test_never_raises(content: bytes) -> None:
    """No bytes in the file may end the run without a checkpoint."""
    assert parse_request(content).at_update >= 0


def test_waits_for_its_update(tmp_path: Path) -> None:
    """Not before update 20, at 20 and after it; answered means gone."""
    file = RequestFile(tmp_path / "REQUEST")
    assert file.due(1) is None
    file.path.write_bytes(b"job\nat_update: 20\n")
    assert file.due(19) is None
    assert file.due(20) == StopRequest("job", 20)
    assert file.due(25) == StopRequest("job", 20)
    file.answer()
    file.answer()
    assert file.due(26) is None


def test_an_empty_file_gets_one_more_update(tmp_path: Path) -> None:
    """It may be half written; if it stays empty, it is a request all the same (`touch`)."""
    file = RequestFile(tmp_path / "REQUEST")
    file.path.touch()
    assert file.due(5) is None
    assert file.due(6) == StopRequest("", 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_noted_only(number: signal.Signals) -> None:
    """The handler sets a flag; the process lives on."""
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        signals = StopSignals()
        signals.install()
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number.name
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def test_loader_processes_do_not_hear_it() -> None:
    """Torchrun signals the whole process group:
    a child forked inside lives on, the parent gets its own signal later.
    """
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        signals = StopSignals()
        signals.install()
        with deaf_children():
            child = subprocess.Popen(
                [sys.executable, "-c", "import sys; sys.exit(len(sys.stdin.read()))"], stdin=-1
            )
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.received is None
        assert signals.received == "SIGTERM"
        child.terminate()
        child.communicate(b"seven!!")
        assert child.returncode == 7
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
