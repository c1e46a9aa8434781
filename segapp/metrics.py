"""Confusion matrix, the scores computed from it, and scores of boundaries.

The conventions are those used by the Cityscapes evaluation server (`evalPixelLevelSemanticLabeling` in the package
cityscapesscripts): pixels with an ignored target are not counted; IoU = TP / (TP + FP + FN); a class that occurs
neither in targets nor in predictions has no IoU, and a class that is only predicted has IoU 0. Dice, which is the F1
score of the pixels, is 2 TP / (2 TP + FP + FN) with the same rules.

The boundary IoU of a class (Cheng et al., Boundary IoU: Improving Object-Centric Image Segmentation Evaluation, CVPR
2021) is the IoU of two bands of pixels: one along the edge of its region in the target, one along the edge of its
region in the prediction. The border of the image is an edge too.

Surface Dice and Hausdorff distance are defined as in the package surface-distance (Nikolov et al., Deep learning to
achieve clinically applicable segmentation of head and neck anatomy, 2018) for pixels of side 1. A surface is the
polygon between the centers of the pixels inside and outside a region; each of its elements lies between 2 x 2 pixels
and has a length. Surface Dice is the share of both surfaces, by length, that is within a tolerance of the other
surface. The Hausdorff distance (95 %) of an image is the larger of two distances: the distance from the prediction's
surface within which 95 % of the target's surface lie, and the reverse.

Shapes: N images, C classes, H, W height and width in pixels.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
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


class ConfusionMatrix:
    """Counts of (target, prediction) pairs over any number of batches.

    Matrices of devices and ranks are added by summing their `counts`, int64 (C * C,), which is the matrix row by row.

    Args:
        num_classes: C, at least 1.
        ignore_index: target id of the pixels that are left out. If it is a class, that class has no IoU, and predicting
            it counts as an error of the target's class.
        device: device of the counts.

    Example:
        >>> confusion = ConfusionMatrix(2)
        >>> confusion.update(torch.tensor([[[0, 1, 1, 0]]]), torch.tensor([[[0, 1, 0, 255]]]))
        >>> confusion.matrix.tolist()
        [[1, 1], [0, 1]]
        >>> confusion.scores().iou
        (0.5, 0.5)
    """

    def __init__(self, num_classes: int, ignore_index: int = 255, device: torch.device | str = "cpu") -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes={num_classes}: a confusion matrix needs at least one class")
        self.num_classes, self.ignore_index = num_classes, ignore_index
        with torch.inference_mode(False):  # a tensor created in inference mode cannot be changed outside it
            self.counts = torch.zeros(num_classes * num_classes, dtype=torch.int64, device=device)

    @property
    def matrix(self) -> Tensor:
        """The matrix, int64 (C, C), a view of `counts`: row is the target's class, column the predicted one."""
        return self.counts.view(self.num_classes, self.num_classes)

    def update(self, prediction_NHW: Tensor, target_NHW: Tensor) -> None:
        """Count one batch of class ids (N, H, W), of any integer type.

        Raises:
            ValueError: the shapes differ, a tensor is not of integers, a target is neither a class nor `ignore_index`,
                or the prediction at a valid target is no class.
        """
        if prediction_NHW.shape != target_NHW.shape:
            raise ValueError(
                f"prediction of shape {tuple(prediction_NHW.shape)}, target of shape {tuple(target_NHW.shape)}: they "
                f"must have the same (N, H, W)"
            )
        for what, ids in (("prediction", prediction_NHW), ("target", target_NHW)):
            if ids.is_floating_point() or ids.is_complex():
                raise ValueError(f"{what} of {ids.dtype}: class ids are integers; take the argmax of logits first")
        valid = target_NHW != self.ignore_index
        prediction, target = (ids[valid].to(self.counts.device, torch.int64) for ids in (prediction_NHW, target_NHW))
        out_of_range = (torch.minimum(prediction, target) < 0) | (torch.maximum(prediction, target) >= self.num_classes)
        if num_out_of_range := int(out_of_range.sum()):
            raise ValueError(
                f"{num_out_of_range} pixels whose prediction or target is not a class 0..{self.num_classes - 1} and "
                f"whose target is not ignore_index={self.ignore_index}: map the masks' ids to classes first"
            )
        self.counts += torch.bincount(target * self.num_classes + prediction, minlength=len(self.counts))

    def scores(self) -> SegmentationScores:
        """Return the scores of all counts, computed in float64 on the host."""
        hits, in_target, in_prediction = _marginals(self.matrix.cpu())
        num_valid_px = sum(in_target)
        accuracy = _ratio(sum(hits), num_valid_px)
        return _all_scores(hits, in_target, in_prediction, num_valid_px, accuracy, self.ignore_index)


class LabelCounts:
    """Counts of targets and predictions of classes that do not exclude each other, over any number of batches.

    It has the same methods as `ConfusionMatrix`; `counts`, int64 (C * 4,), has the matrices one after the other. The
    mean IoU is the mean over the classes; the pixel accuracy is the share of correct decisions over all valid pixels
    and classes.
    """

    def __init__(self, num_classes: int, ignore_index: int = -1, device: torch.device | str = "cpu") -> None:
        self.num_classes, self.ignore_index = num_classes, ignore_index
        with torch.inference_mode(False):  # as above
            self.counts = torch.zeros(num_classes * 4, dtype=torch.int64, device=device)

    @property
    def matrix(self) -> Tensor:
        """int64 (C, 2, 2), a view of `counts`: row 1 for pixels of the class, column 1 for pixels predicted as it."""
        return self.counts.view(self.num_classes, 2, 2)

    def update(self, prediction_NHW: Tensor, target_NHW: Tensor) -> None:
        """Count one batch of sets of classes (N, H, W), bit c for class c."""
        valid = target_NHW != self.ignore_index
        for number, matrix in enumerate(self.matrix):
            own, found = (target_NHW[valid] >> number) & 1, (prediction_NHW[valid] >> number) & 1
            matrix.add_(torch.bincount(own.long() * 2 + found.long(), minlength=4).view(2, 2))

    def scores(self) -> SegmentationScores:
        """Return the scores of all counts, computed in float64 on the host."""
        matrix = self.matrix.cpu()
        hits, in_target, in_prediction = matrix[:, 1, 1], matrix[:, 1].sum(1), matrix[:, :, 1].sum(1)
        right, decisions = int(matrix[:, 0, 0].sum() + hits.sum()), int(matrix.sum())
        num_valid_px, accuracy = decisions // self.num_classes, _ratio(right, decisions)
        return _all_scores(hits.tolist(), in_target.tolist(), in_prediction.tolist(), num_valid_px, accuracy)


class BoundaryIoU:
    """Counts of boundary pixels over any number of images.

    Ignored pixels of the target are not counted and belong to no region, so a region ends at an ignored area as it does
    at another class. The width of the band is `dilation` of the image diagonal, at least one pixel; the default is the
    paper's for large images. `counts`, int64 (C, 2), are intersection and union of the bands in pixels.
    """

    def __init__(self, num_classes: int, ignore_index: int, dilation: float = 0.02) -> None:
        self.ignore_index, self.dilation = ignore_index, dilation
        self.counts: NDArray[np.int64] = np.zeros((num_classes, 2), np.int64)

    def update(self, prediction: NDArray[Any], target: NDArray[Any]) -> None:
        """Count one image: class ids (H, W), in the target also `ignore_index`."""
        valid = target != self.ignore_index
        width_px = max(1, round(self.dilation * math.hypot(*target.shape[:2])))
        for number in np.intersect1d(np.arange(len(self.counts)), np.union1d(np.unique(target), np.unique(prediction))):
            wanted = boundary((target == number) & valid, width_px)
            found = boundary((prediction == number) & valid, width_px)
            self.counts[number] += np.count_nonzero(wanted & found), np.count_nonzero(wanted | found)

    def iou(self) -> tuple[float | None, ...]:
        """Return the IoU per class; None for a class without a boundary in targets and predictions."""
        return tuple(int(inter) / int(union) if union else None for inter, union in self.counts)


class SurfaceDistances:
    """Counts of surface Dice and sums of the Hausdorff distances (95 %) of images, over any number of images.

    Elements next to an ignored pixel of the target are left out of both surfaces. `counts`, int64 (C, 7), are for
    surface Dice the half diagonals and the straight elements within the tolerance, and the total numbers of both; the
    sum of the Hausdorff distances in units of `RESOLUTION_PX`; the number of images that have such a distance, and of
    images in which it is not defined, because only the target or only the prediction has the class. Integers have the
    same sum in any order.
    """

    RESOLUTION_PX = 2.0**-20

    def __init__(self, num_classes: int, ignore_index: int, tolerance_px: float = 2.0) -> None:
        self.ignore_index, self.tolerance_px = ignore_index, tolerance_px
        self.counts: NDArray[np.int64] = np.zeros((num_classes, 7), np.int64)

    def update(self, prediction: NDArray[Any], target: NDArray[Any]) -> None:
        """Count one image: class ids (H, W), in the target also `ignore_index`."""
        is_ignored = target == self.ignore_index
        for number in np.intersect1d(np.arange(len(self.counts)), np.union1d(np.unique(target), np.unique(prediction))):
            regions = [(ids == number) & ~is_ignored for ids in (target, prediction)]
            if not any(region.any() for region in regions):
                continue
            place = _bounding_box(regions[0] | regions[1])
            codes = [_surface(region[place], is_ignored[place]) for region in regions]
            self.counts[number] += self._of_surfaces(*codes)

    def _of_surfaces(self, *codes: NDArray[np.uint8]) -> NDArray[np.int64]:
        counts = np.zeros(7, np.int64)
        farthest_px = 0.0
        is_both = all(code.any() for code in codes)
        for own, other in (codes, codes[::-1]):
            half_diagonals, straight = _HALF_DIAGONALS[own[own > 0]], _STRAIGHT[own[own > 0]]
            counts[2:4] += half_diagonals.sum(), straight.sum()
            if is_both:
                distance_px = _distance_to(other > 0)[own > 0]
                is_near = distance_px <= self.tolerance_px
                counts[:2] += half_diagonals[is_near].sum(), straight[is_near].sum()
                order = np.argsort(distance_px, kind="stable")
                lengths = np.cumsum((half_diagonals * math.sqrt(0.5) + straight)[order])
                last = np.searchsorted(lengths, 0.95 * lengths[-1])
                farthest_px = max(farthest_px, float(distance_px[order][min(int(last), len(order) - 1)]))
        if is_both:
            counts[4:6] = round(farthest_px / self.RESOLUTION_PX), 1
        else:
            counts[6] = any(code.any() for code in codes)
        return counts

    def surface_dice(self) -> tuple[float | None, ...]:
        """Return the surface Dice per class over all images; None for a class without a surface."""
        lengths = self.counts[:, :4] @ np.array([[math.sqrt(0.5), 0], [1, 0], [0, math.sqrt(0.5)], [0, 1]])
        return tuple(near / whole if whole else None for near, whole in lengths.tolist())

    def hausdorff_px(self) -> tuple[float | None, ...]:
        """Return the mean Hausdorff distance (95 %) per class in pixels, over the images that have one."""
        rows = self.counts[:, 4:6].tolist()
        return tuple(total * self.RESOLUTION_PX / num_images if num_images else None for total, num_images in rows)

    def num_undefined(self) -> tuple[int, ...]:
        """Return, per class, the images in which only the target or only the prediction has a surface."""
        return tuple(self.counts[:, 6].tolist())


_HALF_DIAGONALS = np.array([0, 1, 1, 0, 1, 0, 2, 1, 1, 2, 0, 1, 0, 1, 1, 0])
"""Half diagonals between 2 x 2 pixels; bits are set for the pixels inside: 8 and 4 above, 2 and 1 below."""
_STRAIGHT = np.array([0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0])


def _surface(region: NDArray[np.bool_], is_ignored: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return which pixels around each corner are inside, uint8 (H + 1, W + 1); 0 without a surface."""
    inside, unknown = np.pad(region, 1), np.pad(is_ignored, 1)

    def of_corners(pixels: NDArray[np.bool_]) -> NDArray[np.uint8]:
        above, below = (8 * pixels[:-1, :-1] + 4 * pixels[:-1, 1:], 2 * pixels[1:, :-1] + 1 * pixels[1:, 1:])
        return np.asarray(above + below, np.uint8)

    codes = of_corners(inside)
    codes[(codes == 15) | (of_corners(unknown) > 0)] = 0
    return codes


def _bounding_box(region: NDArray[np.bool_]) -> tuple[slice, slice]:
    """Return the rows and columns of a region that is not empty, and one more on each side within the image."""
    rows, columns = np.flatnonzero(region.any(1)), np.flatnonzero(region.any(0))
    return (
        slice(max(0, int(rows[0]) - 1), int(rows[-1]) + 2),
        slice(max(0, int(columns[0]) - 1), int(columns[-1]) + 2),
    )


def _distance_to(pixels: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the distance of each pixel to the nearest set pixel; at least one must be set."""
    distance = cv2.distanceTransform((~pixels).astype(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_PRECISE)
    return np.asarray(np.sqrt(np.rint(np.square(distance.astype(np.float64)))))  # exact: squares are integers


@dataclass(frozen=True)
class BoundaryScores:
    """Scores of the boundaries of each class; None if a class has none."""

    iou: tuple[float | None, ...]
    surface_dice: tuple[float | None, ...]
    hausdorff_px: tuple[float | None, ...]  # mean over the images with the class in target and prediction
    num_undefined: tuple[int, ...]  # images with the class in only one of them
    tolerance_px: float  # tolerance of surface Dice


class BoundaryCounts:
    """Counts of boundary IoU, surface Dice and Hausdorff distances over any number of images."""

    def __init__(self, num_classes: int, ignore_index: int, tolerance_px: float = 2.0) -> None:
        self.bands = BoundaryIoU(num_classes, ignore_index)
        self.surfaces = SurfaceDistances(num_classes, ignore_index, tolerance_px)

    def update(self, prediction: NDArray[Any], target: NDArray[Any]) -> None:
        """Count one image: class ids (H, W), in the target also the ignored id."""
        self.bands.update(prediction, target)
        self.surfaces.update(prediction, target)

    def scores(self) -> BoundaryScores:
        """Return the scores of all counts."""
        surfaces = self.surfaces
        return BoundaryScores(
            self.bands.iou(),
            surfaces.surface_dice(),
            surfaces.hausdorff_px(),
            surfaces.num_undefined(),
            surfaces.tolerance_px,
        )


Counts = ConfusionMatrix | LabelCounts
"""Counts of an evaluation with one class per pixel, or with several."""


def counts_for(num_classes: int, ignore_index: int, *, multilabel: bool, device: torch.device | str = "cpu") -> Counts:
    """Return empty counts for targets with one class per pixel, or with sets of classes."""
    return (LabelCounts if multilabel else ConfusionMatrix)(num_classes, ignore_index, device)


def group_matrix(matrix: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """Return the confusion matrix of groups of classes; a confusion within a group counts as correct.

    For the Cityscapes categories it equals the category scores of the Cityscapes evaluation. From int64 (C, C) and the
    class ids of each of G groups, int64 (G + 1, G + 1); the last row and column hold the classes of no group.
    """
    num_classes = matrix.shape[0]
    member = torch.full((num_classes,), len(groups), dtype=torch.int64)
    for number, classes in enumerate(groups):
        member[list(classes)] = number
    side = len(groups) + 1
    indices = member.view(-1, 1) * side + member
    joined = torch.zeros(side * side, dtype=torch.int64)
    return joined.scatter_add_(0, indices.flatten(), matrix.cpu().flatten()).view(side, side)


def group_iou(matrix: Tensor, groups: Sequence[Sequence[int]]) -> tuple[float | None, ...]:
    """Return the IoU of each group of classes; None if it occurs neither in targets nor in predictions."""
    hits, in_target, in_prediction = _marginals(group_matrix(matrix, groups))
    return tuple(_ratio(hits[g], in_target[g] + in_prediction[g] - hits[g]) for g in range(len(groups)))


def _marginals(matrix: Tensor) -> tuple[list[int], list[int], list[int]]:
    """Return true positives, target pixels and predicted pixels of each class."""
    return matrix.diagonal().tolist(), matrix.sum(1).tolist(), matrix.sum(0).tolist()


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def boundary(region: NDArray[Any], width_px: int) -> NDArray[np.bool_]:
    """Return the pixels of a region (H, W) that `width_px` erosions by 3 x 3 remove; bool (H, W)."""
    padded = np.pad(region.astype(np.uint8), 1)  # so that the border of the image is an edge
    # Erosion by a square of 2 d + 1 equals d erosions by 3 x 3; OpenCV separates it into two passes.
    side = 2 * width_px + 1
    outside = {"borderType": cv2.BORDER_CONSTANT, "borderValue": 0}
    inner = cv2.erode(padded, cv2.getStructuringElement(cv2.MORPH_RECT, (side, side)), **outside)
    return np.asarray((padded - inner)[1:-1, 1:-1] > 0)


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
