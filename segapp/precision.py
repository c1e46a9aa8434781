"""Precision modes: fp32, autocast in bf16 or fp16, and half weights with fp32 BatchNorm and master weights.

`Precision` provides an autocast context, the scaling of the loss, and the update of fp32 weights. It waits for the
device only if the optimizer does not read `found_inf`, as torch's fused ones do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from segapp.accelerator import wide
from segapp.compat.torch import BatchOrInstanceNorm, amp_update_scale_, foreach_copy_, foreach_mul_, takes_found_inf
from segapp.errors import accepted_words

__all__ = ["LossScaler", "Precision", "half_except_batchnorm"]

PRECISIONS = ("fp32", "fp16", "amp-fp16", "amp-bf16")

_CAST_TOGETHER = 64
"""Half gradients that are cast in one launch; casting all of them together would need additional memory."""


class LossScaler(nn.Module):
    """Dynamic loss scaling for fp16 gradients (Micikevicius et al., Mixed Precision Training, 2018).

    The scale doubles after `growth_interval` finite steps and halves after a non-finite one, on the device. torch's
    GradScaler refuses half parameters and waits for the device in every step.
    """

    def __init__(self, device: torch.device, *, init_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        super().__init__()
        self.growth_interval = growth_interval
        self.scale = nn.Buffer(torch.tensor(init_scale, dtype=torch.float32, device=device))
        self.growth_tracker = nn.Buffer(torch.tensor(0, dtype=torch.int32, device=device))

    def update(self, is_bad: Tensor) -> None:
        """Adapt the scale after a step; `is_bad`, 0-dim float32, is nonzero if a gradient was not finite."""
        amp_update_scale_(self.scale, self.growth_tracker, is_bad, 2.0, 0.5, self.growth_interval)


def half_except_batchnorm(model: nn.Module) -> nn.Module:
    """Convert parameters and buffers to float16, in place, except in BatchNorm and InstanceNorm layers (Apex's O2).

    CUDA's BatchNorm accepts float32 weights with float16 inputs. Its LayerNorm and GroupNorm require a single dtype
    (pytorch/pytorch#135969) and always compute their statistics in float32, so their weights are converted too.
    """
    for module in model.modules():
        if isinstance(module, BatchOrInstanceNorm):
            continue
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.half()
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.half())
    return model


class Precision:
    """Precision mode of a training: fp32, fp16 (half weights), amp-fp16 or amp-bf16, with the model's (first) device.

    A step is the same in each mode: `backward` for each micro-batch, `grad_norm = finish_gradients(optimizer, 1.0)` and
    `step(optimizer, is_bad=~grad_norm.isfinite())`. The optimizer has the `master_weights`.
    """

    def __init__(self, name: str, device: torch.device | str) -> None:
        if name not in PRECISIONS:
            raise ValueError(f"precision {name!r} is not known: {accepted_words(name, PRECISIONS)}")
        self.name = name
        self.device = device = torch.device(device)
        self.input_dtype = torch.float16 if name == "fp16" else torch.float32
        self.scaler = LossScaler(device) if name in ("fp16", "amp-fp16") else None
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model with its weights cast, in place, to the mode's dtype."""
        return half_except_batchnorm(model) if self.name == "fp16" else model

    def master_weights(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters for the optimizer: fp32 copies of half parameters, other parameters unchanged."""
        masters = []
        for parameter in parameters:
            master = parameter
            if parameter.dtype == torch.float16:
                master = nn.Parameter(parameter.detach().float())
                self._pairs.append((parameter, master))
            masters.append(master)
        return masters

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context for forward passes."""
        if self.name.startswith("amp-"):
            dtype = torch.bfloat16 if self.name == "amp-bf16" else torch.float16
            return torch.autocast(self.device.type, dtype=dtype)
        return contextlib.nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else loss * self.scaler.scale.to(loss.device)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a micro-batch's scaled loss, and `gradients_to_master`."""
        self.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.gradients_to_master()

    @torch.no_grad()
    def gradients_to_master(self) -> None:
        """Add half gradients to the gradients of the master weights, in fp32, and delete them."""
        pairs = [(parameter, master) for parameter, master in self._pairs if parameter.grad is not None]
        for start in range(0, len(pairs), _CAST_TOGETHER):
            part = pairs[start : start + _CAST_TOGETHER]
            half = [cast(Tensor, parameter.grad) for parameter, _ in part]
            wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient in half]
            foreach_copy_(wide, half)
            for (parameter, master), gradient in zip(part, wide, strict=True):
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def finish_gradients(self, optimizer: torch.optim.Optimizer, clip_grad_norm: float | None = None) -> Tensor:
        """Unscale the gradients, in place, and clip them to a norm; return their norm before, on the first device."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [cast(Tensor, parameter.grad) for parameter in parameters]
        if self.scaler is not None:
            inverse = wide(self.scaler.scale).reciprocal().float()
            for device in {gradient.device for gradient in gradients}:
                foreach_mul_([each for each in gradients if each.device == device], inverse.to(device))
        grad_norm = torch.nn.utils.get_total_norm(gradients).to(self.device)
        if clip_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip_grad_norm, grad_norm)
        return grad_norm

    def step(self, optimizer: torch.optim.Optimizer, is_bad: Tensor, is_skipped: Tensor | None = None) -> None:
        """Update the weights and the loss scale in place, and delete the gradients.

        The weights stay the same if `is_bad` is true, which lowers the scale, or if `is_skipped` is, which does not.
        """
        is_skipped = is_bad if is_skipped is None else is_skipped
        if takes_found_inf(optimizer):  # a fused optimizer of torch, which reads it on the device
            optimizer.found_inf = is_skipped.float()  # type: ignore[attr-defined]
            optimizer.step()
        elif type(is_skipped) is not Tensor or not bool(is_skipped):  # a simulated tensor has no value
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.masters_to_model()
        if self.scaler is not None:
            self.scaler.update(is_bad.float())

    @torch.no_grad()
    def masters_to_model(self) -> None:
        if self._pairs:
            foreach_copy_([p for p, _ in self._pairs], [m for _, m in self._pairs])

    def state_dict(self) -> dict[str, Any]:
        """Return scale and master weights; empty in fp32 and bf16."""
        state: dict[str, Any] = {}
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        if self._pairs:
            state["masters"] = [m.detach() for _, m in self._pairs]
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
        if self._pairs and "masters" in state:
            for (_, master), saved in zip(self._pairs, state["masters"], strict=True):
                master.copy_(saved)
