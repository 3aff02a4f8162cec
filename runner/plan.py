"""The launch plan: everything about the container that will train, decided before it exists.

Promises: `plan_launch` is a pure function (no I/O, no clock, no environment); the same inputs give the same plan, and
both doors (`ferry resume` and compose) start exactly it. Least authority: the caller's uid, no network, a read-only
root, no capabilities, no new privileges; only the run's own output and caches are writable, and nothing of the caller's
environment is seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from runner.changes import CONTAINER_ROOT
from runner.engine_info import gpu_device
from runner.errors import Fault, Refusal
from runner.image import ReadyImage
from runner.inside.digests import sha256_bytes
from runner.inside.launch import Launch
from runner.rebase import RebasedInputs
from runner.server import ServerProfile

_TMP_BYTES = 8 << 30
# Inside /tmp, so that a container without the mount (a preflight) has an empty folder of its own there.
CACHES = "/tmp/caches"  # noqa: S108 - a path in the container
# What a run wants of each limit; it gets what the host's hard limit allows. Locked memory: pinned buffers, RDMA. Stack: what
# NVIDIA's own images are started with. Open files: loader workers hand tensors over as descriptors.
_LIMITS = {"memlock": -1, "nofile": 65536, "stack": 64 << 20}
# The docker command line and compose hand a proxy of ~/.docker/config.json to every container, password and all, unless the
# container has its own value.
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
# The folder of the run folder that holds what was rewritten, under the paths of the bundle.
REBASED = "rebased"


@dataclasses.dataclass(frozen=True)
class Mount:
    """One bind mount: host path, path as seen inside, and whether the container may write."""

    source: Path
    target: str
    read_only: bool


@dataclasses.dataclass(frozen=True)
class HostFacts:
    """What the plan must know of the host and of the caller.

    `memory_bytes` is what a run could have at most: the RAM, or less where a cgroup above or a scheduler's job has less.
    `gpus` are the ids of the GPUs that the run takes. `hard_limits` are those of whoever starts the container, by ulimit's
    name; -1 is unlimited, and one that could not be read is absent.
    """

    uid: int
    gid: int
    memory_bytes: int
    gpus: tuple[str, ...] = ()
    hard_limits: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class GpuRequest:
    """The one request for GPUs: CDI devices `nvidia.com/gpu=ID`, or a request to the NVIDIA runtime. Never both."""

    by: Literal["cdi", "runtime"]
    ids: tuple[str, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the CDI devices; none if the request goes to the runtime."""
        return tuple(map(gpu_device, self.ids)) if self.by == "cdi" else ()


@dataclasses.dataclass(frozen=True)
class RunPaths:
    """Where the parts of a run folder lie as the engine shows them: inside a container, or on the host."""

    bundle: str
    code: str
    output: str
    control: str
    segments: str
    lease: str
    caches: str


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """What an engine starts. Sizes in bytes, times in seconds; `command` is the argv after the image's entry point.
    `folder` is the run folder; `caches` the folder on this host that is kept between the run's segments. `limits` are
    ulimits (soft and hard alike), -1 for unlimited.

    `links` (venv engine only) are symbolic links that stand in for mounts: link path -> target.
    """

    name: str
    folder: Path
    image: ReadyImage
    launch: Launch
    command: tuple[str, ...]
    mounts: tuple[Mount, ...]
    links: Mapping[str, str]
    environment: Mapping[str, str]
    user: str
    gpus: GpuRequest | None
    limits: Mapping[str, int]
    caches: Path
    memory_bytes: int
    shm_bytes: int
    tmp_bytes: int
    stop_grace_s: int
    labels: Mapping[str, str]


def container_name(run: str, folder: Path) -> str:
    """Return the one name that a run's container has on this host: a second one cannot exist beside it."""
    return f"ferry-{run}-{sha256_bytes(str(folder).encode('utf-8', 'surrogateescape'))[:12]}"


def plan_launch(inputs: RebasedInputs, image: ReadyImage, folder: Path, host: HostFacts) -> LaunchPlan:
    """Return the plan for training `inputs` with `image` in the run folder `folder` (absolute).

    Raises `Refusal` if there are fewer GPUs than ranks.
    """
    docker = inputs.server.engine == "docker"
    spec = inputs.bundle.spec
    if host.gpus and len(host.gpus) < spec.world.ranks:
        fix = "give as many GPUs as ranks: how many ranks train is part of the run and never changed"
        found = f"{len(host.gpus)}: {', '.join(host.gpus)}"
        where = f"server {inputs.server.name}: gpus"
        raise Refusal(Fault("fewer GPUs than ranks", where, f"{spec.world.ranks} GPUs", found, fix))
    caches = _caches(inputs.server, spec.name, folder)
    paths = _container_paths() if docker else _host_paths(inputs, folder, caches)
    launch = _launch(inputs, image, paths)
    mounts = _mounts(inputs, folder, paths, caches) if docker else ()
    links = {} if docker else _links(inputs, paths)
    return LaunchPlan(
        name=container_name(spec.name, folder),
        folder=folder,
        image=image,
        launch=launch,
        command=(f"{paths.control}/launch.json",),
        mounts=mounts,
        links=links,
        environment=_environment(inputs, paths, str(folder / "scratch"), host.gpus),
        user=f"{host.uid}:{host.gid}",
        gpus=GpuRequest(inputs.server.gpus.by, host.gpus) if inputs.server.gpus else None,
        limits=_limits(host.hard_limits) if docker else {},
        caches=caches,
        memory_bytes=int(host.memory_bytes * inputs.server.memory_guard),
        shm_bytes=inputs.server.shm_bytes,
        tmp_bytes=_TMP_BYTES,
        stop_grace_s=inputs.server.stop_grace_s,
        labels={"ferry.run": spec.name, "ferry.bundle": inputs.bundle.root, "ferry.code": spec.code.tree},
    )


def _caches(server: ServerProfile, run: str, folder: Path) -> Path:
    return folder / "caches" if server.scratch is None else Path(server.scratch) / container_name(run, folder)


def _limits(hard: Mapping[str, int]) -> dict[str, int]:
    """Each limit that a run wants, or as much as the hard limit `hard` lets a container have."""
    return {
        name: wanted if hard[name] < 0 else hard[name] if wanted < 0 else min(wanted, hard[name])
        for name, wanted in _LIMITS.items()
        if name in hard
    }


def _container_paths() -> RunPaths:
    root = str(CONTAINER_ROOT)
    return RunPaths(
        f"{root}/bundle",
        f"{root}/code",
        f"{root}/run",
        f"{root}/control",
        f"{root}/segments",
        f"{root}/lease",
        CACHES,
    )


def _host_paths(inputs: RebasedInputs, folder: Path, caches: Path) -> RunPaths:
    run = str(folder)
    return RunPaths(
        str(inputs.bundle.path if inputs.mode == "mount" else folder / "bundle"),
        f"{run}/code",
        f"{run}/output",
        f"{run}/control",
        f"{run}/segments",
        f"{run}/lease",
        str(caches),
    )


def _launch(inputs: RebasedInputs, image: ReadyImage, paths: RunPaths) -> Launch:
    bundle = inputs.bundle
    spec = bundle.spec
    places = {"{bundle}": paths.bundle, "{code}": paths.code, "{output}": paths.output}
    checkpoint = bundle.checkpoint
    return Launch(
        run=spec.name,
        server=inputs.server.name,
        engine=inputs.server.engine,
        segments_before=len(bundle.lineage),
        image=spec.image.digest,
        lock=spec.image.lock,
        lock_file=image.lock_file,
        site_packages=image.site_packages,
        code=paths.code,
        code_tree=spec.code.tree,
        code_archive=spec.code.sha256,
        bundle=paths.bundle,
        bundle_root=bundle.root,
        verified=f"{paths.control}/verified.json",
        output=paths.output,
        segments=paths.segments,
        lease=paths.lease,
        seal=f"{paths.control}/SEALED.json",
        request=spec.outputs.request,
        outcome=spec.outputs.outcome,
        world=spec.world.ranks,
        updates=spec.updates,
        checkpoint=checkpoint.name if checkpoint else "fresh",
        inventory=f"sha256:{inputs.inventory}" if checkpoint else "fresh",
        contract=f"sha256:{inputs.contract}" if checkpoint else "fresh",
        checkpoint_lies="in the run folder" if _has_own_checkpoint(inputs) else "in the bundle",
        torchrun=_torchrun(spec.world.ranks, spec.launch.module),
        args=[_placed(word, places) for word in spec.launch.args],
        resume_args=[_placed(word, places) for word in spec.launch.resume_args],
    )


def _torchrun(ranks: int, module: str) -> list[str]:
    # --local-addr: without a network a host's name need not resolve, and torchrun would ask for it.
    return [
        "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", f"--nproc-per-node={ranks}",
        "--max-restarts=0", "--log-dir", "{logs}", "--redirects", "3", "--tee", "3", "-m", module,
    ]  # fmt: skip


def _placed(word: str, places: Mapping[str, str]) -> str:
    for name, path in places.items():
        word = word.replace(name, path)
    return word


def placed(word: str, launch: Launch) -> str:
    """Return an argument of the run spec with `{bundle}`, `{code}`, `{output}` and `{checkpoint}` as paths."""
    places = {"{bundle}": launch.bundle, "{code}": launch.code, "{output}": launch.output}
    return _placed(word, places | {"{checkpoint}": f"{launch.output}/{launch.checkpoint}"})


def account_files(user: str) -> dict[str, bytes]:
    """Return name -> content of the files that give the numeric `user` ('UID:GID') a name inside, for /etc.

    Without one, whatever asks who it runs as fails: Python's getpass.getuser, hence torch's and Triton's caches.
    """
    uid, gid = user.split(":")
    users = {uid: f"ferry:x:{uid}:{gid}:ferry:/tmp/home:/usr/sbin/nologin"}
    groups = {gid: f"ferry:x:{gid}:"}
    users |= {"65534": "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin"} if uid != "65534" else {}
    groups |= {"65534": "nogroup:x:65534:"} if gid != "65534" else {}
    return {
        name: "".join(f"{line}\n" for line in lines.values()).encode()
        for name, lines in (("passwd", users), ("group", groups))
    }


def _mounts(inputs: RebasedInputs, folder: Path, paths: RunPaths, caches: Path) -> tuple[Mount, ...]:
    """Parents before children: the bundle's checkpoint lies, read-only, inside the writable output folder."""
    bundle = inputs.bundle
    mounts = [
        Mount(bundle.path, paths.bundle, True),
        Mount(folder / "code", paths.code, True),
        Mount(folder / "control", paths.control, True),
        Mount(folder / "segments", paths.segments, False),
        Mount(folder / "lease", paths.lease, False),
        Mount(folder / "output", paths.output, False),
        Mount(caches, paths.caches, False),
        *(Mount(folder / "control" / name, f"/etc/{name}", True) for name in sorted(account_files("0:0"))),
    ]
    if bundle.checkpoint is not None and inputs.mode in ("mount", "hardlink"):
        # A hard link is the bundle's own file: it must not be writable either.
        lies = (
            bundle.checkpoint.path if inputs.mode == "mount" else folder / "output" / bundle.checkpoint.name
        )
        mounts.append(Mount(lies, f"{paths.output}/{bundle.checkpoint.name}", True))
    for file in inputs.files:
        source = folder / REBASED / file.path
        mounts.append(Mount(source, f"{paths.bundle}/{file.path}", True))
        if inputs.mode == "mount" and bundle.checkpoint and file.path.startswith(f"{inputs.checkpoint}/"):
            name = file.path.removeprefix(f"{inputs.checkpoint}/")
            mounts.append(Mount(source, f"{paths.output}/{bundle.checkpoint.name}/{name}", True))
    mounts += [Mount(asset.host, asset.inside, True) for asset in inputs.assets]
    return tuple(mounts)


def _has_own_checkpoint(inputs: RebasedInputs) -> bool:
    return inputs.server.engine == "docker" and inputs.mode != "mount" and inputs.checkpoint is not None


def _links(inputs: RebasedInputs, paths: RunPaths) -> dict[str, str]:
    links = {asset.inside: str(asset.host) for asset in inputs.assets if asset.inside != str(asset.host)}
    if inputs.bundle.checkpoint is not None:
        links[f"{paths.output}/{inputs.bundle.checkpoint.name}"] = f"{paths.bundle}/{inputs.checkpoint}"
    return links


def _environment(
    inputs: RebasedInputs, paths: RunPaths, scratch: str, gpus: tuple[str, ...]
) -> dict[str, str]:
    """Everything the run sees of an environment; nothing of the caller's own gets in. The run spec's entries win."""
    docker = inputs.server.engine == "docker"
    tmp = "/tmp" if docker else scratch  # noqa: S108 - the container's own tmpfs
    environment = {
        "HOME": f"{tmp}/home",
        "USER": "ferry",
        "LOGNAME": "ferry",
        "LANG": "C.UTF-8",
        # Also without a container: libraries take paths for patterns, and a run folder may hold "[".
        "TMPDIR": "/tmp",  # noqa: S108
        "PYTHONPATH": paths.code,
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "HF_HOME": f"{tmp}/huggingface",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # New at each start: a build that was killed leaves a lock there, for which every later one waits (pytorch 189245).
        "TORCH_EXTENSIONS_DIR": f"{tmp}/torch-extensions",
        # Kept between segments: entries are found by the hash of their source; their locks are the kernel's.
        "TORCHINDUCTOR_CACHE_DIR": f"{paths.caches}/inductor",
        "TRITON_CACHE_DIR": f"{paths.caches}/triton",
        # The only interface of a container without a network.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if docker:
        environment |= {spelled: "" for name in _PROXIES for spelled in (name, name.lower())}
    else:
        # No engine hands out devices here: CUDA shows the run those of the profile, counted as NVML counts them.
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return environment | dict(inputs.bundle.spec.launch.env)
