"""Whether a built image does what it is for: `ferry image smoke NAME`.

Promises: everything runs in containers with a run's own authority (no network, read-only root, the caller's uid, a tmpfs)
and through a run's own road; no compiler can be reached where an op is loaded or trained with; what is wrong is named,
all of it at once where it was looked at together. On a CPU: a GPU's own kernels are not started.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runner import demo, image, screen, verify
from runner.compare import Comparison
from runner.demo import Server
from runner.docker_engine import DockerEngine, connect
from runner.engines import ready_image
from runner.errors import ExitCode, Fault, Refusal, refuse_if
from runner.facts import host_facts
from runner.image_spec import ImageSpec, RecipeBase, load_spec
from runner.plan import plan_launch
from runner.process import tail
from runner.rebase import rebase

# What compiles an op at run time calls this, and fails: a run that ends well has compiled none.
NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}
_SITE = "/opt/venv/lib/"
_REBUILD = "build the image again; if its lock or its ops changed, see docs/images.md"


@dataclasses.dataclass(frozen=True)
class Smoke:
    """An image that passed: its pin, what was found in it, and how the moved run compares with the one that stayed."""

    pin: image.ImagePin
    found: Mapping[str, Any]
    comparison: Comparison


def smoke(name: str, project: Path, work: Path, say: Callable[[str], None]) -> Smoke:
    """Build the image `name` if it is not there, and see what it does; `work` is made anew for its runs.

    Raises `Refusal`: what `images/probe.py` found wrong, all of it, or what the 4-rank run did otherwise.
    """
    connect().close()
    spec = load_spec(name, project)
    seen: list[Mapping[str, Any]] = []

    def look(bundle: Path, server: Server) -> None:
        say(f"probe: imports, versions, {len(spec.ops)} ops without a compiler")
        answer = probe(spec, project, bundle, server)
        refuse_if(faults_of(answer, spec))
        seen.append(answer)

    comparison = demo.run(
        work, project, image_name=name, env=NO_COMPILER, before_training=look, results=screen.err
    )
    pin = image.build(name, project, on_line=say)
    if not comparison.equal:
        fix = "the environment is not exact: see the comparison above; no run may be moved with this image"
        fault = Fault("moved run differs", f"image {name}", "EXACT", comparison.verdict, fix)
        raise Refusal(fault, exit_code=ExitCode.DIFFERENT)
    return Smoke(pin, seen[0], comparison)


def probe(spec: ImageSpec, project: Path, bundle: Path, server: Server) -> Mapping[str, Any]:
    """Return what `images/probe.py` says, run as a preflight of `bundle` on `server` would be: nothing but /tmp is writable."""
    inputs = rebase(verify.verify(verify.open_bundle(bundle), use_memory=True), server.profile)
    ready = ready_image(server.profile, inputs.bundle.spec.image, project)
    plan = plan_launch(inputs, ready, server.folder / "probe", host_facts(server.profile))
    script = (project / "images" / "probe.py").read_text(encoding="utf-8")
    words = (
        ready.python,
        "-I",
        "-c",
        script,
        json.dumps(spec.ops),
        json.dumps(list(spec.expect)),
        # CPU ranks run in every image: that is how it is tested.
        json.dumps(sorted({spec.accelerator, "cpu"})),
    )
    harmless = dataclasses.replace(
        plan, command=words, mounts=(), labels={"ferry.smoke": spec.name}, name=f"{plan.name}-probe"
    )
    status, output = DockerEngine(connect()).run_once(harmless)
    said = [line.removeprefix("PROBE ") for line in output.splitlines() if line.startswith("PROBE ")]
    if status != 0 or len(said) != 1:
        found = f"exit status {status}\n{tail(output)}"
        raise Refusal(
            Fault("probe fails", f"image {spec.name}", "exit status 0, one answer", found, _REBUILD)
        )
    answer: Mapping[str, Any] = json.loads(said[0])
    return answer


def faults_of(answer: Mapping[str, Any], spec: ImageSpec) -> list[Fault]:
    """Return everything in the probe's answer that is not as `spec` says."""
    where = f"image {spec.name}"
    faults = [
        Fault("version differs", f"{where}: {name}", version, str(answer["versions"].get(name)), _REBUILD)
        for name, version in spec.expect.items()
        if answer["versions"].get(name) != version
    ]
    faults += [
        Fault("module does not import", f"{where}: {module}", "an import", error, _REBUILD)
        for module, error in answer["not_imported"].items()
    ]
    faults += [
        Fault("requirement does not hold", where, "what its packages ask for", line, "lock again")
        for line in answer["unmet"]
    ]
    for accelerator, seen in answer["loads"].items():
        place = f"{where}: DS_ACCELERATOR={accelerator}"
        faults += [
            Fault(
                "op is not prebuilt",
                f"{place}: {op}",
                f"a file below {_SITE}",
                str(seen["ops"].get(op)),
                _REBUILD,
            )
            for op in spec.ops
            if not str(seen["ops"].get(op)).startswith(_SITE)
        ]
        faults += [
            Fault("a compiler was called", place, "no call", call, _REBUILD)
            for call in (*seen["calls"], *(f"{name} was made" for name in seen["extensions"]))
        ]
    if isinstance(spec.base, RecipeBase):
        compiles = answer["launcher"] == "built"
        if spec.base.variant == "toolchain" and not compiles:
            fix = "the base needs gcc, libc's and Python's headers: see images/base"
            faults.append(Fault("Triton could compile nothing", where, "built", answer["launcher"], fix))
        if spec.base.variant == "runtime" and compiles:
            fix = "build on the variant without a compiler"
            faults.append(Fault("a compiler is in the image", where, "none", "one that works", fix))
    return faults
