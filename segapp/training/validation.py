"""The evaluation of a training on its validation split, and its sample images."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from segapp.config import LiveSettings
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.loader import EvalLoader
from segapp.datasets.pool import Batch
from segapp.inference.drawing import colorize, colorize_target, draw_batch, encode_png, fitted, resized
from segapp.inference.evaluate import Evaluation, EvaluationSettings, evaluate
from segapp.inference.predict.predictor import predict_image
from segapp.inference.sliding import Inference
from segapp.inference.workspace import HostLimit
from segapp.models import SegmentationModel
from segapp.run.files import write_atomic
from segapp.run.folder import FIRST_BATCH
from segapp.run.words import first_line
from segapp.training.step.engine import StepEngine

PANEL_PX = 320
"""Longest side of each of the three images."""

logger = logging.getLogger("segapp")


class SamplePictures:
    """Writes `epoch_NNNN_k.png` for the same few validation images after every evaluation, and `first_batch.png`."""

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
        window_px: tuple[int, int] | None = None,
        host: HostLimit | None = None,
    ) -> None:
        """Predict and write the pictures; errors are logged, and the training continues."""
        was_training = model.training
        model.eval()
        inference = self.inference.within(window_px)
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
        scheme, rgb = self.dataset.scheme, self.dataset.pixels.as_rgb(image)
        rgb, prediction, target = resized(fitted(target.shape, PANEL_PX), rgb, prediction, target)
        panels = [rgb, colorize(prediction, scheme), colorize_target(target, scheme)]
        write_atomic(path, encode_png(np.concatenate(panels, axis=1)))

    def draw_first(self, batch: Batch) -> list[str]:
        """Write `first_batch.png`; return a sentence if it cannot be drawn."""
        if not len(batch):
            return ["there is no picture of the first batch: the main rank has no samples"]
        try:
            preprocessing = copy.deepcopy(self.inference.preprocessing).cpu()  # nothing waits for the device
            write_atomic(self.folder / FIRST_BATCH, encode_png(draw_batch(batch, preprocessing, self.dataset.scheme)))
        except Exception as error:
            logger.exception("picture of the first batch")
            return [f"there is no picture of the first batch: {first_line(error)}"]
        return []


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
        self._engine, self._inference, self.scheme = engine, inference, scheme
        self._samples = samples
        self._others = engine.network.further_devices
        self._host = HostLimit(engine.ranks.world_size * (1 + len(self._others)))
        self._num_checks = max(engine.ranks.gather(len(loader)))

    def prepare(self, live: LiveSettings) -> None:
        """Let the data workers load the first batches of the next evaluation."""
        self.loader.prepare(reads_windows=self._settings(live).reads_windows)

    def run(
        self, live: LiveSettings, check: Callable[[], None], progress: Callable[[int], None] = lambda _: None
    ) -> Evaluation:
        """Evaluate once; `check` is called before every batch and may raise to leave.

        `progress` is called with the number of images that all ranks have evaluated, as estimated by this one.

        Raises:
            torch.OutOfMemoryError: another rank ran out of memory. A rank that fails itself raises its own error.
        """
        check()
        ranks, settings = self._engine.ranks, self._settings(live)
        return evaluate(
            self._engine.update.evaluated,
            self.loader.batches(reads_windows=settings.reads_windows),
            settings,
            check=check,
            progress=lambda num_own: progress(num_own * ranks.world_size),
            ranks=ranks,
            num_checks=self._num_checks,
        )

    def _settings(self, live: LiveSettings) -> EvaluationSettings:
        return EvaluationSettings(
            self._inference.within(live.window_px),
            self.scheme.num_classes,
            self.scheme.ignore_index,
            self._engine.device,
            self._engine.criterion.task,
            is_single=live.is_eval_single,
            host=self._host,
            other_devices=self._others,
        )

    def draw_first_batch(self, batch: Batch) -> list[str]:
        """Draw the first batch of the training on the main rank; return a sentence if it cannot be drawn."""
        return [] if self._samples is None else self._samples.draw_first(batch)

    def draw_samples(self, epoch: int, live: LiveSettings) -> None:
        """Draw the sample pictures of an epoch; every rank must call it."""
        if self._samples is not None:
            self._samples.draw(self._engine.update.evaluated, epoch, live.window_px, self._host)
