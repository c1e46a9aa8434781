"""Polygons and run lengths as pixels of a mask.

A pixel belongs to a polygon if cv2.fillPoly fills it: corners rounded to the nearest pixel centre, outline included. An
outline and its holes are filled together by the even-odd rule. What is drawn later lies on top.
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

_MAX_SIDE_PX = 65_536
_MAX_CORNER = 2**24


def blank_mask(height_px: int, width_px: int, value: int = 0) -> NDArray[np.uint8]:
    """Return a mask of one value.

    Raises:
        ValueError: it would be too large.
    """
    if not (0 < height_px <= _MAX_SIDE_PX and 0 < width_px <= _MAX_SIDE_PX and height_px * width_px <= 2**28):
        raise ValueError(f"a size of {width_px} x {height_px} pixels")
    return np.full((height_px, width_px), value, np.uint8)


def fill_polygon(mask: NDArray[np.uint8], rings: Sequence[Sequence[Sequence[float]]], value: int) -> None:
    """Fill an outline, without the holes that follow it, in place.

    Args:
        mask: (H, W).
        rings: the outline and its holes, each a list of (x, y) in pixels; (0, 0) is the centre of the first pixel.
        value: of the filled pixels.

    Raises:
        ValueError: a ring has fewer than three corners, or a corner is not finite.
    """
    corners = []
    for ring in rings:
        points = np.asarray(ring, np.float64)
        if points.ndim != 2 or points.shape[1] < 2 or len(points) < 3:
            raise ValueError(f"a polygon of {len(points)} corners")
        if not np.isfinite(points).all() or np.abs(points).max() > _MAX_CORNER:
            raise ValueError("a corner that is no number")
        corners.append(np.rint(points[:, :2]).astype(np.int32))
    cv2.fillPoly(mask, corners, value)


def area_of(ring: Sequence[Sequence[float]]) -> float:
    """Return the area of a polygon, in square pixels."""
    points = np.asarray(ring, np.float64)
    x, y = points[:, 0], points[:, 1]
    return float(abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2)


def paste(mask: NDArray[np.uint8], piece: NDArray[np.bool_], left: int, top: int, value: int) -> None:
    """Set the pixels of a piece, in place; parts outside the mask are cut off."""
    x0, y0 = max(left, 0), max(top, 0)
    x1, y1 = min(left + piece.shape[1], mask.shape[1]), min(top + piece.shape[0], mask.shape[0])
    if x0 < x1 and y0 < y1:
        mask[y0:y1, x0:x1][piece[y0 - top : y1 - top, x0 - left : x1 - left]] = value


def decode_runs(counts: Sequence[int], height_px: int, width_px: int, order: str = "C") -> NDArray[np.bool_]:
    """Return the pixels of run lengths that begin with a run of background.

    Args:
        counts: lengths of background and object in turn.
        height_px: of the result.
        width_px: of the result.
        order: "C": rows one after the other (CVAT); "F": columns (COCO).

    Raises:
        ValueError: the runs do not fill the size.
    """
    lengths = np.asarray(counts, np.int64)
    if (lengths < 0).any() or lengths.sum() != height_px * width_px:
        raise ValueError(f"run lengths of {lengths.sum()} pixels for {width_px} x {height_px}")
    values = np.arange(len(lengths)) % 2 == 1
    return np.repeat(values, lengths).reshape((height_px, width_px), order=order)  # type: ignore[call-overload, no-any-return]


def decode_starts(runs: str, height_px: int, width_px: int, first: int = 1, order: str = "F") -> NDArray[np.bool_]:
    """Return the pixels of runs "start length start length ...", as in Kaggle's tables; no runs are no pixels.

    >>> decode_starts("1 2 4 1", 2, 2).astype(int).tolist()
    [[1, 0], [1, 1]]

    Args:
        runs: the start and the length of each run, with spaces between them.
        height_px: of the result.
        width_px: of the result.
        first: number of the first pixel, 0 or 1.
        order: "F": pixels are numbered down the columns; "C": along the rows.

    Raises:
        ValueError: a number is missing or none, or a run leaves the image.
    """
    numbers = np.array(runs.split(), np.int64)
    if len(numbers) % 2:
        raise ValueError(f"{len(numbers)} numbers, which are no pairs of a start and a length")
    starts, lengths = numbers[0::2] - first, numbers[1::2]
    size = height_px * width_px
    if (wrong := (starts < 0) | (lengths < 0) | (starts + lengths > size)).any():
        start, length = starts[wrong][0] + first, lengths[wrong][0]
        raise ValueError(f"the run {start} {length} leaves the image of {width_px} x {height_px} pixels")
    changes = np.zeros(size + 1, np.int32)
    np.add.at(changes, starts, 1)
    np.add.at(changes, starts + lengths, -1)
    covered = np.cumsum(changes[:-1]) > 0
    return covered.reshape((height_px, width_px), order=order)  # type: ignore[call-overload, no-any-return]
