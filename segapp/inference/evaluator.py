"""Counters for the evaluation of trained models: in windows if memory is short, or of the mean of several models.

Shapes: N images, C classes, H x W pixels of an image.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from segapp.accelerator import accelerator_of
from segapp.datasets.dataset import TensorOnDisk
from segapp.errors import OutOfMemoryError
from segapp.inference.evaluate import DeviceCounter, EvaluationSettings, evaluate_parts
from segapp.inference.predict.predictor import EnsemblePredictor, plan_workspace, predict_strips
from segapp.inference.sliding import Inference
from segapp.memory.oom import is_out_of_memory
from segapp.models import SegmentationModel

MIN_WINDOW_PX = 64


class Evaluator(DeviceCounter):
    """Counter for one device; if the device runs out of memory, windows are used."""

    @torch.no_grad()
    def count(self, images: Tensor | TensorOnDisk, target: Tensor | TensorOnDisk) -> None:
        """Add the counts of images, computed whole or in windows that are halved after each out-of-memory error.

        Raises:
            OutOfMemoryError: not even the smallest window fits.
        """
        height, width = images.shape[-2:]
        inference = self.settings.inference
        while True:
            try:
                # All parts are computed before the first is counted.
                settings = replace(self.settings, inference=inference)
                parts = list(evaluate_parts(self.model, images, target, settings))
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                accelerator_of(self.settings.device).empty_cache()
            inference = self._smaller(inference, inference.seen_px((height, width)), len(images))
        for counts, statistics in parts:
            self.counts.add(counts, statistics)

    def _smaller(self, inference: Inference, size: tuple[int, int], num_images: int) -> Inference:
        """Return an inference whose windows have half the side."""
        height, width = inference.window_px or size
        if self.model.fixed_size_px is not None or max(height, width) <= MIN_WINDOW_PX:
            raise OutOfMemoryError(
                f"{self.settings.device}: a window of {height}x{width} px of {num_images} images does not fit: "
                "free memory, lower eval.batch_size, or name other --devices",
                key="eval.batch_size",
                value=num_images,
            )
        window = max(MIN_WINDOW_PX, height // 2), max(MIN_WINDOW_PX, width // 2)
        self.notes.append(
            f"images that do not fit into the memory of {self.settings.device} were evaluated in windows of "
            f"{window[0]}x{window[1]} px"
        )
        return replace(inference, window_px=window)


class EnsembleEvaluator(Evaluator):
    """Evaluation of the mean of several networks, image by image, exactly as in prediction.

    The settings give the classes; their inference and criterion are not used, so there is no loss.
    """

    def __init__(self, predictor: EnsemblePredictor, model: SegmentationModel, settings: EvaluationSettings) -> None:
        super().__init__(model, settings)
        self._predictor, self._workspace = predictor, plan_workspace(predictor)

    @torch.no_grad()
    def count(self, images: Tensor | TensorOnDisk, target: Tensor | TensorOnDisk) -> None:
        """Evaluate images and add the counts of their pixels.

        Raises:
            torch.OutOfMemoryError: not even a small tile fits.
        """
        assert isinstance(images, Tensor)  # the loader reads no windows for an ensemble
        if images.shape[-2] * images.shape[-1] > self._workspace.max_px:
            self.notes.append("images that do not fit into memory were evaluated in overlapping tiles")
        for number, image in enumerate(images):
            for strip in predict_strips(self._predictor, image.permute(1, 2, 0).numpy(), self._workspace):
                found = torch.from_numpy(strip.labels.astype(np.int64))[None]
                self.counts.confusion.update(found, target[..., strip.rows, :][number : number + 1])
