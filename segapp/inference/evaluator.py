"""Detailed evaluation of one or several trained models: on several devices, in windows if memory is short.

`segapp.inference.evaluate` is the evaluation during training.

Shapes: N images, C classes, H x W pixels of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segapp.accelerator import accelerator_of
from segapp.datasets.dataset import LargeBatch, TensorOnDisk
from segapp.datasets.pool import Batch
from segapp.errors import OutOfMemoryError
from segapp.inference.evaluate import (
    DeviceCounter,
    Evaluation,
    EvaluationSettings,
    copy_to,
    evaluate_parts,
    spread_over,
)
from segapp.inference.predict.predictor import EnsemblePredictor, TrainedPredictor, plan_workspace, predict_strips
from segapp.inference.sliding import Inference
from segapp.memory.oom import is_out_of_memory
from segapp.models import SegmentationModel

MIN_WINDOW_PX = 64


class Evaluator(DeviceCounter):
    """Evaluation on one device; if the device runs out of memory, windows are used."""

    def __init__(self, model: SegmentationModel, settings: EvaluationSettings) -> None:
        super().__init__(model, settings)
        self.notes: list[str] = []

    def on(self, device: torch.device) -> Evaluator:
        """Return an evaluator for another device, with copies of the model and the criterion and empty counts."""
        return Evaluator(copy_to(self.model, device), self.settings.on(device))

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
            inference = self._smaller(inference, (height, width), len(images))
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

    def __init__(self, predictor: EnsemblePredictor, settings: EvaluationSettings) -> None:
        first = predictor.members[0]
        assert isinstance(first, TrainedPredictor)
        super().__init__(first.model, settings)
        self._predictor, self._workspace = predictor, plan_workspace(predictor)

    @torch.no_grad()
    def add(self, batch: Batch | LargeBatch) -> None:
        """Evaluate the images of a batch and add their counts.

        Raises:
            torch.OutOfMemoryError: not even a small tile fits.
        """
        assert isinstance(batch, Batch)  # the loader reads no windows for an ensemble
        for image, target in zip(batch.images, batch.target, strict=True):
            self._count_strips(image.cpu().permute(1, 2, 0).numpy(), target)
            self.counts.num_images += 1

    def _count_strips(self, image: NDArray[Any], target: Tensor) -> None:
        if image.shape[0] * image.shape[1] > self._workspace.max_px:
            self.notes.append("images that do not fit into memory were evaluated in overlapping tiles")
        for strip in predict_strips(self._predictor, image, self._workspace):
            aim = target[..., strip.rows, :][None]
            found = torch.from_numpy(strip.labels.astype(np.int64))[None]
            self.counts.confusion.update(found, aim)


def evaluate_on_devices(
    evaluators: Sequence[Evaluator],
    batches: Iterable[Batch | LargeBatch],
    progress: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Distribute batches over devices in turn and sum their counts, which do not depend on the number of devices."""
    first = evaluators[0]
    with spread_over(evaluators) as add:
        for batch in batches:
            add(batch)
            progress(sum(evaluator.counts.num_images for evaluator in evaluators))
    counts = first.counts
    for other in evaluators[1:]:
        counts.merge(other.counts)
        first.notes += other.notes
    progress(counts.num_images)
    if first.settings.host is not None and (note := first.settings.host.take_note()) is not None:
        first.notes.append(note)
    return counts.result(sorted(set(first.notes)))
