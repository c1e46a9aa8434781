"""Boundary IoU (Cheng et al., Boundary IoU: Improving Object-Centric Image Segmentation Evaluation, CVPR 2021).

Of each class only the pixels near the edge of its region count, in the target and in the prediction each near their
own: IoU of the two bands. A region's edge is where it ends, at another class or at the border of the image.
"""

from __future__ import annotations

import math
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

DILATION = 0.02
"""Width of the band as a share of the image's diagonal, the paper's for large images."""


class BoundaryIoU:
    """Counts of boundary pixels over any number of images.

    Pixels that the target ignores count nowhere; the regions are those with the ignored pixels taken out, so an ignored
    area has an edge too, as an area of another class would.

    Args:
        num_classes: C.
        ignore_index: target value that counts nowhere.
        dilation: width of the band as a share of the image's diagonal; at least one pixel.

    Attributes:
        counts: int64 (C, 2): intersection and union of the bands, in pixels.
    """

    def __init__(self, num_classes: int, ignore_index: int, dilation: float = DILATION) -> None:
        self.ignore_index, self.dilation = ignore_index, dilation
        self.counts: NDArray[np.int64] = np.zeros((num_classes, 2), np.int64)

    def update(self, prediction: NDArray[Any], target: NDArray[Any]) -> None:
        """Counts one image.

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
        """Per class; None for a class without a boundary in targets and predictions."""
        return tuple(int(inter) / int(union) if union else None for inter, union in self.counts)


def band_width_px(size: tuple[int, ...], dilation: float) -> int:
    """Pixels from an edge that belong to its band."""
    return max(1, round(dilation * math.hypot(*size)))


def boundary(region: NDArray[Any], width_px: int) -> NDArray[np.bool_]:
    """The pixels of a region that lie within so many erosion steps (3 x 3) of its edge; bool (H, W)."""
    padded = np.pad(region.astype(np.uint8), 1)  # the border of the image is an edge
    # Erosion by a square of 2 d + 1 is d erosions by one of 3; OpenCV separates it into two passes.
    side = 2 * width_px + 1
    outside = {"borderType": cv2.BORDER_CONSTANT, "borderValue": 0}
    inner = cv2.erode(padded, cv2.getStructuringElement(cv2.MORPH_RECT, (side, side)), **outside)
    return np.asarray((padded - inner)[1:-1, 1:-1] > 0)


def _ids(values: NDArray[Any]) -> NDArray[Any]:
    return np.unique(values)
