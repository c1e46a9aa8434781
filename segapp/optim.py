"""Optimizers in torch's fused form, their parameter groups, learning rates, and the moving average of the weights.

The fused implementations accept `found_inf`, a tensor on the device that skips the step without a host synchronization.
The state of an optimizer is allocated before the first step.

A shape of the learning rate is a pure function from the number of the step, counted from 1, so a resumed run needs no
scheduler state. In the formulas, t goes from 0 at the first step towards 1 after the last.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from segapp.compat.torch import BatchOrInstanceNorm, foreach_copy_, fused_sgd_

Module = TypeVar("Module", bound=nn.Module)

_NORM_LAYERS = (BatchOrInstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True, order=True)
class GroupSettings:
    """Settings that the parameters of a group share. A resume relies on the order of groups by these fields."""

    is_head: bool  # outside the backbone
    layer: int  # depth of the block, from 0 at the stem; 0 everywhere without layer-wise decay
    pattern: int  # number of the entry of `optim.groups`, from 1; 0: none
    is_norm_or_bias: bool  # exempt from weight decay if `optim.decay_norm_and_bias` is false
    lr_factor: float
    weight_decay: float


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], settings: Mapping[str, GroupSettings]
) -> dict[GroupSettings, dict[str, nn.Parameter]]:
    """Return the parameters that need a gradient by their settings, in the order of the groups."""
    groups: dict[GroupSettings, dict[str, nn.Parameter]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            groups.setdefault(settings[name], {})[name] = parameter
    return {key: groups[key] for key in sorted(groups)}


def norm_and_bias(model: nn.Module) -> set[int]:
    """Return the `id` of every bias and of every parameter of a normalization layer."""
    found = {id(p) for m in model.modules() if isinstance(m, _NORM_LAYERS) for p in m.parameters(recurse=False)}
    return found | {id(p) for name, p in model.named_parameters() if name.rsplit(".", 1)[-1] == "bias"}


def adamw(groups: Sequence[Mapping[str, Any]], lr: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Return AdamW over parameter groups: weight decay is decoupled from the gradient (Loshchilov & Hutter, 2019)."""
    return _with_state(torch.optim.AdamW([dict(g) for g in groups], lr=lr, betas=betas, fused=True))


def adam(groups: Sequence[Mapping[str, Any]], lr: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Return Adam over parameter groups: weight decay is a part of the gradient (L2), as in torch."""
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
    """Allocate the state of parameters, so that no update can run out of memory halfway."""
    for parameter in parameters:
        if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        elif optimizer.defaults.get("momentum"):
            # torch allocates momentum buffers uninitialized at the first step, and leaves them uninitialized if that
            # step is skipped. From zeros, the first step gives the same result: momentum * 0 + gradient.
            optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}


def add_groups(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> None:
    """Add parameter groups to an optimizer that has made steps, with fresh state and the present learning rate.

    All groups have the key `lr_factor`.
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


class WeightAverage(Generic[Module]):
    """Exponential moving average of weights and floating-point buffers, kept as a second module in float32.

    A non-finite step is skipped (`is_bad`); this is decided on the device.

    Args:
        decay: share of the average that an update keeps; after n updates at most (1 + n) / (10 + n), so that the
            initial weights fade quickly (as in tf.train.ExponentialMovingAverage with num_updates).
        fixed: parameters that never change. Those in float32 are used as their own average, without a copy.
    """

    def __init__(self, model: Module, decay: float, fixed: Iterable[nn.Parameter] = ()) -> None:
        self.decay = decay
        self.num_updates = 0
        shared = {id(parameter): parameter for parameter in fixed if parameter.dtype == torch.float32}
        self.module: Module = copy.deepcopy(model, shared).eval().requires_grad_(False).float()
        pairs: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        for average, current in zip(_floating(self.module), _floating(model), strict=True):
            if average is current:
                continue  # fixed
            is_alike = current.dtype == average.dtype and current.stride() == average.stride()
            pairs.setdefault((average.device, average.dtype, current.dtype, is_alike), []).append((average, current))
        self._groups = [([a for a, _ in group], [c for _, c in group], key[-1]) for key, group in pairs.items()]

    @torch.no_grad()
    def update(self, is_bad: Tensor) -> None:
        """Move the average towards the model, unless `is_bad`, a 0-dim float32 tensor of 0 or 1, is 1."""
        self.num_updates += 1
        n = self.num_updates
        rate = 1.0 - min(self.decay, (1 + n) / (10 + n))
        for averages, sources, is_alike in self._groups:
            if not is_alike:
                current, sources = sources, [torch.empty_like(average) for average in averages]
                foreach_copy_(sources, current)
            # average += rate * (source - average) is an SGD step along the gradient average - source, which torch's
            # fused kernel computes as weight decay minus `source`. It processes 64 tensors per launch, and changes
            # nothing if found_inf is set, without a host synchronization.
            fused_sgd_(
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
        """Load the result of `state_dict`."""
        self.module.load_state_dict(state["module"])
        self.num_updates = int(state["num_updates"])


def _floating(module: nn.Module) -> list[Tensor]:
    return [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]


Shape = Callable[[int], float]


def poly(lr: float, total_steps: int, *, power: float = 0.9, min_lr: float = 0.0) -> Shape:
    """Return (lr - min_lr) (1 - t)^power + min_lr (Liu et al., ParseNet, 2015)."""
    return lambda step: (lr - min_lr) * math.pow(1 - _progress(step, total_steps), power) + min_lr


def cosine(lr: float, total_steps: int, *, min_lr: float = 0.0) -> Shape:
    """Return half a cosine from lr to min_lr (Loshchilov & Hutter, SGDR, 2017)."""
    return lambda step: (lr - min_lr) * (1 + math.cos(math.pi * _progress(step, total_steps))) / 2 + min_lr


def wsd(
    lr: float, total_steps: int, *, decay_ratio: float = 0.2, decay_type: str = "linear", min_lr: float = 0.0
) -> Shape:
    """Return lr, and a decay to min_lr over the last `decay_ratio` of the steps; with a warm-up: warm-up-stable-decay.

    Hu et al., MiniCPM, 2024; the shapes of the decay are torchtitan's, and `sqrt` is 1 - sqrt(t).
    """
    num_decay = round(decay_ratio * total_steps)

    def rate(step: int) -> float:
        t = _progress(max(step - (total_steps - num_decay), 1), num_decay)
        if decay_type == "cosine":
            return _half_cosine(lr, min_lr, t)
        return (lr - min_lr) * (1 - (math.sqrt(t) if decay_type == "sqrt" else t)) + min_lr

    return rate


def steps_down(
    lr: float, steps_per_epoch: int, *, epochs: Sequence[int] = (), steps: Sequence[int] = (), gamma: float = 0.1
) -> Shape:
    """Return lr, multiplied by gamma after each of `epochs` and `steps`."""

    def rate(step: int) -> float:
        epoch = (step - 1) // max(steps_per_epoch, 1)
        return lr * math.pow(gamma, sum(epoch >= each for each in epochs) + sum(step > each for each in steps))

    return rate


def one_cycle(
    lr: float, total_steps: int, *, pct_start: float = 0.3, div_factor: float = 25.0, final_div_factor: float = 1e4
) -> Shape:
    """Return a rise from lr / div_factor to lr, and a fall to lr / div_factor / final_div_factor, by half cosines.

    Smith & Topin, Super-Convergence, 2018; the same as torch's OneCycleLR with cycle_momentum=False, which counts steps
    from 0 and reaches its peak at pct_start * total_steps - 1.
    """
    first = lr / div_factor
    peak, end = pct_start * total_steps - 1, total_steps - 1

    def rate(step: int) -> float:
        at = min(step - 1, end)
        if at <= peak and peak > 0:
            return _half_cosine(first, lr, at / peak)
        return _half_cosine(lr, first / final_div_factor, (at - peak) / (end - peak))

    return rate


def constant(lr: float, **_: Any) -> Shape:
    """Return lr at every step; it accepts the options of `Plateau`, whose factor reduces it."""
    return lambda _: lr


def warmed_up(shape: Shape, num_steps: int, first_factor: float = 0.001) -> Shape:
    """Return a shape whose first steps are multiplied by a linear factor from `first_factor` to 1."""

    def rate(step: int) -> float:
        value = shape(step)
        return value * (first_factor + (1 - first_factor) * (step - 1) / num_steps) if step <= num_steps else value

    return rate


def _progress(step: int, total_steps: int) -> float:
    return min((step - 1) / max(total_steps, 1), 1.0)


def _half_cosine(start: float, end: float, t: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * t))


class Plateau:
    """Multiplies the learning rate by `gamma` after more than `patience` evaluations without a better result.

    As in torch's ReduceLROnPlateau, a result is better if it improves on the best one by a relative 1e-4. `factor`
    starts at 1 and never falls below `lowest`.
    """

    def __init__(self, patience: int, gamma: float, lowest: float = 0.0, *, larger_is_better: bool = True) -> None:
        self.patience, self.gamma, self.lowest, self.larger_is_better = patience, gamma, lowest, larger_is_better
        self.factor = 1.0
        self._best: float | None = None
        self._num_bad = 0

    def observe(self, value: float | None) -> bool:
        """Process the result of an evaluation; None or nan is never better. Return True if the factor was reduced."""
        if value is not None and self._is_better(value):
            self._best, self._num_bad = value, 0
            return False
        self._num_bad += 1
        if self._num_bad <= self.patience:
            return False
        self._num_bad = 0
        before, self.factor = self.factor, max(self.factor * self.gamma, self.lowest)
        return self.factor < before

    def _is_better(self, value: float) -> bool:
        if self.larger_is_better:
            return value > (-math.inf if self._best is None else self._best * (1 + 1e-4))
        return value < (math.inf if self._best is None else self._best * (1 - 1e-4))

    def state_dict(self) -> dict[str, Any]:
        """Return factor, best result and count, as plain values."""
        return {"factor": self.factor, "best": self._best, "num_bad": self._num_bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.factor, self._best, self._num_bad = float(state["factor"]), state["best"], int(state["num_bad"])
