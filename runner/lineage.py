"""The hash-chained history of a run's segments: who trained which updates where, and why it ended.

Promises: each link holds the hash of the one before, so that an edited, dropped or reordered link is found; a link's
bytes are canonical JSON, so that the chain is the same wherever it is read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import rfc8785

from runner.errors import Fault, Refusal, Verdict
from runner.inside.digests import sha256_bytes
from runner.record import canonical

_ORIGIN = "sha256:" + "0" * 64


@dataclasses.dataclass(frozen=True)
class Link:
    """One segment. `first_update` to `last_update` were trained in it (last < first: none was); times are Unix seconds.

    `checkpoint_in` and `checkpoint_out` are inventory hashes ('sha256:...'), or 'fresh' and 'none'.
    """

    previous: str
    run: str
    segment: str
    server: str
    engine: str
    image: str
    lock: str
    code: str
    contract: str
    checkpoint_in: str
    checkpoint_out: str
    first_update: int
    last_update: int
    started: int
    ended: int
    verdict: str

    @property
    def line(self) -> bytes:
        """The link as one line of `lineage.jsonl`, without its line feed."""
        return canonical(dataclasses.asdict(self))

    @property
    def digest(self) -> str:
        """What the next link names as `previous`."""
        return "sha256:" + sha256_bytes(self.line)


def head(links: Sequence[Link]) -> str:
    """Return what the link after `links` must name as `previous`."""
    return links[-1].digest if links else _ORIGIN


def render(links: Sequence[Link]) -> bytes:
    """Return `lineage.jsonl` for `links`."""
    return b"".join(link.line + b"\n" for link in links)


def parse(raw: bytes, where: str) -> tuple[Link, ...]:
    """Return the links in `raw`. Raises `Refusal` at the first that is damaged, edited or out of its place."""
    links: list[Link] = []
    fix = "take the lineage from the bundle that the run came in"
    kinds = {field.name: int if field.type == "int" else str for field in dataclasses.fields(Link)}
    for number, line in enumerate(raw.removesuffix(b"\n").split(b"\n") if raw else (), 1):
        place = f"{where}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Refusal(Fault("lineage damaged", place, "one JSON object", str(error), fix)) from error
        if not isinstance(value, dict) or {key: type(entry) for key, entry in value.items()} != kinds:
            raise Refusal(
                Fault(
                    "lineage damaged",
                    place,
                    "exactly " + ", ".join(kinds),
                    line[:80].decode("utf-8", "replace"),
                    fix,
                )
            )
        link = Link(**value)
        try:
            canonical_line = link.line
        except rfc8785.CanonicalizationError as error:
            raise Refusal(
                Fault("lineage damaged", place, "numbers and text of JSON", str(error), fix)
            ) from error
        if canonical_line != line:
            raise Refusal(Fault("lineage edited", place, "canonical JSON", "another form of it", fix))
        if link.verdict not in {verdict.value for verdict in Verdict}:
            verdicts = ", ".join(verdict.value for verdict in Verdict)
            raise Refusal(Fault("lineage damaged", f"{place}: verdict", verdicts, link.verdict, fix))
        if link.previous != head(links):
            raise Refusal(
                Fault("lineage broken", place, f"previous {head(links)}", f"previous {link.previous}", fix)
            )
        links.append(link)
    return tuple(links)
