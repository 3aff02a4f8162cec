"""Assets known by content, images that must be there, and the ways a checkpoint comes into a run folder."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner import lay as laying
from runner.assets import asset_faults, files_below, images_faults
from runner.errors import Refusal
from runner.inside.digests import sha256_bytes
from runner.spec import Asset
from runner.verify import open_bundle, verify
from tests.builder import ROWS, make_bundle, snapshot
from tests.test_rewrite_bundle import inputs_of, make, prepared


def source_tree(folder: Path) -> Path:
    """Return a small git checkout."""
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "a.py").write_text("x = 1\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    return folder


def test_a_source_tree_is_known_by_gits_own_id(tmp_path: Path) -> None:
    """The id that `git write-tree` gives; the checkout's own .git is no part of it."""
    tree = source_tree(tmp_path / "src")
    done = subprocess.run(["git", "-C", str(tree), "write-tree"], check=True, capture_output=True, text=True)
    asset = Asset(origin="/o", kind="tree", tree=done.stdout.strip())
    assert asset_faults("source", asset, tree, None) == []
    (tree / "pkg" / "a.py").write_text("x = 2\n")
    (fault,) = asset_faults("source", asset, tree, None)
    assert fault.what == "asset is another one"
    assert fault.expected == f"tree {asset.tree}"


def test_a_source_tree_is_known_by_the_hash_of_its_list(tmp_path: Path) -> None:
    """`sha256sum` of the sorted list that `sha256sum` prints."""
    tree = source_tree(tmp_path / "src")
    script = (
        "find . -path ./.git -prune -o -type f -printf '%P\\n' | LC_ALL=C sort | xargs sha256sum | sha256sum"
    )
    done = subprocess.run(script, shell=True, cwd=tree, check=True, capture_output=True, text=True)  # noqa: S602
    asset = Asset(origin="/o", kind="tree", sha256="sha256:" + done.stdout.split()[0])
    assert asset_faults("source", asset, tree, None) == []
    (tree / "link").symlink_to("run.sh")
    (fault,) = asset_faults("source", asset, tree, None)
    assert (fault.what, fault.found) == ("unsafe", "a link")


def hub(folder: Path) -> tuple[Path, Asset]:
    """Return a model's folder in a hub cache, and what the spec says of it."""
    model = folder / "models--o--n"
    (model / "blobs").mkdir(parents=True)
    (model / "snapshots" / "abc" / "sub").mkdir(parents=True)
    lines = []
    for name, content in {"config.json": b"{}", "sub/w.bin": b"weights"}.items():
        digest = sha256_bytes(content)
        (model / "blobs" / digest).write_bytes(content)
        up = "../../../" if "/" in name else "../../"
        (model / "snapshots" / "abc" / name).symlink_to(f"{up}blobs/{digest}")
        lines.append(f"{digest}  {name}\n")
    sha256 = "sha256:" + sha256_bytes("".join(lines).encode())
    return model, Asset(origin="/o", kind="hub", revision="abc", sha256=sha256)


def test_a_model_in_a_hub_cache_is_known_by_its_content(tmp_path: Path) -> None:
    """Links into the cache's blobs stand for their content; a flipped byte is another model."""
    model, asset = hub(tmp_path)
    assert asset_faults("model", asset, model, None) == []
    blob = (model / "snapshots/abc/sub/w.bin").resolve()
    blob.write_bytes(b"Weights")
    assert [fault.what for fault in asset_faults("model", asset, model, None)] == ["asset is another one"]


@pytest.mark.parametrize(
    ("target", "found"),
    [("../../blobs/gone", "which is not there"), ("/etc/passwd", "outside of it"), ("loop", "which is not there"), ("../../blobs", "not a file")],
)  # fmt: skip
def test_a_link_that_leads_nowhere_or_outside_is_refused(tmp_path: Path, target: str, found: str) -> None:
    """Dangling, outside, looping, and a link to a folder: by name."""
    model, asset = hub(tmp_path)
    (model / "snapshots" / "abc" / "loop").symlink_to(target)
    (fault,) = asset_faults("model", asset, model, None)
    assert fault.what == "unsafe"
    assert fault.where.endswith(": loop")
    assert found in fault.found


def test_another_revision_is_named(tmp_path: Path) -> None:
    """What the cache has instead is shown."""
    model, asset = hub(tmp_path)
    (fault,) = asset_faults("model", asset.model_copy(update={"revision": "def"}), model, None)
    assert (fault.expected, fault.found) == ("revision def", "revisions abc")


def test_every_image_of_the_manifest_is_looked_for(tmp_path: Path) -> None:
    """Each missing one is named with its row; all that are there are passed."""
    bundle = verify(open_bundle(make_bundle(tmp_path)))
    images = tmp_path / "images"
    images.mkdir()
    for row in range(ROWS):
        if row not in (3, 9):
            (images / f"{row}.png").touch()
    faults = images_faults(bundle.path / "data/train.jsonl", bundle.spec, images)
    assert [fault.where.rpartition("train.jsonl:")[2] for fault in faults] == ["4: image", "10: image"]


def test_a_file_that_is_no_file_is_found_below(tmp_path: Path) -> None:
    """Pipes and sockets are no content."""
    os.mkfifo(tmp_path / "pipe")
    faults: list[Any] = []
    assert files_below(tmp_path, None, "tree", faults) == {}
    assert faults[0].found == "a device, socket or pipe"


@pytest.mark.parametrize("mode", ["hardlink", "copy"])
def test_a_laid_checkpoint_is_the_bundles(tmp_path: Path, mode: Any) -> None:
    """Every byte of it, in the run folder; what is rewritten is no link to the bundle's file."""
    bundle = make(tmp_path)
    before = snapshot(bundle)
    inputs = inputs_of(tmp_path, bundle, mode)
    run = prepared(tmp_path, inputs)
    assert snapshot(bundle) == before
    for name, digest in inputs.digests.items():
        if name.startswith("checkpoint-4/"):
            assert sha256_bytes((run.output / name).read_bytes()) == digest
    shared = (run.output / "checkpoint-4/model.safetensors").stat().st_ino
    assert (shared == (bundle / "checkpoint-4/model.safetensors").stat().st_ino) == (mode == "hardlink")
    contract = "checkpoint-4/resume_contract.json"
    assert (run.output / contract).stat().st_ino != (bundle / contract).stat().st_ino


@pytest.mark.parametrize("mode", ["hardlink", "reflink"])
def test_what_the_file_system_cannot_do_is_refused_and_nothing_stays(
    tmp_path: Path, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a copy in silence; the fix names the modes that work."""

    def unable(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    bundle = make(tmp_path)
    inputs = inputs_of(tmp_path, bundle, mode)
    before = snapshot(tmp_path)
    monkeypatch.setattr(laying.os, "link", unable)
    monkeypatch.setattr(laying.fcntl, "ioctl", unable)
    with pytest.raises(Refusal) as refused:
        prepared(tmp_path, inputs)
    assert all("--mode mount" in fault.fix for fault in refused.value.faults)
    assert snapshot(tmp_path) == before


def test_a_bundle_that_changes_while_it_is_copied_is_refused(tmp_path: Path) -> None:
    """The hash is of the bytes that were written."""
    bundle = make(tmp_path)
    inputs = inputs_of(tmp_path, bundle, "copy")
    (bundle / "checkpoint-4/rng_state_0.pth").write_bytes(b"another")
    before = snapshot(tmp_path)
    with pytest.raises(Refusal, match="copy differs"):
        prepared(tmp_path, inputs)
    assert snapshot(tmp_path) == before
