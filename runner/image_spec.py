"""The document that names an image: `images/NAME.yaml`.

Promises: what is returned by `load_spec` names one base, one lock, and ops for a named CPU level; the CPU flags that
those ops need follow from the level alone. Does not read locks and does not talk to an engine: `image` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pydantic

from runner import documents
from runner.documents import Document, InsidePath, Name
from runner.errors import Fault, Refusal

# A file of images/ that is no image's document: `runner.image_pins`.
PINS_NAME = "pins.yaml"

ImageByDigest = Annotated[str, pydantic.StringConstraints(pattern=r"^[^\s@]+@sha256:[0-9a-f]{64}$")]
PythonVersion = Annotated[str, pydantic.StringConstraints(pattern=r"^3\.[0-9]{1,2}$")]
Op = Annotated[str, pydantic.StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
PackagePattern = Annotated[str, pydantic.StringConstraints(pattern=r"^[a-z0-9*][a-z0-9*-]*$")]
Arch = Literal["x86-64-v3", "x86-64-v4"]

# From the x86-64 psABI, under the names that Linux gives them in /proc/cpuinfo (lzcnt is `abm` there; `osxsave` and
# the flags of v1 and v2 are implied by these on every CPU that exists).
_V3 = ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave")
_FLAGS_OF: dict[Arch, tuple[str, ...]] = {
    "x86-64-v3": _V3,
    "x86-64-v4": tuple(sorted((*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"))),
}


class RecipeBase(Document):
    """A base that is made here, by `bootstrap.sh` in the folder `recipe`; with the variant `toolchain` the compiler stays."""

    recipe: InsidePath
    variant: Literal["runtime", "toolchain"] = "runtime"


class RegistryBase(Document):
    """A base from a registry, by digest; `toolchain` is the one that has a compiler, for the build stage only."""

    image: ImageByDigest
    toolchain: ImageByDigest


class ImageSpec(Document):
    """One named image: base, lock, the ops that are prebuilt, and what the lock must resolve to."""

    ferry: Literal[1]
    name: Name
    base: RecipeBase | RegistryBase
    python: PythonVersion
    lock: InsidePath
    build_lock: InsidePath
    accelerator: Literal["cpu", "cuda"]
    # Packages (or patterns) that get a layer of their own, a list a layer; the first list that fits a package has it.
    # The Dockerfile has three such layers, and a last one for the rest.
    layers: tuple[tuple[PackagePattern, ...], ...] = pydantic.Field(default=(), max_length=3, strict=False)
    from_source: tuple[Name, ...] = pydantic.Field(default=(), strict=False)
    ops: tuple[Op, ...] = pydantic.Field(default=(), strict=False)
    arch: Arch
    expect: dict[str, str]

    @property
    def build_environment(self) -> dict[str, str]:
        """The DS_BUILD_* variables that make DeepSpeed prebuild `ops` (`images/venv.sh` derives the same)."""
        return {f"DS_BUILD_{op.upper()}": "1" for op in self.ops}

    @property
    def cpu_flags(self) -> tuple[str, ...]:
        """The /proc/cpuinfo flags that a CPU must have to run the prebuilt ops; none without ops."""
        return _FLAGS_OF[self.arch] if self.ops else ()


def spec_path(name: str, project: Path) -> Path:
    """Where the document of image `name` lies."""
    return project / "images" / f"{name}.yaml"


def image_names(project: Path) -> list[str]:
    """Return the names of the images that the project has documents of, sorted."""
    return sorted(found.stem for found in (project / "images").glob("*.yaml") if found.name != PINS_NAME)


def load_spec(name: str, project: Path) -> ImageSpec:
    """Read `images/NAME.yaml`. Raises `Refusal`: no such image (naming those that exist), or every fault of it."""
    path = spec_path(name, project)
    if not path.is_file() or path.name == PINS_NAME:
        known = image_names(project)
        raise Refusal(
            Fault(
                "no such image",
                str(path),
                f"one of {', '.join(known) or 'none'}",
                name,
                "check the name, or write it",
            )
        )
    spec = documents.load(ImageSpec, path)
    if spec.name != name:
        raise Refusal(
            Fault(
                "name differs", f"{path}: name", f"'{name}', as the file", f"'{spec.name}'", "make them equal"
            )
        )
    return spec
