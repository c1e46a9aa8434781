"""Evaluation: confusion matrix, IoU and validation loss over images of any size, whole or by sliding window.

Shapes: N images, C classes, H x W pixels of an image, h x w of the model's logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segapp.metrics import ConfusionMatrix, Scores
from segapp.train.engine import Normalizer
from segapp.train.ranks import Ranks

if TYPE_CHECKING:
    from segapp.datasets.loader import Batch
    from segapp.losses import AdditiveCriterion
    from segapp.models import SegmentationModel


@dataclass(frozen=True)
class Inference:
    """How logits are computed for whole images.

    Args:
        normalizer: uint8 images -> the model's input, on the same device.
        align_corners: of the upsampling, as in training.
        window_px: height and width of a sliding window; None: the whole image at once.
        overlap: share of a window that the next one covers again.
        scales: scales of the image whose predictions are averaged; (1.0,) for none.
        flip: average with the mirrored image too.
        autocast: context of the forward pass.
    """

    normalizer: Normalizer
    align_corners: bool = True
    window_px: tuple[int, int] | None = None
    overlap: float = 1 / 3
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False
    autocast: Callable[[], Any] = torch.no_grad

    @property
    def is_plain(self) -> bool:
        """One forward pass of the whole image, without averaging."""
        return self.window_px is None and self.scales == (1.0,) and not self.flip

    def logits_and_size(self, model: SegmentationModel, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Low-resolution logits of normalised images, and the padded size that they stand for.

        Args:
            model: gives the logits.
            images: (N, 3, H, W), normalised.

        Returns:
            logits (N, C, h, w) of the images padded at the bottom and right with the mean colour to (H', W'), and
            (H', W').
        """
        height, width = images.shape[-2:]
        size = model.suitable_size(height, width)
        padded = F.pad(images, (0, size[1] - width, 0, size[0] - height)) if size != (height, width) else images
        with self.autocast():
            logits: Tensor = model(padded)[0]
        return logits, size

    def full_logits(self, model: SegmentationModel, images: Tensor) -> Tensor:
        """Logits (N, C, H, W) of normalised images, whole or averaged over windows."""
        height, width = images.shape[-2:]
        if self.window_px is None:
            return self._upsampled(model, images)
        window = (min(self.window_px[0], height), min(self.window_px[1], width))
        total: Tensor | None = None
        count = torch.zeros(1, 1, height, width, device=images.device)
        for top, left in window_corners((height, width), window, self.overlap):
            area = (..., slice(top, top + window[0]), slice(left, left + window[1]))
            logits = self._upsampled(model, images[area])
            if total is None:
                total = logits.new_zeros(*logits.shape[:2], height, width)
            total[area] += logits
            count[area] += 1
        assert total is not None
        return total / count

    def _upsampled(self, model: SegmentationModel, images: Tensor) -> Tensor:
        logits, size = self.logits_and_size(model, images)
        full = F.interpolate(logits.float(), size, mode="bilinear", align_corners=self.align_corners)
        return full[..., : images.shape[-2], : images.shape[-1]]

    def averaged_logits(self, model: SegmentationModel, images: Tensor) -> Tensor:
        """Logits (N, C, H, W), or the log of the probabilities averaged over scales and flips where there are any."""
        views = [(scale, flip) for scale in self.scales for flip in ((False, True) if self.flip else (False,))]
        if len(views) == 1 and self.scales == (1.0,):
            return self.full_logits(model, images)
        size = images.shape[-2:]
        total: Tensor | None = None
        for scale, flip in views:
            view = images
            if scale != 1.0:
                target = [max(1, round(side * scale)) for side in size]
                view = F.interpolate(view, target, mode="bilinear", align_corners=False, antialias=scale < 1.0)
            logits = self.full_logits(model, view.flip(-1) if flip else view)
            logits = logits.flip(-1) if flip else logits
            if scale != 1.0:
                logits = F.interpolate(logits, size, mode="bilinear", align_corners=False)
            probabilities = logits.softmax(1)
            total = probabilities if total is None else total.add_(probabilities)
        assert total is not None
        return (total / len(views)).clamp_min_(torch.finfo(torch.float32).tiny).log_()


def window_corners(size: tuple[int, int], window: tuple[int, int], overlap: float) -> Iterator[tuple[int, int]]:
    """Top-left corners of windows that cover an image, the last ones flush with its border.

    Args:
        size: height and width of the image, pixels.
        window: height and width of the window, no larger than the image.
        overlap: share of a window that the next one covers again, 0 <= overlap < 1.
    """
    axes = []
    for side, length in zip(size, window, strict=True):
        stride = max(1, math.ceil(length * (1 - overlap)))
        steps = math.ceil(max(side - length, 0) / stride) + 1
        axes.append([min(i * stride, side - length) for i in range(steps)])
    for top in axes[0]:
        for left in axes[1]:
            yield top, left


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found."""

    scores: Scores
    loss: float | None
    num_images: int

    def monitored(self, name: str) -> float | None:
        """The value that decides which checkpoint is best; larger is better."""
        if name == "loss":
            return None if self.loss is None else -self.loss
        value: float | None = getattr(self.scores, name)
        return value


@torch.no_grad()
def evaluate(
    model: SegmentationModel,
    batches: Iterable[Batch],
    inference: Inference,
    *,
    num_classes: int,
    ignore_index: int,
    device: torch.device,
    criterion: AdditiveCriterion | None = None,
    check: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = lambda _: None,
    ranks: Ranks | None = None,
    num_checks: int = 0,
) -> Evaluation:
    """Evaluates a model over batches of whole images.

    Args:
        model: returns a tuple, logits first; it is put into eval mode and left as it was found.
        batches: uint8 images (N, 3, H, W) and targets (N, H, W); sizes may differ from batch to batch.
        inference: how logits are computed.
        num_classes: C.
        ignore_index: target value that counts nowhere.
        device: where the batches go.
        criterion: gives the validation loss over the whole set (sums, one division); None: no loss.
        check: called before every batch; may raise to leave.
        progress: called with the number of images done.
        ranks: the processes that share the images; every one gets the result of all.
        num_checks: every rank calls `check` at least so often, so that ranks with fewer batches meet the others there.
    """
    ranks = ranks or Ranks()
    was_training = model.training
    model.eval()
    matrix = ConfusionMatrix(num_classes, ignore_index, device)
    totals = None if criterion is None else _no_statistics(criterion, num_classes, ignore_index, device)
    num_images = num_batches = 0
    try:
        for batch in batches:
            check()
            num_batches += 1
            images = inference.normalizer(batch.images.to(device, non_blocking=True))
            target = batch.target.to(device, non_blocking=True)
            if inference.is_plain:
                logits, size = inference.logits_and_size(model, images)
                border = (0, size[1] - target.shape[-1], 0, size[0] - target.shape[-2])
                padded = F.pad(target, border, value=ignore_index)
            else:
                logits, padded = inference.averaged_logits(model, images), target
            full = F.interpolate(
                logits.float(), padded.shape[-2:], mode="bilinear", align_corners=inference.align_corners
            )
            matrix.update(full.argmax(1), padded)
            if criterion is not None and totals is not None:
                statistics = criterion.statistics((logits,), padded)
                totals = tuple(a + b for a, b in zip(totals, statistics, strict=True))
            num_images += len(batch.indices)
            progress(num_images)
        for _ in range(num_batches, num_checks):
            check()
    finally:
        model.train(was_training)
    (matrix.counts,) = ranks.sums((matrix.counts,))
    num_images = sum(ranks.gather(num_images))
    loss = None
    if criterion is not None and totals is not None:
        value = float(criterion.finalize(ranks.sums(totals)))
        loss = value if math.isfinite(value) else None
    return Evaluation(matrix.scores(), loss, num_images)


def _no_statistics(
    criterion: AdditiveCriterion, num_classes: int, ignore_index: int, device: torch.device
) -> tuple[Tensor, ...]:
    """The statistics of no image at all: zeros of the right shapes."""
    logits = torch.zeros(1, num_classes, 1, 1, device=device)
    target = torch.full((1, 1, 1), ignore_index, dtype=torch.int16, device=device)
    return tuple(torch.zeros_like(s) for s in criterion.statistics((logits,), target))
