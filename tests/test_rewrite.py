"""Changing single values in the text of a document: every other byte stays, and the way back is exact."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from runner import rewrite

# Text that trips scanners: line separators of other alphabets, escapes, quotes, braces, look-alike keys.
AWKWARD = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["\u2028", "\u2029", "\x85", '"', "\\", '\\"', "{", "}]", ",", "a/b", "~", "~1", "", "0", "/data/run2"]),
)  # fmt: skip
LEAVES = st.one_of(AWKWARD, st.integers(), st.floats(), st.booleans(), st.none())
DOCUMENTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(AWKWARD, inner, max_size=4)),
    max_leaves=20,
)
FORMS = st.fixed_dictionaries(
    {
        "indent": st.sampled_from([None, 0, 1, 4, "\t"]),
        "ensure_ascii": st.booleans(),
        "separators": st.sampled_from([None, (",", ":"), (" , ", " : "), (",\r\n", ":\t")]),
    }
)


def leaves(value: Any, at: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return every single value below `value` with the tokens that lead to it."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*at, key))]
    if isinstance(value, list):
        return [leaf for number, inner in enumerate(value) for leaf in leaves(inner, (*at, str(number)))]
    return [(at, value)]


def finite(value: Any) -> bool:
    """NaN and the infinities are read, and are not changed."""
    return not isinstance(value, float) or math.isfinite(value)


@given(DOCUMENTS, FORMS, st.data())
def test_only_the_bytes_of_the_named_values_change(document: Any, form: dict[str, Any], data: Any) -> None:
    """Whatever the document and its form: text outside the spans stays, the document differs at the pointers only."""
    try:
        raw = json.dumps(document, **form).encode("utf-8")
    except UnicodeEncodeError:
        return  # A lone surrogate has no UTF-8 form.
    candidates = [leaf for leaf in leaves(document) if finite(leaf[1])]
    chosen = (
        data.draw(st.lists(st.sampled_from(candidates), max_size=3, unique_by=lambda leaf: leaf[0]))
        if candidates
        else []
    )
    values = {rewrite.to_pointer(tokens): data.draw(LEAVES.filter(finite)) for tokens, _ in chosen}
    spans = sorted(rewrite.find(raw, "json", pointer) for pointer in values)
    result, edits = rewrite.change(raw, "json", values)
    assert rewrite.undo(result, "json", edits) == raw
    kept = b"".join(
        raw[a:b]
        for a, b in zip(
            [0, *(end for _, end in spans)], [*(start for start, _ in spans), len(raw)], strict=True
        )
    )
    spans_after = sorted(rewrite.find(result, "json", pointer) for pointer in values)
    kept_after = b"".join(
        result[a:b]
        for a, b in zip([0, *(end for _, end in spans_after)], [*(start for start, _ in spans_after), len(result)], strict=True)
    )  # fmt: skip
    assert kept == kept_after
    parsed = rewrite.parse(result, "json")
    for tokens, old in leaves(rewrite.parse(raw, "json")):
        pointer = rewrite.to_pointer(tokens)
        assert rewrite.value_at(parsed, pointer) == values.get(pointer, old)


@given(DOCUMENTS, st.data())
def test_the_span_of_any_pointer_parses_to_its_value(document: Any, data: Any) -> None:
    """The scanner finds what the parser finds."""
    raw = json.dumps(document).encode()
    tokens, value = data.draw(st.sampled_from(leaves(document) or [((), document)]))
    start, end = rewrite.find(raw, "json", rewrite.to_pointer(tokens))
    assert json.dumps(json.loads(raw[start:end])) == json.dumps(value)


@given(st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), st.one_of(st.integers(), st.booleans(), st.from_regex(r"[a-z ,#:é-]{0,9}", fullmatch=True), st.lists(st.integers(), max_size=3)), min_size=1, max_size=5), st.booleans(), st.data())  # fmt: skip
def test_yaml_keeps_its_other_bytes_too(document: dict[str, Any], flow: bool, data: Any) -> None:
    """Comments, quotes and order stay: the marks of the parser say where the value stands."""
    body = yaml.safe_dump(document, default_flow_style=flow, allow_unicode=True, sort_keys=False)
    raw = ("# a comment: é\n" + body + "# the end\n").encode()
    tokens, _ = data.draw(st.sampled_from(leaves(document) or [(("none",), 0)]))
    if tokens == ("none",):
        return
    new = data.draw(
        st.one_of(
            st.integers(),
            st.floats(allow_nan=False, allow_infinity=False),
            st.booleans(),
            st.text(max_size=8),
        )
    )
    try:
        result, edits = rewrite.change(raw, "yaml", {rewrite.to_pointer(tokens): new})
    except ValueError:
        return  # What YAML cannot say is refused, never written otherwise.
    assert rewrite.undo(result, "yaml", edits) == raw
    assert result.startswith("# a comment: é\n".encode())
    assert result.endswith(b"# the end\n")


def test_numbers_elsewhere_keep_their_spelling() -> None:
    """2e-5 stays 2e-5, in JSON and in YAML; so do the odd spaces."""
    raw = b'{ "lr" : 2e-5,\n"loader":{"workers":4 , "note":"workers: 4"}, "loss": NaN }\n'
    result, edits = rewrite.change(raw, "json", {"/loader/workers": 8})
    assert result == raw.replace(b'"workers":4', b'"workers":8')
    assert edits == (rewrite.Edit("/loader/workers", 4, 8, "4", "8"),)
    text = b"lr: 2e-5  # peak\nloader: {workers: 4, pin: yes}\n"
    assert rewrite.change(text, "yaml", {"/loader/workers": 8})[0] == text.replace(
        b"workers: 4", b"workers: 8"
    )


def test_a_key_written_with_escapes_is_the_same_key() -> None:
    """What counts is the parsed name, not its spelling."""
    raw = b'{"w\\u006frkers": 4, "workers2": 5}'
    assert rewrite.change(raw, "json", {"/workers": 8})[0] == b'{"w\\u006frkers": 8, "workers2": 5}'


@pytest.mark.parametrize(
    ("raw", "kind", "pointer", "message"),
    [
        (b'{"a": 1, "a": 2}', "json", "/a", "key 'a' stands twice"),
        (b'{"a": {"b": 1}}', "json", "/a", "names an object, not a single value"),
        (b'{"a": [1]}', "json", "/a/01", "names nothing"),
        (b'{"a": [1]}', "json", "/a/-", "names nothing"),
        (b'{"a": 1}', "json", "/a/b", "names nothing"),
        (b'{"a": 1}', "json", "a", "begins with '/'"),
        (b'{"a": 1}', "json", "/a~2", "'~' is written ~0"),
        (b'{"a": NaN}', "json", "/a", "not a single value"),
        (b'\xef\xbb\xbf{"a": 1}', "json", "/a", "BOM"),
        (b'{"a": "\xff"}', "json", "/a", "invalid start byte"),
        (b'{"a": 1', "json", "/a", "delimiter"),
        (b"a: &x 1\nb: *x\n", "yaml", "/a", "aliases are not allowed"),
        (b"a:\nb: 2\n", "yaml", "/a", "left empty"),
        (b"a: |\n  text\n", "yaml", "/a", "stands on one line"),
        (b"a: 1\n---\na: 2\n", "yaml", "/a", "single document"),
        (b"a: 1\na: 2\n", "yaml", "/a", "stands twice"),
    ],
)  # fmt: skip
def test_what_cannot_be_changed_with_certainty_is_refused(
    raw: bytes, kind: Any, pointer: str, message: str
) -> None:
    """Ambiguous, absent, or not one value: no guess is made."""
    with pytest.raises(ValueError, match=message):
        rewrite.change(raw, kind, {pointer: 7})


def test_taking_back_needs_the_very_text_that_was_written() -> None:
    """A file that was edited since is not undone over that edit."""
    result, edits = rewrite.change(b'{"a": 1}', "json", {"/a": 2})
    with pytest.raises(ValueError, match="holds 3, not 2"):
        rewrite.undo(result.replace(b"2", b"3"), "json", edits)
