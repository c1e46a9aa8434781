"""Simulated devices: tensors with a shape, a device and a lifetime, but without data.

This is a PrivateUse1 backend in Python under torch's FakeTensorMode, because fake *CUDA* tensors cannot run a backward
pass on a machine without a GPU. The backend cannot be removed from a process, so simulations run in separate processes.

Not simulated: the CUDA context, the workspaces of cuDNN, most memory that kernels allocate and free within one call,
and the allocator's fragmentation.
"""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.compat.torch import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    attention_cudnn,
    attention_efficient,
    attention_math,
    autocast_operators,
    bucket_assignment,
    buffer_slots,
    lacks_fake_rule,
    named_arguments,
    parameter_slots,
    register_python_backend,
    tree_iter,
    without_autocast,
    without_dispatch_modes,
)
from segapp.losses.fused.block_sizes import buffers_of
from segapp.losses.fused.reference import compute_dtype
from segapp.memory.ledger import CUDA_ALLOC_UNIT_BYTES, StorageLedger

BACKEND = "simgpu"

aten = torch.ops.aten
AUTOCAST = {
    "lower": """
        cudnn_convolution cudnn_convolution_transpose _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc
        conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
        mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
        _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
        scaled_dot_product_attention""",
    "float32": """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
        nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
        hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
        multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
        dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
        _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa""",
    "dtype": """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
        linalg_matrix_norm.str_ord sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim""",
    "widest": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    "banned": "binary_cross_entropy",
}
"""Operators that CUDA's autocast changes, by what it does (ATen/autocast_mode.h).

lower: it casts arguments to the lower precision. float32: it casts them to float32. dtype: it asks for a float32 result
unless the caller gives a dtype. widest: it casts arguments to the widest of their types. banned: it raises. A test
compares the names with the installed torch.
"""

_WITH_DTYPE = {aten.norm.Scalar: aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim: aten.norm.ScalarOpt_dim_dtype}
"""Operators of the kind "dtype" without that argument, and the overloads that have it."""

_MULTIPROCESSORS = 132  # of an H100 or H200
_MASK_ALIGNMENT = 16
"""CUDA's memory-efficient attention pads the rows of a mask to a multiple of this."""


@functools.cache
def set_up() -> None:
    register_python_backend(BACKEND)
    torch.autograd.set_multithreading_enabled(False)  # fake tensors are not thread-safe
    _register_autocast()


class _WeightCache(dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]]):
    """Casts of weights, cached until the outermost autocast context ends, as CUDA's autocast does."""

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return an eligible tensor in another dtype, also in lists, and any other value unchanged."""
        if isinstance(value, list | tuple):
            return [self.cast(each, dtype) for each in value]
        if not _is_eligible(value) or value.dtype == dtype:
            return value
        # The condition of `cached_cast` in ATen/autocast_mode.cpp.
        is_weight = value.is_leaf and value.requires_grad and value.dtype == torch.float32
        if not is_weight or dtype == torch.float32 or not torch.is_autocast_cache_enabled():
            return value.to(dtype)
        key = id(value), dtype
        if key not in self:
            # With the value, because its id could otherwise be given to another tensor.
            self[key] = value, value.to(dtype)
        return self[key][1]


_casts = _WeightCache()


def _is_eligible(value: Any) -> bool:
    """Return True for a tensor that autocast may cast: on the device, of a floating-point type except float64."""
    is_own = isinstance(value, Tensor) and value.device.type == BACKEND
    return is_own and value.is_floating_point() and value.dtype != torch.float64


def _clear_casts(clear: Callable[[], None] = torch.clear_autocast_cache) -> None:
    _casts.clear()
    clear()


_libraries: list[torch.library.Library] = []
"""Library objects, which must stay alive as long as their registrations."""


def _register_autocast() -> None:
    """Register autocast on the simulated device for the operators for which the installed torch has it on CUDA."""
    fallback = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.extend((fallback, library))
    known = autocast_operators()
    for kind, names in AUTOCAST.items():
        for name in known.intersection(names.split()):
            library.impl(name, functools.partial(_autocast, kind, name), "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)  # type: ignore[no-untyped-call]


def _autocast(kind: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an operator as CUDA's autocast does."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(aten, packet), overload or "default")
    arguments = named_arguments(operator, args, kwargs)
    if kind == "banned":
        raise RuntimeError(f"{name} is unsafe to autocast: use binary_cross_entropy_with_logits, or BCEWithLogitsLoss")
    with without_autocast():
        if kind == "dtype":
            # They get the dtype as an argument, and make no float32 copy of their input.
            if _is_eligible(args[0]) and arguments.get("dtype") is None:
                arguments["dtype"] = torch.float32
                operator = _WITH_DTYPE.get(operator, operator)
            return operator(**arguments)
        dtype = torch.float32 if kind == "float32" else torch.get_autocast_dtype(BACKEND)
        if kind == "widest" and any(
            _is_eligible(each) and each.dtype == torch.float32 for each in tree_iter(arguments)
        ):
            dtype = torch.float32
        return operator(**{key: _casts.cast(value, dtype) for key, value in arguments.items()})


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Return attention as CUDA's kernels compute it: they keep no matrix of tokens by tokens except a mask.

    They keep their inputs, the output and one number per token and head. In half precision torch prefers cuDNN's kernel
    on Hopper and Blackwell (`check_prefer_cudnn_attention` in ATen/native/transformers/cuda/sdp_utils.cpp) and flash
    attention before them; both lay out the output like the query. In float32, and for a mask that is trained, such as a
    table of relative positions, only the memory-efficient kernel is possible. As on CUDA, float64 and inputs without
    four dimensions have no such kernel.
    """
    if query.dim() != 4 or query.dtype == torch.float64 or options.get("enable_gqa"):
        return attention_math(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]  # type: ignore[no-any-return]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # The kernels add the mask to the products, so one of bools is copied.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    has_gradient, is_trained_mask = (
        torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs)
        for inputs in ((query, key, value, attn_mask), (attn_mask,))
    )
    kernel = attention_cudnn
    if query.dtype == torch.float32 or is_trained_mask:
        kernel = attention_efficient
        if attn_mask is not None:
            num_keys = key.shape[2]
            # The kernel needs aligned rows, and gets a view of a wider copy.
            if num_keys % _MASK_ALIGNMENT:
                attn_mask = F.pad(attn_mask, (0, -num_keys % _MASK_ALIGNMENT))[..., :num_keys]
            attn_mask = attn_mask.expand(*query.shape[:3], num_keys)
    kept = query, key, value, attn_mask, has_gradient
    return kernel(*kept, dropout_p, is_causal, scale=options.get("scale"))[0]  # type: ignore[no-any-return]


def _triton_buffers(
    logits: Tensor, target: Tensor, weight: Tensor | None, align_corners: bool, *options: Any
) -> tuple[Tensor, ...]:
    """Return tensors like those that the Triton launch allocates and frees for the operator's arguments."""
    _ignore_index, _label_smoothing, with_gradient = options
    dtype = compute_dtype(logits)
    num_programs, num_partials = buffers_of(tuple(logits.shape), target.shape[-1], dtype, with_gradient)
    return (
        logits.new_empty(num_partials, dtype=dtype),
        logits.new_empty((2, num_programs), dtype=dtype),
        logits.new_empty(num_programs, dtype=torch.int32),
    )


def _reduction_buffer(values: Tensor, dims: Sequence[int] | None = None, *options: Any) -> tuple[Tensor, ...]:
    """Return a tensor like the buffer for the mean of each channel of an NHWC tensor, such as in global pooling.

    Reduce.cuh divides the sum of each output over blocks of 4 threads with 16 values each, and reserves 4 bytes for 128
    outputs in each block. As it starts no more blocks than the GPU can run, the most is 1 MiB per multiprocessor.
    """
    if not _is_nhwc(values) or {dim % 4 for dim in dims or ()} != {2, 3}:
        return ()
    return (values.new_empty(min(values.numel() * 4 * 128 // (4 * 16), _MULTIPROCESSORS * 2**20), dtype=torch.uint8),)


def _convolution_workspace(gradient: Tensor, values: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, ...]:
    """Return a tensor like cuDNN's workspace for the backward pass of a dilated convolution in TF32.

    The allocations of an H200 show copies of input and gradient in NCHW, and two of the weight.
    """
    _biases, _stride, _padding, dilation, *_ = options
    if values.dtype != torch.float32 or not _is_nhwc(values) or max(dilation) == 1:
        return ()
    return (values.new_empty(values.numel() + gradient.numel() + 2 * weight.numel()),)


def simulated_ledger(alloc_unit_bytes: int = CUDA_ALLOC_UNIT_BYTES) -> StorageLedger:
    """Return the ledger of a simulation, with the in-place rules and the loss's workspace that fake tensors lack."""
    workspaces: dict[Any, Any] = {
        torch.ops.segapp.upsample_cross_entropy.default: _triton_buffers,
        aten.mean.dim: _reduction_buffer,
        aten.convolution_backward.default: _convolution_workspace,
    }
    return StorageLedger(alloc_unit_bytes, lacks_fake_rule, workspaces)


class _MemoryFormats(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the results of convolutions the memory formats that cuDNN gives them.

    An output is NHWC if the input or the weight is (`cudnn_conv_suggest_memory_format` in ATen/native/ConvUtils.h), and
    a gradient has the format of its tensor.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is aten.convolution.default:
            return _nhwc_like(out, args[0], args[1])
        if func is not aten.convolution_backward.default:
            return out
        return _nhwc_like(out[0], args[1], args[2]), _nhwc_like(out[1], args[2]), out[2]


def _is_nhwc(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() and tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _nhwc_like(tensor: Tensor | None, *others: Tensor) -> Tensor | None:
    if tensor is None or not any(map(_is_nhwc, others)):
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


@contextlib.contextmanager
def simulation(*modes: Any) -> Iterator[None]:
    """Run the body of the `with` statement on simulated devices."""
    set_up()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _apply_by_replacing))
        stack.enter_context(mock.patch.object(torch, "tensor", _tensor_on_device))
        stack.enter_context(mock.patch.object(torch, "clear_autocast_cache", _clear_casts))
        stack.callback(_casts.clear)
        stack.enter_context(mock.patch.object(FakeTensor, "__deepcopy__", _deepcopy_fake, create=True))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_MemoryFormats())  # type: ignore[no-untyped-call]
        for mode in modes:
            stack.enter_context(mode)
        yield


def _apply_by_replacing(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replace parameters and buffers; `Module._apply` changes them in place, which fake tensors do not allow."""
    _replace_tensors(module, lambda tensor, _: fn(_fake(tensor).detach()), recurse)
    return module


def _replace_tensors(module: nn.Module, change: Callable[[Tensor, str], Tensor], recurse: bool = True) -> None:
    """Replace parameters and buffers, in place; tensors that several modules share stay shared."""
    replacements: dict[int, Tensor] = {}
    for name, part in module.named_modules() if recurse else (("", module),):
        all_slots: tuple[dict[str, Any], ...] = parameter_slots(part), buffer_slots(part)
        for slots in all_slots:
            for key, old in slots.items():
                if old is not None:
                    if id(old) not in replacements:
                        replacements[id(old)] = _as_parameter(change(old, name), old)
                    slots[key] = replacements[id(old)]


def _as_parameter(new: Tensor, old: Tensor) -> Tensor:
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new


def _fake(tensor: Tensor) -> Tensor:
    """Return a fake tensor instead of a real one, such as the class weights of a criterion."""
    return tensor if isinstance(tensor, FakeTensor) else _like(tensor, str(tensor.device))


def _deepcopy_fake(tensor: Tensor, _memo: dict[int, Any]) -> Tensor:
    """Return a copy of a fake tensor; the default deepcopy would also copy its FakeTensorMode."""
    return _as_parameter(_like(tensor, str(tensor.device)), tensor)


_tensor = torch.tensor


def _tensor_on_device(data: Any, **options: Any) -> Tensor:
    """Return `torch.tensor` on the host; on a simulated device an empty tensor with its shape and dtype."""
    device = torch.device(options.pop("device", None) or "cpu")
    on_host = _tensor(data, **options)
    return on_host if device.type == "cpu" else torch.empty(on_host.shape, dtype=on_host.dtype, device=device)


def skeleton(module: nn.Module) -> nn.Module:
    """Return the module with its tensors on the meta device, for copies by `place`."""
    _replace_tensors(module, lambda tensor, _: _like(tensor, "meta"))
    return module


def place(module: nn.Module, device_of: Callable[[str], str]) -> nn.Module:
    """Return a copy of a skeleton with its tensors on simulated devices; call it within `simulation`."""
    with without_dispatch_modes():
        copied = copy.deepcopy(module)
    _replace_tensors(copied, lambda tensor, name: _like(tensor, device_of(name)))
    return copied


def _like(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


class Buckets:
    """Memory of DistributedDataParallel's reducer, which copies gradients into buckets in the reverse parameter order.

    With `gradient_as_bucket_view`, a gradient becomes a view of its bucket; without it, buckets are additional memory.
    A bucket is allocated with its first gradient (`lazy_bucket_allocation`, which `wrap_ddp` sets if torch has it) or
    at construction.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, as_views: bool, is_lazy: bool, ledger: StorageLedger
    ) -> None:
        self.as_views, self.ledger = as_views, ledger
        self._groups: list[list[nn.Parameter]] = []
        self._flat: dict[int, Tensor] = {}
        self._position: dict[nn.Parameter, tuple[int, int]] = {}
        # DDP fills its buckets in about the order in which a backward pass makes gradients.
        trained = [p for p in reversed(list(parameters)) if p.requires_grad]
        for number, indices in enumerate(bucket_assignment(trained)):
            self._groups.append([trained[i] for i in indices])
            starts = itertools.accumulate((p.numel() for p in self._groups[-1]), initial=0)
            self._position |= {p: (number, start) for p, start in zip(self._groups[-1], starts, strict=False)}
        for number in range(0 if is_lazy else len(self._groups)):
            self._allocate(number)
        self.keeps_buckets = not is_lazy
        for parameter in self._position:
            hook: Any = parameter.register_post_accumulate_grad_hook
            hook(self._move)

    def _allocate(self, number: int) -> Tensor:
        group = self._groups[number]
        flat = torch.zeros(sum(p.numel() for p in group), dtype=group[0].dtype, device=group[0].device)
        self.ledger.tag([flat], "gradients" if self.as_views else "buckets")
        self._flat[number] = flat
        return flat

    def _move(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        number, offset = self._position[parameter]
        flat = self._flat.get(number)
        flat = self._allocate(number) if flat is None else flat
        if self.as_views:
            parameter.grad = flat[offset : offset + parameter.numel()].view(parameter.shape)

    def end_backward(self) -> None:
        """Free lazy buckets, which live as long as their gradients."""
        if not self.keeps_buckets:
            self._flat.clear()
