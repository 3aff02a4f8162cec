"""Paths that another server left in the trainer's state, and that nobody declared.

Promises: warns, and changes nothing; every absolute path of the state is looked at, but for those of its log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner import rewrite
from runner.changes import Places, RewrittenFile
from runner.errors import Fault
from runner.verify import VerifiedBundle

_TRAINER_STATE = "trainer_state.json"


def paths_left(bundle: VerifiedBundle, files: tuple[RewrittenFile, ...], places: Places) -> tuple[Fault, ...]:
    """Return a warning for every absolute path in the trainer's state that another server left there.

    A `best_model_checkpoint` of the origin crashes a run at its very end (transformers 48315, 10412).
    """
    if bundle.spec.checkpoint == "fresh":
        return ()
    name = f"{bundle.spec.checkpoint.path}/{_TRAINER_STATE}"
    if name not in bundle.digests:
        return ()
    changed = next((file.content for file in files if file.path == name), None)
    try:
        state = rewrite.parse(changed or (bundle.path / name).read_bytes(), "json")
    except ValueError:
        return ()
    warnings = []
    here = (bundle.spec.checkpoint.path.rpartition("/")[2],)
    for pointer, value in _paths(state):
        expected = f"null, or {places.output}/{here[0]}"
        if value.startswith(places.output + "/") and value.rpartition("/")[2] in here:
            continue
        if pointer == "/best_model_checkpoint" or not value.startswith(places.output + "/"):
            fix = (
                "whoever loads the best checkpoint at the end will not find it; declare the field under rebase.rewrite as "
                f"{{output: {value.rpartition('/')[0] or '/'}, at: ['{{checkpoint}}/{_TRAINER_STATE}#{pointer}']}}"
            )
            where = f"{bundle.path / name}#{pointer}"
            warnings.append(Fault("path of another server", where, expected, value, fix))
    return tuple(warnings)


def _paths(state: Any) -> Iterator[tuple[str, str]]:
    """Every absolute path in the trainer's state, but for its log."""
    pending: list[tuple[tuple[str, ...], Any]] = [((), state)]
    while pending:
        at, value = pending.pop()
        if isinstance(value, dict) and at != ("log_history",):
            pending += [((*at, key), inner) for key, inner in value.items() if (*at, key) != ("log_history",)]
        elif isinstance(value, list):
            pending += [((*at, str(number)), inner) for number, inner in enumerate(value)]
        elif isinstance(value, str) and value.startswith("/"):
            yield rewrite.to_pointer(at), value
