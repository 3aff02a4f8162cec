"""The file of an image, damaged and hostile: read strictly, every fault told, and given on in one form only."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from typing import Any

import pytest

from runner import image_layout
from runner.errors import Refusal
from runner.image_manifest import Layout
from tests.image.layouts import (
    CONFIG,
    DOCKER,
    LAYER,
    MANIFEST,
    Image,
    descriptor,
    digest_of,
    image,
    tar_of,
)

WHERE = "x.tar"


def read(raw: bytes) -> tuple[Layout, bytes]:
    """What is in the file, and its one form."""
    form = bytearray()
    return image_layout.read(io.BytesIO(raw), WHERE, write=form.extend), bytes(form)


def refused(raw: bytes) -> list[tuple[str, str, str]]:
    """What, where and found of every fault; nothing that a reader would take for an image was given on."""
    form = bytearray()
    with pytest.raises(Refusal) as caught:
        image_layout.read(io.BytesIO(raw), WHERE, write=form.extend)
    assert b"index.json" not in form
    assert b"manifest.json" not in form
    return [(fault.what, fault.where, fault.found) for fault in caught.value.faults]


def blob(raw: bytes) -> str:
    """The name of a blob."""
    return "blobs/sha256/" + digest_of(raw).removeprefix("sha256:")


@pytest.mark.parametrize("kinds", [{}, DOCKER], ids=["oci", "docker"])
def test_a_good_image_is_read_whole(kinds: dict[str, str]) -> None:
    """Digests, labels and layers (one of them twice), in both dialects of media types."""
    made = image()
    made.kinds = kinds
    layout, _ = read(tar_of(made.files()))
    assert (layout.digest, layout.config) == (made.digest, digest_of(made.config()))
    assert layout.labels == made.labels
    assert [entry.digest for entry in layout.layers] == [digest_of(raw) for raw in made.layers]
    assert [entry.size_bytes for entry in layout.layers] == [len(raw) for raw in made.layers]
    assert layout.in_order


def test_the_same_image_has_one_form_whatever_file_it_came_in() -> None:
    """Names, order, owners, times, annotations and what an engine wrote beside the blobs: none of it is given on."""
    made = image()
    _, form = read(tar_of(made.files()))
    assert read(form)[1] == form
    names = {f"./{name}": content for name, content in reversed(made.files().items())}
    named = made.index(**{"io.containerd.image.name": "docker.io/library/ubuntu:latest"})
    compat = [
        {
            "Config": blob(made.config()),
            "RepoTags": ["ubuntu:latest"],
            "Layers": [blob(raw) for raw in made.layers],
        }
    ]
    names |= {"./index.json": named, "./manifest.json": json.dumps(compat).encode()}
    root = tarfile.TarInfo(".")
    root.type = tarfile.DIRTYPE
    layout, other = read(tar_of(names, root))
    assert b"ubuntu" not in other
    assert not layout.in_order
    sort = {name: content for name, content in entries(other).items() if name.startswith("blobs/")}
    assert {**sort, **entries(form)} == entries(form)
    assert entries(other) == entries(form)
    assert list(entries(form)) == [*sorted(sort), "index.json", "manifest.json", "oci-layout"]


def entries(raw: bytes) -> dict[str, bytes]:
    """The files of a tar, as the standard library reads it."""
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}  # type: ignore[union-attr]


@pytest.mark.parametrize("at", ["layer", "config", "manifest"])
def test_one_changed_byte_is_found_by_the_blob_s_own_digest(at: str) -> None:
    """Whatever the byte is in, the blob is named with both digests."""
    made = image()
    files = made.files()
    raw = {"layer": made.layers[2], "config": made.config(), "manifest": made.manifest()}[at]
    changed = raw[:40] + bytes([raw[40] ^ 1]) + raw[41:]
    files[blob(raw)] = changed
    assert refused(tar_of(files)) == [
        ("blob differs", f"{WHERE}: {blob(raw)}", f"sha256 {digest_of(changed).removeprefix('sha256:')}")
    ]


def test_a_file_that_was_cut_off_is_damaged_wherever_it_was_cut() -> None:
    """At every block, and inside of blocks; only the zeros at the very end may be fewer."""
    raw = tar_of(image().files())
    content = len(raw.rstrip(b"\0"))
    for end in {*range(0, content, 512), content - 1, 100}:
        assert [what for what, _, _ in refused(raw[:end])] == ["damaged"], end


def link(name: str, kind: bytes, target: str = "../../../etc/passwd") -> tarfile.TarInfo:
    """An entry that is no plain file."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    ("member", "found"),
    [
        (link("blobs/sha256/" + "a" * 64, tarfile.SYMTYPE), "an entry of type b'2'"),
        (link("index.json", tarfile.LNKTYPE, "oci-layout"), "an entry of type b'1'"),
        (link("index.json", tarfile.CHRTYPE), "an entry of type b'3'"),
        (link("oci-layout", tarfile.FIFOTYPE), "an entry of type b'6'"),
        (link("pax", tarfile.XHDTYPE), "an entry of type b'x'"),
        (link("pax", tarfile.XGLTYPE), "an entry of type b'g'"),
        (link("long", tarfile.GNUTYPE_LONGNAME), "an entry of type b'L'"),
        (tarfile.TarInfo("repositories"), "another name"),
        (tarfile.TarInfo("blobs/sha512/" + "a" * 64), "another name"),
        (tarfile.TarInfo("blobs/sha256/" + "A" * 64), "another name"),
        (tarfile.TarInfo("blobs/sha256/" + "a" * 64 + "/x"), "another name"),
        (tarfile.TarInfo("/index.json"), "another name"),
        (tarfile.TarInfo("../index.json"), "another name"),
        (link("blobs/../..", tarfile.DIRTYPE), "another name"),
        (tarfile.TarInfo("index.json"), "stands twice"),
        (tarfile.TarInfo("./index.json"), "stands twice"),
    ],
)  # fmt: skip
def test_what_has_no_place_in_a_layout_is_refused_by_name(member: tarfile.TarInfo, found: str) -> None:
    """Links, devices, extended headers, other names, a name twice."""
    raw = tar_of(image().files())
    with_it = (
        raw[: len(raw.rstrip(b"\0")) // 512 * 512 + 512] + member.tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    )
    said = refused(with_it)
    assert len(said) == 1
    assert (said[0][0], said[0][2]) == ("unsafe", found)
    assert said[0][1] in {f"{WHERE}: {member.name}", f"{WHERE}: {member.name.removeprefix('./')}"}


def test_all_faults_are_told_together() -> None:
    """Two changed blobs and a stranger, in one refusal."""
    made = image()
    files = made.files()
    files[blob(made.layers[0])] = b"0"
    files[blob(made.layers[2])] = b"2"
    said = refused(tar_of(files, tarfile.TarInfo("stranger")))
    assert sorted(what for what, _, _ in said) == ["blob differs", "blob differs", "unsafe"]


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A file whose manifest was changed, and named anew by the index: every digest is right."""
    made = image()
    value = json.loads(made.manifest())
    change(value)
    return with_manifest(made, json.dumps(value).encode())


def with_manifest(made: Image, raw: bytes) -> bytes:
    """A file whose index names the manifest `raw`."""
    files = made.files()
    del files[blob(made.manifest())]
    entry = descriptor(raw, MANIFEST)
    index = {"schemaVersion": 2, "manifests": [entry]}
    return tar_of({blob(raw): raw, **files, "index.json": json.dumps(index).encode()})


@pytest.mark.parametrize(
    ("change", "what", "found"),
    [
        (lambda m: m["layers"].pop(), "layers differ", "another number, or none"),
        (lambda m: m.update(layers="x"), "layers differ", "another number, or none"),
        (lambda m: m["layers"][0].update(size=1), "size differs", "10240 bytes"),
        (lambda m: m["layers"][0].update(size=True), "size differs", "10240 bytes"),
        (lambda m: m["layers"][0].update(digest="sha256:x"), "no digest", "sha256:x"),
        (lambda m: m["layers"][0].update(digest=["a"]), "no digest", "['a']"),
        (lambda m: m["layers"][0].update(mediaType=[]), "unknown kind", "[]"),
        (lambda m: m["layers"][0].pop("mediaType"), "unknown kind", "None"),
        (lambda m: m["layers"][0].update(mediaType=LAYER.replace("layer", "layer.nondistributable")), "unknown kind",
         LAYER.replace("layer", "layer.nondistributable")),
        (lambda m: m["layers"][0].update(urls=["x:y"]), "content lies elsewhere", "['x:y']"),
        (lambda m: m["layers"].__setitem__(0, m["layers"][2]), "layers differ", None),
        (lambda m: m["layers"][0].update(digest="sha256:" + "f" * 64), "size differs", "no bytes"),
        (lambda m: m.update(config=None), "no descriptor", "NoneType"),
        (lambda m: m["config"].update(mediaType="application/json"), "unknown kind", "application/json"),
        (lambda m: m.update(mediaType=DOCKER[MANIFEST]), "kinds differ", DOCKER[MANIFEST]),
    ],
)  # fmt: skip
def test_a_manifest_that_says_other_than_the_blobs_is_refused(
    change: Callable[[dict[str, Any]], object], what: str, found: str | None
) -> None:
    """Every digest is right, and still it is not one image."""
    said = refused(changed(change))
    assert what in {entry[0] for entry in said}
    assert found is None or found in {entry[2] for entry in said}


def test_a_blob_that_nothing_names_is_refused() -> None:
    """Nobody has said what it is for."""
    made = image()
    assert refused(tar_of({**made.files(), blob(b"more"): b"more"})) == [
        ("blob of nothing", f"{WHERE}: {blob(b'more')}", "another")
    ]


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("index.json", b"{", "not JSON"),
        ("index.json", b"[]", "not JSON"),
        ("index.json", b"[" * 100_000, "not JSON"),
        ("index.json", b"\xff", "not JSON"),
        ("index.json", b'{"manifests": [], "manifests": []}', "not JSON"),
        ("index.json", b'{"manifests": []}', "not one image"),
        ("index.json", b'{"manifests": [{}, {}]}', "not one image"),
        ("index.json", b'{"manifests": [3]}', "not one image"),
        ("index.json", b'{"manifests": [{"digest": 3}]}', "no digest"),
        ("index.json", b" " * (1 << 20) + b"{}", "file is missing"),
        ("oci-layout", b'{"imageLayoutVersion": "2.0.0"}', "not an image layout"),
        ("manifest.json", b"[]", "not one image"),
        ("manifest.json", b'[{"Config": "x", "Layers": []}]', "not one image"),
        ("manifest.json", b"[3]", "not one image"),
    ],
)
def test_the_files_beside_the_blobs_are_untrusted_too(name: str, content: bytes, what: str) -> None:
    """Damaged, deep, double, of another version, or of another image than the index says."""
    said = refused(tar_of({**image().files(), name: content}))
    assert what in {entry[0] for entry in said}
    assert all(name in place for _, place, _ in said)


@pytest.mark.parametrize("name", ["index.json", "oci-layout"])
def test_a_file_that_lacks_a_part_is_refused_with_its_name(name: str) -> None:
    """No index, or no version: no layout."""
    files = image().files()
    del files[name]
    assert ("file is missing", f"{WHERE}: {name}", "nothing") in refused(tar_of(files))


def test_a_compressed_layer_is_what_its_media_type_says() -> None:
    """The compression is known from the manifest; what it unpacks to is the engine's to compare."""
    made = image()
    made.layer_kind, made.diff_ids = f"{LAYER}+zstd", ["sha256:" + "c" * 64] * 3
    layout, _ = read(tar_of(made.files()))
    assert {(entry.compression, entry.diff_id) for entry in layout.layers} == {("zstd", "sha256:" + "c" * 64)}


def test_more_than_an_image_can_have_is_refused_early() -> None:
    """Very many blobs, strangers, or zeros at the end do not keep a reader busy or fill its memory."""
    many = {f"blobs/sha256/{number:064x}": b"" for number in range(2000)}
    assert ("damaged", "more") in {(what, found) for what, _, found in refused(tar_of(many))}
    strangers = [tarfile.TarInfo(f"stranger-{number}") for number in range(2000)]
    assert ("damaged", "more") in {(what, found) for what, _, found in refused(tar_of({}, *strangers))}
    assert [what for what, _, _ in refused(tar_of(image().files()) + bytes(2 << 20))] == ["damaged"]
    assert [what for what, _, _ in refused(tar_of(image().files()) + b"x")] == ["damaged"]


def test_labels_that_are_none_or_nonsense_are_no_labels() -> None:
    """What is not text is left out; CONFIG is only a name here."""
    made = image()
    nonsense: tuple[Any, ...] = (None, [], {"a": 3})
    for labels in nonsense:
        made.labels = labels
        assert read(tar_of(made.files()))[0].labels == {}
    assert CONFIG in made.manifest().decode()
