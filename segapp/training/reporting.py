"""The events of a training: start, epochs, steps, evaluations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from segapp.config import RecomputeChoice
from segapp.inference.evaluate import Evaluation
from segapp.inference.normalize import NormalizedInput
from segapp.run.events import Alert, EpochStart, EventLog, Recompute, RunStart, Step, Val
from segapp.training.context import TrainerSettings, TrainingFacts
from segapp.training.control.commands import CommandController
from segapp.training.control.progress import TrainingProgress
from segapp.training.recovery import OomPolicy
from segapp.training.step.engine import StepEngine, StepResult
from segapp.training.telemetry.clock import Clock
from segapp.training.telemetry.data_watch import DataWatch
from segapp.training.telemetry.remaining_time import RemainingTime

if TYPE_CHECKING:
    from segapp.datasets.dataset import SegmentationDataset
    from segapp.datasets.loader import TrainLoader


@dataclass(eq=False)
class TrainingReporter:
    """Emits the events of a training."""

    event_log: EventLog
    settings: TrainerSettings
    progress: TrainingProgress
    clock: Clock
    engine: StepEngine
    controller: CommandController
    oom_policy: OomPolicy
    train_loader: TrainLoader
    val_set: SegmentationDataset

    def __post_init__(self) -> None:
        inner = next((part for part in self.engine.network.modules() if isinstance(part, NormalizedInput)), None)
        self._compiled_call = None if inner is None else inner.compiled_call
        self._remaining = RemainingTime(self.settings.timetable)
        self._choice: RecomputeChoice | None = None
        self._blocks: list[list[str]] = []
        self._data_watch = DataWatch(self.train_loader, self.val_set)

    def run_start(self, facts: TrainingFacts, resumed_from_step: int | None) -> None:
        """Emit `run_start`, and `weights` for every file of pretrained weights."""
        live, timetable = self.controller.settings, self.settings.timetable
        described = {name: value for name, value in vars(facts).items() if name not in ("config", "alerts", "notes")}
        self.event_log.emit(
            RunStart(
                **described,
                batch_size=self.settings.batch_size,
                epochs=timetable.epochs,
                steps_per_epoch=timetable.steps_per_epoch,
                steps=timetable.total_steps,
                resumed_from_step=resumed_from_step,
                gpu0_bsz=live.gpu0_bsz,
                is_auto=live.gpu0_bsz_auto,
                split=self._split(),
                precision=self.engine.precision.name,
                judge=self.controller.judge().to_json(),
            )
        )
        for report in self.engine.model.load_reports:
            self.event_log.emit(report.as_event())
        for alert in facts.alerts:
            self.event_log.emit(alert)
        self.recompute()
        self.alert("data", *self._data_watch.at_start())

    def epoch_start(self, lr: float) -> None:
        """Emit `epoch_start` with the learning rate of the first step and the unfrozen parameters."""
        at, last_frozen = self.progress.position, self.settings.freeze_epochs
        num_thawed = self.engine.num_frozen if last_frozen is not None and at.epoch == last_frozen + 1 else None
        self.event_log.emit(
            EpochStart(
                epoch=at.epoch,
                step=at.step,
                lr=lr,
                split=self._split(),
                num_thawed=num_thawed,
                judge=self.controller.judge().to_json(),
            )
        )

    def recompute(self) -> None:
        """Emit `recompute` if the recomputed blocks differ from the previous step's; every rank must call it."""
        choice, controller = self.controller.settings.recompute, self.controller.recompute
        if choice == self._choice:
            return
        self._choice = choice
        blocks = [list(names) for theirs in self.engine.ranks.gather(controller.current) for names in theirs]
        if blocks == self._blocks or not (any(blocks) or any(self._blocks)):
            return
        self._blocks = blocks
        is_fallback = self.oom_policy.fallbacks.is_recomputed
        reason = "train.recompute" if choice == "config" else "out of memory" if is_fallback else "by hand"
        plan = self.controller.batch_split.saved_plan
        is_planned = plan is not None and [list(names) for names in plan.recompute or ()] == blocks
        costs: Any = {"saved_mib": plan.saved_mib, "slower": plan.slower} if plan is not None and is_planned else {}
        self.event_log.emit(
            Recompute(
                step=self.progress.position.step,
                choice=choice,
                blocks=blocks,
                num_blocks=len(controller.blocks),
                reason=reason,
                **costs,
            )
        )

    def step(self, result: StepResult, lr: float) -> None:
        """Emit `step` and begin a new interval; only here the training waits for the device, to read the tensors."""
        self.alert("compile", *(self._compiled_call.take_notes() if self._compiled_call is not None else ()))
        self.alert("cuda_graph", *(self.engine.graph.take_notes() if self.engine.graph is not None else ()))
        loss, norm = float(result.loss), float(result.grad_norm)
        at, clock, scaler = self.progress.position, self.clock, self.engine.precision.scaler
        elapsed_s = clock.elapsed_s()
        # Settings that the time of a step depends on and that may change within a run.
        way = (
            self.controller.batch_split.current,
            self.oom_policy.fallbacks.num_pieces,
            self.controller.recompute.current,
            self.engine.is_frozen,
        )
        self._remaining.observe(clock.num_steps, elapsed_s, way)
        steps_left = math.ceil((len(self.train_loader) - at.batch) / self.settings.accumulate)
        num_evaluations, eval_s = clock.spent("eval")
        eta_epoch_s, eta_run_s = self._remaining.etas_s(at.epoch, at.step, steps_left, eval_s / max(num_evaluations, 1))
        self.event_log.emit(
            Step(
                epoch=at.epoch,
                step=at.step,
                loss=loss,
                lr=lr,
                images_per_s=clock.num_images / elapsed_s,
                data_wait_frac=clock.wait_s / elapsed_s,
                grad_norm=norm,
                split=result.split,
                skipped=int(self.engine.bad_steps),
                loss_scale=None if scaler is None else float(scaler.scale),
                step_s=elapsed_s / max(clock.num_steps, 1),
                eta_epoch_s=eta_epoch_s,
                eta_run_s=eta_run_s,
                terms={name: float(value) for name, value in result.terms.items()} or None,
                peaks_mib=self.controller.measured_mib(),
            )
        )
        self.alert("data", *self._data_watch.after_interval(clock.wait_s, elapsed_s))
        clock.restart()

    def alert(self, kind: str, *messages: str) -> None:
        """Emit alerts of a kind."""
        for message in messages:
            self.event_log.emit(Alert(kind=kind, message=message, step=self.progress.position.step))

    def validation(self, found: Evaluation, val_s: float) -> None:
        """Emit `val` with the time of the evaluation without pauses, and an alert if it has a note."""
        at, values = self.progress.position, found.values()
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
        known = {name: value for name, value in values.items() if name in Val.model_fields}
        self.event_log.emit(Val.model_validate(event | known))
        if found.note is not None:
            self.alert("memory", found.note)

    def _split(self) -> list[int] | None:
        split = self.controller.batch_split.current
        return None if split is None else list(split)
