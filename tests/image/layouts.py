"""Makes the file of a tiny good image, so that a test can break it in one named way."""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
from collections.abc import Mapping
from typing import Any

from runner.inside.digests import sha256_bytes

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER = {
    MANIFEST: "application/vnd.docker.distribution.manifest.v2+json",
    CONFIG: "application/vnd.docker.container.image.v1+json",
    LAYER: "application/vnd.docker.image.rootfs.diff.tar",
}
INPUTS = "sha256:" + "1" * 64


def layer(files: Mapping[str, bytes | None], mtime: int = 1767225600) -> bytes:
    """A layer with these files; None makes a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.mtime = mtime
            if content is None:
                member.type, member.mode = tarfile.DIRTYPE, 0o755
            member.size = len(content or b"")
            tar.addfile(member, io.BytesIO(content or b""))
    return buffer.getvalue()


@dataclasses.dataclass
class Image:
    """An image in memory: every part may be changed before `files` is asked for."""

    layers: list[bytes]
    labels: dict[str, str]
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layer_kind: str = LAYER
    diff_ids: list[str] | None = None

    def kind(self, name: str) -> str:
        """The media type, in Docker's words if `kinds` has them."""
        return self.kinds.get(name, name)

    def config(self) -> bytes:
        """The configuration."""
        ids = self.diff_ids or [digest_of(raw) for raw in self.layers]
        value = {
            "architecture": "amd64", "os": "linux", "config": {"Labels": self.labels, "Cmd": ["/nothing"]},
            "rootfs": {"type": "layers", "diff_ids": ids},
        }  # fmt: skip
        return json.dumps(value).encode()

    def manifest(self) -> bytes:
        """The manifest."""
        value = {
            "schemaVersion": 2,
            "mediaType": self.kind(MANIFEST),
            "config": descriptor(self.config(), self.kind(CONFIG)),
            "layers": [descriptor(raw, self.kind(self.layer_kind)) for raw in self.layers],
        }
        return json.dumps(value).encode()

    @property
    def digest(self) -> str:
        """The manifest's digest."""
        return digest_of(self.manifest())

    def index(self, **annotations: str) -> bytes:
        """The index, with annotations on the manifest as an engine writes them."""
        entry = descriptor(self.manifest(), self.kind(MANIFEST)) | {"annotations": annotations}
        return json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}).encode()

    def files(self) -> dict[str, bytes]:
        """Every file of the layout, blobs first, sorted."""
        raw = [self.manifest(), self.config(), *self.layers]
        named = {f"blobs/sha256/{sha256_bytes(content)}": content for content in raw}
        return {name: named[name] for name in sorted(named)} | {
            "index.json": self.index(),
            "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        }


def image(name: str = "tiny", text: str = "hello") -> Image:
    """A good image of two layers, the first of them twice, as `ferry image build` may make it."""
    first, second = layer({"opt": None, "opt/a": text.encode()}), layer({"opt/b": b"b" * 3000})
    return Image([first, first, second], {"ferry.name": name, "ferry.inputs": INPUTS})


def digest_of(raw: bytes) -> str:
    """The digest, as the specification writes it."""
    return "sha256:" + sha256_bytes(raw)


def descriptor(raw: bytes, kind: str) -> dict[str, Any]:
    """What names a blob."""
    return {"mediaType": kind, "digest": digest_of(raw), "size": len(raw)}


def tar_of(files: Mapping[str, bytes], *more: tarfile.TarInfo) -> bytes:
    """The files as a tar, then entries without content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in more:
            tar.addfile(member)
    return buffer.getvalue()
