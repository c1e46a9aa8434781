"""BatchNorm statistics from a fixed number of batches under the present weights (`train.precise_bn`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from segapp.accelerator import random_states_kept
from segapp.compat.torch import BatchNorm
from segapp.inference.sliding import Inference
from segapp.memory.oom import is_out_of_memory
from segapp.parallel import SampleMasks, sample_masks
from segapp.training.step.rollback import BufferGuard

if TYPE_CHECKING:
    from segapp.datasets.loader import TrainLoader


class BatchNormMemoryError(torch.OutOfMemoryError):
    """Memory does not suffice to recompute BatchNorm's statistics."""


def recompute_batchnorm(model: nn.Module, inputs: Iterable[tuple[Tensor, Tensor | None]], device: torch.device) -> None:
    """Replace BatchNorm's running statistics by statistics of the inputs; random states are restored afterwards.

    The inputs are images, each with the keys of the samples' dropout masks (see `segapp.parallel.dropout`) or None.

    Layers in evaluation mode, such as frozen ones, keep their statistics and normalize with them, which torch's
    `update_bn` does not support. The model is left in its previous mode.

    Raises:
        BatchNormMemoryError: memory does not suffice; the statistics are unchanged.
    """
    guard = BufferGuard(model)
    was_training = model.training
    model.train()
    momenta = {m: m.momentum for m in model.modules() if isinstance(m, BatchNorm) and m.training}
    try:
        for module in momenta:
            module.reset_running_stats()
            module.momentum = None  # the mean over all calls
        with torch.no_grad(), random_states_kept([device]):
            for images, keys in inputs if momenta else ():
                with sample_masks(keys):
                    model(images)
    except BaseException as error:
        guard.restore()
        if is_out_of_memory(error):
            raise BatchNormMemoryError(str(error)) from error
        raise
    finally:
        for module, momentum in momenta.items():
            module.momentum = momentum
        model.train(was_training)


class PreciseBatchNorm:
    """Recomputes outdated running statistics from fixed training batches with the present weights.

    Epoch 0 of the loader is never used for training, so its batches are the same at every call.
    """

    def __init__(self, loader: TrainLoader, num_batches: int, masks: SampleMasks | None = None) -> None:
        self._loader, self._num_batches, self._masks = loader, min(num_batches, len(loader)), masks

    def recompute(self, model: nn.Module, inference: Inference, device: torch.device, num_pieces: int) -> None:
        """Replace the running statistics of a model on `device`.

        Raises:
            BatchNormMemoryError: memory does not suffice; the statistics are unchanged.
        """
        with inference.autocast():
            recompute_batchnorm(model, self._inputs(inference, device, num_pieces), device)

    def _inputs(
        self, inference: Inference, device: torch.device, num_pieces: int
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        for batch in islice(self._loader.epoch(0), self._num_batches):
            keys = None if self._masks is None else self._masks.keys(batch.epoch, batch.first, len(batch))
            of_pieces = [None] * num_pieces if keys is None else keys.tensor_split(num_pieces)
            for images, own in zip(batch.images.tensor_split(num_pieces), of_pieces, strict=True):
                yield inference.normalizer(images.to(device)), own
