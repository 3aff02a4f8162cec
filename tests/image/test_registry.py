"""An image through a real registry: pushed and read back, pulled by digest, never by a tag."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import requests

from runner import image_file, image_registry
from runner.errors import Refusal
from runner.image_present import Present
from tests.conftest import PROJECT
from tests.image.layouts import DOCKER, MANIFEST, Image, digest_of, image, layer, tar_of
from tests.image.registry import registry


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the registry keeps its blobs."""
    return tmp_path_factory.mktemp("registry's blobs")


@pytest.fixture(scope="module")
def host(storage: Path) -> Iterator[str]:
    """A registry's HOST:PORT."""
    with registry(storage) as found:
        yield found


@pytest.fixture
def repository(host: str, client: docker.DockerClient) -> Iterator[str]:
    """A repository that nobody has used; what the engine knows under its name is forgotten."""
    name = f"{host}/ship/{secrets.token_hex(4)}"
    yield name
    for found in client.images.list(filters={"reference": f"{name}"}):
        client.api.remove_image(str(found.id), force=True)


@pytest.fixture
def made(client: docker.DockerClient) -> Iterator[Image]:
    """An image that no engine knows; what the test brings into the engine is removed."""
    name = f"ship-{secrets.token_hex(4)}"
    yield image(name, text=name)
    for found in client.images.list(filters={"label": f"ferry.name={name}"}):
        client.api.remove_image(str(found.id), force=True)


def load(client: docker.DockerClient, folder: Path, made: Image) -> Present:
    """Bring `made` into the engine."""
    path = folder / f"{made.digest[7:19]}.tar"
    path.write_bytes(tar_of(made.files()))
    with image_file.image_file(path) as file:
        layout = image_file.verify(file, path, made.digest)
        return image_file.load(client, file, path, layout, lambda _: None)


def ignore(_: object) -> None:
    """Nobody watches."""


def forget(client: docker.DockerClient, made: Image) -> None:
    """Remove `made` from the engine, under all of its names."""
    client.api.remove_image(made.digest, force=True)
    assert names(client, made) == []


def names(client: docker.DockerClient, made: Image) -> list[str]:
    """All names of `made` in the engine."""
    found = client.images.list(filters={"label": f"ferry.name={made.labels['ferry.name']}"})
    return sorted(name for entry in found for name in [*entry.tags, *entry.attrs["RepoDigests"]])


def raw_manifest(repository: str, reference: str) -> bytes:
    """The manifest's bytes, from the registry itself."""
    host, _, path = repository.partition("/")
    accept = {"Accept": f"{MANIFEST}, {DOCKER[MANIFEST]}"}
    answer = requests.get(f"http://{host}/v2/{path}/manifests/{reference}", headers=accept, timeout=30)
    answer.raise_for_status()
    return answer.content


@pytest.mark.engine
@pytest.mark.parametrize("kinds", [{}, DOCKER], ids=["oci", "docker"])
def test_an_image_goes_through_a_registry_and_stays_the_same(
    client: docker.DockerClient, made: Image, repository: str, tmp_path: Path, kinds: dict[str, str]
) -> None:
    """The registry holds the very manifest; pulled where the image was not, it is the same image under Ferry's tag."""
    made.kinds = kinds
    loaded = load(client, tmp_path, made)
    before = names(client, made)
    reference = image_registry.push(client, loaded, repository, None, ignore)
    assert reference == f"{repository}@{made.digest}"
    assert names(client, made) == before
    for name in (made.digest, "1" * 12):
        assert raw_manifest(repository, name) == made.manifest()
    assert image_registry.push(client, loaded, repository, None, ignore) == reference
    forget(client, made)
    events: list[object] = []
    assert image_registry.pull(client, reference, events.append) == loaded
    assert events
    assert loaded.tag in names(client, made)
    assert client.images.get(made.digest).id == made.digest
    assert image_registry.pull(client, reference, ignore) == loaded


@pytest.mark.engine
def test_a_tag_is_not_taken_from_another_image(
    client: docker.DockerClient, made: Image, repository: str, tmp_path: Path
) -> None:
    """Neither in the registry nor in the engine; another tag is given by hand."""
    first = load(client, tmp_path, made)
    image_registry.push(client, first, repository, None, ignore)
    other = image(made.labels["ferry.name"], text="another")
    second = load(client, tmp_path, other)
    with pytest.raises(Refusal) as caught:
        image_registry.push(client, second, repository, "1" * 12, ignore)
    assert str(caught.value) == (
        f"tag is taken: {repository}:{'1' * 12}\n    expected none, or {other.digest}\n    found    {made.digest}\n"
        "    fix      give --tag ANOTHER, or remove it from the registry"
    )
    assert raw_manifest(repository, "1" * 12) == made.manifest()
    with pytest.raises(requests.HTTPError, match="404"):
        raw_manifest(repository, other.digest)
    client.api.tag(made.digest, repository, "mine")
    with pytest.raises(Refusal, match="tag is taken"):
        image_registry.push(client, second, repository, "mine", ignore)
    assert client.images.get(f"{repository}:mine").id == made.digest
    assert image_registry.push(client, second, repository, "other", ignore) == f"{repository}@{other.digest}"
    assert raw_manifest(repository, "other") == other.manifest()


@pytest.mark.engine
def test_what_is_not_ferry_s_is_removed_again(
    client: docker.DockerClient, made: Image, repository: str, tmp_path: Path
) -> None:
    """A digest says which bytes, and not that they are an environment; one that was there before stays."""
    stranger = image(text=secrets.token_hex(4))
    stranger.labels = {}
    api: Any = client.api
    list(api.load_image(tar_of(stranger.files())))
    api.tag(stranger.digest, repository, "x")
    assert "error" not in str(list(api.push(repository, tag="x", stream=True, decode=True)))
    reference = f"{repository}@{stranger.digest}"
    with pytest.raises(Refusal, match="not an image of Ferry's"):
        image_registry.pull(client, reference, ignore)
    assert client.images.get(stranger.digest).id == stranger.digest
    api.remove_image(stranger.digest, force=True)
    with pytest.raises(Refusal, match="not an image of Ferry's"):
        image_registry.pull(client, reference, ignore)
    with pytest.raises(docker.errors.ImageNotFound):
        client.images.get(stranger.digest)


@pytest.mark.engine
def test_a_damaged_registry_gives_no_image(
    client: docker.DockerClient, made: Image, repository: str, tmp_path: Path, storage: Path
) -> None:
    """A layer that was changed in the registry's own storage, or is gone, is found; the engine stays without the image."""
    made.layers.append(layer({"opt/c": secrets.token_bytes(4000)}))
    reference = image_registry.push(client, load(client, tmp_path, made), repository, None, ignore)
    forget(client, made)
    digest = json.loads(made.manifest())["layers"][-1]["digest"].removeprefix("sha256:")
    (data,) = storage.glob(f"**/blobs/sha256/{digest[:2]}/{digest}/data")
    content = data.read_bytes()
    data.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    with pytest.raises(Refusal) as caught:
        image_registry.pull(client, reference, ignore)
    assert digest in caught.value.faults[0].found
    assert names(client, made) == []


@pytest.mark.engine
def test_a_registry_that_gives_another_manifest_back_is_found_out(
    client: docker.DockerClient,
    made: Image,
    repository: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bytes are hashed, whatever it says that they are; here a `docker` stands in that reads one byte more."""
    loaded = load(client, tmp_path, made)
    real = shutil.which("docker")
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "docker"
    stand_in.write_text(f'#!/bin/sh\n"{real}" "$@" && case $* in *@*) echo;; esac\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(Refusal) as caught:
        image_registry.push(client, loaded, repository, None, ignore)
    (fault,) = caught.value.faults
    found = digest_of(made.manifest() + b"\n")
    assert (fault.what, fault.expected, fault.found) == (
        "registry gives another manifest", made.digest, found,
    )  # fmt: skip


@pytest.mark.engine
def test_a_registry_that_does_not_answer_is_told(
    client: docker.DockerClient, made: Image, tmp_path: Path
) -> None:
    """No traceback, and no name left in the engine."""
    loaded = load(client, tmp_path, made)
    before = names(client, made)
    for act in (
        lambda: image_registry.push(client, loaded, "127.0.0.1:9/x", None, ignore),
        lambda: image_registry.pull(client, f"127.0.0.1:9/x@sha256:{'0' * 64}", ignore),
    ):
        with pytest.raises(Refusal) as caught:
            act()
        assert [fault.what for fault in caught.value.faults] == ["engine refuses"]
    assert names(client, made) == before


@pytest.mark.engine
def test_the_command_line_pushes_and_pulls(
    client: docker.DockerClient, made: Image, repository: str, tmp_path: Path
) -> None:
    """A plan first; then the reference that the other server pulls, as text and as JSON."""
    loaded = load(client, tmp_path, made)
    reference = f"{repository}@{made.digest}"
    planned = ferry("push", made.digest, repository, "--dry-run")
    assert planned.stdout == f"would push {loaded.tag} to {reference}\n", planned.stderr
    with pytest.raises(requests.HTTPError, match="404"):
        raw_manifest(repository, made.digest)
    assert ferry("push", made.digest, repository).stdout == f"PUSHED {reference}\n"
    forget(client, made)
    pulled = ferry("pull", reference, "--json")
    assert json.loads(pulled.stdout) == {"digest": made.digest, "tag": loaded.tag}, pulled.stderr
    by_tag = ferry("pull", f"{repository}:{'1' * 12}")
    assert (by_tag.returncode, "a tag may name another image tomorrow" in by_tag.stderr) == (3, True)


def ferry(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `ferry image ...`."""
    command = [sys.executable, "-m", "runner", "image", *words]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(
    "text",
    ["x", "x:tag", "x@sha256:12", "x@sha256:" + "A" * 64, "X@sha256:" + "a" * 64, "../x@sha256:" + "a" * 64,
     "@sha256:" + "a" * 64, "h:99999999/x@sha256:" + "a" * 64, "x:tag@sha256:" + "a" * 64, "x@sha256:" + "a" * 64 + "\n"],
)  # fmt: skip
def test_only_a_digest_is_pulled(text: str) -> None:
    """Tags, half digests, names that are none."""
    with pytest.raises(Refusal, match="no digest"):
        image_registry.reference_of(text)


@pytest.mark.parametrize(
    "text", ["cpu", "a/b", "registry.example/team/ferry-cpu", "localhost:5000/x", "[::1]:5000/x__y/z-1.2"]
)
def test_names_of_repositories(text: str) -> None:
    """With a host, a port, or neither."""
    assert image_registry.repository_of(text) == text
    assert image_registry.reference_of(f"{text}@sha256:{'a' * 64}") == (text, "sha256:" + "a" * 64)


@pytest.mark.parametrize("text", ["", "X", "a:b", "a/", "/a", "a//b", "a@b", "--tag", "h:x/a", "a\n", "é"])
def test_names_that_are_no_repository(text: str) -> None:
    """Nothing of it reaches a registry, or a command as an option."""
    with pytest.raises(Refusal, match="no repository"):
        image_registry.repository_of(text)
