"""Boundary IoU (Cheng et al., Boundary IoU: Improving Object-Centric Image Segmentation Evaluation, CVPR 2021).

The boundary IoU of a class is the IoU of two bands of pixels: one along the edge of its region in the target, one along
the edge of its region in the prediction. The border of the image is an edge too. H x W pixels, C classes.
"""

from __future__ import annotations

import math
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

DILATION = 0.02
"""Width of the band as a share of the image diagonal; the value of the paper for large images."""


class BoundaryIoU:
    """Counts of boundary pixels over any number of images.

    Ignored pixels of the target are not counted and belong to no region, so a region ends at an ignored area as it does
    at another class.

    Args:
        num_classes: C.
        ignore_index: target value of pixels that are not counted.
        dilation: width of the band as a share of the image diagonal; at least one pixel.

    Attributes:
        counts: int64 (C, 2): intersection and union of the bands, in pixels.
    """

    def __init__(self, num_classes: int, ignore_index: int, dilation: float = DILATION) -> None:
        self.ignore_index, self.dilation = ignore_index, dilation
        self.counts: NDArray[np.int64] = np.zeros((num_classes, 2), np.int64)

    def update(self, prediction: NDArray[Any], target: NDArray[Any]) -> None:
        """Count one image.

        Args:
            prediction: (H, W) class ids.
            target: (H, W) class ids or `ignore_index`.
        """
        valid = target != self.ignore_index
        width_px = band_width_px(target.shape[:2], self.dilation)
        for number in np.intersect1d(np.arange(len(self.counts)), np.concatenate([_ids(target), _ids(prediction)])):
            wanted = boundary((target == number) & valid, width_px)
            found = boundary((prediction == number) & valid, width_px)
            self.counts[number] += np.count_nonzero(wanted & found), np.count_nonzero(wanted | found)

    def iou(self) -> tuple[float | None, ...]:
        """Return the IoU per class; None for a class without a boundary in targets and predictions."""
        return tuple(int(inter) / int(union) if union else None for inter, union in self.counts)


def band_width_px(size: tuple[int, ...], dilation: float) -> int:
    """Return the width of the band in pixels, at least 1."""
    return max(1, round(dilation * math.hypot(*size)))


def boundary(region: NDArray[Any], width_px: int) -> NDArray[np.bool_]:
    """Return the pixels of a region (H, W) that `width_px` erosions by 3 x 3 remove; bool (H, W)."""
    padded = np.pad(region.astype(np.uint8), 1)  # so that the border of the image is an edge
    # Erosion by a square of 2 d + 1 equals d erosions by 3 x 3; OpenCV separates it into two passes.
    side = 2 * width_px + 1
    outside = {"borderType": cv2.BORDER_CONSTANT, "borderValue": 0}
    inner = cv2.erode(padded, cv2.getStructuringElement(cv2.MORPH_RECT, (side, side)), **outside)
    return np.asarray((padded - inner)[1:-1, 1:-1] > 0)


def _ids(values: NDArray[Any]) -> NDArray[Any]:
    return np.unique(values)
