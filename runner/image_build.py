"""The steps that make an environment: base, packages, ops, image. Each keeps its product under `.ferry/` and skips itself.

Promises: a product is renamed into place only when it is complete; packages are fetched by hash, on the host, with the
caller's own pip configuration, so that the build itself needs no network. Only `runner.image` calls this module.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from runner import process
from runner.errors import ExitCode, Fault, Refusal
from runner.image_inputs import EPOCH_S, ImageInputs, base_key
from runner.image_layer import look_tar, make_layer
from runner.image_spec import RegistryBase
from runner.inside.digests import hash_file
from runner.record import write_file

OnLine = Callable[[str], None]

_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17, 12, 5)),
    *(f"manylinux{year}_x86_64" for year in ("2014", "2010", "1")),
)
_FETCH_FIX = (
    "is the package index reachable (PIP_INDEX_URL, PIP_CERT)? PyTorch's CPU wheels are on PyTorch's own index: set "
    "PIP_EXTRA_INDEX_URL to it, or PIP_FIND_LINKS to a folder that holds the wheel"
)
_BUILD_FIX = (
    "see the last lines above; `docker buildx du` shows the space that the engine's build cache takes"
)

_ENGINE_FIX = "`just engine` installs and starts an engine"


@dataclasses.dataclass(frozen=True)
class Base:
    """What the image stands on: its digest, and how the Dockerfile is told of it."""

    digest: str
    arguments: tuple[str, ...]


def store(project: Path) -> Path:
    """Return the project's own folder for what is made here; it is not in git."""
    return project / ".ferry"


def base(inputs: ImageInputs, on_line: OnLine) -> Base:
    """Return the base, made by its recipe if it is not there. Differences from the committed package lists are shown."""
    found = inputs.spec.base
    if isinstance(found, RegistryBase):
        return Base(
            "sha256:" + found.image.partition("@sha256:")[2],
            (
                f"--build-context=base=docker-image://{found.image}",
                f"--build-context=toolchain=docker-image://{found.toolchain}",
            ),
        )
    folder = store(inputs.project) / "base" / _short(base_key(inputs.spec, inputs.project))
    variants = sorted({found.variant, "toolchain"})
    for variant in variants:
        if not (folder / f"{variant}.tar").exists():
            _bootstrap(inputs.project / found.recipe, variant, folder, on_line)
    for variant in variants:
        for line in package_drift(
            inputs.project / found.recipe / f"{variant}.packages", folder / f"{variant}.packages"
        ):
            on_line(f"base {variant}: {line}")
    place = folder.relative_to(inputs.project)
    return Base(
        "sha256:" + hash_file(folder / f"{found.variant}.tar").sha256,
        (
            "--build-arg=BASE=made-base",
            "--build-arg=TOOLCHAIN=made-toolchain",
            f"--build-arg=BASE_TAR={place}/{found.variant}.tar",
            f"--build-arg=TOOLCHAIN_TAR={place}/toolchain.tar",
        ),
    )


def _bootstrap(recipe: Path, variant: str, folder: Path, on_line: OnLine) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{variant}.tar"
    on_line(f"base {variant}: made with mmdebstrap (about a minute)")
    command: list[str | Path] = [recipe / "bootstrap.sh", variant, aside, folder / f"{variant}.packages"]
    process.run(
        command, fix="see the last lines; `just engine` needs the same Debian mirror", on_line=on_line
    )
    aside.replace(folder / f"{variant}.tar")
    for older in folder.parent.iterdir():
        if older != folder:
            shutil.rmtree(older)


def package_drift(listed: Path, made: Path) -> list[str]:
    """Return how a base's packages differ from the committed list: one line each, and what to do.

    Mirrors drop a version when a security update replaces it, so a difference is shown and not refused: the image gets
    another digest, and the run specs that pin the old one refuse it.
    """
    wanted, found = (dict(line.split("=", 1) for line in path.read_text().split()) for path in (listed, made))
    lines = [
        f"{name} is {found.get(name, 'absent')}, listed is {wanted.get(name, 'none')}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
    if lines:
        lines.append(f"differs from {listed}: the digest will be another one; accept with `just base-relock`")
    return lines


def wheels(inputs: ImageInputs, on_line: OnLine) -> Path:
    """Return a folder with every file that the locks name, fetched by hash with the caller's pip configuration."""
    folder = store(inputs.project) / "wheels" / _short(inputs.lock)
    done = folder / ".complete"
    build_lock = (inputs.project / inputs.spec.build_lock).read_bytes()
    if done.exists() and done.read_bytes() == build_lock:
        return folder
    on_line("packages: fetched by hash")
    packaged, sources = inputs.lock_parts()
    lists = store(inputs.project) / "wheels" / f"{folder.name}.lists"
    write_file(lists / "wheels.txt", packaged.encode())
    write_file(lists / "sources.txt", sources.encode())
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--progress-bar=off",
        "--no-deps",
        "--require-hashes",
        f"--dest={folder}",
    ]
    target = ["--only-binary=:all:", "--implementation=cp", f"--python-version={inputs.spec.python}"]
    target += [f"--platform={platform}" for platform in _PLATFORMS]
    for requirement in (lists / "wheels.txt", inputs.project / inputs.spec.build_lock):
        process.run([*pip, *target, "-r", requirement], fix=_FETCH_FIX, on_line=_without_noise(on_line))
    if sources:
        names = ",".join(inputs.spec.from_source)
        source: list[str | Path] = [
            "--no-build-isolation",
            f"--no-binary={names}",
            "-r",
            lists / "sources.txt",
        ]
        process.run([*pip, *source], fix=_FETCH_FIX, on_line=_without_noise(on_line))
    write_file(done, build_lock)
    return folder


def _without_noise(on_line: OnLine) -> OnLine:
    def show(line: str) -> None:
        # pip warns once a package for each folder index that lacks it.
        if line.strip() and not line.startswith("WARNING: Location "):
            on_line(line)

    return show


def environment(inputs: ImageInputs, given: Base, on_line: OnLine) -> None:
    """See that the engine has the environment as an image, built if it is not there (minutes: the ops are compiled).

    Older environments of the same name lose theirs; an image that stands on one keeps its layers. With FERRY_LEAN=1 in
    the environment the fetched wheels are removed when they lie in it (4 GB, and 50 s to fetch them again).
    """
    if _label(inputs.environment_tag, "ferry.recipe") == inputs.recipe:
        return
    spec = inputs.spec
    command = [
        *_buildx(given),
        "--target=environment",
        f"--build-context=wheels={wheels(inputs, on_line)}",
        f"--build-arg=LOCK={spec.lock}",
        f"--build-arg=BUILD_LOCK={spec.build_lock}",
        f"--build-arg=LAYERS={' | '.join(' '.join(layer) for layer in spec.layers)}",
        f"--build-arg=FROM_SOURCE={' '.join(spec.from_source)}",
        f"--build-arg=OPS={' '.join(spec.ops)}",
        f"--build-arg=ARCH={spec.arch}",
        f"--build-arg=ACCELERATOR={spec.accelerator}",
        f"--label=ferry.recipe={inputs.recipe}",
        # Not unpacked: nobody runs it, and what stands on it is unpacked by itself.
        _output(inputs.environment_tag) + ",unpack=false",
        ".",
    ]
    process.run(command, cwd=inputs.project, fix=_BUILD_FIX, on_line=on_line)
    _forget_steps()
    if os.environ.get("FERRY_LEAN") == "1":
        shutil.rmtree(wheels(inputs, on_line))
    repository = inputs.environment_tag.partition(":")[0]
    listed = process.run(
        ["docker", "image", "ls", "--format={{.Repository}}:{{.Tag}}", repository], fix=_ENGINE_FIX
    )
    older = [tag for tag in listed.output.split() if tag != inputs.environment_tag]
    if older:
        process.run(["docker", "image", "rm", *older], fix=_ENGINE_FIX)


def _forget_steps() -> None:
    """Drop the engine's copy of the wheels and the steps that made the environment: it lies in the image now.

    For the cuda image that is 12 GB. What failed half-way is kept, and gone on from.
    """
    for description in ('="local source for wheels"', '~="/mnt/recipe/venv.sh"'):
        command = ["docker", "buildx", "prune", "--force", f"--filter=description{description}"]
        process.run(command, fix=_ENGINE_FIX)


def _label(reference: str, label: str) -> str | None:
    """Return the value of a label of an image in the engine; None if there is no such image or label."""
    command = [
        "docker", "image", "inspect", "--format", f'{{{{index .Config.Labels "{label}"}}}}', reference,
    ]  # fmt: skip
    seen = process.run(command, fix=_ENGINE_FIX, check=False)
    return seen.output.strip() if seen.status == 0 else None


def image(inputs: ImageInputs, given: Base, on_line: OnLine) -> tuple[str, str]:
    """Look at the environment and put the start program on it; return the image's manifest digest and config digest."""
    environment(inputs, given, on_line)
    folder = store(inputs.project) / "build" / inputs.spec.name
    shutil.rmtree(folder, ignore_errors=True)
    write_file(folder / "look" / "ferry.tar", look_tar(inputs))
    on_environment = f"--build-context=environment=docker-image://{inputs.environment_tag}"
    look = [
        *_buildx(given), "--target=facts", on_environment, f"--build-context=ferry={folder / 'look'}",
        f"--output=type=local,dest={folder / 'facts'}", ".",
    ]  # fmt: skip
    process.run(look, cwd=inputs.project, fix=_BUILD_FIX, on_line=on_line)
    layer = make_layer(inputs, given.digest, folder / "facts")
    write_file(folder / "start" / "ferry.tar", layer.tar)
    metadata = folder / "metadata.json"
    labels = {
        **layer.identity.labels(),
        "org.opencontainers.image.version": inputs.version,
        "ferry.inputs": inputs.inputs,
    }
    command = [
        *_buildx(given),
        on_environment,
        f"--build-context=ferry={folder / 'start'}",
        *(f"--label={key}={value}" for key, value in sorted(labels.items())),
        f"--metadata-file={metadata}",
        _output(inputs.tag),
        ".",
    ]
    process.run(command, cwd=inputs.project, fix=_BUILD_FIX, on_line=on_line)
    said = json.loads(metadata.read_bytes())
    return str(said["containerimage.digest"]), str(said["containerimage.config.digest"])


def _output(tag: str) -> str:
    # Uncompressed: the digest does not depend on the compressor of one engine version, and loading is faster.
    return (
        f"--output=type=image,name={tag},compression=uncompressed,force-compression=true,oci-mediatypes=true"
    )


def _buildx(given: Base) -> list[str]:
    return [
        "docker", "buildx", "build", "--progress=plain", "--provenance=false",
        f"--build-arg=SOURCE_DATE_EPOCH={EPOCH_S}", *given.arguments,
    ]  # fmt: skip


def venv(inputs: ImageInputs, folder: Path, on_line: OnLine) -> None:
    """Make the same environment in `folder`, on this host. Raises `Refusal` naming each tool that is missing."""
    python = host_python(inputs.spec.python)
    missing = [name for name in ("g++", "tar", "awk") if shutil.which(name) is None]
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        missing.append("Python.h")
    if inputs.spec.from_source and missing:
        fix = f"apt-get install g++ python{inputs.spec.python}-dev, or use the docker engine"
        raise Refusal(
            Fault(
                "no compiler",
                "this host",
                "g++ and Python's headers, to build the ops",
                f"no {', '.join(missing)}",
                fix,
            ),
            exit_code=ExitCode.FAILED,
        )
    spec, project = inputs.spec, inputs.project
    # Not beside `folder`: torch's build of the ops does not survive a space in the path of its scratch folder.
    with tempfile.TemporaryDirectory(prefix="ferry-venv-", dir="/tmp") as work:
        settings = {
            "VENV": folder, "PYTHON": python, "WHEELS": wheels(inputs, on_line), "LOCK": project / spec.lock,
            "BUILD_LOCK": project / spec.build_lock, "FROM_SOURCE": " ".join(spec.from_source),
            "OPS": " ".join(spec.ops), "ARCH": spec.arch, "ACCELERATOR": spec.accelerator, "WORK": f"{work}/build",
            "TOOLS": f"{work}/tools", "BUILT": f"{work}/built", "RECIPE": project / "images",
        }  # fmt: skip
        words: list[str | Path] = ["env", *(f"{key}={value}" for key, value in settings.items())]
        for step in ("tools", "packages rest", "build", "install"):
            on_line(f"venv: {step}" + (" (minutes: the ops are compiled)" if step == "build" else ""))
            fix = "see the last lines; DeepSpeed's ops need g++ and about 2 GiB of memory a core"
            process.run([*words, project / "images" / "venv.sh", *step.split()], fix=fix, on_line=on_line)


def host_python(version: str) -> Path:
    """Return this host's interpreter of `version` (as '3.11'). Raises `Refusal` when there is none."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return Path(str(getattr(sys, "_base_executable", sys.executable)))
    found = shutil.which(f"python{version}")
    if found is None:
        fix = f"install python{version} with venv, or use the docker engine"
        fault = Fault(
            "no such Python", "this host", f"python{version}, as the lock wants", "none on PATH", fix
        )
        raise Refusal(fault, exit_code=ExitCode.FAILED)
    return Path(found)


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:16]
