"""Verifying a bundle: every byte counts, all faults come together, and nothing is changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner import sums
from runner.errors import Refusal
from runner.verify import VerifiedBundle, open_bundle, verify
from tests.builder import make_bundle, relist, snapshot
from tests.scripted.saving import pickled


def refusal_of(bundle: Path) -> Refusal:
    """Verify `bundle`, which must be refused and left as it was."""
    before = snapshot(bundle)
    with pytest.raises(Refusal) as refused:
        verify(open_bundle(bundle))
    assert snapshot(bundle) == before
    assert all(fault.fix for fault in refused.value.faults)
    return refused.value


def test_a_good_bundle_is_verified(tmp_path: Path) -> None:
    """The verified bundle knows spec, code, checkpoint and root digest."""
    bundle = make_bundle(tmp_path, update=4)
    verified = verify(open_bundle(bundle))
    assert verified.checkpoint is not None
    assert verified.checkpoint.name == "checkpoint-4"
    assert verified.spec.from_update == 4
    assert "scripted/train.py" in verified.code
    assert (
        verified.root
        == "sha256:" + __import__("hashlib").sha256((bundle / sums.LIST_NAME).read_bytes()).hexdigest()
    )


def test_only_verify_makes_a_verified_bundle() -> None:
    """Launching an unverified bundle is a type error; making one by hand is an error too."""
    with pytest.raises(TypeError):
        VerifiedBundle(Path(), "", None, b"", {}, None, (), {}, {}, (), proof=None)  # type: ignore[arg-type]


def test_one_flipped_bit_in_any_file_is_found_and_named(tmp_path: Path) -> None:
    """Every file of a bundle, its list too, at its first, middle and last byte."""
    bundle = make_bundle(tmp_path, update=4)
    for path in sorted(path for path in bundle.rglob("*") if path.is_file()):
        original = path.read_bytes()
        for position in {0, len(original) // 2, len(original) - 1} if original else set():
            changed = bytearray(original)
            changed[position] ^= 1
            path.write_bytes(changed)
            refusal = refusal_of(bundle)
            assert str(path) in str(refusal) or path.name == sums.LIST_NAME
        path.write_bytes(original)
    verify(open_bundle(bundle))


def test_memory_is_not_fooled_by_a_later_flip(tmp_path: Path) -> None:
    """A byte flipped after verification is found although unchanged files are not read again."""
    bundle = make_bundle(tmp_path, update=4)
    verify(open_bundle(bundle))
    verify(open_bundle(bundle), use_memory=True)
    path = bundle / "checkpoint-4" / "rng_state_1.pth"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(Refusal) as refused:
        verify(open_bundle(bundle), use_memory=True)
    assert [(fault.what, fault.where) for fault in refused.value.faults] == [("mismatch", str(path))]


SET_BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "removed": (lambda b: (b / "data/train.jsonl").unlink(), "missing"),
    "added": (lambda b: (b / "data/more.jsonl").write_bytes(b""), "unexpected"),
    "renamed": (lambda b: (b / "run.yaml").rename(b / "run.yml"), "missing"),
    "truncated": (lambda b: (b / "data/train.jsonl").write_bytes(b""), "mismatch"),
    "linked": (
        lambda b: ((b / "run.yaml").rename(b.parent / "x"), (b / "run.yaml").symlink_to(b.parent / "x")),
        "unsafe",
    ),
    "a linked folder": (lambda b: (b / "more").symlink_to(b.parent), "unsafe"),
    "no list": (lambda b: (b / sums.LIST_NAME).unlink(), "not a bundle"),
    "empty list": (lambda b: (b / sums.LIST_NAME).write_bytes(b""), "empty list"),
}


@pytest.mark.parametrize("name", SET_BREAKS)
def test_the_set_of_files_must_be_that_of_the_list(tmp_path: Path, name: str) -> None:
    """Missing, unexpected, renamed, cut off, linked: all refused, by the kind's own word."""
    change, expected = SET_BREAKS[name]
    bundle = make_bundle(tmp_path, update=4)
    change(bundle)
    assert expected in [fault.what for fault in refusal_of(bundle).faults]


def test_all_faults_of_the_set_come_together(tmp_path: Path) -> None:
    """One run names everything that is wrong."""
    bundle = make_bundle(tmp_path, update=4)
    (bundle / "data/train.jsonl").unlink()
    (bundle / "extra").write_bytes(b"x")
    (bundle / "link").symlink_to("nowhere")
    assert sorted(fault.what for fault in refusal_of(bundle).faults) == ["missing", "unexpected", "unsafe"]


def edit_spec(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change run.yaml, and list it anew."""
    value = yaml.safe_load((bundle / "run.yaml").read_bytes())
    change(value)
    (bundle / "run.yaml").write_text(yaml.safe_dump(value))
    relist(bundle)


MEANING_BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no run spec": (lambda b: ((b / "run.yaml").unlink(), relist(b)), "no run spec"),
    "unknown key": (lambda b: edit_spec(b, lambda s: s.update(upddates=3)), "unknown key"),
    "code tree": (lambda b: edit_spec(b, lambda s: s["code"].update(tree="0" * 40)), "code tree differs"),
    "code hash": (
        lambda b: edit_spec(b, lambda s: s["code"].update(sha256="sha256:" + "0" * 64)),
        "spec and list differ",
    ),
    "rows": (lambda b: edit_spec(b, lambda s: s["data"].update(rows=3)), "rows differ"),
    "fingerprint": (
        lambda b: edit_spec(b, lambda s: s["data"].update(fingerprint="sha256:" + "0" * 64)),
        "fingerprint differs",
    ),
    "world": (lambda b: edit_spec(b, lambda s: s["world"].update(ranks=8)), "world size differs"),
    "update": (lambda b: edit_spec(b, lambda s: s["checkpoint"].update(update=3)), "update differs"),
    "total": (lambda b: edit_spec(b, lambda s: s.update(updates=60)), "total of updates differs"),
    "no checkpoint": (
        lambda b: (shutil.rmtree(b / "checkpoint-4"), relist(b)),
        "checkpoint cannot be read",
    ),
    "inventory": (
        lambda b: ((b / "checkpoint-4/rng_state_0.pth").write_bytes(pickled({"random state": 9})), relist(b)),
        "inventory and list differ",
    ),
    "lineage": (lambda b: ((b / "lineage.jsonl").write_bytes(b"{}\n"), relist(b)), "lineage damaged"),
}


@pytest.mark.parametrize("name", MEANING_BREAKS)
def test_right_bytes_with_a_wrong_meaning_are_refused(tmp_path: Path, name: str) -> None:
    """A list that fits its files proves nothing about what they say."""
    change, expected = MEANING_BREAKS[name]
    bundle = make_bundle(tmp_path, update=4)
    change(bundle)
    assert expected in [fault.what for fault in refusal_of(bundle).faults]


def test_a_misspelt_key_gets_a_near_miss(tmp_path: Path) -> None:
    """The whole message: what, where, expected, found, fix."""
    bundle = make_bundle(tmp_path, update=4)
    edit_spec(bundle, lambda spec: spec["launch"].update(modul="x"))
    assert str(refusal_of(bundle)) == (
        f"unknown key: {bundle}/run.yaml: launch.modul\n"
        "    expected a key of this document\n"
        "    found    'modul'\n"
        "    fix      did you mean 'module'?"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"id": "a"}\r\n', "the line ends in CR LF"),
        (b'{"id": "a"}', "the last record is cut off: no line feed after it"),
        (b'{"image": NaN}\n', "NaN is not JSON"),
        (b'{"image": "/mnt/origin/images/1", "image": "x"}\n', "key 'image' stands twice"),
        (b"[1]\n", "a JSON list, not an object"),
        (
            b'{"image": "/elsewhere/1.png"}\n',
            "column 'image' holds '/elsewhere/1.png', which does not lie below /mnt/origin/images/",
        ),
        (b'{"image": "/mnt/origin/images/../1"}\n', "which does not lie below"),
        (b"\n", "Expecting value"),
    ],
)
def test_a_bad_manifest_row_is_named_by_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    """Rows are split at LF only; what is not one JSON object a line is refused."""
    bundle = make_bundle(tmp_path, update=4)
    good = (
        json.dumps({"id": "\u2028", "image": "/mnt/origin/images/1.png"}, ensure_ascii=False).encode() + b"\n"
    )
    (bundle / "data/train.jsonl").write_bytes(good + content)
    relist(bundle)
    edit_spec(
        bundle, lambda spec: spec["data"].update(sha256="sha256:" + sums_of(bundle)["data/train.jsonl"])
    )
    faults = [fault for fault in refusal_of(bundle).faults if fault.what == "bad row"]
    assert [fault.where for fault in faults] == [f"{bundle}/data/train.jsonl:2"]
    assert message in faults[0].found


def sums_of(bundle: Path) -> dict[str, str]:
    """Return the list of `bundle`."""
    return sums.parse((bundle / sums.LIST_NAME).read_bytes(), "list")


def test_logs_that_are_not_there_are_refused(tmp_path: Path) -> None:
    """Not only when the run is prepared (rule S8)."""
    bundle = make_bundle(tmp_path, change=lambda spec: spec.update(logs="data"))
    assert verify(open_bundle(bundle)).spec.logs == "data"
    text = (bundle / "run.yaml").read_text()
    (bundle / "run.yaml").write_text(text.replace("logs: data", "logs: dat"))
    relist(bundle)
    with pytest.raises(Refusal, match="listed files below dat"):
        verify(open_bundle(bundle))
