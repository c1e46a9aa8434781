"""The evaluation of a training on its validation split, and its sample images."""

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
from segapp.inference.evaluate import Evaluation, EvaluationSettings, evaluate
from segapp.inference.predict.outputs import colorize
from segapp.inference.predict.predictor import predict_image
from segapp.inference.sliding import Inference
from segapp.inference.workspace import HostLimit
from segapp.run.files import write_atomic
from segapp.training.recovery import MemoryFallbacks
from segapp.training.step.engine import StepEngine

if TYPE_CHECKING:
    from segapp.datasets.layouts.schemes import ClassScheme
    from segapp.datasets.loader import EvalLoader
    from segapp.models import SegmentationModel


PANEL_PX = 320
"""Longest side of each of the three images."""

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
        """Predict and write the pictures; errors are logged, and the training continues."""
        was_training = model.training
        model.eval()
        inference = adapted(self.inference)
        try:
            for number, index in enumerate(self.indices):
                sample = self.dataset[(0, index)]
                image = sample.image.permute(1, 2, 0).numpy()
                prediction = predict_image(model, inference, image, self.device, host)
                path = self.folder / f"epoch_{epoch:04}_{number}.png"
                self._write(path, image, prediction, sample.target.numpy().astype(np.int64))
        except Exception:
            logger.exception("sample pictures of epoch %d", epoch)
        finally:
            model.train(was_training)

    def _write(self, path: Path, image: NDArray[Any], prediction: NDArray[Any], target: NDArray[Any]) -> None:
        scheme = self.dataset.scheme
        is_ignored = target == scheme.ignore_index
        truth = colorize(np.where(is_ignored, 0, target), scheme)
        truth[is_ignored] = 0
        joined = side_by_side([self.dataset.pixels.as_rgb(image), colorize(prediction, scheme), truth])
        is_encoded, data = cv2.imencode(".png", np.ascontiguousarray(joined[..., ::-1]))
        if is_encoded:
            write_atomic(path, data.tobytes())


def side_by_side(pictures: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return images of one size (H, W, 3) next to each other, each reduced to `PANEL_PX` on its longest side.

    The first is interpolated; the others, in class colors, use the nearest pixel.

    >>> side_by_side([np.zeros((640, 320, 3), np.uint8)] * 3).shape
    (320, 480, 3)
    """
    height, width = pictures[0].shape[:2]
    scale = min(1.0, PANEL_PX / max(height, width))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    first = cv2.resize(pictures[0], size, interpolation=cv2.INTER_AREA)
    others = [cv2.resize(picture, size, interpolation=cv2.INTER_NEAREST) for picture in pictures[1:]]
    return np.concatenate([first, *others], axis=1)


class Validation:
    """Evaluates the model of a training, or the average of its weights."""

    def __init__(
        self,
        engine: StepEngine,
        loader: EvalLoader,
        inference: Inference,
        scheme: ClassScheme,
        *,
        samples: SamplePictures | None = None,
    ) -> None:
        self.loader = loader
        self._engine, self._inference, self._scheme = engine, inference, scheme
        self._samples = samples
        self._others = engine.network.further_devices
        self._host = HostLimit(engine.ranks.world_size * (1 + len(self._others)))
        self._num_checks = max(engine.ranks.gather(len(loader)))

    def prepare(self, fallbacks: MemoryFallbacks) -> None:
        """Let the data workers load the first batches of the next evaluation."""
        self.loader.prepare(reads_windows=self._settings(fallbacks).reads_windows)

    def run(
        self, fallbacks: MemoryFallbacks, check: Callable[[], None], progress: Callable[[int], None] = lambda _: None
    ) -> Evaluation:
        """Evaluate once; `check` is called before every batch and may raise to leave.

        `progress` is called with the number of images that all ranks have evaluated, as estimated by this one.

        Raises:
            torch.OutOfMemoryError: another rank ran out of memory. A rank that fails itself raises its own error.
        """
        check()
        ranks, settings = self._engine.ranks, self._settings(fallbacks)
        return evaluate(
            self._engine.update.evaluated,
            self.loader.batches(reads_windows=settings.reads_windows),
            settings,
            check=check,
            progress=lambda num_own: progress(num_own * ranks.world_size),
            ranks=ranks,
            num_checks=self._num_checks,
        )

    def _settings(self, fallbacks: MemoryFallbacks) -> EvaluationSettings:
        return EvaluationSettings(
            fallbacks.adapted(self._inference),
            self._scheme.num_classes,
            self._scheme.ignore_index,
            self._engine.device,
            self._engine.criterion.task,
            is_single=fallbacks.is_eval_single,
            host=self._host,
            other_devices=self._others,
        )

    def draw_samples(self, epoch: int, fallbacks: MemoryFallbacks) -> None:
        """Draw the sample pictures of an epoch; every rank must call it."""
        if self._samples is not None:
            self._samples.draw(self._engine.update.evaluated, epoch, fallbacks.adapted, self._host)
