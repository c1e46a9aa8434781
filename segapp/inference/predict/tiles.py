"""Prediction of pictures that do not fit into memory: overlapping tiles of which only the core is kept.

Pictures that fit are predicted whole, so that networks with global context see the whole image.

Shapes: C classes, H x W pixels of an image, R rows of a strip.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from segapp.datasets.resources import available_bytes
from segapp.errors import OutOfMemoryError
from segapp.inference.predict.predictor import Predictor, TrainedPredictor, infer_labels
from segapp.memory.oom_errors import is_out_of_memory
from segapp.memory.simulation.recorder import Recorder

MAX_HOST_BYTES = 2 << 30
"""Upper limit of CPU memory for the tensors of the network."""
DEVICE_SHARE = 0.8
"""Share of the free memory of a GPU that is used."""
KERNEL_FACTOR = 1.5
"""Allowance for workspaces of kernels, which the recorder does not see."""
BYTES_PER_PX = 1200
"""Assumed for exported files, whose tensors cannot be recorded."""
MIN_SIDE_PX = 128
MARGIN = 1 / 8
"""Width around the core, as a share of the side of a tile."""
_PROBE_PX = 256


@dataclass
class Workspace:
    """Number of pixels that can be predicted at once.

    Attributes:
        max_px: total over the pictures of a batch.
    """

    max_px: int

    def halve(self) -> None:
        """Halve the number of pixels after an out-of-memory error.

        Raises:
            OutOfMemoryError: tiles have their smallest size already.
        """
        if self.max_px <= MIN_SIDE_PX**2:
            raise OutOfMemoryError(
                f"a tile of {MIN_SIDE_PX}x{MIN_SIDE_PX} px does not fit into memory: free memory on the device, or "
                "predict on another (parallel.devices)"
            )
        self.max_px = max(self.max_px // 2, MIN_SIDE_PX**2)


def plan_workspace(predictor: Predictor) -> Workspace:
    """Return the workspace by the free memory and the memory that the network needs per pixel."""
    budget = float(min(MAX_HOST_BYTES, (available_bytes() or MAX_HOST_BYTES) // 2))
    if predictor.device.type == "cuda":
        budget = DEVICE_SHARE * torch.cuda.mem_get_info(predictor.device)[0]
    return Workspace(max(MIN_SIDE_PX**2, int(budget / _bytes_per_px(predictor))))


def _bytes_per_px(predictor: Predictor) -> float:
    """Return the peak memory of a prediction per pixel, recorded on a small image."""
    if not isinstance(predictor, TrainedPredictor):
        return BYTES_PER_PX * max(1.0, predictor.scheme.num_classes / 20)
    inference, model = predictor.inference, predictor.model
    height, width = model.suitable_size(_PROBE_PX, _PROBE_PX)
    # Views and windows are computed one after the other; only low-resolution logits of each are kept.
    plain = replace(inference, scales=(1.0,), flip=False, window_px=model.fixed_size_px)
    with Recorder() as recorder:
        infer_labels(model, plain, np.zeros((1, height, width, 3), np.uint8), predictor.device)
    peaks = recorder.peaks().get(str(predictor.device), {})
    peak = max((moment.num_bytes for moment in peaks.values()), default=0)
    return KERNEL_FACTOR * max(1.0, *inference.scales) ** 2 * peak / (height * width)


@dataclass(frozen=True)
class Strip:
    """Rows of a prediction over the whole width.

    Attributes:
        rows: range of the rows in the picture.
        labels: (R, W) class ids.
        probabilities: float32 (C, R, W), if requested.
    """

    rows: slice
    labels: NDArray[Any]
    probabilities: NDArray[Any] | None = None


def predict_strips(
    predictor: Predictor, image: NDArray[Any], workspace: Workspace, *, with_probabilities: bool = False
) -> Iterator[Strip]:
    """Yield the prediction of a picture of any size from top to bottom; one strip if it fits into the workspace.

    Args:
        predictor: the network.
        image: uint8 (H, W, 3) RGB.
        workspace: number of pixels that fit; halved after an out-of-memory error.
        with_probabilities: compute probabilities too.
    """
    height, width = image.shape[:2]
    done = 0
    while done < height:
        frame = _frame(predictor, (height, width), workspace)
        rows = next(core for core in _cores(height, frame[0]) if core[2] > done)
        try:
            yield _strip(predictor, image, frame, rows, done, with_probabilities=with_probabilities)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            torch.cuda.empty_cache()
            workspace.halve()
            continue
        done = rows[2]


def _frame(predictor: Predictor, size: tuple[int, int], workspace: Workspace) -> tuple[int, int]:
    """Return height and width of a tile, margins included."""
    if predictor.frame_px is not None:
        return predictor.frame_px
    if size[0] * size[1] <= workspace.max_px:
        return size
    side = max(MIN_SIDE_PX, math.isqrt(workspace.max_px) // 64 * 64)
    height = min(size[0], side)
    return height, min(size[1], max(side, workspace.max_px // height // 64 * 64))


def _cores(side: int, frame: int) -> list[tuple[int, int, int]]:
    """Return (start of the tile, start of its core, end of its core) along one axis; the cores cover the axis."""
    if frame >= side:
        return [(0, 0, side)]
    margin = int(frame * MARGIN)
    starts = [*range(0, side - frame, frame - 2 * margin), side - frame]
    edges = [0, *((a + frame + b) // 2 for a, b in itertools.pairwise(starts)), side]
    return [(start, edges[i], edges[i + 1]) for i, start in enumerate(starts)]


def _strip(
    predictor: Predictor,
    image: NDArray[Any],
    frame: tuple[int, int],
    rows: tuple[int, int, int],
    done: int,
    *,
    with_probabilities: bool,
) -> Strip:
    top, first, last = rows[0], max(rows[1], done), rows[2]
    labels, probabilities = [], []
    for left, start, stop in _cores(image.shape[1], frame[1]):
        tile = image[top : top + frame[0], left : left + frame[1]]
        inner = slice(first - top, last - top), slice(start - left, stop - left)
        if with_probabilities:
            values = predictor.probabilities(_pad_to(tile, predictor.frame_px)[None])[0][:, *inner]
            probabilities.append(values)
            labels.append(values.argmax(0).astype(np.uint8 if len(values) <= 256 else np.uint16))
        else:
            labels.append(predictor.labels(_pad_to(tile, predictor.frame_px)[None])[0][inner])
    return Strip(slice(first, last), _joined(labels), _joined(probabilities) if with_probabilities else None)


def _pad_to(tile: NDArray[Any], frame: tuple[int, int] | None) -> NDArray[Any]:
    """Return a tile (H, W, 3) padded to the only accepted size, by repeating its edge at the bottom and right."""
    if frame is None or tile.shape[:2] == frame:
        return tile
    missing = [(0, wanted - there) for wanted, there in zip(frame, tile.shape[:2], strict=True)]
    return np.pad(tile, (*missing, (0, 0)), mode="edge")


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
