"""An image as the engine has it: found by its digest, known by Ferry's own tag.

Promises: an image is one by the digest of its manifest, never by a name; a tag that another image has stays its own;
what the engine or its socket says is told as a fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import docker
import docker.errors
import requests.exceptions

from runner.errors import ExitCode, Fault, Refusal

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclasses.dataclass(frozen=True)
class Present:
    """An image that lies in the engine: its manifest's digest, and the tag that Ferry knows it by."""

    digest: str
    tag: str


def present(client: docker.DockerClient, digest: str) -> Present:
    """Return the image with the manifest digest `digest`, as the engine has it. Raises `Refusal`: absent, or not Ferry's."""
    fix = (
        "`ferry image build NAME`, `load` or `pull` it first; `docker image ls --digests` shows what is there"
    )
    found = inspected(client, digest)
    if found is None:
        raise Refusal(Fault("image is not in the engine", digest, "an image with this digest", "none", fix))
    descriptor = found.get("Descriptor") or {}
    if descriptor.get("digest") != digest:
        fix = "use an engine with the containerd image store: others do not keep an image's manifest"
        said = str(descriptor.get("digest") or found.get("Id"))
        raise Refusal(Fault("engine does not know the manifest", digest, digest, said, fix))
    return Present(digest, tag_of(labels_of(found), f"image {digest}"))


def labels_of(found: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the labels of an image, from what the engine says of it."""
    return (found.get("Config") or {}).get("Labels") or {}


def tag_of(labels: Mapping[str, str], where: str) -> str:
    """Return the tag `ferry/NAME:INPUTS` of an image with these labels. Raises `Refusal` if they are not Ferry's."""
    name, inputs = labels.get("ferry.name", ""), labels.get("ferry.inputs", "")
    if _NAME.fullmatch(name) and DIGEST.fullmatch(inputs):
        return f"ferry/{name}:{inputs.removeprefix('sha256:')[:12]}"
    found = f"ferry.name={name or 'none'}, ferry.inputs={inputs or 'none'}"
    fix = "ship other images with `docker`: a run takes only what `ferry image build` has made"
    raise Refusal(Fault("not an image of Ferry's", where, "labels ferry.name and ferry.inputs", found, fix))


def size_bytes(client: docker.DockerClient, digest: str) -> int:
    """Return how many bytes the image has, about: what `save` will read."""
    return int((inspected(client, digest) or {}).get("Size") or 0)


def tagged(client: docker.DockerClient, found: Mapping[str, Any], digest: str, where: str) -> Present:
    """Give the image that the engine has as `found` Ferry's tag. Raises `Refusal`, naming `where`, if it is not Ferry's.

    Where another image has the tag, that one keeps it, since a run may be pinned to it; this one's is longer then.
    """
    tag = tag_of(labels_of(found), where)
    holder = inspected(client, tag)
    if holder is not None and holder.get("Id") != found.get("Id"):
        tag += f"-{digest.removeprefix('sha256:')[:12]}"
    with asking("tag", tag):
        repository, _, name = tag.partition(":")
        client.api.tag(str(found.get("Id")), repository, name)
    return Present(digest, tag)


def inspected(client: docker.DockerClient, reference: str) -> dict[str, Any] | None:
    """Return what the engine says of an image; None if it has none of that digest or name. Raises `Refusal`."""
    api: Any = client.api
    with asking("inspect", reference):
        try:
            return dict(api.inspect_image(reference))
        except docker.errors.NotFound:
            return None


def raise_on(event: Mapping[str, Any], doing: str) -> None:
    """Raise `Refusal` if `event`, of an answer that comes in parts, tells of an error; `doing` says what was done."""
    said = event.get("errorDetail") or event.get("error")
    if said:
        text = str(said.get("message")) if isinstance(said, dict) else str(said)
        fix = "see what the engine says; `docker login` for a registry that asks who you are"
        raise Refusal(Fault("engine refuses", doing, "to succeed", text, fix), exit_code=ExitCode.FAILED)


@contextlib.contextmanager
def asking(doing: str, what: str) -> Iterator[None]:
    """Tell what the engine or its socket says as a fault."""
    try:
        yield
    except (
        docker.errors.DockerException,
        requests.exceptions.RequestException,
        json.JSONDecodeError,
    ) as error:
        fix = "see what the engine says; `just engine` starts one"
        fault = Fault("engine refuses", f"{doing} {what}", "to succeed", str(error), fix)
        raise Refusal(fault, exit_code=ExitCode.FAILED) from error
