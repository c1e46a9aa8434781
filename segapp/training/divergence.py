"""The rule by which a training has diverged, from the losses of whole epochs.

An epoch has diverged if the loss of each of its steps is higher than the loss of the first step, before which nothing
was learned, and if their mean is more than three times as high as the first loss and as a guess's loss, ln C for C
classes. Warm restarts, unfrozen layers and the noise of small data sets stay far below that. A fine-tuned network,
whose first loss is small, may rise to a guess's loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

DIVERGED = 3.0
"""Mean loss of an epoch that ends the run, relative to the first loss and a guess's loss."""
RISEN = 1.5
"""Mean loss of an epoch that is reported, relative to the first loss."""
_LEAST_STEPS = 2


def judge_epoch(first: float, losses: Sequence[float], num_classes: int) -> tuple[bool, str] | None:
    """Return True if an epoch has diverged, and a sentence about it; None if its losses are normal.

    The losses are from the later steps; non-finite ones are left out, because they changed nothing.

    >>> judge_epoch(2.4, [900.0, 3000.0], 11)
    (True, 'the loss of each step was above the loss of the first step (2.4), 1.95e+03 on average')
    >>> judge_epoch(2.4, [3.0, 2.3, 2.0], 11)
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) < _LEAST_STEPS or not math.isfinite(first) or min(finite) <= first:
        return None
    mean = math.fsum(finite) / len(finite)
    if mean <= RISEN * first:
        return None
    words = f"the loss of each step was above the loss of the first step ({first:.3g}), {mean:.3g} on average"
    return mean > DIVERGED * max(first, math.log(max(num_classes, 2))), words


class LossWatch:
    """Keeps the losses of an epoch on their device, and reads them at its end."""

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes
        self._first: float | None = None
        self._losses: list[Tensor] = []
        self._has_warned = False

    def add(self, loss: Tensor) -> None:
        """Record the loss of a step without waiting for the device."""
        self._losses.append(loss)

    def end_epoch(self, num_steps: int) -> tuple[bool, str] | None:
        """Return the result of `judge_epoch` for an epoch of `num_steps` steps; each warning only once.

        An epoch that this process trained only partly, after a resume, is not judged.
        """
        losses, self._losses = self._losses, []
        if not losses:
            return None
        values = torch.stack(losses).tolist()
        is_whole = len(values) == num_steps
        if self._first is None:
            self._first, values = values[0], values[1:]
        found = judge_epoch(self._first, values, self._num_classes) if is_whole else None
        if found is None or (self._has_warned and not found[0]):
            return None
        self._has_warned = True
        return found
