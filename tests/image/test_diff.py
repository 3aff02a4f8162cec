"""Why two images differ: every difference is told, and none where there is none."""

from __future__ import annotations

import gzip
import io
import json
import secrets
import subprocess
import sys
import tarfile
from pathlib import Path

import docker
import pytest
import zstandard

from runner import image_diff, image_tree
from runner.errors import Refusal
from runner.image_diff import InEngine, InFile
from runner.inside.digests import sha256_bytes
from tests.conftest import PROJECT
from tests.image.layouts import Image, image, layer, tar_of


def silent(_: int) -> None:
    """Nobody watches."""


def write(path: Path, raw: bytes) -> InFile:
    """The file, as a side of a comparison."""
    path.write_bytes(raw)
    return InFile(path)


def said(folder: Path, one: bytes, two: bytes) -> list[str]:
    """What is told of two files, as people see it."""
    found = image_diff.differences(write(folder / "a.tar", one), write(folder / "b.tar", two), silent)
    return [str(difference) for difference in found]


def members(*entries: tarfile.TarInfo | tuple[str, bytes]) -> bytes:
    """A tar of these entries, in this order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            member = tarfile.TarInfo(entry[0]) if isinstance(entry, tuple) else entry
            content = entry[1] if isinstance(entry, tuple) else b""
            member.size = len(content)
            member.mtime = member.mtime or 1767225600
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def special(name: str, kind: bytes, target: str = "", **fields: object) -> tarfile.TarInfo:
    """An entry that is no plain file."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    for field, value in fields.items():
        setattr(member, field, value)
    return member


def of_layers(*layers: bytes) -> Image:
    """A good image of these layers."""
    made = image()
    made.layers = list(layers)
    return made


def test_the_same_image_in_two_files_is_the_same(tmp_path: Path) -> None:
    """Whatever the form of the file."""
    raw = tar_of(image().files())
    assert said(tmp_path, raw, raw) == []
    assert said(tmp_path, raw, gzip.compress(tar_of(dict(reversed(image().files().items()))))) == []


def test_every_difference_is_told_with_both_sides(tmp_path: Path) -> None:
    """A setting, a layer, and files: changed, added, gone, of another mode, owner, time, kind, target, attribute."""
    a = of_layers(
        members(
            ("opt/content", b"one"), ("opt/gone", b"x"), special("opt/mode", tarfile.REGTYPE, mode=0o644),
            special("opt/kind", tarfile.DIRTYPE), special("opt/link", tarfile.SYMTYPE, "here"),
            special("opt/owner", tarfile.DIRTYPE, uid=1), special("opt/time", tarfile.DIRTYPE, mtime=1),
            special("opt/attribute", tarfile.REGTYPE), special("opt/device", tarfile.CHRTYPE, devmajor=1, devminor=3),
        )
    )  # fmt: skip
    attribute = special(
        "opt/attribute", tarfile.REGTYPE, pax_headers={"SCHILY.xattr.security.capability": "x"}
    )
    b = of_layers(
        members(
            ("opt/content", b"two!"), ("opt/new", b""), special("opt/mode", tarfile.REGTYPE, mode=0o4755),
            ("opt/kind", b"file"), special("opt/link", tarfile.SYMTYPE, "there"),
            special("opt/owner", tarfile.DIRTYPE, uid=2, gid=3), special("opt/time", tarfile.DIRTYPE, mtime=2),
            attribute, special("opt/device", tarfile.CHRTYPE, devmajor=1, devminor=5),
        )
    )  # fmt: skip
    b.labels = {**a.labels, "ferry.name": "other", "more": "x"}
    found = said(tmp_path, tar_of(a.files()), tar_of(b.files()))
    one, two = sha256_bytes(b"one")[:12], sha256_bytes(b"two!")[:12]
    assert found[:2] == [
        'setting differs: config/Labels/ferry.name\n    A "tiny"\n    B "other"',
        'setting only in B: config/Labels/more\n    B "x"',
    ]
    assert found[2].startswith("layer differs: 1 of 1 and 1\n    A sha256:")
    assert found[3:] == [
        "file differs: opt/attribute\n    attributes: () -> (('security.capability', 'x'),)\n    layer 1",
        f"file differs: opt/content\n    content: 3 bytes {one} -> 4 bytes {two}\n    layer 1",
        "file differs: opt/device\n    target: 1:3 -> 1:5\n    layer 1",
        "file only in A: opt/gone\n    file of 1 bytes, layer 1",
        "file differs: opt/kind\n    kind: folder -> file of 4 bytes\n    layer 1",
        "file differs: opt/link\n    target: here -> there\n    layer 1",
        "file differs: opt/mode\n    mode: 0644 -> 4755\n    layer 1",
        "file only in B: opt/new\n    file of 0 bytes, layer 1",
        "file differs: opt/owner\n    owner: 1:0 -> 2:3\n    layer 1",
        "file differs: opt/time\n    time: 1 -> 2\n    layer 1",
    ]


def test_layers_of_the_same_files_are_explained_too(tmp_path: Path) -> None:
    """Another order, or other headers: the digest differs, and no file does."""
    one = tar_of(of_layers(layer({"a": b"1", "b": b"2"})).files())
    order = tar_of(of_layers(layer({"b": b"2", "a": b"1"})).files())
    (told,) = said(tmp_path, one, order)
    assert told.endswith("\n    the same files in another order: a where B has b")
    headers = tar_of(of_layers(members(("a", b"1"), ("b", b"2"))).files())
    (told,) = said(tmp_path, one, headers)
    assert told.endswith(
        "\n    the same files in the same order: the headers of the tar, or its compression, differ"
    )


def stacked(*layers: bytes) -> dict[str, int]:
    """Path -> number of the layer, when the layers lie on each other."""
    read = [image_tree.read_layer([raw], "x") for raw in layers]
    return {path: number for path, (_, number) in image_tree.stack(entry for entry in read if entry).items()}


@pytest.mark.parametrize(
    ("upper", "left"),
    [
        ({"d/.wh.f": b""}, {"d": 1, "d/e": 1, "d/e/g": 1, "df": 1}),
        ({".wh.d": b""}, {"df": 1}),
        ({".wh.d": b"", "d": None, "d/new": b""}, {"d": 2, "d/new": 2, "df": 1}),
        ({"d": None, "d/new": b"", "d/.wh..wh..opq": b""}, {"d": 2, "d/new": 2, "df": 1}),
        ({"d": b"now a file"}, {"d": 2, "df": 1}),
        ({"./d/f": b"", "d/e/": None}, {"d": 1, "d/e": 2, "d/e/g": 1, "d/f": 2, "df": 1}),
        ({".wh..wh..opq": b"", "x": b""}, {"x": 2}),
    ],
)
def test_layers_add_up_as_the_specification_says(
    upper: dict[str, bytes | None], left: dict[str, int]
) -> None:
    """Whiteouts, opaque folders, a file in a folder's place; what the same layer brings stays."""
    lower = layer({"d": None, "d/e": None, "d/e/g": b"", "d/f": b"", "df": b""})
    assert stacked(lower, layer(upper)) == left


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_two_archives_of_a_base_are_compared(tmp_path: Path, pack: type[bytes]) -> None:
    """Packed or not, with './' before each name or without."""
    one = pack(layer({"./etc": None, "./etc/hostname": b"a"}))
    two = pack(layer({"etc": None, "etc/hostname": b"b"}))
    layers, told = said(tmp_path, one, two)
    assert layers.startswith("layer differs: 1 of 1 and 1")
    assert told.startswith("file differs: etc/hostname\n    content: 1 bytes")
    assert said(tmp_path, one, one) == []


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """No tar, a cut-off layer, a blob that was changed, a file that is not there."""
    good = tar_of(image().files())
    cut = of_layers(layer({"a": b"1" * 5000})[:3000])
    for raw, what in (
        (b"no tar", "not an image"),
        (good[:5000], "damaged"),
        (tar_of(cut.files()), "layer cannot be read"),
        (tar_of(of_layers(b"no tar").files()), "layer cannot be read"),
        (good.replace(b"hello", b"hallo"), "blob differs"),
    ):
        with pytest.raises(Refusal) as caught:
            said(tmp_path, raw, good)
        assert {fault.what for fault in caught.value.faults} == {what}
    with pytest.raises(Refusal, match="cannot be read"):
        image_diff.differences(InFile(tmp_path / "absent"), InFile(tmp_path / "b.tar"), silent)


@pytest.mark.engine
def test_the_command_line_tells_the_difference(client: docker.DockerClient, tmp_path: Path) -> None:
    """An image in the engine against a file: exit 0 if they are the same, 4 if not; the engine's own against itself."""
    name = f"ship-{secrets.token_hex(4)}"
    made, other = image(name, text=name), image(name, text="another")
    for number, entry in enumerate((made, other)):
        (tmp_path / f"{number}.tar").write_bytes(tar_of(entry.files()))
    list(client.images.load((tmp_path / "0.tar").read_bytes()))
    client.api.tag(made.digest, f"ferry/{name}", "x")
    try:
        same = ferry(made.digest, str(tmp_path / "0.tar"))
        assert (same.returncode, same.stdout) == (0, "SAME\n"), same.stderr
        different = ferry(f"ferry/{name}:x", str(tmp_path / "1.tar"), "--json")
        assert different.returncode == 4, different.stderr
        found = json.loads(different.stdout)
        assert [entry["what"] for entry in found["differences"]] == [
            "layer differs",
            "layer differs",
            "file differs",
        ]
        assert found["differences"][2]["where"] == "opt/a"
        itself = InEngine(client, made.digest)
        assert image_diff.differences(itself, itself, silent) == []
    finally:
        client.api.remove_image(made.digest, force=True)
    assert ferry(made.digest, "absent.tar").returncode == 3


def ferry(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `ferry image diff`."""
    command = [sys.executable, "-m", "runner", "image", "diff", *words]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=300)
