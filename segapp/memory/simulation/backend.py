"""Accelerators that exist on paper: tensors with a shape, a device and a lifetime, and no numbers.

A PrivateUse1 backend in Python under torch's FakeTensorMode. Fake *CUDA* tensors cannot run backward on a machine
without a GPU. The backend is for the whole process and for good, so simulations run in a process of their own.

Left out, because no simulation can know it: the CUDA context, cuDNN's and cuBLAS's workspaces, what kernels take and
give back within one call, the allocator's fragmentation.
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
from torch.utils._python_dispatch import _disable_current_modes

from segapp.errors import RunError
from segapp.losses import lovasz, ohem
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
"""Operators of a step that take no memory, and that fake tensors have no rule for."""

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
    """Whether this torch can register a device in Python."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


@functools.cache
def set_up() -> None:
    """Registers the backend, once and for good in this process.

    Raises:
        RunError: this torch cannot.
    """
    if not is_supported():
        raise RunError(f"torch {torch.__version__} cannot simulate a device: use torch 2.11 or newer for the plan")
    backend_registration._setup_privateuseone_for_python_backend(BACKEND, backend_module=_AmpBackend())
    torch.autograd.set_multithreading_enabled(False)  # fake tensors are not thread-safe
    _register_autocast()
    _take_real_numbers()


class _AmpBackend(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may cast to."""
        return [torch.float16, torch.bfloat16]


class _WeightCache(dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]]):
    """Casts of weights, kept until the outermost autocast context ends, as CUDA's autocast does."""

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """The value in another floating dtype."""
        if not isinstance(value, Tensor) or value.dtype in (dtype, torch.float64) or not value.is_floating_point():
            return value
        if not (value.is_leaf and value.requires_grad and dtype != torch.float32):
            return value.to(dtype)
        key = id(value), dtype
        if key not in self:
            self[key] = value, value.to(dtype)
        return self[key][1]


_libraries: list[torch.library.Library] = []
"""Registrations last as long as these."""


def _register_autocast() -> None:
    """Autocast on the simulated device, by CUDA's lists of operators (those that segmentation networks use)."""
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


class _PaperAxis:
    """An axis whose numbers are a list, and whose tables are made outside of the simulation."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self.size_in, self.size_out, self.starts = axis.size_in, axis.size_out, axis.starts
        self.lower, self.upper = axis.lower.tolist(), axis.upper.tolist()

    def adjoint_table(self, first: int, last: int, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Tables of the right shapes."""
        with _disable_current_modes():
            samples, weights = self._axis.adjoint_table(first, last, low, high)
        return torch.empty(samples.shape, dtype=samples.dtype), torch.empty(weights.shape, dtype=weights.dtype)


class _PaperGrid(Grid):
    """The tables of a resampling: real numbers where Python looks at them, fake ones on the device."""

    def __init__(self, low: Any, high: Any, align_corners: bool, dtype: torch.dtype, device: torch.device) -> None:
        with _disable_current_modes():
            super().__init__(low, high, align_corners, dtype, torch.device("cpu"))
            rows: Any = _PaperAxis(self.rows)
        self._blocks, self.device, self.rows = None, device, rows
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, torch.empty(value.shape, dtype=value.dtype, device=device))


def _take_real_numbers() -> None:
    """Lets the losses that work band by band do so: only their tables hold numbers that Python must read."""
    bin_of = ohem._bin_of

    def bin_of_real(loss: float) -> int:
        with _disable_current_modes():
            return bin_of(loss)

    for users_of_grids in (bands, views):
        users_of_grids.grid_of = _PaperGrid  # type: ignore[attr-defined]
    ohem._bin_of = bin_of_real
    for module in (sums, lovasz):
        module.has_values = lambda _: True  # type: ignore[attr-defined]


@contextlib.contextmanager
def simulation(*modes: Any) -> Iterator[None]:
    """Everything inside happens on paper.

    Args:
        *modes: dispatch modes that see the operations, such as a `Recorder`.
    """
    set_up()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _apply_by_replacing))
        stack.enter_context(mock.patch.object(torch, "tensor", _tensor_of_numbers))
        stack.enter_context(mock.patch.object(FakeTensor, "__deepcopy__", _deepcopy_on_paper, create=True))
        stack.enter_context(FakeTensorMode())
        for mode in modes:
            stack.enter_context(mode)
        yield


def _apply_by_replacing(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`Module._apply`, which changes parameters in place, and fake ones cannot be: new ones take their places."""
    for part in module.modules() if recurse else (module,):
        for key, parameter in part._parameters.items():
            if parameter is not None:
                changed = fn(parameter.detach())
                part._parameters[key] = nn.Parameter(changed, parameter.requires_grad)
        for key, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[key] = fn(buffer)
    return module


def _deepcopy_on_paper(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """A fake tensor's copy; Python's own would copy the mode that it belongs to."""
    made = _like(tensor, str(tensor.device))
    copied = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    memo[id(tensor)] = copied
    return copied


_tensor = torch.tensor


def _tensor_of_numbers(data: Any, **options: Any) -> Tensor:
    """`torch.tensor`, which cannot make numbers on a device that has none: they are made on the host and moved."""
    device = torch.device(options.pop("device", None) or "cpu")
    made = _tensor(data, **options)
    return made if device.type == "cpu" else torch.empty(made.shape, dtype=made.dtype, device=device)


def skeleton(module: nn.Module) -> nn.Module:
    """The module with its tensors on the meta device: nothing but shapes, to be copied by `place`."""
    return module.to("meta")


def place(module: nn.Module, device_of: Callable[[str], str]) -> nn.Module:
    """A copy of a skeleton with its parameters and buffers on simulated devices; to be called within `simulation`.

    Args:
        module: on the meta device.
        device_of: the device of a part of the module, by the part's dotted name.
    """
    with _disable_current_modes():
        copied = copy.deepcopy(module)
    made: dict[int, Tensor] = {}
    for name, part in copied.named_modules():
        device = device_of(name)
        for key, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(_like(parameter, device), parameter.requires_grad)
                part._parameters[key] = made[id(parameter)]
        for key, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[key] = made.setdefault(id(buffer), _like(buffer, device))
    return copied


def _like(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
