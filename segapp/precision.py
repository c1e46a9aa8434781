"""Precision modes: fp32, autocast in bf16 or fp16, and half weights with fp32 BatchNorm and master weights.

`Precision` provides an autocast context, the scaling of the loss, and the update of fp32 weights. It waits for the
device only if the optimizer does not read `found_inf`, as torch's fused ones do.
"""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from segapp.accelerator import wide
from segapp.chunks import check_count, check_number, check_positive
from segapp.compat.torch import (
    BatchOrInstanceNorm,
    FakeTensor,
    amp_update_scale_,
    foreach_copy_,
    foreach_mul_,
    takes_found_inf,
    version_of,
)
from segapp.parallel.replicas import check_parameters
from segapp.parallel.scatter_gather import DeviceLike, parse_device

__all__ = ["LossScaler", "Precision", "half_except_batchnorm"]


def __dir__() -> list[str]:
    return __all__


PrecisionName = Literal["fp32", "fp16", "amp-fp16", "amp-bf16"]

_CAST_TOGETHER = 64
"""Half gradients that are cast in one launch; casting all of them together would need additional memory."""


class LossScaler(nn.Module):
    """Dynamic loss scaling for fp16 gradients (Micikevicius et al., Mixed Precision Training, 2018).

    The scale doubles after `growth_interval` finite steps and halves after a non-finite one, on the device. torch's
    GradScaler refuses half parameters and waits for the device in every step.
    """

    def __init__(self, device: DeviceLike, *, init_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        super().__init__()
        check_number("init_scale", init_scale, above=True)
        self.growth_interval = check_count("growth_interval", growth_interval, least=1)
        device = parse_device(device)
        self.scale = nn.Buffer(torch.tensor(init_scale, dtype=torch.float32, device=device))
        self.growth_tracker = nn.Buffer(torch.tensor(0, dtype=torch.int32, device=device))

    def extra_repr(self) -> str:
        return f"scale={float(self.scale)}, growth_interval={self.growth_interval}, device={str(self.scale.device)!r}"

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        check_number(f"{prefix}scale", float(state_dict.get(f"{prefix}scale", 1.0)), above=True)
        check_count(f"{prefix}growth_tracker", int(state_dict.get(f"{prefix}growth_tracker", 0)))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def update(self, is_bad: Tensor | bool) -> None:
        """Adapt the scale after a step; `is_bad` is true if a gradient was not finite."""
        found_inf = _condition(is_bad, self.scale.device).to(self.scale, non_blocking=True)
        amp_update_scale_(self.scale, self.growth_tracker, found_inf, 2.0, 0.5, self.growth_interval)


def _condition(value: Tensor | bool, device: torch.device) -> Tensor:
    """Return one value as a 0-dim bool; a value of the host stays on the CPU, where it is read without waiting."""
    is_on_device = isinstance(value, Tensor) and value.device.type != "cpu"
    if value is None or isinstance(value, str):
        raise TypeError(f"one bool is needed, not {value!r}: give ~grad_norm.isfinite(), or False")
    flag = torch.as_tensor(value, device=device if is_on_device else "cpu")
    if flag.numel() != 1:
        raise ValueError(f"one bool is needed, not a tensor of shape {tuple(flag.shape)}: reduce it with any()")
    return flag.reshape(()).bool()


class _Seen:
    """Which tensor was seen, and how often it had been changed; a copy of its `Precision` has not seen its tensors."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = TensorWeakRef(tensor), version_of(tensor)

    def __reduce__(self) -> Any:
        return type(None), ()

    def is_it(self, tensor: Tensor) -> bool:
        return self._tensor() is tensor

    def is_unchanged(self, tensor: Tensor) -> bool:
        return self.is_it(tensor) and self._version == version_of(tensor)


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

    A step is the same in each mode: `backward` for each micro-batch, `grad_norm = finish_gradients(optimizer)` and
    `step(optimizer, is_bad=~grad_norm.isfinite())`. The optimizer has the `master_weights`. `optimizer.zero_grad()` may
    replace the step, and several optimizers may be at different places of this order.
    """

    def __init__(self, name: PrecisionName, device: DeviceLike) -> None:
        if name not in get_args(PrecisionName):
            raise ValueError(f"precision {name!r} is not known: use one of {', '.join(get_args(PrecisionName))}")
        self.name = name
        self.device = device = parse_device(device)
        self.input_dtype = torch.float16 if name == "fp16" else torch.float32
        self.scaler = LossScaler(device) if name in ("fp16", "amp-fp16") else None
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        self._written: dict[nn.Parameter, _Seen | None] = {}  # the half parameters, as they were last equal to masters
        # The parameters of all optimizers, with their unscaled gradients. True: their gradients have the scale of the
        # last pass. None: no pass was scaled since the last step.
        self._passes: dict[nn.Parameter, _Seen | Literal[True] | None] = {}
        self._scale = None if self.scaler is None else self.scaler.scale.clone()
        self._seen_scale: _Seen | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {str(self.device)!r})"

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model with its weights cast, in place, to the mode's dtype."""
        return half_except_batchnorm(model) if self.name == "fp16" else model

    def master_weights(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters for the optimizer: fp32 copies of half parameters, other parameters unchanged."""
        masters = []
        for parameter in check_parameters(parameters):
            if parameter.dtype == torch.float16 and parameter not in self._masters:
                self._masters[parameter] = nn.Parameter(parameter.detach().float())
                self._written[parameter] = _Seen(parameter)
            masters.append(self._masters.get(parameter, parameter))
            self._passes.setdefault(masters[-1])
        return masters

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = {"amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}.get(self.name)
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def scale(self, loss: Tensor) -> Tensor:
        self._forget_zeroed()
        self._passes.update((parameter, True) for parameter, seen in self._passes.items() if not seen)
        if self.scaler is None:
            return loss
        scale = self.scaler.scale
        # Gradients of other optimizers have the scale from before a step.
        if self._seen_scale is None or not self._seen_scale.is_unchanged(scale):
            _multiply(self._gradients(self._passes, are_finished=False), scale / cast(Tensor, self._scale))
            self._scale, self._seen_scale = scale.clone(), _Seen(scale)
        return loss * scale.to(loss.device)

    def _forget_zeroed(self) -> None:
        """Treat gradients that zero_grad has deleted or zeroed as unfinished; DDP uses the same tensors in each pass.

        The host waits for a value only if finished gradients were changed by the caller.
        """
        for parameter, seen in self._passes.items():
            gradient = parameter.grad
            if isinstance(seen, _Seen) and (
                gradient is None
                or not (seen.is_unchanged(gradient) or isinstance(gradient, FakeTensor) or gradient.any())
            ):
                self._passes[parameter] = True

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a micro-batch's scaled loss, and `gradients_to_master`.

        Raises:
            RuntimeError: the pass added to finished gradients, and all gradients are deleted; or half parameters have
                gradients of a pass without `backward`.
        """
        self._check_half_gradients()
        scaled = self.scale(loss)
        versions = [(each, version_of(each)) for each in self._gradients(self._passes, are_finished=True)]
        try:
            scaled.backward()  # type: ignore[no-untyped-call]
            self.gradients_to_master()
        except BaseException:
            for parameter in self._masters:  # an optimizer's zero_grad deletes only gradients of master weights
                parameter.grad = None
            raise
        if any(version_of(gradient) != version for gradient, version in versions):
            for parameter in self._passes:
                parameter.grad = None
            raise RuntimeError("backward() added to finished gradients, now deleted: first call step() or zero_grad()")

    def _gradients(self, parameters: Iterable[nn.Parameter], *, are_finished: bool) -> list[Tensor]:
        # A finished gradient may be replaced before the step. Without a scale, it may also be of the caller's own pass.
        found = [(p.grad, self._passes.get(p)) for p in parameters if p.grad is not None]
        is_scaled = self.scaler is not None
        return [g for g, seen in found if (isinstance(seen, _Seen) and (is_scaled or seen.is_it(g))) == are_finished]

    def _check_half_gradients(self) -> None:
        if any(half.grad is not None for half in self._masters):
            raise RuntimeError(f"half parameters have gradients without a scale: {_BACKWARD}")

    @torch.no_grad()
    def gradients_to_master(self) -> None:
        """Add half gradients to the gradients of the master weights, in fp32, and delete them."""
        pairs = [(parameter, master) for parameter, master in self._masters.items() if parameter.grad is not None]
        for start in range(0, len(pairs), _CAST_TOGETHER):
            part = pairs[start : start + _CAST_TOGETHER]
            half = [cast(Tensor, parameter.grad) for parameter, _ in part]
            wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient in half]
            foreach_copy_(wide, half)
            for (parameter, master), gradient in zip(part, wide, strict=True):
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def finish_gradients(self, optimizer: Optimizer, *, clip_grad_norm: float | None = None) -> Tensor:
        """Unscale the gradients, in place, and clip them to a norm; return their norm before, on the first device.

        Raises:
            RuntimeError: they are finished, or of a pass without `backward`.
            TypeError: it is no optimizer.
            ValueError: the optimizer has half parameters or, in fp16 and amp-fp16, parameters that `master_weights` has
                not returned; or the norm is not above 0.
        """
        if clip_grad_norm is not None:
            check_positive("clip_grad_norm", clip_grad_norm)
        parameters, is_scaled = _parameters_of(optimizer), self.scaler is not None
        # An unknown parameter's gradient would not follow the scale after the step of another optimizer.
        if wrong := [p for p in parameters if p.dtype == torch.float16 or (is_scaled and p not in self._passes)]:
            what = "float16 parameters" if wrong[0].dtype == torch.float16 else "parameters that are no master weights"
            raise ValueError(f"optimizer has {what}: give it precision.master_weights(model.parameters())")
        self._forget_zeroed()
        if self._gradients(parameters, are_finished=True):
            raise RuntimeError("finish_gradients() was called before: first call step() or optimizer.zero_grad()")
        self._check_half_gradients()
        if is_scaled and any(p.grad is not None and not self._passes[p] for p in parameters):
            raise RuntimeError(f"gradients have no scale: {_BACKWARD}")
        gradients = self._gradients(parameters, are_finished=False)
        if self._scale is not None:
            _multiply(gradients, wide(self._scale).reciprocal().float())
        grad_norm = torch.nn.utils.get_total_norm(gradients).to(self.device)
        if clip_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip_grad_norm, grad_norm)
        self._passes.update((p, None if p.grad is None else _Seen(p.grad)) for p in parameters)
        return grad_norm

    def step(self, optimizer: Optimizer, is_bad: Tensor | bool, *, is_skipped: Tensor | bool = False) -> None:
        """Update the weights and the loss scale in place, and delete the gradients.

        The weights stay the same if `is_bad` is true, which lowers the scale, or if `is_skipped` is, which does not.
        Without `finish_gradients`, the gradients are unscaled here, and the step is bad if one of them is not finite.
        If no parameter has a gradient, nothing is known about the scale, which stays the same.
        """
        bad, other = (_condition(value, self.device) for value in (is_bad, is_skipped))
        parameters = _parameters_of(optimizer)
        has_gradients = any(parameter.grad is not None for parameter in parameters)
        if not self._gradients(parameters, are_finished=True):
            bad = bad | ~self.finish_gradients(optimizer).isfinite()
        self._model_to_masters()
        skipped = bad | other
        if takes_found_inf(optimizer):  # a fused optimizer of torch, which reads it on the device
            optimizer.found_inf = skipped.to(self.device, torch.float32, non_blocking=True)  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.found_inf  # type: ignore[attr-defined]  # the caller's own steps would read it
        elif isinstance(skipped, FakeTensor) or not bool(skipped):  # a simulated tensor has no value
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._passes.update(dict.fromkeys(parameters))
        self.masters_to_model()
        if self.scaler is not None and has_gradients:
            self.scaler.update(bad)

    @torch.no_grad()
    def masters_to_model(self) -> None:
        if self._masters:
            foreach_copy_(list(self._masters), list(self._masters.values()))
            self._written.update((half, _Seen(half)) for half in self._masters)

    @torch.no_grad()
    def _model_to_masters(self) -> None:
        """Copy weights that the caller has changed in the model, such as by its `load_state_dict`, to the masters.

        A master whose rounded value is still in the model keeps its bits.
        """
        for half, master in self._masters.items():
            seen = self._written.get(half)
            if seen is None or not seen.is_unchanged(half):
                master.copy_(torch.where(master.half() == half, master, half.float()))
                self._written[half] = _Seen(half)

    def state_dict(self) -> dict[str, Any]:
        """Return scale and master weights; empty in fp32 and bf16."""
        self._model_to_masters()
        state: dict[str, Any] = {} if self.scaler is None else {"scaler": self.scaler.state_dict()}
        if self._masters:
            state["masters"] = [master.detach() for master in self._masters.values()]
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`.

        Raises:
            ValueError: the state is of another mode or model, or its scale is not above 0; nothing was loaded.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"state given as {type(state).__name__}: give the result of state_dict()")
        # Everything is compared before anything is loaded, so a wrong state changes nothing.
        own, given = _contents(self.state_dict()), _contents(state)
        for name in own | given:
            if own.get(name) != given.get(name):
                raise ValueError(
                    f"{name} is {given.get(name, 'missing')}, but {own.get(name, 'missing')} in precision {self.name}: "
                    "load a state of the same mode, after master_weights() of the same model"
                )
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        for master, saved in zip(self._masters.values(), state.get("masters", ()), strict=True):
            master.copy_(saved)
        self.masters_to_model()


_BACKWARD = "call precision.backward(loss) instead of loss.backward()"


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer given as {type(optimizer).__name__}: give the optimizer of the master weights")
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _multiply(gradients: list[Tensor], factor: Tensor) -> None:
    for device in {gradient.device for gradient in gradients}:
        foreach_mul_([each for each in gradients if each.device == device], factor.to(device))


def _contents(state: object, name: str = "state") -> dict[str, str]:
    """Return the shape of each tensor, and the type of each other value, by its path."""
    if isinstance(state, Mapping | list | tuple):
        items = state.items() if isinstance(state, Mapping) else enumerate(state)
        return {path: kind for key, value in items for path, kind in _contents(value, f"{name}[{key!r}]").items()}
    return {name: f"a tensor {tuple(state.shape)}" if isinstance(state, Tensor) else type(state).__name__}
