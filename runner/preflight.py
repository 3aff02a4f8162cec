"""The run's own validation, inside the image that will train, before the run folder appears.

Promises: it sees what the run will see (code, bundle, assets, rewritten files, environment, GPUs) and may write nothing
but /tmp; an exit status other than 0 is a refusal that shows its last lines; its container never stays.
"""

from __future__ import annotations

import dataclasses

from runner.docker_engine import DockerEngine, connect
from runner.errors import Fault, Refusal
from runner.image import ReadyImage
from runner.plan import CACHES, HostFacts, LaunchPlan, placed, plan_launch
from runner.process import tail
from runner.rebase import RebasedInputs
from runner.run import RunFolder

_MEND = "mend what its last lines name; nothing was prepared"


def refuse_if_impossible(inputs: RebasedInputs) -> None:
    """Raise `Refusal` if the run spec asks for a preflight that this engine cannot give."""
    if inputs.bundle.spec.preflight and inputs.server.engine != "docker":
        fix = (
            "prepare with the docker engine: without containers there is nothing to mount before a run starts"
        )
        where = f"server {inputs.server.name}: engine"
        raise Refusal(Fault("no preflight without containers", where, "docker", inputs.server.engine, fix))


def run_preflight(inputs: RebasedInputs, image: ReadyImage, folder: RunFolder, host: HostFacts) -> str:
    """Run the spec's preflight command over the run folder `folder`, not yet in its place; return what it printed.

    Raises `Refusal` if it does not end with status 0.
    """
    spec = inputs.bundle.spec
    if spec.preflight is None:
        return ""
    plan = plan_launch(dataclasses.replace(inputs, mode="mount"), image, folder.path, host)
    words = [placed(word, plan.launch) for word in spec.preflight]
    if words[0] in ("python", "python3"):
        words[0] = image.python
    status, output = DockerEngine(connect()).run_once(_harmless(plan, tuple(words)))
    if status != 0:
        found = f"exit status {status}\n{tail(output)}"
        raise Refusal(Fault("preflight fails", " ".join(spec.preflight), "exit status 0", found, _MEND))
    return output


def _harmless(plan: LaunchPlan, words: tuple[str, ...]) -> LaunchPlan:
    kept = (mount for mount in plan.mounts if mount.target != CACHES)
    mounts = tuple(dataclasses.replace(mount, read_only=True) for mount in kept)
    labels = {"ferry.preflight": plan.labels["ferry.run"]}
    return dataclasses.replace(
        plan, command=words, mounts=mounts, labels=labels, name=f"{plan.name}-preflight"
    )
