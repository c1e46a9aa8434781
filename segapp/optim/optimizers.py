"""Optimizers in torch's fused form, their state allocated before the first step.

Fused, because that implementation takes `found_inf`: a tensor on the device that skips the step without a host
synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn


def adamw(groups: Sequence[Mapping[str, Any]], lr: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Return AdamW over parameter groups: weight decay beside the gradient (Loshchilov & Hutter, 2019)."""
    return _with_state(torch.optim.AdamW([dict(g) for g in groups], lr=lr, betas=betas, fused=True))


def adam(groups: Sequence[Mapping[str, Any]], lr: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Return Adam over parameter groups: weight decay as a part of the gradient (L2), as torch has it."""
    return _with_state(torch.optim.Adam([dict(g) for g in groups], lr=lr, betas=betas, fused=True))


def sgd(
    groups: Sequence[Mapping[str, Any]], lr: float, *, momentum: float = 0.0, nesterov: bool = False
) -> torch.optim.Optimizer:
    """Return SGD over parameter groups."""
    return _with_state(
        torch.optim.SGD([dict(g) for g in groups], lr=lr, momentum=momentum, nesterov=nesterov, fused=True)
    )


def _with_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        allocate_state(optimizer, group["params"])
    return optimizer


def allocate_state(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Allocate the state of parameters, so that no update can run out of memory half way."""
    for parameter in parameters:
        if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        elif optimizer.defaults.get("momentum"):
            # torch allocates momentum buffers uninitialised at the first step and leaves them so when that step is
            # skipped. From zeros the first step is the same one: momentum * 0 + gradient.
            optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}


def add_groups(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> None:
    """Add parameter groups to an optimizer that has made steps, with fresh state and the learning rate of the others.

    Args:
        optimizer: its groups have the key `lr_factor`.
        groups: as those that it was made from.
    """
    first = optimizer.param_groups[0]
    lr = first["lr"] / first["lr_factor"]
    for group in groups:
        optimizer.add_param_group(dict(group))
        allocate_state(optimizer, group["params"])
    set_lr(optimizer, lr)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's learning rate to lr times its `lr_factor`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
