"""BatchNorm statistics from a fixed number of batches under the present weights (`train.precise_bn`)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from segapp.train.step.rollback import BufferGuard


class BatchNormMemoryError(torch.OutOfMemoryError):
    """There was not memory enough to recompute BatchNorm's statistics."""


def recompute_batchnorm(model: nn.Module, inputs: Iterable[Tensor], device: torch.device) -> None:
    """Replaces BatchNorm's running statistics by those of the inputs; dropout's random numbers are put back.

    Args:
        model: on `device`.
        inputs: normalised images (N, 3, H, W).
        device: where they are.

    Raises:
        BatchNormMemoryError: there was not memory enough; the statistics are as they were.
    """
    guard = BufferGuard(model)
    momenta = {m: m.momentum for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.optim.swa_utils.update_bn(inputs, model)
    except BaseException as error:
        guard.restore()
        for module, momentum in momenta.items():
            module.momentum = momentum
        if isinstance(error, torch.OutOfMemoryError):
            raise BatchNormMemoryError(str(error)) from error
        raise
