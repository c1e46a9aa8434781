"""Optimizers in torch's fused form, their state allocated before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def adamw(groups: Sequence[Mapping[str, Any]], lr: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Return a fused AdamW over parameter groups, its state allocated.

    Fused, because that implementation takes `found_inf`: a tensor on the device that skips the step without a host
    synchronisation.
    """
    optimizer = torch.optim.AdamW([dict(g) for g in groups], lr=lr, betas=betas, fused=True)
    allocate_adam_state(optimizer)
    return optimizer


def allocate_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state of Adam as its first step does, so that no update can run out of memory half way."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def sgd(
    groups: Sequence[Mapping[str, Any]], lr: float, *, momentum: float = 0.0, nesterov: bool = False
) -> torch.optim.Optimizer:
    """Return a fused SGD over parameter groups, its momentum buffers allocated; see `adamw`."""
    optimizer = torch.optim.SGD([dict(g) for g in groups], lr=lr, momentum=momentum, nesterov=nesterov, fused=True)
    if momentum:
        # torch allocates momentum buffers uninitialised at the first step and leaves them so when that step is skipped.
        # From zeros the first step is the same one: momentum * 0 + gradient.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's learning rate to lr times its `lr_factor`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
