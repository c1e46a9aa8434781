"""Confusion matrix, and the scores computed from it.

The conventions are those used by the Cityscapes evaluation server (`evalPixelLevelSemanticLabeling` in the package
cityscapesscripts): pixels with an ignored target are not counted; IoU = TP / (TP + FP + FN); a class that occurs
neither in targets nor in predictions has no IoU, and a class that is only predicted has IoU 0. Dice, which is the F1
score of the pixels, is 2 TP / (2 TP + FP + FN) with the same rules.

Shapes: N images, C classes, H, W height and width in pixels.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

__all__ = ["ConfusionMatrix", "Counts", "LabelCounts", "SegmentationScores"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True, kw_only=True)
class SegmentationScores:
    """Scores of a confusion matrix. A ratio is in [0, 1], or None if its denominator is 0.

    `miou` and the other means average over the classes whose score is not None.
    """

    iou: tuple[float | None, ...]  # per class, TP / (TP + FP + FN)
    miou: float | None
    dice: tuple[float | None, ...]  # per class, 2 TP / (2 TP + FP + FN), the F1 score
    mean_dice: float | None
    precision: tuple[float | None, ...]  # per class, TP / predicted pixels
    mean_precision: float | None
    recall: tuple[float | None, ...]  # per class, TP / target pixels (class accuracy)
    mean_recall: float | None
    frequency: tuple[float | None, ...]  # per class, share of the valid pixels
    frequency_weighted_iou: float | None  # Long et al., Fully Convolutional Networks, 2015, section 5
    pixel_accuracy: float | None  # share of the valid pixels with a correct prediction
    num_valid_px: int


class Counts:
    """Counts of targets and predictions over any number of batches; the base class of the two metrics.

    Args:
        num_classes: C, at least 1.
        ignore_index: target id of the pixels that are left out.
        device: device of the counts, such as "cpu", "cuda:1" or 1.

    Attributes:
        counts: the counts, int64, one after the other; sum them to add the counts of devices and ranks.

    Raises:
        TypeError: the number of classes or `ignore_index` is no integer, or this class itself is called.
        ValueError: there is no class, or the device is not known.
    """

    def __init__(self, num_classes: int, *, ignore_index: int, device: torch.device | str | int = "cpu") -> None:
        if type(self) is Counts:
            raise TypeError("Counts is the base class of the metrics: use ConfusionMatrix or LabelCounts")
        for name, value in (("num_classes", num_classes), ("ignore_index", ignore_index)):
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r}: give an integer")
        if num_classes < 1:
            raise ValueError(f"num_classes={num_classes}: give at least one class")
        self.num_classes, self.ignore_index = int(num_classes), int(ignore_index)
        with torch.inference_mode(False):  # a tensor created in inference mode cannot be changed outside it
            self.counts = torch.zeros(math.prod(self._kind[0]), dtype=torch.int64, device="cpu")
        self.to(device)

    @property
    def _kind(self) -> tuple[tuple[int, ...], int, str]:
        """The shape of the matrix, the number of ids, and what an id is."""
        raise NotImplementedError

    @property
    def matrix(self) -> Tensor:
        """The counts as a matrix, a view of `counts`."""
        return self.counts.view(self._kind[0])

    def update(self, prediction_NHW: Tensor, target_NHW: Tensor) -> None:
        """Count one batch of ids (N, H, W), of any integer type; for `LabelCounts`, bit c of an id is class c.

        Raises:
            TypeError: one is no tensor, such as a numpy array.
            ValueError: the shapes differ, a tensor is not of integers, a target is neither a valid id nor
                `ignore_index`, or the prediction at a valid target is no valid id.
        """
        _, num_ids, what = self._kind
        for name, ids in (("prediction", prediction_NHW), ("target", target_NHW)):
            if not isinstance(ids, Tensor):
                raise TypeError(f"{name} of type {type(ids).__name__}: give a tensor, such as torch.as_tensor(array)")
            if ids.is_floating_point() or ids.is_complex():
                raise ValueError(f"{name} of {ids.dtype}: class ids are integers; take the argmax of logits first")
            if ids.is_meta:
                raise ValueError(f"{name} on {ids.device} holds no values: give a tensor of another device")
        if prediction_NHW.shape != target_NHW.shape or target_NHW.ndim > 3:
            raise ValueError(
                f"prediction of shape {tuple(prediction_NHW.shape)}, target of shape {tuple(target_NHW.shape)}: they "
                f"must have the same (N, H, W), with one {what} for each pixel"
            )
        prediction, target = (ids.to(self.counts.device) for ids in (prediction_NHW, target_NHW))
        bounds = torch.iinfo(torch.uint8 if target.dtype == torch.bool else target.dtype)
        valid = torch.ones_like(target, dtype=torch.bool)
        if bounds.min <= self.ignore_index <= bounds.max:  # else torch would wrap it around: in uint8, -1 is 255
            valid = target != self.ignore_index
        prediction, target = (ids[valid].to(torch.int64) for ids in (prediction, target))
        out_of_range = (torch.minimum(prediction, target) < 0) | (torch.maximum(prediction, target) > num_ids - 1)
        if num_out_of_range := int(out_of_range.sum()):
            raise ValueError(
                f"{num_out_of_range} pixels whose prediction or target is not a {what} 0..{num_ids - 1} and "
                f"whose target is not ignore_index={self.ignore_index}: map the masks' ids to classes first"
            )
        self._count(prediction, target)

    def _count(self, prediction: Tensor, target: Tensor) -> None:
        """Add the ids (P,) of the valid pixels."""
        raise NotImplementedError

    def scores(self) -> SegmentationScores:
        """Return the scores of all counts, computed in float64 on the host."""
        raise NotImplementedError

    def compute(self) -> dict[str, Tensor]:
        """Return the scores by name as float64 tensors, per class (C,) or (); nan for a ratio with denominator 0."""
        scores = {name: np.array(value, np.float64) for name, value in vars(self.scores()).items()}
        return {name: torch.as_tensor(value, device=self.counts.device) for name, value in scores.items()}

    def reset(self) -> None:
        """Set all counts to 0."""
        self.counts.zero_()

    @torch.inference_mode(False)
    def to(self, device: torch.device | str | int) -> Self:
        """Move the counts to a device, and return the metric.

        Raises:
            ValueError: the device is not known, or holds no values.
        """
        try:
            if (place := torch.device(device)).type == "meta":
                raise TypeError
        except (RuntimeError, TypeError) as error:
            raise ValueError(f'device={device!r} cannot hold counts: give one such as "cpu" or "cuda:0"') from error
        self.counts = self.counts.to(place)
        return self

    def merge(self, other: Self | Tensor) -> Self:
        """Add the counts of another metric, or a matrix as of `upsample_confusion`, and return this metric.

        Raises:
            ValueError: they are counts of other classes, or a tensor that holds no counts.
        """
        added: object = other.matrix if isinstance(other, Counts) and repr(other) == repr(self) else other
        self.counts += self._checked(added, self._kind[0])
        return self

    def _checked(self, counts: object, shape: tuple[int, ...]) -> Tensor:
        """Return counts of a shape as int64 (P,) on the metric's device, and ValueError for anything else."""
        if not isinstance(counts, Tensor):
            given = repr(counts) if isinstance(counts, Counts) else f"a {type(counts).__name__}"
        elif tuple(counts.shape) != shape or counts.dtype != torch.int64 or counts.is_meta:
            given = f"counts of shape {tuple(counts.shape)} and {counts.dtype} on {counts.device}"
        elif (counts < 0).any():
            given = f"negative counts, down to {int(counts.min())}"
        else:
            return counts.to(self.counts.device).flatten()
        raise ValueError(f"{self!r} cannot take {given}: give counts of the same classes, int64 {shape}, at least 0")

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and what they count, for `load_state_dict`."""
        return {"metric": repr(self), "counts": self.counts.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the counts by the counts of a state.

        Raises:
            ValueError: the state is of another metric, has other keys, or holds no counts.
        """
        if not isinstance(state, Mapping) or state.keys() != {"metric", "counts"} or state["metric"] != repr(self):
            given = f"a {type(state).__name__}"
            if isinstance(state, Mapping):
                given = state.get("metric", sorted(map(str, state)))
            raise ValueError(f"the state of {given} does not fit {self!r}: give the `state_dict()` of such a metric")
        self.counts.copy_(self._checked(state["counts"], tuple(self.counts.shape)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_classes}, ignore_index={self.ignore_index})"


class ConfusionMatrix(Counts):
    """Counts of (target, prediction) pairs over any number of batches.

    `matrix` is int64 (C, C): the row is the target's class, the column the predicted one.

    Args:
        num_classes: C, at least 1.
        ignore_index: target id of the pixels that are left out. If it is a class, that class has no IoU, and predicting
            it counts as an error of the target's class.
        device: device of the counts.

    Example:
        >>> import torch
        >>> from segapp.metrics import ConfusionMatrix
        >>> confusion = ConfusionMatrix(2)
        >>> confusion.update(torch.tensor([[[0, 1, 1, 0]]]), torch.tensor([[[0, 1, 0, 255]]]))
        >>> confusion.matrix.tolist()
        [[1, 1], [0, 1]]
        >>> confusion.scores().iou, confusion.compute()["miou"]
        ((0.5, 0.5), tensor(0.5000, dtype=torch.float64))
    """

    def __init__(self, num_classes: int, *, ignore_index: int = 255, device: torch.device | str | int = "cpu") -> None:
        super().__init__(num_classes, ignore_index=ignore_index, device=device)

    @classmethod
    def from_matrix(cls, matrix: Tensor, *, ignore_index: int = 255) -> Self:
        """Return the metric of a matrix (C, C) of counts, such as of `upsample_confusion`, on the CPU.

        Raises:
            ValueError: it is no square matrix of integers of at least 0.
        """
        num_classes = len(matrix) if isinstance(matrix, Tensor) and matrix.ndim else 1
        return cls(max(1, num_classes), ignore_index=ignore_index).merge(matrix)

    @property
    def _kind(self) -> tuple[tuple[int, ...], int, str]:
        return (self.num_classes, self.num_classes), self.num_classes, "class"

    def _count(self, prediction: Tensor, target: Tensor) -> None:
        self.counts += torch.bincount(target * self.num_classes + prediction, minlength=len(self.counts))

    def scores(self) -> SegmentationScores:
        """Return the scores of all counts, computed in float64 on the host."""
        matrix = self.matrix.cpu()
        sums = matrix.diagonal().tolist(), matrix.sum(1).tolist(), matrix.sum(0).tolist()
        num_valid_px, accuracy = sum(sums[1]), _ratio(sum(sums[0]), sum(sums[1]))
        return _all_scores(*sums, num_valid_px, accuracy, self.ignore_index)


class LabelCounts(Counts):
    """Counts of targets and predictions of classes that do not exclude each other, over any number of batches.

    `matrix` is int64 (C, 2, 2): row 1 for pixels of the class, column 1 for pixels predicted as it. The mean IoU is the
    mean over the classes; the pixel accuracy is the share of correct decisions over all valid pixels and classes. For
    the arguments see `Counts`.

    Raises:
        ValueError: there are more than 63 classes.
    """

    def __init__(self, num_classes: int, *, ignore_index: int = -1, device: torch.device | str | int = "cpu") -> None:
        super().__init__(num_classes, ignore_index=ignore_index, device=device)
        if num_classes > 63:
            raise ValueError(f"num_classes={num_classes}: an int64 holds sets of at most 63 classes")

    @property
    def _kind(self) -> tuple[tuple[int, ...], int, str]:
        return (self.num_classes, 2, 2), 1 << self.num_classes, "set of classes"

    def _count(self, prediction: Tensor, target: Tensor) -> None:
        for number, matrix in enumerate(self.matrix):
            own, found = (target >> number) & 1, (prediction >> number) & 1
            matrix.add_(torch.bincount(own * 2 + found, minlength=4).view(2, 2))

    def scores(self) -> SegmentationScores:
        """Return the scores of all counts, computed in float64 on the host."""
        matrix = self.matrix.cpu()
        hits, in_target, in_prediction = matrix[:, 1, 1], matrix[:, 1].sum(1), matrix[:, :, 1].sum(1)
        right, decisions = int(matrix[:, 0, 0].sum() + hits.sum()), int(matrix.sum())
        num_valid_px, accuracy = decisions // self.num_classes, _ratio(right, decisions)
        return _all_scores(hits.tolist(), in_target.tolist(), in_prediction.tolist(), num_valid_px, accuracy)


def counts_for(num_classes: int, ignore_index: int, *, multilabel: bool, device: torch.device | str = "cpu") -> Counts:
    """Return empty counts for targets with one class per pixel, or with sets of classes."""
    return (LabelCounts if multilabel else ConfusionMatrix)(num_classes, ignore_index=ignore_index, device=device)


def group_iou(matrix: Tensor, groups: Sequence[Sequence[int]]) -> tuple[float | None, ...]:
    """Return the IoU of each group of classes; None if it occurs neither in targets nor in predictions.

    A confusion within a group counts as correct. For the Cityscapes categories it equals the category scores of the
    Cityscapes evaluation. The matrix is (C, C).
    """
    parts = [(matrix[own][:, own].sum(), matrix[own].sum(), matrix[:, own].sum()) for own in map(list, groups)]
    return tuple(_ratio(int(hits), int(target + prediction - hits)) for hits, target, prediction in parts)


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _all_scores(
    hits: Sequence[int],
    in_target: Sequence[int],
    in_prediction: Sequence[int],
    num_valid_px: int,
    pixel_accuracy: float | None,
    unscored: int = -1,
) -> SegmentationScores:
    """Return the scores from the classes' true positives, target pixels and predicted pixels; not for `unscored`."""
    rows: list[tuple[float | None, ...]] = [
        (_ratio(tp, t + p - tp), _ratio(2 * tp, t + p), _ratio(tp, p), _ratio(tp, t))
        for tp, t, p in zip(hits, in_target, in_prediction, strict=True)
    ]
    if 0 <= unscored < len(rows):
        rows[unscored] = (None,) * 4
    iou, dice, precision, recall = zip(*rows, strict=True)
    frequency = tuple(_ratio(t, num_valid_px) for t in in_target)
    weighted = [f * i for f, i in zip(frequency, iou, strict=True) if f is not None and i is not None]
    return SegmentationScores(
        iou=iou,
        miou=mean_of_known(iou),
        dice=dice,
        mean_dice=mean_of_known(dice),
        precision=precision,
        mean_precision=mean_of_known(precision),
        recall=recall,
        mean_recall=mean_of_known(recall),
        frequency=frequency,
        frequency_weighted_iou=sum(weighted) if weighted else None,
        pixel_accuracy=pixel_accuracy,
        num_valid_px=num_valid_px,
    )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
