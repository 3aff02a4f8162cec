"""The start program: the first thing that runs in a container, and the last before torchrun.

Promises: it takes the run's lease, checks environment against lock and against the list of its files, code against
tree, bundle against what was verified and the newest checkpoint against its census, reports every fault together and
then ends with an exit code of `runner.errors.ExitCode`; or it prints one identity line and becomes torchrun, which then
holds the lease as long as it lives. Never starts from scratch unless the launch says `fresh`.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from runner.errors import ExitCode, Fault, Refusal, printable
from runner.inside import census, installed, lock, tree
from runner.inside.digests import from_memory, hash_files, sha256_bytes
from runner.inside.launch import Launch, read

FRESH = "fresh"
T = TypeVar("T")


def main() -> NoReturn:
    """Start the launch described by the file that is the only argument. Never returns."""
    if len(sys.argv) != 2:
        print("usage: start LAUNCH.json", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
    try:
        command = make_ready(read(Path(sys.argv[1])))
    except Refusal as refusal:
        print(f"FERRY REFUSES: {len(refusal.faults)} fault(s), nothing was started", file=sys.stderr)
        print(refusal, file=sys.stderr, flush=True)
        sys.exit(refusal.exit_code)
    sys.stdout.flush()
    os.execv(command[0], command)  # noqa: S606 - becoming torchrun is the point; no shell is involved


def make_ready(launch: Launch) -> list[str]:
    """Take the lease, check everything, record the segment, print the identity line; return torchrun's command line."""
    _refuse_if_sealed(launch)
    _take_lease(launch)
    faults: list[Fault] = []
    _gather(faults, lambda: _check_environment(launch))
    _gather(faults, lambda: _check_code(launch))
    _gather(faults, lambda: _check_bundle(launch))
    checkpoint = _gather(faults, lambda: _choose_checkpoint(launch))
    if faults:
        raise Refusal(*faults)
    identity = {
        "image": launch.image,
        "lock": launch.lock,
        "code": launch.code_tree,
        "contract": f"sha256:{checkpoint.contract}" if checkpoint else FRESH,
        "checkpoint": f"sha256:{checkpoint.inventory}" if checkpoint else FRESH,
    }
    segment = _open_segment(launch, identity, checkpoint.update if checkpoint else 0)
    for stale in (launch.request, launch.outcome):
        (Path(launch.output) / stale).unlink(missing_ok=True)
    print("FERRY IDENTITY " + " ".join(f"{key}={value}" for key, value in identity.items()))
    print(f"FERRY SEGMENT {segment} from update {checkpoint.update if checkpoint else 0} of {launch.updates}")
    return _command(launch, segment, checkpoint)


def _command(launch: Launch, segment: str, checkpoint: census.Checkpoint | None) -> list[str]:
    logs = Path(launch.output) / "logs" / segment
    logs.mkdir(parents=True, exist_ok=True)
    os.environ["FERRY_SEGMENT"] = segment
    torchrun = [word.replace("{logs}", str(logs)) for word in launch.torchrun]
    args = list(launch.args)
    if checkpoint is not None:
        args += [word.replace("{checkpoint}", str(checkpoint.path)) for word in launch.resume_args]
    return [sys.executable, *torchrun, *args]


def _refuse_if_sealed(launch: Launch) -> None:
    seal = Path(launch.seal)
    if not seal.exists():
        return
    try:
        bundle = json.loads(seal.read_bytes())["bundle"]
    except (OSError, ValueError, KeyError, TypeError):
        bundle = "another bundle"
    fix = "resume where that bundle was prepared; a fork must be declared as a run with a new name"
    raise Refusal(
        Fault("run folder is sealed", launch.seal, "a run that lives here", f"it was packed as {bundle}", fix)
    )


def _take_lease(launch: Launch) -> None:
    """Lock the lease file and leave it open: torchrun inherits the lock, and the kernel drops it when torchrun ends."""
    try:
        descriptor = os.open(launch.lease, os.O_RDWR)
        _lock(descriptor)
    except BlockingIOError as error:
        holder = Path(launch.lease).read_text("utf-8", "replace").strip() or "an unknown process"
        fix = "wait until it has ended, or end it with `ferry stop`"
        fault = Fault("lease is held", launch.lease, "a run that nobody trains", holder, fix)
        raise Refusal(fault, exit_code=ExitCode.LEASE_HELD) from error
    except OSError as error:
        raise Refusal(
            Fault("no lease", launch.lease, "a file to lock", str(error), "prepare the run again")
        ) from error
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{launch.engine} on {launch.server}, since {int(time.time())}\n".encode())
    os.set_inheritable(descriptor, True)


def _lock(descriptor: int) -> None:
    """Lock, or raise BlockingIOError; somebody who only looks at the lease is waited for."""
    for attempt in range(20):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt == 19:
                raise
            time.sleep(0.05)
        else:
            return


def _check_environment(launch: Launch) -> None:
    path = Path(launch.lock_file)
    try:
        found = "sha256:" + sha256_bytes(path.read_bytes())
    except OSError as error:
        raise Refusal(
            Fault("no lock in the image", str(path), launch.lock, str(error), "use the pinned image")
        ) from error
    faults = []
    if found != launch.lock:
        faults.append(
            Fault("lock differs", str(path), launch.lock, found, "use the image that the run spec pins")
        )
    faults += lock.lock_faults(path, Path(launch.site_packages))
    _gather(faults, lambda: faults.extend(installed.start_faults(path.parent)))
    if faults:
        raise Refusal(*faults)


def _check_code(launch: Launch) -> None:
    found = tree.tree_id(tree.read_tree(Path(launch.code)))
    if found != launch.code_tree:
        fix = "the unpacked code was changed: prepare the run again"
        raise Refusal(
            Fault("code tree differs", launch.code, f"tree {launch.code_tree}", f"tree {found}", fix)
        )


def _check_bundle(launch: Launch) -> None:
    """Every file of the bundle is what was verified: by its stamp where that still holds, else by reading it again."""
    verified = json.loads(Path(launch.verified).read_bytes())
    digests: dict[str, str] = verified["digests"]
    hashed = hash_files(Path(launch.bundle), digests, remembered=from_memory(verified["memory"]))
    faults = []
    for name, found in hashed.items():
        where = f"{launch.bundle}/{name}"
        fix = "the bundle was changed after it was verified: fetch this file again, then `ferry verify`"
        if isinstance(found, OSError):
            faults.append(Fault("cannot be read", where, f"sha256 {digests[name]}", str(found), fix))
        elif found.sha256 != digests[name]:
            faults.append(Fault("mismatch", where, f"sha256 {digests[name]}", f"sha256 {found.sha256}", fix))
    if faults:
        raise Refusal(*faults)


def _choose_checkpoint(launch: Launch) -> census.Checkpoint | None:
    """The newest complete checkpoint in the output folder; None only for a fresh run that has not saved yet."""
    output = Path(launch.output)
    newest, rejected = census.newest_complete(output.iterdir(), launch.world)
    for name, refusal in rejected.items():
        print(
            printable(
                f"FERRY CENSUS {name} is not complete: {refusal.faults[0].what}, {refusal.faults[0].found}"
            )
        )
    if newest is None:
        if launch.checkpoint == FRESH and not rejected:
            return None
        fix = "fetch the bundle again; a run is never started from scratch in place of a resume"
        raise Refusal(
            Fault("no complete checkpoint", launch.output, "at least one", f"{len(rejected)} incomplete", fix)
        )
    if newest.name == launch.checkpoint:
        if f"sha256:{newest.inventory}" != launch.inventory:
            found = f"sha256:{newest.inventory}"
            raise Refusal(
                Fault(
                    "checkpoint differs", str(newest.path), launch.inventory, found, "prepare the run again"
                )
            )
        if launch.checkpoint_lies == "in the run folder":
            memory = json.loads(Path(launch.verified).read_bytes())["checkpoint"]
            faults = census.hash_faults(newest, remembered=from_memory(memory))
            if faults:
                raise Refusal(*faults)
        return newest  # Otherwise its bytes were checked as part of the bundle.
    faults = _own_checkpoint_faults(launch, newest)
    if faults:
        raise Refusal(*faults)
    return newest


def _own_checkpoint_faults(launch: Launch, checkpoint: census.Checkpoint) -> list[Fault]:
    """What is wrong with a checkpoint that was saved here, after the bundle's."""
    where = str(checkpoint.path)
    faults = census.hash_faults(checkpoint)
    fix = "move it out of the output folder; the run then resumes from the one before"
    bundled = census.update_of(launch.checkpoint) or 0
    if checkpoint.update < bundled:
        faults.append(
            Fault(
                "checkpoint is gone",
                where,
                f"{launch.checkpoint} or newer",
                checkpoint.name,
                "prepare the run again",
            )
        )
    if launch.contract not in (FRESH, f"sha256:{checkpoint.contract}"):
        faults.append(Fault("contract differs", where, launch.contract, f"sha256:{checkpoint.contract}", fix))
    if checkpoint.updates != launch.updates:
        faults.append(
            Fault("total of updates differs", where, str(launch.updates), str(checkpoint.updates), fix)
        )
    return faults


def _open_segment(launch: Launch, identity: dict[str, str], update: int) -> str:
    folder = Path(launch.segments)
    number = launch.segments_before + 1 + sum(1 for _ in folder.glob("*.json"))
    segment = f"{launch.run}-{number:04d}"
    record = {
        "segment": segment,
        "run": launch.run,
        "server": launch.server,
        "engine": launch.engine,
        "from_update": update,
        "started": int(time.time()),
        **identity,
    }
    with (folder / f"{number:04d}.json").open("x", encoding="utf-8") as file:
        json.dump(record, file, indent=2, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    return segment


def _gather(faults: list[Fault], step: Callable[[], T]) -> T | None:
    try:
        return step()
    except Refusal as refusal:
        faults.extend(refusal.faults)
        return None
