"""The second door: the launch plan as a compose file in the run folder.

Promises: `docker compose up trainer` starts the same container as `ferry resume`; the file is complete (nothing of
the caller's environment is interpolated into it) and byte-identical for the same plan.
"""

from __future__ import annotations

from typing import Any

import yaml

from runner.plan import LaunchPlan, Mount

# What the NVIDIA runtime is asked for: CUDA and NVML, nothing of graphics. Compose and the docker command add "gpu".
RUNTIME_DRIVER = "nvidia"
RUNTIME_CAPABILITIES = ("compute", "utility")
# Named, so that a daemon-wide log driver (one that sends lines elsewhere, and blocks) is not the run's; and bounded: the
# ranks' own files below the run folder have every line, the engine's log is a copy.
LOG_DRIVER = "json-file"
LOG_OPTIONS = {"max-file": "2", "max-size": "1g"}
_HEADER = "# Written by ferry from the launch plan: `docker compose --env-file compose.env up trainer` in Ferry's folder.\n"


def render(plan: LaunchPlan) -> bytes:
    """Return the compose file of `plan`."""
    service: dict[str, Any] = {
        "container_name": plan.name,
        "image": plan.image.reference,
        "pull_policy": "never",
        "command": [_escaped(word) for word in plan.command],
        "user": plan.user,
        "environment": {name: _escaped(value) for name, value in sorted(plan.environment.items())},
        "labels": {name: _escaped(value) for name, value in sorted(plan.labels.items())},
        "volumes": [_volume(mount) for mount in plan.mounts],
        "tmpfs": [tmpfs(plan)],
        "shm_size": plan.shm_bytes,
        "mem_limit": plan.memory_bytes,
        "memswap_limit": plan.memory_bytes,
        "network_mode": "none",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "init": True,
        "restart": "no",
        "logging": {"driver": LOG_DRIVER, "options": dict(LOG_OPTIONS)},
        "stop_signal": "SIGTERM",
        "stop_grace_period": f"{plan.stop_grace_s}s",
    }
    if plan.limits:
        service["ulimits"] = {name: {"soft": limit, "hard": limit} for name, limit in plan.limits.items()}
    if plan.gpus is not None and plan.gpus.by == "cdi":
        service["devices"] = list(plan.gpus.devices)
    elif plan.gpus is not None:
        service["gpus"] = [
            {
                "driver": RUNTIME_DRIVER,
                "device_ids": list(plan.gpus.ids),
                "capabilities": list(RUNTIME_CAPABILITIES),
            }
        ]
    text = yaml.safe_dump(
        {"services": {"trainer": service}}, sort_keys=True, default_flow_style=False, width=1000
    )
    return (_HEADER + text).encode()


def render_env(plan: LaunchPlan) -> bytes:
    """Return `compose.env`: what Ferry's own compose.yaml is given to find the run, and to name its project.

    A project of its own for every run: compose keeps one container a service and project, and would replace another's.
    """
    return f"FERRY_RUN={_quoted(str(plan.folder))}\nFERRY_PROJECT={_quoted(plan.name)}\n".encode()


def _quoted(text: str) -> str:
    for char, escaped in (("\\", "\\\\"), ('"', '\\"'), ("$", "\\$"), ("\n", "\\n")):
        text = text.replace(char, escaped)
    return f'"{text}"'


def tmpfs(plan: LaunchPlan) -> str:
    """Return the mount of /tmp in docker's notation; exec, since caches of compiled kernels lie there."""
    return f"/tmp:{tmpfs_options(plan)}"  # noqa: S108 - the container's own tmpfs


def tmpfs_options(plan: LaunchPlan) -> str:
    """Return the options of the tmpfs at /tmp."""
    return f"rw,exec,nosuid,nodev,mode=1777,size={plan.tmp_bytes}"


def _volume(mount: Mount) -> dict[str, Any]:
    return {
        "type": "bind",
        "source": _escaped(str(mount.source)),
        "target": _escaped(mount.target),
        "read_only": mount.read_only,
        "bind": {"create_host_path": False},
    }


def _escaped(text: str) -> str:
    return text.replace("$", "$$")
