"""Patterns that a document declares for lines of a log, matched in time that grows with the line and no faster.

Promises: RE2 matches them, so that no pattern of a stranger's run spec can hang whoever watches; what RE2 does not know
(look-around, back references) is refused when the document is read. Does not know what the groups mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import pydantic
import re2

_LIMIT_CHARS = 1000


def _options() -> Any:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = 1 << 20  # A larger program is refused: it was not written by hand.
    return options


def compiled(pattern: str) -> Any:
    """Return `pattern` as RE2 has it. Raises ValueError with RE2's reason, also if it is longer than 1,000 characters."""
    if len(pattern) > _LIMIT_CHARS:
        raise ValueError(f"a pattern has at most {_LIMIT_CHARS} characters")
    try:
        return re2.compile(pattern, _options())
    except re2.error as error:
        reason = error.args[0] if error.args else ""
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise ValueError(f"not a pattern of RE2: {text}") from None
    except UnicodeEncodeError:
        raise ValueError("a pattern is UTF-8 text") from None


def groups_of(pattern: str) -> frozenset[str]:
    """Return the names of the groups in `pattern`. Raises ValueError as `compiled` does."""
    return frozenset(compiled(pattern).groupindex)


def _checked(pattern: str) -> str:
    compiled(pattern)
    return pattern


PatternText = Annotated[str, pydantic.Field(min_length=1), pydantic.AfterValidator(_checked)]


class Patterns:
    """Several patterns, looked for in each line. Not RE2's own set of patterns: that one finds nothing, without a word, if
    its memory is used up; a single pattern then goes a slower way.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        # Bytes: for text, the library counts characters in every line.
        self._each = [re2.compile(pattern.encode(), _options()) for pattern in patterns]

    def find(self, text: str) -> list[tuple[int, Mapping[str, str]]]:
        """Return the number of each pattern that `text` holds, in order, with its named groups that took part."""
        if not self._each:
            return []
        raw = text.encode("utf-8", "backslashreplace")
        found: list[tuple[int, Mapping[str, str]]] = []
        for number, pattern in enumerate(self._each):
            match = pattern.search(raw)
            if match is not None:
                found.append((number, _named(match)))
        return found


def _named(match: Any) -> dict[str, str]:
    pairs = ((name, value) for name, value in match.groupdict().items() if value is not None)
    return {
        name.decode() if isinstance(name, bytes) else name: value.decode("utf-8", "backslashreplace")
        for name, value in pairs
    }
