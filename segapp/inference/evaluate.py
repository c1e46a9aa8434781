"""Evaluation of a model or of several: confusion matrix, IoU and validation loss over images of any size.

Several devices share the batches, each with a copy of the model: batch i goes to device i mod n. Each device adds its
batches in order, so the result does not depend on timing.

Shapes: N images, C classes, H x W pixels of an image, h x w of the model's logits.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from segapp.accelerator import accelerator_of, wide_dtype
from segapp.compat.torch import dispatch_modes
from segapp.datasets.dataset import LargeBatch, TensorOnDisk
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.pool import Batch
from segapp.datasets.preprocessing import padded
from segapp.datasets.resources import freed_memory_kept
from segapp.errors import OutOfMemoryError
from segapp.failpoints import failpoint
from segapp.inference.predict.predictor import EnsemblePredictor, plan_workspace, predict_strips
from segapp.inference.sliding import Inference, smaller_window, without_cudnn_benchmark
from segapp.inference.workspace import HostLimit, ImageTile, tiles_of, window_tiles
from segapp.losses import AdditiveCriterion, CriterionCE
from segapp.losses.confusion import View, upsample_confusion, upsample_label_counts, upsample_logits
from segapp.memory.oom import is_out_of_memory, oom_failpoint
from segapp.metrics import SegmentationScores, counts_for
from segapp.models import SegmentationModel
from segapp.parallel.distributed import PeerOutOfMemoryError, Ranks
from segapp.scores import score_by_name, score_named, table_of


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of an evaluation."""

    inference: Inference
    num_classes: int
    ignore_index: int  # target value of pixels that are not counted
    device: torch.device
    criterion: AdditiveCriterion | None = None  # computes the loss over the whole set (sums, one division)
    is_single: bool = False  # evaluate the images of a batch one at a time
    host: HostLimit | None = None  # evaluate images that exceed this machine's memory in tiles; None: never in tiles
    other_devices: tuple[torch.device, ...] = ()  # share the batches with `device`, each with a copy of the model

    def on(self, device: torch.device) -> EvaluationSettings:
        inference = replace(self.inference, preprocessing=copy_to(self.inference.preprocessing, device))
        criterion = None if self.criterion is None else copy_to(self.criterion, device)
        return replace(self, inference=inference, device=device, criterion=criterion, other_devices=())

    def fits(self, model: SegmentationModel, images: Tensor | TensorOnDisk) -> bool:
        """Return True if images (N, 3, H, W) can be evaluated together without tiles."""
        height, width = self.inference.seen_px((images.shape[-2], images.shape[-1]))
        return self.host is None or self.host.fits(len(images) * height * width, model, self.inference, self.device)

    def tiles(self, model: SegmentationModel, images: Tensor | TensorOnDisk) -> Iterator[ImageTile]:
        """Yield the tiles in which images (N, B, H, W) are evaluated: one, or several that fit into memory."""
        size = (images.shape[-2], images.shape[-1])
        if self.host is not None and not self.inference.needs_whole and not self.fits(model, images):
            return self.host.tiles(size)
        if not isinstance(images, Tensor) and self.inference.has_plain_windows:
            return window_tiles(size, self.inference)
        return tiles_of(size, size)

    @property
    def reads_windows(self) -> bool:
        """True if large images are evaluated in tiles, each of which is decoded when it is needed."""
        in_tiles = self.host is not None and self.device.type == "cpu" and not self.inference.needs_whole
        return self.inference.has_plain_windows or in_tiles

    def finalize(self, statistics: tuple[Tensor, ...]) -> float | None:
        """Return the loss from summed statistics; None without a criterion or if the loss is not finite."""
        if self.criterion is None:
            return None
        loss = float(self.criterion.finalize(statistics))
        return loss if math.isfinite(loss) else None


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation."""

    scores: SegmentationScores
    loss: float | None
    num_images: int
    # int64 (C, C) on the CPU, row: target's class, column: predicted class; (C, 2, 2) with several classes per pixel
    matrix: Tensor = field(compare=False)
    notes: Sequence[str] = ()  # for the user, such as the use of tiles

    def values(self, scheme: ClassScheme) -> dict[str, float | None]:
        return table_of(self.scores, scheme.foreground, self.loss)

    def monitored(self, name: str, scheme: ClassScheme) -> float | None:
        """Return the value that decides which checkpoint is best; larger is better."""
        value = score_by_name(name, self.values(scheme), self.scores.iou, scheme.names)
        return value if value is None or score_named(name).larger_is_better else -value


class EvaluationCounts:
    """All sums of an evaluation over images, devices and ranks.

    To add a new sum, add a tensor here: devices and ranks sum all tensors that `tensors` returns.
    """

    def __init__(self, settings: EvaluationSettings) -> None:
        multilabel = settings.inference.multilabel
        self.confusion = counts_for(
            settings.num_classes, settings.ignore_index, multilabel=multilabel, device=settings.device
        )
        self.num_images = 0
        with torch.inference_mode(False):  # a tensor created in inference mode cannot be changed outside it
            self._statistics = _no_statistics(settings)
        self._settings = settings

    def add(self, counts: Tensor, statistics: Sequence[Tensor]) -> None:
        self.confusion.matrix.add_(counts)
        for own, new in zip(self._statistics, statistics, strict=True):
            own += new.to(own.device)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all sums as views, so adding to them changes these counts."""
        return (self.confusion.counts, *self._statistics)

    def merge(self, other: EvaluationCounts) -> None:
        for own, new in zip(self.tensors(), other.tensors(), strict=True):
            own += new.to(own.device)
        self.num_images += other.num_images

    def sum_over(self, ranks: Ranks) -> None:
        """Add the counts of all ranks; afterwards each rank has the sums."""
        confusion, *others = self.tensors()
        sums = (*ranks.sums((confusion,)), *(ranks.sums(tuple(others)) if others else ()))
        for own, total in zip(self.tensors(), sums, strict=True):
            own.copy_(total)
        self.num_images = sum(ranks.gather(self.num_images))

    def result(self, notes: Sequence[str] = ()) -> Evaluation:
        loss = self._settings.finalize(self._statistics) if self._statistics else None
        return Evaluation(self.confusion.scores(), loss, self.num_images, self.confusion.matrix.cpu().clone(), notes)


def _no_statistics(settings: EvaluationSettings) -> tuple[Tensor, ...]:
    """Return the criterion's statistics of no image: float64 zeros with the right shapes; () without a criterion.

    They are on the device, or on the host if the device has no float64. A rank without images takes part in the sum
    over ranks, for which every rank needs the same shapes and dtypes.
    """
    criterion = settings.criterion
    if criterion is None:
        return ()
    logits = torch.zeros(1, settings.num_classes, 1, 1, device=settings.device)
    target = torch.full((1, 1, 1), settings.ignore_index, dtype=torch.int16, device=settings.device)
    device = settings.device if wide_dtype(settings.device) == torch.float64 else torch.device("cpu")
    statistics = criterion.statistics((logits,), target)
    return tuple(torch.zeros_like(s, dtype=torch.float64, device=device) for s in statistics)


class DeviceCounter:
    """Counts the batches that one device evaluates; the model is in eval mode, on the device of the settings."""

    def __init__(self, model: SegmentationModel, settings: EvaluationSettings) -> None:
        self.model, self.settings = model, settings
        self.counts = EvaluationCounts(settings)
        self.notes: list[str] = []

    def add(self, batch: Batch | LargeBatch) -> None:
        is_single = self.settings.is_single or not self.settings.fits(self.model, batch.images)
        images, target = batch.images, batch.target
        if is_single and isinstance(images, Tensor) and isinstance(target, Tensor):
            for one in range(len(images)):
                self.count(images[one : one + 1], target[one : one + 1])
        else:
            self.count(images, target)
        self.counts.num_images += len(batch.indices)

    def count(self, images: Tensor | TensorOnDisk, target: Tensor | TensorOnDisk) -> None:
        oom_failpoint("eval.forward")
        for counts, statistics in evaluate_parts(self.model, images, target, self.settings):
            self.counts.add(counts, statistics)


@torch.no_grad()
def evaluate(
    model: SegmentationModel,
    batches: Iterable[Batch | LargeBatch],
    settings: EvaluationSettings,
    *,
    counter: Callable[[SegmentationModel, EvaluationSettings], DeviceCounter] = DeviceCounter,
    check: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = lambda _: None,
    ranks: Ranks | None = None,
    num_checks: int = 0,
) -> Evaluation:
    """Evaluate a model on batches of whole images, whose sizes may differ between batches.

    Args:
        model: set to eval mode during the evaluation, and afterwards to its previous mode.
        batches: images (N, B, H, W) as stored in files, and targets (N, H, W).
        settings: how the images are evaluated.
        counter: makes the counter of a device from the model and the settings there.
        check: called before every batch; may raise to end the evaluation.
        progress: called with the number of images done.
        ranks: the processes that share the images; each returns the result over all images.
        num_checks: number of calls of `check` on every rank, so that ranks with fewer batches take part in all of its
            collective calls.

    Raises:
        torch.OutOfMemoryError: another rank ran out of memory. A rank that fails itself raises its own error.
    """
    ranks = ranks or Ranks()
    was_training = model.training
    model.eval()
    num_images = num_batches = 0
    failure: Exception | None = None
    try:
        counters = [counter(model, settings)]
        counters += [counter(copy_to(model, device), settings.on(device)) for device in settings.other_devices]
        on_cpu = settings.device.type == "cpu"
        with freed_memory_kept(on_cpu), without_cudnn_benchmark(), spread_over(counters) as add:
            for batch in batches:
                failpoint("eval.batch")
                check()
                num_batches += 1
                if failure is not None:
                    continue  # the other ranks need this one in every check
                try:
                    add(batch)
                except Exception as error:
                    if ranks.world_size == 1 or not is_out_of_memory(error):
                        raise
                    failure = error
                num_images += len(batch.indices)
                progress(num_images)
        for _ in range(num_batches, num_checks):
            check()
    finally:
        model.train(was_training)
    if ranks.any_of(failure is not None)[0]:
        raise failure or PeerOutOfMemoryError("another rank ran out of memory")
    counts = counters[0].counts
    for other in counters[1:]:
        counts.merge(other.counts)
    counts.sum_over(ranks)
    note = None if settings.host is None else ranks.first_of(settings.host.take_note())
    notes = {*([] if note is None else [note]), *(own for each in counters for own in each.notes)}
    return counts.result(sorted(notes))


def evaluate_parts(
    model: SegmentationModel, images: Tensor | TensorOnDisk, target: Tensor | TensorOnDisk, settings: EvaluationSettings
) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Yield pixel counts and loss statistics, see `count_views`, of images or of the tiles in which they are evaluated.

    Tiles are used if images are large or do not fit into memory. They overlap, but each pixel counts in only one of
    them. Statistics of whole images (Lovász) treat a tile as an image. The images (N, B, H, W) are as stored in files.
    """
    device, inference = settings.device, settings.inference
    for tile in settings.tiles(model, images):
        part, aim = images[..., *tile.whole], target[..., *tile.whole]
        if tile.whole != tile.place:
            known, aim = aim, torch.full_like(aim, settings.ignore_index)
            aim[..., *tile.core] = known[..., *tile.core]
        views, size = inference.views(model, part.to(device, non_blocking=True))
        yield count_views(views, size, aim.to(device, non_blocking=True), settings)


def count_views(
    views: Tensor | list[View], size: tuple[int, int], target: Tensor, settings: EvaluationSettings
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return pixel counts and loss statistics from low-resolution logits; cross-entropy needs only one pass.

    Args:
        views: logits with their size, as `Inference.views` returns them.
        size: (H', W') to which the logits are upsampled, at least the size of the target.
        target: (N, H, W) class ids, on the views' device.
        settings: how the logits were computed, and the criterion.

    Returns:
        (C, C) int64, row: target's class, column: predicted class, or with a threshold (C, 2, 2) for each class
        separately; and the criterion's statistics, () without one.
    """
    align_corners, criterion = settings.inference.align_corners, settings.criterion
    target = padded(target, size, settings.ignore_index)
    how: dict[str, Any] = {"align_corners": align_corners, "ignore_index": settings.ignore_index}
    if settings.inference.threshold is not None:
        counts = upsample_label_counts(views, target, settings.inference.threshold, **how)
    elif isinstance(criterion, CriterionCE):
        how |= {"weight": criterion.weight, "label_smoothing": criterion.label_smoothing}
        counted = upsample_confusion(views, target, **how)
        return counted.confusion, (counted.loss_sum, counted.weight_sum)
    else:
        counts = upsample_confusion(views, target, with_loss=False, **how).confusion
    if criterion is None:
        return counts, ()
    if not isinstance(views, Tensor):
        size = (target.shape[-2], target.shape[-1])
        views = upsample_logits(views, size, align_corners=align_corners, is_sigmoid=criterion.is_sigmoid)
    return counts, criterion.statistics((views,), target)


M = TypeVar("M", bound=nn.Module)

MAX_WAITING = 2
"""Maximum number of batches that wait for a device; more batches would use more memory."""


@contextmanager
def spread_over(counters: Sequence[DeviceCounter]) -> Iterator[Callable[[Batch | LargeBatch], None]]:
    """Yield a function that passes batches to counters in turn; when the block ends, all are evaluated.

    The first counter runs in the calling thread, the others in one thread each. Under a dispatch mode, such as the
    memory planner's, all run in the calling thread, because those modes are not thread-safe.

    Raises:
        Exception: the error of an earlier batch, raised by a later call of the function or at the end of the block.
    """
    num_threads = 0 if dispatch_modes() else len(counters) - 1
    threads = [ThreadPoolExecutor(1, thread_name_prefix="evaluation") for _ in range(num_threads)]
    waiting: list[deque[Future[None]]] = [deque() for _ in threads]
    turns = itertools.cycle(range(len(counters)))

    def add(batch: Batch | LargeBatch) -> None:
        number = next(turns)
        if number == 0 or not threads:
            _add(counters[number], batch)
            return
        own = waiting[number - 1]
        while len(own) >= MAX_WAITING:
            own.popleft().result()
        own.append(threads[number - 1].submit(_add, counters[number], batch))

    try:
        yield add
        # Here the errors of the threads are raised.
        for each in itertools.chain(*waiting):
            each.result()
    finally:
        for thread in threads:
            thread.shutdown(wait=True, cancel_futures=True)


def _add(counter: DeviceCounter, batch: Batch | LargeBatch) -> None:
    device = counter.settings.device
    with accelerator_of(device).current(device), torch.no_grad():
        counter.add(batch)


def copy_to(module: M, device: torch.device) -> M:
    """Return a copy of a module on a device for inference, without a second copy on the module's own device."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(p.detach().to(device), requires_grad=False) for p in module.parameters()
    }
    memo |= {id(buffer): buffer.to(device) for buffer in module.buffers()}
    return copy.deepcopy(module, memo)


class Evaluator(DeviceCounter):
    """Counter for one device; if the device runs out of memory, windows are used."""

    @torch.no_grad()
    def count(self, images: Tensor | TensorOnDisk, target: Tensor | TensorOnDisk) -> None:
        """Add the counts of images, computed whole or in windows that are halved after each out-of-memory error.

        Raises:
            OutOfMemoryError: not even the smallest window fits.
        """
        height, width = images.shape[-2:]
        inference = self.settings.inference
        while True:
            try:
                # All parts are computed before the first is counted.
                settings = replace(self.settings, inference=inference)
                parts = list(evaluate_parts(self.model, images, target, settings))
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                accelerator_of(self.settings.device).empty_cache()
            inference = self._smaller(inference, inference.seen_px((height, width)), len(images))
        for counts, statistics in parts:
            self.counts.add(counts, statistics)

    def _smaller(self, inference: Inference, size: tuple[int, int], num_images: int) -> Inference:
        """Return an inference whose windows have half the side."""
        before = inference.window_px or size
        window = None if self.model.fixed_size_px is not None else smaller_window(before)
        if window is None:
            raise OutOfMemoryError(
                f"{self.settings.device}: a window of {before[0]}x{before[1]} px of {num_images} images does not fit: "
                "free memory, lower eval.batch_size, or name other --devices",
                key="eval.batch_size",
                value=num_images,
            )
        self.notes.append(
            f"images that do not fit into the memory of {self.settings.device} were evaluated in windows of "
            f"{window[0]}x{window[1]} px"
        )
        return replace(inference, window_px=window)


class EnsembleEvaluator(Evaluator):
    """Evaluation of the mean of several networks, image by image, exactly as in prediction.

    The settings give the classes; their inference and criterion are not used, so there is no loss.
    """

    def __init__(self, predictor: EnsemblePredictor, model: SegmentationModel, settings: EvaluationSettings) -> None:
        super().__init__(model, settings)
        self._predictor, self._workspace = predictor, plan_workspace(predictor)

    @torch.no_grad()
    def count(self, images: Tensor | TensorOnDisk, target: Tensor | TensorOnDisk) -> None:
        """Evaluate images and add the counts of their pixels.

        Raises:
            torch.OutOfMemoryError: not even a small tile fits.
        """
        assert isinstance(images, Tensor)  # the loader reads no windows for an ensemble
        if images.shape[-2] * images.shape[-1] > self._workspace.max_px:
            self.notes.append("images that do not fit into memory were evaluated in overlapping tiles")
        for number, image in enumerate(images):
            for strip in predict_strips(self._predictor, image.permute(1, 2, 0).numpy(), self._workspace):
                found = torch.from_numpy(strip.labels.astype(np.int64))[None]
                self.counts.confusion.update(found, target[..., strip.rows, :][number : number + 1])
