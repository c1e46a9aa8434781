"""The synchronised BatchNorm layer, and the conversion of a module's BatchNorm layers to it and back.

Replicas exchange once per layer in the forward pass and share one autograd node, so the backward pass has no barrier.
Ranks exchange one tensor per layer and pass.

Forward, each part of the batch has a row of moments per channel; the joined ones normalise every part. Backward, two
sums per channel are added over the parts. Only the input is saved, as in `nn.BatchNorm2d`. On CUDA these are kernels of
torch's own SyncBatchNorm; elsewhere the moments are joined by Chan, Golub and LeVeque's formula (1983, "Algorithms for
computing the sample variance") in float64, without the cancellation of E[x^2] - E[x]^2.

If a derivative of the derivative is asked for (`create_graph`, as gradient penalties do), the backward pass consists of
differentiable operations, so derivatives of any order exist.

Shapes: N samples, C channels, P parts (replicas or ranks); x is (N, C, ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from segapp.accelerator import wide
from segapp.compat.torch import BatchNorm, foreach_lerp_, is_replica, module_slots
from segapp.parallel.exchange import all_reduce_in_place, has_other_ranks, stack_ranks, sum_of_layer
from segapp.parallel.rendezvous import ReplicaContext, current_replica
from segapp.parallel.scatter_gather import reduce_add, spread, to_device

_NO_SAMPLES = 1e-30
"""Count of a part without samples for torch's kernel, which divides by the counts so far: no weight, and no NaN."""


def count_of(x: Tensor) -> int:
    """Return the number of values per channel."""
    return x.numel() // x.size(1) if x.size(1) else 0


def _summed_dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _per_channel(values_C: Tensor, like: Tensor) -> Tensor:
    return values_C.view(1, -1, *[1] * (like.dim() - 2))


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of statistics: float32 or better."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def has_kernels(x: Tensor) -> bool:
    """Return True if torch has the kernels of its SyncBatchNorm for this tensor."""
    return x.is_cuda


def kernel_row(x: Tensor, eps: float) -> Tensor:
    """Return a part's C means, C values 1 / sqrt(variance + eps) and the count as one tensor (2C + 1,)."""
    count = count_of(x)
    if count:
        mean_C, invstd_C = torch.batch_norm_stats(x, eps)
    else:
        mean_C = torch.zeros(x.size(1), dtype=wide_dtype(x), device=x.device)
        invstd_C = torch.ones_like(mean_C)
    return torch.cat([mean_C, invstd_C, mean_C.new_full((1,), float(count) or _NO_SAMPLES)])


def moments_row(x: Tensor) -> Tensor:
    """Return a part's C means, C sums of squared deviations and the count as one tensor (2C + 1,), differentiable."""
    x, count = x.to(wide_dtype(x)), count_of(x)
    if count:  # the sum of squares is divided by count - correction
        deviation_C, mean_C = torch.var_mean(x, _summed_dims(x), correction=count - 1)
    else:
        deviation_C = mean_C = x.sum(_summed_dims(x))
    return torch.cat([mean_C, deviation_C, mean_C.new_full((1,), float(count))])


def join_moments(rows_PK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the moments of all parts together, by Chan's formula, in float64 where the device has it.

    Args:
        rows_PK: one row per part, K = 2C + 1: C means, C sums of squared deviations, the count of values. Parts without
            values have weight 0.

    Returns:
        The means (C,), the sums of squared deviations (C,), the count (1,).
    """
    rows_PK = wide(rows_PK)
    num_channels = rows_PK.size(1) // 2
    means_PC, deviations_PC, counts_P1 = rows_PK.split_with_sizes([num_channels, num_channels, 1], dim=1)
    count_1 = counts_P1.sum(0)
    mean_C = (counts_P1 * means_PC).sum(0) / count_1
    deviation_C = (deviations_PC + counts_P1 * (means_PC - mean_C).square()).sum(0)
    return mean_C, deviation_C, count_1


def stack_parts(rows: Sequence[Tensor], over_ranks: bool) -> Tensor:
    """Return the rows of all parts (P, K): of the given ones on the first one's device, or one of every rank."""
    return stack_ranks(rows[0]) if over_ranks else torch.stack([to_device(row, rows[0].device) for row in rows])


# ------------------------------------------------------------------------------------------------- one layer's node
class Statistics(NamedTuple):
    """The whole batch's statistics on one device.

    Attributes:
        mean: (C,).
        scale: (C,) 1 / sqrt(variance + eps) for kernels, else the variances.
        counts: values per channel of each part, int32 (P,), for kernels; else of all parts, (1,).
    """

    mean: Tensor
    scale: Tensor
    counts: Tensor


class Kernels:
    """The arithmetic of a part by torch's kernels, one launch each."""

    @staticmethod
    def normalize(x: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, own: Statistics, eps: float) -> Tensor:
        """Return the normalised part."""
        return torch.batch_norm_elemt(x, weight_C, bias_C, own.mean, own.scale, eps)

    @staticmethod
    def sums(grad: Tensor, x: Tensor, own: Statistics, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums of grad and of grad * (x - mean) as one row (2C,), and the gradients of weight and bias."""
        like = own.mean
        grad_C, centred_C, weight_C, bias_C = torch.batch_norm_backward_reduce(
            grad, x, like, own.scale, like, True, True, True
        )
        return torch.cat([grad_C, centred_C]), weight_C, bias_C

    @staticmethod
    def shared(total: Tensor, weight_C: Tensor | None, own: Statistics, eps: float) -> Tensor:
        """Return what every part needs of the sums."""
        return total

    @staticmethod
    def unpack(shared: Tensor, num_dims: int) -> Sequence[Tensor]:
        """Return the values of `shared`, for inputs of so many dimensions."""
        return shared.chunk(2)

    @staticmethod
    def input_gradient(
        grad: Tensor, x: Tensor, weight_C: Tensor | None, own: Statistics, shared: Sequence[Tensor]
    ) -> Tensor:
        """Return the gradient of the part."""
        grad_C, centred_C = shared
        return torch.batch_norm_backward_elemt(grad, x, own.mean, own.scale, weight_C, grad_C, centred_C, own.counts)


class Composed:
    """The same by operators that every device has."""

    @staticmethod
    def normalize(x: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, own: Statistics, eps: float) -> Tensor:
        """Return the normalised part."""
        return torch.native_batch_norm(x, weight_C, bias_C, own.mean, own.scale, False, 0.0, eps)[0]

    @staticmethod
    def sums(grad: Tensor, x: Tensor, own: Statistics, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums of grad and of grad * (x - mean) / deviation as one row (2C,), and the same as gradients."""
        _, weight_C, bias_C = torch.ops.aten.native_batch_norm_backward(
            grad, x, None, own.mean, own.scale, None, None, False, eps, [False, True, True]
        )
        return torch.cat([bias_C, weight_C]), weight_C, bias_C

    @staticmethod
    def shared(total: Tensor, weight_C: Tensor | None, own: Statistics, eps: float) -> Tensor:
        """Return (4C,): the mean, and the factors of grad, of (x - mean) and of 1 in the input's gradient."""
        grad_C, normal_C = (total / own.counts).chunk(2)
        invstd_C = torch.rsqrt(own.scale + eps)
        factor_C = invstd_C if weight_C is None else invstd_C * weight_C
        return torch.cat([own.mean, factor_C, -factor_C * normal_C * invstd_C, -factor_C * grad_C])

    @staticmethod
    def unpack(shared: Tensor, num_dims: int) -> Sequence[Tensor]:
        """Return the values of `shared`, for inputs of so many dimensions."""
        return shared.view(4, 1, -1, *[1] * (num_dims - 2)).unbind()

    @staticmethod
    def input_gradient(
        grad: Tensor, x: Tensor, weight_C: Tensor | None, own: Statistics, shared: Sequence[Tensor]
    ) -> Tensor:
        """Return the gradient of the part."""
        mean, of_grad, of_centred, of_one = shared
        centred = x.to(mean.dtype) - mean
        return torch.addcmul(of_one, centred, of_centred, out=centred).addcmul_(grad, of_grad).to(x.dtype)


class Pass(NamedTuple):
    """A layer's constants in one forward pass.

    Attributes:
        statistics: for each part of this process, on its device.
        arithmetic: of the parts.
        eps: of the layer.
        over_ranks: True if the other parts of the batch are on other ranks.
    """

    statistics: Sequence[Statistics]
    arithmetic: type[Kernels | Composed]
    eps: float
    over_ranks: bool


class Normalize(torch.autograd.Function):
    """P inputs, weights and biases -> P normalised inputs, with the statistics of all parts."""

    @staticmethod
    def forward(ctx: Any, layer: Pass, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Return the outputs of the parts.

        Args:
            ctx: of autograd.
            layer: what all parts have in common.
            *tensors: the parts' inputs, then their weights (C,) or None, then their biases (C,) or None.
        """
        ctx.layer, num_parts = layer, len(tensors) // 3
        ctx.save_for_backward(*tensors[: 2 * num_parts])
        ctx.has_bias = tensors[-1] is not None
        parts = zip(*(tensors[i * num_parts : (i + 1) * num_parts] for i in range(3)), layer.statistics, strict=True)
        return tuple(
            layer.arithmetic.normalize(cast(Tensor, x), _as(weight, own.mean), _as(bias, own.mean), own, layer.eps)
            if cast(Tensor, x).numel()
            else torch.empty_like(cast(Tensor, x))
            for x, weight, bias, own in parts
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients in the order of the tensors."""
        num_parts = len(grads)
        xs, weights = ctx.saved_tensors[:num_parts], ctx.saved_tensors[num_parts:]
        gradients = _differentiable_gradients if torch.is_grad_enabled() else _gradients
        of_x, of_weight, of_bias = gradients(ctx.layer, grads, xs, weights, ctx.needs_input_grad[1 : num_parts + 1])
        of_weights = (None if w is None else g.to(w.dtype) for g, w in zip(of_weight, weights, strict=True))
        return (None, *of_x, *of_weights, *(of_bias if ctx.has_bias else [None] * num_parts))


_Columns: TypeAlias = tuple[list[Tensor | None], list[Tensor], list[Tensor]]


def _as(values_C: Tensor | None, like: Tensor) -> Tensor | None:
    return values_C if values_C is None or values_C.dtype == like.dtype else values_C.to(like.dtype)


def _gradients(
    layer: Pass,
    grads: Sequence[Tensor],
    xs: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    needs_x: Sequence[bool],
) -> _Columns:
    """Return the gradients of inputs, weights and biases."""
    arithmetic, all_own = layer.arithmetic, layer.statistics
    grads = [grad.contiguous(memory_format=memory_format_of(x)) for grad, x in zip(grads, xs, strict=True)]
    rows: list[Tensor] = []
    of_weight: list[Tensor] = []
    of_bias: list[Tensor] = []
    for grad, x, own in zip(grads, xs, all_own, strict=True):
        if x.numel():
            row, weight_C, bias_C = arithmetic.sums(grad, x, own, layer.eps)
        else:
            weight_C = bias_C = torch.zeros_like(own.mean)
            row = torch.cat([bias_C, weight_C])
        rows.append(row)
        of_weight.append(weight_C)
        of_bias.append(bias_C)
    of_x: list[Tensor | None] = [None] * len(xs)
    if any(needs_x):
        total = all_reduce_in_place(rows[0]) if layer.over_ranks else stack_parts(rows, over_ranks=False).sum(0)
        shared = arithmetic.shared(total, _as(weights[0], total), all_own[0], layer.eps)
        by_device = {
            device: arithmetic.unpack(copied, xs[0].dim())
            for device, (copied,) in spread([shared], [x.device for x in xs]).items()
        }
        for i, (grad, x, weight, own) in enumerate(zip(grads, xs, weights, all_own, strict=True)):
            if needs_x[i] and x.numel():
                of_x[i] = arithmetic.input_gradient(grad, x, _as(weight, own.mean), own, by_device[x.device])
            elif needs_x[i]:
                of_x[i] = torch.zeros_like(x)
    return of_x, of_weight, of_bias


def _differentiable_gradients(
    layer: Pass,
    grads: Sequence[Tensor],
    xs: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    needs_x: Sequence[bool],
) -> _Columns:
    """Return the gradients of inputs, weights and biases by differentiable operations, statistics included."""
    main = xs[0].device
    mean_C, deviation_C, count_1 = join_moments(stack_parts([moments_row(x) for x in xs], layer.over_ranks))
    invstd_C = torch.rsqrt(deviation_C / count_1 + layer.eps)
    normals, wides, rows, of_weight, of_bias = [], [], [], [], []
    for grad, x, weight in zip(grads, xs, weights, strict=True):
        dtype = wide_dtype(x)
        mean, invstd = (_per_channel(to_device(t.to(dtype), x.device), x) for t in (mean_C, invstd_C))
        normals.append((x.to(dtype) - mean) * invstd)
        wide = grad.to(dtype)
        of_bias.append(wide.sum(_summed_dims(x)))
        of_weight.append((wide * normals[-1]).sum(_summed_dims(x)))
        sums = torch.cat([of_bias[-1], of_weight[-1]])
        rows.append(sums if weight is None else sums * weight.to(dtype).repeat(2))
        wides.append((wide if weight is None else wide * _per_channel(weight.to(dtype), x), invstd))
    total = sum_of_layer(rows[0]) if layer.over_ranks else reduce_add(rows, main)
    of_x: list[Tensor | None] = []
    for x, normal, (wide, invstd), is_needed in zip(xs, normals, wides, needs_x, strict=True):
        grad_C, normal_C = to_device((total / count_1).to(normal.dtype), x.device).chunk(2)
        own = invstd * (wide - _per_channel(grad_C, x) - normal * _per_channel(normal_C, x))
        of_x.append(own.to(x.dtype) if is_needed else None)
    return of_x, of_weight, of_bias


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return channels_last if x is dense in it, else the contiguous format: those that the kernels take."""
    for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and x.is_contiguous(memory_format=layout):
            return layout
    return torch.contiguous_format


class _BatchPart(NamedTuple):
    """One part of the batch at a layer: its input, its copies of the weights, its row of moments."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    row: Tensor
    num_values: int


class SyncBatchNorm(BatchNorm):
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

    _has_found_values = False
    """True once this rank, without values of its own, has found two or more in the whole batch."""

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
        if replica is None and is_replica(self):
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

    def _part(self, x: Tensor) -> _BatchPart:
        x = x.contiguous(memory_format=memory_format_of(x))
        with torch.no_grad():
            row = kernel_row(x, self.eps) if self._joins_by_kernel(x) else moments_row(x)
        return _BatchPart(x, self.weight, self.bias, row, count_of(x))

    def _normalize(self, parts: list[_BatchPart]) -> list[Tensor]:
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

    def _check_count(self, parts: list[_BatchPart], rows_PK: Tensor, over_ranks: bool) -> None:
        count = sum(part.num_values for part in parts)
        if over_ranks and count < 2:
            if count == 0 and self._has_found_values:
                return  # a rank that stays without samples waits for the device once; the others check every batch
            count = round(rows_PK[:, -1].sum().item())
            self._has_found_values = count > 1
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
            foreach_lerp_(running, values, [weight.expand_as(value) for value in values])
        else:
            foreach_lerp_(running, values, self.momentum)

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
        if not isinstance(layer, BatchNorm) or isinstance(layer, SyncBatchNorm):
            continue
        original = type(layer)
        converted: type[SyncBatchNorm]
        if original in _PLAIN:
            converted = SyncBatchNorm
        elif isinstance(layer, nn.BatchNorm2d) and set(module_slots(layer)) == {"drop", "act"}:
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
            layer.__dict__.pop("_has_found_values", None)
    return module
