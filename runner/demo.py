"""The demo: a small real run is stopped at update 20, packed, moved to another server, and resumed there.

Promises: everything goes through what a user's commands go through; the run is compared, bit for bit, with a control
that never moved; without a Docker engine the embedded engine stands in, and says so loudly.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml
from rich.console import Console

from runner import image, pack, prepare, resume, screen, verify
from runner.compare import Comparison, compare
from runner.docker_engine import connect
from runner.documents import parse
from runner.engines import engine_for, ready_image
from runner.errors import ExitCode, Fault, Refusal, Verdict
from runner.facts import host_facts
from runner.inside.digests import sha256_bytes
from runner.plan import plan_launch
from runner.rebase import rebase
from runner.record import to_json, write_file
from runner.run import RunFolder
from runner.server import Engine, ServerProfile
from runner.spec import RunSpec
from trainer import synthetic

STOP_AT = 20
ROWS = 320
SEED = 429
RANKS = 4
_LAST_LINES = 60
_MARKER = ".ferry-demo"
_ORIGIN = "/mnt/origin/ferry-demo"
_SHOWN = ("FERRY", "SCHEDULE_GATE_PASS", "TRAINING_CONTRACT", "RESUMED", "EXACT_KIT", "Error", "refus")


@dataclasses.dataclass(frozen=True)
class Server:
    """A made-up server: a folder with its own layout, and its profile."""

    profile: ServerProfile
    profile_bytes: bytes
    folder: Path


def run(
    work: Path,
    project: Path,
    *,
    stop_at: int = STOP_AT,
    image_name: str = "cpu",
    env: Mapping[str, str] | None = None,
    before_training: Callable[[Path, Server], None] = lambda _bundle, _server: None,
    results: Console = screen.out,
    gpu: bool = False,
) -> Comparison:
    """Run the demo in the folder `work` (made anew) and return how control and moved run compare.

    `env` is added to the run's environment. `before_training` gets the first bundle and the server of the control;
    `results` shows the comparison. With `gpu` each server's profile has as many GPUs as there are ranks.
    """
    engine = _engine()
    say = _say
    work = _fresh(work)
    say(
        f"1/7 environment: the image '{image_name}'"
        if engine == "docker"
        else f"1/7 environment: a venv from the lock of '{image_name}'"
    )
    pin = _environment(engine, project, image_name)
    say("2/7 a data set, a teacher and a first bundle")
    origin = _ORIGIN if engine == "docker" else str(work / "origin")
    servers = {
        name: _server(work, name, layout, engine, _venv(project, image_name), gpu=gpu)
        for name, layout in {"control": "disk", "server-a": "data/a", "server-b": "mnt/vol7/shared"}.items()
    }
    start = pack.pack_draft(_draft(work, project, origin, pin, env or {}), work / "bundles" / "start").path
    before_training(start, servers["control"])
    say("3/7 control: one segment, never moved")
    control = _train(start, servers["control"], project, None, Verdict.FINISHED)
    say(f"4/7 server-a: trains, and is asked to stop at update {stop_at}")
    on_a = _train(start, servers["server-a"], project, stop_at, Verdict.STOPPED)
    say("5/7 packed, and moved to server-b")
    packed = pack.pack(on_a, servers["server-a"].folder / "outgoing" / f"demo-at-{stop_at}")
    say(f"    {packed.root}")
    arrived = servers["server-b"].folder / "incoming" / packed.path.name
    shutil.copytree(packed.path, arrived)
    _prove_sealed(on_a)
    say("6/7 server-b: verified, rebased, resumed")
    on_b = _train(arrived, servers["server-b"], project, None, Verdict.FINISHED)
    say("7/7 compared")
    comparison = compare(control, on_b)
    results.print(screen.comparison_table(comparison, ("control", "moved")))
    for difference in comparison.differences[:10]:
        results.print(difference, markup=False)
    results.print(comparison.verdict, style="bold green" if comparison.equal else "bold red")
    return comparison


def _engine() -> Engine:
    try:
        connect().close()
    except Refusal as refusal:
        screen.err.print(
            "[bold yellow]NO DOCKER ENGINE ANSWERS: the demo runs without containers (engine 'venv')[/]"
        )
        screen.err.print(
            "[yellow]same lock, same checks, no isolation; `ferry resume` never does this by itself[/]"
        )
        screen.err.print(refusal.faults[0].found, markup=False, style="dim")
        return "venv"
    return "docker"


def _say(text: str) -> None:
    screen.err.print(text, style="bold")


def _fresh(work: Path) -> Path:
    work = work.absolute()
    if work.exists() and any(work.iterdir()):
        if not (work / _MARKER).exists():
            fix = "give an empty folder with --work"
            raise Refusal(
                Fault(
                    "folder is not the demo's",
                    str(work),
                    "an empty folder, or an older demo",
                    "other files",
                    fix,
                )
            )
        shutil.rmtree(work)
    write_file(work / _MARKER, b"made by `ferry demo`; it is deleted by the next one\n")
    return work


def _environment(engine: Engine, project: Path, name: str) -> image.ImagePin:
    def show(line: str) -> None:
        screen.err.print(line, markup=False, style="dim")

    if engine == "docker":
        return image.build(name, project, on_line=show)
    return image.build_venv(name, project, _venv(project, name), on_line=show)


def _venv(project: Path, name: str) -> Path:
    return project / ".ferry" / "venvs" / name


def _server(work: Path, name: str, layout: str, engine: Engine, venv: Path, *, gpu: bool) -> Server:
    folder = work / name
    images, teacher = folder / layout / "images", folder / layout / "weights" / "teacher.safetensors"
    synthetic.write_dataset(images, ROWS, SEED)
    synthetic.write_teacher(teacher, SEED)
    value = {
        "ferry": 1,
        "name": name,
        "engine": engine,
        "assets": {"images": str(images), "teacher": str(teacher)},
    }
    if engine == "venv":
        value["venv"] = str(venv)
    if gpu:
        value["gpus"] = {"count": RANKS}
    raw = yaml.safe_dump(value, sort_keys=False).encode()
    write_file(folder / "server.yaml", raw)
    return Server(parse(ServerProfile, raw, str(folder / "server.yaml")), raw, folder)


def _draft(work: Path, project: Path, origin: str, pin: image.ImagePin, env: Mapping[str, str]) -> Path:
    """Lay out what the first bundle holds: the trainer as code, manifest, config, and the run spec of it all."""
    draft = work / "draft"
    images, teacher = f"{origin}/images", f"{origin}/teacher.safetensors"
    synthetic.write_manifest(draft / "data" / "train.jsonl", ROWS, images, SEED)
    config = synthetic.demo_config(image_root=images, teacher_path=teacher, rows=ROWS, seed=SEED)
    write_file(draft / "configs" / "train.json", to_json(config))
    teacher_sha256 = "sha256:" + sha256_bytes(synthetic.teacher_bytes(SEED))
    archive, code = pack.describe_code({"trainer": project / "trainer"})
    write_file(draft / "source" / "code.tar.gz", archive)
    spec = {
        "ferry": 1,
        "name": "demo",
        "image": {"name": pin.name, "lock": pin.lock, "digest": pin.digest, "config": pin.config},
        "code": {"archive": "source/code.tar.gz", **code},
        "world": {"ranks": RANKS},
        "updates": 40,
        "checkpoint": "fresh",
        "launch": {
            "module": "trainer.train",
            "args": [
                "--config", "{bundle}/configs/train.json", "--manifest", "{bundle}/data/train.jsonl",
                "--output", "{output}",
            ],
            "resume_args": ["--resume-from", "{checkpoint}"],
            "env": {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **env},
        },
        "data": {
            "manifest": "data/train.jsonl",
            "root": "images",
            "path_columns": ["image"],
            **pack.describe_manifest(draft / "data" / "train.jsonl", ("image",), images),
        },
        "assets": {
            "images": {"origin": images, "kind": "folder"},
            "teacher": {"origin": teacher, "kind": "file", "sha256": teacher_sha256},
        },
        "rebase": {"mount": ["images", "teacher"]},
    }  # fmt: skip
    write_file(
        draft / "run.yaml", pack.render_spec(parse(RunSpec, json.dumps(spec).encode(), "the demo's run.yaml"))
    )
    return draft


def _train(bundle: Path, server: Server, project: Path, stop_at: int | None, expected: Verdict) -> RunFolder:
    """Verify, prepare and resume `bundle` on `server`, as the commands do, and see that it ends as expected."""
    folder = RunFolder(server.folder / "runs" / "demo")
    inputs = rebase(verify.verify(verify.open_bundle(bundle), use_memory=True), server.profile)
    ready = ready_image(server.profile, inputs.bundle.spec.image, project)
    plan = plan_launch(inputs, ready, folder.path, host_facts(server.profile))
    prepare.prepare(inputs, plan, folder, server.profile_bytes)
    engine = engine_for(folder)
    started = resume.start(folder, ready, engine)
    console: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
    with screen.updates_progress(folder, server.profile.name) as show:
        ended = resume.follow(folder, started.name, engine, _listener(folder, stop_at, show, console))
    if ended.verdict is not expected:
        screen.err.print("    the last lines of its console:", style="bold red")
        for line in console:
            screen.err.print("    " + line, markup=False)
        fix = f"see {folder.output / 'logs'}"
        found = f"{ended.verdict.value} at update {ended.update}"
        fault = Fault("the segment ended otherwise", server.profile.name, expected.value, found, fix)
        raise Refusal(fault, exit_code=ExitCode.FAILED)
    _say(f"    {ended.verdict.value} at update {ended.update}")
    return folder


def _listener(
    folder: RunFolder, stop_at: int | None, show: Callable[[str], None], console: collections.deque[str]
) -> Callable[[str], None]:
    """Return what hears the console: it shows the lines worth seeing, keeps the last, and asks for the stop in time."""

    def hear(line: str) -> None:
        console.append(line)
        if line.startswith("FERRY SEGMENT") and stop_at is not None:
            resume.request_stop(folder, at_update=stop_at)
        if any(word in line for word in _SHOWN):
            show("    " + line)

    return hear


def _prove_sealed(folder: RunFolder) -> None:
    try:
        folder.refuse_if_sealed()
    except Refusal as refusal:
        _say(f"    server-a refuses to train it again: {refusal.faults[0].found}")
        return
    raise Refusal(
        Fault("not sealed", str(folder.seal_file), "a seal", "none", "this is a defect of Ferry: report it"),
        exit_code=ExitCode.FAILED,
    )
