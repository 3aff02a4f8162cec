"""What happens at every update boundary: check, record, and decide together whether to save or stop.

Promise: the applied learning rates are the closed form's, bit for bit, or the run ends; the exposure line of
an update is written before anything is saved; all ranks take the same decision, made from rank 0's request
file and from a signal on any rank. It saves nothing itself: the trainer does, when asked through
Transformers' control object.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer.events import Events, announce
from trainer.exposure import Exposure, ExposureLog
from trainer.ranks import any_rank, rank
from trainer.refusal import refuse
from trainer.sampler import Order
from trainer.schedule import learning_rate_multiplier
from trainer.stop import RequestFile, StopSignals


class Recorder(Protocol):
    """What the trainer gathers between two boundaries."""

    def take_micro_batches(self) -> tuple[tuple[str, ...], list[float]]:
        """Sample ids and losses of this rank's micro-batches since the last call."""

    def last_grad_norm(self) -> float:
        """Global gradient norm of the last update, before clipping."""

    def applied_rates(self) -> tuple[float, ...]:
        """Learning rates in the optimizer's groups now."""


class Schedule:
    """The resolved schedule of all groups:
    peak rates in the contract's order, and the multiplier's arguments.
    """

    def __init__(self, peaks: tuple[float, ...], total: int, warmup: int, floor: float) -> None:
        self.peaks = peaks
        self.total = total
        self.warmup = warmup
        self.floor = floor

    def multiplier(self, completed: int) -> float:
        return learning_rate_multiplier(completed, self.total, self.warmup, self.floor)

    def rates(self, completed: int) -> tuple[float, ...]:
        """Rates of the update that follows `completed` updates."""
        return tuple(peak * self.multiplier(completed) for peak in self.peaks)


class Boundary(TrainerCallback):  # type: ignore[misc]
    """Added after Transformers' own flow callback, so that its decisions are the last."""

    def __init__(
        self,
        recorder: Recorder,
        schedule: Schedule,
        order: Order,
        log: ExposureLog,
        events: Events,
        request: RequestFile,
        signals: StopSignals,
        save_every: int,
    ) -> None:
        self._recorder = recorder
        self._schedule = schedule
        self._order = order
        self._log = log
        self._events = events
        self._request = request
        self._signals = signals
        self._save_every = save_every
        self._rates: tuple[float, ...] = ()
        self._since = time.monotonic()
        self._stopping = False
        self.stopped_by: str | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The schedule gate: what Transformers resolved must be what the contract says."""
        if state.max_steps != self._schedule.total:
            fix = "this is a fault of the trainer: report it"
            raise refuse(
                "the schedule gate failed", "max_steps", str(self._schedule.total), str(state.max_steps), fix
            )
        announce(f"SCHEDULE_GATE_PASS ({self._schedule.total}, {self._schedule.warmup})")
        self._since = time.monotonic()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """DeepSpeed has just stepped; the scheduler has not yet moved on."""
        self._rates = self._recorder.applied_rates()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        update = state.global_step
        self._require_rates(update)
        # Transformers counts the epoch from the batches that it drew itself, which is wrong after a resume.
        state.epoch = update / self._order.updates_per_epoch
        ids, losses = self._recorder.take_micro_batches()
        loss = sum(losses) / len(losses)
        self._log.append(
            Exposure(update, state.epoch, ids, loss, self._rates, self._recorder.last_grad_norm())
        )
        self._decide(update, args.device, control)

    def _require_rates(self, update: int) -> None:
        expected = self._schedule.rates(update - 1)
        if self._rates != expected:
            fix = "do not trust this run's last updates; resume from the last complete checkpoint"
            raise refuse(
                "the learning rate left its schedule",
                f"update {update}",
                str(expected),
                str(self._rates),
                fix,
            )

    def _decide(self, update: int, device: torch.device, control: TrainerControl) -> None:
        request = self._request.due(update) if rank() == 0 else None
        asked, signalled = any_rank([request is not None, self._signals.received is not None], device)
        at_end = update >= self._schedule.total
        if (asked or signalled) and not at_end:
            self._stopping = True
            self.stopped_by = request.job if request is not None else self._signals.received or "signal"
        control.should_save = self._stopping or at_end or update % self._save_every == 0
        if control.should_save:
            # Before the checkpoint is complete: one whose log is shorter could not be resumed.
            self._log.sync()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **_: Any,
    ) -> None:
        """Rank 0's event; `loss` is the mean over ranks and micro-batches,
        `lr` the first group's applied rate.
        """
        if "loss" not in logs:
            return
        now = time.monotonic()
        self._events.write(
            "update",
            update=state.global_step,
            of=state.max_steps,
            loss=logs["loss"],
            lr=self._rates[0],
            grad_norm=self._recorder.last_grad_norm(),
            epoch=state.epoch,
            seconds=round(now - self._since, 6),
        )
        self._since = now

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """After the checkpoint is complete.
        Stopping is set only now, so that the saved state does not say "stop".
        """
        self._since = time.monotonic()
        if self._stopping:
            control.should_training_stop = True
