"""The learning rate as a function of the step, and a factor that depends on evaluations.

A shape is a pure function from the number of the step, counted from 1, to the learning rate, so a resumed run needs no
scheduler state. In the formulas, t goes from 0 at the first step towards 1 after the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
