"""SHA256SUMS: reading and writing the list of every file of a bundle.

Promises: what `render` writes passes `sha256sum -c --strict`; `parse` takes the GNU grammar and decides each odd form
once (docs/reference/bundle-format.md, rules B3 to B8); names are kept byte for byte (surrogateescape). No I/O here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from runner.errors import Fault, Refusal

# No project is as deep, and no walk below it comes near to what Python can nest.
LIMIT_PARTS = 100
LIST_NAME = "SHA256SUMS"
SIGNATURE_NAME = LIST_NAME + ".sig"
_LINE = re.compile(rb"(\\?)([0-9a-f]{64}) [ *](.+)\Z", re.DOTALL)
# What `unsafe_reason` finds nothing against, found in one step: parts of 1 to 255 bytes, none '.' or '..'.
_SAFE = re.compile(rb"(?:(?!\.{1,2}(?:/|\Z))[^/\0]{1,255}/){0,99}(?!\.{1,2}\Z)[^/\0]{1,255}\Z")
_OWN = frozenset({LIST_NAME.encode(), SIGNATURE_NAME.encode()})
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
_UNESCAPE = re.compile(rb"\\(.?)", re.DOTALL)
_FETCH_AGAIN = "fetch the bundle again, list and all, from where it was packed"


def render(digests: Mapping[str, str]) -> bytes:
    """Return the list of `digests` (relative path -> SHA-256 in hex), sorted by the bytes of the paths."""
    lines = []
    for name in sorted(digests, key=os.fsencode):
        escaped = "".join(_ESCAPES.get(char, char) for char in name)
        mark = "\\" if escaped != name else ""
        lines.append(mark.encode() + digests[name].encode() + b"  " + os.fsencode(escaped) + b"\n")
    return b"".join(lines)


def parse(raw: bytes, where: str) -> dict[str, str]:
    """Return path -> SHA-256 in hex of the list `raw`; `where` names it in faults.

    Raises `Refusal` with every fault: empty list, byte-order mark, CRLF, a cut last line, a line that is not of the
    grammar, an unsafe or repeated name.
    """
    if not raw:
        raise Refusal(Fault("empty list", where, "a line for every file", "0 bytes", _FETCH_AGAIN))
    if raw.startswith(b"\xef\xbb\xbf"):
        raise Refusal(
            Fault("byte-order mark", where, "a digest first", "EF BB BF", "save the list without one")
        )
    faults: list[Fault] = []
    if not raw.endswith(b"\n"):
        faults.append(
            Fault("list is cut off", where, "a line feed at its end", repr(raw[-20:]), _FETCH_AGAIN)
        )
    digests: dict[str, str] = {}
    for number, line in enumerate(raw.removesuffix(b"\n").split(b"\n"), 1):
        match = _LINE.match(line)
        place = f"{where}:{number}"
        if match is None or line.endswith(b"\r"):
            shown = line[:80].decode("utf-8", "surrogateescape")
            fix = "convert its line ends to LF" if line.endswith(b"\r") else _FETCH_AGAIN
            faults.append(
                Fault(
                    "not a line of the list",
                    place,
                    "64 hex digits, two spaces, a path",
                    shown or "nothing",
                    fix,
                )
            )
            continue
        raw_name = _unescaped(match[3], place, faults) if match[1] else match[3]
        name = os.fsdecode(raw_name)
        safe = _SAFE.match(raw_name) is not None and raw_name not in _OWN
        if not safe and (reason := unsafe_reason(name)):
            faults.append(
                Fault(
                    "unsafe", place, "a relative path inside the bundle", f"{name} ({reason})", _FETCH_AGAIN
                )
            )
        elif name in digests:
            faults.append(Fault("listed twice", place, "every path once", name, _FETCH_AGAIN))
        else:
            digests[name] = match[2].decode()
    if faults:
        raise Refusal(*faults)
    return digests


def unsafe_reason(name: str) -> str | None:
    """Return why `name` may not name a file of a bundle, or None if it may."""
    parts = name.split("/")
    reasons = (
        (name.startswith("/"), "absolute"),
        ("\0" in name, "holds a NUL byte"),
        (any(part in ("", ".", "..") for part in parts), "has an empty, '.' or '..' part"),
        (name in (LIST_NAME, SIGNATURE_NAME), "the list cannot list itself, nor its signature"),
        (any(len(os.fsencode(part)) > 255 for part in parts), "has a part over 255 bytes"),
        (len(parts) > LIMIT_PARTS, f"lies more than {LIMIT_PARTS} folders deep"),
    )
    return next((reason for unsafe, reason in reasons if unsafe), None)


def _unescaped(raw: bytes, place: str, faults: list[Fault]) -> bytes:
    def one(match: re.Match[bytes]) -> bytes:
        try:
            return {b"\\": b"\\", b"n": b"\n", b"r": b"\r"}[match[1]]
        except KeyError:
            shown = match[0].decode("utf-8", "backslashreplace")
            faults.append(Fault("unknown escape", place, "\\\\, \\n or \\r", shown, _FETCH_AGAIN))
            return match[0]

    return _UNESCAPE.sub(one, raw)
