"""What the blobs of an image say: one manifest, its configuration, its layers; each descriptor compared with what is there.

Promises: what is returned is one image whose every part lies there with the size, kind and digest that it is named by;
every fault is told together. The blobs' digests were compared before (`image_layout`).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from runner.errors import Fault, refuse_if

LIMIT_JSON_BYTES = 1 << 20
FIX = "make it again with `ferry image save`; what came over a network may have been cut off or changed"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_INDEX = "application/vnd.oci.image.index.v1+json"
_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_CONFIGS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
_PLAIN_LAYERS = (
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.docker.image.rootfs.diff.tar",
)
LAYERS: Mapping[str, str] = {
    **dict.fromkeys(_PLAIN_LAYERS, "none"),
    "application/vnd.oci.image.layer.v1.tar+gzip": "gzip",
    "application/vnd.docker.image.rootfs.diff.tar.gzip": "gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd": "zstd",
    "application/vnd.docker.image.rootfs.diff.tar.zstd": "zstd",
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer: digest and size of the blob, its compression, and the digest of what it unpacks to."""

    digest: str
    size_bytes: int
    compression: str
    diff_id: str


@dataclasses.dataclass(frozen=True)
class Layout:
    """The one image of a layout, all of it found right.

    `digest` is the manifest's, `config` the configuration's; `document` is the configuration as JSON holds it; `in_order`
    says that the blobs came sorted by digest, and so the stream was already in the one form.
    """

    digest: str
    config: str
    layers: tuple[Layer, ...]
    document: Mapping[str, Any]
    in_order: bool

    @property
    def labels(self) -> Mapping[str, str]:
        """The image's labels; what is not text is left out."""
        said = self.document.get("config")
        labels = said.get("Labels") if isinstance(said, dict) else None
        found = labels if isinstance(labels, dict) else {}
        return {name: value for name, value in found.items() if isinstance(value, str)}


class Reading:
    """What the blobs say, once their digests are known to be right."""

    def __init__(self, sizes: Mapping[str, int], small: Mapping[str, bytes], where: str) -> None:
        self._sizes, self._small, self._where = sizes, small, where
        self._faults: list[Fault] = []
        self._named: set[str] = set()

    def layout(self) -> tuple[Layout, dict[str, bytes]]:
        """Return the image, and the files beside its blobs in the one form. Raises `Refusal` with every fault."""
        if self._json("oci-layout", dict).get("imageLayoutVersion") != "1.0.0":
            self._fault("not an image layout", "oci-layout", "imageLayoutVersion 1.0.0", "another, or none")
        found = self._json("index.json", dict).get("manifests")
        if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], dict):
            count = f"{len(found)}" if isinstance(found, list) else "none"
            self._fault("not one image", "index.json: manifests", "one", count)
            refuse_if(self._faults)
        name = self._blob(found[0], "index.json: manifests/0", _MANIFESTS)
        manifest = self._json(name, dict) if name else {}
        kind = str(found[0].get("mediaType"))
        if name and manifest.get("mediaType", kind) != kind:
            self._fault("kinds differ", name, kind, str(manifest.get("mediaType")))
        config = self._blob(manifest.get("config"), f"{name}: config", _CONFIGS) if name else ""
        document = self._json(config, dict) if config else {}
        layers = self._layers(manifest, document, name) if config else ()
        extra = sorted(n for n in self._sizes if n.startswith("blobs/") and n not in self._named)
        for blob in extra if not self._faults else ():
            self._fault("blob of nothing", blob, "a blob that the image names", "another")
        if not self._faults:
            self._docker_manifest(config, layers)
        refuse_if(self._faults)
        digest, config_digest = _digest_of(name), _digest_of(config)
        order = [n for n in self._sizes if n.startswith("blobs/")]
        made = Layout(digest, config_digest, layers, document, in_order=order == sorted(order))
        return made, _notes(made, kind, self._sizes[name])

    def _fault(self, what: str, place: str, expected: str, found: str) -> None:
        self._faults.append(Fault(what, f"{self._where}: {place}", expected, found, FIX))

    def _json(self, name: str, kind: type) -> Any:
        """The JSON value in the file `name`, or an empty one and a fault."""
        raw = self._small.get(name)
        if raw is None:
            found = "nothing" if name not in self._sizes else f"{self._sizes[name]} bytes"
            self._fault("file is missing", name, f"at most {LIMIT_JSON_BYTES} bytes of JSON", found)
            return kind()
        try:
            value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            self._fault("not JSON", name, "JSON, no key twice", str(error))
            return kind()
        if not isinstance(value, kind):
            self._fault("not JSON", name, f"a JSON {kind.__name__}", type(value).__name__)
            return kind()
        return value

    def _blob(self, descriptor: object, place: str, kinds: tuple[str, ...]) -> str:
        """The name of the blob that `descriptor` speaks of; '' and a fault if it is not one that is here."""
        if not isinstance(descriptor, dict):
            self._fault("no descriptor", place, "mediaType, digest and size", type(descriptor).__name__)
            return ""
        digest, size, kind = (descriptor.get(key) for key in ("digest", "size", "mediaType"))
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            self._fault("no digest", place, "sha256:HEX", str(digest))
            return ""
        if kind not in kinds:
            self._fault("unknown kind", place, " or ".join(kinds), str(kind))
        if descriptor.get("urls"):
            self._fault("content lies elsewhere", place, "no urls", str(descriptor["urls"]))
        name = f"blobs/sha256/{digest.removeprefix('sha256:')}"
        self._named.add(name)
        if self._sizes.get(name) != size or isinstance(size, bool):
            self._fault("size differs", place, f"{size} bytes", f"{self._sizes.get(name, 'no')} bytes")
        return name if name in self._sizes else ""

    def _layers(
        self, manifest: Mapping[str, Any], document: Mapping[str, Any], name: str
    ) -> tuple[Layer, ...]:
        root = document.get("rootfs")
        listed, ids = manifest.get("layers"), root.get("diff_ids") if isinstance(root, dict) else None
        if not isinstance(listed, list) or not isinstance(ids, list) or len(listed) != len(ids):
            self._fault("layers differ", name, "as many layers as rootfs/diff_ids", "another number, or none")
            return ()
        made = []
        for index, (descriptor, diff_id) in enumerate(zip(listed, ids, strict=True)):
            place = f"{name}: layers/{index}"
            blob = self._blob(descriptor, place, tuple(LAYERS))
            if not isinstance(diff_id, str) or not _DIGEST.fullmatch(diff_id):
                self._fault("no digest", f"{place}: rootfs/diff_ids", "sha256:HEX", str(diff_id))
            elif blob and (compression := LAYERS.get(str(descriptor.get("mediaType")))):
                if compression == "none" and diff_id != _digest_of(blob):
                    self._fault("layers differ", place, diff_id, _digest_of(blob))
                made.append(Layer(_digest_of(blob), self._sizes[blob], compression, diff_id))
        return tuple(made)

    def _docker_manifest(self, config: str, layers: tuple[Layer, ...]) -> None:
        """What engines without the containerd store go by must say the same, where it is there."""
        if "manifest.json" not in self._sizes:
            return
        found = self._json("manifest.json", list)
        wanted = [config, [_name_of(layer.digest) for layer in layers]]
        said = [[e.get("Config"), e.get("Layers")] if isinstance(e, dict) else None for e in found]
        if said != [wanted]:
            self._fault("not one image", "manifest.json", "the image of index.json", "another, or several")


def _notes(layout: Layout, kind: str, size: int) -> dict[str, bytes]:
    """The files beside the blobs; `kind` and `size` are those of the manifest."""
    descriptor = {
        "annotations": {"config.digest": layout.config}, "digest": layout.digest, "mediaType": kind, "size": size,
    }  # fmt: skip
    names = [_name_of(layer.digest) for layer in layout.layers]
    values: dict[str, Any] = {
        "index.json": {"manifests": [descriptor], "mediaType": _INDEX, "schemaVersion": 2},
        "manifest.json": [{"Config": _name_of(layout.config), "Layers": names, "RepoTags": None}],
        "oci-layout": {"imageLayoutVersion": "1.0.0"},
    }
    return {
        name: json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        for name, value in values.items()
    }


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key stands twice")
    return made


def _digest_of(name: str) -> str:
    return "sha256:" + name.removeprefix("blobs/sha256/")


def _name_of(digest: str) -> str:
    return "blobs/sha256/" + digest.removeprefix("sha256:")
