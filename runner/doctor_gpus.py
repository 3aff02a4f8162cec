"""The checks of the driver and of the GPUs that are asked for.

Promises: pure functions of observations; GPUs that nobody asked for are told and refuse nothing; a GPU that is ill is
named by its index.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from runner import gpus
from runner.doctor_check import Asked, Check, State, size
from runner.gpus import Gpu, Gpus
from runner.observations import Observations

_NEW_DRIVER = "install a newer NVIDIA driver and restart"
# A context that no process owns holds a few hundred MiB; a run that died without letting go holds GiB.
_HELD_BYTES = 1 << 30


def gpu_checks(seen: Observations, asked: Asked) -> Iterator[Check]:
    """Yield the lines about driver and GPUs."""
    found = gpus.read(seen.nvml)
    if found.problem is not None:
        remedy = "install the NVIDIA driver, or mend what `nvidia-smi` says" if asked.needs_gpus else ""
        state = State.REFUSED if asked.needs_gpus else State.NOTE
        expected = "a driver that answers" if asked.needs_gpus else "nothing, unless GPUs are asked for"
        yield Check("driver", state, found.problem, expected, remedy)
        return
    yield from _driver(found, asked)
    yield from _count(found, asked)
    chosen = found.asked(asked.gpus) if asked.gpus else found.gpus
    if not chosen:
        return
    yield from _answers(chosen, asked)
    yield from _ecc(chosen, asked)
    yield from _repair(chosen, asked)
    yield from _mode(chosen, asked)
    yield from _users(chosen, asked)
    yield from _nvlink(chosen, asked)
    yield from _power(chosen, asked)


def _driver(found: Gpus, asked: Asked) -> Iterator[Check]:
    knows = f" (knows CUDA {found.cuda[0]}.{found.cuda[1]})" if found.cuda else ""
    said = f"{found.driver}{knows}"
    if asked.cuda is None:
        expected = "a driver; --image NAME compares it with what the image brings"
        yield Check("driver", asked.of_gpus(State.GOOD), said, expected)
        return
    text = f"{asked.cuda[0]}.{asked.cuda[1]}"
    native, oldest = gpus.needed_driver(asked.cuda), gpus.oldest_driver(asked.cuda)
    expected = (
        f"image {asked.image} brings CUDA {text}: {gpus.driver_text(native)} or newer; "
        f"{gpus.driver_text(oldest)} by minor-version compatibility"
    )
    match gpus.driver_fits(found.driver, asked.cuda):
        case True:
            yield Check("driver", asked.of_gpus(State.GOOD), said, expected)
        case None:
            remedy = f"{_NEW_DRIVER}: what is compiled on the GPU at run time (PTX) does not run on this one"
            yield Check("driver", asked.of_gpus(State.WARNING), said, expected, remedy)
        case False:
            remedy = f"{_NEW_DRIVER}: torch would say that the driver is too old and use no GPU"
            yield Check("driver", asked.of_gpus(State.REFUSED), said, expected, remedy)


def _count(found: Gpus, asked: Asked) -> Iterator[Check]:
    models = Counter(f"{one.name}, {size(one.memory_bytes or 0)}" for one in found.gpus)
    said = "; ".join(f"{count} x {model}" for model, count in sorted(models.items())) or "none"
    wanted = f"{len(asked.gpus)} ({', '.join(asked.gpus)})" if asked.gpus else "those that a profile asks for"
    for gpu in found.missing(asked.gpus):
        remedy = "name GPUs of this server in server.yaml (gpus: ids); `nvidia-smi -L` lists them"
        there = ", ".join(str(one.index) for one in found.gpus) or "none"
        yield Check(f"GPU {gpu} present", State.REFUSED, f"the driver has {there}", f"GPU {gpu}", remedy)
    if asked.ranks is not None and asked.gpus and "all" not in asked.gpus and len(asked.gpus) < asked.ranks:
        remedy = "give as many GPUs as ranks: how many ranks train is part of the run and never changed"
        yield Check("GPUs", State.REFUSED, f"{len(asked.gpus)} asked for", f"{asked.ranks} ranks", remedy)
    elif asked.needs_gpus and not found.gpus:
        yield Check("GPUs", State.REFUSED, said, wanted, "see `nvidia-smi -L` and `dmesg | grep -i nvrm`")
    else:
        chosen = found.asked(asked.gpus) if asked.gpus else found.gpus
        mixed = len({one.name for one in chosen}) > 1
        other = asked.gpu_model is not None and any(not _is_model(one, asked.gpu_model) for one in chosen)
        expected = f"{wanted}, {asked.gpu_model or 'all of one model'}"
        remedy = "numerics and memory differ between models: expect no bitwise equality, and see that it fits"
        state = State.WARNING if mixed or other else State.GOOD
        yield Check("GPUs", asked.of_gpus(state), said, expected, remedy if mixed or other else "")


def _is_model(gpu: Gpu, model: str) -> bool:
    """Whether every word of a run spec's 'H100 80GB' is one of NVML's 'NVIDIA H100 80GB HBM3'."""
    return set(model.upper().replace("-", " ").split()) <= set(gpu.name.upper().replace("-", " ").split())


def _answers(chosen: tuple[Gpu, ...], asked: Asked) -> Iterator[Check]:
    for one in chosen:
        if one.problem is not None:
            remedy = f"`nvidia-smi --gpu-reset -i {one.index}`, or restart; look for Xid in `dmesg`"
            yield Check(
                f"GPU {one.index} answers", asked.of_gpus(State.REFUSED), one.problem, "answers", remedy
            )
    ill = [one for one in chosen if not one.fabric_ready]
    if ill:
        found = f"{_names(ill)}: fabric {ill[0].fabric}"
        remedy = (
            "start nvidia-fabricmanager, of the driver's own version: without it CUDA ends with error 802"
        )
        yield Check("NVSwitch fabric", asked.of_gpus(State.REFUSED), found, "completed", remedy)


def _ecc(chosen: tuple[Gpu, ...], asked: Asked) -> Iterator[Check]:
    off = [one for one in chosen if one.ecc is False]
    now = [one for one in chosen if one.uncorrected_now]
    if off:
        remedy = f"`nvidia-smi -e 1 -i {_list(off)}`, then restart: without ECC a flipped bit goes into the weights"
        yield Check("ECC", asked.of_gpus(State.WARNING), f"off on {_names(off)}", "on", remedy)
    if now:
        found = "; ".join(
            f"GPU {one.index}: {one.uncorrected_now} uncorrected since the last reset" for one in now
        )
        remedy = "take them from the run: reset the GPU, and if errors come back, have it replaced"
        yield Check("ECC errors", asked.of_gpus(State.REFUSED), found, "none", remedy)
    if not off and not now:
        ever = [one for one in chosen if one.uncorrected_ever]
        past = "; ".join(f"GPU {one.index} had {one.uncorrected_ever} in its life" for one in ever)
        unknown = all(one.ecc is None for one in chosen)
        found = "not supported" if unknown else "on, no uncorrected errors since the last reset"
        state = State.NOTE if unknown else State.GOOD
        yield Check("ECC", asked.of_gpus(state), f"{found}; {past}" if past else found, "on, none")


def _repair(chosen: tuple[Gpu, ...], asked: Asked) -> Iterator[Check]:
    failed = [one for one in chosen if one.remap_failed]
    pending = [one for one in chosen if one.remap_pending or one.retirement_pending]
    if failed:
        found, remedy = f"{_names(failed)}: a row could not be remapped", "have the GPU replaced"
        yield Check("GPU memory", asked.of_gpus(State.REFUSED), found, "no damaged rows in use", remedy)
    if pending:
        found = f"{_names(pending)}: a row or page waits to be taken out of use"
        remedy = f"`nvidia-smi --gpu-reset -i {_list(pending)}` while nobody uses it, or restart"
        yield Check("GPU memory", asked.of_gpus(State.REFUSED), found, "no damaged rows in use", remedy)
    if not failed and not pending:
        yield Check("GPU memory", asked.of_gpus(State.GOOD), "nothing to repair", "no damaged rows in use")


def _mode(chosen: tuple[Gpu, ...], asked: Asked) -> Iterator[Check]:
    whole = [one for one in chosen if one.mig and not _by_part(one, asked)]
    if whole:
        remedy = (
            f"`nvidia-smi -mig 0 -i {_list(whole)}`, or name its MIG devices in server.yaml (0:0, MIG-...)"
        )
        found = f"on for {_names(whole)}, asked for as a whole"
        yield Check("MIG", asked.of_gpus(State.REFUSED), found, "off for whole GPUs", remedy)
    shut = [one for one in chosen if one.prohibited]
    if shut:
        remedy = f"`nvidia-smi -c 0 -i {_list(shut)}`"
        yield Check(
            "compute mode", asked.of_gpus(State.REFUSED), f"prohibited on {_names(shut)}", "default", remedy
        )
    off = [one for one in chosen if one.persistence is False]
    if off:
        remedy = (
            "start nvidia-persistenced, or `nvidia-smi -pm 1`: else the driver is set up anew at each start"
        )
        yield Check("persistence", asked.of_gpus(State.WARNING), f"off on {_names(off)}", "on", remedy)
    else:
        yield Check("persistence", asked.of_gpus(State.GOOD), "on", "on")


def _by_part(gpu: Gpu, asked: Asked) -> bool:
    return any(
        name in gpu.mig_devices or name.removeprefix("mig").startswith(f"{gpu.index}:") for name in asked.gpus
    )


def _users(chosen: tuple[Gpu, ...], asked: Asked) -> Iterator[Check]:
    busy = [one for one in chosen if one.processes]
    for one in busy:
        found = "; ".join(
            f"pid {process.pid} {process.name}"
            + (f", {size(process.memory_bytes)}" if process.memory_bytes is not None else "")
            for process in one.processes
        )
        remedy = "wait for its end, or ask its owner; a rank that was left behind is ended by `kill PID`"
        yield Check(
            f"GPU {one.index} users", asked.of_gpus(State.REFUSED), found, "nobody computes on it", remedy
        )
    held = [one for one in chosen if not one.processes and (one.used_bytes or 0) > _HELD_BYTES]
    for one in held:
        remedy = "look for containers and for processes of other users: `fuser -v /dev/nvidia*` as root"
        found = f"{size(one.used_bytes or 0)} held by nobody who is seen from here"
        yield Check(f"GPU {one.index} users", asked.of_gpus(State.WARNING), found, "nobody uses it", remedy)
    if not busy and not held:
        yield Check("GPU users", asked.of_gpus(State.GOOD), "nobody computes on them", "nobody")


def _nvlink(chosen: tuple[Gpu, ...], asked: Asked) -> Iterator[Check]:
    if len(chosen) < 2:
        return
    most = max(one.links.count(True) for one in chosen)
    if not most:
        expected = "nothing; with NVLink sums over all ranks are faster"
        yield Check("NVLink", State.NOTE, "no link is up: GPUs talk over PCIe", expected)
        return
    expected = "every link up, every pair reaches each other by NVLink"
    pairs = [(a, b) for a, b in itertools.combinations(chosen, 2) if b.index not in a.peers]
    # Bridges between PCIe cards use some of the links; GPUs on one board have the same number up, and with switches all.
    down = [
        one
        for one in chosen
        if one.links.count(True) < most or (one.fabric == "completed" and False in one.links)
    ]
    if down or pairs:
        parts = [f"GPU {one.index}: {one.links.count(False)} of {len(one.links)} links down" for one in down]
        parts += ["not by NVLink: " + ", ".join(f"{a.index}-{b.index}" for a, b in pairs)] if pairs else []
        remedy = (
            "look at `nvidia-smi nvlink -s`, `nvidia-smi topo -m` and `dmesg`; NCCL goes another way, slower and with "
            "sums in another order"
        )
        yield Check("NVLink", asked.of_gpus(State.WARNING), "; ".join(parts), expected, remedy)
    else:
        yield Check(
            "NVLink", asked.of_gpus(State.GOOD), f"{most} links up a GPU, every pair connected", expected
        )


def _power(chosen: tuple[Gpu, ...], asked: Asked) -> Iterator[Check]:
    def lines(say: Callable[[Gpu], str | None]) -> Iterable[str]:
        return filter(None, map(say, chosen))

    capped = list(
        lines(
            lambda one: (
                f"GPU {one.index}: {one.power_limit_w:.0f} of {one.power_default_w:.0f} W"
                if one.power_limit_w and one.power_default_w and one.power_limit_w < one.power_default_w
                else None
            )
        )
    )
    slow = list(lines(lambda one: f"GPU {one.index}: {', '.join(one.slowdowns)}" if one.slowdowns else None))
    expected = "full power, no slowdown"
    if capped:
        remedy = "`nvidia-smi -pl WATTS` as root, if the site allows it: the run is slower, not different"
        yield Check("power", asked.of_gpus(State.WARNING), "capped: " + "; ".join(capped), expected, remedy)
    if slow:
        remedy = "see to cooling and power: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE`"
        yield Check("slowdown", asked.of_gpus(State.WARNING), "; ".join(slow), expected, remedy)
    if not capped and not slow:
        yield Check("power", asked.of_gpus(State.GOOD), "no cap, no slowdown", expected)


def _names(chosen: Iterable[Gpu]) -> str:
    return ", ".join(f"GPU {one.index}" for one in chosen)


def _list(chosen: Iterable[Gpu]) -> str:
    return ",".join(str(one.index) for one in chosen)
