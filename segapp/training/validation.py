"""The evaluation of a training on its validation split."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from segapp.inference.evaluate import Evaluation, EvaluationSettings, evaluate
from segapp.inference.sliding import Inference
from segapp.inference.spread import further_devices
from segapp.inference.workspace import HostLimit
from segapp.training.recovery.fallbacks import MemoryFallbacks
from segapp.training.step.engine import StepEngine
from segapp.training.step.precise_bn import PreciseBatchNorm
from segapp.training.telemetry.sample_images import SamplePictures

if TYPE_CHECKING:
    from segapp.datasets.layouts.schemes import ClassScheme
    from segapp.datasets.loader import EvalLoader
    from segapp.models import SegmentationModel


class Validation:
    """Evaluates the model of a training, or the average of its weights.

    Args:
        engine: whose model is evaluated, and whose ranks share the images.
        loader: whole images, each once.
        inference: how logits are computed.
        scheme: of the classes.
        precise_bn: recomputes BatchNorm's statistics first; None: they are as training left them.
        samples: draws sample pictures after an evaluation; None: none.
    """

    def __init__(
        self,
        engine: StepEngine,
        loader: EvalLoader,
        inference: Inference,
        scheme: ClassScheme,
        *,
        precise_bn: PreciseBatchNorm | None = None,
        samples: SamplePictures | None = None,
    ) -> None:
        self.loader = loader
        self._engine, self._inference, self._scheme = engine, inference, scheme
        self._precise_bn, self._samples = precise_bn, samples
        self._others = further_devices(engine.network)
        self._host = HostLimit(engine.ranks.world_size * (1 + len(self._others)))
        self._num_checks = max(engine.ranks.gather(len(loader)))

    @property
    def model(self) -> SegmentationModel:
        """The evaluated model."""
        average = self._engine.average
        return self._engine.model if average is None else average.module

    @property
    def num_images(self) -> int:
        """Images of an evaluation, over all ranks."""
        return len(self.loader.dataset)

    def run(
        self, fallbacks: MemoryFallbacks, check: Callable[[], None], progress: Callable[[int], None] = lambda _: None
    ) -> Evaluation:
        """Evaluate once.

        Args:
            fallbacks: how to save memory.
            check: called before every batch; may raise to leave.
            progress: called with the number of images that all ranks have evaluated, as far as this one knows.

        Raises:
            torch.OutOfMemoryError: another rank ran out of memory; this one raises its own error, whatever its type.
        """
        if self._precise_bn is not None:
            self._precise_bn.recompute(self.model, self._inference, self._engine.device, fallbacks.num_bn_pieces)
        check()
        settings = EvaluationSettings(
            fallbacks.adapted(self._inference),
            self._scheme.num_classes,
            self._scheme.ignore_index,
            self._engine.device,
            self._engine.criterion.task,
            is_single=fallbacks.is_eval_single,
            host=self._host,
            other_devices=self._others,
        )
        self.loader.reads_windows = settings.reads_windows
        ranks, count = self._engine.ranks, self._num_checks
        return evaluate(
            self.model,
            self.loader,
            settings,
            check=check,
            progress=lambda num_own: progress(num_own * ranks.world_size),
            ranks=ranks,
            num_checks=count,
        )

    def draw_samples(self, epoch: int, fallbacks: MemoryFallbacks) -> None:
        """Draw the sample pictures of an epoch."""
        if self._samples is not None:
            self._samples.draw(self.model, epoch, fallbacks.adapted, self._host)
