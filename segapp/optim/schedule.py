"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


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
