"""Sample pictures of a run, drawn after each evaluation: validation images as input | prediction | target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from segapp.datasets.dataset import SegmentationDataset
from segapp.inference.predict import colorize, predict_image
from segapp.inference.sliding import Inference
from segapp.inference.workspace import HostLimit
from segapp.losses import labels_of
from segapp.run.files import write_atomic

if TYPE_CHECKING:
    from segapp.models import SegmentationModel

PANEL_PX = 320
"""Longest side of each of the three pictures."""

logger = logging.getLogger("segapp")


class SamplePictures:
    """Writes `epoch_NNNN_k.png` for the same few validation images after every evaluation."""

    def __init__(
        self, folder: Path, dataset: SegmentationDataset, inference: Inference, device: torch.device, count: int = 3
    ) -> None:
        self.folder, self.dataset, self.inference, self.device = folder, dataset, inference, device
        last = len(dataset) - 1
        self.indices = sorted({round(i * last / max(1, count - 1)) for i in range(count)})

    def draw(
        self,
        model: SegmentationModel,
        epoch: int,
        adapted: Callable[[Inference], Inference] = lambda plain: plain,
        host: HostLimit | None = None,
    ) -> None:
        """Predict and write the pictures; errors are logged, and the training goes on."""
        was_training = model.training
        model.eval()
        inference = adapted(self.inference)
        try:
            for number, index in enumerate(self.indices):
                path = self.folder / f"epoch_{epoch:04}_{number}.png"
                self._write(lambda image: predict_image(model, inference, image, self.device, host), index, path)
        except Exception:
            logger.exception("sample pictures of epoch %d", epoch)
        finally:
            model.train(was_training)

    def _write(self, predict: Callable[[NDArray[Any]], NDArray[Any]], index: int, path: Path) -> None:
        sample = self.dataset[(0, index)]
        image = sample.image.permute(1, 2, 0).numpy()
        prediction = predict(image)
        scheme = self.dataset.scheme
        target = labels_of(sample.target[None])[0].numpy().astype(np.int64)
        known = np.where(target == scheme.ignore_index, 0, target)
        truth = colorize(known, scheme)
        truth[target == scheme.ignore_index] = 0
        joined = side_by_side([self.dataset.pixels.as_rgb(image), colorize(prediction, scheme), truth])
        is_encoded, data = cv2.imencode(".png", np.ascontiguousarray(joined[..., ::-1]))
        if is_encoded:
            write_atomic(path, data.tobytes())


def side_by_side(pictures: Sequence[NDArray[Any]], longest_px: int = PANEL_PX) -> NDArray[Any]:
    """Return pictures of one size (H, W, 3) side by side, each scaled down to the given longest side.

    The first is interpolated; the others, of class colours, take the nearest pixel.

    >>> side_by_side([np.zeros((640, 320, 3), np.uint8)] * 3).shape
    (320, 480, 3)
    """
    height, width = pictures[0].shape[:2]
    scale = min(1.0, longest_px / max(height, width))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    first = cv2.resize(pictures[0], size, interpolation=cv2.INTER_AREA)
    others = [cv2.resize(picture, size, interpolation=cv2.INTER_NEAREST) for picture in pictures[1:]]
    return np.concatenate([first, *others], axis=1)
