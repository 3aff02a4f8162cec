"""Several processes give what one would: in order, whatever dies, and nobody stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from runner.forked import Forked

PIECES = [bytes([number]) * (number * 1000) for number in range(50)]


def doubled(piece: bytes) -> bytes:
    """What the processes do here."""
    return piece + piece


def test_the_results_come_in_order() -> None:
    """Also of pieces larger than a pipe, and of an empty one."""
    with Forked(doubled, 3) as forked:
        assert list(forked.results(PIECES)) == [doubled(piece) for piece in PIECES]


def test_a_process_that_dies_costs_nothing_but_time() -> None:
    """Its pieces are done by the caller."""
    mine = os.getpid()

    def work(piece: bytes) -> bytes:
        if piece and piece[0] % 7 == 3 and os.getpid() != mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return doubled(piece)

    with Forked(work, 2) as forked:
        assert list(forked.results(PIECES)) == [doubled(piece) for piece in PIECES]


def test_an_error_is_the_callers() -> None:
    """As if there were no processes."""

    def work(piece: bytes) -> bytes:
        raise ValueError(f"{len(piece)} bytes")

    with Forked(work, 2) as forked, pytest.raises(ValueError, match="5 bytes"):
        list(forked.results([b"12345"]))


def test_nobody_stays_when_the_caller_loses_interest() -> None:
    """Pieces that would come are not asked for."""
    asked = []

    def pieces() -> Iterator[bytes]:
        for number in range(1000):
            asked.append(number)
            yield b"x"

    with Forked(doubled, 2) as forked:
        processes = list(forked._processes)
        assert next(forked.results(pieces())) == b"xx"
    assert len(asked) < 20
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
