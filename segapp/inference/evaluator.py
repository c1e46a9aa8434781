"""Evaluation of a trained model in detail: image by image, on several devices, and never for want of memory.

The evaluation during a training is `segapp.inference.evaluate`; this one takes its time.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import Queue

import torch
from torch import Tensor

from segapp.datasets.loader import Batch
from segapp.errors import OutOfMemoryError
from segapp.inference.boundary_iou import BoundaryIoU
from segapp.inference.evaluate import Evaluation, count_views, no_statistics
from segapp.inference.sliding import Inference
from segapp.losses import AdditiveCriterion, upsample_argmax
from segapp.metrics import ConfusionMatrix
from segapp.models import SegmentationModel

MIN_WINDOW_PX = 64


@dataclass
class EvaluationResult:
    """What an evaluation found.

    Attributes:
        evaluation: scores, loss and number of images.
        matrix: int64 (C, C) on the host, rows the target's class.
        per_image: position in the data set -> (C, C) counts, where they were asked for.
        boundary_iou: per class, where it was asked for.
        notes: what a person should know of the way it was done.
    """

    evaluation: Evaluation
    matrix: Tensor
    per_image: dict[int, Tensor] = field(default_factory=dict)
    boundary_iou: tuple[float | None, ...] | None = None
    notes: list[str] = field(default_factory=list)


class Evaluator:
    """One device's part of an evaluation.

    Args:
        model: in eval mode, on the device.
        inference: how logits are computed; windows take its place where an image does not fit.
        criterion: gives the loss, on the device.
        device: where the work is done.
        num_classes: C.
        ignore_index: target value that counts nowhere.
        max_px: larger images are evaluated in windows from the start.
        with_images: keep the counts of every image.
        with_boundary: count boundaries too.
    """

    def __init__(
        self,
        model: SegmentationModel,
        inference: Inference,
        criterion: AdditiveCriterion,
        device: torch.device,
        *,
        num_classes: int,
        ignore_index: int,
        max_px: int | None = None,
        with_images: bool = False,
        with_boundary: bool = False,
    ) -> None:
        self.model, self.inference, self.criterion, self.device = model, inference, criterion, device
        self.ignore_index, self.max_px = ignore_index, max_px
        self.matrix = ConfusionMatrix(num_classes, ignore_index, device)
        self.totals = no_statistics(criterion, num_classes, ignore_index, device)
        self.with_images = with_images
        self.per_image: dict[int, Tensor] = {}
        self.boundary = BoundaryIoU(num_classes, ignore_index) if with_boundary else None
        self.num_images = 0
        self.notes: list[str] = []

    def on(self, device: torch.device) -> Evaluator:
        """The same on another device, with nothing counted yet."""
        return Evaluator(
            copy.deepcopy(self.model).to(device),
            replace(self.inference, normalizer=copy.deepcopy(self.inference.normalizer).to(device)),
            copy.deepcopy(self.criterion).to(device),
            device,
            num_classes=self.matrix.num_classes,
            ignore_index=self.ignore_index,
            max_px=self.max_px,
            with_images=self.with_images,
            with_boundary=self.boundary is not None,
        )

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """Evaluates the images of a batch.

        Raises:
            OutOfMemoryError: not even the smallest window fits.
        """
        is_apart = self.with_images or self.boundary is not None
        parts = len(batch.indices) if is_apart else 1
        for images, target, indices in zip(
            batch.images.tensor_split(parts),
            batch.target.tensor_split(parts),
            [batch.indices] if parts == 1 else [[index] for index in batch.indices],
            strict=True,
        ):
            counts = self._counted(images, target)
            self.matrix.add(counts)
            if self.with_images:
                self.per_image[indices[0]] = counts.cpu()
        self.num_images += len(batch.indices)

    def _counted(self, images: Tensor, target: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        inference = self.inference
        if self.max_px is not None and inference.window_px is None and height * width > self.max_px:
            side = max(MIN_WINDOW_PX, math.isqrt(self.max_px) // 32 * 32)
            inference = self._windowed((min(side, height), min(side, width)))
        while True:
            try:
                return self._count(inference, images, target)
            except torch.OutOfMemoryError:
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
            inference = self._smaller(inference, (height, width), len(images))

    def _smaller(self, inference: Inference, size: tuple[int, int], num_images: int) -> Inference:
        """The next thing to try after an out-of-memory."""
        window = inference.window_px or size
        if self.model.fixed_size_px is not None or max(window) <= MIN_WINDOW_PX:
            raise OutOfMemoryError(
                f"{self.device}: a window of {window[0]}x{window[1]} px of {num_images} images does not fit: free "
                "memory, lower eval.batch_size, or name other --devices"
            )
        return self._windowed((max(MIN_WINDOW_PX, window[0] // 2), max(MIN_WINDOW_PX, window[1] // 2)))

    def _windowed(self, window: tuple[int, int]) -> Inference:
        self.notes.append(
            f"images that do not fit into the memory of {self.device} were evaluated in windows of "
            f"{window[0]}x{window[1]} px"
        )
        return replace(self.inference, window_px=window)

    def _count(self, inference: Inference, images: Tensor, target: Tensor) -> Tensor:
        normalized = inference.normalizer(images.to(self.device, non_blocking=True))
        views, size = inference.views(self.model, normalized)
        on_device = target.to(self.device, non_blocking=True)
        counts, statistics = count_views(views, size, on_device, self.ignore_index, inference, self.criterion)
        if self.boundary is not None:
            found = upsample_argmax(views, size, align_corners=inference.align_corners)
            labels = found[0, : target.shape[-2], : target.shape[-1]].cpu().numpy()
            self.boundary.update(labels, target[0].numpy())
        self.totals = tuple(a + b for a, b in zip(self.totals, statistics, strict=True))
        return counts


def evaluate_on_devices(
    judges: Sequence[Evaluator], batches: Iterable[Batch], progress: Callable[[int], None] = lambda _: None
) -> EvaluationResult:
    """Shares batches over devices in turns, and joins what they count: the same for any number of them.

    Args:
        judges: one a device.
        batches: of whole images.
        progress: called with the number of images done.
    """
    if len(judges) == 1:
        for batch in batches:
            judges[0].add(batch)
            progress(judges[0].num_images)
    else:
        _judge_in_threads(judges, batches, progress)
    first = judges[0]
    for other in judges[1:]:
        first.matrix.merge(other.matrix)
        first.totals = tuple(a + b.to(a.device) for a, b in zip(first.totals, other.totals, strict=True))
        first.per_image |= other.per_image
        first.num_images += other.num_images
        first.notes += other.notes
        if first.boundary is not None and other.boundary is not None:
            first.boundary.counts += other.boundary.counts
    loss = float(first.criterion.finalize(first.totals))
    return EvaluationResult(
        Evaluation(first.matrix.scores(), loss if math.isfinite(loss) else None, first.num_images),
        first.matrix.matrix.cpu().clone(),
        dict(sorted(first.per_image.items())),
        None if first.boundary is None else first.boundary.iou(),
        sorted(set(first.notes)),
    )


def _judge_in_threads(judges: Sequence[Evaluator], batches: Iterable[Batch], progress: Callable[[int], None]) -> None:
    """One thread a device; batch i goes to device i mod n, so that sums do not depend on who is faster."""
    queues: list[Queue[Batch | None]] = [Queue(maxsize=2) for _ in judges]
    errors: list[BaseException] = []

    def work(judge: Evaluator, queue: Queue[Batch | None]) -> None:
        while (batch := queue.get()) is not None:
            try:
                if not errors:
                    judge.add(batch)
            except BaseException as error:  # raised again where the batches come from
                errors.append(error)

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in zip(judges, queues, strict=True)]
    for thread in threads:
        thread.start()
    try:
        for number, batch in enumerate(_until_error(batches, errors)):
            queues[number % len(queues)].put(batch)
            progress(sum(judge.num_images for judge in judges))
    finally:
        for queue in queues:
            queue.put(None)
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    progress(sum(judge.num_images for judge in judges))


def _until_error(batches: Iterable[Batch], errors: list[BaseException]) -> Iterator[Batch]:
    for batch in batches:
        if errors:
            return
        yield batch
