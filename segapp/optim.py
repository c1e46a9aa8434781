"""Optimizers, the learning rate as a pure function of the step, and the moving average of the weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)
_NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class Schedule:
    """The learning rate over a run, relative to its base value.

    With t from 0 at the first step towards 1 after the last: `poly` is (lr - min_lr) (1 - t)^power + min_lr (Liu et
    al., ParseNet, 2015); `cosine` is half a cosine from lr to min_lr (Loshchilov & Hutter, SGDR, 2017); `step` is lr
    times gamma for each of `step_epochs` that is over. Warm-up multiplies by a line from `warmup_factor` to 1.

    Attributes:
        name: the shape.
        power: exponent of `poly`.
        min_lr: learning rate at the end of `poly` and `cosine`.
        warmup_steps: steps of linear warm-up; 0: none.
        warmup_factor: factor at the first warm-up step.
        step_epochs: epochs after which `step` multiplies by gamma.
        gamma: factor of `step`.
    """

    name: Literal["poly", "cosine", "step", "constant"] = "poly"
    power: float = 0.9
    min_lr: float = 0.0
    warmup_steps: int = 0
    warmup_factor: float = 0.001
    step_epochs: tuple[int, ...] = ()
    gamma: float = 0.1


def lr_at(step: int, schedule: Schedule, *, lr: float, total_steps: int, steps_per_epoch: int) -> float:
    """Return the learning rate of a step, a pure function: a resumed run needs no scheduler state.

    Args:
        step: number of the step, from 1.
        schedule: shape of the curve.
        lr: base learning rate, that after warm-up.
        total_steps: steps of the whole run.
        steps_per_epoch: steps of one epoch (for `step`).
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
    """Return the optimizer's parameter groups: {backbone, head} x {decay, no decay}, without empty ones.

    Args:
        backbone: parameters with learning rate lr.
        head: parameters with learning rate lr x head_lr_factor.
        no_decay: `id` of the parameters without weight decay.
        weight_decay: weight decay of the other parameters.
        head_lr_factor: stored in each group as `lr_factor`.
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
    """Return the `id` of every bias and of every parameter of a normalisation layer."""
    found = {id(p) for m in model.modules() if isinstance(m, _NORM_LAYERS) for p in m.parameters(recurse=False)}
    return found | {id(p) for name, p in model.named_parameters() if name.rsplit(".", 1)[-1] == "bias"}


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


class WeightAverage(Generic[Module]):
    """Exponential moving average of weights and floating-point buffers, kept as a second module in float32.

    The decay after n updates is min(decay, (1 + n) / (10 + n)), so that the initial weights are soon forgotten. A
    non-finite step is left out (`is_bad`), decided on the device.
    """

    def __init__(self, model: Module, decay: float) -> None:
        self.decay = decay
        self.num_updates = 0
        self.module: Module = copy.deepcopy(model).eval().requires_grad_(False).float()
        pairs: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        for average, current in zip(_floating(self.module), _floating(model), strict=True):
            is_alike = current.dtype == average.dtype and current.stride() == average.stride()
            pairs.setdefault((average.device, average.dtype, current.dtype, is_alike), []).append((average, current))
        self._groups = [([a for a, _ in group], [c for _, c in group], key[-1]) for key, group in pairs.items()]

    @torch.no_grad()
    def update(self, is_bad: Tensor) -> None:
        """Move the average towards the model.

        Args:
            is_bad: 0-dim float32 tensor, 0 or 1; 1 leaves the average unchanged.
        """
        self.num_updates += 1
        rate = 1.0 - min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for averages, sources, is_alike in self._groups:
            if not is_alike:
                current, sources = sources, [torch.empty_like(average) for average in averages]
                torch._foreach_copy_(sources, current)
            # average += rate * (source - average) is a step of SGD along the gradient average - source, which torch's
            # fused kernel forms as weight decay minus `source`. It goes over 64 tensors in a launch, and leaves all as
            # they are where found_inf is set, without asking the host.
            torch._fused_sgd_(
                averages,
                sources,
                [],
                weight_decay=1.0,
                momentum=0.0,
                lr=rate,
                dampening=0.0,
                nesterov=False,
                maximize=True,
                is_first_step=False,
                found_inf=is_bad.to(averages[0].device),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged module's state and the number of updates."""
        return {"module": self.module.state_dict(), "num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.module.load_state_dict(state["module"])
        self.num_updates = int(state["num_updates"])


def _floating(module: nn.Module) -> list[Tensor]:
    return [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
