"""The Docker engine, through docker-py: the one module that talks to it.

Promises: the container is exactly the launch plan's; it is never removed before its state was read, and never pulled
or replaced in silence; a missing engine is a `Refusal` with the remedy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import docker
import docker.errors
import docker.types
import requests.exceptions

from runner.compose import LOG_DRIVER, LOG_OPTIONS, RUNTIME_CAPABILITIES, RUNTIME_DRIVER, tmpfs_options
from runner.engine import Lines, Phase, State
from runner.errors import ExitCode, Fault, Refusal
from runner.plan import GpuRequest, LaunchPlan

_CONFLICT = 409
_START_ENGINE = (
    "start the engine (`just engine` does it as root on Debian), and see that this user may use it"
)


def connect(timeout_s: int = 120) -> docker.DockerClient:
    """Return a client of the engine that the environment names. Raises `Refusal` if none answers.

    `timeout_s` is how long an answer may stay silent: an image of gigabytes is unpacked without a word.
    """
    try:
        client = docker.from_env(timeout=timeout_s)
        client.ping()
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        fault = Fault(
            "no Docker engine", "the engine's socket", "an engine that answers", str(error), _START_ENGINE
        )
        raise Refusal(fault, exit_code=ExitCode.FAILED) from error
    return client


class DockerEngine:
    """`engine.Engine` for Docker."""

    def __init__(self, client: docker.DockerClient) -> None:
        self._client = client

    def prepare(self, plan: LaunchPlan) -> None:
        """Nothing: the image was checked when the plan was made, and mounts are the engine's own work."""

    def start(self, plan: LaunchPlan) -> None:
        """Create and start the container of `plan`; one that has ended under its name is removed first."""
        state = self.inspect(plan.name)
        if state.phase is Phase.RUNNING:
            fix = "follow it with `ferry status`, or end it with `ferry stop`"
            fault = Fault("the run is running", plan.name, "no container of this name", "a running one", fix)
            raise Refusal(fault, exit_code=ExitCode.LEASE_HELD)
        if state.phase is Phase.ENDED:
            self.remove(plan.name)
        with _as_refusal(plan.name):
            api = self._client.api
            try:
                created = api.create_container(**create_arguments(plan, api))
            except docker.errors.APIError as error:
                if error.status_code != _CONFLICT:
                    raise
                fix = "another resume was a moment faster: follow it with `ferry status`"
                fault = Fault("the run is running", plan.name, "no container of this name", "a new one", fix)
                raise Refusal(fault, exit_code=ExitCode.LEASE_HELD) from error
            api.start(created["Id"])

    def follow(self, name: str, on_line: Callable[[str], None]) -> State:
        """Follow the container's output from its beginning."""
        lines = Lines(on_line)
        with _as_refusal(name):
            container = self._client.containers.get(name)
            for chunk in container.logs(stream=True, follow=True):
                lines.feed(chunk)
            lines.close()
            container.wait()
        return self.inspect(name)

    def signal(self, name: str, signal: str) -> None:
        """Send `signal` to the container's first process, which hands it on."""
        if self.inspect(name).phase is Phase.RUNNING:
            with _as_refusal(name):
                self._client.containers.get(name).kill(signal)

    def inspect(self, name: str) -> State:
        """Ask the engine for the container's state."""
        with _as_refusal(name):
            try:
                state = self._client.containers.get(name).attrs["State"]
            except docker.errors.NotFound:
                return State(Phase.ABSENT)
        if state["Status"] in ("running", "restarting", "paused", "removing"):
            return State(Phase.RUNNING)
        if state["Status"] == "created":
            return State(Phase.ENDED)
        return State(Phase.ENDED, state["ExitCode"], bool(state.get("OOMKilled")))

    def remove(self, name: str) -> None:
        """Remove the container if it has ended."""
        with _as_refusal(name), contextlib.suppress(docker.errors.NotFound):
            try:
                self._client.containers.get(name).remove(v=True)
            except docker.errors.APIError as error:
                if "already in progress" not in str(error.explanation):
                    raise  # Otherwise `ferry stop` and `ferry resume` saw the end at the same time.

    def run_once(self, plan: LaunchPlan) -> tuple[int, str]:
        """Run the command of `plan` instead of the image's own, to its end; return status and output; remove it."""
        with _as_refusal(plan.name):
            api = self._client.api
            words = create_arguments(plan, api) | {
                "entrypoint": list(plan.command),
                "command": [],
                "working_dir": plan.launch.code,
            }
            made = api.create_container(**words)["Id"]
            try:
                api.start(made)
                status = api.wait(made)["StatusCode"]
                output = b"".join(api.logs(made, stream=True)).decode("utf-8", "backslashreplace")
            finally:
                api.remove_container(made, v=True, force=True)
        return status, output


@dataclasses.dataclass(frozen=True)
class Answer:
    """How a container ended that was only asked something: its exit status, what it said, and what it complained of."""

    status: int
    output: str
    errors: str


def look_inside(client: docker.DockerClient, reference: str, command: Sequence[str]) -> Answer:
    """Run `command` in the image `reference` with no network, nothing to write to and the caller's uid; remove it."""
    with _as_refusal(reference):
        api = client.api
        host = api.create_host_config(
            network_mode="none", read_only=True, cap_drop=["ALL"], security_opt=["no-new-privileges:true"]
        )
        user = f"{os.getuid()}:{os.getgid()}"
        made = api.create_container(reference, entrypoint=list(command), user=user, host_config=host)["Id"]
        try:
            api.start(made)
            status = int(api.wait(made)["StatusCode"])
            said, complained = (
                b"".join(api.logs(made, stdout=out, stderr=not out, stream=True)).decode(
                    "utf-8", "backslashreplace"
                )
                for out in (True, False)
            )
        finally:
            api.remove_container(made, v=True, force=True)
    return Answer(status, said, complained)


def create_arguments(plan: LaunchPlan, api: docker.APIClient) -> dict[str, Any]:
    """Return what docker-py's low-level `create_container` takes for `plan` (the high-level one has no stop timeout)."""
    host: dict[str, Any] = {
        "mounts": [
            docker.types.Mount(mount.target, str(mount.source), type="bind", read_only=mount.read_only)
            for mount in plan.mounts
        ],
        "tmpfs": {"/tmp": tmpfs_options(plan)},  # noqa: S108 - the container's own tmpfs
        "shm_size": plan.shm_bytes,
        "mem_limit": plan.memory_bytes,
        "memswap_limit": plan.memory_bytes,
        "network_mode": "none",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "init": True,
        "restart_policy": {"Name": "no"},
        "log_config": docker.types.LogConfig(type=LOG_DRIVER, config=dict(LOG_OPTIONS)),
        "ulimits": [
            docker.types.Ulimit(name=name, soft=limit, hard=limit)
            for name, limit in sorted(plan.limits.items())
        ],
    }
    if plan.gpus is not None:
        host["device_requests"] = [_device_request(plan.gpus)]
    return {
        "image": plan.image.reference,
        "name": plan.name,
        "command": list(plan.command),
        "user": plan.user,
        "environment": dict(plan.environment),
        "use_config_proxy": False,
        "labels": dict(plan.labels),
        "stop_signal": "SIGTERM",
        "stop_timeout": plan.stop_grace_s,
        "host_config": api.create_host_config(**host),
    }


def _device_request(gpus: GpuRequest) -> docker.types.DeviceRequest:
    if gpus.by == "cdi":
        return docker.types.DeviceRequest(driver="cdi", device_ids=list(gpus.devices))
    return docker.types.DeviceRequest(
        driver=RUNTIME_DRIVER, device_ids=list(gpus.ids), capabilities=[[*RUNTIME_CAPABILITIES, "gpu"]]
    )


@contextlib.contextmanager
def _as_refusal(name: str) -> Iterator[None]:
    try:
        yield
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        explanation = getattr(error, "explanation", None) or str(error)
        fix = "see the engine's message; `ferry resume --dry-run` shows what it was asked for"
        fault = Fault("the engine refuses", name, "a container as planned", str(explanation), fix)
        raise Refusal(fault, exit_code=ExitCode.FAILED) from error
