"""Optimizers, the learning rate as a pure function of the step, and the average of the weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from segapp.config.sections import OptimConfig, ScheduleConfig

Module = TypeVar("Module", bound=nn.Module)
_NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


def lr_at(step: int, schedule: ScheduleConfig, *, lr: float, total_steps: int, steps_per_epoch: int) -> float:
    """The learning rate of a step; depends on nothing else, so a resumed run needs no scheduler state.

    Args:
        step: number of the step, from 1.
        schedule: shape of the curve.
        lr: the rate after warm-up.
        total_steps: steps of the whole run.
        steps_per_epoch: steps of one epoch (for `step`).

    Returns:
        `poly`: (lr - min_lr) (1 - t)^power + min_lr (Liu et al., ParseNet, 2015); `cosine`: half a cosine from lr to
        min_lr (Loshchilov & Hutter, SGDR, 2017); t runs from 0 at the first step towards 1 after the last. Warm-up
        multiplies by a line from `warmup_factor` to 1.
    """
    value = lr
    t = min((step - 1) / max(total_steps, 1), 1.0)
    if schedule.name == "poly":
        value = (lr - schedule.min_lr) * math.pow(1 - t, schedule.power) + schedule.min_lr
    elif schedule.name == "cosine":
        value = (lr - schedule.min_lr) * (1 + math.cos(math.pi * t)) / 2 + schedule.min_lr
    elif schedule.name == "step":
        epoch = (step - 1) // max(steps_per_epoch, 1)
        value = lr * math.pow(schedule.gamma, sum(epoch >= boundary for boundary in schedule.step_epochs))
    if step <= schedule.warmup_steps:
        value *= schedule.warmup_factor + (1 - schedule.warmup_factor) * (step - 1) / schedule.warmup_steps
    return value


def parameter_groups(
    backbone: Iterable[nn.Parameter],
    head: Iterable[nn.Parameter],
    no_decay: set[int],
    *,
    weight_decay: float,
    head_lr_factor: float,
) -> list[dict[str, Any]]:
    """Groups for an optimizer: {backbone, head} x {decay, no decay}, empty ones left out.

    Args:
        backbone: parameters that learn at lr.
        head: parameters that learn at lr x head_lr_factor.
        no_decay: `id` of the parameters without weight decay.
        weight_decay: of the others.
        head_lr_factor: kept in each group as `lr_factor`.
    """
    groups = []
    for parameters, factor in ((list(backbone), 1.0), (list(head), head_lr_factor)):
        for decays in (True, False):
            chosen = [p for p in parameters if p.requires_grad and (id(p) not in no_decay) == decays]
            if chosen:
                decay = weight_decay if decays else 0.0
                groups.append({"params": chosen, "lr_factor": factor, "weight_decay": decay})
    return groups


def norm_and_bias(model: nn.Module) -> set[int]:
    """`id` of every bias and of every weight of a normalisation layer."""
    found = {id(p) for m in model.modules() if isinstance(m, _NORM_LAYERS) for p in m.parameters(recurse=False)}
    return found | {id(p) for name, p in model.named_parameters() if name.rsplit(".", 1)[-1] == "bias"}


def build_optimizer(section: OptimConfig, groups: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer of a config section over parameter groups.

    It is the fused implementation, because that one takes `found_inf`: a tensor that says on the device, without a
    host synchronisation, that the step must not happen.
    """
    optimizer: torch.optim.Optimizer
    if section.name == "adamw":
        optimizer = torch.optim.AdamW([dict(g) for g in groups], lr=section.lr, betas=section.betas, fused=True)
        # As torch makes them in the first step; then no update allocates, and none can be left half way for want of it.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        return optimizer
    optimizer = torch.optim.SGD(
        [dict(g) for g in groups], lr=section.lr, momentum=section.momentum, nesterov=section.nesterov, fused=True
    )
    if section.momentum:
        # torch allocates momentum buffers uninitialised at the first step and leaves them so when that step is skipped.
        # From zeros the first step is the same one: momentum * 0 + gradient.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets every group's learning rate to lr times its `lr_factor`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]


class WeightAverage(Generic[Module]):
    """Exponential moving average of weights and floating-point buffers, kept as a second module.

    The decay warms up as min(decay, (1 + n) / (10 + n)), so that early updates are not drowned by the initial weights.
    A non-finite step does not enter (`is_bad`), decided on the device.
    """

    def __init__(self, model: Module, decay: float) -> None:
        self.decay = decay
        self.num_updates = 0
        self.module: Module = copy.deepcopy(model).eval().requires_grad_(False).float()
        self._average = self._tensors(self.module)
        self._source = self._tensors(model)

    @staticmethod
    def _tensors(module: nn.Module) -> list[Tensor]:
        return [t.detach() for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]

    @torch.no_grad()
    def update(self, is_bad: Tensor) -> None:
        """Moves the average towards the model.

        Args:
            is_bad: 0-dim tensor; nonzero leaves the average as it is.
        """
        self.num_updates += 1
        rate = 1.0 - min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        source = self._source
        if any(s.dtype != a.dtype for s, a in zip(source, self._average, strict=True)):
            source = [s.to(a.dtype) for s, a in zip(source, self._average, strict=True)]
        if is_bad.device.type == "cpu":
            if not is_bad.item():
                torch._foreach_lerp_(self._average, source, rate)
            return
        weights = {d: ((is_bad == 0) * rate).to(d) for d in {a.device for a in self._average}}
        for average, current in zip(self._average, source, strict=True):
            average.lerp_(current, weights[average.device].to(average.dtype))

    def state_dict(self) -> dict[str, Any]:
        """The averaged module's state and the number of updates."""
        return {"module": self.module.state_dict(), "num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self.module.load_state_dict(state["module"])
        self.num_updates = int(state["num_updates"])
