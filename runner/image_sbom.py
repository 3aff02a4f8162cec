"""What is in an image, in CycloneDX's words: every Python and Debian package with version, licence and package URL.

Promises: made from what was found in the image (`runner.inside.facts`), not from what the lock says; the same facts give
the same bytes: no random serial number, and the time of the build is the one that every file in an image has.
"""

from __future__ import annotations

import datetime
import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import pydantic
from cyclonedx.contrib.license.exceptions import InvalidLicenseExpressionException
from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from runner.errors import Fault, Refusal
from runner.inside.digests import sha256_bytes

_REBUILD = "build the image again; the list of its packages is made inside it"


class PythonPackage(pydantic.BaseModel):
    """A Python package: its licence as an SPDX expression, or '', and as the names that its classifiers give."""

    name: str
    version: str
    expression: str
    licences: list[str]


class DebianPackage(pydantic.BaseModel):
    """A package of Debian's, as dpkg knows it."""

    name: str
    version: str
    architecture: str


class Packages(pydantic.BaseModel):
    """Everything that was found in the image; `release` is the code name of its Debian."""

    python: list[PythonPackage]
    debian: list[DebianPackage]
    release: str


def read_packages(raw: bytes, where: str) -> Packages:
    """Return what `runner.inside.facts` wrote. Raises `Refusal` when it is anything else."""
    try:
        return Packages.model_validate_json(raw)
    except pydantic.ValidationError as error:
        expected = "the packages of an image"
        raise Refusal(Fault("list of packages is damaged", where, expected, str(error), _REBUILD)) from error


def to_json(name: str, version: str, properties: Mapping[str, str], packages: Packages, time_s: int) -> bytes:
    """Return the SBOM of the image `name`, as CycloneDX 1.6 in JSON; `time_s` is the time that it gives for itself."""
    image = Component(
        name=f"ferry/{name}", version=version, type=ComponentType.CONTAINER, bom_ref="image",
        properties=[Property(name=f"ferry:{key}", value=value) for key, value in sorted(properties.items())],
    )  # fmt: skip
    parts = [_python(package) for package in packages.python] + [
        _debian(one, packages.release) for one in packages.debian
    ]
    serial = uuid.uuid5(
        uuid.NAMESPACE_URL, sha256_bytes(json.dumps([name, version, packages.model_dump()]).encode())
    )
    moment = datetime.datetime.fromtimestamp(time_s, tz=datetime.UTC)
    bom = Bom(components=parts, serial_number=serial, metadata=BomMetaData(component=image, timestamp=moment))
    bom.register_dependency(image, parts)
    value: Any = json.loads(JsonV1Dot6(bom).output_as_string())
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def _python(package: PythonPackage) -> Component:
    url = PackageURL("pypi", None, package.name.lower().replace("_", "-"), package.version)
    return Component(
        name=package.name, version=package.version, type=ComponentType.LIBRARY, purl=url, bom_ref=str(url),
        licenses=_licences(package.expression, package.licences),
    )  # fmt: skip


def _licences(expression: str, names: Iterable[str]) -> list[License]:
    factory = LicenseFactory()
    if expression:
        try:
            return [factory.make_with_expression(expression)]
        except InvalidLicenseExpressionException:
            names = [*names, expression]
    return [factory.make_with_name(name) for name in names]


def _debian(package: DebianPackage, release: str) -> Component:
    qualifiers = {"arch": package.architecture, "distro": release}
    url = PackageURL("deb", "debian", package.name, package.version, qualifiers)
    return Component(
        name=package.name, version=package.version, type=ComponentType.LIBRARY, purl=url, bom_ref=str(url)
    )
