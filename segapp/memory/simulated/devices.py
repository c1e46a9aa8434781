"""Simulated devices: tensors with a shape, a device and a lifetime, but without data.

A PrivateUse1 backend in Python under torch's FakeTensorMode, because fake *CUDA* tensors cannot run backward on a
machine without a GPU. The backend cannot be removed from a process, so simulations run in processes of their own.

Not simulated: the CUDA context, the workspaces of cuDNN and cuBLAS, memory that kernels allocate and free within one
call, and the allocator's fragmentation.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from segapp.errors import RunError
from segapp.losses import lovasz
from segapp.losses.fused import bands, views
from segapp.losses.fused import pixel_sums as sums
from segapp.losses.fused.grid import Axis, Grid

BACKEND = "simgpu"

aten = torch.ops.aten
CHANGE_IN_PLACE = (
    aten._fused_sgd_.default,
    aten._fused_sgd_.tensor_lr,
    aten._fused_adamw_.default,
    aten._fused_adamw_.tensor_lr,
    aten._amp_update_scale_.default,
)
"""In-place operators of a step for which fake tensors have no rule; they allocate nothing."""

_IN_HALF = (
    "conv2d",
    "conv_transpose2d.input",
    "convolution",
    "linear",
    "matmul",
    "mm",
    "mv",
    "bmm",
    "addmm",
    "addmv",
    "addbmm",
    "baddbmm",
    "scaled_dot_product_attention",
)
_IN_FLOAT = (
    "log_softmax.int",
    "softmax.int",
    "layer_norm",
    "group_norm",
    "nll_loss2d",
    "nll_loss",
    "mse_loss",
    "cumsum",
    "prod",
    "pow.Tensor_Scalar",
)


def is_supported() -> bool:
    """Return True if this torch can register a device in Python."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


@functools.cache
def set_up() -> None:
    """Register the backend in this process, once.

    Raises:
        RunError: this torch cannot register a device.
    """
    if not is_supported():
        raise RunError(f"torch {torch.__version__} cannot simulate a device: use torch 2.11 or newer for the plan")
    backend_registration._setup_privateuseone_for_python_backend(BACKEND, backend_module=_AmpBackend())
    torch.autograd.set_multithreading_enabled(False)  # fake tensors are not thread-safe
    _register_autocast()
    _patch_losses()


class _AmpBackend(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes that autocast supports."""
        return [torch.float16, torch.bfloat16]


class _WeightCache(dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]]):
    """Casts of weights, cached until the outermost autocast context ends, as CUDA's autocast does."""

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return a floating-point tensor in another dtype, and any other value unchanged."""
        if not isinstance(value, Tensor) or value.dtype in (dtype, torch.float64) or not value.is_floating_point():
            return value
        if not (value.is_leaf and value.requires_grad and dtype != torch.float32):
            return value.to(dtype)
        key = id(value), dtype
        if key not in self:
            self[key] = value, value.to(dtype)
        return self[key][1]


_libraries: list[torch.library.Library] = []
"""Libraries whose registrations last as long as these objects."""


def _register_autocast() -> None:
    """Register autocast on the simulated device for the operators of CUDA's lists that segmentation networks use."""
    fallback = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.extend((fallback, library))
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, "AutocastPrivateUse1"))  # noqa: B009  # not in its stubs
    cache = _WeightCache()
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        cache.clear()
        clear()

    torch.clear_autocast_cache = clear_both

    def register(name: str, is_half: bool) -> None:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(aten, packet), overload or "default")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                dtype = torch.get_autocast_dtype(BACKEND) if is_half else torch.float32
                positional = [cache.cast(value, dtype) for value in args]
                return operator(*positional, **{key: cache.cast(value, dtype) for key, value in kwargs.items()})

        library.impl(name, kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]

    for name in _IN_HALF:
        register(name, True)
    for name in _IN_FLOAT:
        register(name, False)


class _SimulatedAxis:
    """A grid axis with real Python numbers; its tables are computed outside the simulation."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self.size_in, self.size_out, self.starts = axis.size_in, axis.size_out, axis.starts
        self.lower, self.upper = axis.lower.tolist(), axis.upper.tolist()

    def adjoint_table(self, first: int, last: int, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Return empty tables of the right shapes."""
        with _disable_current_modes():
            samples, weights = self._axis.adjoint_table(first, last, low, high)
        return torch.empty(samples.shape, dtype=samples.dtype), torch.empty(weights.shape, dtype=weights.dtype)


class _SimulatedGrid(Grid):
    """Tables of a resampling: real numbers where Python reads them, fake tensors on the device."""

    def __init__(self, low: Any, high: Any, align_corners: bool, dtype: torch.dtype, device: torch.device) -> None:
        with _disable_current_modes():
            super().__init__(low, high, align_corners, dtype, torch.device("cpu"))
            rows: Any = _SimulatedAxis(self.rows)
        self._blocks, self.device, self.rows = None, device, rows
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, torch.empty(value.shape, dtype=value.dtype, device=device))


def _patch_losses() -> None:
    """Patch the losses that work band by band: the tables whose numbers Python reads stay real."""
    for users_of_grids in (bands, views):
        users_of_grids.grid_of = _SimulatedGrid  # type: ignore[attr-defined]
    for module in (sums, lovasz):
        module.has_values = lambda _: True  # type: ignore[attr-defined]


class _WeightGradients(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the gradient of a convolution's weight the weight's memory format, as cuDNN does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not aten.convolution_backward.default or out[1] is None:
            return out
        weight = args[2]
        is_last = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
        return (out[0], out[1].contiguous(memory_format=torch.channels_last) if is_last else out[1], out[2])


@contextlib.contextmanager
def simulation(*modes: Any) -> Iterator[None]:
    """Run the body of the `with` statement on simulated devices.

    Args:
        *modes: dispatch modes for the operations, such as a `Recorder`.
    """
    set_up()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _apply_by_replacing))
        stack.enter_context(mock.patch.object(torch, "tensor", _tensor_on_device))
        stack.enter_context(mock.patch.object(FakeTensor, "__deepcopy__", _deepcopy_fake, create=True))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_WeightGradients())  # type: ignore[no-untyped-call]
        for mode in modes:
            stack.enter_context(mode)
        yield


def _apply_by_replacing(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replace parameters and buffers, where `Module._apply` changes them in place, which fake tensors do not allow."""
    _replace_tensors(module, lambda tensor, _: fn(_fake(tensor).detach()), recurse)
    return module


def _replace_tensors(module: nn.Module, change: Callable[[Tensor, str], Tensor], recurse: bool = True) -> None:
    """Replace parameters and buffers, in place; those that several parts of the module share stay shared.

    Args:
        module: changed in place.
        change: returns the new tensor, from the old one and the dotted name of its part.
        recurse: also in the parts of the module.
    """
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    for name, part in module.named_modules() if recurse else (("", module),):
        for key, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in parameters:
                    parameters[id(parameter)] = nn.Parameter(change(parameter, name), parameter.requires_grad)
                part._parameters[key] = parameters[id(parameter)]
        for key, buffer in part._buffers.items():
            if buffer is not None:
                if id(buffer) not in buffers:
                    buffers[id(buffer)] = change(buffer, name)
                part._buffers[key] = buffers[id(buffer)]


def _fake(tensor: Tensor) -> Tensor:
    """Return a fake tensor in place of a real one, such as the class weights of a criterion."""
    return tensor if isinstance(tensor, FakeTensor) else _like(tensor, str(tensor.device))


def _deepcopy_fake(tensor: Tensor, _memo: dict[int, Any]) -> Tensor:
    """Return a copy of a fake tensor; the default deepcopy would also copy its FakeTensorMode."""
    made = _like(tensor, str(tensor.device))
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


_tensor = torch.tensor


def _tensor_on_device(data: Any, **options: Any) -> Tensor:
    """Return `torch.tensor` on the host; on a simulated device an empty tensor of its shape and dtype."""
    device = torch.device(options.pop("device", None) or "cpu")
    made = _tensor(data, **options)
    return made if device.type == "cpu" else torch.empty(made.shape, dtype=made.dtype, device=device)


def skeleton(module: nn.Module) -> nn.Module:
    """Return the module with its tensors on the meta device, to be copied by `place`."""
    _replace_tensors(module, lambda tensor, _: _like(tensor, "meta"))
    return module


def place(module: nn.Module, device_of: Callable[[str], str]) -> nn.Module:
    """Return a copy of a skeleton with its tensors on simulated devices; to be called within `simulation`.

    Args:
        module: on the meta device.
        device_of: maps the dotted name of a submodule to its device.
    """
    with _disable_current_modes():
        copied = copy.deepcopy(module)
    _replace_tensors(copied, lambda tensor, name: _like(tensor, device_of(name)))
    return copied


def _like(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
