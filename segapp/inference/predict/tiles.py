"""Pictures larger than the memory: cut into blocks with a margin, of which only the core is kept.

Whole pictures are predicted whole where they fit, so that a network that looks at the whole image sees it.
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

from segapp.datasets.dataset import available_bytes
from segapp.errors import OutOfMemoryError
from segapp.inference.predict.predictor import Predictor, TrainedPredictor, infer_labels
from segapp.memory.simulation.recorder import Recorder

MAX_HOST_BYTES = 2 << 30
"""What the network's tensors may take of the host's memory, however much there is."""
DEVICE_SHARE = 0.8
"""Of an accelerator's free memory."""
KERNEL_FACTOR = 1.5
"""What kernels take beside the tensors that are seen."""
BYTES_PER_PX = 1200
"""Taken for a network that cannot be looked into."""
MIN_SIDE_PX = 128
MARGIN = 1 / 8
"""Of a block's side, around its core."""
_PROBE_PX = 256


@dataclass
class Workspace:
    """How many pixels may be predicted at once.

    Attributes:
        max_px: pixels of all pictures of a batch together.
    """

    max_px: int

    def halve(self) -> None:
        """After an out-of-memory.

        Raises:
            OutOfMemoryError: blocks are as small as they get.
        """
        if self.max_px <= MIN_SIDE_PX**2:
            raise OutOfMemoryError(
                f"a block of {MIN_SIDE_PX}x{MIN_SIDE_PX} px does not fit into memory: free memory on the device, or "
                "predict on another (parallel.devices)"
            )
        self.max_px = max(self.max_px // 2, MIN_SIDE_PX**2)


def plan_workspace(predictor: Predictor) -> Workspace:
    """From the memory that is free, and what the network needs a pixel."""
    budget = float(min(MAX_HOST_BYTES, (available_bytes() or MAX_HOST_BYTES) // 2))
    if predictor.device.type == "cuda":
        budget = DEVICE_SHARE * torch.cuda.mem_get_info(predictor.device)[0]
    return Workspace(max(MIN_SIDE_PX**2, int(budget / _bytes_per_px(predictor))))


def _bytes_per_px(predictor: Predictor) -> float:
    """Peak of the tensors of one prediction, by looking at a small one."""
    if not isinstance(predictor, TrainedPredictor):
        return BYTES_PER_PX * max(1.0, predictor.scheme.num_classes / 20)
    inference, model = predictor.inference, predictor.model
    height, width = model.suitable_size(_PROBE_PX, _PROBE_PX)
    # Views and windows come one after the other; what stays of each are its low-resolution logits.
    plain = replace(inference, scales=(1.0,), flip=False, window_px=model.fixed_size_px)
    with Recorder() as recorder:
        infer_labels(model, plain, np.zeros((1, height, width, 3), np.uint8), predictor.device)
    peaks = recorder.peaks().get(str(predictor.device), {})
    peak = max((moment.num_bytes for moment in peaks.values()), default=0)
    return KERNEL_FACTOR * max(1.0, *inference.scales) ** 2 * peak / (height * width)


@dataclass(frozen=True)
class Strip:
    """Some rows of a prediction, over the picture's whole width.

    Attributes:
        rows: which rows.
        labels: (R, W) class ids.
        probabilities: float32 (C, R, W), where they were asked for.
    """

    rows: slice
    labels: NDArray[Any]
    probabilities: NDArray[Any] | None = None


def predict_strips(
    predictor: Predictor, image: NDArray[Any], workspace: Workspace, *, with_probabilities: bool = False
) -> Iterator[Strip]:
    """The prediction of a picture of any size, from top to bottom; whole if it fits into the workspace.

    Args:
        predictor: answers.
        image: uint8 (H, W, 3) RGB.
        workspace: what fits; is made smaller where it turns out not to.
        with_probabilities: give them too.
    """
    height, width = image.shape[:2]
    done = 0
    while done < height:
        frame = _frame(predictor, (height, width), workspace)
        rows = next(core for core in _cores(height, frame[0]) if core[2] > done)
        try:
            yield _strip(predictor, image, frame, rows, done, with_probabilities=with_probabilities)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            workspace.halve()
            continue
        done = rows[2]


def _frame(predictor: Predictor, size: tuple[int, int], workspace: Workspace) -> tuple[int, int]:
    """Height and width of a block, margins included."""
    if predictor.frame_px is not None:
        return predictor.frame_px
    if size[0] * size[1] <= workspace.max_px:
        return size
    side = max(MIN_SIDE_PX, math.isqrt(workspace.max_px) // 64 * 64)
    height = min(size[0], side)
    return height, min(size[1], max(side, workspace.max_px // height // 64 * 64))


def _cores(side: int, frame: int) -> list[tuple[int, int, int]]:
    """(first pixel of the block, first and last + 1 of its core) along one axis; cores lie side by side."""
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
        block = image[top : top + frame[0], left : left + frame[1]]
        inner = slice(first - top, last - top), slice(start - left, stop - left)
        if with_probabilities:
            values = predictor.probabilities(_filled(block, predictor.frame_px)[None])[0][:, *inner]
            probabilities.append(values)
            labels.append(values.argmax(0).astype(np.uint8 if len(values) <= 256 else np.uint16))
        else:
            labels.append(predictor.labels(_filled(block, predictor.frame_px)[None])[0][inner])
    return Strip(slice(first, last), _joined(labels), _joined(probabilities) if with_probabilities else None)


def _filled(block: NDArray[Any], frame: tuple[int, int] | None) -> NDArray[Any]:
    """A block at the one size that a predictor takes; its edge is repeated at the bottom and right."""
    if frame is None or block.shape[:2] == frame:
        return block
    missing = [(0, wanted - there) for wanted, there in zip(frame, block.shape[:2], strict=True)]
    return np.pad(block, (*missing, (0, 0)), mode="edge")


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
