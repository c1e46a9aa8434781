"""Predictions, probabilities and scores from low-resolution logits, without the upsampled logits.

`logits` is one tensor (N, C, h, w) or a sequence of views of the same images: from flipped or resized images (flipped
back), from other models, or from tiles. A view is a tensor of logits of any resolution for the whole image, or a
sequence of tiles whose logits are averaged in their overlaps. The probabilities of several views are averaged, band by
band: full resolution exists for only one band at a time.

Shapes: N images, m of them in a band, C classes, h x w of the logits, H x W of the output, R rows of a band.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from segapp.accelerator import wide_dtype
from segapp.chunks import check_flag, check_number
from segapp.losses.additive import as_whole
from segapp.losses.fused.bands import CPU_BAND_BYTES, DEVICE_BAND_BYTES, Band, BlockBand, BlockSweep, sweep_bands
from segapp.losses.fused.checks import check_logits, checked_target, class_ids, class_masks
from segapp.losses.fused.grid import grid_of
from segapp.losses.fused.pixel_sums import cross_entropy_sums_of
from segapp.losses.fused.reference import compute_dtype


@dataclass(frozen=True)
class LogitsTile:
    """Logits of a rectangle of the output.

    Attributes:
        logits: (N, C, h, w).
        top: first output row.
        left: first output column.
        size: height and width in output pixels.
        frame: height and width that the logits cover, at least `size`; the remainder is padding.
        skip: columns of padding at the left of the frame; the other padding is at the right and at the bottom.
    """

    logits: Tensor
    top: int
    left: int
    size: tuple[int, int]
    frame: tuple[int, int]
    skip: int = 0


View = Tensor | Sequence[LogitsTile]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def check_views(views: Tensor | Sequence[View]) -> list[View]:
    """Return the views as a list; iterables of views and of tiles are read once.

    Raises:
        TypeError, ValueError: outputs of a `DataParallelModel`; no views or tiles, or wrong or different shapes.
    """
    given = [views] if isinstance(views, Tensor) else as_whole(views)
    if not isinstance(given, Iterable) or any(not isinstance(view, Iterable) for view in given):
        raise TypeError(f"logits given as {type(views).__name__}: give a tensor (N, C, h, w), or a sequence of views")
    # A generator could not be read a second time, for the sums after the checks.
    views_list: list[View] = [view if isinstance(view, Tensor) else list(as_whole(view)) for view in given]
    if not views_list or not all(_tensors(view) for view in views_list):
        raise ValueError("there are no views: give at least one tensor of logits, or one tile")
    tensors = [tensor for view in views_list for tensor in _tensors(view)]
    for tensor in tensors:
        check_logits(tensor)
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len({shape[:2] for shape in shapes}) > 1:
        raise ValueError(f"views have shapes {shapes}: N and C must agree")
    return views_list


def height_width(size: Sequence[int]) -> tuple[int, int]:
    """Return (H, W) as two numbers, from a tuple, a list or a `torch.Size`; ValueError for anything else."""
    if not isinstance(size, Sequence) or [isinstance(side, Integral) and side > 0 for side in size] != [True, True]:
        raise ValueError(f"size={size}: give (H, W) of at least 1, such as target.shape[-2:]")
    return int(size[0]), int(size[1])


def first_logits(views: Sequence[View]) -> Tensor:
    """Return one tensor of the views, for N, C, dtype and device."""
    return _tensors(views[0])[0]


def _tensors(view: Any) -> list[Tensor]:
    return [view] if isinstance(view, Tensor) else [getattr(tile, "logits", tile) for tile in view]


def _evaluates(function: _Function) -> _Function:
    """Decorate a function of logits or views: it runs without a graph, and without autocast, as the bands do."""

    @functools.wraps(function)
    def run(logits: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("align_corners", "is_sigmoid", "with_loss"):
            check_flag(name, kwargs.get(name, True))
        views = check_views(logits)
        with torch.no_grad(), torch.autocast(first_logits(views).device.type, enabled=False):
            return function(logits if isinstance(logits, Tensor) else views, *args, **kwargs)

    return cast(_Function, run)


def probability_bands(
    views: Sequence[View], size: tuple[int, int], align_corners: bool, *, is_sigmoid: bool = False
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (images, rows, mean probability (m, C, R, W) of the views), band by band; by softmax or sigmoid."""
    for images, rows, values in _bands(views, size, align_corners, is_shifted=not is_sigmoid):
        mean = _probability(next(values), is_sigmoid)
        for value in values:
            mean += _probability(value, is_sigmoid)
        yield images, rows, mean.div_(len(views))


def _probability(values: Tensor, is_sigmoid: bool) -> Tensor:
    return torch.sigmoid(values) if is_sigmoid else torch.softmax(values, 1)


def logit_bands(
    views: Sequence[View], size: tuple[int, int], align_corners: bool, *, is_sigmoid: bool = False
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (images, rows, logits (m, C, R, W)), band by band; for a softmax up to an additive constant per pixel.

    For several views, these are the logits of the mean probability: for a softmax, its logarithm.
    """
    if len(views) > 1:
        for images, rows, mean in probability_bands(views, size, align_corners, is_sigmoid=is_sigmoid):
            info = torch.finfo(mean.dtype)
            if is_sigmoid:
                yield images, rows, mean.clamp_(info.tiny, 1 - info.eps).logit_()
            else:
                yield images, rows, mean.clamp_min_(info.tiny).log_()
        return
    for images, rows, values in _bands(views, size, align_corners, is_shifted=not is_sigmoid):
        yield images, rows, next(values)


def _bands(
    views: Sequence[View], size: tuple[int, int], align_corners: bool, *, is_shifted: bool
) -> Iterator[tuple[slice, slice, Iterator[Tensor]]]:
    """Yield images, rows, and an iterator over the views' values (m, C, R, W)."""
    logits = first_logits(views)
    budget = CPU_BAND_BYTES if logits.device.type == "cpu" else DEVICE_BAND_BYTES
    sources = [
        _SampledTile(LogitsTile(view, 0, 0, size, size), align_corners, budget, is_shifted)
        if isinstance(view, Tensor)
        else _Tiles(view, size, align_corners, budget, is_shifted)
        for view in views
    ]
    N, C = logits.shape[:2]
    row_bytes = C * size[1] * compute_dtype(logits).itemsize
    rows_per_band = max(1, min(size[0], budget // row_bytes))
    step = max(1, min(N, budget // (row_bytes * rows_per_band)))
    for first in range(0, N, step):
        images = slice(first, min(N, first + step))
        for row in range(0, size[0], rows_per_band):
            rows = slice(row, min(size[0], row + rows_per_band))
            yield images, rows, (source.values(images, rows) for source in sources)


class _SampledTile:
    """One tensor of logits as a source of bands."""

    def __init__(self, tile: LogitsTile, align_corners: bool, budget: int, is_shifted: bool) -> None:
        self.tile, self.top, self.bottom = tile, tile.top, tile.top + tile.size[0]
        self.place = slice(tile.left, tile.left + tile.size[1])
        self._columns = slice(tile.skip, tile.skip + tile.size[1])
        logits = tile.logits.detach()
        low = (logits.shape[2], logits.shape[3])
        grid = grid_of(low, tile.frame, align_corners, compute_dtype(logits), logits)
        self._sweep = BlockSweep(logits, grid, slice(0, tile.frame[0]), None, budget, is_shifted)

    def values(self, images: slice, rows: slice) -> Tensor:
        """Return logits (m, C, R, width); `rows` are relative to the tile."""
        return BlockBand(self._sweep, images, rows).values[..., self._columns]


class _Tiles:
    """Overlapping tiles as a source of bands: the mean of their logits."""

    def __init__(
        self, tiles: Sequence[LogitsTile], size: tuple[int, int], align_corners: bool, budget: int, is_shifted: bool
    ) -> None:
        self._width = size[1]
        self._tiles = [_SampledTile(tile, align_corners, budget, is_shifted) for tile in tiles]

    def values(self, images: slice, rows: slice) -> Tensor:
        """Return logits (m, C, R, W); NaN outside the tiles."""
        tiles = [tile for tile in self._tiles if tile.top < rows.stop and tile.bottom > rows.start]
        if not tiles:
            raise ValueError(f"no tile covers the output rows {rows.start} to {rows.stop - 1}: cover the whole output")
        like = tiles[0].tile.logits
        shape = (images.stop - images.start, like.shape[1], rows.stop - rows.start, self._width)
        total = torch.zeros(shape, dtype=compute_dtype(like), device=like.device)
        count = total.new_zeros(shape[2:])
        for tile in tiles:
            start, stop = max(rows.start, tile.top), min(rows.stop, tile.bottom)
            place = ..., slice(start - rows.start, stop - rows.start), tile.place
            total[place] += tile.values(images, slice(start - tile.top, stop - tile.top))
            count[place] += 1
        return total.div_(count)


ONE_HOT_BYTES = 32 << 20
"""Size in bytes of the one-hot matrices with which pairs of classes are counted."""


class ConfusionSums(NamedTuple):
    """Confusion matrix and loss sums from one pass over the upsampled logits; all can be summed over batches.

    Attributes:
        confusion: (C, C) int64 pixel counts: row is the target's class, column the predicted one.
        loss_sum: scalar float64, sum of the pixels' cross-entropies.
        weight_sum: scalar float64; the mean loss is loss_sum / weight_sum.
    """

    confusion: Tensor
    loss_sum: Tensor
    weight_sum: Tensor

    def __repr__(self) -> str:
        shape, sums = tuple(self.confusion.shape), f"loss_sum={self.loss_sum}, weight_sum={self.weight_sum}"
        return f"{type(self).__name__}(confusion=<shape {shape}>, {sums})"


@_evaluates
def upsample_argmax(logits: Tensor | Sequence[View], size: Sequence[int], *, align_corners: bool = True) -> Tensor:
    """Return the class with the largest upsampled logit; the first one if several are equal.

    Args:
        logits: (N, C, h, w), or views.
        size: (H, W), such as `target.shape[-2:]`.
        align_corners: as in `F.interpolate`, but True by default.

    Returns:
        (N, H, W) class ids, uint8 (int64 for more than 256 classes).
    """
    views, size = check_views(logits), height_width(size)
    like = first_logits(views)
    dtype = torch.uint8 if like.shape[1] <= 256 else torch.int64
    prediction = torch.empty((like.shape[0], *size), dtype=dtype, device=like.device)

    def work(bands: Iterator[Band]) -> None:
        for band in bands:
            prediction[band.images, band.rows] = class_of_largest(band.values)

    if isinstance(logits, Tensor):
        sweep_bands(work, logits, size, align_corners)
    else:
        for images, rows, values in logit_bands(views, size, align_corners):
            prediction[images, rows] = class_of_largest(values)
    return prediction


@_evaluates
def upsample_sets(
    logits: Tensor | Sequence[View], size: Sequence[int], threshold: float, *, align_corners: bool = True
) -> Tensor:
    """Return the set of classes whose probability (sigmoid) is above a threshold.

    Args:
        logits: (N, C, h, w), or views; at most 31 classes.
        size: (H, W), such as `target.shape[-2:]`.
        threshold: probability, 0 to 1.
        align_corners: as in `F.interpolate`, but True by default.

    Returns:
        (N, H, W) int32, bit c for class c.
    """
    views, size = check_views(logits), height_width(size)
    like, least = first_logits(views), logit_of(threshold)
    result = torch.empty(like.shape[0], *size, dtype=torch.int32, device=like.device)
    bits = 1 << torch.arange(like.shape[1], dtype=torch.int32, device=like.device).view(1, -1, 1, 1)
    for images, rows, values in logit_bands(views, size, align_corners, is_sigmoid=True):
        result[images, rows] = ((values > least) * bits).sum(1, dtype=torch.int32)
    return result


def logit_of(probability: float) -> float:
    """Return the logit whose sigmoid is the given probability, from 0 to 1; infinite for 0 and 1."""
    check_number("threshold", probability, most=1)
    if probability in (0, 1):
        return math.inf if probability else -math.inf
    return math.log(probability) - math.log1p(-probability)


@_evaluates
def upsample_label_counts(
    logits: Tensor | Sequence[View],
    target: Tensor,
    threshold: float,
    *,
    align_corners: bool = True,
    ignore_index: int = -1,
) -> Tensor:
    """Return a confusion matrix per class, for predictions above a threshold.

    Args:
        logits: (N, C, h, w), or views.
        target: (N, H, W) sets of classes: bit c for class c.
        threshold: probability (sigmoid), 0 to 1.
        align_corners: as in `F.interpolate`, but True by default.
        ignore_index: value of pixels that are not counted.

    Returns:
        (C, 2, 2) int64 pixel counts: row 1 for pixels of the class, column 1 for pixels predicted as it.

    Raises:
        TypeError: wrong dtypes.
        ValueError: shapes that do not fit, ids with bits of no class.
    """
    views = check_views(logits)
    like, least = first_logits(views), logit_of(threshold)
    C = like.shape[1]
    checked_target(like, target, 1 << C, ignore_index)
    counts = torch.zeros(3, C, dtype=torch.int64, device=like.device)
    num_valid = torch.zeros((), dtype=torch.int64, device=like.device)
    size = height_width(target.shape[-2:])
    for images, rows, values in logit_bands(views, size, align_corners, is_sigmoid=True):
        ids, valid = class_ids(target[images, None, rows], 1 << C, ignore_index)
        is_target, is_predicted = class_masks(ids, C, multilabel=True) & valid, (values > least) & valid
        counts += torch.stack([mask.sum((0, 2, 3)) for mask in (is_target & is_predicted, is_target, is_predicted)])
        num_valid += valid.sum()
    both, in_target, in_prediction = counts
    rest = num_valid - in_target - in_prediction + both
    return torch.stack([rest, in_prediction - both, in_target - both, both], 1).view(C, 2, 2)


@_evaluates
def upsample_probabilities(
    logits: Tensor | Sequence[View], size: Sequence[int], *, align_corners: bool = True, is_sigmoid: bool = False
) -> Tensor:
    """Return the softmax of the upsampled logits, (N, C, H, W) in float32 (float64 for float64 logits).

    No other tensor of that size is allocated.

    Args:
        logits: (N, C, h, w), or views.
        size: (H, W), such as `target.shape[-2:]`.
        align_corners: as in `F.interpolate`, but True by default.
        is_sigmoid: return the sigmoid of each logit.
    """
    views, size = check_views(logits), height_width(size)
    return _joined(probability_bands(views, size, align_corners, is_sigmoid=is_sigmoid), views, size)


@_evaluates
def upsample_logits(
    logits: Tensor | Sequence[View], size: Sequence[int], *, align_corners: bool = True, is_sigmoid: bool = False
) -> Tensor:
    """Return upsampled logits (N, C, H, W), up to an additive constant per pixel, which softmax does not depend on.

    For several views, these are the logits of the mean probability. Use it for criteria that need all pixels together.

    Args:
        logits: (N, C, h, w), or views.
        size: (H, W), such as `target.shape[-2:]`.
        align_corners: as in `F.interpolate`, but True by default.
        is_sigmoid: the logits are for sigmoids, and have no such constant.
    """
    views, size = check_views(logits), height_width(size)
    return _joined(logit_bands(views, size, align_corners, is_sigmoid=is_sigmoid), views, size)


def _joined(bands: Iterator[tuple[slice, slice, Tensor]], views: Sequence[View], size: tuple[int, int]) -> Tensor:
    """Return all bands as one tensor (N, C, H, W)."""
    like = first_logits(views)
    result = torch.empty((*like.shape[:2], *size), dtype=compute_dtype(like), device=like.device)
    for images, rows, values in bands:
        result[images, :, rows] = values
    return result


@_evaluates
def upsample_confusion(
    logits: Tensor | Sequence[View],
    target: Tensor,
    *,
    align_corners: bool = True,
    ignore_index: int = 255,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    with_loss: bool = True,
) -> ConfusionSums:
    """Return the confusion matrix and the cross-entropy of the upsampled logits, from one pass.

    Args:
        logits: (N, C, h, w), any floating dtype, or views.
        target: (N, H, W) class ids, uint8 or a signed integer type.
        align_corners: as in `F.interpolate`, but True by default.
        ignore_index: id of pixels that are not counted.
        weight: (C,) factor of each class in the loss, or None.
        label_smoothing: smoothing in the loss, 0 to 1.
        with_loss: False skips the loss; its sums are 0.

    Raises:
        TypeError: wrong dtypes.
        ValueError: shapes that do not fit, ids that are no class.
    """
    views = check_views(logits)
    like = first_logits(views)
    C = like.shape[1]
    target, poison = checked_target(like, target, C, ignore_index, weight)
    check_number("label_smoothing", label_smoothing, most=1)
    size = height_width(target.shape[-2:])

    def count(bands: Iterator[tuple[slice, slice, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pairs of a target's and a predicted class, with a row for ignored pixels, and the loss's sums."""
        pairs = torch.zeros((C + 1) * C, dtype=torch.int64, device=like.device)
        loss_sum, weight_sum = torch.zeros(2, dtype=wide_dtype(like.device), device=like.device)
        for images, rows, values in bands:
            ids, valid = class_ids(target[images, None, rows], C, ignore_index)
            rows_of, columns_of = torch.where(valid, ids, C)[:, 0], class_of_largest(values)
            if like.is_cpu:
                pairs += torch.bincount((rows_of * C + columns_of).flatten(), minlength=pairs.numel())
            else:  # bincount would wait for the device
                pairs += count_pairs(rows_of, columns_of, C + 1, C).flatten()
            if with_loss:
                loss, pixels = cross_entropy_sums_of(values, ids, valid, weight, label_smoothing=label_smoothing)
                loss_sum, weight_sum = loss_sum + loss, weight_sum + pixels
        return pairs, loss_sum, weight_sum

    if isinstance(logits, Tensor):
        parts, _ = sweep_bands(
            lambda bands: count((band.images, band.rows, band.values) for band in bands), logits, size, align_corners
        )
    else:
        parts = [count(logit_bands(views, size, align_corners))]
    confusion, loss_sum, weight_sum = (torch.stack(entry).sum(0) for entry in zip(*parts, strict=True))
    return ConfusionSums(confusion.view(C + 1, C)[:C], loss_sum if poison is None else loss_sum + poison, weight_sum)


def class_of_largest(values: Tensor) -> Tensor:
    """Return the first class of the largest value: (m, C, R, W) -> (m, R, W), uint8 for up to 256 classes, else int64.

    The CPU compares with the maximum, because torch's argmax over a dimension that is not the last is 20 times slower.
    """
    C = values.shape[1]
    if values.device.type != "cpu" or C > 256:
        prediction = values.argmax(1)
        return prediction if C > 256 else prediction.to(torch.uint8)
    is_largest = (values >= values.amax(1, keepdim=True)).view(torch.uint8)
    from_the_end = torch.arange(C - 1, -1, -1, dtype=torch.uint8, device="cpu").view(1, C, 1, 1)
    return (C - 1) - is_largest.mul_(from_the_end).amax(1)


def count_pairs(rows: Tensor, columns: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Return how often each pair of ids, below num_rows and num_columns, occurs, int64 (num_rows, num_columns).

    It multiplies one-hot matrices, because atomic additions on a GPU would collide at the few pairs that most pixels
    have. Products of zeros and ones are exact even in TF32, and so are float32 sums below 2**24 pixels, which no part
    reaches.
    """
    counts = torch.zeros(num_rows, num_columns, dtype=torch.int64, device=rows.device)
    every_row = torch.arange(num_rows, device=rows.device)[:, None]
    every_column = torch.arange(num_columns, device=rows.device)
    part = min(1 << 24, max(1, ONE_HOT_BYTES // (4 * (num_rows + num_columns))))
    with torch.autocast(rows.device.type, enabled=False):
        parts = (torch.split(ids.flatten(), part) for ids in (rows, columns))
        for own_rows, own_columns in zip(*parts, strict=True):
            counts += ((own_rows == every_row).float() @ (own_columns[:, None] == every_column).float()).long()
    return counts
