"""Transformers' Trainer, with the places where a resume would lose something taken over.

Promise: two legs give the same bits as one: own order of rows, own optimizer groups, schedule from the closed
form, random state of each rank restored after everything that draws from it, CPUAdam's counter replayed, and
checkpoints that are complete or not there. What it leaves to the libraries: forward, backward, ZeRO-2, and
the files' formats.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from trainer import checkpoint as recovery
from trainer.boundary import Schedule
from trainer.config import RunConfig
from trainer.contract import Document
from trainer.data import RunLoader
from trainer.durable import plain_path, write_document
from trainer.events import Events, announce
from trainer.exact import WITHOUT_REPLAY, cpu_adam_below, replay_adam_counter
from trainer.model import PictureTextModel
from trainer.optimizer import Group, create_optimizer
from trainer.output import Output
from trainer.ranks import barrier, rank
from trainer.schedule import ramp
from trainer.teacher import Teacher


@dataclass(frozen=True)
class RunParts:
    """Everything that the trainer is made of, ready before it starts."""

    config: RunConfig
    groups: tuple[Group, ...]
    schedule: Schedule
    teacher: Teacher
    output: Output
    events: Events
    documents: tuple[Document, Document]


class ExactTrainer(Trainer):  # type: ignore[misc]
    """The reference trainer. `loader` is set before `train()`."""

    loader: RunLoader
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, parts: RunParts, model: PictureTextModel, arguments: Any, rows: Any) -> None:
        self.parts = parts
        self._ids: list[str] = []
        self._losses: list[torch.Tensor] = []
        self._grad_norm = float("nan")
        self._rotation = recovery.Rotation(parts.config.saves.keep)
        super().__init__(model=model, args=arguments, train_dataset=rows)

    # what a rank saw

    def take_micro_batches(self) -> tuple[tuple[str, ...], list[float]]:
        """See `trainer.boundary.Recorder`."""
        taken = tuple(self._ids), [loss.item() for loss in self._losses]
        self._ids, self._losses = [], []
        return taken

    def last_grad_norm(self) -> float:
        """See `trainer.boundary.Recorder`."""
        return self._grad_norm

    def applied_rates(self) -> tuple[float, ...]:
        """See `trainer.boundary.Recorder`."""
        return tuple(float(group["lr"]) for group in cpu_adam_below(self.optimizer).param_groups)

    # data, optimizer, schedule, loss

    def get_train_dataloader(self) -> RunLoader:
        """Not prepared by Accelerate,
        which would shard the order and synchronise random states in its own way.
        """
        return self.loader

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            self.optimizer = create_optimizer(self.model, self.parts.groups, self.parts.config)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            schedule = self.parts.schedule

            def multiplier(completed: int) -> float:
                return schedule.multiplier(completed)

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, multiplier)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Text loss plus the ramped teacher loss, float32; both are means over the micro-batch."""
        ids = inputs.pop("ids")
        outputs = model(**inputs)
        teacher = self.parts.config.teacher
        wanted = self.parts.teacher.features(inputs["pixels"])
        aside = torch.nn.functional.mse_loss(outputs["features"].float(), wanted)
        loss = outputs["loss"] + teacher.weight * ramp(self.state.global_step, teacher.ramp_updates) * aside
        self._ids += ids
        self._losses.append(loss.detach())
        return (loss, outputs) if return_outputs else loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        self._grad_norm = float(super()._get_grad_norm(model, grad_norm))
        return self._grad_norm

    # saving

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Weights and config only. No training_args.bin: it pickles this host's output path, so that equal
        runs on two servers would have unequal checkpoints; all it could say stands in the contract.
        """
        self.model.save_pretrained(output_dir, state_dict=state_dict)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write `checkpoint-N` aside on all ranks, then seal it on rank 0."""
        started = time.monotonic()
        update = self.state.global_step
        self.store_flos()
        final = self.parts.output.checkpoint(update)
        aside = recovery.aside_for(self.parts.output.folder, final.name)
        if rank() == 0:
            aside.mkdir()
        barrier()
        with plain_path(aside) as target:
            self.save_model(target, _internal_call=True)
            self._save_optimizer_and_scheduler(target)
            self._save_rng_state(target)
            barrier()
        if rank() == 0:
            self.state.save_to_json(str(aside / "trainer_state.json"))
            for document in self.parts.documents:
                write_document(aside / document.name, document.content)
            self._seal(aside, final, recovery.INVENTORY_NAME)
            deleted = self._rotation.wrote(final)
            seconds = round(time.monotonic() - started, 6)
            self.parts.events.write(
                "save", update=update, checkpoint=final.name, seconds=seconds, deleted=deleted
            )
        barrier()

    def _seal(self, aside: Path, final: Path, inventory: str) -> None:
        config, contract = self.parts.config, self.parts.documents[0]
        total, world = self.parts.schedule.total, config.batch.world
        recovery.seal(
            aside, final, inventory, recovery.Seal(self.state.global_step, total, world, contract.sha256)
        )

    def save_final(self) -> None:
        """Write `final/`: weights, config, and an inventory."""
        final = self.parts.output.final
        aside = recovery.aside_for(self.parts.output.folder, final.name)
        self.save_model(str(aside), _internal_call=True)
        barrier()
        if rank() == 0:
            self._seal(aside, final, recovery.FINAL_INVENTORY_NAME)
        barrier()

    # resuming

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """The last step of loading, on every rank: DeepSpeed's state is in, now what it forgot."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        update = self.state.global_step
        if replay_adam_counter(self.optimizer, update):
            announce(f"EXACT_KIT replayed CPUAdam beta powers to step {update}")
        else:
            announce(f"EXACT_KIT SWITCHED OFF by {WITHOUT_REPLAY}: this run is not exact")
