"""The training loop: fit -> train_epoch -> train_step, evaluation, checkpoints, and what is written about them.

The state of a training is whole at every step boundary, and only there: (epoch, batch, step), weights, average,
optimizer, random numbers. Everything else follows from the config, so a resumed run takes the same path bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from segapp.config import LiveSettings, RunConfig
from segapp.errors import NonFiniteError, StorageError
from segapp.failpoints import failpoint
from segapp.optim import lr_at, set_lr
from segapp.train.checkpoint import CheckpointStore, capture_rng, restore_rng
from segapp.train.control import StopRequest, StopSignals
from segapp.train.engine import StepEngine, StepResult
from segapp.train.evaluate import Evaluation, evaluate
from segapp.train.inference import Inference
from segapp.train.journal import Journal

if TYPE_CHECKING:
    from segapp.datasets.loader import Batch, EvalLoader, TrainLoader
    from segapp.models import SegmentationModel

STATE_FORMAT = 1


@dataclass
class Position:
    """Where a training stands: `batch` micro-batches of epoch `epoch` are done, `step` updates in all."""

    epoch: int = 1
    batch: int = 0
    step: int = 0
    is_evaluated: bool = False


@dataclass
class Best:
    """The best evaluation so far, larger is better, and how many evaluations ago it was."""

    value: float | None = None
    epoch: int | None = None
    evaluations_since: int = 0


@dataclass
class Clock:
    """Times since the last `step` event, seconds."""

    began: float = field(default_factory=time.perf_counter)
    wait_s: float = 0.0
    num_images: int = 0
    num_steps: int = 0
    evaluation_s: float = 0.0  # of the last evaluation

    def restart(self) -> None:
        """Starts counting anew."""
        self.began = time.perf_counter()
        self.wait_s, self.num_images, self.num_steps = 0.0, 0, 0


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
        journal: writes events.
        signals: asks for a stop.
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
        journal: Journal,
        signals: StopSignals,
    ) -> None:
        self.config = config
        self.engine = engine
        self.train_loader, self.val_loader = train_loader, val_loader
        self.inference = inference
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.description = dict(description)
        self.store, self.journal, self.signals = store, journal, signals
        self.position = Position()
        self.best = Best()
        self.settings = LiveSettings(gpu0_bsz=None)
        self.resumed_from_step: int | None = None
        self.ranks = engine.ranks
        self._num_val_checks = max(self.ranks.gather(len(val_loader)))
        self._clock = Clock()
        self._saved_at = time.monotonic()
        self._saved_step: int | None = None

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
            StopRequest: a signal asked for a stop; the state is saved.
            RunError: the training cannot go on.
        """
        self._announce_start()
        try:
            while not self.is_complete:
                self.train_epoch()
                self._finish_epoch()
                if self._is_stale():
                    return f"no better {self.config.checkpoint.monitor} for {self.config.train.early_stop} evaluations"
        except (StopRequest, NonFiniteError):
            self.save(is_final=True)
            raise
        if self._saved_step != self.position.step:
            self.save(is_final=True)
        return f"{self.config.train.epochs} epochs"

    def train_epoch(self) -> None:
        """Trains the rest of the current epoch."""
        total, accumulate = self.batches_per_epoch, self.config.train.accumulate
        if self.position.batch >= total:
            return
        self.engine.network.train()
        if self.position.batch == 0:  # a run resumed in the middle of an epoch has said so already
            self.journal.emit(
                "epoch_start", epoch=self.position.epoch, step=self.position.step, lr=self._lr(self.position.step + 1)
            )
        batches = iter(self.train_loader.epoch(self.position.epoch, self.position.batch))
        self._clock.restart()
        while self.position.batch < total:
            self._check()
            group = self._next_group(batches, min(accumulate, total - self.position.batch))
            result = self.train_step(group)
            self.position.batch += len(group)
            self._clock.num_steps += 1
            self._clock.num_images += self._num_images(self.position.batch - len(group), len(group))
            is_last = self.position.batch >= total
            if is_last or self.position.step % self.config.log.every_steps == 0:
                self._publish(result, group)
            if not is_last and self._is_save_due():
                self.save()

    def train_step(self, group: list[Batch]) -> StepResult:
        """One update from the micro-batches of `group`."""
        set_lr(self.engine.optimizer, self._lr(self.position.step + 1))
        failpoint("train.step")
        result = self.engine.step(group, self._check)
        self.position.step += 1
        return result

    def evaluate(self) -> Evaluation:
        """Evaluates on the validation split and writes the `val` event."""
        began = time.perf_counter()
        if self.config.train.precise_bn:
            self._recompute_batchnorm()
        self._check()
        found = evaluate(
            self.evaluated_model,
            self.val_loader,
            self.inference,
            num_classes=self.num_classes,
            ignore_index=self.ignore_index,
            device=self.engine.device,
            criterion=self.engine.criterion,
            check=self._check,
            ranks=self.ranks,
            num_checks=self._num_val_checks,
        )
        self._clock.evaluation_s = time.perf_counter() - began
        self.journal.emit(
            "val",
            epoch=self.position.epoch,
            step=self.position.step,
            loss=found.loss,
            miou=found.scores.miou,
            iou=list(found.scores.iou),
            pixel_accuracy=found.scores.pixel_accuracy,
            num_images=found.num_images,
            val_s=self._clock.evaluation_s,
        )
        return found

    def _check(self) -> None:
        """Raises StopRequest, on every rank at the same place, once any of them was asked to stop."""
        if self.ranks.any(self.signals.is_set):
            raise StopRequest(self.signals.signal_name)

    def _next_group(self, batches: Iterable[Batch], size: int) -> list[Batch]:
        began = time.perf_counter()
        iterator = iter(batches)
        group = [next(iterator) for _ in range(size)]
        self._clock.wait_s += time.perf_counter() - began
        return group

    def _num_images(self, first: int, count: int) -> int:
        """Images of `count` micro-batches from the epoch's `first` on, over all ranks."""
        size, total = self.config.train.batch_size, len(self.train_loader.dataset)
        return sum(min(size, total - batch * size) for batch in range(first, first + count))

    def _finish_epoch(self) -> None:
        """Evaluates if it is due, moves on to the next epoch, saves if it is due."""
        finished = self.position.epoch
        is_best = False
        is_due = finished % self.config.eval.every_epochs == 0 or finished >= self.config.train.epochs
        if is_due and not self.position.is_evaluated:
            is_best = self._is_better(self.evaluate())
        self.position = Position(epoch=finished + 1, batch=0, step=self.position.step)
        every = self.config.checkpoint.every_epochs
        if is_best or self.is_complete or (every is not None and finished % every == 0) or self._is_save_due():
            self.save(finished_epoch=finished, is_best=is_best)

    def _is_better(self, found: Evaluation) -> bool:
        self.position.is_evaluated = True
        value = found.monitored(self.config.checkpoint.monitor)
        if value is not None and (self.best.value is None or value > self.best.value):
            self.best = Best(value, self.position.epoch, 0)
            return True
        self.best.evaluations_since += 1
        return False

    def _is_stale(self) -> bool:
        patience = self.config.train.early_stop
        return patience is not None and self.best.evaluations_since >= patience

    def _lr(self, step: int) -> float:
        return self.settings.lr_factor * lr_at(
            step,
            self.config.schedule,
            lr=self.config.optim.lr,
            total_steps=self.config.train.epochs * self.steps_per_epoch,
            steps_per_epoch=self.steps_per_epoch,
        )

    def _recompute_batchnorm(self) -> None:
        """Replaces lagging running statistics by those of fixed training batches under the present weights.

        Epoch 0 never trains: its batches are the same at every call. Dropout's random numbers are put back.
        """
        model = self.evaluated_model
        batches = iter(self.train_loader.epoch(0))
        count = min(self.config.train.precise_bn, self.batches_per_epoch)
        inputs = (self.inference.normalizer(next(batches).images.to(self.engine.device)) for _ in range(count))
        devices = [self.engine.device] if self.engine.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self.inference.autocast():
            torch.optim.swa_utils.update_bn(inputs, model)

    # --- what is written -------------------------------------------------------------------------------------------

    def _announce_start(self) -> None:
        self.journal.emit(
            "run_start",
            **self.description,
            batch_size=self.config.train.batch_size,
            epochs=self.config.train.epochs,
            steps_per_epoch=self.steps_per_epoch,
            resumed_from_step=self.resumed_from_step,
        )

    def _publish(self, result: StepResult, group: list[Batch]) -> None:
        """Reads the step's tensors (the only place that waits for the device) and writes the `step` event."""
        loss, norm = float(result.loss), float(result.grad_norm)
        elapsed = time.perf_counter() - self._clock.began
        scaler = self.engine.precision.scaler
        step_s = elapsed / max(self._clock.num_steps, 1)
        eta_epoch_s, eta_run_s = self._etas(step_s)
        self.journal.emit(
            "step",
            epoch=self.position.epoch,
            step=self.position.step,
            loss=loss,
            lr=self._lr(self.position.step),
            images_per_s=self._clock.num_images / elapsed,
            data_wait_frac=self._clock.wait_s / elapsed,
            grad_norm=norm,
            split=result.split,
            skipped=int(self.engine.bad_steps),
            loss_scale=None if scaler is None else float(scaler.scale),
            step_s=step_s,
            eta_epoch_s=eta_epoch_s,
            eta_run_s=eta_run_s,
        )
        self._clock.restart()
        self._stop_if_hopeless(group)

    def _stop_if_hopeless(self, group: list[Batch]) -> None:
        """Ends a training that cannot make a step: too many bad ones in a row, or a loss scale that fell below 1."""
        in_row, scaler = int(self.engine.bad_in_row), self.engine.precision.scaler
        is_collapsed = scaler is not None and float(scaler.scale) < 1.0
        # A scale that is still falling explains bad steps by itself.
        if not is_collapsed and (scaler is not None or in_row < self.config.train.max_bad_steps):
            return
        layer = self.engine.first_non_finite_layer(group[-1])
        first = f", first in {layer}" if layer else ""
        what = (
            "the loss scale fell below 1"
            if is_collapsed
            else f"loss or gradient not finite for {in_row} steps in a row"
        )
        move = "use train.precision amp-bf16, or lower" if scaler is not None else "lower"
        raise NonFiniteError(
            f"{what}, up to step {self.position.step}{first} (no bad step changed the weights): "
            f"{move} optim.lr = {self.config.optim.lr}, add schedule.warmup_steps or optim.clip_grad_norm"
        )

    def _etas(self, step_s: float) -> tuple[float, float]:
        """Seconds to the end of the epoch's training, and of the run with its evaluations."""
        train = self.config.train
        left = math.ceil((self.batches_per_epoch - self.position.batch) / train.accumulate)
        later = train.epochs - self.position.epoch
        evaluations = 1 + later // self.config.eval.every_epochs
        epoch_s = left * step_s
        return epoch_s, epoch_s + later * self.steps_per_epoch * step_s + evaluations * self._clock.evaluation_s

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def _is_save_due(self) -> bool:
        section = self.config.checkpoint
        by_step = section.every_steps is not None and self.position.step % section.every_steps == 0
        by_time = section.every_minutes is not None and time.monotonic() - self._saved_at >= 60 * section.every_minutes
        return by_step or by_time

    def save(self, *, finished_epoch: int | None = None, is_best: bool = False, is_final: bool = False) -> None:
        """Saves the state as `last.pt`, and under further names where they are due.

        A save that fails leaves the older checkpoints and the training as they are, with an alert each time.

        Args:
            finished_epoch: keep it as epoch_NNNN.pt too.
            is_best: keep it as best.pt too.
            is_final: nothing follows, so a failure is an error.

        Raises:
            StorageError: a final save could not be written.
            NonFiniteError: a final save was refused, because a weight is not finite.
        """
        state = self.state_dict()
        self._saved_at = time.monotonic()
        is_saved = self._commit(state, finished_epoch, is_best, is_final) if self.ranks.is_main else False
        self._saved_step = self.position.step if self.ranks.from_main(is_saved) else None

    def _commit(self, state: dict[str, Any], finished_epoch: int | None, is_best: bool, is_final: bool) -> bool:
        position = self.position
        try:
            saved = self.store.save(
                state,
                step=position.step,
                epoch=position.epoch,
                position=position.batch,
                metric=self.best.value,
                is_best=is_best,
                finished_epoch=finished_epoch,
            )
        except (StorageError, NonFiniteError) as error:
            self.journal.emit("alert", kind="checkpoint", message=str(error), step=position.step)
            if is_final:
                raise
            return False
        for message in saved.messages:
            self.journal.emit("alert", kind="checkpoint", message=message, step=position.step)
        self.journal.emit(
            "checkpoint",
            path=saved.event_path,
            epoch=position.epoch if finished_epoch is None else finished_epoch,
            step=position.step,
            is_best=saved.is_best,
            sha256=saved.entry.sha256,
            size_bytes=saved.entry.size_bytes,
            metric=self.best.value,
            save_s=saved.save_s,
        )
        return True

    def state_dict(self) -> dict[str, Any]:
        """Everything that a continuation needs, as tensors and plain values; every rank must ask."""
        engine = self.engine
        return {
            "format": STATE_FORMAT,
            "model": engine.model.state_dict(),
            "ema": None if engine.average is None else engine.average.state_dict(),
            "optimizer": engine.optimizer.state_dict(),
            "precision": engine.precision.state_dict(),
            "criterion": engine.criterion.state_dict(),
            "bad_steps": engine.bad_steps,
            "bad_in_row": engine.bad_in_row,
            "position": vars(self.position).copy(),
            "best": vars(self.best).copy(),
            "settings": self.settings.model_dump(),
            "rng": self.ranks.gather(capture_rng()),
            "config": self.config.model_dump(mode="json"),
            "data": {"num_train": len(self.train_loader.dataset), "batches_per_epoch": self.batches_per_epoch},
            "classes": list(self.description["classes"]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a saved state, at exactly the place where it was saved.

        Raises:
            CheckpointError: it does not fit this training.
        """
        engine = self.engine
        engine.model.load_state_dict(state["model"])
        if engine.average is not None:
            engine.average.load_state_dict(state["ema"])
        engine.optimizer.load_state_dict(state["optimizer"])
        engine.precision.load_state_dict(state["precision"])
        engine.criterion.load_state_dict(state["criterion"])
        engine.bad_steps.copy_(state["bad_steps"])
        engine.bad_in_row.copy_(state["bad_in_row"])
        self.position = Position(**state["position"])
        self.best = Best(**state["best"])
        self.settings = LiveSettings(**state["settings"])
        self.resumed_from_step = self.position.step
        if self.ranks.rank < len(state["rng"]):
            restore_rng(state["rng"][self.ranks.rank])
