"""The training loop: fit -> train_epoch -> train_step, evaluation, checkpoints, and the events about them.

The state of a training is complete between two steps, and only there: (epoch, batch, step), weights, average,
optimizer, random numbers. Everything else follows from the config, so a resumed run takes the same path bit for bit. On
GPUs this requires `train.deterministic`; without it, runs differ by the rounding of kernels that add in random order.
"""

import contextlib
import functools
import time
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from segapp.accelerator import accelerator_of
from segapp.checkpoint.saver import Captured, CheckpointSaver, Position
from segapp.checkpoint.snapshot import capture_rng, restore_rng
from segapp.config import LiveSettings
from segapp.datasets.loader import TrainLoader
from segapp.datasets.pool import Batch
from segapp.errors import DataError, NonFiniteError, OutOfMemoryError, WorkerError
from segapp.failpoints import failpoint
from segapp.inference.evaluate import Evaluation
from segapp.memory.counters import IDLE
from segapp.memory.oom import is_out_of_memory
from segapp.optim import Plateau
from segapp.training.context import RunContext, TrainerSettings, TrainingFacts
from segapp.training.inbox import FinalStatus
from segapp.training.live.controller import CommandController
from segapp.training.live.oom import OomPolicy
from segapp.training.progress import Best, LossWatch, TrainingProgress
from segapp.training.pulse import Liveness
from segapp.training.reporting import TrainingReporter, images_in
from segapp.training.signals import PauseRequest, StopRequest
from segapp.training.step.engine import StepEngine, StepResult
from segapp.training.validation import Validation

PAUSE_POLL_S = 0.1
RANKS_POLL_S = 0.1
"""Seconds between two polls of several ranks if steps are faster: each costs every rank's host 0.2 to 0.3 ms."""

MOST_STEPS_WITHOUT_POLL = 64


class SafePoint:
    """Polls signals and commands, and does immediately what is possible: a checkpoint, a pause, a stop.

    All ranks poll together, with one collective as long as there is no request, and skip the same polls if their steps
    are fast.
    """

    def __init__(
        self,
        context: RunContext,
        controller: CommandController,
        saver: CheckpointSaver,
        progress: TrainingProgress,
        liveness: Liveness,
    ) -> None:
        self._context, self._controller, self._saver, self._progress = context, controller, saver, progress
        self._liveness = liveness
        self._has_overdue_save = False
        self._asked_at_step: int | None = None
        self._num_asked = 0
        self._calls_per_poll = 1
        self._calls, self._polled_s = 0, time.monotonic()

    def check(self, before: Literal["step", "micro-batch", "epoch", "resume"] = "step") -> None:
        """Poll, then stop, save or pause as requested; call it only while the state is consistent.

        Args:
            before: what follows. Before a later micro-batch of a step nothing is saved, and a pause leaves the step. No
                poll is skipped before an epoch, at whose start settings are applied, and while the training is paused.

        Raises:
            StopRequest: on every rank, after any of them was asked to stop.
            PauseRequest: leave the step, and make it again after the next `check`.
        """
        controller, signals, is_due = self._controller, self._context.signals, before in ("epoch", "resume")
        self._liveness.report_progress()
        self._answer_saved()
        self._calls += 1
        if is_due or self._calls >= self._calls_per_poll:
            commands = controller.inbox.take(is_due=is_due)
            # All questions share one collective, because each costs every rank's host time.
            is_stop, is_save, has_commands, is_overdue = self._context.ranks.any_of(
                signals.is_set, signals.take_checkpoint_request(), bool(commands), self._saver.is_overdue()
            )
            self._pace()
            self._has_overdue_save |= is_overdue
            controller.requests.wants_checkpoint |= is_save
            if has_commands:
                controller.handle_commands(commands, self._progress.command_position())
                controller.requests = self._context.ranks.from_main(controller.requests)
            if is_stop:
                by = signals.by if controller.requests.stop is None else "command"
                raise StopRequest(signals.signal_name or "a signal to another rank", by)
            if controller.requests.stop == "now":
                raise StopRequest("asked to stop")
        if before == "micro-batch":
            if controller.requests.is_paused:
                raise PauseRequest
            return
        self._begin_save()
        if controller.requests.is_paused and before != "resume":
            self._pause()

    def _begin_save(self) -> None:
        """Begin a save that was requested or is overdue; the request is answered when it is written."""
        requests = self._controller.requests
        if requests.wants_checkpoint:
            requests.wants_checkpoint = False
            self._saver.begin_asked(self._progress.position)
            self._asked_at_step = self._progress.position.step
            self._num_asked = self._controller.num_open("checkpoint")
        elif self._has_overdue_save:
            self._saver.begin()
        self._has_overdue_save = False

    def _answer_saved(self) -> None:
        if self._asked_at_step is not None:
            is_done, problem = self._saver.outcome()
            if is_done:
                done = f"checkpoints/last.pt at step {self._asked_at_step}"
                status: FinalStatus = "rejected" if problem else "applied"
                # Commands that came after its begin wait for the next save.
                answered = problem or done, self._asked_at_step, self._num_asked
                self._controller.answer_all("checkpoint", status, *answered)
                self._asked_at_step = None

    def _pace(self) -> None:
        """Agree with the other ranks on the number of calls until the next poll, from the main rank's time per call."""
        if self._context.ranks.world_size > 1:
            call_s = (time.monotonic() - self._polled_s) / self._calls
            calls = max(1, min(MOST_STEPS_WITHOUT_POLL, int(RANKS_POLL_S / max(call_s, 1e-6))))
            self._calls_per_poll = self._context.ranks.from_main(calls)
            self._polled_s = time.monotonic()
        self._calls = 0

    def _pause(self) -> None:
        with self._liveness.during("paused"):
            while self._controller.requests.is_paused:
                # A poll may bring a resume and another pause.
                self._controller.answer_all("pause", "applied", None, self._progress.position.step)
                time.sleep(PAUSE_POLL_S)
                self.check(before="resume")


class Trainer:
    """The loop of a training, with its position, evaluations and checkpoints; the engine makes the steps."""

    def __init__(
        self,
        context: RunContext,
        settings: TrainerSettings,
        facts: TrainingFacts,
        liveness: Liveness,
        *,
        engine: StepEngine,
        train_loader: TrainLoader,
        validation: Validation,
        controller: CommandController,
        oom_policy: OomPolicy,
        plateau: Plateau | None = None,
    ) -> None:
        self.settings, self.facts, self.liveness = settings, facts, liveness
        self.engine, self.train_loader, self.validation = engine, train_loader, validation
        self.controller, self.oom_policy, self.plateau = controller, oom_policy, plateau
        self.ranks, self.device_memory, self.locations = context.ranks, context.device_memory, context.locations
        self.progress = TrainingProgress(settings.timetable.epochs, settings.timetable.total_steps)
        self.reporter = TrainingReporter(
            context.event_log,
            settings,
            self.progress,
            liveness,
            engine,
            controller,
            train_loader,
            validation.loader.dataset,
        )
        self.saver = CheckpointSaver(
            context.folder.checkpoints,
            settings.save_rules,
            context.event_log,
            context.ranks,
            self._capture,
            during_save=lambda: liveness.during("save"),
            is_stopped=lambda: context.signals.is_set,
        )
        for loader in (train_loader, validation.loader):
            loader.pool.tell = self._tell_of_data
        self.loss_watch = LossWatch(len(facts.start.classes))
        self.has_diverged = False
        self.safe_point = SafePoint(context, controller, self.saver, self.progress, liveness)

    @property
    def position(self) -> Position:
        return self.progress.position

    @property
    def length(self) -> str:
        timetable = self.settings.timetable
        return f"{timetable.epochs} epochs" if timetable.total_steps is None else f"{timetable.total_steps} steps"

    @property
    def end_reason(self) -> str | None:
        """Why no step is left; None if the training continues."""
        if self._is_early_stop:
            return f"no better {self.settings.monitor} for {self.settings.early_stop} evaluations"
        return self.length if self.progress.is_complete else None

    def fit(self) -> str:
        """Train to the last epoch or step, or to an early stop; return the reason why training ended.

        Raises:
            StopRequest: a signal or a command requested a stop; the state is saved.
            RunError: the training cannot continue.
        """
        self.liveness.training = self.progress, self.saver
        self.reporter.run_start(self.facts, self.progress.resumed_from_step)
        self.liveness.mark(IDLE)
        with self._saved_on_failure():
            while (reason := self.end_reason) is None:
                self.train_epoch()
                self._evaluate_and_save()
                # The epoch is not over after an evaluation within it.
                is_between = self.position.batch == 0 and self.end_reason is None
                if self.controller.requests.stop is not None and is_between:
                    raise StopRequest("asked to stop after the epoch")
        self.saver.finish(self.position, is_required=True, waits_for_space=True)
        self.answer_commands(f"the run has finished: {reason}", is_finished=True)
        return reason

    @contextlib.contextmanager
    def _saved_on_failure(self) -> Iterator[None]:
        """If a stop or an error leaves the state complete on every rank, save it, and wait for the writer."""
        try:
            yield
        except StopRequest as request:
            self.saver.finish(self.position, is_required=True)
            self.answer_commands(f"{request}: saved at step {self.position.step}", is_finished=False)
            raise
        except Exception as error:
            match error:
                case NonFiniteError():
                    can_save = not self.has_diverged  # otherwise the newest checkpoint is the last one before
                case OutOfMemoryError():  # on every rank
                    can_save = self.oom_policy.can_save
                case DataError() | WorkerError():
                    can_save = self.ranks.world_size == 1  # the other ranks would not reach a save
                case _:
                    can_save = False
            if can_save:
                self.saver.finish(self.position, is_required=False)
            self.saver.wait_for_writer()
            raise

    def answer_commands(self, reason: str, *, is_finished: bool) -> None:
        self.controller.answer_at_end(self.progress.command_position(), reason, is_finished=is_finished)

    def train_epoch(self) -> None:
        """Train the rest of the current epoch, or up to an evaluation or the end of the run within it."""
        settings, clock = self.settings, self.reporter.clock
        if self._is_break_due():
            return
        if self.position.batch == 0:  # a run resumed in the middle of an epoch has already emitted its start
            self._begin_epoch()
        self.controller.restart_peaks()  # without the peaks of an evaluation
        self.engine.network.module.train()
        at = self.position
        batches = self.train_loader.epoch(at.epoch, at.batch, last_epoch=self.progress.epochs)
        clock.restart()
        group = self._next_group(batches)
        self.validation.prepare(self.live)
        if at.step == 0:
            self.reporter.alert("data", *self.validation.draw_first_batch(group[0]))
        num_images = len(self.train_loader.dataset)
        is_last = False
        while not is_last:
            result = self.train_step(group)
            clock.num_steps += 1
            clock.num_images += images_in(self.position.batch, len(group), settings.batch_size, num_images)
            self.position.batch += len(group)
            self.loss_watch.add(result.loss)
            self.controller.after_step(result.split, sum(result.split), self.position.step)
            is_last = self._is_break_due()
            if is_last:
                self.controller.after_epoch()
            if is_last or self.position.step % settings.log_every_steps == 0:
                self.reporter.step(result, self._lr(self.position.step))
                self._stop_if_diverged()
            if not is_last and self.saver.is_due(self.position.step):
                self.saver.begin_or_skip()
            if not is_last:
                group = self._next_group(batches)

    def train_step(self, group: list[Batch]) -> StepResult:
        """Make one update from the micro-batches of `group`.

        A step that a pause interrupts, or that runs out of memory, changes nothing and is repeated.

        Raises:
            StopRequest: a stop was requested before the step, or between its micro-batches.
            OutOfMemoryError: memory does not suffice, even in smaller pieces.
        """
        oom = self.oom_policy
        while True:
            failpoint("train.step")
            self.safe_point.check()
            # Not before: a checkpoint saved there has the same bytes as one saved at the end of the last step.
            self.engine.set_lr(self._lr(self.position.step + 1))
            num_pieces = oom.begin(self.position).num_pieces
            self.reporter.live_settings()
            num_samples = images_in(self.position.batch, 1, self.settings.batch_size, len(self.train_loader.dataset))
            sizes = self._sizes(group, num_pieces, num_samples)
            self.device_memory.begin_step(sizes)
            try:
                check = functools.partial(self.safe_point.check, before="micro-batch")
                result = self.engine.step(group, check, num_pieces=num_pieces, num_samples=num_samples)
            except PauseRequest:
                continue
            except Exception as error:
                if oom.undo_recompute_if_cause(error, self.position):
                    continue
                if not is_out_of_memory(error):
                    raise
                failure = error
            else:
                self.device_memory.end_step(sizes)
                self.position.step += 1
                self.position.is_evaluated = False
                if not self.liveness.has_stepped:  # kernels are compiled: no rank delays the others as long from now on
                    self.ranks.tighten_timeout()
                    self.liveness.has_stepped = True
                return result
            oom.handle_step_failure(failure, self.position)

    def _tell_of_data(self, message: str) -> None:
        self.liveness.report_progress()  # workers that start again have as long as the first ones
        self.reporter.alert("data", message)

    def _sizes(self, group: list[Batch], num_pieces: int, num_samples: int) -> Hashable:
        """Return a key of the shapes of a step's convolutions and of the passes that they are part of."""
        split = tuple(self.engine.network.split_of(num_samples))
        is_frozen = bool(self.engine.model.frozen_parameters)
        return tuple(map(len, group)), num_pieces, split, self.controller.recomputed, is_frozen

    def evaluate(self) -> Evaluation:
        """Evaluate on the validation split and emit the `val` event.

        Raises:
            OutOfMemoryError: memory does not suffice with any fallback.
        """
        check, spent_s = self.safe_point.check, self.liveness.spent_s

        def progress(num_done: int) -> None:
            self.liveness.report_evaluated(num_done, len(self.validation.loader.dataset))

        def run(live: LiveSettings) -> Evaluation:
            self.reporter.live_settings()
            return self.validation.run(live, check, progress)

        with self.liveness.during("eval"):
            before_s = spent_s("eval")
            evaluation = self.oom_policy.make_evaluation(run, self.position)
            self.reporter.validation(evaluation, spent_s("eval") - before_s)
            self.validation.draw_samples(self.position.epoch, self.live)
        return evaluation

    @property
    def live(self) -> LiveSettings:
        return self.controller.settings

    def _begin_epoch(self) -> None:
        """Apply the requested settings; they change only here."""
        self.safe_point.check(before="epoch")
        last_frozen = self.settings.freeze_epochs
        is_frozen = last_frozen is not None and bool(self.engine.model.frozen_parameters)
        is_unfreezing = last_frozen is not None and is_frozen and self.position.epoch > last_frozen
        self.controller.add_automatic_changes(self.position.step, is_frozen=is_frozen)
        requested = self.ranks.from_main(self.controller.record.requested)
        if (requested.split, requested.recompute) != (self.live.split, self.live.recompute):
            if self.saver.is_affordable():
                self.saver.begin_asked(self.position)
            accelerator_of(self.engine.device).empty_cache()  # blocks of the old sizes
        self.controller.apply(requested, self.progress.command_position())
        if is_unfreezing:
            # They lack gradients and optimizer state of frozen parameters.
            self.controller.batch_split.clear_peaks(keeps_failures=True)
            self.engine.unfreeze()
        self.progress.begin_epoch()
        self.reporter.epoch_start(self._lr(self.position.step + 1))

    def _next_group(self, batches: Iterator[Batch]) -> list[Batch]:
        began, size = time.perf_counter(), min(self.settings.accumulate, len(self.train_loader) - self.position.batch)
        self.liveness.report_progress(activity="read")
        group = [next(batches) for _ in range(size)]
        self.liveness.report_progress(activity=IDLE)
        self.reporter.clock.wait_s += time.perf_counter() - began
        return group

    def _is_break_due(self) -> bool:
        return self._is_epoch_end or self.progress.is_complete or self._is_evaluation_due()

    @property
    def _is_epoch_end(self) -> bool:
        return self.position.batch >= len(self.train_loader)

    def _is_evaluation_due(self) -> bool:
        """Return True at the end of the run, and after the given number of steps or epochs; once per position."""
        at, timetable = self.position, self.settings.timetable
        return not at.is_evaluated and timetable.is_evaluation_due(at.epoch, at.step, is_epoch_end=self._is_epoch_end)

    @property
    def _is_early_stop(self) -> bool:
        patience = self.settings.early_stop
        return patience is not None and self.progress.best.evaluations_since >= patience

    def _evaluate_and_save(self) -> None:
        """Evaluate if it is due, move to the next epoch at the end of one, and save if it is due."""
        settings, epoch, is_best = self.settings, self.position.epoch, False
        if self._is_epoch_end and (words := self.loss_watch.end_epoch(settings.timetable.steps_per_epoch)):
            self._end_diverged(f"in epoch {epoch} {words}")
        if self._is_evaluation_due():
            if self.progress.best == Best():
                # The first evaluation may be the first pass over images of another size: its failure costs no steps.
                self.saver.save_apart(self.position)
            evaluation = self.evaluate()
            if evaluation.loss is None and not self.engine.update.is_loss_scale_falling:
                self._end_diverged(f"the validation loss is not finite after step {self.position.step}")
            self.position.is_evaluated = True
            value = evaluation.monitored(settings.monitor, self.validation.scheme)
            is_best = self.progress.best.note(value, epoch)
            if not self.facts.is_trial:
                is_last = self.position.step >= settings.timetable.num_steps or self._is_early_stop
                self.reporter.learning(evaluation, is_last=is_last)
            if self.plateau is not None:
                self.plateau.observe(value if value is None or self.plateau.larger_is_better else -value)
        finished = epoch if self._is_epoch_end else None
        if finished is not None:
            self.progress.position = replace(self.position, epoch=epoch + 1, batch=0)
        if self.progress.is_complete:
            self.saver.begin(is_best=is_best)
        elif is_best or self.saver.has_kept_best or self.saver.is_due(self.position.step, finished):
            self.saver.begin_or_skip(is_best=is_best)

    @property
    def lr_factor(self) -> float:
        """Factor on the scheduled learning rate: the live setting times the reductions of a plateau schedule."""
        return self.live.lr_factor * (1.0 if self.plateau is None else self.plateau.factor)

    def _lr(self, step: int) -> float:
        return self.lr_factor * self.settings.learning_rate(step)

    def _stop_if_diverged(self) -> None:
        """Raise NonFiniteError after too many consecutive bad steps, or if the loss scale fell below 1."""
        if problem := self.engine.divergence():
            move = "use train.precision amp-bf16, or lower" if self.engine.precision.scaler is not None else "lower"
            raise NonFiniteError(
                f"{problem}, up to step {self.position.step} (no bad step changed the weights): "
                f"{move} optim.lr = {self.settings.base_lr}, add schedule.warmup_steps or optim.clip_grad_norm"
            )

    def _end_diverged(self, words: str) -> None:
        """Emit an alert and raise NonFiniteError; nothing is saved from here on."""
        self.has_diverged = True
        self.reporter.alert("diverged", f"the training has diverged: {words}")
        raise NonFiniteError(
            f"the training has diverged: {words}: lower optim.lr = {self.settings.base_lr}, add schedule.warmup_steps "
            "or optim.clip_grad_norm; with half precision use train.precision amp-bf16"
        )

    def _capture(self) -> Captured:
        return Captured(self.state_dict(), self.position, self.progress.best.value)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resume needs, as tensors and plain values; every rank must call it."""
        return {
            **self.engine.state_dict(),
            "position": vars(self.position).copy(),
            "best": vars(self.progress.best).copy(),
            "plateau": None if self.plateau is None else self.plateau.state_dict(),
            "live": self.controller.state_dict(self.locations),
            "rng": self.ranks.gather(capture_rng()),
            "config": self.facts.config,
            "data": {"num_train": len(self.train_loader.dataset)},
            "classes": list(self.facts.start.classes),
            "parts": dict(self.facts.parts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, at exactly the position where it was saved; the controller has its settings.

        Raises:
            CheckpointError: it does not fit this training.
        """
        self.engine.load_state_dict(state)
        configs = state["config"], self.facts.config
        old, new = (config.get("checkpoint", {}).get("monitor", "miou") for config in configs)
        has_same_monitor = old == new  # the best value of another score is no measure for this one
        self.progress.restore(Position(**state["position"]), Best(**state["best"]) if has_same_monitor else Best())
        if self.plateau is not None:
            best = {} if has_same_monitor else {"best": None, "num_bad": 0}
            self.plateau.load_state_dict(state["plateau"] | best)
        self.controller.batch_split.load_state_dict(state["live"]["splits"])
        keys = ("train", "recompute"), ("train", "compile"), ("parallel", "sync_bn")
        if any(configs[0][section].get(key) != configs[1][section].get(key) for section, key in keys):
            self.controller.batch_split.clear_peaks()
        if self.ranks.rank < len(state["rng"]):
            restore_rng(state["rng"][self.ranks.rank])

    def close(self) -> None:
        """Stop the data workers, which would otherwise stay alive in a program that trains more than once."""
        self.train_loader.close()
        self.validation.loader.close()
