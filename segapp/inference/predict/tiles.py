"""Prediction of images that do not fit into memory: overlapping tiles, of which only the core is kept.

Images that fit are predicted whole, so that networks with global context see the whole image.

Shapes: B bands, C classes, H x W pixels of an image, R rows of a strip.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.accelerator import accelerator_of, gpu_of
from segapp.inference.predict.predictor import EnsemblePredictor, Predictor, TrainedPredictor, likeliest
from segapp.inference.workspace import (
    Workspace,
    host_budget,
    measure_bytes_per_px,
    pixels_within,
    tile_cores,
    tile_frame,
)
from segapp.memory.oom import is_out_of_memory

DEVICE_SHARE = 0.8
"""Share of a GPU's free memory that is used."""
BYTES_PER_PX = 1200
"""Assumed for exported files, whose tensors cannot be recorded."""


def plan_workspace(predictor: Predictor) -> Workspace:
    """Return the workspace, from the free memory and the memory that the network needs per pixel."""
    budget = float(host_budget())
    if gpu := gpu_of(predictor.device):
        budget = DEVICE_SHARE * gpu.free_and_total_bytes(predictor.device)[0]
    return Workspace(pixels_within(budget, _bytes_per_px(predictor)))


def _bytes_per_px(predictor: Predictor) -> float:
    """Return the peak memory of a prediction per pixel."""
    if isinstance(predictor, TrainedPredictor):
        return measure_bytes_per_px(predictor.model, predictor.inference, predictor.device)
    if not isinstance(predictor, EnsemblePredictor):
        return BYTES_PER_PX * max(1.0, predictor.scheme.num_classes / 20)
    peaks = []
    for member in predictor.members:
        with predictor.on_device(member):
            peaks.append(_bytes_per_px(member))
    # The sum of the probabilities and one member's probabilities, both float32, while that member computes.
    return max(peaks) + 2 * 4 * predictor.scheme.num_classes


@dataclass(frozen=True)
class Strip:
    """Rows of a prediction over the whole width: class ids (R, W) and, if requested, probabilities (C, R, W)."""

    rows: slice
    labels: NDArray[Any]
    probabilities: NDArray[Any] | None = None


def predict_strips(
    predictor: Predictor, image: NDArray[Any], workspace: Workspace, *, with_probabilities: bool = False
) -> Iterator[Strip]:
    """Yield the prediction of an image (H, W, B) from top to bottom, in strips that fit into the workspace.

    The workspace is halved after an out-of-memory error.
    """
    height, width = image.shape[:2]
    done = 0
    while done < height:
        frame = predictor.frame_px or tile_frame((height, width), workspace.max_px)
        rows = next(core for core in tile_cores(height, frame[0]) if core[2] > done)
        try:
            yield _strip(predictor, image, frame, rows, done, with_probabilities=with_probabilities)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            accelerator_of(predictor.device).empty_cache()
            workspace.halve()
            continue
        done = rows[2]


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
    for left, start, stop in tile_cores(image.shape[1], frame[1]):
        tile = image[top : top + frame[0], left : left + frame[1]]
        if predictor.frame_px is not None and tile.shape[:2] != frame:
            bottom, right = frame[0] - tile.shape[0], frame[1] - tile.shape[1]
            tile = np.pad(tile, ((0, bottom), (0, right), (0, 0)), mode="edge")
        inner = slice(first - top, last - top), slice(start - left, stop - left)
        if with_probabilities:
            values = predictor.probabilities(tile[None])[0][:, *inner]
            probabilities.append(values)
            labels.append(likeliest(values[None], predictor.threshold)[0])
        else:
            labels.append(predictor.labels(tile[None])[0][inner])
    return Strip(slice(first, last), _joined(labels), _joined(probabilities) if with_probabilities else None)


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
