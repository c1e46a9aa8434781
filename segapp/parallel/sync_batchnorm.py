"""BatchNorm over the whole batch, on several replicas or on several ranks.

Each part computes its count, mean and sum of squared deviations per channel; Chan, Golub and LeVeque's formula (1983,
"Algorithms for computing the sample variance") joins them, in float64 where the device has it, without the cancellation
of E[x^2] - E[x]^2. Replicas exchange once per layer in the forward pass and build one autograd graph, so the backward
pass has no barrier. Ranks exchange one tensor per layer and pass. Derivatives of any order exist, so gradient penalties
are exact.

Shapes: N samples, C channels, P parts (replicas or ranks); x is (N, C, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from segapp.parallel.exchange import has_other_ranks, stack_ranks
from segapp.parallel.rendezvous import current_replica


# --------------------------------------------------------------------------------------- arithmetic of one layer
def _per_channel(values_C: Tensor, like: Tensor) -> Tensor:
    return values_C.view(1, -1, *[1] * (like.dim() - 2))


def _summed_dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _affine(x: Tensor, mean_C: Tensor, scale_C: Tensor, shift_C: Tensor) -> Tensor:
    """Return (x - mean) * scale + shift per channel, in x's dtype; one kernel on CUDA."""
    if x.is_cuda and not torch.is_grad_enabled() and x.numel():
        ones = torch.ones_like(mean_C)
        return torch.batch_norm_elemt(x, scale_C, shift_C, mean_C, ones, 0.0)
    centred = x.to(mean_C.dtype) - _per_channel(mean_C, x)
    return torch.addcmul(_per_channel(shift_C, x), centred, _per_channel(scale_C, x)).to(x.dtype)


def _gradient_sums(grad: Tensor, x: Tensor, mean_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return, per channel, the sums of grad and of grad * (x - mean); one kernel on CUDA."""
    if x.is_cuda and not torch.is_grad_enabled() and x.numel():
        ones = torch.ones_like(mean_C)
        sums = torch.batch_norm_backward_reduce(grad, x, mean_C, ones, None, True, False, False)
        return sums[0], sums[1]
    wide = grad.to(mean_C.dtype)
    centred = x.to(mean_C.dtype) - _per_channel(mean_C, x)
    return wide.sum(_summed_dims(x)), (wide * centred).sum(_summed_dims(x))


class _Moments(torch.autograd.Function):
    """x (N, C, ...) -> per channel the mean and the sum of squared deviations from it, in float32 or better.

    Saves only x of x's size. Without samples both are 0.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        if x.numel() == 0:
            mean_C = torch.zeros(x.size(1), dtype=wide, device=x.device)
            deviation_C = torch.zeros_like(mean_C)
        elif x.is_cuda:
            mean_C, invstd_C = torch.batch_norm_stats(x, _STATS_EPS)
            deviation_C = (invstd_C.square().reciprocal() - _STATS_EPS).clamp_min(0) * _count(x)
        else:
            var_C, mean_C = torch.var_mean(x.to(wide), _summed_dims(x), correction=0)
            deviation_C = var_C * _count(x)
        ctx.save_for_backward(x, mean_C)
        return mean_C, deviation_C

    @staticmethod
    def backward(ctx: Any, grad_mean_C: Tensor, grad_deviation_C: Tensor) -> Tensor:
        x, mean_C = ctx.saved_tensors
        return _affine(x, mean_C, 2 * grad_deviation_C, grad_mean_C / max(1, _count(x)))


class _Normalize(torch.autograd.Function):
    """(x - mean) * invstd * weight + bias per channel; the backward pass is made of differentiable operations.

    `moments` is the graph node of `_Moments`, which has saved x already; without it, x is saved here. So x is saved
    once, as in `nn.BatchNorm2d`, also with hooks that move saved tensors to other memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean_C: Tensor,
        invstd_C: Tensor,
        weight_C: Tensor | None,
        bias_C: Tensor | None,
        moments: Any,
    ) -> Tensor:
        ctx.moments, ctx.bias_dtype = moments, None if bias_C is None else bias_C.dtype
        ctx.save_for_backward(None if moments is not None else x, mean_C, invstd_C, weight_C)
        scale_C = invstd_C if weight_C is None else invstd_C * weight_C
        shift_C = torch.zeros_like(mean_C) if bias_C is None else bias_C.to(mean_C.dtype)
        return _affine(x, mean_C, scale_C, shift_C)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean_C, invstd_C, weight_C = ctx.saved_tensors
        if ctx.moments is not None:
            x = ctx.moments.saved_tensors[0]
        weight = 1.0 if weight_C is None else weight_C
        grad_sum_C, grad_centred_sum_C = _gradient_sums(grad, x, mean_C)
        grad_x = None
        if ctx.needs_input_grad[0]:
            zeros = torch.zeros_like(mean_C)
            grad_x = _affine(grad, zeros, invstd_C * weight, zeros)
        grad_weight_C = None if weight_C is None else (grad_centred_sum_C * invstd_C).to(weight_C.dtype)
        grad_bias_C = None if ctx.bias_dtype is None else grad_sum_C.to(ctx.bias_dtype)
        return (
            grad_x,
            -grad_sum_C * invstd_C * weight,
            grad_centred_sum_C * weight,
            grad_weight_C,
            grad_bias_C,
            None,
        )


_STATS_EPS = 1e-5
"""Keeps torch's CUDA kernel, which returns 1 / sqrt(variance + eps), finite on constant channels."""


def _count(x: Tensor) -> int:
    """Return the number of values per channel."""
    return x.numel() // x.size(1) if x.size(1) else 0


def _as_row(count: int, mean_C: Tensor, deviation_C: Tensor) -> Tensor:
    """Return a part's moments as one tensor (2C + 1,), built on the device without a host synchronisation.

    In float64 where the device has it: counts are exact, and the joined mean is rounded once.
    """
    row = torch.cat([mean_C, deviation_C, mean_C.new_full((1,), float(count))])
    return row if row.device.type == "mps" else row.double()


def join_moments(rows_PK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the moments of all parts together, by Chan's formula.

    Args:
        rows_PK: one row per part, K = 2C + 1: C means, C sums of squared deviations, the count of values. Parts without
            values have weight 0.

    Returns:
        The means (C,), the sums of squared deviations (C,), the count (1,).
    """
    num_channels = rows_PK.size(1) // 2
    means_PC, deviations_PC, counts_P1 = torch.split(rows_PK, [num_channels, num_channels, 1], dim=1)
    count_1 = counts_P1.sum(0)
    mean_C = (counts_P1 * means_PC).sum(0) / count_1
    deviation_C = (deviations_PC + counts_P1 * (means_PC - mean_C).square()).sum(0)
    return mean_C, deviation_C, count_1


def _join_replicas(parts: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    main = parts[0][1].device
    if len({row.size(0) for _, row in parts}) > 1:
        raise ValueError("replicas have different numbers of channels in one BatchNorm layer: use the same layers")
    joined = torch.cat(join_moments(torch.stack([row.to(main) for _, row in parts])))
    count = sum(count for count, _ in parts)
    return [(count, joined.to(row.device)) for _, row in parts]


# ------------------------------------------------------------------------------------------------------------ layer
class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose statistics are those of the whole batch.

    In training it equals `nn.BatchNorm1d`, `2d` or `3d` on the whole batch, in outputs, in gradients of any order and
    in running statistics, whether the batch is split over replicas, over ranks (gloo or nccl), or not at all; a rank or
    a replica may have a single value per channel, and a rank none. For an undivided batch, and in evaluation, it calls
    torch's BatchNorm. Half inputs are normalised with float32 statistics.

    Takes `num_features`, `eps`, `momentum`, `affine` and `track_running_stats` like `nn.BatchNorm2d`, and inputs of
    shape (N, C) or (N, C, ...).

    Raises:
        ValueError: the whole batch has one value per channel.
        RuntimeError: a replica's layer runs outside its forward pass, as activation checkpointing does.
    """

    _batchnorm_class: type[nn.Module] = nn.BatchNorm2d
    """The class that `revert_sync_batchnorm` restores."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input (N, C, ...), of the same shape and dtype; see `nn.BatchNorm2d`."""
        self._check_input_dim(input)
        exchange = self._exchange() if self.training or self.running_mean is None else None
        output = super().forward(input) if exchange is None else self._normalize(input, exchange)
        return self._after(output)

    def _exchange(self) -> Callable[[int, Tensor], tuple[int | None, Tensor]] | None:
        """Return the exchange with the other parts of the batch; None if this is the whole batch."""
        replica = current_replica()
        if replica is None and getattr(self, "_is_replica", False):
            raise RuntimeError(
                f"{self._name()} runs outside its replica's forward pass, without the other replicas:"
                " exclude synchronised BatchNorm layers from activation checkpointing, or use sync_bn: false"
            )
        is_spread = replica is not None and replica.num_replicas > 1
        if is_spread and has_other_ranks():
            raise RuntimeError(
                f"{self._name()} would synchronise over replicas and ranks at once: give every rank one device"
            )
        if replica is not None and is_spread:
            key = f"{self._name()} with {self.num_features} channels"
            return lambda count, row: replica.exchange(key, (count, row), _join_replicas)
        if self.training and has_other_ranks():
            return lambda count, row: (None, torch.cat(join_moments(stack_ranks(row))))
        return None

    def _normalize(self, x: Tensor, exchange: Callable[[int, Tensor], tuple[int | None, Tensor]]) -> Tensor:
        mean_C, deviation_C = _Moments.apply(x)
        moments, dtype = mean_C.grad_fn, mean_C.dtype
        host_count, joined = exchange(_count(x), _as_row(_count(x), mean_C, deviation_C))
        mean_C, deviation_C, count_1 = torch.split(joined, [self.num_features, self.num_features, 1])
        if host_count is None and _count(x) < 2:
            host_count = int(count_1.item())  # only a rank with fewer than two values waits for the device
        if host_count is not None and host_count < 2:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got {host_count} in the whole batch at"
                f" {self._name()}: use a larger batch or crop"
            )
        if self.training and self.track_running_stats and self.running_mean is not None:
            self._track(mean_C.detach(), deviation_C.detach() / (count_1.detach() - 1))
        invstd_C = torch.rsqrt(deviation_C / count_1 + self.eps).to(dtype)
        return cast(Tensor, _Normalize.apply(x, mean_C.to(dtype), invstd_C, self.weight, self.bias, moments))

    @torch.no_grad()
    def _track(self, mean_C: Tensor, unbiased_variance_C: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        for running_C, value_C in ((self.running_mean, mean_C), (self.running_var, unbiased_variance_C)):
            # .data, as in torch's own batch_norm: the buffers' version must not change, or the backward pass of an
            # earlier micro-batch would report them as modified.
            value_C = value_C.to(running_C.dtype)
            if self.momentum is None:  # the mean over all batches; the division stays on the device
                running_C.data.lerp_(value_C, self.num_batches_tracked.to(running_C.dtype).reciprocal())
            else:
                running_C.data.lerp_(value_C, self.momentum)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise ValueError(
                f"{self._name()} expects input of shape (N, {self.num_features}, ...), got {tuple(input.shape)}"
            )

    def _name(self) -> str:
        return f"SyncBatchNorm {self.__dict__.get('_replica_name', '')}".rstrip()

    def _after(self, output: Tensor) -> Tensor:
        return output


class _SyncBatchNormAct(SyncBatchNorm):
    """A converted layer that contains dropout and activation, as timm's BatchNormAct2d does."""

    drop: nn.Module
    act: nn.Module

    def _after(self, output: Tensor) -> Tensor:
        return cast(Tensor, self.act(self.drop(output)))


_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Turn every BatchNorm layer of a module into a `SyncBatchNorm`, in place.

    The layers stay the same objects: parameters, buffers, hooks, state-dict keys and references remain valid.

    Args:
        module: any module, or a BatchNorm layer itself.

    Returns:
        The same module.

    Raises:
        TypeError: a layer is a subclass of BatchNorm with further behaviour.

    Example:
        >>> type(convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))[1]).__name__
        'SyncBatchNorm'
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, _BatchNorm) or isinstance(layer, SyncBatchNorm):
            continue
        original = type(layer)
        converted: type[SyncBatchNorm]
        if original in _PLAIN:
            converted = SyncBatchNorm
        elif isinstance(layer, nn.BatchNorm2d) and set(layer._modules) == {"drop", "act"}:
            converted = _SyncBatchNormAct
        else:
            raise TypeError(
                f"{name or 'the module'} is a {original.__name__}, which extends BatchNorm in a way that cannot be"
                " synchronised: replace it with nn.BatchNorm2d, or use sync_bn: false"
            )
        layer.__class__ = converted
        layer.__dict__["_batchnorm_class"] = original
    return module


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Turn every `SyncBatchNorm` back into its original class, in place; `nn.BatchNorm2d` if it had none.

    Args:
        module: any module, or a `SyncBatchNorm` itself.

    Returns:
        The same module.
    """
    for layer in list(module.modules()):
        if isinstance(layer, SyncBatchNorm):
            layer.__class__ = layer.__dict__.pop("_batchnorm_class", nn.BatchNorm2d)
    return module
