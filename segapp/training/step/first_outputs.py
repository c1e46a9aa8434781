"""The outputs of a network in its first step: whether they are probabilities already, where losses take logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CLOSE = 1e-3


class FirstOutputs:
    """Looks at the first image of the first micro-batch; what it sees is read once, after the step."""

    def __init__(self) -> None:
        self._seen: Tensor | None = None

    @torch.no_grad()
    def take(self, outputs: Any) -> None:
        """Note the range of the logits, and how far their sums over the classes are from 1; the first call only."""
        while isinstance(outputs, (list, tuple)) and outputs:  # replicas, then heads
            outputs = outputs[0]
        if self._seen is not None or not isinstance(outputs, Tensor) or outputs.ndim != 4 or not len(outputs):
            return
        first = outputs[:1].float()
        self._seen = torch.stack([first.min(), first.max(), (first.sum(1) - 1).abs().max()])

    def note(self) -> str | None:
        """Return a sentence if the outputs are probabilities; None if they are not."""
        if self._seen is None:
            return None
        least, most, off_one = self._seen.tolist()
        if not (least >= 0 and most <= 1 and off_one < _CLOSE):
            return None
        return (
            "the outputs of the network are probabilities: from 0 to 1, with sum 1 over the classes; the losses apply "
            "the softmax themselves, and a second one stops the training from learning: return logits"
        )
