"""An image in a registry: pushed and read back, pulled by digest.

Promises: what a registry gives under the printed reference is that image, byte for byte of its manifest, and so of
everything that it names; nothing is pulled by a tag; no tag is taken from another image. Credentials are those of the
Docker client (`docker login`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import docker
import docker.errors

from runner import process
from runner.errors import Fault, Refusal
from runner.image_present import DIGEST, Present, asking, inspected, raise_on, tagged
from runner.inside.digests import sha256_bytes

OnEvent = Callable[[Mapping[str, Any]], None]

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
# As the distribution specification has it, in front an optional host with an optional port.
_REPOSITORY = re.compile(
    r"(?:(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?/)?"
    r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*"
)


def repository_of(text: str) -> str:
    """Return `text` if it names a repository, without tag or digest. Raises `Refusal`."""
    if _REPOSITORY.fullmatch(text):
        return text
    fix = "as in registry.example/team/ferry-cpu; the tag follows from the image, or give --tag"
    raise Refusal(Fault("no repository", "REPOSITORY", "[HOST[:PORT]/]PATH in small letters", text, fix))


def push(
    client: docker.DockerClient, image: Present, repository: str, tag: str | None, on_event: OnEvent
) -> str:
    """Push the image to `repository` under `tag` (by default that of its inputs); return `REPOSITORY@sha256:...`.

    Read back afterwards: the registry gives the manifest under the digest and under the tag. A tag that another image
    has is refused, since whoever pins that one would lose it. Raises `Refusal`.
    """
    tag = tag or image.tag.partition(":")[2]
    if not _TAG.fullmatch(tag):
        fix = "letters, digits, '_', '.', '-'"
        raise Refusal(Fault("no tag", "--tag", "a tag", tag, fix))
    named = f"{repository}:{tag}"
    there = _raw_digest(named, check=False)
    if there not in (None, image.digest):
        fix = "give --tag ANOTHER, or remove it from the registry"
        raise Refusal(Fault("tag is taken", named, f"none, or {image.digest}", str(there), fix))
    mine = inspected(client, named)
    if mine is not None and mine.get("Id") != image.digest:
        fix = f"`docker image rm {named}`, or give --tag ANOTHER"
        raise Refusal(Fault("tag is taken", f"{named} in the engine", image.digest, str(mine.get("Id")), fix))
    with asking("push", named):
        client.api.tag(image.digest, repository, tag)
        try:
            for event in client.api.push(repository, tag=tag, stream=True, decode=True):
                raise_on(event, f"push {named}")
                on_event(event)
        finally:
            if mine is None:
                client.api.remove_image(named)
    reference = f"{repository}@{image.digest}"
    for name in (reference, named):
        if (back := _raw_digest(name, check=True)) != image.digest:
            fix = "push again; if it stays so, the registry does not keep manifests as they are"
            raise Refusal(Fault("registry gives another manifest", name, image.digest, str(back), fix))
    return reference


def reference_of(text: str) -> tuple[str, str]:
    """Return repository and digest of `REPOSITORY@sha256:...`. Raises `Refusal` for anything else, tags above all."""
    repository, _, digest = text.partition("@")
    if _REPOSITORY.fullmatch(repository) and DIGEST.fullmatch(digest):
        return repository, digest
    fix = "give the digest that `ferry image push` printed: a tag may name another image tomorrow"
    raise Refusal(Fault("no digest", "REFERENCE", "REPOSITORY@sha256:HEX", text, fix))


def pull(client: docker.DockerClient, reference: str, on_event: OnEvent) -> Present:
    """Pull `REPOSITORY@sha256:...`, tag it as Ferry knows it, and prove that the engine has that image.

    What turns out not to be an image of Ferry's is removed again. Raises `Refusal`.
    """
    repository, digest = reference_of(reference)
    before = _found(client, digest, reference)
    if before is None:
        with asking("pull", reference):
            for event in client.api.pull(repository, tag=digest, stream=True, decode=True):
                raise_on(event, f"pull {reference}")
                on_event(event)
    found = before or _found(client, digest, reference)
    if found is None:
        fix = "pull again; `docker image ls --digests` shows what the engine has"
        raise Refusal(Fault("engine did not keep the image", reference, digest, "no such image", fix))
    try:
        return tagged(client, found, digest, reference)
    except Refusal:
        if before is None:
            with contextlib.suppress(docker.errors.APIError):
                client.api.remove_image(reference)
        raise


def _found(client: docker.DockerClient, digest: str, reference: str) -> dict[str, Any] | None:
    """The image as the engine has it: by its manifest or, without the containerd store, by where it came from."""
    return inspected(client, digest) or inspected(client, reference)


def _raw_digest(reference: str, *, check: bool) -> str | None:
    """The SHA-256 of the manifest's bytes, as the registry gives them; None if it has none (only without `check`)."""
    command = ["docker", "buildx", "imagetools", "inspect", "--raw", reference]
    fix = "is the registry reachable from here, and are you logged in (`docker login`)?"
    done = process.run_for_bytes(command, fix=fix, check=check)
    return "sha256:" + sha256_bytes(done) if done is not None else None
