"""Whether the weights are updated: not where a value of the step is not finite."""

from __future__ import annotations

import torch
from torch import Tensor


def may_update(optimizer: torch.optim.Optimizer, is_bad: Tensor) -> bool:
    """Return False if a step is bad and the optimizer would update the weights nevertheless.

    torch's fused optimizers are told by `found_inf`, on the device, and leave everything as it is. For others, of the
    user's own code, the host reads the value, which waits for the step, as torch's `GradScaler` does.

    Args:
        optimizer: of the step.
        is_bad: 0-dim float tensor, 0 or 1.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = is_bad  # type: ignore[attr-defined]
        return True
    return type(is_bad) is not Tensor or not bool(is_bad)  # a simulated tensor has no value
