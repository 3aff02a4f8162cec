"""The checks of the container engine, and of how it gives GPUs to containers.

Promises: pure functions of observations; every line that is not good has the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator

from runner import host
from runner.doctor_check import Asked, Check, State, size
from runner.engine_info import (
    MINIMUM_API,
    EngineInfo,
    gpu_device,
    gpu_ids,
    missing_gpus,
    read_info,
    version_tuple,
)
from runner.observations import Observations

# BuildKit 0.13 came with buildx 0.13: since then an image's time stamps can be rewritten, as bit-for-bit builds need.
_BUILDX = (0, 13)
# Compose takes `include`, by which the second door finds a run's plan, since 2.20.
_COMPOSE = (2, 20)
_IMAGES_BYTES = 20 << 30
_TOOLKIT = (
    "install the NVIDIA Container Toolkit, then `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"
)
_GENERATE = "`nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`, again after every update of the driver"
_GPUS_ALL = '`--gpus all` would end in: could not select device driver "" with capabilities: [[gpu]]'


def engine_checks(seen: Observations, asked: Asked) -> Iterator[Check]:
    """Yield the lines about the engine itself."""
    expected = f"an engine that answers, API {_text(MINIMUM_API)} or newer"
    if seen.engine.problem is not None:
        remedy = "`just engine` installs and starts one as root on Debian; else start it, and see that this user may use it"
        yield Check("engine", asked.of_engine(State.REFUSED), seen.engine.problem, expected, remedy)
        return
    info = read_info(seen.engine.info, seen.engine.version)
    found = f"Docker {info.version}, API {_text(info.api)}, cgroup v{info.cgroup_version}"
    if info.rootless:
        found += ", rootless"
    if info.api < MINIMUM_API:
        remedy = "install Docker 25 or newer; 28.2 or newer lists CDI devices and takes them by default"
        yield Check("engine", asked.of_engine(State.REFUSED), found, expected, remedy)
    else:
        yield Check("engine", asked.of_engine(State.GOOD), found, expected)
    yield from _store(info, asked)
    yield from _limits(seen, asked)
    yield from _plugins(seen, asked)
    folder = seen.engine_folder
    if folder is not None and folder.problem is None:
        few = folder.free_bytes < _IMAGES_BYTES
        yield Check(
            "engine disk",
            asked.of_engine(State.WARNING if few else State.GOOD),
            f"{size(folder.free_bytes)} free in {folder.path} ({folder.kind})",
            f"{size(_IMAGES_BYTES)} for images and their builds",
            "`docker system df` says what is there; `docker builder prune` frees the build cache"
            if few
            else "",
        )


def wiring_checks(seen: Observations, asked: Asked) -> Iterator[Check]:
    """Yield the lines about CDI devices and the NVIDIA runtime."""
    if seen.engine.problem is not None or asked.engine != "docker":
        return
    info = read_info(seen.engine.info, seen.engine.version)
    # An engine too old to list them; none where CDI is off.
    of_specs = host.cdi_devices(seen.files) if info.cdi_folders else ()
    devices = info.devices if info.devices is not None else of_specs
    ids = gpu_ids(devices)
    expected = "CDI devices nvidia.com/gpu=..."
    if ids:
        how = "lists" if info.devices is not None else "may use, by its CDI specs,"
        found = f"the engine {how} {len(ids)} CDI devices: {', '.join(ids)}"
        yield Check("GPU wiring", asked.of_gpus(State.GOOD), found, expected)
    elif "nvidia" in info.runtimes:
        remedy = f"prefer CDI: {_wiring_remedy(info, _GENERATE)}"
        found = "no CDI devices; the NVIDIA runtime is there"
        yield Check("GPU wiring", asked.of_gpus(State.WARNING), found, expected, remedy)
    elif asked.needs_gpus:
        found = f"neither CDI devices nor the NVIDIA runtime; {_GPUS_ALL}"
        yield Check("GPU wiring", State.REFUSED, found, expected, _wiring_remedy(info, _TOOLKIT))
    else:
        found = "neither CDI devices nor the NVIDIA runtime: containers see no GPU"
        yield Check("GPU wiring", State.NOTE, found, "nothing, unless GPUs are asked for")
    if ids and asked.gpus:
        for gpu in missing_gpus(devices, asked.gpus):
            found = f"no such device; there are {', '.join(ids)}"
            remedy = f"name GPUs of this server in server.yaml (gpus: ids), or {_GENERATE}"
            yield Check(f"GPU {gpu}", State.REFUSED, found, f"the CDI device {gpu_device(gpu)}", remedy)
    yield from _stale(seen, asked)
    yield from _loss(info, ids, asked)


def _store(info: EngineInfo, asked: Asked) -> Iterator[Check]:
    expected = "containerd's image store: an image keeps the digest of its manifest"
    if info.containerd_store:
        yield Check("image store", asked.of_engine(State.GOOD), "containerd's", expected)
        return
    remedy = (
        'put {"features": {"containerd-snapshotter": true}} into /etc/docker/daemon.json and restart the engine; '
        "until then images are known by their config digest"
    )
    yield Check(
        "image store", asked.of_engine(State.WARNING), "the engine's own (graph driver)", expected, remedy
    )


def _limits(seen: Observations, asked: Asked) -> Iterator[Check]:
    lacking = [
        name for name in ("MemoryLimit", "PidsLimit", "SwapLimit") if seen.engine.info.get(name) is False
    ]
    warnings = [str(line) for line in seen.engine.info.get("Warnings") or ()]
    expected = "limits of memory, swap and processes are enforced"
    if lacking:
        found = f"the engine cannot enforce {', '.join(lacking)}: the memory guard would be ignored"
        remedy = "boot with cgroup_enable=memory swapaccount=1; for a rootless engine, delegate the controllers to it"
        yield Check("engine limits", asked.of_engine(State.WARNING), found, expected, remedy)
    elif warnings:
        yield Check("engine limits", asked.of_engine(State.NOTE), "; ".join(warnings), expected)
    else:
        yield Check("engine limits", asked.of_engine(State.GOOD), "all enforced", expected)


def _plugins(seen: Observations, asked: Asked) -> Iterator[Check]:
    for name, said, oldest, use in (
        ("buildx", seen.engine.buildx, _BUILDX, "needed to build images here"),
        ("compose", seen.engine.compose, _COMPOSE, "needed for `docker compose up trainer`"),
    ):
        expected = f"{_text(oldest)} or newer, {use}"
        words = [word for word in (said or "").split() if version_tuple(word)]
        if words and version_tuple(words[0]) >= oldest:
            yield Check(name, asked.of_engine(State.GOOD), words[0], expected)
        else:
            remedy = f"install Docker's {name} plugin (Debian: docker-{name}); the engine's own API does without it"
            yield Check(name, asked.of_engine(State.WARNING), words[0] if words else "none", expected, remedy)


def _wiring_remedy(info: EngineInfo, specs: str) -> str:
    if info.cdi_folders:
        return specs
    on = 'turn CDI on: {"features": {"cdi": true}} in /etc/docker/daemon.json (Docker 28.2 and newer have it on)'
    return f"{specs}; {on}"


def _stale(seen: Observations, asked: Asked) -> Iterator[Check]:
    if not seen.cdi:
        return
    expected = "every device and library that the CDI specs name is there"
    if seen.missing:
        more = f" and {len(seen.missing) - 4} more" if len(seen.missing) > 4 else ""
        found = f"{', '.join(sorted(seen.cdi))} is stale: no {', '.join(seen.missing[:4])}{more}"
        state = asked.of_gpus(State.REFUSED)
        yield Check("CDI specs", state, found, expected, f"make them again: {_GENERATE}")
    else:
        yield Check("CDI specs", asked.of_gpus(State.GOOD), ", ".join(sorted(seen.cdi)), expected)


def _loss(info: EngineInfo, ids: tuple[str, ...], asked: Asked) -> Iterator[Check]:
    """GPUs that vanish from a running container when systemd reloads its units: nvidia-container-toolkit issue 48."""
    if ids or "nvidia" not in info.runtimes or info.cgroup_driver != "systemd":
        return
    found = "NVIDIA runtime without CDI, and systemd owns the cgroups: `systemctl daemon-reload` takes the GPUs from a running container"
    remedy = f"use CDI ({_GENERATE}), or set the engine's cgroup driver to cgroupfs"
    yield Check(
        "GPU loss", asked.of_gpus(State.WARNING), found, "device access that survives a reload", remedy
    )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) or "unknown"
