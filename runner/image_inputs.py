"""What an image is made of, and the identity that follows from it: locks, recipe, ops, start program.

Promises: the same files give the same `recipe` and `inputs` hashes on every machine; the lock resolves to what the spec
expects, or it is refused. Reads files of the project only; starts nothing.
"""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from runner.errors import Fault, Refusal, refuse_if
from runner.image_lock import read_lock
from runner.image_spec import ImageSpec, RecipeBase, load_spec, spec_path
from runner.inside.digests import sha256_bytes
from runner.inside.lock import normalised, requirements

# Any fixed moment does; images/base/bootstrap.sh has the same one. No file in an image is newer.
EPOCH_S = 1767225600
_PYTHON_FILES = ("images/start.py", "runner/__init__.py", "runner/errors.py")


@dataclasses.dataclass(frozen=True)
class Identity:
    """What an environment says of itself, in `/opt/ferry/IDENTITY` and in the image's labels; equal in both.

    `base` is the digest of what the environment stands on, and `files` that of the list of its files; both are 'host'
    outside a container.
    """

    name: str
    lock: str
    base: str
    files: str
    python: str
    accelerator: str
    arch: str
    ops: tuple[str, ...]
    cpu_flags: tuple[str, ...]
    versions: dict[str, str]

    def to_json(self) -> bytes:
        """Return the content of the IDENTITY file."""
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True).encode() + b"\n"

    def labels(self) -> dict[str, str]:
        """Return the image's labels: OCI's own keys where there is one, `ferry.*` for the rest."""
        created = datetime.datetime.fromtimestamp(EPOCH_S, tz=datetime.UTC)
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return {
            "org.opencontainers.image.title": f"ferry {self.name}",
            "org.opencontainers.image.description": f"Environment of training runs: Python {self.python}, {versions}",
            "org.opencontainers.image.created": created.isoformat(),
            "org.opencontainers.image.base.digest": self.base,
            "ferry.name": self.name,
            "ferry.lock": self.lock,
            "ferry.files": self.files,
            "ferry.python": self.python,
            "ferry.accelerator": self.accelerator,
            "ferry.arch": self.arch,
            "ferry.ops": " ".join(self.ops),
            "ferry.cpu_flags": " ".join(self.cpu_flags),
            "ferry.versions": json.dumps(self.versions, sort_keys=True),
        }


@dataclasses.dataclass(frozen=True)
class ImageInputs:
    """Everything that decides an image. `recipe`: the base and the environment; `inputs`: those and `start`.

    `start` is the start program, path in the project -> content, read once: what is hashed is what goes in.
    """

    project: Path
    spec: ImageSpec
    lock: str
    recipe: str
    inputs: str
    start: Mapping[str, bytes]

    @property
    def environment_tag(self) -> str:
        """The name that the environment alone gets in the engine: the image without its start program."""
        return f"ferry/{self.spec.name}-environment:{self.recipe.removeprefix('sha256:')[:12]}"

    @property
    def tag(self) -> str:
        """The name that the image gets in the engine: one for every state of its inputs.

        Runs that are pinned to an older state keep their image; under a shared tag the engine would drop it.
        """
        return tag_of(self.spec.name, self.inputs)

    @property
    def version(self) -> str:
        """The version that the image's labels and its SBOM give: the state of its inputs."""
        return self.tag.rpartition(":")[2]

    def identity(self, base: str, files: str) -> Identity:
        """Return the identity of this environment on the base with digest `base`, its list of files with that `files`."""
        spec = self.spec
        return Identity(
            name=spec.name,
            lock=self.lock,
            base=base,
            files=files,
            python=spec.python,
            accelerator=spec.accelerator,
            arch=spec.arch,
            ops=spec.ops,
            cpu_flags=spec.cpu_flags,
            versions=dict(sorted(spec.expect.items())),
        )

    def lock_parts(self) -> tuple[str, str]:
        """Return the lock as two requirement files: what comes as wheels, and what is built from source."""
        wheels: list[str] = []
        sources: list[str] = []
        for _, line in requirements((self.project / self.spec.lock).read_text(encoding="utf-8")):
            built_here = normalised(line.partition("==")[0]) in self.spec.from_source
            (sources if built_here else wheels).append(line)
        return "".join(f"{line}\n" for line in wheels), "".join(f"{line}\n" for line in sources)


def tag_of(name: str, inputs: str) -> str:
    """Return the name in the engine of the image `name` that was made from these inputs."""
    return f"ferry/{name}:{inputs.removeprefix('sha256:')[:12]}"


def read_inputs(name: str, project: Path) -> ImageInputs:
    """Read everything that decides the image `name`.

    Raises `Refusal` with every fault: the spec's; or each bad line of the locks and each version that is not as expected;
    or each layer of no package.
    """
    spec = load_spec(name, project)
    lock = read_file(project / spec.lock)
    locked = read_lock(spec, project)
    where = f"{spec_path(name, project)}: layers"
    fix = "mend the pattern, or take it away"
    refuse_if(
        Fault("layer of no package", where, f"a package of {spec.lock}", pattern, fix)
        for pattern in itertools.chain.from_iterable(spec.layers)
        if not fnmatch.filter(locked, pattern)
    )
    recipe = _read_all(project, _recipe_files(spec, project))
    start = _read_all(project, _start_files(project))
    whole = read_file(project / "Dockerfile")
    return ImageInputs(
        project=project,
        spec=spec,
        lock="sha256:" + sha256_bytes(lock),
        recipe=_hash({**recipe, "Dockerfile": environment_part(whole)}),
        inputs=_hash({**recipe, **start, "Dockerfile": whole}),
        start=start,
    )


def environment_part(dockerfile: bytes) -> bytes:
    """Return the Dockerfile as far as the end of its stage `environment`: what stands below does not decide that stage.

    Raises `Refusal` when there is no such stage.
    """
    lines = dockerfile.splitlines(keepends=True)
    stages = [number for number, line in enumerate(lines) if line.startswith(b"FROM ")]
    named = [number for number in stages if lines[number].rstrip().endswith(b" AS environment")]
    if len(named) != 1:
        fix = "one stage makes the environment: name it so"
        found = f"{len(named)} such stages"
        raise Refusal(Fault("no environment", "Dockerfile", "one FROM ... AS environment", found, fix))
    end = min((number for number in stages if number > named[0]), default=len(lines))
    while lines[end - 1].startswith(b"#") or not lines[end - 1].strip():
        end -= 1
    return b"".join(lines[:end])


def base_key(spec: ImageSpec, project: Path) -> str:
    """Return the hash of the base's recipe folder: a base that was made from it is used again."""
    assert isinstance(spec.base, RecipeBase)
    return _hash(_read_all(project, (project / spec.base.recipe).iterdir()))


def _recipe_files(spec: ImageSpec, project: Path) -> list[Path]:
    named = ["images/venv.sh", "images/deepspeed_source.py", spec.lock, spec.build_lock]
    base = sorted((project / spec.base.recipe).iterdir()) if isinstance(spec.base, RecipeBase) else []
    return [*(project / name for name in named), spec_path(spec.name, project), *base]


def _start_files(project: Path) -> list[Path]:
    return [
        *(project / name for name in _PYTHON_FILES),
        *sorted((project / "runner" / "inside").glob("*.py")),
    ]


def _read_all(project: Path, paths: Iterable[Path]) -> dict[str, bytes]:
    return {path.relative_to(project).as_posix(): read_file(path) for path in paths}


def _hash(files: Mapping[str, bytes]) -> str:
    lines = sorted(f"{sha256_bytes(content)}  {name}\n" for name, content in files.items())
    return "sha256:" + sha256_bytes("".join(lines).encode())


def read_file(path: Path) -> bytes:
    """Return a file of the project. Raises `Refusal` when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refusal(
            Fault(
                "file cannot be read",
                str(path),
                "a readable file",
                str(error),
                "is this the project's folder?",
            )
        ) from error
