"""Evaluation: confusion matrix, IoU and validation loss of images of any size, whole, in windows, or in several views.

Shapes: N images, C classes, H x W pixels of an image, h x w of the model's logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from segapp.failpoints import failpoint
from segapp.inference.sliding import Inference
from segapp.losses import CriterionCE, View, upsample_confusion, upsample_logits
from segapp.memory.oom_failpoint import oom_failpoint
from segapp.metrics import ConfusionMatrix, Scores
from segapp.parallel.ranks import PeerOutOfMemoryError, Ranks

if TYPE_CHECKING:
    from segapp.datasets.loader import Batch
    from segapp.losses import AdditiveCriterion
    from segapp.models import SegmentationModel


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
    is_single: bool = False,
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
        is_single: image by image, whatever the size of the batches.

    Raises:
        torch.OutOfMemoryError: on every rank, if one of them ran out of memory.
    """
    ranks = ranks or Ranks()
    was_training = model.training
    model.eval()
    matrix = ConfusionMatrix(num_classes, ignore_index, device)
    totals = None if criterion is None else no_statistics(criterion, num_classes, ignore_index, device)
    num_images = num_batches = 0
    failure: torch.OutOfMemoryError | None = None
    try:
        for batch in batches:
            failpoint("eval.batch")
            check()
            num_batches += 1
            if failure is not None:
                continue  # the other ranks count on this one at every check
            parts = len(batch.indices) if is_single else 1
            try:
                for images, target in zip(
                    batch.images.tensor_split(parts), batch.target.tensor_split(parts), strict=True
                ):
                    counts, statistics = _count(model, images, target, inference, ignore_index, criterion, device)
                    matrix.add(counts)
                    if totals is not None:
                        totals = tuple(a + b for a, b in zip(totals, statistics, strict=True))
            except torch.OutOfMemoryError as error:
                if ranks.world_size == 1:
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
    (matrix.counts,) = ranks.sums((matrix.counts,))
    num_images = sum(ranks.gather(num_images))
    loss = None
    if criterion is not None and totals is not None:
        value = float(criterion.finalize(ranks.sums(totals)))
        loss = value if math.isfinite(value) else None
    return Evaluation(matrix.scores(), loss, num_images)


def _count(
    model: SegmentationModel,
    images: Tensor,
    target: Tensor,
    inference: Inference,
    ignore_index: int,
    criterion: AdditiveCriterion | None,
    device: torch.device,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(C, C) counts of (target, prediction) of some images, and the criterion's statistics."""
    oom_failpoint("eval.forward")
    normalized = inference.normalizer(images.to(device, non_blocking=True))
    views, size = inference.views(model, normalized)
    return count_views(views, size, target.to(device, non_blocking=True), ignore_index, inference, criterion)


def count_views(
    views: Tensor | list[View],
    size: tuple[int, int],
    target: Tensor,
    ignore_index: int,
    inference: Inference,
    criterion: AdditiveCriterion | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Counts of low-resolution logits; one pass where the criterion is cross-entropy.

    Args:
        views: what `Inference.views` gave, and the size it stands for.
        size: (H', W'), at least that of the target.
        target: (N, H, W), on the views' device.
        ignore_index: target value that counts nowhere.
        inference: how the logits were computed.
        criterion: gives statistics; None: none.

    Returns:
        (C, C) int64, rows the target's class, and the criterion's statistics.
    """
    align_corners = inference.align_corners
    target = F.pad(target, (0, size[1] - target.shape[-1], 0, size[0] - target.shape[-2]), value=ignore_index)
    is_one_pass = isinstance(criterion, CriterionCE)
    scores = upsample_confusion(
        views,
        target,
        align_corners=align_corners,
        ignore_index=ignore_index,
        weight=criterion.weight if isinstance(criterion, CriterionCE) else None,
        label_smoothing=criterion.label_smoothing if isinstance(criterion, CriterionCE) else 0.0,
        with_loss=is_one_pass,
    )
    if is_one_pass or criterion is None:
        return scores.confusion, (scores.loss_sum, scores.weight_sum)
    if not isinstance(views, Tensor):
        views = upsample_logits(views, (target.shape[-2], target.shape[-1]), align_corners=align_corners)
    return scores.confusion, criterion.statistics((views,), target)


def no_statistics(
    criterion: AdditiveCriterion, num_classes: int, ignore_index: int, device: torch.device
) -> tuple[Tensor, ...]:
    """The statistics of no image at all: zeros of the right shapes, in float64 as all sums over an evaluation.

    A rank without images takes part in the sum over the ranks, for which every rank needs one type.
    """
    logits = torch.zeros(1, num_classes, 1, 1, device=device)
    target = torch.full((1, 1, 1), ignore_index, dtype=torch.int16, device=device)
    return tuple(torch.zeros_like(s, dtype=torch.float64) for s in criterion.statistics((logits,), target))
