"""The moving average of the weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


class WeightAverage(Generic[Module]):
    """Exponential moving average of weights and floating-point buffers, kept as a second module in float32.

    A non-finite step is left out (`is_bad`), decided on the device.

    Args:
        model: what is averaged.
        decay: share of the average that an update keeps.
        has_warmup: the decay after n updates is min(decay, (1 + n) / (10 + n)), so that the initial weights are soon
            forgotten (as tf.train.ExponentialMovingAverage with num_updates); False: it is `decay` from the start.
    """

    def __init__(self, model: Module, decay: float, *, has_warmup: bool = True) -> None:
        self.decay, self.has_warmup = decay, has_warmup
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
        n = self.num_updates
        rate = 1.0 - (min(self.decay, (1 + n) / (10 + n)) if self.has_warmup else self.decay)
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
