"""The training loop: fit -> train_epoch -> train_step, evaluation, checkpoints, and what is written about them.

The state of a training is whole at every step boundary, and only there: (epoch, batch, step), weights, average,
optimizer, random numbers. Everything else follows from the config, so a resumed run takes the same path bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from segapp.build.optimizer import build_schedule
from segapp.checkpoint.training_state import CheckpointStore, capture_rng, restore_rng
from segapp.config import LiveSettings, RunConfig
from segapp.errors import DataError, NonFiniteError, OutOfMemoryError, WorkerError
from segapp.failpoints import failpoint
from segapp.inference.evaluate import Evaluation, EvaluationSettings, evaluate
from segapp.inference.sliding import Inference
from segapp.memory.oom_report import OomReport, OomSnapshot
from segapp.optim import lr_at
from segapp.parallel.ranks import PeerOutOfMemoryError
from segapp.run.events import EpochStart, RunStart, Step, Val
from segapp.train.control.commands import CommandController, TrainingPosition
from segapp.train.control.safe_point import SafePoint
from segapp.train.control.signals import PauseRequest, StopRequest, StopSignals
from segapp.train.recovery.memory_limit import MemoryBudget
from segapp.train.recovery.out_of_memory import (
    MAX_PIECES,
    MemoryFallbacks,
    OomHandler,
    final_error,
    first_line,
    is_out_of_memory,
    next_eval_fallback,
)
from segapp.train.saving.position import Best, Clock, Position, images_in
from segapp.train.saving.saver import Captured, CheckpointSaver
from segapp.train.step.engine import StepEngine, StepResult
from segapp.train.step.precise_bn import BatchNormMemoryError, recompute_batchnorm
from segapp.train.step.rollback import rng_fields
from segapp.train.telemetry.device_memory import IDLE
from segapp.train.telemetry.event_log import EventLog
from segapp.train.telemetry.sample_images import SamplePictures

if TYPE_CHECKING:
    from segapp.datasets.loader import Batch, EvalLoader, TrainLoader
    from segapp.models import SegmentationModel

STATE_FORMAT = 1

FRESH_CHECKPOINT_S = 60.0
"""A change of the split is preceded by a checkpoint, unless the last one is younger than this."""


class Trainer:
    """One training.

    Args:
        config: the complete config; the objects below were made from it.
        engine: makes steps.
        train_loader: micro-batches of an epoch, from any position.
        val_loader: whole images, each once.
        inference: how the evaluation computes logits.
        num_classes: classes.
        ignore_index: target value that counts nowhere.
        description: facts for the `run_start` event (classes, num_params, devices, ...) and for the checkpoint.
        store: writes checkpoints.
        event_log: writes events.
        signals: asks for a stop.
        controller: what is asked for by commands, and the settings.
        rescue: examines and reports out-of-memory errors.
        samples: draws sample pictures after an evaluation; None: none.
        budget: what each device may hold; None: all that it has.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: StepEngine,
        train_loader: TrainLoader,
        val_loader: EvalLoader,
        inference: Inference,
        *,
        num_classes: int,
        ignore_index: int,
        description: Mapping[str, Any],
        store: CheckpointStore,
        event_log: EventLog,
        signals: StopSignals,
        controller: CommandController,
        rescue: OomHandler,
        samples: SamplePictures | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.train_loader, self.val_loader = train_loader, val_loader
        self.inference = inference
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.description = dict(description)
        self.event_log = event_log
        self.position = Position()
        self.best = Best()
        self.controller, self.samples = controller, samples
        self.rescue, self.budget = rescue, budget
        self._is_parted = False
        """Whether this rank left a step in which the others wait for it: then nobody can meet any more."""
        self.lessons = MemoryFallbacks()
        self.learned_later: list[tuple[int, MemoryFallbacks]] = []
        """Lessons learned after the checkpoint that training goes on from, with the step of each."""
        self.watch = engine.watch
        self.resumed_from_step: int | None = None
        self.ranks = engine.ranks
        self._num_val_checks = max(self.ranks.gather(len(val_loader)))
        self._clock = Clock()
        self._begun_epoch = 0
        self.saving = CheckpointSaver(store, config.checkpoint, event_log, self.ranks, self.watch, self._capture)
        self.attention = SafePoint(
            signals,
            controller,
            self.ranks,
            self._clock,
            self.watch,
            event_log,
            standing=self.standing,
            saving=self.saving,
            position=lambda: self.position,
        )

    # --- the course ------------------------------------------------------------------------------------------------

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches of an epoch."""
        return len(self.train_loader)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch; the last one may have fewer micro-batches."""
        return math.ceil(self.batches_per_epoch / self.config.train.accumulate)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.position.epoch > self.config.train.epochs

    @property
    def evaluated_model(self) -> SegmentationModel:
        """The model that evaluations judge: the weights' average where there is one."""
        average = self.engine.average
        return self.engine.model if average is None else average.module

    def fit(self) -> str:
        """Trains to the end of the config's epochs, or to an early stop.

        Returns:
            The reason why it ended.

        Raises:
            StopRequest: a signal or a command asked for a stop; the state is saved.
            RunError: the training cannot go on.
        """
        self._announce_start()
        try:
            reason = self._train_epochs()
        except StopRequest as request:
            self.saving.finish(self.position, is_required=True)
            self.controller.answer_at_end(
                self.standing(), f"{request}: saved at step {self.position.step}", is_finished=False
            )
            raise
        except NonFiniteError:
            self.saving.finish(self.position, is_required=False)
            raise
        except OutOfMemoryError:  # on every rank
            if self.engine.is_whole and not self._is_parted:
                self.saving.finish(self.position, is_required=False)
            self.saving.wait_for_writer()
            raise
        except (DataError, WorkerError):
            if self.ranks.world_size == 1:  # the other ranks would not come to a save
                self.saving.finish(self.position, is_required=False)
            self.saving.wait_for_writer()
            raise
        except Exception:
            self.saving.wait_for_writer()
            raise
        self.saving.finish(self.position, is_required=True)
        self.controller.answer_at_end(self.standing(), f"the run has finished: {reason}", is_finished=True)
        return reason

    def _train_epochs(self) -> str:
        while not self.is_complete:
            self.train_epoch()
            self._finish_epoch()
            if self._is_stale():
                return f"no better {self.config.checkpoint.monitor} for {self.config.train.early_stop} evaluations"
            if self.controller.requests.stop is not None and not self.is_complete:
                raise StopRequest("asked to stop after the epoch")
        return f"{self.config.train.epochs} epochs"

    def train_epoch(self) -> None:
        """Trains the rest of the current epoch."""
        total, accumulate = self.batches_per_epoch, self.config.train.accumulate
        if self.position.batch >= total:
            return
        if self.position.batch == 0:  # a run resumed in the middle of an epoch has said so already
            self._begin_epoch()
        self.engine.network.train()
        batches = iter(self.train_loader.epoch(self.position.epoch, self.position.batch))
        batch_size, num_images = self.config.train.batch_size, len(self.train_loader.dataset)
        self._clock.restart()
        while self.position.batch < total:
            self.attention.check()
            group = self._next_group(batches, min(accumulate, total - self.position.batch))
            result = self.train_step(group)
            self._clock.count_step(images_in(self.position.batch, len(group), batch_size, num_images))
            self.position.batch += len(group)
            self.controller.after_step(result.split, sum(result.split), self.position.step)
            is_last = self.position.batch >= total
            if is_last or self.position.step % self.config.log.every_steps == 0:
                self._publish(result, group)
            if not is_last and self.saving.is_due(self.position.step):
                self.saving.begin_or_put_off()
        self.controller.after_epoch()

    def _begin_epoch(self) -> None:
        """Puts the settings that were wished for into force; this is the one place where they change."""
        self.attention.check()
        wished = self.ranks.from_main(self.controller.settings_for_step(self.position.step))
        if (wished.gpu0_bsz, wished.shares) != (self.settings.gpu0_bsz, self.settings.shares):
            if not self.saving.is_fresh(FRESH_CHECKPOINT_S):
                self.saving.begin()
            if self.engine.device.type == "cuda":
                torch.cuda.empty_cache()  # blocks of the old sizes
        self.controller.apply(wished, self.standing())
        self.watch.reset_observed()
        self._begun_epoch = self.position.epoch
        split = self.controller.batch_split.current
        self.event_log.emit(
            EpochStart(
                epoch=self.position.epoch,
                step=self.position.step,
                lr=self._lr(self.position.step + 1),
                split=None if split is None else list(split),
            )
        )

    def train_step(self, group: list[Batch]) -> StepResult:
        """One update from the micro-batches of `group`.

        A step that a pause interrupts, or for which there was not memory enough, leaves no trace and is made anew.

        Raises:
            OutOfMemoryError: there was not memory enough in smaller pieces either.
        """
        self.engine.set_lr(self._lr(self.position.step + 1))
        self._recall_lessons()
        num_failures = 0
        while True:
            failpoint("train.step")
            failure: Exception | None = None
            try:
                with self._within_budget():
                    result = self.engine.step(
                        group, self.attention.check_within_step, num_pieces=self.lessons.num_pieces
                    )
            except PauseRequest:
                pass
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error
            else:
                self.position.step += 1
                return result
            if failure is None:
                self.attention.run_pending()
            else:
                num_failures += self._handle_step_oom(failure, may_learn=num_failures == 0)

    def _handle_step_oom(self, error: Exception, *, may_learn: bool) -> int:
        """After a step ran out of memory: back to the last good split where there is one, else smaller pieces.

        Returns:
            1 where a lesson was taken, 0 where the split was taken back.

        Raises:
            OutOfMemoryError: nothing is left to try.
        """
        if self.ranks.world_size > 1:
            raise self._fail_rank(error)
        report = self._examined(error)
        reverted = self.controller.revert_split(report.problem, self.position.step)
        if reverted is not None:
            self.rescue.report(replace(report, action=f"{reverted}; the step was made again"))
            return 0
        lessons = self._smaller_pieces()
        if not self.engine.is_whole:
            raise self._given_up(report, "the update broke off in the middle: resume from the last checkpoint")
        if lessons is None:
            raise self._given_up(report, "no smaller pieces are possible: the training is saved and stops")
        if not may_learn:
            raise self._given_up(report, "smaller pieces failed in the same step: the training is saved and stops")
        self.lessons = lessons
        self.controller.batch_split.clear_peaks()
        action = (
            f"the step is made again, and all later ones, with micro-batches in {lessons.num_pieces} pieces: the same "
            "mean over the step, but BatchNorm takes its statistics from smaller pieces"
        )
        self.rescue.report(replace(report, action=action), lessons)
        return 1

    def _fail_rank(self, error: Exception) -> OutOfMemoryError:
        """The end of a rank that ran out of memory while the others wait in an exchange of the same step."""
        self._is_parted = True
        snapshot, problem = self.rescue.examine(error, self.ranks.rank), first_line(error)
        lessons = self._smaller_pieces()
        action, advice = "all ranks stop: they cannot meet in this step any more", self._simple_advice(snapshot)
        if lessons is not None:
            pieces = f"micro-batches in {lessons.num_pieces} pieces, the same mean over the step"
            advice = (f"segapp train --resume goes on from the last checkpoint with {pieces}", *advice)
        report = OomReport(snapshot, self.position.epoch, self.position.step, problem, action, advice=advice)
        self.rescue.report_alone(report, lessons)
        return final_error(report)

    def _smaller_pieces(self) -> MemoryFallbacks | None:
        """Twice as many pieces; None where BatchNorm, or the batch, allows no more."""
        num_pieces = 2 * self.lessons.num_pieces
        size = self.config.train.batch_size // num_pieces
        if num_pieces > MAX_PIECES or size < self.ranks.world_size or not self.engine.can_train_on(size):
            return None
        return replace(self.lessons, num_pieces=num_pieces)

    def _examined(self, error: BaseException) -> OomReport:
        """What is known of an out-of-memory, on every rank; its memory is let go."""
        own = None
        if not isinstance(error, PeerOutOfMemoryError):
            own = self.rescue.examine(error, self.ranks.rank), first_line(error)
        self.rescue.release(error, self.engine.device)
        snapshot, problem = self.ranks.first_of(own)
        batch_split = self.controller.batch_split
        return OomReport(
            snapshot,
            self.position.epoch,
            self.position.step,
            problem,
            "",
            split=batch_split.current or (),
            predicted_mib=batch_split.predicted_mib(),
        )

    def _given_up(self, report: OomReport, action: str) -> OutOfMemoryError:
        report = replace(report, action=action, advice=self._simple_advice(report.snapshot))
        return final_error(self.rescue.report(report, is_final=True))

    def _simple_advice(self, snapshot: OomSnapshot) -> tuple[str, ...]:
        """What helps without a plan."""
        train, crop = self.config.train, self.config.data.crop_px
        if snapshot.phase == "eval":
            return (f"eval.slide=true eval.slide_px=[{crop[0] // 2},{crop[1] // 2}]", "eval.batch_size=1")
        smaller = [f"lower data.crop_px = [{crop[0]}, {crop[1]}]"]
        if train.batch_size > 1:
            accumulate = f"train.accumulate={2 * train.accumulate}"
            smaller.insert(0, f"lower train.batch_size: train.batch_size={train.batch_size // 2} {accumulate}")
        return tuple(smaller)

    def _recall_lessons(self) -> None:
        """Takes up what was learned after the checkpoint that training goes on from, at the same step."""
        while self.learned_later and self.learned_later[0][0] <= self.position.step:
            self.lessons = self.lessons.joined(self.learned_later.pop(0)[1])

    def _within_budget(self) -> AbstractContextManager[None]:
        return nullcontext() if self.budget is None else self.budget.enforced()

    def evaluate(self) -> Evaluation:
        """Evaluates on the validation split and writes the `val` event.

        Where memory does not suffice it begins again in a way that needs less; the training is not touched.

        Raises:
            OutOfMemoryError: no way needs little enough.
        """
        began, away_s = time.perf_counter(), self._clock.away_s
        self._recall_lessons()
        while True:
            self.watch.mark("eval")
            try:
                with self._within_budget():
                    found = self._evaluate_once()
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error
            self._handle_eval_oom(failure)
        self._clock.evaluation_s = time.perf_counter() - began - (self._clock.away_s - away_s)
        self.event_log.emit(
            Val(
                epoch=self.position.epoch,
                step=self.position.step,
                loss=found.loss,
                miou=found.scores.miou,
                iou=list(found.scores.iou),
                pixel_accuracy=found.scores.pixel_accuracy,
                num_images=found.num_images,
                val_s=self._clock.evaluation_s,
            )
        )
        if self.samples is not None:
            self.samples.draw(self.evaluated_model, self.position.epoch, self.lessons.adapted)
        self.watch.mark(IDLE)
        return found

    def _evaluate_once(self) -> Evaluation:
        if self.config.train.precise_bn:
            self._recompute_batchnorm()
        self.attention.check()
        return evaluate(
            self.evaluated_model,
            self.val_loader,
            EvaluationSettings(
                self.lessons.adapted(self.inference),
                self.num_classes,
                self.ignore_index,
                self.engine.device,
                self.engine.criterion.task,
                is_single=self.lessons.is_eval_single,
            ),
            check=self.attention.check,
            ranks=self.ranks,
            num_checks=self._num_val_checks,
        )

    def _handle_eval_oom(self, error: Exception) -> None:
        """After an evaluation ran out of memory: another way to evaluate, on every rank.

        Raises:
            OutOfMemoryError: there is none.
        """
        is_precise_bn = isinstance(error, BatchNormMemoryError)
        report = self._examined(error)
        found: tuple[MemoryFallbacks, str] | None
        if is_precise_bn:
            num_pieces = 2 * self.lessons.num_bn_pieces
            lessons = replace(self.lessons, num_bn_pieces=num_pieces)
            found = lessons, f"train.precise_bn cuts its batches into {num_pieces} pieces"
            found = found if self.config.train.batch_size // num_pieces >= self.engine.model.min_train_batch else None
        else:
            found = next_eval_fallback(
                self.lessons,
                self.lessons.adapted(self.inference),
                self.config.eval.batch_size,
                self.config.data.crop_px,
                is_fixed=self.engine.model.fixed_size_px is not None,
            )
        if found is None:
            raise self._given_up(report, "no smaller way to evaluate is left: the training is saved and stops")
        self.lessons, action = found
        self.rescue.report(replace(report, action=action), self.lessons)

    # --- what is asked for -----------------------------------------------------------------------------------------

    @property
    def settings(self) -> LiveSettings:
        """What a person may change while the run is going on, as it is now."""
        return self.controller.settings

    def standing(self) -> TrainingPosition:
        """Where the training stands, for whoever judges a command."""
        at = self.position
        is_before = at.batch == 0 and self._begun_epoch != at.epoch
        return TrainingPosition(at.epoch, at.step, at.epoch if is_before else at.epoch + 1, self.config.train.epochs)

    def _next_group(self, batches: Iterable[Batch], size: int) -> list[Batch]:
        began = time.perf_counter()
        self.watch.report_progress("read")
        iterator = iter(batches)
        group = [next(iterator) for _ in range(size)]
        self.watch.report_progress(IDLE)
        self._clock.wait_s += time.perf_counter() - began
        return group

    def _finish_epoch(self) -> None:
        """Evaluates if it is due, moves on to the next epoch, saves if it is due."""
        finished = self.position.epoch
        is_best = False
        is_due = finished % self.config.eval.every_epochs == 0 or finished >= self.config.train.epochs
        if is_due and not self.position.is_evaluated:
            found = self.evaluate()
            self.position.is_evaluated = True
            is_best = self.best.note(found.monitored(self.config.checkpoint.monitor), finished)
        self.position = Position(epoch=finished + 1, batch=0, step=self.position.step)
        every = self.config.checkpoint.every_epochs
        is_due = (every is not None and finished % every == 0) or self.saving.is_due(self.position.step)
        if is_best or self.is_complete or is_due:
            self.saving.begin(finished_epoch=finished, is_best=is_best)

    def _is_stale(self) -> bool:
        patience = self.config.train.early_stop
        return patience is not None and self.best.evaluations_since >= patience

    def _lr(self, step: int) -> float:
        return self.settings.lr_factor * lr_at(
            step,
            build_schedule(self.config.schedule),
            lr=self.config.optim.lr,
            total_steps=self.config.train.epochs * self.steps_per_epoch,
            steps_per_epoch=self.steps_per_epoch,
        )

    def _recompute_batchnorm(self) -> None:
        """Replaces lagging running statistics by those of fixed training batches under the present weights.

        Epoch 0 never trains: its batches are the same at every call.
        """
        batches = iter(self.train_loader.epoch(0))
        count = min(self.config.train.precise_bn, self.batches_per_epoch)
        pieces = (
            piece.to(self.engine.device)
            for _ in range(count)
            for piece in next(batches).images.tensor_split(self.lessons.num_bn_pieces)
        )
        with self.inference.autocast():
            recompute_batchnorm(self.evaluated_model, map(self.inference.normalizer, pieces), self.engine.device)

    # --- what is written -------------------------------------------------------------------------------------------

    def _announce_start(self) -> None:
        split = self.controller.batch_split.current
        self.event_log.emit(
            RunStart(
                classes=self.description["classes"],
                num_params=self.description["num_params"],
                devices=self.description["devices"],
                num_train=self.description["num_train"],
                num_val=self.description["num_val"],
                batch_size=self.config.train.batch_size,
                epochs=self.config.train.epochs,
                steps_per_epoch=self.steps_per_epoch,
                resumed_from_step=self.resumed_from_step,
                gpu0_bsz=self.settings.gpu0_bsz,
                is_auto=self.settings.gpu0_bsz_auto,
                split=None if split is None else list(split),
            )
        )
        for report in self.engine.model.load_reports:
            self.event_log.emit(report.as_event())
        self.watch.mark(IDLE)

    def _publish(self, result: StepResult, group: list[Batch]) -> None:
        """Reads the step's tensors (the only place that waits for the device) and writes the `step` event."""
        loss, norm = float(result.loss), float(result.grad_norm)
        elapsed = time.perf_counter() - self._clock.began
        scaler = self.engine.precision.scaler
        step_s = elapsed / max(self._clock.num_steps, 1)
        eta_epoch_s, eta_run_s = self._etas(step_s)
        self.event_log.emit(
            Step(
                epoch=self.position.epoch,
                step=self.position.step,
                loss=loss,
                lr=self._lr(self.position.step),
                images_per_s=self._clock.num_images / elapsed,
                data_wait_frac=self._clock.wait_s / elapsed,
                grad_norm=norm,
                split=list(result.split),
                skipped=int(self.engine.bad_steps),
                loss_scale=None if scaler is None else float(scaler.scale),
                step_s=step_s,
                eta_epoch_s=eta_epoch_s,
                eta_run_s=eta_run_s,
                terms={name: float(value) for name, value in result.terms.items()} or None,
            )
        )
        self._clock.restart()
        self._stop_if_diverged(group)

    def _stop_if_diverged(self, group: list[Batch]) -> None:
        """Ends a training that cannot make a step: too many bad ones in a row, or a loss scale that fell below 1."""
        if problem := self.engine.divergence(group[-1], self.config.train.max_bad_steps):
            move = "use train.precision amp-bf16, or lower" if self.engine.precision.scaler is not None else "lower"
            raise NonFiniteError(
                f"{problem[0]}, up to step {self.position.step}{problem[1]} (no bad step changed the weights): "
                f"{move} optim.lr = {self.config.optim.lr}, add schedule.warmup_steps or optim.clip_grad_norm"
            )

    def _etas(self, step_s: float) -> tuple[float, float]:
        """Seconds to the end of the epoch's training, and of the run with its evaluations."""
        left = math.ceil((self.batches_per_epoch - self.position.batch) / self.config.train.accumulate)
        later = self.config.train.epochs - self.position.epoch
        evaluations_s = (1 + later // self.config.eval.every_epochs) * self._clock.evaluation_s
        return left * step_s, (left + later * self.steps_per_epoch) * step_s + evaluations_s

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def _capture(self) -> Captured:
        return Captured(self.state_dict(), self.position, self.best.value)

    def save_last_boundary(self, is_still: Callable[[], bool]) -> str | None:
        """Saves the state of the last step boundary from another thread, while the training thread hangs in a step.

        Args:
            is_still: whether the training thread has not moved meanwhile.

        Returns:
            Why it could not be saved; None where it is.
        """
        if self.ranks.world_size > 1:
            return "the state of the other ranks cannot be gathered"
        engine_state, rng = self.engine.state_before_step()
        state = self._state_with(engine_state, [capture_rng() if rng is None else {**capture_rng(), **rng_fields(rng)}])
        return self.saving.save_last_boundary(Captured(state, replace(self.position), self.best.value), is_still)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a continuation needs, as tensors and plain values; every rank must ask."""
        return self._state_with(self.engine.state_dict(), self.ranks.gather(capture_rng()))

    def _state_with(self, engine_state: dict[str, Any], rng: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT,
            **engine_state,
            "position": vars(self.position).copy(),
            "best": vars(self.best).copy(),
            "settings": self.settings.model_dump(),
            "lessons": self.lessons.to_json(),
            "memory": self.controller.batch_split.state_dict(),
            "rng": rng,
            "config": self.config.model_dump(mode="json"),
            "data": {"num_train": len(self.train_loader.dataset), "batches_per_epoch": self.batches_per_epoch},
            "classes": list(self.description["classes"]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a saved state, at exactly the place where it was saved.

        Raises:
            CheckpointError: it does not fit this training.
        """
        self.engine.load_state_dict(state)
        self.position = Position(**state["position"])
        self.best = Best(**state["best"])
        self.controller.restore_settings(
            LiveSettings(**state["settings"]), state["config"]["parallel"], self.config.parallel.model_dump()
        )
        self.lessons = MemoryFallbacks.from_json(state.get("lessons", {}))
        self.controller.batch_split.load_state_dict(state.get("memory", {}))
        self.resumed_from_step = self.position.step
        if self.ranks.rank < len(state["rng"]):
            restore_rng(state["rng"][self.ranks.rank])
