"""The run folder: where a run lives on one server, and everything that is known of its state there.

Promises: one object owns every path; a folder appears only whole; the record of a segment is made by the start
program and closed here with a verdict that never calls the unknown a success.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from runner import documents, lineage
from runner.engine import Phase, State
from runner.errors import ExitCode, Fault, Refusal, Verdict
from runner.exposure import read_exposure
from runner.inside import census
from runner.record import read_json, write_file
from runner.server import ServerProfile
from runner.spec import RunSpec

# Somebody who looks at the lease holds it, shared, for less than this.
_LOOKERS_S = 1.0
_PREPARE = "prepare the run: `ferry prepare BUNDLE --server SERVER.yaml --run RUN`"


@dataclasses.dataclass(frozen=True)
class Segment:
    """What the start program recorded when it started torchrun; `from_update` is the update it resumed at."""

    segment: str
    run: str
    server: str
    engine: str
    from_update: int
    started: int
    image: str
    lock: str
    code: str
    contract: str
    checkpoint: str


class RunFolder:
    """The paths of a run folder and the documents in it; reads lazily, and writes only where a method says so."""

    def __init__(self, path: Path) -> None:
        # One spelling for one folder: the container's name follows from it.
        self.path = Path(os.path.realpath(path))
        self.spec_file = self.path / "run.yaml"
        self.server_file = self.path / "server.yaml"
        self.prepared_file = self.path / "prepared.json"
        self.rebase_record = self.path / "REBASE_RECORD.json"
        self.rebased = self.path / "rebased"
        self.lineage_file = self.path / "lineage.jsonl"
        self.compose_file = self.path / "compose.yaml"
        self.compose_env = self.path / "compose.env"
        self.code = self.path / "code"
        self.control = self.path / "control"
        self.launch_file = self.control / "launch.json"
        self.verified_file = self.control / "verified.json"
        self.seal_file = self.control / "SEALED.json"
        self.segments = self.path / "segments"
        self.lease = self.path / "lease"
        self.output = self.path / "output"

    def prepared(self) -> dict[str, Any]:
        """Return what `prepare` recorded. Raises `Refusal` if this is no prepared run folder."""
        return read_json(self.prepared_file, "prepared run", _PREPARE)

    def bundle_path(self) -> Path:
        """Return where the bundle lies that this run was prepared from."""
        match self.prepared():
            case {"bundle": {"path": str(path), "root": str()}}:
                return Path(path)
        raise Refusal(
            Fault(
                "prepared run damaged", str(self.prepared_file), "bundle: path and root", "others", _PREPARE
            )
        )

    def spec(self) -> RunSpec:
        """Return the run spec, as it was in the bundle."""
        self.prepared()
        return documents.load(RunSpec, self.spec_file)

    def server(self) -> ServerProfile:
        """Return the profile that the run was prepared with."""
        self.prepared()
        return documents.load(ServerProfile, self.server_file)

    def seal(self) -> dict[str, Any] | None:
        """Return what the run was packed as, or None if it may train here."""
        return read_json(self.seal_file, "seal", "restore the file") if self.seal_file.exists() else None

    def refuse_if_sealed(self) -> None:
        """Raise `Refusal` if the run was packed: it lives elsewhere now."""
        seal = self.seal()
        if seal is not None:
            found = f"it was packed as {seal.get('bundle')} at update {seal.get('update')}"
            fix = "resume where that bundle was prepared; a fork must be declared as a run with a new name"
            raise Refusal(
                Fault("run folder is sealed", str(self.seal_file), "a run that lives here", found, fix)
            )

    def lease_holder(self) -> str | None:
        """Return who trains this run now, or None. The kernel keeps the lock, so a crash leaves no stale lease."""
        with self._lease_file() as file:
            try:
                # Shared: looking must not keep anybody from training.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read(500).decode("utf-8", "replace").strip() or "an unknown process"
        return None

    @contextlib.contextmanager
    def hold_lease(self, purpose: str) -> Iterator[None]:
        """Keep the run from being trained, or packed by another, while the block runs; `purpose` is for people.

        Raises `Refusal` (lease held) if it is being trained now.
        """
        with self._lease_file() as file:
            deadline = time.monotonic() + _LOOKERS_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        file.seek(0)
                        holder = file.read(500).decode("utf-8", "replace").strip() or "an unknown process"
                        fix = "stop it first: `ferry stop`"
                        fault = Fault(
                            "the run is running", str(self.lease), "a run that nobody trains", holder, fix
                        )
                        raise Refusal(fault, exit_code=ExitCode.LEASE_HELD) from error
                    time.sleep(0.05)
            before = file.read()
            _overwrite(file, f"{purpose}, process {os.getpid()}\n".encode())
            try:
                yield
            finally:
                _overwrite(file, before)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Keep others on this host from starting the run while the block does: one container is made, and by one only.

        Raises `Refusal` (lease held) if another starts it now.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            fix = "follow it with `ferry status`"
            fault = Fault(
                "the run is being started", str(self.path), "one start at a time", "another one", fix
            )
            raise Refusal(fault, exit_code=ExitCode.LEASE_HELD) from error
        finally:
            os.close(descriptor)

    def _lease_file(self) -> BinaryIO:
        try:
            return self.lease.open("r+b")
        except OSError as error:
            raise Refusal(
                Fault("no lease", str(self.lease), "a file to lock", str(error), _PREPARE)
            ) from error

    def links(self) -> tuple[lineage.Link, ...]:
        """Return the lineage: the bundle's links and those of the segments closed here."""
        raw = self.lineage_file.read_bytes()
        return lineage.parse(raw, str(self.lineage_file)) if raw else ()

    def segment_records(self) -> list[Segment]:
        """Return the segments started here, in their order."""
        records = []
        for path in sorted(self.segments.glob("*.json")):
            value = read_json(path, "segment record", "it was damaged after it was written: restore it")
            try:
                records.append(Segment(**value))
            except TypeError as error:
                fields = ", ".join(field.name for field in dataclasses.fields(Segment))
                raise Refusal(
                    Fault("segment record damaged", str(path), fields, str(error), "restore it")
                ) from error
        return records

    def checkpoints(self) -> tuple[census.Checkpoint | None, dict[str, Refusal]]:
        """Return the newest complete checkpoint of the run, its own or the bundle's, and why newer ones are not."""
        spec = self.spec()
        folders = [path for path in self.output.iterdir() if census.update_of(path.name) is not None]
        if spec.checkpoint != "fresh":
            # The engine shows the bundle's checkpoint in the output folder; on the host a mount point stands there.
            bundled = self.bundle_path() / spec.checkpoint.path
            folders = [path for path in folders if path.name != bundled.name] + [bundled]
        return census.newest_complete(folders, spec.world.ranks)

    def outcome(self) -> dict[str, Any] | None:
        """Return the trainer's own word on how it ended, or None; a damaged one is None too: unknown is not success."""
        try:
            value = json.loads((self.output / self.spec().outputs.outcome).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    def last_update(self) -> int:
        """Return the last update in rank 0's exposure log, or 0."""
        last = 0
        for row in read_exposure(self.output / self.spec().outputs.exposure / "rank_0.jsonl"):
            last = max(last, int(row["update"]))
        return last


def _overwrite(file: BinaryIO, content: bytes) -> None:
    file.seek(0)
    file.truncate()
    file.write(content)
    file.flush()


def judge(folder: RunFolder, state: State) -> Verdict:
    """Return how the last segment ended, from the engine's state, the trainer's outcome and the census together.

    Success needs exit code 0, the trainer's outcome and the complete checkpoint that it names.
    """
    if state.out_of_memory:
        return Verdict.OUT_OF_MEMORY
    match state.exit_code:
        case None:
            return Verdict.LOST
        case 0:
            return _judge_outcome(folder, folder.outcome() or {})
        case 137:  # 128 + SIGKILL
            return Verdict.FORCED
        case _:
            return Verdict.FAILED


def _judge_outcome(folder: RunFolder, outcome: Mapping[str, Any]) -> Verdict:
    newest, _ = folder.checkpoints()
    if newest is None or outcome.get("checkpoint") != newest.name:
        return Verdict.FAILED
    own = newest.path.parent == folder.output
    if own and census.hash_faults(newest):
        return Verdict.FAILED  # A word alone is not a success: every byte is that of the inventory.
    final = folder.output / folder.spec().outputs.final
    match outcome.get("outcome"):
        case "finished" if newest.update == newest.updates and final.is_dir():
            return Verdict.FINISHED
        case "stopped" if own:
            return Verdict.STOPPED
        case _:
            return Verdict.FAILED


def settle(folder: RunFolder, state: State, now_s: int) -> Verdict | None:
    """Close every open segment with a link in the lineage, and return the last one's verdict (None: none was open).

    An open segment that is not the last one was lost: a later one started after it. Does nothing while one runs.
    """
    if state.phase is Phase.RUNNING or folder.lease_holder() is not None:
        return None
    links = list(folder.links())
    closed = {link.segment for link in links}
    pending = [segment for segment in folder.segment_records() if segment.segment not in closed]
    verdict = None
    for segment in pending:
        verdict = judge(folder, state) if segment is pending[-1] else Verdict.LOST
        links.append(_link(folder, segment, verdict, lineage.head(links), now_s))
    if pending:
        write_file(folder.lineage_file, lineage.render(links))
    return verdict


def _link(folder: RunFolder, segment: Segment, verdict: Verdict, previous: str, now_s: int) -> lineage.Link:
    newest, _ = folder.checkpoints()
    contract = segment.contract
    if contract == "fresh" and newest is not None:
        contract = f"sha256:{newest.contract}"
    return lineage.Link(
        previous=previous,
        run=segment.run,
        segment=segment.segment,
        server=segment.server,
        engine=segment.engine,
        image=segment.image,
        lock=segment.lock,
        code=segment.code,
        contract=contract,
        checkpoint_in=segment.checkpoint,
        checkpoint_out=f"sha256:{newest.inventory}" if newest else "none",
        first_update=segment.from_update + 1,
        last_update=folder.last_update(),
        started=segment.started,
        ended=now_s,
        verdict=verdict.value,
    )
