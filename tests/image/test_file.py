"""An image into a file and out of it: the same bytes each time, and nothing in the engine that was not verified."""

from __future__ import annotations

import gzip
import io
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import docker
import docker.errors
import pytest
import zstandard

from runner import image_file, image_present
from runner.aside import growing_file
from runner.errors import Fault, Refusal
from runner.image_present import Present, tag_of
from tests.conftest import PROJECT
from tests.image.layouts import INPUTS, Image, image, tar_of


def silent(_: int) -> None:
    """Nobody watches."""


@pytest.fixture
def made(client: docker.DockerClient) -> Iterator[Image]:
    """An image that no engine knows; what the test brings into the engine is removed."""
    name = f"ship-{secrets.token_hex(4)}"
    yield image(name, text=name)
    for found in client.images.list(filters={"label": f"ferry.name={name}"}):
        client.api.remove_image(str(found.id), force=True)


def write(path: Path, raw: bytes) -> Path:
    """`path`, with `raw` in it."""
    path.write_bytes(raw)
    return path


def load(client: docker.DockerClient, path: Path, digest: str | None = None) -> Present:
    """As `ferry image load`."""
    with image_file.image_file(path) as file:
        layout = image_file.verify(file, path, digest)
        return image_file.load(client, file, path, layout, silent)


def in_engine(client: docker.DockerClient, made: Image) -> list[str]:
    """The tags of `made` in the engine; [] if it is not there."""
    return [tag for found in client.images.list(filters={"label": f"ferry.name={made.labels['ferry.name']}"})
            for tag in found.tags or ["no tag"]]  # fmt: skip


def left(folder: Path) -> list[str]:
    """What lies in the folder."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.engine
def test_an_image_goes_through_a_file_and_stays_the_same(
    client: docker.DockerClient, made: Image, tmp_path: Path
) -> None:
    """Saved twice the same bytes; loaded where it was not, the same digest, under the tag that Ferry gives."""
    tag = f"ferry/{made.labels['ferry.name']}:{'1' * 12}"
    loaded = load(client, write(tmp_path / "by hand.tar", tar_of(made.files())), made.digest)
    assert loaded == Present(made.digest, tag)
    one, two = tmp_path / "one.tar", tmp_path / "two.tar"
    for target in (one, two):
        assert image_file.save(client, loaded, target, silent).digest == made.digest
    assert one.read_bytes() == two.read_bytes()
    client.api.remove_image(tag)
    assert in_engine(client, made) == []
    assert load(client, one) == loaded
    assert in_engine(client, made) == [tag]
    assert image_file.save(client, loaded, tmp_path / "three.tar", silent).digest == made.digest
    assert (tmp_path / "three.tar").read_bytes() == one.read_bytes()
    assert left(tmp_path) == ["by hand.tar", "one.tar", "three.tar", "two.tar"]


@pytest.mark.engine
def test_a_compressed_file_is_the_same_image(
    client: docker.DockerClient, made: Image, tmp_path: Path
) -> None:
    """Made by Ferry as zstd, or by anybody as gzip."""
    raw = tar_of(made.files())
    zipped = write(tmp_path / "x.tar.gz", gzip.compress(raw[:5000]) + gzip.compress(raw[5000:]))
    loaded = load(client, zipped)
    for name in ("one.tar.zst", "two.tar.zst", "plain.tar"):
        image_file.save(client, loaded, tmp_path / name, silent)
    packed = (tmp_path / "one.tar.zst").read_bytes()
    assert packed == (tmp_path / "two.tar.zst").read_bytes()
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed)) as reader:
        assert reader.read() == (tmp_path / "plain.tar").read_bytes()
    client.api.remove_image(loaded.tag)
    assert load(client, tmp_path / "one.tar.zst", made.digest) == loaded


@pytest.mark.engine
def test_a_name_in_the_file_reaches_no_engine(
    client: docker.DockerClient, made: Image, tmp_path: Path
) -> None:
    """A file that calls itself as another image would take that one's tag away."""
    victim = f"{made.labels['ferry.name']}/victim:1"
    files = made.files() | {"index.json": made.index(**{"io.containerd.image.name": f"docker.io/{victim}"})}
    loaded = load(client, write(tmp_path / "x.tar", tar_of(files)))
    assert in_engine(client, made) == [loaded.tag]


@pytest.mark.engine
def test_a_tag_that_another_image_has_stays_its_own(
    client: docker.DockerClient, made: Image, tmp_path: Path
) -> None:
    """The same inputs, another digest: both are there, the second under a longer tag, also when it is loaded again."""
    first = load(client, write(tmp_path / "first.tar", tar_of(made.files())))
    other = image(made.labels["ferry.name"], text="another")
    path = write(tmp_path / "other.tar", tar_of(other.files()))
    for _ in range(2):
        second = load(client, path)
        assert second == Present(other.digest, f"{first.tag}-{other.digest[7:19]}")
        assert sorted(in_engine(client, made)) == [first.tag, second.tag]
        assert client.images.get(first.tag).id == made.digest


@pytest.mark.engine
def test_a_file_that_changes_after_it_was_verified_gives_the_engine_no_image(
    client: docker.DockerClient, made: Image, tmp_path: Path
) -> None:
    """Neither one changed byte nor another whole image in the same place."""
    path = write(tmp_path / "x.tar", tar_of(made.files()))
    good = path.read_bytes()
    name = made.labels["ferry.name"]
    at = good.index(b"hello" if b"hello" in good else name.encode())
    for bad, what in (
        (good[:at] + b"X" + good[at + 1 :], "blob differs"),
        (tar_of(image(name, text="another").files()), "another image"),
        (good[: len(good) // 2], "damaged"),
    ):
        path.write_bytes(good)
        with image_file.image_file(path) as file:
            layout = image_file.verify(file, path, None)
            path.write_bytes(bad)
            with pytest.raises(Refusal) as caught:
                image_file.load(client, file, path, layout, silent)
        assert what in {fault.what for fault in caught.value.faults}
        assert in_engine(client, made) == []


@pytest.mark.engine
def test_a_file_that_is_there_is_not_written_over(
    client: docker.DockerClient, made: Image, tmp_path: Path
) -> None:
    """Not even by the same image; and an image that is gone leaves no file."""
    loaded = load(client, write(tmp_path / "x.tar", tar_of(made.files())))
    (tmp_path / "kept").symlink_to("nowhere")
    for name in ("x.tar", "kept"):
        with pytest.raises(Refusal, match="file exists"):
            image_file.save(client, loaded, tmp_path / name, silent)
    client.api.remove_image(loaded.tag)
    with pytest.raises(Refusal, match="engine refuses"):
        image_file.save(client, loaded, tmp_path / "new.tar", silent)
    assert left(tmp_path) == ["kept", "x.tar"]


@pytest.mark.engine
def test_the_command_line_saves_and_loads(client: docker.DockerClient, made: Image, tmp_path: Path) -> None:
    """By digest, as JSON, with a plan that changes nothing; a refusal is one, without a traceback."""
    path = write(tmp_path / "x.tar", tar_of(made.files()))
    wrong = ferry("load", str(path), "--digest", "sha256:" + "0" * 64)
    assert (wrong.returncode, "another image" in wrong.stderr) == (3, True)
    assert ferry("load", str(path), "--dry-run").returncode == 0
    assert in_engine(client, made) == []
    loaded = ferry("load", str(path), "--digest", made.digest, "--json")
    assert loaded.returncode == 0, loaded.stderr
    said = json.loads(loaded.stdout)
    assert (said["digest"], said["tag"]) == (made.digest, in_engine(client, made)[0])
    saved = ferry("save", made.digest, "-o", str(tmp_path / "y.tar"))
    assert saved.returncode == 0, saved.stderr
    assert saved.stdout == f"SAVED {tmp_path}/y.tar digest={made.digest} config={said['config']}\n"
    assert left(tmp_path) == ["x.tar", "y.tar"]


def ferry(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `ferry image ...`."""
    command = [sys.executable, "-m", "runner", "image", *words]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "damaged"),
        (b"no tar at all" * 100, "damaged"),
        (b"\x28\xb5\x2f\xfd no zstd", "damaged"),
        (b"\x1f\x8b no gzip", "damaged"),
        (zstandard.compress(tar_of(image().files()))[:-200], "damaged"),
        (gzip.compress(tar_of(image().files()))[:-20], "damaged"),
        (gzip.compress(tar_of(image().files()))[:-8] + bytes(8), "damaged"),
    ],
)
def test_a_file_that_is_no_image_is_damaged(tmp_path: Path, content: bytes, what: str) -> None:
    """Empty, text, and compressed streams that are cut off or wrong; no traceback."""
    path = write(tmp_path / "x.tar", content)
    with image_file.image_file(path) as file, pytest.raises(Refusal) as caught:
        image_file.verify(file, path, None)
    assert {fault.what for fault in caught.value.faults} == {what}


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe, a folder, nothing at all."""
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "absent"):
        with pytest.raises(Refusal, match="cannot be read"), image_file.image_file(tmp_path / name):
            pass


@pytest.mark.parametrize(
    "labels",
    [{}, {"ferry.name": "cpu"}, {"ferry.name": "../x", "ferry.inputs": INPUTS}, {"ferry.name": "cpu:1", "ferry.inputs": INPUTS},
     {"ferry.name": "cpu", "ferry.inputs": "sha256:" + "g" * 64}, {"ferry.name": "cpu", "ferry.inputs": "sha256:11"}],
)  # fmt: skip
def test_only_images_of_ferry_s_are_loaded(tmp_path: Path, labels: dict[str, str]) -> None:
    """A tag is made of labels, which anybody may write: they must have their form, or nothing is loaded."""
    made = image()
    made.labels = labels
    path = write(tmp_path / "x.tar", tar_of(made.files()))
    with image_file.image_file(path) as file, pytest.raises(Refusal) as caught:
        image_file.verify(file, path, None)
    (fault,) = caught.value.faults
    name, inputs = labels.get("ferry.name", "none"), labels.get("ferry.inputs", "none")
    assert fault == Fault(
        "not an image of Ferry's", str(path), "labels ferry.name and ferry.inputs",
        f"ferry.name={name}, ferry.inputs={inputs}",
        "ship other images with `docker`: a run takes only what `ferry image build` has made",
    )  # fmt: skip
    assert tag_of({"ferry.name": "cpu", "ferry.inputs": INPUTS}, "x") == "ferry/cpu:" + "1" * 12


class Engine:
    """An engine without the containerd store: it knows an image by its configuration, and answers to that only."""

    def __init__(self, found: dict[str, object]) -> None:
        self.api, self._found = self, found
        self.tags: list[tuple[str, str, str]] = []

    def inspect_image(self, reference: str) -> dict[str, object]:
        """What it says of an image."""
        if reference != self._found["Id"]:
            raise docker.errors.NotFound(reference)
        return self._found

    def tag(self, *words: str) -> None:
        """Note the tag."""
        self.tags.append(words)  # type: ignore[arg-type]


def test_an_engine_that_knows_configurations_only_loads_and_does_not_save(tmp_path: Path) -> None:
    """What it would save has another manifest; what it holds is still the image, by its configuration."""
    made = image()
    path = write(tmp_path / "x.tar", tar_of(made.files()))
    with image_file.image_file(path) as file:
        layout = image_file.verify(file, path, None)
        engine = Engine({"Id": layout.config, "Config": {"Labels": made.labels}})
        loaded = image_file.load(engine, file, path, layout, silent)  # type: ignore[arg-type]
    assert loaded == Present(made.digest, "ferry/tiny:" + "1" * 12)
    assert engine.tags == [(layout.config, "ferry/tiny", "1" * 12)]
    with pytest.raises(Refusal, match="engine does not know the manifest"):
        image_present.present(engine, layout.config)  # type: ignore[arg-type]


def test_a_growing_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """After a failure nothing is there; what a killed process left is swept, what a living one writes is not."""
    target = tmp_path / "x"
    with pytest.raises(TypeError), growing_file(target, "saving") as file:
        file.write("no bytes")  # type: ignore[call-overload]
    assert left(tmp_path) == []
    write(tmp_path / ".x.saving-deadbeef", b"of a killed process")
    with growing_file(target, "saving") as slow:
        slow.write(b"slow")
        assert len(left(tmp_path)) == 1
        with growing_file(target, "saving") as quick:
            quick.write(b"quick")
        assert target.read_bytes() == b"quick"
        assert len(left(tmp_path)) == 2
    assert (left(tmp_path), target.read_bytes()) == (["x"], b"slow")
