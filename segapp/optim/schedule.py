"""The learning rate as a pure function of the step, and the factor that an evaluation may change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """The learning rate over a run, relative to its base value.

    With t from 0 at the first step towards 1 after the last: `poly` is (lr - min_lr) (1 - t)^power + min_lr (Liu et
    al., ParseNet, 2015); `cosine` is half a cosine from lr to min_lr (Loshchilov & Hutter, SGDR, 2017); `step` is lr
    times gamma for each of `step_epochs` and `step_steps` that is over; `onecycle` rises by half a cosine from
    lr / div_factor to lr and falls to lr / div_factor / final_div_factor (Smith & Topin, Super-Convergence, 2018; as
    torch's OneCycleLR with cycle_momentum=False); `constant` and `plateau` are lr (`Plateau` has the factor of the
    latter). Warm-up multiplies by a line from `warmup_factor` to 1.

    Attributes:
        name: the shape.
        power: exponent of `poly`.
        min_lr: learning rate at the end of `poly` and `cosine`.
        warmup_steps: steps of linear warm-up; 0: none.
        warmup_factor: factor at the first warm-up step.
        step_epochs: epochs after which `step` multiplies by gamma.
        step_steps: steps after which `step` multiplies by gamma.
        gamma: factor of `step`.
        pct_start: share of the steps in which `onecycle` rises.
        div_factor: base value over the first learning rate of `onecycle`.
        final_div_factor: first learning rate of `onecycle` over its last.
    """

    name: Literal["poly", "cosine", "step", "constant", "onecycle", "plateau"] = "poly"
    power: float = 0.9
    min_lr: float = 0.0
    warmup_steps: int = 0
    warmup_factor: float = 0.001
    step_epochs: tuple[int, ...] = ()
    step_steps: tuple[int, ...] = ()
    gamma: float = 0.1
    pct_start: float = 0.3
    div_factor: float = 25.0
    final_div_factor: float = 1e4


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
        num_over = sum(epoch >= boundary for boundary in schedule.step_epochs)
        num_over += sum(step > boundary for boundary in schedule.step_steps)
        value = lr * math.pow(schedule.gamma, num_over)
    elif schedule.name == "onecycle":
        value = _one_cycle(step, schedule, lr, total_steps)
    if step <= schedule.warmup_steps:
        value *= schedule.warmup_factor + (1 - schedule.warmup_factor) * (step - 1) / schedule.warmup_steps
    return value


def _one_cycle(step: int, schedule: Schedule, lr: float, total_steps: int) -> float:
    """Return torch's OneCycleLR, which counts steps from 0 and reaches its peak at pct_start * total_steps - 1."""
    first = lr / schedule.div_factor
    peak, end = schedule.pct_start * total_steps - 1, total_steps - 1
    at = min(step - 1, end)
    if at <= peak and peak > 0:
        return _half_cosine(first, lr, at / peak)
    return _half_cosine(lr, first / schedule.final_div_factor, (at - peak) / (end - peak))


def _half_cosine(start: float, end: float, t: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * t))
