"""Signed distances of every pixel to the boundary of every class, for the boundary loss.

Shapes: C classes, H, W height and width in pixels.
"""

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from segapp.datasets.layouts.schemes import ClassScheme


def with_distances(
    mask: NDArray[Any], num_classes: int, ignore_index: int, *, multilabel: bool = False
) -> NDArray[np.int32]:
    """Return a mask followed by the squared signed distances of each class, (1 + C, H, W).

    Outside a class it is the squared distance in pixels to the nearest pixel of the class. Inside, it is minus the
    squared distance to the nearest valid pixel of another class. It is 0 everywhere for a class without a boundary.
    Ignored pixels belong neither to a class nor to the other classes. (The convention of Kervadec et al., MIDL 2019,
    who use the roots.)

    Args:
        mask: (H, W) class ids; with `multilabel` sets of classes, bit c for class c.
        num_classes: C.
        ignore_index: value of ignored pixels.
        multilabel: the mask holds sets of classes.
    """
    result = np.zeros((1 + num_classes, *mask.shape), np.int32)
    result[0] = mask
    valid = mask != ignore_index
    own = [(((mask >> c) & 1 == 1) if multilabel else (mask == c)) & valid for c in range(num_classes)]
    outside = {c: squared_distance(own[c]) for c in range(num_classes) if own[c].any()}
    for c, squared in outside.items():
        if multilabel:
            others = valid & ~own[c]
            inside = squared_distance(others) if others.any() else None
        else:
            of_others = [squared for other, squared in outside.items() if other != c]
            inside = np.minimum.reduce(of_others) if of_others else None
        if inside is not None:
            result[1 + c] = np.where(own[c], -inside, squared)
    return result


def target_layout(
    scheme: ClassScheme, size_px: tuple[int, int], *, has_distances: bool
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and the dtype of a target with this height and width, with or without distance maps."""
    if has_distances:
        return (1 + scheme.num_classes, *size_px), np.dtype(np.int32)
    return size_px, scheme.dtype


def squared_distance(pixels: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the squared Euclidean distance of every pixel to the nearest set pixel; at least one must be set."""
    distance = cv2.distanceTransform((~pixels).astype(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_PRECISE)
    squared: NDArray[np.int32] = np.rint(np.square(distance.astype(np.float64))).astype(np.int32)
    return squared
