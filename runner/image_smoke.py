"""Whether a built image does what it is for: `ferry image smoke NAME`.

Promises: everything runs in containers with a run's own authority (no network, read-only root, the caller's uid, a tmpfs)
and through a run's own road; no compiler can be reached where an op is loaded or trained with; what is wrong is named,
all of it at once where it was looked at together. Without `gpu` all of it runs on CPUs, and no GPU's kernel is started.
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
from runner.plan import CACHES, LaunchPlan, plan_launch
from runner.prepare import make_caches
from runner.process import tail
from runner.rebase import rebase

# What compiles an op at run time calls this, and fails: a run that ends well has compiled none.
NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}
_SITE = "/opt/venv/lib/"
# Of the largest value: tensor cores round fp32 products to ten bits.
_CLOSE = 0.01
_REBUILD = "build the image again; if its lock or its ops changed, see docs/images.md"


@dataclasses.dataclass(frozen=True)
class Smoke:
    """An image that passed: its pin, what was found in it, and how the moved run compares with the one that stayed."""

    pin: image.ImagePin
    found: Mapping[str, Any]
    comparison: Comparison


def smoke(name: str, project: Path, work: Path, say: Callable[[str], None], *, gpu: bool = False) -> Smoke:
    """Build the image `name` if it is not there, and see what it does; `work` is made anew for its runs.

    With `gpu` its ranks train on GPUs of this server, and a kernel is compiled there. Raises `Refusal`: what
    `images/probe.py` or the kernels found wrong, all of it, or what the 4-rank run did otherwise.
    """
    spec = load_spec(name, project)
    if gpu and spec.accelerator != "cuda":
        fix = "leave out --gpu, or smoke-test the image 'cuda'"
        raise Refusal(Fault("image has no CUDA", f"image {name}: accelerator", "cuda", spec.accelerator, fix))
    connect().close()
    seen: list[Mapping[str, Any]] = []

    def look(bundle: Path, server: Server) -> None:
        plan = _plan(project, bundle, server)
        say(f"probe: imports, versions, {len(spec.ops)} ops without a compiler")
        answer = probe(spec, project, plan)
        refuse_if(faults_of(answer, spec))
        if gpu:
            say("kernels: compiled on every GPU, then found in the cache without a compiler")
            runs = kernels(spec, project, plan)
            refuse_if(kernel_faults(*runs, f"image {name}"))
            answer = {**answer, "kernels": runs[1]}
        seen.append(answer)

    env = NO_COMPILER | ({"DS_ACCELERATOR": "cuda"} if gpu else {})
    comparison = demo.run(
        work, project, image_name=name, env=env, before_training=look, results=screen.err, gpu=gpu
    )
    pin = image.build(name, project, on_line=say)
    if not comparison.equal:
        fix = "the environment is not exact: see the comparison above; no run may be moved with this image"
        fault = Fault("moved run differs", f"image {name}", "EXACT", comparison.verdict, fix)
        raise Refusal(fault, exit_code=ExitCode.DIFFERENT)
    return Smoke(pin, seen[0], comparison)


def _plan(project: Path, bundle: Path, server: Server) -> LaunchPlan:
    """Return the plan of a run of `bundle` on `server`."""
    inputs = rebase(verify.verify(verify.open_bundle(bundle), use_memory=True), server.profile)
    ready = ready_image(server.profile, inputs.bundle.spec.image, project)
    return plan_launch(inputs, ready, server.folder / "probe", host_facts(server.profile))


def probe(spec: ImageSpec, project: Path, plan: LaunchPlan) -> Mapping[str, Any]:
    """Return what `images/probe.py` says, run as a preflight of `plan` would be: nothing but /tmp is writable."""
    # CPU ranks run in every image: that is how it is tested.
    accelerators = sorted({spec.accelerator, "cpu"})
    words = (json.dumps(spec.ops), json.dumps(list(spec.expect)), json.dumps(accelerators))
    return _said("PROBE", project / "images" / "probe.py", words, dataclasses.replace(plan, mounts=()), spec)


def kernels(spec: ImageSpec, project: Path, plan: LaunchPlan) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return what `images/kernels.py` says in two containers that share a run's folder of caches.

    The compiler is there in the first and hidden in the second, as `plan`, made with `NO_COMPILER`, has it.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    make_caches(plan)
    script = project / "images" / "kernels.py"
    hidden = dataclasses.replace(plan, mounts=tuple(mount for mount in plan.mounts if mount.target == CACHES))
    usual = {name: value for name, value in plan.environment.items() if name not in NO_COMPILER}
    first = _said("KERNELS", script, (), dataclasses.replace(hidden, environment=usual), spec)
    return first, _said("KERNELS", script, (), hidden, spec)


def _said(
    word: str, script: Path, arguments: tuple[str, ...], plan: LaunchPlan, spec: ImageSpec
) -> Mapping[str, Any]:
    """Run a script in a container of `plan`, and return the JSON that it prints behind `word`."""
    command = (plan.image.python, "-I", "-c", script.read_text(encoding="utf-8"), *arguments)
    harmless = dataclasses.replace(
        plan, command=command, labels={"ferry.smoke": spec.name}, name=f"{plan.name}-probe"
    )
    status, output = DockerEngine(connect()).run_once(harmless)
    said = [line.removeprefix(f"{word} ") for line in output.splitlines() if line.startswith(f"{word} ")]
    if status != 0 or len(said) != 1:
        found = f"exit status {status}\n{tail(output)}"
        what = f"{script.stem} fails"
        raise Refusal(Fault(what, f"image {spec.name}", "exit status 0, one answer", found, _REBUILD))
    answer: Mapping[str, Any] = json.loads(said[0])
    return answer


def kernel_faults(first: Mapping[str, Any], second: Mapping[str, Any], where: str) -> list[Fault]:
    """Return everything that is wrong with the kernels of two runs: GPUs, results, and what the cache did not hold."""
    fix = "see `ferry doctor --image cuda`"
    faults = []
    for place, answer in ((f"{where}: first run", first), (f"{where}: second run", second)):
        count = len(answer["gpus"])
        if count != demo.RANKS:
            faults.append(Fault("GPUs differ", place, f"{demo.RANKS}, one a rank", str(count), fix))
        faults += [
            Fault(
                "kernel is wrong",
                f"{place}: GPU {index}",
                f"within {_CLOSE} of the definition",
                str(far),
                fix,
            )
            for index, far in enumerate(answer["distances"])
            # A value that is not a number is not near either.
            if not far <= _CLOSE
        ]
    if not first["files"]:
        faults.append(Fault("nothing in Triton's cache", where, "compiled kernels", "no file", _REBUILD))
    faults += [
        Fault("kernel is not kept", f"{where}: second run", "the files of the first", file, "report it")
        for file in sorted(set(first["files"]) ^ set(second["files"]))
    ]
    return faults


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
