"""The update of the weights from their gradients: unscaled, clipped, averaged, and skipped if a value is not finite."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from segapp.checkpoint.snapshot import hold_own_state
from segapp.models import SegmentationModel
from segapp.optim import WeightAverage, add_groups
from segapp.precision import Precision

MAX_BAD_STEPS = 10
"""Number of consecutive steps with a non-finite loss or gradient after which the training ends."""


class WeightUpdate:
    """Updates the weights of a model; whether a step is bad is decided on the device, without waiting for it.

    Args:
        model: on its device and cast by `precision`.
        optimizer: its groups hold `precision`'s master weights.
        precision: the precision mode.
        average: average of the weights; None: none is kept.
        clip_grad_norm: largest norm of the gradients; None: they are not clipped.
        groups_of: returns the optimizer's groups of frozen parameters with these names, when they are to be trained.

    Attributes:
        bad_steps: number of steps that did not change the weights because a value was not finite; 0-dim, on the device.
        bad_in_row: the number of consecutive such steps up to the last one.
    """

    def __init__(
        self,
        model: SegmentationModel,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        *,
        average: WeightAverage[SegmentationModel] | None = None,
        clip_grad_norm: float | None = None,
        groups_of: Callable[[Sequence[str]], Iterable[Mapping[str, Any]]] = lambda names: (),
    ) -> None:
        self.model, self.optimizer, self.precision, self.average = model, optimizer, precision, average
        self.clip_grad_norm, self._groups_of = clip_grad_norm, groups_of
        self.bad_steps = torch.zeros((), dtype=torch.int64, device=precision.device)
        self.bad_in_row = torch.zeros((), dtype=torch.int64, device=precision.device)

    @property
    def evaluated(self) -> SegmentationModel:
        return self.model if self.average is None else self.average.module

    def parameters(self) -> list[Tensor]:
        """Return the parameters that the optimizer updates: the master weights, if the precision has any."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def include_unfrozen(self, names: Sequence[str]) -> None:
        add_groups(self.optimizer, self._groups_of(names))

    @torch.no_grad()
    def finish_gradients(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        grad_norm = self.precision.finish_gradients(self.optimizer, clip_grad_norm=self.clip_grad_norm)
        return grad_norm, (~(torch.isfinite(loss) & torch.isfinite(grad_norm))).float()

    @torch.no_grad()
    def apply(self, is_bad: Tensor, is_skipped: Tensor | None = None) -> None:
        """Update weights, average and counters in place, with almost no additional memory.

        `is_skipped` leaves the weights as they are for another reason too; None: only for `is_bad`.
        """
        is_skipped = is_bad if is_skipped is None else is_skipped
        self.precision.step(self.optimizer, is_bad, is_skipped=is_skipped)
        if self.average is not None:
            self.average.update(is_skipped)
        bad = is_bad.long()
        self.bad_steps += bad
        self.bad_in_row = (self.bad_in_row + 1) * bad

    @property
    def is_loss_scale_falling(self) -> bool:
        """True after a bad step in half precision: a lower loss scale is tried, which may still end the run."""
        return self.precision.scaler is not None and int(self.bad_in_row) > 0

    def divergence(self) -> str | None:
        """Return why no further step can be made; None if one can."""
        in_row, scaler = int(self.bad_in_row), self.precision.scaler
        if scaler is not None and float(scaler.scale) < 1.0:
            return "the loss scale fell below 1"
        if scaler is None and in_row >= MAX_BAD_STEPS:  # a scale that is still falling explains bad steps on its own
            return f"loss or gradient not finite for {in_row} steps in a row"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the update's part of a checkpoint, without the frozen base of adapters."""
        average = None if self.average is None else self.average.state_dict()
        if average is not None:
            self.model.without_base(average["module"])
        return {
            "ema": average,
            "optimizer": self.optimizer.state_dict(),
            "precision": self.precision.state_dict(),
            "bad_steps": self.bad_steps,
            "bad_in_row": self.bad_in_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.average is not None:
            self.average.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        hold_own_state(self.optimizer)
        self.precision.load_state_dict(state["precision"])
        self.bad_steps.copy_(state["bad_steps"])
        self.bad_in_row.copy_(state["bad_in_row"])
