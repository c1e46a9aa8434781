"""Losses of the user's own code that are a mean over pixels.

Shapes: N images, C classes, h x w of the logits, H x W of the target.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.losses.additive import MeanCriterion


class PlainLossError(TypeError):
    """A plain loss returned something other than a scalar tensor."""


class PlainCriterion(MeanCriterion):
    """A loss (logits, target) -> mean over the valid pixels, as an additive criterion.

    The loss of a step is the mean of its chunks' losses weighted by their numbers of valid pixels. That is the loss of
    the whole step only if the function is a mean over valid pixels; on one device, without `accumulate`, it always is.

    Args:
        function: takes logits (N, C, H, W), float32 or float64, at the target's resolution and int64 targets (N, H, W)
            with `ignore_index`; returns a scalar. A module's buffers follow the device.
        ignore_index: target value of the pixels that are not valid.
        align_corners: of the bilinear upsampling of the logits.
        aux_weight: factor of each auxiliary head's loss.
    """

    def __init__(
        self,
        function: Callable[[Tensor, Tensor], Tensor],
        *,
        ignore_index: int = 255,
        align_corners: bool = True,
        aux_weight: float = 0.4,
    ) -> None:
        super().__init__(aux_weight)
        self.ignore_index, self.align_corners = ignore_index, align_corners
        self.function = function
        if isinstance(function, nn.Module):
            function.requires_grad_(False)  # no optimizer has its parameters

    def head_sums(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return (mean x valid pixels, valid pixels) of one head's logits (N, C, h, w)."""
        count = self.denominator(target)
        # Without a valid pixel a mean is NaN; neither it nor its gradient may reach the sums.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = torch.where(count > 0, logits, 0.0)
        if logits.shape[-2:] != target.shape[-2:]:
            size = (target.shape[-2], target.shape[-1])
            logits = F.interpolate(logits, size, mode="bilinear", align_corners=self.align_corners)
        mean = self.function(logits, target.long())
        if not isinstance(mean, Tensor) or mean.ndim:
            what = f"a tensor of shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else f"a {type(mean).__name__}"
            raise PlainLossError(f"the loss returned {what}: return a scalar tensor, the mean over the valid pixels")
        mean = mean.to(logits.dtype)
        return torch.where(count > 0, mean * count.to(logits.dtype), 0.0), count

    def denominator(self, target: Tensor) -> Tensor:
        """Return the number of valid pixels, a float64 scalar."""
        return (target != self.ignore_index).sum(dtype=torch.float64)
