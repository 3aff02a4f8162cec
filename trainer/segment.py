"""One segment of a run, from checked inputs to its outcome. From here on torch is loaded.

Promise: the contract is compared, the checkpoint proven whole and the output made ready, in this order and
agreed on by all ranks, before the first weight is loaded.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import PrinterCallback, TrainingArguments
from transformers.utils import logging as library_logging

from trainer import checkpoint as recovery
from trainer.boundary import Boundary, Schedule
from trainer.config import RunConfig
from trainer.contract import CONTRACT_NAME, METADATA_NAME, Document, require_equal
from trainer.data import Rows, RunLoader
from trainer.durable import plain_path
from trainer.events import Events, announce
from trainer.exposure import ExposureLog, log_path
from trainer.loop import ExactTrainer, RunParts
from trainer.manifest import Manifest
from trainer.model import build_model
from trainer.optimizer import Group, deepspeed_config, group_layout
from trainer.output import Output, Prepared
from trainer.ranks import all_or_none, barrier, on_rank_zero, rank
from trainer.sampler import Order
from trainer.stop import RequestFile, StopSignals
from trainer.teacher import load_teacher, require_identity
from trainer.text import input_metadata


@dataclass(frozen=True)
class Inputs:
    """What was checked without torch."""

    config: RunConfig
    versions: dict[str, str]
    manifest: Manifest
    order: Order
    total: int
    output: Output
    resume_from: Path | None


def training_arguments(config: RunConfig, output: Path, total: int) -> Any:
    """Transformers' arguments. Creating them starts the process group."""
    on_cpu = not torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=total,
        per_device_train_batch_size=config.batch.per_device,
        gradient_accumulation_steps=config.batch.accumulation,
        max_grad_norm=config.optimizer.clip,
        seed=config.seed,
        bf16=True,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else None,
        deepspeed=deepspeed_config(config),
        save_strategy="no",
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=[],
        disable_tqdm=True,
        log_level="warning",
        remove_unused_columns=False,
        ignore_data_skip=True,
    )
    _ = arguments.device
    library_logging.disable_progress_bar()
    return arguments


def contract_of(
    config: RunConfig,
    versions: dict[str, str],
    order: Order,
    total: int,
    groups: tuple[Group, ...],
    device: str,
) -> Document:
    """All that must be equal to resume. The config stands at the top level; the rest has keys of its own."""
    content = config.as_json()
    content["schedule"]["total"] = total
    content |= {
        "ferry": 1,
        "updates_per_epoch": order.updates_per_epoch,
        "parameter_groups": [group.as_json() for group in groups],
        "deepspeed": deepspeed_config(config),
        "versions": versions,
        "compute": {"device": device, "threads": torch.get_num_threads()},
    }
    return Document.of(CONTRACT_NAME, content)


def seed_rank(seed: int, rank: int) -> None:
    """Give this rank its own random streams:
    with one seed for all, ranks would draw the same dropout masks.
    """
    digest = hashlib.sha256(f"ferry-rank-1:{seed}:{rank}".encode()).digest()
    random.seed(int.from_bytes(digest[:8], "big"))
    numpy.random.seed(int.from_bytes(digest[8:12], "big"))
    torch.manual_seed(int.from_bytes(digest[12:20], "big") >> 1)


def prepare(inputs: Inputs, documents: tuple[Document, Document]) -> tuple[int, Prepared]:
    """Judge the checkpoint, then make the output ready; gives the update to go on from (0 = a fresh start).

    Raises:
        AgreedRefusal: on all ranks; the output was not changed.
    """
    world, source = inputs.config.batch.world, inputs.resume_from
    if source is None:
        return 0, on_rank_zero(lambda: inputs.output.prepare_fresh(world))
    all_or_none(lambda: require_equal(source, list(documents)))
    seal = on_rank_zero(lambda: recovery.verify(source, world, inputs.total))
    return seal.update, on_rank_zero(lambda: inputs.output.prepare_resume(seal.update, world))


def announce_start(
    inputs: Inputs, contract: Document, resumed_at: int, prepared: Prepared, events: Events
) -> None:
    """Rank 0's lines and event. What describes this machine is told here, and is not part of the contract."""
    if rank() != 0:
        return
    config = inputs.config
    size = f"run={config.name} total={inputs.total} world={config.batch.world}"
    identities = f"data={config.data.fingerprint} teacher=sha256:{config.teacher.sha256}"
    announce(f"TRAINING_CONTRACT {contract.sha256} {size} {identities}")
    if inputs.resume_from is not None:
        announce(f"RESUMED update={resumed_at} checkpoint={recovery.folder_name(resumed_at)}")
    events.write(
        "start",
        run=config.name,
        resumed_at=resumed_at,
        of=inputs.total,
        contract=contract.sha256,
        swept=prepared.swept,
        set_aside=prepared.set_aside,
        cpu=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
    )


def make_trainer(
    inputs: Inputs, arguments: Any, teacher: bytes, signals: StopSignals
) -> tuple[ExactTrainer, Boundary]:
    """Build model, contract and trainer, with the output made ready in between."""
    config, order, output = inputs.config, inputs.order, inputs.output
    model = build_model(config.model, config.seed)
    groups = group_layout(model, config)
    contract = contract_of(config, inputs.versions, order, inputs.total, groups, arguments.device.type)
    documents = contract, Document.of(METADATA_NAME, input_metadata(config))
    weights = all_or_none(lambda: load_teacher(teacher, config.model, arguments.device))
    resumed_at, prepared = prepare(inputs, documents)
    events = Events(output.events if rank() == 0 else None)
    announce_start(inputs, contract, resumed_at, prepared, events)
    peaks = tuple(group.lr for group in groups)
    schedule = Schedule(peaks, inputs.total, config.schedule.warmup, config.schedule.floor)
    rows = Rows(inputs.manifest.rows, config.model.image_size)
    trainer = ExactTrainer(
        RunParts(config, groups, schedule, weights, output, events, documents), model, arguments, rows
    )
    trainer.loader = RunLoader(
        rows, order, rank(), config.model, config.loader, lambda: trainer.state.global_step
    )
    log = ExposureLog(log_path(output.train, rank()))
    request = RequestFile(output.request)
    boundary = Boundary(trainer, schedule, order, log, events, request, signals, config.saves.every)
    trainer.pop_callback(PrinterCallback)
    trainer.add_callback(boundary)
    return trainer, boundary


def conclude(trainer: ExactTrainer, boundary: Boundary, inputs: Inputs) -> None:
    """Write `final/` if the run is at its end, then the outcome, then remove the request that it answers."""
    update = trainer.state.global_step
    finished = update == inputs.total
    if finished:
        trainer.save_final()
    if rank() == 0:
        outcome, request = ("finished", None) if finished else ("stopped", boundary.stopped_by)
        name = recovery.folder_name(update)
        inputs.output.write_outcome(outcome, update, name, request)
        trainer.parts.events.write(
            "outcome", outcome=outcome, update=update, checkpoint=name, request=request
        )
        RequestFile(inputs.output.request).answer()
    barrier()


def run_segment(inputs: Inputs, signals: StopSignals) -> None:
    """Train until the end of the run or a stop request.

    Raises:
        Refused: before anything is trained or written.
    """
    teacher = require_identity(inputs.config.teacher)
    arguments = training_arguments(inputs.config, inputs.output.folder, inputs.total)
    trainer, boundary = make_trainer(inputs, arguments, teacher, signals)
    seed_rank(inputs.config.seed, rank())
    if inputs.resume_from is None:
        trainer.train()
    else:
        with plain_path(inputs.resume_from) as source:
            trainer.train(resume_from_checkpoint=source)
    conclude(trainer, boundary, inputs)
    torch.distributed.destroy_process_group()
