"""Fields of a bundle's documents that must hold a value, whichever server trains the run.

Promises: every field that is absent or holds another value is named, with both; nothing is written.
"""

from __future__ import annotations

from pathlib import Path

from runner import rewrite
from runner.errors import Fault
from runner.spec import RunSpec

_FIX = "this is another run than the spec describes: mend the spec, or fetch the bundle that it is of"


def invariant_faults(folder: Path, spec: RunSpec) -> list[Fault]:
    """Return a fault for each of the spec's invariants that does not hold in the bundle at `folder`."""
    faults = []
    documents: dict[str, object] = {}
    for invariant in spec.invariants:
        file, pointer = spec.file_of(invariant.at), invariant.at.partition("#")[2]
        kind = rewrite.kind_of(file)
        where, expected = f"{folder / file}#{pointer}", repr(invariant.equals)
        try:
            if file not in documents:
                assert kind is not None
                documents[file] = rewrite.parse((folder / file).read_bytes(), kind)
            found = rewrite.value_at(documents[file], pointer)
        except (OSError, ValueError) as error:
            faults.append(Fault("invariant cannot be read", where, expected, str(error), _FIX))
            continue
        if found != invariant.equals or isinstance(found, bool) != isinstance(invariant.equals, bool):
            faults.append(Fault("invariant does not hold", where, expected, repr(found), _FIX))
    return faults
