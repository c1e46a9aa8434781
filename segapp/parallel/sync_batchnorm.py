"""The synchronized BatchNorm layer, and the conversion of a module's BatchNorm layers to it and back.

In the forward pass, each part of the batch has two moments per channel; the joined moments normalize every part. In the
backward pass, two sums per channel are added over the parts. Replicas exchange once per layer in the forward pass, and
autograd joins their backward passes, which therefore have no barrier. Ranks exchange one tensor per layer and pass.

The gradient of a part's input depends on the sums of all parts, and a recomputed block must give out the saved tensors
of each part separately. So each part has two autograd nodes: the backward pass of `_NormalizePart` computes the part's
sums, and the backward pass of `_PartGradient` computes the gradient of the input. `_JoinSums` adds the sums in between.
Tensors without values, the *ties*, connect the nodes. Only the input is saved, as in `nn.BatchNorm2d`. If a second
derivative is requested (`create_graph`, as in gradient penalties), the backward pass consists of differentiable
operations.

On CUDA, torch's own SyncBatchNorm kernels do the arithmetic. On other devices, the moments are joined by Chan, Golub
and LeVeque's formula (1983, "Algorithms for computing the sample variance") in float64, without the cancellation of
E[x^2] - E[x]^2.

Shapes: N samples, C channels, P parts (replicas or ranks); x is (N, C, ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from segapp.accelerator import wide
from segapp.compat.torch import BatchNorm, foreach_lerp_, is_replica, module_slots
from segapp.parallel.recompute import current_tape
from segapp.parallel.rendezvous import ReplicaContext, current_replica
from segapp.parallel.scatter_gather import (
    all_reduce_in_place,
    has_other_ranks,
    reduce_add,
    spread,
    stack_ranks,
    sum_of_layer,
    to_device,
)

_Values = TypeVar("_Values", Tensor, "Tensor | None")

_NO_SAMPLES = 1e-30
"""Count of a part without samples for torch's kernel, which divides by the counts so far: no weight, but no NaN."""


def has_kernels(x: Tensor) -> bool:
    """Return True if torch has the kernels of its SyncBatchNorm for this tensor."""
    return x.is_cuda


def _count_of(x: Tensor) -> int:
    """Return the number of values per channel."""
    return x.numel() // x.size(1) if x.size(1) else 0


def _summed_dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _per_channel(values_C: Tensor, like: Tensor) -> Tensor:
    return values_C.view(1, -1, *[1] * (like.dim() - 2))


def _statistics_dtype(x: Tensor) -> torch.dtype:
    """Return float32 or better."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _as(values: _Values, like: Tensor) -> _Values:
    """Return values in another tensor's dtype; this comparison is cheaper than a call of `Tensor.to`."""
    return values if values is None or values.dtype == like.dtype else values.to(like.dtype)


def moments_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a part's C means and C variances, differentiable; zeros for a part without values."""
    x = x.to(_statistics_dtype(x))
    if not _count_of(x):
        zeros_C = x.sum(_summed_dims(x))
        return zeros_C, zeros_C
    variance_C, mean_C = torch.var_mean(x, _summed_dims(x), correction=0)
    return mean_C, variance_C


def moments_of_ranks(
    pair: Sequence[Tensor], num_values: int, *, is_wide: bool = True
) -> tuple[Sequence[Tensor], Tensor]:
    """Return this rank's two moments (C,) and number of values per channel as (P, C) and (P,) of all ranks."""
    num_channels = len(pair[0])
    rows_PK = stack_ranks(torch.cat([*pair, pair[0].new_full((1,), num_values or _NO_SAMPLES)]))
    rows_PK = wide(rows_PK) if is_wide else rows_PK
    first_PC, second_PC, counts_P1 = rows_PK.split_with_sizes([num_channels, num_channels, 1], dim=1)
    return (first_PC, second_PC), counts_P1.squeeze(1)


def join_moments(moments: Sequence[Tensor], shares_P1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means and variances (C,) of all parts from each part's (P, C), by Chan's formula; differentiable."""
    means_PC, variances_PC = moments
    mean_C = (shares_P1 * means_PC).sum(0)
    centred_PC = means_PC - mean_C
    return mean_C, (shares_P1 * torch.addcmul(variances_PC, centred_PC, centred_PC)).sum(0)


def stack_pairs(pairs: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return two values (C,) of each part as (P, 2, C) on the first part's device, with one copy per other part."""
    home = pairs[0][0].device
    rows: list[Tensor] = []
    for pair in pairs:
        rows += pair if pair[0].device == home else to_device(torch.stack(list(pair)), home).unbind()
    return torch.stack(rows).view(len(pairs), 2, -1)


class Counts:
    """The numbers of values per channel of all parts, (P,) in the dtype of the statistics, and what follows from them.

    Their sum, `total`, may be known on the host.
    """

    def __init__(self, of_parts_P: Tensor, total: float | None = None) -> None:
        self.of_parts_P, self._total = of_parts_P, total
        self._on: dict[torch.device, Tensor] = {}

    @classmethod
    def of_replicas(cls, num_values: Sequence[int], like: Tensor) -> Counts:
        """Return the counts of the parts of this process, in the dtype and on the device of a tensor."""
        # Not torch.tensor(num_values), whose copy to a GPU would wait for the GPU.
        return cls(torch.cat([like.new_full((1,), n or _NO_SAMPLES) for n in num_values]), sum(num_values))

    @cached_property
    def total(self) -> Any:
        """The number of values of all parts; if only the device knows it, a tensor (), which promotes no dtype."""
        return wide(self.of_parts_P).sum() if self._total is None else self._total

    @cached_property
    def shares(self) -> Tensor:
        """The parts' shares of all values, (P, 1), in float64 if the device has it."""
        shares_P: Tensor = wide(self.of_parts_P) / self.total
        return shares_P.unsqueeze(1)

    def on(self, device: torch.device) -> Tensor:
        """Return the counts on a device, int32 (P,), in the form of torch's kernels."""
        if device not in self._on:
            self._on[device] = to_device(self.of_parts_P.int(), device)
        return self._on[device]


class _Statistics(NamedTuple):
    """The whole batch's statistics for one part, on its device.

    For torch's kernels, `scale` is 1 / sqrt(variance + eps) and `counts` are the numbers of values per channel of each
    part, int32 (P,). Otherwise, `scale` is the variance and `counts` the number of values of all parts.
    """

    mean: Tensor
    scale: Tensor
    counts: Any
    eps: float
    by_kernels: bool


class _Pending(NamedTuple):
    """A part's backward pass between its two nodes: the gradient of its output, what was saved, and its two sums (C,).

    With n = (x - mean) / deviation, grad and grad * n are summed, or, for torch's kernels, grad and grad * (x - mean).
    `of_x` is the first term of the input's gradient, if it is already computed.
    """

    grad: Tensor
    x: Tensor
    weight: Tensor | None
    sums: tuple[Tensor, Tensor] | None = None
    of_x: Tensor | None = None


class _PartState:
    """Data that the two nodes of a part share."""

    own: _Statistics
    pending: _Pending | None = None
    """None until `_NormalizePart` has run; it does not run if nothing depends on the output of this part."""
    shared: Sequence[Tensor] = ()
    """Two values (C,) of the whole batch."""
    gradients: Sequence[Tensor] = ()
    """Gradients of input, weight and bias, under `create_graph`."""


def _normalized(x: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, own: _Statistics) -> Tensor:
    """Return a normalized part."""
    if not x.numel():
        return torch.empty_like(x)
    weight_C, bias_C = _as(weight_C, own.mean), _as(bias_C, own.mean)
    if own.by_kernels:
        return torch.batch_norm_elemt(x, weight_C, bias_C, own.mean, own.scale, own.eps)
    return torch.native_batch_norm(x, weight_C, bias_C, own.mean, own.scale, False, 0.0, own.eps)[0]


def _begun(grad: Tensor, x: Tensor, weight: Tensor | None, own: _Statistics) -> tuple[_Pending, Tensor, Tensor]:
    """Return a part's backward pass with its sums, and the gradients (C,) of its weight and bias."""
    weight_C, mean = _as(weight, own.mean), own.mean
    if not x.numel():
        zeros_C = torch.zeros_like(mean)
        return _Pending(grad, x, weight_C, (zeros_C, zeros_C)), zeros_C, zeros_C
    if own.by_kernels:
        grad_C, centred_C, of_weight_C, of_bias_C = torch.batch_norm_backward_reduce(
            grad, x, mean, own.scale, mean, True, True, True
        )
        return _Pending(grad, x, weight_C, (grad_C, centred_C)), of_weight_C, of_bias_C
    of_x, of_weight_C, of_bias_C = torch.ops.aten.native_batch_norm_backward.default(
        _as(grad, mean), _as(x, mean), weight_C, mean, own.scale, None, None, False, own.eps, [True, True, True]
    )
    return _Pending(grad, x, weight_C, (of_bias_C, of_weight_C), of_x), of_weight_C, of_bias_C


def _input_gradient(pending: _Pending, own: _Statistics, shared: Sequence[Tensor]) -> Tensor:
    """Return the gradient of a part's input, weight / deviation * (grad - E[grad] - n * E[grad * n]).

    Without torch's kernels, the last two terms are a normalization of the input with another weight and bias.
    """
    x, (first_C, second_C) = pending.x, shared
    if not x.numel():
        return torch.zeros_like(x)
    if own.by_kernels:
        return torch.batch_norm_backward_elemt(
            pending.grad, x, own.mean, own.scale, pending.weight, first_C, second_C, own.counts
        )
    other_terms = _normalized(_as(x, own.mean), second_C, first_C, own)
    return _as(cast(Tensor, pending.of_x).sub_(other_terms), x)


class _PartGradient(torch.autograd.Function):
    """A part's input (N, C, ...), weight and bias -> a tie; its backward pass returns the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, part: _PartState, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Save the input and the weight for both nodes, and return the tie."""
        ctx.set_materialize_grads(False)
        ctx.part = part
        ctx.save_for_backward(x, weight)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[Tensor | None, ...]:
        """Return the gradient of the input; under `create_graph`, all three gradients."""
        part: _PartState = ctx.part
        # References that remained would be parts of cycles.
        gradients, part.gradients = part.gradients, ()
        pending, part.pending = part.pending, None
        shared, part.shared = part.shared, ()
        if torch.is_grad_enabled():
            needed = zip(gradients, ctx.needs_input_grad[1:], strict=True)
            return None, *(gradient if is_needed else None for gradient, is_needed in needed)
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        if pending is None:
            x, weight = ctx.saved_tensors
            pending = _begun(torch.zeros_like(x), x, weight, part.own)[0]
        return None, _input_gradient(pending, part.own, shared), None, None


class _JoinSums(torch.autograd.Function):
    """The ties of this process's parts -> one tie; its backward pass adds the sums of all parts and ranks.

    `nodes` are the parts' nodes of `_PartGradient`; None if a part needs no gradient.
    """

    @staticmethod
    def forward(ctx: Any, parts: Sequence[_PartState], nodes: Sequence[Any], over_ranks: bool, *ties: Tensor) -> Tensor:
        """Return the tie, on the first part's device."""
        ctx.set_materialize_grads(False)
        ctx.parts, ctx.nodes, ctx.over_ranks = parts, nodes, over_ranks
        return ties[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[None, ...]:
        """Give each part the values of the whole batch; under `create_graph`, its gradients."""
        parts: Sequence[_PartState] = ctx.parts
        if torch.is_grad_enabled():
            all_pending = []
            for part, node in zip(parts, ctx.nodes, strict=True):
                x, weight = node.saved_tensors if part.pending is None else part.pending[1:3]
                all_pending.append(part.pending or _Pending(torch.zeros_like(x), x, weight))
            all_gradients = _differentiable_gradients(all_pending, parts[0].own.eps, over_ranks=ctx.over_ranks)
            for part, gradients in zip(parts, all_gradients, strict=True):
                part.gradients = gradients
        elif any(node is not None and node.needs_input_grad[1] for node in ctx.nodes):
            shared_2C = _JoinSums._shared(parts, over_ranks=ctx.over_ranks)
            devices = dict.fromkeys(part.own.mean.device for part in parts)
            on = {device: to_device(shared_2C, device).unbind() for device in devices}
            for part in parts:
                part.shared = on[part.own.mean.device]
        return (None,) * (3 + len(parts))

    @staticmethod
    def _shared(parts: Sequence[_PartState], *, over_ranks: bool) -> Tensor:
        """Return the two values (C,) that the gradient of every input needs, from the sums of all parts."""
        pairs = [
            (torch.zeros_like(part.own.mean),) * 2 if part.pending is None else cast(Any, part.pending.sums)
            for part in parts
        ]
        total_2C = all_reduce_in_place(torch.stack(pairs[0])) if over_ranks else stack_pairs(pairs).sum(0)
        own = parts[0].own
        if own.by_kernels:
            return total_2C
        weight_C = next(part.pending.weight for part in parts if part.pending is not None)
        factor_C = torch.rsqrt(own.scale + own.eps)
        if weight_C is not None:
            factor_C = factor_C * to_device(weight_C, factor_C.device)
        return total_2C * factor_C / own.counts  # type: ignore[no-any-return]


class _NormalizePart(torch.autograd.Function):
    """A part's input, weight, bias and joined tie -> its normalized input, with the statistics of all parts.

    `node` is the part's node of `_PartGradient`, which has saved input and weight. It is None if they need no gradient;
    the gradients of other parts depend on this part's sums nevertheless.
    """

    @staticmethod
    def forward(
        ctx: Any, part: _PartState, node: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, tie: Tensor
    ) -> Tensor:
        """Return the output."""
        ctx.part, ctx.node, ctx.has_bias = part, node, bias is not None
        if node is None:
            ctx.save_for_backward(x, weight)
        return _normalized(x, weight, bias, part.own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of weight and bias, and keep the part's sums."""
        part: _PartState = ctx.part
        x, weight = (ctx.node or ctx).saved_tensors  # only once: a recomputed block gives out each saved tensor once
        if torch.is_grad_enabled():
            part.pending = _Pending(grad, x, weight)
            return None, None, None, None, None, None
        grad = grad.contiguous(memory_format=memory_format_of(x))
        part.pending, of_weight, of_bias = _begun(grad, x, weight, part.own)
        own_weight = None if weight is None else of_weight.to(weight.dtype)
        return None, None, None, own_weight, of_bias if ctx.has_bias else None, None


def _differentiable_gradients(
    parts: Sequence[_Pending], eps: float, *, over_ranks: bool
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return each part's gradients of input, weight and bias by differentiable operations, including the statistics."""
    xs = [part.x for part in parts]
    if over_ranks:
        moments, counts_P = moments_of_ranks(moments_of(xs[0]), _count_of(xs[0]))
        counts = Counts(counts_P)
    else:
        moments_P2C = wide(stack_pairs([moments_of(x) for x in xs]))
        moments, counts = moments_P2C.unbind(1), Counts.of_replicas([_count_of(x) for x in xs], moments_P2C)
    mean_C, variance_C = join_moments(moments, counts.shares)
    invstd_C = torch.rsqrt(variance_C + eps)
    rows, terms = [], []
    for grad, x, weight, *_ in parts:
        dtype = _statistics_dtype(x)
        mean, invstd = (_per_channel(to_device(t.to(dtype), x.device), x) for t in (mean_C, invstd_C))
        normal, grad = (x.to(dtype) - mean) * invstd, grad.to(dtype)
        of_bias, of_weight = grad.sum(_summed_dims(x)), (grad * normal).sum(_summed_dims(x))
        sums = torch.cat([of_bias, of_weight])
        rows.append(sums if weight is None else sums * weight.to(dtype).repeat(2))
        scaled = grad if weight is None else grad * _per_channel(weight.to(dtype), x)
        terms.append((normal, scaled, invstd, of_weight, of_bias))
    total = sum_of_layer(rows[0]) if over_ranks else reduce_add(rows, xs[0].device)
    gradients = []
    for x, (normal, scaled, invstd, of_weight, of_bias) in zip(xs, terms, strict=True):
        grad_C, normal_C = to_device((total / counts.total).to(normal.dtype), x.device).chunk(2)
        of_x = invstd * (scaled - _per_channel(grad_C, x) - normal * _per_channel(normal_C, x))
        gradients.append((of_x.to(x.dtype), of_weight, of_bias))
    return gradients


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return channels_last if x is dense in it, else the contiguous format; the kernels accept only these."""
    for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and x.is_contiguous(memory_format=layout):
            return layout
    return torch.contiguous_format


class SyncBatchNorm(BatchNorm):
    """BatchNorm with the statistics of the whole batch.

    In training it equals `nn.BatchNorm1d`, `2d` or `3d` on the whole batch in outputs, in gradients of any order and in
    running statistics, whether the batch is divided over replicas, over ranks (gloo or nccl), or not at all. A rank or
    a replica may have a single value per channel, and a rank may have none. For an undivided batch, and in evaluation,
    it calls torch's BatchNorm. Half inputs are normalized with float32 statistics.

    It has the parameters `num_features`, `eps`, `momentum`, `affine` and `track_running_stats` of `nn.BatchNorm2d`, and
    takes inputs of shape (N, C) or (N, C, ...).

    Raises:
        ValueError: the whole batch has one value per channel.
        RuntimeError: a replica's layer runs outside its forward pass, as in torch's activation checkpointing without
            `set_recompute`.
    """

    _batchnorm_class: type[nn.Module] = nn.BatchNorm2d
    """The class that `revert_sync_batchnorm` restores."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input (N, C, ...), with the same shape and dtype; see `nn.BatchNorm2d`."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        tape = current_tape()
        if tape is not None and tape.is_second_pass:
            own = tape.take()
            if own is None:
                return super().forward(input)
            x, state, tie = self._begin(input)
            state.own, joined = own, tie
        else:
            replica = self._joined_replica()
            if replica is None and not (self.training and has_other_ranks()):
                if tape is not None:
                    tape.keep(None)
                return super().forward(input)
            x, state, tie = self._begin(input)
            part = x, self._moments(x), state, tie
            if replica is None:
                (joined,) = self._join([part])
            else:
                joined = replica.exchange(f"{self._name()} with {self.num_features} channels", part, self._join)
            if tape is not None:
                tape.keep(state.own)
        return cast(Tensor, _NormalizePart.apply(state, tie.grad_fn, x, self.weight, self.bias, joined))

    def _begin(self, input: Tensor) -> tuple[Tensor, _PartState, Tensor]:
        """Return the input in a layout that the kernels accept, the state of the part, and its tie."""
        x, state = input.contiguous(memory_format=memory_format_of(input)), _PartState()
        return x, state, cast(Tensor, _PartGradient.apply(state, x, self.weight, self.bias))

    def _joined_replica(self) -> ReplicaContext | None:
        """Return the running replica if it has only a part of the batch."""
        replica = current_replica()
        if replica is None and is_replica(self):
            raise RuntimeError(
                f"{self._name()} runs outside its replica's forward pass, without the other replicas:"
                " use set_recompute for activation checkpointing, which repeats no exchange, or sync_bn: false"
            )
        if replica is None or replica.num_replicas == 1:
            return None
        if has_other_ranks():
            raise RuntimeError(
                f"{self._name()} would synchronize over replicas and ranks at the same time: give every rank one device"
            )
        return replica

    @property
    def _is_tracked(self) -> bool:
        return self.training and self.track_running_stats and self.running_mean is not None

    def _uses_kernels(self, x: Tensor) -> bool:
        """Return True if torch's kernels can join and track the moments, as they can with a constant momentum."""
        if not has_kernels(x) or not self._is_tracked:
            return has_kernels(x)
        return self.momentum is not None and cast(Tensor, self.running_mean).dtype == _statistics_dtype(x)

    @torch.no_grad()
    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return a part's C means and variances; for the kernels, 1 / sqrt(variance + eps) instead of variances."""
        if not self._uses_kernels(x):
            return moments_of(x)
        if _count_of(x):
            return torch.batch_norm_stats(x, self.eps)
        mean_C = torch.zeros(x.size(1), dtype=_statistics_dtype(x), device=x.device)
        return mean_C, torch.ones_like(mean_C)

    def _join(self, parts: list[tuple[Tensor, tuple[Tensor, Tensor], _PartState, Tensor]]) -> list[Tensor]:
        """Give this process's parts (all replicas, or this rank) the statistics, and return the joined tie for each."""
        xs, pairs, states, ties = zip(*parts, strict=True)
        if len({x.size(1) for x in xs}) > 1:
            raise ValueError("replicas have different numbers of channels in one BatchNorm layer: use the same layers")
        over_ranks, by_kernels = len(parts) == 1, self._uses_kernels(xs[0])
        with torch.no_grad():
            moments, counts = self._of_rank(xs[0], pairs[0]) if over_ranks else self._of_replicas(xs, pairs)
            joined = self._join_moments(moments, counts, xs[0])
            by_device = spread(joined, [x.device for x in xs])
            for x, state in zip(xs, states, strict=True):
                mean_C, scale_C = by_device[x.device]
                own_counts = counts.on(x.device) if by_kernels else counts.total
                state.own = _Statistics(mean_C, scale_C, own_counts, self.eps, by_kernels)
        return [_JoinSums.apply(states, [tie.grad_fn for tie in ties], over_ranks, *ties)] * len(parts)

    def _of_replicas(self, xs: Sequence[Tensor], pairs: Sequence[Sequence[Tensor]]) -> tuple[Sequence[Tensor], Counts]:
        """Return the moments (P, C) of all replicas, and their counts."""
        num_values = [_count_of(x) for x in xs]
        self._check_count(sum(num_values))
        moments_P2C = stack_pairs(pairs)
        moments_P2C = moments_P2C if self._uses_kernels(xs[0]) else wide(moments_P2C)
        replica = current_replica()
        known = {} if replica is None else replica.group.common
        key = (Counts, moments_P2C.dtype, *num_values)
        if key not in known:  # most layers of a pass have the same counts as another layer
            known[key] = Counts.of_replicas(num_values, moments_P2C)
        return moments_P2C.unbind(1), known[key]

    def _of_rank(self, x: Tensor, pair: Sequence[Tensor]) -> tuple[Sequence[Tensor], Counts]:
        """Return the moments (P, C) of all ranks, and their counts."""
        num_values = _count_of(x)
        moments, counts_P = moments_of_ranks(pair, num_values, is_wide=not self._uses_kernels(x))
        if num_values == 1:  # it waits for the device; a rank without values leaves this to the others
            self._check_count(round(counts_P.sum().item()))
        return moments, Counts(counts_P)

    def _check_count(self, count: int) -> None:
        if count < 2:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got {count} in the whole batch at"
                f" {self._name()}: use a larger batch or crop"
            )

    def _join_moments(self, moments: Sequence[Tensor], counts: Counts, x: Tensor) -> tuple[Tensor, Tensor]:
        """Join the parts' moments and track them; return the first two fields of `_Statistics`."""
        if self._is_tracked:
            cast(Tensor, self.num_batches_tracked).add_(1)
        if self._uses_kernels(x):
            running_mean_C, running_var_C = (self.running_mean, self.running_var) if self._is_tracked else (None, None)
            (means_PC, invstds_PC), momentum = moments, self.momentum or 0.0
            return torch.batch_norm_gather_stats_with_counts(
                means_PC, means_PC, invstds_PC, running_mean_C, running_var_C, momentum, self.eps, counts.of_parts_P
            )
        mean_C, variance_C = (each.to(_statistics_dtype(x)) for each in join_moments(moments, counts.shares))
        if self._is_tracked:
            self._track(mean_C, variance_C * (counts.total / (counts.total - 1)))
        return mean_C, variance_C

    def _track(self, mean_C: Tensor, variance_C: Tensor) -> None:
        """Move the running mean and variance towards the batch's mean and unbiased variance."""
        # .data, as in torch's own batch_norm: the buffers' version must not change, or the backward pass of an earlier
        # micro-batch would report them as modified.
        running = [cast(Tensor, buffer).data for buffer in (self.running_mean, self.running_var)]
        values = [_as(mean_C, running[0]), _as(variance_C, running[1])]
        if self.momentum is None:  # the mean over all batches; the division stays on the device
            weight = cast(Tensor, self.num_batches_tracked).to(running[0].dtype).reciprocal()
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


class _SyncBatchNormAct(SyncBatchNorm):
    """A converted layer that includes dropout and activation, like timm's BatchNormAct2d."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        """Return the activation of the normalized input."""
        return cast(Tensor, self.act(self.drop(super().forward(input))))


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Turn every BatchNorm layer of a module into a `SyncBatchNorm`, in place.

    The layers stay the same objects: parameters, buffers, hooks, state-dict keys and references remain valid.

    Args:
        module: any module, or a BatchNorm layer itself.

    Returns:
        The same module.

    Raises:
        TypeError: a layer's class extends BatchNorm with further behavior.

    Example:
        >>> type(convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))[1]).__name__
        'SyncBatchNorm'
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, BatchNorm) or isinstance(layer, SyncBatchNorm):
            continue
        original = type(layer)
        converted: type[SyncBatchNorm]
        if original in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
            converted = SyncBatchNorm
        elif isinstance(layer, nn.BatchNorm2d) and set(module_slots(layer)) == {"drop", "act"}:
            converted = _SyncBatchNormAct
        else:
            raise TypeError(
                f"{name or 'the module'} is a {original.__name__}, which extends BatchNorm in a way that cannot be"
                " synchronized: replace it with nn.BatchNorm2d, or use sync_bn: false"
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
