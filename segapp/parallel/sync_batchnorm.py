"""The synchronized BatchNorm layer, and the conversion of a module's BatchNorm layers to it and back.

In the forward pass, the joined moments of all parts of a batch normalize each part. In the backward pass, two sums per
channel are added over the parts. Replicas exchange once per layer in the forward pass, and autograd joins their
backward passes, which therefore have no barrier. Ranks exchange one tensor per layer and pass.

The gradient of a part's input depends on the sums of all parts, so each part has two autograd nodes: the backward pass
of `_NormalizePart` computes the part's sums, and `_PartGradient` returns its gradients. `_JoinSums` adds the sums in
between. A single node for all parts would be simpler, but replica 0 would save the inputs of all parts, and with
activation checkpointing it recomputes only its own. *Dummy* tensors without values connect the nodes: they only make
autograd run them in this order. Only the input is saved, as in `nn.BatchNorm2d`. If a second derivative is
requested (`create_graph`, as in gradient penalties), the backward pass consists of differentiable operations.

On CUDA, torch's own SyncBatchNorm kernels do the arithmetic. On other devices, the moments are joined by Chan, Golub
and LeVeque's formula (1983, "Algorithms for computing the sample variance") in float64, without the cancellation of
E[x^2] - E[x]^2.

Shapes: N samples, C channels, P parts (replicas or ranks); x is (N, C, ...).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from segapp.accelerator import wide
from segapp.chunks import check_number
from segapp.compat.torch import BatchNorm, is_replica
from segapp.parallel.recompute import RecomputedBlock, computed_once
from segapp.parallel.reductions import all_reduce_in_place, has_other_ranks, stack_ranks, sum_of_layer
from segapp.parallel.replica_threads import current_replica
from segapp.parallel.replicas import check_module
from segapp.parallel.scatter_gather import reduce_add, to_device

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


def moments_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a part's C means and C variances, differentiable; zeros for a part without values."""
    x = x.to(_statistics_dtype(x))
    if not _count_of(x):
        zeros_C = x.sum(_summed_dims(x))
        return zeros_C, zeros_C
    variance_C, mean_C = torch.var_mean(x, _summed_dims(x), correction=0)
    return mean_C, variance_C


def _pair_on(device: torch.device, pair: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return two values (C,) on a device, moved in one copy."""
    return pair if pair[0].device == device else to_device(torch.stack(list(pair)), device).unbind()


def stack_pairs(pairs: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return two values (C,) of each part as (P, 2, C) on the first part's device."""
    home = pairs[0][0].device
    return torch.stack([value for pair in pairs for value in _pair_on(home, pair)]).view(len(pairs), 2, -1)


def _weights_and_count(counts_P: Tensor, total: int | None = None, *, by_kernels: bool) -> tuple[Tensor, Any]:
    """Return weights of all parts' moments, and `_BatchStatistics.counts`, from the numbers of values per channel.

    If only the device knows the `total`, because of other ranks, the count is a tensor (), which promotes no dtype.
    """
    if by_kernels:
        return counts_P, counts_P.int()
    count = counts_P.sum() if total is None else total
    return (counts_P / count).unsqueeze(1), count


def gather_moments(
    pairs: Sequence[Sequence[Tensor]], num_values: Sequence[int], *, over_ranks: bool, by_kernels: bool = False
) -> tuple[Sequence[Tensor], tuple[Tensor, Any]]:
    """Return moments (P, C) of all parts and their `_weights_and_count`, from this process's pairs; differentiable."""
    if over_ranks:
        (pair,), (count,), num_channels = pairs, num_values, len(pairs[0][0])
        rows_PK = stack_ranks(torch.cat([*pair, pair[0].new_full((1,), count or _NO_SAMPLES)]))
        rows_PK = rows_PK if by_kernels else wide(rows_PK)
        first_PC, second_PC, counts_P1 = rows_PK.split_with_sizes([num_channels, num_channels, 1], dim=1)
        return (first_PC, second_PC), _weights_and_count(counts_P1.squeeze(1), by_kernels=by_kernels)
    moments_P2C = stack_pairs(pairs)
    moments_P2C = moments_P2C if by_kernels else wide(moments_P2C)
    replica = current_replica()
    cache = {} if replica is None else replica.group.cache
    key = (_weights_and_count, by_kernels, moments_P2C.dtype, *num_values)
    if key not in cache:  # most layers of a pass have the same counts as another layer
        # Not torch.tensor(num_values), whose copy to a GPU would wait for the GPU.
        counts_P = torch.cat([moments_P2C.new_full((1,), n or _NO_SAMPLES) for n in num_values])
        cache[key] = _weights_and_count(counts_P, sum(num_values), by_kernels=by_kernels)
    return moments_P2C.unbind(1), cache[key]


def join_moments(moments: Sequence[Tensor], shares_P1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means and variances (C,) of all parts from each part's (P, C), by Chan's formula; differentiable."""
    means_PC, variances_PC = moments
    mean_C = (shares_P1 * means_PC).sum(0)
    centered_PC = means_PC - mean_C
    return mean_C, (shares_P1 * torch.addcmul(variances_PC, centered_PC, centered_PC)).sum(0)


class _BatchStatistics(NamedTuple):
    """The whole batch's statistics for one part, on its device.

    For torch's kernels, `scale` is 1 / sqrt(variance + eps) and `counts` are the numbers of values per channel of each
    part, int32 (P,). Otherwise, `scale` is the variance and `counts` the number of values of all parts.
    """

    mean: Tensor
    scale: Tensor
    counts: Any
    eps: float
    by_kernels: bool


class _PendingBackward(NamedTuple):
    """A part's backward pass between its two nodes: the gradient of its output, what was saved, and its two sums (C,).

    With n = (x - mean) / deviation, grad and grad * n are summed, or, for torch's kernels, grad and grad * (x - mean).
    `_JoinSums` replaces them by what the gradient of every input needs from the sums of all parts.
    """

    grad: Tensor
    x: Tensor
    weight: Tensor | None
    sums: Sequence[Tensor] = ()
    gradients: tuple[Tensor | None, ...] = (None, None, None)
    """Of input, weight and bias; without torch's kernels, only the first term of the input's until `_PartGradient`."""


class _Part:
    """Data that the two nodes of a part share; `pending` is a `_PendingBackward` in the backward pass."""

    statistics: _BatchStatistics
    pending: Any = None
    group: Callable[[], Any] = staticmethod(lambda: None)
    """Weak reference to the group of the replicas, whose results refer to the nodes."""

    def check_backward(self) -> None:
        """Raise RuntimeError in a backward pass within the forward pass, which lacks the other replicas' parts."""
        if getattr(self.group(), "is_running", False):
            raise RuntimeError(
                "torch.autograd.grad or backward() runs in the forward pass of a replica, through SyncBatchNorm, whose"
                " other replicas take no part in it: call it on the outputs of the model, or use gradient_penalty"
            )


def _normalized(x: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, stats: _BatchStatistics) -> Tensor:
    """Return a normalized part."""
    if not x.numel():
        return torch.empty_like(x)
    if stats.by_kernels:
        return torch.batch_norm_elemt(x, weight_C, bias_C, stats.mean, stats.scale, stats.eps)
    return torch.native_batch_norm(x, weight_C, bias_C, stats.mean, stats.scale, False, 0.0, stats.eps)[0]


def _start_backward(grad: Tensor, x: Tensor, weight_C: Tensor | None, stats: _BatchStatistics) -> _PendingBackward:
    """Return a part's backward pass with its sums; without them under `create_graph`."""
    if torch.is_grad_enabled():
        return _PendingBackward(grad, x, weight_C)
    if not x.numel():
        zeros_C = torch.zeros_like(stats.mean)
        return _PendingBackward(grad, x, weight_C, (zeros_C, zeros_C), (grad, zeros_C, zeros_C))
    grad, mean = grad.contiguous(memory_format=memory_format_of(x)), stats.mean
    if stats.by_kernels:
        grad_C, centered_C, weight_grad_C, bias_grad_C = torch.batch_norm_backward_reduce(
            grad, x, mean, stats.scale, mean, True, True, True
        )
        return _PendingBackward(grad, x, weight_C, (grad_C, centered_C), (None, weight_grad_C, bias_grad_C))
    wide_grad, wide_x = grad.to(mean.dtype), x.to(mean.dtype)
    gradients = torch.ops.aten.native_batch_norm_backward.default(
        wide_grad, wide_x, weight_C, mean, stats.scale, None, None, False, stats.eps, [True, True, True]
    )
    return _PendingBackward(grad, x, weight_C, (gradients[2], gradients[1]), gradients)


def _input_gradient(pending: _PendingBackward, stats: _BatchStatistics) -> Tensor:
    """Return the gradient of a part's input, weight / deviation * (grad - E[grad] - n * E[grad * n]).

    Without torch's kernels, the last two terms are a normalization of the input with another weight and bias.
    """
    x, (first_C, second_C) = pending.x, pending.sums
    if stats.by_kernels:
        return torch.batch_norm_backward_elemt(
            pending.grad, x, stats.mean, stats.scale, pending.weight, first_C, second_C, stats.counts
        )
    other_terms = _normalized(x.to(stats.mean.dtype), second_C, first_C, stats)
    return cast(Tensor, pending.gradients[0]).sub_(other_terms).to(x.dtype)


class _PartGradient(torch.autograd.Function):
    """A part's input (N, C, ...), weight and bias -> a dummy; its backward pass returns their gradients."""

    @staticmethod
    def forward(ctx: Any, part: _Part, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.part = part
        ctx.save_for_backward(x, weight)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[Tensor | None, ...]:
        pending, ctx.part.pending = ctx.part.pending, None  # a reference that remained would be part of a cycle
        needed, gradients = ctx.needs_input_grad[1:], pending.gradients
        if needed[0] and pending.x.numel() and not torch.is_grad_enabled():
            gradients = _input_gradient(pending, ctx.part.statistics), *gradients[1:]
        return None, *(value if is_needed else None for value, is_needed in zip(gradients, needed, strict=True))


class _JoinSums(torch.autograd.Function):
    """The dummies and nodes of this process's parts -> one dummy; its backward pass joins the sums of all parts."""

    @staticmethod
    def forward(ctx: Any, parts: Sequence[_Part], nodes: Sequence[Any], *dummies: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.parts, ctx.nodes = parts, nodes
        return dummies[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[None, ...]:
        parts: Sequence[_Part] = ctx.parts
        parts[0].check_backward()
        for part, node in zip(parts, ctx.nodes, strict=True):
            if part.pending is None:  # nothing depends on the output of this part
                x, weight = node.saved_tensors
                part.pending = _start_backward(torch.zeros_like(x), x, weight, part.statistics)
        join = _join_differentiably if torch.is_grad_enabled() else _join_sums
        join(parts, over_ranks=len(parts) == 1)
        return (None,) * (2 + len(parts))


class _NormalizePart(torch.autograd.Function):
    """A part's input, weight, bias and joined dummy -> its normalized input, with the statistics of all parts.

    `node` is the part's node of `_PartGradient`, which has saved input and weight and returns their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, part: _Part, node: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, dummy: Tensor
    ) -> Tensor:
        ctx.part, ctx.node = part, node
        return _normalized(x, weight, bias, part.statistics)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        x, weight = ctx.node.saved_tensors  # only once: a recomputed block gives out each saved tensor once
        ctx.part.pending = _start_backward(grad, x, weight, ctx.part.statistics)
        return None, None, None, None, None, None


def _join_sums(parts: Sequence[_Part], *, over_ranks: bool) -> None:
    """Give the parts what the gradient of every input needs from the sums of all parts."""
    stats, weight, pairs = parts[0].statistics, parts[0].pending.weight, [part.pending.sums for part in parts]
    total_2C = all_reduce_in_place(torch.stack(list(pairs[0]))) if over_ranks else stack_pairs(pairs).sum(0)
    if not stats.by_kernels:
        factor_C = torch.rsqrt(stats.scale + stats.eps)
        total_2C = total_2C * (factor_C if weight is None else factor_C * weight) / stats.counts
    on = {device: to_device(total_2C, device).unbind() for device in {part.statistics.mean.device for part in parts}}
    for part in parts:
        part.pending = part.pending._replace(sums=on[part.statistics.mean.device])


def _join_differentiably(parts: Sequence[_Part], *, over_ranks: bool) -> None:
    """Give the parts their gradients, by differentiable operations from the input to the gradients."""
    xs = [part.pending.x for part in parts]
    pairs, num_values = [moments_of(x) for x in xs], [_count_of(x) for x in xs]
    moments, (shares_P1, count) = gather_moments(pairs, num_values, over_ranks=over_ranks)
    mean_C, variance_C = join_moments(moments, shares_P1)
    invstd_C = torch.rsqrt(variance_C + parts[0].statistics.eps)
    rows, terms = [], []
    for grad, x, weight, *_ in (part.pending for part in parts):
        dtype = _statistics_dtype(x)
        mean, invstd = (_per_channel(to_device(value_C.to(dtype), x.device), x) for value_C in (mean_C, invstd_C))
        normal, grad = (x.to(dtype) - mean) * invstd, grad.to(dtype)
        bias_grad, weight_grad = grad.sum(_summed_dims(x)), (grad * normal).sum(_summed_dims(x))
        weight_C = torch.ones_like(bias_grad) if weight is None else weight
        rows.append(torch.cat([bias_grad, weight_grad]) * weight_C.repeat(2))
        terms.append((normal, grad * _per_channel(weight_C, x), invstd, weight_grad, bias_grad))
    total = sum_of_layer(rows[0]) if over_ranks else reduce_add(rows, xs[0].device)
    for part, x, (normal, scaled, invstd, weight_grad, bias_grad) in zip(parts, xs, terms, strict=True):
        grad_C, normal_C = to_device((total / count).to(normal.dtype), x.device).chunk(2)
        x_grad = invstd * (scaled - _per_channel(grad_C, x) - normal * _per_channel(normal_C, x))
        part.pending = part.pending._replace(gradients=(x_grad.to(x.dtype), weight_grad, bias_grad))


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return channels_last if x is dense in it, else the contiguous format; the kernels accept only these."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    return layout if x.is_contiguous(memory_format=layout) else torch.contiguous_format


class SyncBatchNorm(BatchNorm):
    """BatchNorm with the statistics of the whole batch.

    In training it equals `nn.BatchNorm1d`, `2d` or `3d` on the whole batch in outputs, in gradients of any order and in
    running statistics, whether the batch is divided over replicas, over ranks (gloo or nccl), or not at all. A rank or
    a replica may have a single value per channel, and a rank may have none. For an undivided batch, and in evaluation,
    it calls torch's BatchNorm. Half inputs are normalized with float32 statistics. The parameters are the same.

    A converted layer is still an instance of its own class, whose methods come first; it cannot replace those with two
    underscores.

    Raises:
        ValueError: the input is not a floating-point (N, C, ...), or the whole batch has one value per channel.
        TypeError: the input is not a tensor.
        RuntimeError: a replica's layer runs outside its forward pass, as in torch's activation checkpointing without
            `set_recompute`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, (N, C) or (N, C, ...), with the same shape and dtype; see `nn.BatchNorm2d`."""
        if isinstance(input, torch.fx.Proxy) and type(self) is SyncBatchNorm:
            # A call of this layer, as for a converted layer and for torch's own.
            return input.tracer.create_proxy("call_module", input.tracer.path_of_module(self), (input,), {})
        if not isinstance(input, Tensor | torch.fx.Proxy):
            raise TypeError(f"{self.__name()} got a {type(input).__name__}: give a tensor")
        if input.dim() < 2 or input.size(1) != self.num_features or not input.is_floating_point():
            raise ValueError(
                f"{self.__name()} expects floating-point input of shape (N, {self.num_features}, ...), got"
                f" {tuple(input.shape)} in {input.dtype}"
            )
        self._check_input_dim(input)
        if (not self.training and self.running_mean is not None) or not computed_once(self.__is_divided):
            if self.training:
                self.__check_numbers()  # torch's kernels check the sizes
            return BatchNorm.forward(self, input)
        x = input.contiguous(memory_format=memory_format_of(input))
        weight, bias = (None if value is None else value.to(_statistics_dtype(x)) for value in (self.weight, self.bias))
        part = _Part()
        dummy = cast(Tensor, _PartGradient.apply(part, x, weight, bias))
        joined = [dummy]  # not joined if it is recomputed, as only the saved tensors of that graph are used

        def exchanged() -> _BatchStatistics:
            joined[0] = self.__exchange(part, x, dummy)
            return part.statistics

        part.statistics = computed_once(exchanged)
        return cast(Tensor, _NormalizePart.apply(part, dummy.grad_fn, x, weight, bias, joined[0]))

    def __check_sizes(self) -> None:
        for name in ("weight", "bias", "running_mean", "running_var"):
            value = getattr(self, name)
            if value is not None and value.numel() != self.num_features:
                raise ValueError(f"{self.__name()}: {name} has {value.numel()} values for {self.num_features} channels")
        self.__check_numbers()

    def __check_numbers(self) -> None:
        if type(self.eps) is not float or not self.eps > 0:  # the name takes time
            check_number(f"{self.__name()}: eps", self.eps, above=True)
        if self.momentum is not None:
            check_number(f"{self.__name()}: momentum", self.momentum, most=1)

    def __is_divided(self) -> bool:
        """Return True if this layer has only a part of the batch, as a replica or as a rank."""
        replica = current_replica()
        # `torch.utils.checkpoint` repeats a forward pass inside the backward pass, without the other replicas.
        if replica is None and is_replica(self):
            raise RuntimeError(
                f"{self.__name()} runs outside its replica's forward pass, without the other replicas:"
                " use segapp.parallel.set_recompute for activation checkpointing, which repeats no exchange"
            )
        if replica is None or replica.num_replicas == 1:
            return self.training and has_other_ranks()
        if has_other_ranks():
            raise RuntimeError(
                f"{self.__name()} would synchronize over replicas and over ranks: give every rank one device"
            )
        return True

    def __exchange(self, part: _Part, x: Tensor, dummy: Tensor) -> Tensor:
        """Give a part its statistics, and return the joined dummy."""
        replica, values = current_replica(), (part, x, self.__moments(x), dummy)
        if replica is None:
            return self.__join([values])[0]
        part.group = weakref.ref(replica.group)
        return cast(Tensor, replica.exchange(f"{self.__name()} with {self.num_features} channels", values, self.__join))

    @property
    def __is_tracked(self) -> bool:
        return self.training and self.track_running_stats and self.running_mean is not None

    def __uses_kernels(self, x: Tensor) -> bool:
        """Return True if torch's kernels can join and track the moments, as they can with a constant momentum."""
        if not has_kernels(x) or not self.__is_tracked:
            return has_kernels(x)
        return self.momentum is not None and cast(Tensor, self.running_mean).dtype == _statistics_dtype(x)

    @torch.no_grad()
    def __moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return a part's C means and variances; for the kernels, 1 / sqrt(variance + eps) instead of variances."""
        if self.__uses_kernels(x) and x.numel():
            return torch.batch_norm_stats(x, self.eps)
        mean_C, variance_C = moments_of(x)
        return mean_C, torch.ones_like(mean_C) if self.__uses_kernels(x) else variance_C

    def __join(self, values: list[tuple[_Part, Tensor, tuple[Tensor, Tensor], Tensor]]) -> list[Tensor]:
        """Give the parts of this process (all replicas, or this rank) their statistics; return the joined dummies."""
        self.__check_sizes()  # kernels read as many values as there are channels, whatever memory they are in
        parts, xs, pairs, dummies = zip(*values, strict=True)
        nodes = [dummy.grad_fn for dummy in dummies]
        if len({node is None for node in nodes}) > 1:
            raise ValueError(f"only some replicas compute gradients at {self.__name()}: let all or none of them do so")
        over_ranks, by_kernels = len(parts) == 1, self.__uses_kernels(xs[0])
        num_values = [_count_of(x) for x in xs]
        with torch.no_grad():
            moments, counts = gather_moments(pairs, num_values, over_ranks=over_ranks, by_kernels=by_kernels)
            # A rank with a single value waits for the device; a rank without values leaves this to the others.
            if sum(num_values) == 1 and not (over_ranks and round(counts[1].sum().item()) > 1):
                raise ValueError(
                    "Expected more than 1 value per channel when training, got 1 in the whole batch at"
                    f" {self.__name()}: use a larger batch or crop"
                )
            joined = self.__join_moments(moments, *counts, xs[0])
            for part, x in zip(parts, xs, strict=True):
                mean_C, scale_C = _pair_on(x.device, joined)
                part.statistics = _BatchStatistics(
                    mean_C, scale_C, to_device(counts[1], x.device), self.eps, by_kernels
                )
        return [_JoinSums.apply(parts, nodes, *dummies)] * len(parts)

    def __join_moments(
        self, moments: Sequence[Tensor], weights: Tensor, count: Any, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Join the parts' moments and track them; return the first two fields of `_BatchStatistics`."""
        if self.__is_tracked:
            cast(Tensor, self.num_batches_tracked).add_(1)
        if self.__uses_kernels(x):
            running_mean_C, running_var_C = (self.running_mean, self.running_var) if self.__is_tracked else (None, None)
            (means_PC, invstds_PC), momentum = moments, self.momentum or 0.0
            return torch.batch_norm_gather_stats_with_counts(
                means_PC, means_PC, invstds_PC, running_mean_C, running_var_C, momentum, self.eps, weights
            )
        mean_C, variance_C = (moment_C.to(_statistics_dtype(x)) for moment_C in join_moments(moments, weights))
        if self.__is_tracked:
            # Running variances are unbiased, as in torch.
            self.__track(mean_C, variance_C * (count / (count - 1)))
        return mean_C, variance_C

    def __track(self, mean_C: Tensor, variance_C: Tensor) -> None:
        """Move the running mean and variance towards the batch's mean and unbiased variance."""
        weight: Any = self.momentum
        if weight is None:  # the mean over all batches; the division stays on the device
            weight = cast(Tensor, self.num_batches_tracked).to(cast(Tensor, self.running_mean).dtype).reciprocal()
        for buffer, value in ((self.running_mean, mean_C), (self.running_var, variance_C)):
            # .data, as in torch's batch_norm: with a new version, an earlier micro-batch could not run backward.
            running = cast(Tensor, buffer).data
            running.lerp_(value.to(running.dtype), weight)

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any number of dimensions; a converted layer has the check of its class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind, reduced = vars(type(self)).get("batchnorm_class"), super().__reduce_ex__(protocol)
        return reduced if kind is None else (_new_layer, (kind,), *reduced[2:])

    def __name(self) -> str:
        return f"SyncBatchNorm {self.__dict__.get('_replica_name', '')}".rstrip()


@cache
def _synchronized(kind: Any) -> Any:
    """Return the class of converted layers of a class; torch.fx makes each of them one node, because of its module."""
    name = f"Sync{kind.__name__.removeprefix('Sync')}"
    bases: tuple[Any, ...] = (kind, SyncBatchNorm)
    attributes = {"__module__": BatchNorm.__module__, "__doc__": kind.__doc__, "batchnorm_class": kind}
    if kind is nn.SyncBatchNorm:  # not an instance of torch's, which DistributedDataParallel refuses on CPUs
        bases = bases[1:]
    elif _is_of_timm(kind):
        attributes["forward"] = lambda self, x: self.act(self.drop(SyncBatchNorm.forward(self, x)))
    return type(name, bases, attributes)


def _new_layer(kind: Any) -> Any:
    """Return a converted layer without attributes, to be unpickled."""
    return object.__new__(_synchronized(kind))


def _is_of_timm(kind: type) -> bool:
    """Return True for a class whose forward computes BatchNorm itself, dropout and an activation."""
    return kind.__name__ == "BatchNormAct2d" and kind.__module__.startswith("timm.")


def _obstacle(layer: nn.Module) -> str | None:
    """Return why a BatchNorm layer cannot be synchronized, to follow its name; None if it can."""
    kind = type(layer)
    if isinstance(layer, LazyModuleMixin):
        return "has no channels yet: run the module once before"
    if isinstance(layer, RecomputedBlock):
        return "is a block of set_recompute: call set_recompute after the conversion"
    if (group := getattr(layer, "process_group", None)) not in (
        None,
        *([dist.group.WORLD] if dist.is_available() else []),
    ):
        return f"has process_group={group}, and segapp synchronizes over all ranks: leave out process_group"
    # The forward passes of these two are known, and the conversion replaces them.
    bases = () if kind is nn.SyncBatchNorm or _is_of_timm(kind) else kind.__mro__[: kind.__mro__.index(BatchNorm)]
    if "forward" in vars(layer) or any("forward" in vars(base) and not _extends_forward(base) for base in bases):
        return (
            "has a forward that does not only extend BatchNorm's: let its class call super().forward(input) for the"
            " whole input, or replace the layer with a plain one"
        )
    return None


def _extends_forward(kind: type) -> bool:
    """Return True if the forward of a class calls the next class's, and neither divides nor normalizes a batch."""
    code = getattr(inspect.unwrap(vars(kind)["forward"]), "__code__", None)
    names = frozenset(() if code is None else code.co_names)
    return {"super", "forward"} <= names and names.isdisjoint({"batch_norm", "chunk", "split", "tensor_split"})


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Turn every BatchNorm layer of a module into a `SyncBatchNorm`, in place, and return the module.

    The layers stay the same objects and instances of their classes: parameters, buffers, hooks, state-dict keys and
    references remain valid. A class of your own is converted if its forward, if any, extends `super().forward(input)`.

    Raises:
        TypeError: a layer cannot be synchronized, because its class computes BatchNorm itself; no layer is converted.
    """
    check_module(module)
    plain = plain_batchnorms(module)
    for name, layer in plain.items():
        if obstacle := _obstacle(layer):
            raise TypeError(f"{name or 'the module'} ({type(layer).__name__}) {obstacle}")
    for layer in plain.values():
        layer.__class__ = _synchronized(cast(Any, type(layer)))
    return module


def plain_batchnorms(module: nn.Module) -> dict[str, BatchNorm]:
    """Return the BatchNorm layers that are not synchronized, by name."""
    layers = module.named_modules()
    return {name: m for name, m in layers if isinstance(m, BatchNorm) and not isinstance(m, SyncBatchNorm)}


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Turn every `SyncBatchNorm` back into its original class, by default `nn.BatchNorm2d`, and return the module."""
    check_module(module)
    for layer in list(module.modules()):
        if isinstance(layer, SyncBatchNorm):
            kind: Any = getattr(layer, "batchnorm_class", nn.BatchNorm2d)
            layer.__class__ = kind
    return module
