"""Images and class ids as pictures: in sample images, reports, overlays, and of the first batch of a training.

Shapes: H x W pixels of an image or a picture, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.pool import Batch
from segapp.datasets.preprocessing import Preprocessing

OVERLAY_ALPHA = 0.5
_STRIPES = (110, 190)
"""Gray values of ignored pixels, in stripes of 4 px; `swatch ignored` in the style sheet of reports shows them."""
MAX_SAMPLES, MAX_BATCH_PX = 8, 2_000_000
"""Limits on the picture of a batch: its samples, and its pixels in sum."""
_GAP_PX = 2


def colorize(labels: NDArray[Any], scheme: ClassScheme) -> NDArray[Any]:
    """Return class ids (H, W) as uint8 RGB colors (H, W, 3); for several classes their mean, for none black."""
    table = np.array(scheme.palette, dtype=np.uint8)
    if scheme.multilabel is None:
        return np.asarray(table[labels])
    own = (labels[..., None] >> np.arange(scheme.num_classes)) & 1
    return np.asarray((own @ table.astype(np.int64) // np.maximum(own.sum(-1, keepdims=True), 1)).astype(np.uint8))


def colorize_target(target: NDArray[Any], scheme: ClassScheme) -> NDArray[Any]:
    """Return a target (H, W) as uint8 RGB colors (H, W, 3) with gray stripes at ignored pixels."""
    is_ignored = target == scheme.ignore_index
    colors = colorize(np.where(is_ignored, 0, target), scheme)
    stripes = np.add.outer(np.arange(target.shape[0]), np.arange(target.shape[1])) // 4 % 2
    colors[is_ignored] = np.array(_STRIPES, np.uint8)[stripes][is_ignored, None]
    return colors


def blend(
    image: NDArray[Any],
    labels: NDArray[Any],
    scheme: ClassScheme,
    colors_of: Callable[[NDArray[Any], ClassScheme], NDArray[Any]] = colorize,
) -> NDArray[Any]:
    """Return an image (H, W, 3) blended with the colors of its class ids (H, W), except for pixels without a class."""
    mixed = np.asarray(cv2.addWeighted(image, 1 - OVERLAY_ALPHA, colors_of(labels, scheme), OVERLAY_ALPHA, 0.0))
    return mixed if scheme.multilabel is None else np.where((labels != 0)[..., None], mixed, image)


def fitted(size_px: tuple[int, ...], longest_px: int) -> tuple[int, int]:
    factor = min(1.0, longest_px / max(size_px))
    return max(1, round(size_px[0] * factor)), max(1, round(size_px[1] * factor))


def resized(size_px: tuple[int, int], image: NDArray[Any], *ids: NDArray[Any]) -> list[NDArray[Any]]:
    """Return an image (H, W, 3), averaged, and arrays of class ids (H, W), nearest pixel, at a height and width."""
    size = size_px[::-1]
    small = [cv2.resize(each.astype(np.int32), size, interpolation=cv2.INTER_NEAREST) for each in ids]
    return [cv2.resize(image, size, interpolation=cv2.INTER_AREA), *small]


def draw_batch(batch: Batch, preprocessing: Preprocessing, scheme: ClassScheme) -> NDArray[np.uint8]:
    """Return the first samples of a batch as the model sees them, as one RGB picture (H, W, 3) in rows and columns.

    The model's input is turned back to colors, and its target is drawn over it. All is on the host. A large picture is
    reduced.
    """
    count, (height, width) = min(len(batch.images), MAX_SAMPLES), batch.target.shape[1:]
    rows = math.ceil(count / math.ceil(math.sqrt(2 * count * height / width)))  # about twice as wide as high
    columns = math.ceil(count / rows)
    cell_px = (height + _GAP_PX) * (width + _GAP_PX)
    factor = min(1.0, math.sqrt(MAX_BATCH_PX / (rows * columns * cell_px)))
    height, width = (max(1, int((side + _GAP_PX) * factor) - _GAP_PX) for side in (height, width))
    picture = np.full((rows, height + _GAP_PX, columns, width + _GAP_PX, 3), 255, np.uint8)
    for number in range(count):  # one at a time, because normalized crops take much memory
        inputs = preprocessing.normalize(batch.images[number : number + 1])
        image = preprocessing.pixels.as_rgb(preprocessing.restore(inputs)[0].permute(1, 2, 0).numpy())
        image, target = resized((height, width), image, batch.target[number].numpy())
        row, column = divmod(number, columns)
        picture[row, :height, column, :width] = blend(image, target, scheme, colorize_target)
    return picture.reshape(rows * (height + _GAP_PX), -1, 3)[:-_GAP_PX, :-_GAP_PX]


def encode_png(picture: NDArray[Any]) -> bytes:
    """Return an RGB picture, uint8 (H, W, 3), as a PNG."""
    return bytes(cv2.imencode(".png", np.ascontiguousarray(picture[..., ::-1]))[1])
