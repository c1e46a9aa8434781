"""The synchronised BatchNorm layer, and the conversion of a module's BatchNorm layers to it and back.

Replicas exchange once per layer in the forward pass and share one autograd node, so the backward pass has no barrier.
Ranks exchange one tensor per layer and pass.

Shapes: N samples, C channels, P parts (replicas or ranks); x is (N, C, ...).
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from segapp.parallel.exchange import has_other_ranks
from segapp.parallel.rendezvous import ReplicaContext, current_replica
from segapp.parallel.scatter_gather import spread
from segapp.parallel.sync_batchnorm.arithmetic import (
    Composed,
    Kernels,
    Normalize,
    Pass,
    Statistics,
    count_of,
    has_kernels,
    join_moments,
    kernel_row,
    memory_format_of,
    moments_row,
    stack_parts,
    wide_dtype,
)


class _Part(NamedTuple):
    """One part of the batch at a layer: its input, its copies of the weights, its row of moments."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    row: Tensor
    num_values: int


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
        if not self.training and self.running_mean is not None:
            return self._after(super().forward(input))
        replica = self._joined_replica()
        if replica is not None:
            key = f"{self._name()} with {self.num_features} channels"
            return self._after(cast(Tensor, replica.exchange(key, self._part(input), self._normalize)))
        if self.training and has_other_ranks():
            return self._after(self._normalize([self._part(input)])[0])
        return self._after(super().forward(input))

    def _joined_replica(self) -> ReplicaContext | None:
        """Return the running replica if it has only a part of the batch."""
        replica = current_replica()
        if replica is None and getattr(self, "_is_replica", False):
            raise RuntimeError(
                f"{self._name()} runs outside its replica's forward pass, without the other replicas:"
                " exclude synchronised BatchNorm layers from activation checkpointing, or use sync_bn: false"
            )
        if replica is None or replica.num_replicas == 1:
            return None
        if has_other_ranks():
            raise RuntimeError(
                f"{self._name()} would synchronise over replicas and ranks at once: give every rank one device"
            )
        return replica

    def _is_tracked(self) -> bool:
        return self.training and self.track_running_stats and self.running_mean is not None

    def _joins_by_kernel(self, x: Tensor) -> bool:
        """Return True if torch's kernel joins the moments and tracks them, as it does with a constant momentum."""
        if not has_kernels(x):
            return False
        if not self._is_tracked():
            return True
        return self.momentum is not None and cast(Tensor, self.running_mean).dtype == wide_dtype(x)

    def _part(self, x: Tensor) -> _Part:
        x = x.contiguous(memory_format=memory_format_of(x))
        with torch.no_grad():
            row = kernel_row(x, self.eps) if self._joins_by_kernel(x) else moments_row(x)
        return _Part(x, self.weight, self.bias, row, count_of(x))

    def _normalize(self, parts: list[_Part]) -> list[Tensor]:
        """Return the outputs of this process's parts: of all replicas, or of this rank."""
        over_ranks = len(parts) == 1
        if len({part.row.numel() for part in parts}) > 1:
            raise ValueError("replicas have different numbers of channels in one BatchNorm layer: use the same layers")
        x = parts[0].x
        with torch.no_grad():
            rows_PK = stack_parts([part.row for part in parts], over_ranks)
            self._check_count(parts, rows_PK, over_ranks)
            joined = (self._join_by_kernel if self._joins_by_kernel(x) else self._join)(rows_PK, x)
            by_device = spread(joined, [part.x.device for part in parts])
            if has_kernels(x):
                by_device = {device: (mean, scale, n.int()) for device, (mean, scale, n) in by_device.items()}
        statistics = [Statistics(*by_device[part.x.device]) for part in parts]
        layer = Pass(statistics, Kernels if has_kernels(x) else Composed, self.eps, over_ranks)
        tensors = ([getattr(part, name) for part in parts] for name in ("x", "weight", "bias"))
        return list(Normalize.apply(layer, *(tensor for column in tensors for tensor in column)))

    def _check_count(self, parts: list[_Part], rows_PK: Tensor, over_ranks: bool) -> None:
        count = sum(part.num_values for part in parts)
        if over_ranks and count < 2:
            count = round(rows_PK[:, -1].sum().item())  # only a rank with fewer than two values waits for the device
        if count < 2:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got {count} in the whole batch at"
                f" {self._name()}: use a larger batch or crop"
            )

    def _join_by_kernel(self, rows_PK: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Join the parts' `kernel_row`s and track them: the arguments of `Statistics`."""
        means_PC, invstds_PC, counts_P1 = rows_PK.split_with_sizes([self.num_features, self.num_features, 1], dim=1)
        running_mean_C, running_var_C = (self.running_mean, self.running_var) if self._is_tracked() else (None, None)
        if self._is_tracked():
            cast(Tensor, self.num_batches_tracked).add_(1)
        counts_P = counts_P1.squeeze(1)
        mean_C, invstd_C = torch.batch_norm_gather_stats_with_counts(
            means_PC, means_PC, invstds_PC, running_mean_C, running_var_C, self.momentum or 0.0, self.eps, counts_P
        )
        return mean_C, invstd_C, counts_P

    def _join(self, rows_PK: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Join the parts' `moments_row`s and track them: the arguments of `Statistics`."""
        mean_C, deviation_C, count_1 = join_moments(rows_PK)
        variance_C = deviation_C / count_1
        if self._is_tracked():
            self._track(torch.stack([mean_C, deviation_C / (count_1 - 1)]))
        scale_C = torch.rsqrt(variance_C + self.eps) if has_kernels(x) else variance_C
        joined = torch.cat([mean_C, scale_C, count_1]).to(wide_dtype(x))
        mean_C, scale_C, count_1 = joined.split_with_sizes([self.num_features, self.num_features, 1])
        return mean_C, scale_C, count_1

    def _track(self, moments_2C: Tensor) -> None:
        """Move the running mean and variance towards the batch's mean and unbiased variance."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # .data, as in torch's own batch_norm: the buffers' version must not change, or the backward pass of an earlier
        # micro-batch would report them as modified.
        running = [self.running_mean.data, self.running_var.data]
        values = list(moments_2C.to(running[0].dtype).unbind())
        if self.momentum is None:  # the mean over all batches; the division stays on the device
            weight = self.num_batches_tracked.to(running[0].dtype).reciprocal()
            torch._foreach_lerp_(running, values, [weight.expand_as(value) for value in values])
        else:
            torch._foreach_lerp_(running, values, self.momentum)

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
