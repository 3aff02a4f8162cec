"""The image's last layer: the start program, the list of files, the SBOM and IDENTITY; the same bytes each time."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from runner.errors import Refusal
from runner.image_inputs import Identity, read_inputs
from runner.image_layer import Layer, look_tar, make_layer
from runner.inside import facts, installed
from runner.inside.installed import Entry, FileList
from tests.conftest import PROJECT
from tests.image.environment import make_environment
from tests.image.test_recipe import RECIPE

PACKAGES = {
    "python": [
        {"name": "Some_Thing", "version": "1.0+cpu", "expression": "MIT OR Apache-2.0", "licences": ["MIT License"]},
        {"name": "other", "version": "2", "expression": "", "licences": ["BSD License"]},
        {"name": "third", "version": "3", "expression": "no (SPDX", "licences": []},
        {"name": "silent", "version": "4", "expression": "", "licences": []},
    ],
    "debian": [{"name": "libc6", "version": "2.36-9+deb12u10", "architecture": "amd64"}],
    "release": "bookworm",
}  # fmt: skip


@pytest.fixture
def looked(tmp_path: Path) -> Path:
    """What the build found in an environment."""
    folder = tmp_path / "facts"
    folder.mkdir()
    entries = {"opt/venv": Entry("dir", 0o755), "opt/venv/x.py": Entry("file", 0o644, 1, "0" * 64, time_s=9)}
    (folder / "FILES.mtree").write_bytes(FileList(entries).to_bytes())
    (folder / "packages.json").write_text(json.dumps(PACKAGES))
    return folder


def layer(looked: Path, project: Path = PROJECT) -> Layer:
    """Return the last layer of the image 'cpu'."""
    return make_layer(read_inputs("cpu", project), "sha256:" + "1" * 64, looked)


def members(tar: bytes) -> dict[str, tarfile.TarInfo]:
    """Return what a tar holds."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        return {member.name: member for member in opened.getmembers()}


def content(tar: bytes, name: str) -> bytes:
    """Return one file of a tar."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        file = opened.extractfile(name)
        assert file is not None
        return file.read()


def test_the_layer_is_the_same_bytes_whatever_the_files_times_and_modes(tmp_path: Path, looked: Path) -> None:
    """No time, owner or mode of the builder's checkout gets into the image."""
    for name in RECIPE:
        source = PROJECT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    for path in (tmp_path / "runner" / "inside").iterdir():
        path.chmod(0o700)
    here, there = layer(looked), layer(looked, tmp_path)
    assert here.tar == there.tar
    names = list(members(here.tar))
    assert names == sorted(names)
    assert {
        "opt/ferry/start",
        "opt/ferry/runner/inside/start.py",
        "opt/ferry/runner/inside/records.py",
    } <= set(names)


def test_the_list_covers_the_environment_and_this_layer(looked: Path) -> None:
    """Everything but the list itself and IDENTITY, which names its digest."""
    made = layer(looked)
    listed = installed.parse(content(made.tar, "opt/ferry/FILES.mtree"), "list")
    assert listed.roots == ["opt/ferry", "opt/venv"]
    assert listed.timed
    held = {name: member for name, member in members(made.tar).items() if name.startswith("opt/ferry")}
    own = {"opt/ferry/FILES.mtree", "opt/ferry/IDENTITY"}
    assert listed.entries.keys() == (held.keys() - own) | {"opt/venv", "opt/venv/x.py"}
    for name in held.keys() - own:
        entry, member = listed.entries[name], held[name]
        assert (entry.kind == "dir", entry.mode, entry.size) == (member.isdir(), member.mode, member.size)
        if member.isfile():
            raw = content(made.tar, name)
            assert (entry.sha256, entry.time_s) == (hashlib.sha256(raw).hexdigest(), member.mtime)
    raw = content(made.tar, "opt/ferry/FILES.mtree")
    assert made.identity.files == "sha256:" + hashlib.sha256(raw).hexdigest()
    assert content(made.tar, "opt/ferry/IDENTITY") == made.identity.to_json()


def test_identity_and_labels_tell_the_same(looked: Path) -> None:
    """What the image says inside and outside comes from one value; whoever has docker alone can read either."""
    identity = layer(looked).identity
    labels = identity.labels()
    assert (
        Identity(**{**json.loads(identity.to_json()), "ops": identity.ops, "cpu_flags": identity.cpu_flags})
        == identity
    )
    assert labels["ferry.lock"] == identity.lock
    assert labels["ferry.files"] == identity.files
    assert labels["ferry.cpu_flags"].split() == list(identity.cpu_flags)
    assert labels["org.opencontainers.image.base.digest"] == "sha256:" + "1" * 64
    assert labels["org.opencontainers.image.created"] == "2026-01-01T00:00:00+00:00"
    assert "torch 2.13.0+cpu" in labels["org.opencontainers.image.description"]


def test_the_sbom_is_valid_and_the_same_each_time(looked: Path) -> None:
    """CycloneDX 1.6 by its own schema; no random serial number, no time but the image's; every package with its URL."""
    raw = content(layer(looked).tar, "opt/ferry/sbom.cdx.json")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(raw.decode()) is None
    bom = json.loads(raw)
    assert bom["metadata"]["timestamp"] == "2026-01-01T00:00:00+00:00"
    found: dict[str, Any] = {part["purl"]: part.get("licenses") for part in bom["components"]}
    assert found == {
        "pkg:pypi/some-thing@1.0%2Bcpu": [{"expression": "MIT OR Apache-2.0"}],
        "pkg:pypi/other@2": [{"license": {"name": "BSD License"}}],
        "pkg:pypi/third@3": [{"license": {"name": "no (SPDX"}}],
        "pkg:pypi/silent@4": None,
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64&distro=bookworm": None,
    }
    assert bom["metadata"]["component"]["name"] == "ferry/cpu"
    assert raw == content(layer(looked).tar, "opt/ferry/sbom.cdx.json")
    PACKAGES_MORE = {**PACKAGES, "debian": []}  # noqa: N806 - as the one above
    (looked / "packages.json").write_text(json.dumps(PACKAGES_MORE))
    other = json.loads(content(layer(looked).tar, "opt/ferry/sbom.cdx.json"))
    assert other["serialNumber"] != bom["serialNumber"]


@pytest.mark.parametrize("name", ["FILES.mtree", "packages.json"])
@pytest.mark.parametrize("damage", [b"", b"{}", None])
def test_damaged_facts_make_no_image(looked: Path, name: str, damage: bytes | None) -> None:
    """A look that was cut off is told, with the file."""
    path = looked / name
    path.unlink() if damage is None else path.write_bytes(damage)
    with pytest.raises(Refusal) as caught:
        layer(looked)
    assert [str(path) in fault.where for fault in caught.value.faults] == [True]


def test_what_looks_at_an_environment_has_all_that_it_imports(tmp_path: Path) -> None:
    """It is a part of the start program; looking starts again only when that part changes."""
    names = members(look_tar(read_inputs("cpu", PROJECT)))
    modules = {name.removesuffix(".py").replace("/", ".").removeprefix("opt.ferry.") for name in names}
    source = "".join((PROJECT / "runner" / "inside" / f"{name}.py").read_text() for name in (
        "facts", "installed", "digests", "reading", "spread"))  # fmt: skip
    wanted = {line.split()[1] for line in source.splitlines() if line.startswith("from runner.")} - {
        "runner.inside"
    }
    assert wanted <= modules


def test_the_packages_of_an_environment_are_found_without_an_import(tmp_path: Path) -> None:
    """Name, version, licence: an expression, what classifiers say, or a short free text; never a licence's whole text."""
    root = make_environment(tmp_path / "venv")
    site = next(root.glob("lib/python3*/site-packages"))
    more = {
        "a": "Name: a\nVersion: 2\nClassifier: License :: OSI Approved :: MIT License\nLicense: x\n",
        "b": "Name: b\nVersion: 3\nLicense: BSD-3-Clause\n",
        "c": "Name: c\nVersion: 4\nLicense: Copyright\n        all of it\n",
    }
    for name, text in more.items():
        (site / f"{name}-1.dist-info").mkdir()
        (site / f"{name}-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\n{text}\nVersion: 9\n")
    found = [tuple(package.values()) for package in facts.python_packages(site)]
    assert found == [
        ("a", "2", "", ["MIT License"]), ("b", "3", "", ["BSD-3-Clause"]), ("c", "4", "", []),
        ("good", "1", "MIT", []), ("other", "1", "MIT", []),
    ]  # fmt: skip


def test_the_packages_of_a_base_are_those_that_dpkg_has_installed(tmp_path: Path) -> None:
    """Not those that it only remembers; and none where there is no dpkg."""
    status = tmp_path / "status"
    assert facts.debian_packages(status) == []
    status.write_text(
        "Package: b\nStatus: install ok installed\nArchitecture: all\nVersion: 1:2-3\nDescription: x\n y\n\n"
        "Package: a\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n\n"
    )
    assert facts.debian_packages(status) == [{"name": "b", "version": "1:2-3", "architecture": "all"}]
