"""The events of a training: start, epochs, steps, evaluations, and alerts about data."""

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from statistics import median_low

from segapp.config import RecomputeChoice
from segapp.datasets.cache import PixelCache
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.loader import TrainLoader, wait_advice
from segapp.datasets.resources import cores_of_rank
from segapp.errors import some_names
from segapp.inference.evaluate import Evaluation
from segapp.models.keys import random_modules
from segapp.run.events import Alert, EpochStart, EventLog, EventReader, Settings, Step, Val
from segapp.run.words import size
from segapp.training.context import TrainerSettings, TrainingFacts
from segapp.training.learning import LearningWatch
from segapp.training.live.controller import CommandController
from segapp.training.progress import Timetable, TrainingProgress
from segapp.training.pulse import Liveness
from segapp.training.step.engine import StepEngine, StepResult


class Clock:
    """Time and counts since the last `step` event; `paused_s` returns the seconds of pauses so far."""

    def __init__(self, paused_s: Callable[[], float]) -> None:
        self._paused_so_far_s = paused_s
        self.restart()

    def restart(self) -> None:
        self._began_s, self._paused_s = time.perf_counter(), self._paused_so_far_s()
        self.wait_s, self.num_images, self.num_steps = 0.0, 0, 0

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began_s - (self._paused_so_far_s() - self._paused_s)


def images_in(first: int, count: int, batch_size: int, num_images: int) -> int:
    """Return the images of `count` batches of an epoch from the batch `first` on, over all ranks.

    >>> images_in(0, 2, 4, 10), images_in(1, 2, 4, 10)
    (8, 6)
    """
    return sum(min(batch_size, num_images - batch * batch_size) for batch in range(first, first + count))


NUM_INTERVALS = 30
"""Number of intervals between two `step` events from which the time of a step is taken."""


class RemainingTime:
    """Estimates the remaining time of a training: its steps at the median time, and its evaluations as measured."""

    def __init__(self, timetable: Timetable) -> None:
        self._timetable = timetable
        self._steps_s: deque[float] = deque(maxlen=NUM_INTERVALS)
        self._conditions: Hashable = None

    def observe(self, num_steps: int, seconds: float, conditions: Hashable = None) -> None:
        """Record the steps since the last `step` event; those before a change of `conditions` are forgotten."""
        if conditions != self._conditions:
            self._steps_s.clear()
        self._conditions = conditions
        self._steps_s.append(seconds / max(num_steps, 1))

    def etas_s(self, epoch: int, step: int, steps_in_epoch: int, eval_s: float) -> tuple[float, float]:
        """Return the seconds until the next epoch begins, and until the training ends.

        `steps_in_epoch`: number of steps left in the epoch. `eval_s`: seconds of an evaluation; 0 before the first one.
        """
        table, step_s = self._timetable, median_low(self._steps_s)
        steps, evaluations = table.num_steps - step, table.num_evaluations(epoch, step)
        run_s = steps * step_s + evaluations * eval_s
        if steps <= steps_in_epoch:
            return run_s, run_s
        later = table.num_evaluations(epoch + 1, step + steps_in_epoch + 1)
        return steps_in_epoch * step_s + (evaluations - later) * eval_s, run_s


MIN_WAIT_S = 10.0
"""Time that must be lost before advice is given, because every run waits for its first batches."""


class DataWatch:
    """Watches the data sets of a training and reports each thing once."""

    def __init__(self, train_loader: TrainLoader, val_set: SegmentationDataset, *, cores: float | None = None) -> None:
        self._train_loader = train_loader
        self._datasets = {"training": train_loader.dataset, "validation": val_set}
        self._caches = [CacheWatch(name, each.cache) for name, each in self._datasets.items() if each.cache is not None]
        self._cores = cores_of_rank() if cores is None else cores
        self._wait_s = self._elapsed_s = 0.0
        self._has_advised = False

    def at_start(self) -> list[str]:
        """Return the problems of the data, and the reason why a cache cannot be used."""
        notes = [note for dataset in self._datasets.values() for note in dataset.notes]
        return notes + [note for cache in self._caches for note in cache.poll()]

    def after_interval(self, wait_s: float, elapsed_s: float) -> list[str]:
        """Return new messages after some steps, which took `elapsed_s` seconds and waited `wait_s` of them for data."""
        return [note for cache in self._caches for note in cache.poll()] + self._advice(wait_s, elapsed_s)

    def _advice(self, wait_s: float, elapsed_s: float) -> list[str]:
        self._wait_s += wait_s
        self._elapsed_s += elapsed_s
        if self._has_advised or self._wait_s < MIN_WAIT_S:
            return []
        cache = self._train_loader.dataset.cache
        state = None if cache is None else cache.state()
        advice = wait_advice(
            self._wait_s / self._elapsed_s,
            self._train_loader.workers,
            self._cores,
            "none" if cache is None else cache.files.kind,
            is_filling=state is not None and state.stopped is None and state.num_stored < state.num_images,
        )
        self._has_advised = advice is not None
        return [advice] if advice is not None else []


def cache_notes(name: str, cache: PixelCache | None) -> list[str]:
    """Return the location and the future size of a cache on a disk that is not complete; else nothing."""
    if cache is None or cache.files.kind == "ram":
        return []
    state, free = cache.state(), cache.files.free_bytes()
    if state.stopped is not None or state.num_stored == state.num_images:
        return []
    return [
        f"data.cache = disk: {state.num_stored} of {state.num_images} {name} images are in {cache.files.place} "
        f"({size(state.stored_bytes)}); the others are stored when they are first read, {size(state.missing_bytes)}"
        + ("" if free is None else f" of {size(free)} that are free")
    ]


class CacheWatch:
    """Watches a cache for problems."""

    def __init__(self, name: str, cache: PixelCache) -> None:
        self._name, self._cache = name, cache
        self._num_damaged = 0
        self._is_stopped = False

    def poll(self) -> Iterator[str]:
        """Yield new messages since the last call."""
        new = self._cache.num_damaged - self._num_damaged
        if new:
            self._num_damaged += new
            yield (
                f"data.cache: {new} damaged {self._name} images in {self._cache.files.place} were decoded again: "
                "check the disk if this happens again"
            )
        state = self._cache.state()
        if self._is_stopped or state.stopped is None or state.num_stored == state.num_images:
            return
        self._is_stopped = True
        move = (
            "free some of it, or name a folder on another disk in XDG_CACHE_HOME"
            if self._cache.files.kind == "disk"
            else "free memory, or set data.cache to disk"
        )
        yield (
            f"data.cache = {self._cache.files.kind} has no room in {self._cache.files.place} for "
            f"{state.num_images - state.num_stored} of {state.num_images} {self._name} images, "
            f"{size(state.missing_bytes)} ({state.stopped}): they are decoded each time they are read; {move}"
        )


@dataclass(eq=False)
class TrainingReporter:
    """Emits the events of a training."""

    event_log: EventLog
    settings: TrainerSettings
    progress: TrainingProgress
    liveness: Liveness
    engine: StepEngine
    controller: CommandController
    train_loader: TrainLoader
    val_set: SegmentationDataset

    def __post_init__(self) -> None:
        self.clock = Clock(lambda: self.liveness.spent_s("paused"))
        self._remaining = RemainingTime(self.settings.timetable)
        self._choice: RecomputeChoice | None = None
        self._blocks: list[list[str]] = []
        self._fallbacks = self.controller.settings.fallbacks
        self._data_watch = DataWatch(self.train_loader, self.val_set)
        self._num_evaluations = 0
        self._loss_sum, self._num_losses = 0.0, 0
        """Of the steps since the last evaluation, without non-finite losses."""

    def run_start(self, facts: TrainingFacts, resumed_from_step: int | None) -> None:
        """Emit `run_start`, and `weights` for every file of pretrained weights."""
        self._learning = LearningWatch(facts.start, facts.config)
        if self.event_log.writer is not None:
            events = EventReader(self.event_log.writer.path).read_kinds("run_start", "val", "alert")
            # What the run has said before a resume is not said again.
            self._learning.replay(events, resumed_from_step or 0)
        live = self.controller.settings
        present = {
            "resumed_from_step": resumed_from_step,
            "gpu0_bsz": live.split.first,
            "is_auto": live.is_auto,
            "live": self.controller.live,
            "split": self._split(),
            "checker": self.controller.split_checker().to_json(),
        }
        self.event_log.emit(facts.start.model_copy(update=present))
        reports = self.engine.model.load_reports
        for report in reports:
            self.event_log.emit(report.as_event())
        if random := random_modules(reports):
            names = some_names(random, 8)
            self.alert("weights", f"model.partial_weights: no weights file gives {names}, which stay random")
        for alert in facts.alerts:
            self.event_log.emit(alert)
        self.live_settings()
        self.alert("data", *self._data_watch.at_start())

    def epoch_start(self, lr: float) -> None:
        """Emit `epoch_start` with the learning rate of the first step and the unfrozen parameters."""
        at, last_frozen = self.progress.position, self.settings.freeze_epochs
        num_unfrozen = self.engine.num_frozen if last_frozen is not None and at.epoch == last_frozen + 1 else None
        self.event_log.emit(
            EpochStart(
                epoch=at.epoch,
                step=at.step,
                lr=lr,
                split=self._split(),
                num_unfrozen=num_unfrozen,
                checker=self.controller.split_checker().to_json(),
            )
        )

    def live_settings(self) -> None:
        """Emit `settings` if other blocks are recomputed than before, or fallbacks are new; every rank must call it."""
        controller, live = self.controller, self.controller.settings
        fallbacks, blocks = live.fallbacks, self._blocks
        # The settings are equal on all ranks, so all of them take part in the exchange or none.
        if live.recompute != self._choice:
            blocks = [list(names) for theirs in self.engine.ranks.gather(controller.recomputed) for names in theirs]
        is_adopted = not fallbacks.items() <= self._fallbacks.items()
        is_other = blocks != self._blocks and (any(blocks) or any(self._blocks))
        self._choice, self._fallbacks, self._blocks = live.recompute, fallbacks, blocks
        if not is_adopted and not is_other:
            return
        is_forced = is_adopted or live.is_recomputed
        reason = "out of memory" if is_forced else "train.recompute" if live.recompute == "config" else "by hand"
        event = Settings(step=self.progress.position.step, reason=reason, fallbacks=fallbacks if is_adopted else None)
        if is_other:
            of_blocks = {"recompute": live.recompute, "blocks": blocks, "num_blocks": len(controller.blocks.names)}
            event = event.model_copy(update=of_blocks)
        self.event_log.emit(event)

    def step(self, result: StepResult, lr: float) -> None:
        """Emit `step` and begin a new interval; only here the training waits for the device, to read the tensors."""
        loss, norm = float(result.loss), float(result.grad_norm)
        if math.isfinite(loss):
            self._loss_sum, self._num_losses = self._loss_sum + loss, self._num_losses + 1
        at, clock, scaler = self.progress.position, self.clock, self.engine.precision.scaler
        elapsed_s = clock.elapsed_s()
        # Settings that the time of a step depends on and that may change within a run.
        conditions = (
            self.controller.batch_split.current,
            self.controller.settings.num_pieces,
            self.controller.recomputed,
            bool(self.engine.model.frozen_parameters),
        )
        self._remaining.observe(clock.num_steps, elapsed_s, conditions)
        steps_left = math.ceil((len(self.train_loader) - at.batch) / self.settings.accumulate)
        eval_s = self.liveness.spent_s("eval") / max(self._num_evaluations, 1)
        eta_epoch_s, eta_run_s = self._remaining.etas_s(at.epoch, at.step, steps_left, eval_s)
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
                skipped=int(self.engine.update.bad_steps),
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
        for message in messages:
            self.event_log.emit(Alert(kind=kind, message=message, step=self.progress.position.step))

    def validation(self, evaluation: Evaluation, val_s: float) -> None:
        """Emit `val` with the time of the evaluation without pauses, and an alert for each note."""
        at, values = self.progress.position, evaluation.values(self.val_set.scheme)
        event = {
            "epoch": at.epoch,
            "step": at.step,
            "iou": evaluation.scores.iou,
            "precision": evaluation.scores.precision,
            "recall": evaluation.scores.recall,
            "steps_loss": self._loss_sum / self._num_losses if self._num_losses else None,
            "num_images": evaluation.num_images,
            "val_s": val_s,
            "scores": {name: value for name, value in values.items() if name not in Val.model_fields},
        }
        known = {name: value for name, value in values.items() if name in Val.model_fields}
        self._num_evaluations += 1
        self._loss_sum, self._num_losses = 0.0, 0
        self._val = Val.model_validate(event | known)
        self.event_log.emit(self._val)
        self.alert("memory", *evaluation.notes)

    def learning(self, evaluation: Evaluation, *, is_last: bool) -> None:
        for alert in self._learning.observe(self._val, evaluation.scores.frequency, is_last=is_last):
            self.event_log.emit(alert)

    def _split(self) -> list[int] | None:
        split = self.controller.batch_split.current
        return None if split is None else list(split)
