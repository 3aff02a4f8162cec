"""Which GPUs, and how much memory, a run may take on a server: the profile's word, the scheduler's, and what is there.

Promises: pure functions; a GPU that the scheduler did not give is never taken, nor one that is not there, nor `all`; what
two sources say differently is refused, not chosen between.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from runner.errors import Fault, refuse_if
from runner.server import Gpus

_SAYS_NONE = ("", "NoDevFiles")
_LIST = re.compile(r"[A-Za-z0-9._:/-]+(,[A-Za-z0-9._:/-]+)*")
_ASK = "ask the scheduler for them (`--gres=gpu:N`); where it hands out no GPUs, start with `env -u SLURM_JOB_ID`"


@dataclasses.dataclass(frozen=True)
class Allotment:
    """What a scheduler gave the job `job`: `gpus` by the ids of the server, `visible` as its own processes count them.

    `by_place`: no source says whether `gpus` are ids of the server or places in the job's own list. `memory_bytes` is None
    where the scheduler sets no limit.
    """

    job: str
    gpus: tuple[str, ...]
    visible: tuple[str, ...]
    by_place: bool
    memory_bytes: int | None


def read_allotment(environment: Mapping[str, str]) -> Allotment | None:
    """Return what Slurm gave the job that `environment` is of; None outside of a job.

    Where devices are held in a cgroup, CUDA_VISIBLE_DEVICES counts from 0 whatever the GPUs are; SLURM_STEP_GPUS and
    SLURM_JOB_GPUS name those of the server (srun(1)). Raises `Refusal` naming variables that disagree or make no sense.
    """
    job = environment.get("SLURM_JOB_ID")
    if not job:
        return None
    faults: list[Fault] = []
    whole = _ids(environment, "SLURM_JOB_GPUS", faults)
    step = _ids(environment, "SLURM_STEP_GPUS", faults)
    visible = _ids(environment, "CUDA_VISIBLE_DEVICES", faults)
    memory = _memory(environment, len(step or whole or visible), faults)
    if step and whole and not set(step) <= set(whole):
        found, expected = ",".join(step), f"some of SLURM_JOB_GPUS, {','.join(whole)}"
        faults.append(_differ("SLURM_STEP_GPUS", expected, found, job))
    given = step or whole
    named = bool(visible) and not any(one.isdecimal() for one in visible)
    if given and visible and not named:
        counted = [str(place) for place in range(len(given))]
        if sorted(visible) not in (sorted(given), sorted(counted)):
            expected = f"{','.join(given)}, or {','.join(counted)} where devices are held in a cgroup"
            faults.append(_differ("CUDA_VISIBLE_DEVICES", expected, ",".join(visible), job))
    if given and named and len(given) != len(visible):
        faults.append(_differ("CUDA_VISIBLE_DEVICES", f"{len(given)} GPUs", ",".join(visible), job))
    refuse_if(faults)
    gpus = visible if named else given or visible
    by_place = not named and not given and sorted(visible) == sorted(map(str, range(len(visible))))
    return Allotment(job, gpus, visible or gpus, by_place, memory)


def choose(
    wanted: Gpus, allotment: Allotment | None, present: Sequence[str], server: str, what: str
) -> tuple[str, ...]:
    """Return the ids of the GPUs that a run takes, of those `present` (several names may mean one GPU).

    Under a scheduler they are of its allotment; else those that the profile names, or the first `count` by index. `server`
    and `what` (what a GPU is called there) are for people. Raises `Refusal` naming each GPU that cannot be had.
    """
    where = f"server {server}: gpus"
    countable = _countable(present)
    there = ", ".join(countable) or "none"
    faults: list[Fault] = []
    pool: Sequence[str] = countable
    if allotment is not None:
        place = f"job {allotment.job}"
        pool = allotment.gpus
        if not pool:
            found = "none: neither SLURM_JOB_GPUS nor CUDA_VISIBLE_DEVICES names one"
            faults.append(Fault("no GPU in the job", place, _asked(wanted), found, _ASK))
        elif allotment.by_place and len(pool) != len(countable):
            found = f"CUDA_VISIBLE_DEVICES={','.join(pool)} alone, which may count from the job's first GPU"
            fix = "let Slurm set SLURM_JOB_GPUS or SLURM_STEP_GPUS, or the GPUs' UUIDs"
            faults.append(Fault("which GPUs is not said", place, "ids of the server", found, fix))
        faults += [
            Fault(
                "GPU is not the job's", where, f"one of {', '.join(pool)}, of job {allotment.job}", gpu, _ASK
            )
            for gpu in wanted.ids or ()
            if pool and gpu not in pool
        ]
    if not faults and wanted.count is not None and wanted.count > len(pool):
        whose = "the job has" if allotment is not None else "there are"
        found = f"{whose} {len(pool)}: {', '.join(pool) or 'none'}"
        fix = (
            _ASK
            if allotment is not None
            else "use a server that has as many, or see `ferry doctor` for those missing"
        )
        faults.append(Fault("fewer GPUs than asked for", where, f"{wanted.count} GPUs", found, fix))
    refuse_if(faults)
    chosen = wanted.ids if wanted.ids is not None else tuple(pool[: wanted.count])
    fix = "name GPUs of this server in server.yaml; `ferry doctor --server` says how they are given to containers"
    refuse_if(
        Fault("GPU is not there", where, what.format(gpu), f"there are {there}", fix)
        for gpu in chosen
        if gpu not in present
    )
    return chosen


def _asked(wanted: Gpus) -> str:
    return f"{wanted.count} GPUs" if wanted.count is not None else f"GPUs {', '.join(wanted.ids or ())}"


def _countable(present: Sequence[str]) -> tuple[str, ...]:
    """One name for each GPU: its index where it has one (CDI lists it by index and by UUID), else the name there is."""
    indices = sorted({name for name in present if name.isdecimal()}, key=int)
    return tuple(indices or dict.fromkeys(name for name in present if name != "all"))


def _differ(name: str, expected: str, found: str, job: str) -> Fault:
    fix = "start ferry with the variables as the scheduler set them; it never chooses between the two"
    return Fault("the scheduler's words disagree", f"job {job}: {name}", expected, found, fix)


def _ids(environment: Mapping[str, str], name: str, faults: list[Fault]) -> tuple[str, ...]:
    text = environment.get(name, "").strip()
    if text in _SAYS_NONE:
        return ()
    ids = tuple(text.split(","))
    if not _LIST.fullmatch(text) or "all" in ids or len(set(ids)) != len(ids):
        fix = "start ferry with the variables as the scheduler set them"
        faults.append(
            Fault("no list of GPUs", f"environment: {name}", "ids, each once, by commas", text, fix)
        )
        return ()
    return ids


def _memory(environment: Mapping[str, str], gpus: int, faults: list[Fault]) -> int | None:
    """The job's memory on this node in bytes: Slurm says it in MiB a node, a CPU or a GPU; 0 means all of the node."""
    number: dict[str, int] = {}
    for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_CPUS_ON_NODE"):
        text = environment.get(name, "").strip()
        if text and not (text.isascii() and text.isdecimal()):
            fix = "start ferry with the variables as the scheduler set them"
            faults.append(Fault("no number", f"environment: {name}", "a number", text, fix))
        elif text:
            number[name] = int(text)
    mib = number.get("SLURM_MEM_PER_NODE")
    if mib is None and "SLURM_MEM_PER_CPU" in number:
        mib = number["SLURM_MEM_PER_CPU"] * number.get("SLURM_CPUS_ON_NODE", 0)
    if mib is None and "SLURM_MEM_PER_GPU" in number:
        mib = number["SLURM_MEM_PER_GPU"] * gpus
    return mib << 20 if mib else None
