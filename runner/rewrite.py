"""Changing single values of a JSON or YAML document in its text, so that every other byte stays.

Promises: only the bytes of a value that a pointer (RFC 6901) names are exchanged, so that `2e-5` elsewhere stays `2e-5`;
the result is proved before it is returned (equal documents once the named fields are taken out, the named fields as
asked, and the original bytes back from the inverse); what cannot be proved is a ValueError. No I/O here.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NoReturn

import yaml

from runner import documents

Kind = Literal["json", "yaml"]
Scalar = str | int | float | bool | None

_SPACE = re.compile(rb"[ \t\n\r]*")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
_BARE = re.compile(rb"[^ \t\n\r,\]}]+")
_INDEX = re.compile(r"(?:0|[1-9][0-9]*)\Z", re.ASCII)
_TAKEN_OUT = object()


@dataclasses.dataclass(frozen=True)
class Edit:
    """One value exchanged at `pointer`: as a value, and as the text that stood there and stands there now."""

    pointer: str
    before: Scalar
    after: Scalar
    text_before: str
    text_after: str


def kind_of(name: str) -> Kind | None:
    """Return how the file `name` is read, by its ending; None if it is neither JSON nor YAML."""
    if name.endswith(".json"):
        return "json"
    return "yaml" if name.endswith((".yaml", ".yml")) else None


def parse_pointer(text: str) -> tuple[str, ...]:
    """Return the tokens of the JSON pointer `text`. Raises ValueError if it is none (RFC 6901, section 3)."""
    if text and not text.startswith("/"):
        raise ValueError(f"{text!r} is not a JSON pointer: it begins with '/'")
    if re.search(r"~(?![01])", text):
        raise ValueError(f"{text!r} is not a JSON pointer: '~' is written ~0, '/' is written ~1")
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in text.split("/")[1:])


def to_pointer(tokens: Iterable[str]) -> str:
    """Return the JSON pointer of `tokens`."""
    return "".join("/" + token.replace("~", "~0").replace("/", "~1") for token in tokens)


def parse(raw: bytes, kind: Kind) -> Any:
    """Return the document in `raw`. Raises ValueError: not UTF-8, not of its kind, a key twice."""
    text = raw.decode("utf-8")
    if kind == "yaml":
        try:
            return documents.yaml_value(text)
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from error
    try:
        # A NaN of a trainer's log equals itself here: only its text matters.
        return json.loads(text, object_pairs_hook=_no_twins, parse_constant=lambda name: ("constant", name))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def value_at(document: Any, pointer: str) -> Any:
    """Return what `pointer` names in `document`. Raises ValueError if nothing is there."""
    for token in parse_pointer(pointer):
        document = _child(document, token, pointer)
    return document


def change(raw: bytes, kind: Kind, values: Mapping[str, Scalar]) -> tuple[bytes, tuple[Edit, ...]]:
    """Return `raw` with the value at each pointer of `values` exchanged, and what was exchanged, in pointer order.

    Raises ValueError if a pointer names nothing, names no single value, or lies within another; or if the proof fails.
    """
    before = parse(raw, kind)
    edits = []
    places = []
    for pointer in sorted(values):
        old = value_at(before, pointer)
        if isinstance(old, dict | list | tuple):
            raise ValueError(f"'{pointer}' names {_kind_name(old)}, not a single value")  # noqa: TRY004 - bad content
        start, end = find(raw, kind, pointer)
        after = spell(values[pointer], kind)
        edits.append(Edit(pointer, old, values[pointer], raw[start:end].decode("utf-8"), after))
        places.append((start, end, after.encode("utf-8")))
    result = _spliced(raw, places)
    _prove(raw, result, kind, before, tuple(edits))
    return result, tuple(edits)


def undo(raw: bytes, kind: Kind, edits: Iterable[Edit]) -> bytes:
    """Return `raw` as it was before `edits`. Raises ValueError if `raw` is not what they made."""
    places = []
    for edit in edits:
        start, end = find(raw, kind, edit.pointer)
        if raw[start:end] != edit.text_after.encode("utf-8"):
            found = raw[start:end].decode("utf-8")
            raise ValueError(f"'{edit.pointer}' holds {found}, not {edit.text_after}")
        places.append((start, end, edit.text_before.encode("utf-8")))
    return _spliced(raw, places)


def spell(value: Scalar, kind: Kind) -> str:
    """Return how `value` is written in a document of `kind`."""
    if kind == "json":
        return json.dumps(value, ensure_ascii=True, allow_nan=False)
    if isinstance(value, float):
        text = json.dumps(value, allow_nan=False)
        mantissa, mark, exponent = text.partition("e")
        # YAML 1.1 reads 2e-05 as text and 2.0e-05 as the number.
        return (mantissa if "." in mantissa else mantissa + ".0") + mark + exponent
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def find(raw: bytes, kind: Kind, pointer: str) -> tuple[int, int]:
    """Return first and last (excluded) byte of the value that `pointer` names in `raw`, a document that `parse` takes.

    Raises ValueError if nothing is there.
    """
    if kind == "json":
        return json_span(raw, parse_pointer(pointer), pointer)
    return _yaml_span(raw.decode("utf-8"), pointer)


def json_span(raw: bytes, tokens: tuple[str, ...], pointer: str) -> tuple[int, int]:
    """Return the byte span of the value that `tokens` lead to in the JSON text `raw`. `pointer` names it in errors."""
    at = _skip_space(raw, 0)
    for token in tokens:
        at = _enter(raw, at, token, pointer)
    return at, _end_of_value(raw, at)


def _enter(raw: bytes, at: int, token: str, pointer: str) -> int:
    """Return where the value of member or element `token` of the container at `at` begins."""
    opening = raw[at : at + 1]
    if opening not in (b"{", b"["):
        raise ValueError(f"'{pointer}' names nothing: no member '{token}' there")
    closing = b"}" if opening == b"{" else b"]"
    at = _skip_space(raw, at + 1)
    number = 0
    while raw[at : at + 1] not in (closing, b""):
        if opening == b"{":
            end = _end_of_value(raw, at)
            name = json.loads(raw[at:end].decode("utf-8"))
            at = _skip_space(raw, _skip_space(raw, end) + 1)
        else:
            name = str(number)
            number += 1
        if name == token:
            return at
        at = _skip_space(raw, _end_of_value(raw, at))
        if raw[at : at + 1] == b",":
            at = _skip_space(raw, at + 1)
    raise ValueError(f"'{pointer}' names nothing: no member '{token}' there")


def _skip_space(raw: bytes, at: int) -> int:
    match = _SPACE.match(raw, at)
    assert match is not None
    return match.end()


def _end_of_value(raw: bytes, at: int) -> int:
    if raw[at : at + 1] in (b"{", b"["):
        depth = 0
        for match in _BRACKET.finditer(raw, at):
            depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(match[0], 0)
            if depth == 0:
                return match.end()
        raise ValueError("the document ends within a value")
    single = (_STRING if raw[at : at + 1] == b'"' else _BARE).match(raw, at)
    if single is None:
        raise ValueError("the document ends within a value")
    return single.end()


def _yaml_span(text: str, pointer: str) -> tuple[int, int]:
    node = documents.yaml_node(text)
    for token in parse_pointer(pointer):
        if isinstance(node, yaml.MappingNode):
            node = next((value for key, value in node.value if key.value == token), None)
        elif isinstance(node, yaml.SequenceNode) and _INDEX.match(token) and int(token) < len(node.value):
            node = node.value[int(token)]
        else:
            node = None
        if node is None:
            raise ValueError(f"'{pointer}' names nothing: no member '{token}' there")
    if not isinstance(node, yaml.ScalarNode) or node.style in ("|", ">"):
        raise ValueError(f"'{pointer}' names no value that stands on one line")
    start, end = node.start_mark.index, node.end_mark.index
    if start == end:
        raise ValueError(f"'{pointer}' is left empty: write null there")
    return len(text[:start].encode("utf-8")), len(text[:end].encode("utf-8"))


def _spliced(raw: bytes, places: Iterable[tuple[int, int, bytes]]) -> bytes:
    pieces = []
    at = 0
    for start, end, new in sorted(places):
        if start < at:
            raise ValueError("one pointer lies within another")
        pieces += [raw[at:start], new]
        at = end
    return b"".join([*pieces, raw[at:]])


def _prove(raw: bytes, result: bytes, kind: Kind, before: Any, edits: tuple[Edit, ...]) -> None:
    after = parse(result, kind)
    for edit in edits:
        found = value_at(after, edit.pointer)
        if found != edit.after or type(found) is not type(edit.after):
            raise ValueError(f"'{edit.pointer}' cannot be written as {edit.after!r} here")
    pointers = [edit.pointer for edit in edits]
    if _without(before, pointers) != _without(after, pointers):
        raise ValueError("more than the named fields would change")
    if undo(result, kind, edits) != raw:
        raise ValueError("the change could not be taken back")


def _without(document: Any, pointers: Iterable[str]) -> Any:
    holder = [copy.deepcopy(document)]
    for pointer in pointers:
        parent: Any = holder
        tokens = ("0", *parse_pointer(pointer))
        for token in tokens[:-1]:
            parent = _child(parent, token, pointer)
        parent[int(tokens[-1]) if isinstance(parent, list) else tokens[-1]] = _TAKEN_OUT
    return holder


def _child(parent: Any, token: str, pointer: str) -> Any:
    if isinstance(parent, dict) and token in parent:
        return parent[token]
    if isinstance(parent, list) and _INDEX.match(token) and int(token) < len(parent):
        return parent[int(token)]
    raise ValueError(f"'{pointer}' names nothing: no member '{token}' there")


def _kind_name(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    return "an array" if isinstance(value, list) else "NaN or an infinity"


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        _twin(next(key for key in keys if keys.count(key) > 1))
    return value


def _twin(key: str) -> NoReturn:
    raise ValueError(f"key {key!r} stands twice")
