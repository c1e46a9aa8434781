"""The events of a training's course: start, epochs, steps, evaluations."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

from segapp.inference.evaluate import Evaluation
from segapp.inference.normalize import NormalizedInput
from segapp.run.events import Alert, EpochStart, EventLog, RunStart, Step, Val
from segapp.training.context import TrainerSettings, TrainingFacts
from segapp.training.control.commands import CommandController
from segapp.training.control.progress import TrainingProgress
from segapp.training.recovery import OomPolicy
from segapp.training.step.engine import StepEngine, StepResult
from segapp.training.telemetry.clock import Clock
from segapp.training.telemetry.data_watch import DataWatch
from segapp.training.telemetry.remaining_time import EpochPosition, Observed, RemainingTime
from segapp.training.validation import Validation

if TYPE_CHECKING:
    from segapp.datasets.loader import TrainLoader


class TrainingReporter:
    """Emits the events of a training's course.

    Args:
        event_log: takes them.
        settings: fixed numbers.
        progress: position and best evaluation.
        clock: of the training thread.
        engine: makes steps.
        controller: holds the settings in force.
        oom_policy: holds the fallbacks in force.
        train_loader: micro-batches of an epoch.
        validation: evaluates.
    """

    def __init__(
        self,
        event_log: EventLog,
        settings: TrainerSettings,
        progress: TrainingProgress,
        clock: Clock,
        *,
        engine: StepEngine,
        controller: CommandController,
        oom_policy: OomPolicy,
        train_loader: TrainLoader,
        validation: Validation,
    ) -> None:
        self._event_log, self._settings, self._progress, self._clock = event_log, settings, progress, clock
        self._engine, self._controller, self._oom_policy = engine, controller, oom_policy
        inner = next((part for part in self._engine.network.modules() if isinstance(part, NormalizedInput)), None)
        self._compiled_call = None if inner is None else inner.compiled_call
        self._num_batches = len(train_loader)
        self._remaining = RemainingTime(settings.timetable)
        self._data_watch = DataWatch(train_loader, validation.loader.dataset)

    def run_start(self, facts: TrainingFacts, resumed_from_step: int | None) -> None:
        """Emit `run_start`, and `weights` for every file of pretrained weights."""
        live, timetable = self._controller.settings, self._settings.timetable
        described = {name: value for name, value in vars(facts).items() if name not in ("config", "alerts", "notes")}
        self._event_log.emit(
            RunStart(
                **described,
                batch_size=self._settings.batch_size,
                epochs=timetable.epochs,
                steps_per_epoch=timetable.steps_per_epoch,
                steps=timetable.total_steps,
                resumed_from_step=resumed_from_step,
                gpu0_bsz=live.gpu0_bsz,
                is_auto=live.gpu0_bsz_auto,
                split=self._split(),
                judge=self._controller.judge().to_json(),
            )
        )
        for report in self._engine.model.load_reports:
            self._event_log.emit(report.as_event())
        for alert in facts.alerts:
            self._event_log.emit(alert)
        self._alert(self._data_watch.at_start())

    def epoch_start(self, lr: float) -> None:
        """Emit `epoch_start` with the learning rate of the first step, and what it thaws."""
        at, last_frozen = self._progress.position, self._settings.freeze_epochs
        num_thawed = self._engine.num_frozen if last_frozen is not None and at.epoch == last_frozen + 1 else None
        self._event_log.emit(
            EpochStart(
                epoch=at.epoch,
                step=at.step,
                lr=lr,
                split=self._split(),
                num_thawed=num_thawed,
                judge=self._controller.judge().to_json(),
            )
        )

    def step(self, result: StepResult, lr: float) -> None:
        """Emit `step` and begin a new interval; reading the tensors is the only place that waits for the device."""
        for note in self._compiled_call.take_notes() if self._compiled_call is not None else ():
            self._event_log.emit(Alert(kind="compile", message=note, step=self._progress.position.step))
        loss, norm = float(result.loss), float(result.grad_norm)
        at, clock, scaler = self._progress.position, self._clock, self._engine.precision.scaler
        elapsed_s = clock.elapsed_s()
        self._remaining.observe(Observed.of(clock), self._way_of_steps())
        eta_epoch_s, eta_run_s = self._remaining.etas_s(self._place())
        self._event_log.emit(
            Step(
                epoch=at.epoch,
                step=at.step,
                loss=loss,
                lr=lr,
                images_per_s=clock.num_images / elapsed_s,
                data_wait_frac=clock.wait_s / elapsed_s,
                grad_norm=norm,
                split=result.split,
                skipped=int(self._engine.bad_steps),
                loss_scale=None if scaler is None else float(scaler.scale),
                step_s=elapsed_s / max(clock.num_steps, 1),
                eta_epoch_s=eta_epoch_s,
                eta_run_s=eta_run_s,
                terms={name: float(value) for name, value in result.terms.items()} or None,
                peaks_mib=self._controller.measured_mib(),
            )
        )
        self._alert(self._data_watch.after_interval(clock.wait_s, elapsed_s))
        clock.restart()

    def _alert(self, messages: Iterable[str]) -> None:
        for message in messages:
            self._event_log.emit(Alert(kind="data", message=message, step=self._progress.position.step))

    def _way_of_steps(self) -> Hashable:
        """Return what the time of a step depends on and may change within a run."""
        num_pieces = self._oom_policy.fallbacks.num_pieces
        return self._controller.batch_split.current, num_pieces, self._engine.is_frozen

    def _place(self) -> EpochPosition:
        at = self._progress.position
        return EpochPosition(at.epoch, at.step, math.ceil((self._num_batches - at.batch) / self._settings.accumulate))

    def outputs(self, message: str) -> None:
        """Emit the alert about the outputs of the network."""
        self._event_log.emit(Alert(kind="model", message=message, step=self._progress.position.step))

    def diverged(self, message: str) -> None:
        """Emit the alert that the training has diverged, or seems to."""
        self._event_log.emit(Alert(kind="diverged", message=message, step=self._progress.position.step))

    def validation(self, found: Evaluation, val_s: float) -> None:
        """Emit `val`, and an alert if the evaluation has a note.

        Args:
            found: by the evaluation.
            val_s: its time without pauses.
        """
        at = self._progress.position
        values = found.values()
        event = {
            "epoch": at.epoch,
            "step": at.step,
            "iou": found.scores.iou,
            "precision": found.scores.precision,
            "recall": found.scores.recall,
            "num_images": found.num_images,
            "val_s": val_s,
            "scores": {name: value for name, value in values.items() if name not in Val.model_fields},
        }
        self._event_log.emit(
            Val.model_validate(event | {name: value for name, value in values.items() if name in Val.model_fields})
        )
        if found.note is not None:
            self._event_log.emit(Alert(kind="memory", message=found.note, step=at.step))

    def _split(self) -> list[int] | None:
        split = self._controller.batch_split.current
        return None if split is None else list(split)
