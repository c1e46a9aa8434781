"""CPU implementations of torch's CUDA kernels for SyncBatchNorm, by their definitions, as one operator each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from segapp.parallel import sync_batchnorm


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _shaped(values: Tensor, x: Tensor) -> Tensor:
    return values.double().view(1, -1, *[1] * (x.dim() - 2))


def _check_layout(*tensors: Tensor) -> None:
    """Check what the kernels take: all contiguous, or all channels_last."""
    layouts = [torch.contiguous_format]
    if tensors[0].dim() in (4, 5):
        layouts.append(torch.channels_last if tensors[0].dim() == 4 else torch.channels_last_3d)
    assert any(all(t.is_contiguous(memory_format=layout) for t in tensors) for layout in layouts)
    assert all(t.numel() for t in tensors), "the kernels refuse empty inputs"


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check_layout(x)
    var, mean = torch.var_mean(x.double(), _dims(x), correction=0)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return mean.to(dtype), (var + eps).rsqrt().to(dtype)


def gather_stats_with_counts(
    like: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Join in the order of the rows, with the divisions of the kernel, which are NaN for two counts of 0."""
    assert like.dtype == counts.dtype == means.dtype
    assert running_mean is None or running_mean.dtype == counts.dtype
    mean, deviation, total = torch.zeros_like(means[0]), torch.zeros_like(means[0]), 0.0
    for own_mean, own_invstd, count in zip(means, invstds, counts.tolist(), strict=True):
        factor = 1.0 / (total + count)
        deviation = deviation + (own_invstd**-2 - eps) * count + (mean - own_mean) ** 2 * total * count * factor
        mean = total * factor * mean + count * factor * own_mean
        total += count
    if running_mean is not None and running_var is not None:
        running_mean.data.lerp_(mean, momentum)
        running_var.data.lerp_(deviation / (total - 1), momentum)
    return mean, (deviation / total + eps).rsqrt()


def elemt(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    _check_layout(x)
    assert mean.dtype == invstd.dtype == torch.promote_types(x.dtype, torch.float32)
    y = (x.double() - _shaped(mean, x)) * _shaped(invstd, x)
    y = y if weight is None else y * _shaped(weight, x)
    return (y if bias is None else y + _shaped(bias, x)).to(x.dtype)


def backward_reduce(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_layout(grad, x)
    total = grad.double().sum(_dims(x))
    centred = (grad.double() * (x.double() - _shaped(mean, x))).sum(_dims(x))
    values = (total, centred, centred * invstd.double(), total)
    return tuple(value.to(mean.dtype) for value in values)  # type: ignore[return-value]


def backward_elemt(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    _check_layout(grad, x)
    assert count.dtype == torch.int32
    num_values = count.sum().double()
    factor = invstd.double().square() * sum_dy_xmu.double() / num_values
    centred = (x.double() - _shaped(mean, x)) * _shaped(factor, x)
    scale = invstd if weight is None else invstd.double() * weight.double()
    return ((grad.double() - _shaped(sum_dy / num_values, x) - centred) * _shaped(scale, x)).to(x.dtype)


def _has_kernels(_x: Tensor) -> bool:
    return True  # a `Mock` would keep every input alive


@contextmanager
def kernels_on_the_cpu() -> Iterator[None]:
    """Let the layer take the way of CUDA on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    for function in (stats, gather_stats_with_counts, elemt, backward_reduce, backward_elemt):
        library.impl(f"batch_norm_{function.__name__}", function, "CPU")
    try:
        with mock.patch.object(sync_batchnorm, "has_kernels", _has_kernels):
            yield
    finally:
        library._destroy()
