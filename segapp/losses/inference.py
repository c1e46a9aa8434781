"""Predictions, probabilities and scores from low-resolution logits, without the upsampled logits.

Shapes: N images, C classes, h x w of the logits, H x W of the output, R rows of a band.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from segapp.losses.bands import Band, band_rows_of_views, sweep_bands
from segapp.losses.bands_cross_entropy import CrossEntropyOptions, CrossEntropyTerms
from segapp.losses.checks import check_inputs, check_label_smoothing, check_target_range, class_ids
from segapp.losses.reference import compute_dtype
from segapp.losses.sums import CrossEntropySums


class Scores(NamedTuple):
    """What one pass over the upsampled logits gives; all of it may be summed over batches.

    Attributes:
        confusion: (C, C) int64 pixel counts: row the target's class, column the predicted one.
        loss_sum: scalar float64, sum of the cross-entropies.
        weight_sum: scalar float64; the mean loss is loss_sum / weight_sum.
    """

    confusion: Tensor
    loss_sum: Tensor
    weight_sum: Tensor


@torch.no_grad()
def upsample_argmax(logits: Tensor | Sequence[Tensor], size: tuple[int, int], *, align_corners: bool = True) -> Tensor:
    """The class with the largest upsampled logit; of equal ones the first.

    Args:
        logits: (N, C, h, w), or several views of the same images, whose probabilities are averaged: flipped back,
            from other scales or other models; their h and w may differ.
        size: (H, W).
        align_corners: of the bilinear upsampling.

    Returns:
        (N, H, W) class ids, uint8 (int64 for more than 256 classes).
    """
    if not isinstance(logits, Tensor):
        return _argmax_of_views(check_views(logits), size, align_corners)
    prediction = _empty_prediction(logits, size)

    def work(bands: Iterator[Band]) -> None:
        for band in bands:
            prediction[band.images, band.rows] = class_of_largest(band.values)

    sweep_bands(work, logits, size, align_corners)
    return prediction


@torch.no_grad()
def upsample_probabilities(
    logits: Tensor | Sequence[Tensor], size: tuple[int, int], *, align_corners: bool = True
) -> Tensor:
    """Softmax of the upsampled logits: (N, C, H, W) in float32 (float64 for float64 logits), and nothing else as large.

    Args:
        logits: (N, C, h, w), or several views, see `upsample_argmax`.
        size: (H, W).
        align_corners: of the bilinear upsampling.
    """
    views = check_views([logits] if isinstance(logits, Tensor) else logits)
    N, C = views[0].shape[:2]
    result = torch.empty((N, C, *size), dtype=compute_dtype(views[0]), device=views[0].device)
    for images, rows, probabilities in _probability_bands(views, size, align_corners):
        result[images, :, rows] = probabilities
    return result


@torch.no_grad()
def upsample_confusion(
    logits: Tensor,
    target: Tensor,
    *,
    align_corners: bool = True,
    ignore_index: int = 255,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    with_loss: bool = True,
) -> Scores:
    """Confusion matrix and cross-entropy of the upsampled logits in one pass.

    Args:
        logits: (N, C, h, w), any floating dtype.
        target: (N, H, W) class ids, uint8 or a signed integer type.
        align_corners: of the bilinear upsampling.
        ignore_index: id that counts nowhere.
        weight: (C,) factor of each class in the loss, or None.
        label_smoothing: of the loss.
        with_loss: False saves the loss's part of the work; the loss sums are 0 then.

    Raises:
        TypeError: wrong dtypes.
        ValueError: shapes that do not fit, ids that are no class.
    """
    check_inputs(logits, target, weight)
    check_label_smoothing(label_smoothing)
    poison = check_target_range(target, logits.shape[1], ignore_index)
    C, size = logits.shape[1], (target.shape[-2], target.shape[-1])
    options = CrossEntropyOptions(align_corners, ignore_index, label_smoothing)
    on_cpu = logits.device.type == "cpu"

    def work(bands: Iterator[Band]) -> tuple[Tensor, Tensor, Tensor]:
        confusion = torch.zeros((C + 1) * C, dtype=torch.int64, device=logits.device)
        terms = CrossEntropyTerms(weight, C, compute_dtype(logits), options)
        loss_sum, weight_sum = torch.zeros(2, dtype=torch.float64, device=logits.device)
        for band in bands:
            labels = target[band.images, None, band.rows]
            ids, valid = class_ids(labels, C, ignore_index)
            # Pixels that do not count go to a row of their own.
            place = torch.where(valid, ids, C)[:, 0] * C + class_of_largest(band.values)
            _count(confusion, place.flatten())
            if with_loss and on_cpu:
                terms.add(band, labels, with_gradient=False)
            elif with_loss:
                loss, count = CrossEntropySums(weight, label_smoothing)(band.values, ids, valid)
                loss_sum, weight_sum = loss_sum + loss, weight_sum + count
        if on_cpu:
            loss_sum, weight_sum = torch.tensor([terms.loss_sum, terms.weight_sum], dtype=torch.float64)
        return confusion, loss_sum, weight_sum

    parts, _ = sweep_bands(work, logits, size, align_corners)
    confusion, loss_sum, weight_sum = (torch.stack(entry).sum(0) for entry in zip(*parts, strict=True))
    return Scores(confusion.view(C + 1, C)[:C], loss_sum if poison is None else loss_sum + poison, weight_sum)


def class_of_largest(values: Tensor) -> Tensor:
    """The first class of the largest value: (m, C, R, W) -> (m, R, W), uint8 for up to 256 classes, else int64.

    On the CPU by comparing with the maximum: torch's argmax over a dimension that is not the last is 20 times slower.
    """
    C = values.shape[1]
    if values.device.type != "cpu" or C > 256:
        prediction = values.argmax(1)
        return prediction if C > 256 else prediction.to(torch.uint8)
    is_largest = (values >= values.amax(1, keepdim=True)).view(torch.uint8)
    from_the_end = torch.arange(C - 1, -1, -1, dtype=torch.uint8).view(1, C, 1, 1)
    return (C - 1) - is_largest.mul_(from_the_end).amax(1)


def check_views(views: Sequence[Tensor]) -> list[Tensor]:
    """The views as a list.

    Raises:
        ValueError: no views, or views of different images or classes.
    """
    if not views:
        raise ValueError("there are no views: give at least one tensor of logits")
    if len({view.shape[:2] for view in views}) > 1:
        raise ValueError(f"views have shapes {[tuple(view.shape) for view in views]}: N and C must agree")
    return list(views)


def _count(counts: Tensor, places: Tensor) -> None:
    """Adds 1 at each place; on a device without waiting for it, which bincount does."""
    if counts.is_cpu:
        counts += torch.bincount(places, minlength=counts.numel())
    else:
        counts.index_add_(0, places, torch.ones_like(places))


def _empty_prediction(logits: Tensor, size: tuple[int, int]) -> Tensor:
    dtype = torch.uint8 if logits.shape[1] <= 256 else torch.int64
    return torch.empty((logits.shape[0], *size), dtype=dtype, device=logits.device)


def _argmax_of_views(views: list[Tensor], size: tuple[int, int], align_corners: bool) -> Tensor:
    prediction = _empty_prediction(views[0], size)
    for images, rows, probabilities in _probability_bands(views, size, align_corners):
        prediction[images, rows] = class_of_largest(probabilities)
    return prediction


def _probability_bands(
    views: list[Tensor], size: tuple[int, int], align_corners: bool
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(images, rows, mean probability of the views), band by band."""
    for images, rows, values in band_rows_of_views(views, size, align_corners):
        mean = functools.reduce(torch.add, (torch.softmax(view, 1) for view in values))
        yield images, rows, mean / len(views)
