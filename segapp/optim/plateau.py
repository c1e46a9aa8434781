"""The factor on the learning rate that falls when evaluations stop improving."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Plateau:
    """Multiplies the learning rate by `gamma` after more than `patience` evaluations without a better result.

    As torch's ReduceLROnPlateau: a result is better if it improves on the best by a relative `THRESHOLD`.

    Args:
        patience: evaluations without a better result that are accepted.
        gamma: factor of a reduction, below 1.
        lowest: the factor does not fall below it.
        larger_is_better: False for a loss.

    Attributes:
        factor: on the learning rate, from 1 on.
    """

    THRESHOLD = 1e-4

    def __init__(self, patience: int, gamma: float, lowest: float = 0.0, *, larger_is_better: bool = True) -> None:
        self.patience, self.gamma, self.lowest, self.larger_is_better = patience, gamma, lowest, larger_is_better
        self.factor = 1.0
        self._best: float | None = None
        self._num_bad = 0

    def observe(self, value: float | None) -> bool:
        """Take the result of an evaluation; None or nan counts as one that is not better.

        Returns:
            True if the factor has fallen.
        """
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
            return value > (-math.inf if self._best is None else self._best * (1 + self.THRESHOLD))
        return value < (math.inf if self._best is None else self._best * (1 - self.THRESHOLD))

    def state_dict(self) -> dict[str, Any]:
        """Return factor, best result and count, as plain values."""
        return {"factor": self.factor, "best": self._best, "num_bad": self._num_bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.factor, self._best, self._num_bad = float(state["factor"]), state["best"], int(state["num_bad"])
