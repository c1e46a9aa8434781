"""The synchronized BatchNorm layer, and the conversion of a module's BatchNorm layers to it and back.

Replicas exchange once per layer in the forward pass and share one autograd node, so the backward pass has no barrier.
Ranks exchange one tensor per layer and pass.

In the forward pass, each part of the batch has two moments per channel; the joined moments normalize every part. In the
backward pass, two sums per channel are added over the parts. Only the input is saved, as in `nn.BatchNorm2d`. On CUDA,
torch's own SyncBatchNorm kernels do this. On other devices, the moments are joined by Chan, Golub and LeVeque's formula
(1983, "Algorithms for computing the sample variance") in float64, without the cancellation of E[x^2] - E[x]^2.

If a second derivative is requested (`create_graph`, as in gradient penalties), the backward pass consists of
differentiable operations, so derivatives of any order exist.

Shapes: N samples, C channels, P parts (replicas or ranks); x is (N, C, ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from segapp.accelerator import wide
from segapp.compat.torch import BatchNorm, foreach_lerp_, is_replica, module_slots
from segapp.parallel.exchange import all_reduce_in_place, has_other_ranks, stack_ranks, sum_of_layer
from segapp.parallel.recompute import IN_BLOCK, current_tape
from segapp.parallel.rendezvous import ReplicaContext, current_replica
from segapp.parallel.scatter_gather import reduce_add, spread, to_device

_Values = TypeVar("_Values", Tensor, "Tensor | None")

_NO_SAMPLES = 1e-30
"""Count of a part without samples for torch's kernel, which divides by the counts so far: no weight, but no NaN."""


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


def _as(values: _Values, like: Tensor) -> _Values:
    """Return values in another tensor's dtype; this comparison is cheaper than a call of `Tensor.to`."""
    return values if values is None or values.dtype == like.dtype else values.to(like.dtype)


def has_kernels(x: Tensor) -> bool:
    """Return True if torch has the kernels of its SyncBatchNorm for this tensor."""
    return x.is_cuda


def moments_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a part's C means and C variances, differentiable; zeros for a part without values."""
    x = x.to(wide_dtype(x))
    if not count_of(x):
        zeros_C = x.sum(_summed_dims(x))
        return zeros_C, zeros_C
    variance_C, mean_C = torch.var_mean(x, _summed_dims(x), correction=0)
    return mean_C, variance_C


def kernel_moments_of(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return a part's C means and C values 1 / sqrt(variance + eps)."""
    if count_of(x):
        return torch.batch_norm_stats(x, eps)
    mean_C = torch.zeros(x.size(1), dtype=wide_dtype(x), device=x.device)
    return mean_C, torch.ones_like(mean_C)


def row_of(moments: Sequence[Tensor], num_values: int) -> Tensor:
    """Return two moments (C,) of a part and its number of values per channel as one tensor (2C + 1,)."""
    return torch.cat([*moments, moments[0].new_full((1,), num_values or _NO_SAMPLES)])


def split_rows(rows_PK: Tensor) -> tuple[Sequence[Tensor], Tensor]:
    """Return the two moments (P, C) and the counts (P,) of the parts' rows (P, 2C + 1)."""
    num_channels = rows_PK.size(1) // 2
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
    """The numbers of values per channel of all parts, and values derived from them, computed when they are needed.

    They have the dtype of the statistics; their sum may be known on the host.
    """

    def __init__(self, of_parts_P: Tensor, total: float | None = None) -> None:
        self.of_parts_P = of_parts_P
        self._total = total
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


class Sums(NamedTuple):
    """A part's contribution to the backward pass of the others, two sums (C,), and its own gradients.

    `of_x` is the first term of the input's gradient, if it is already computed.
    """

    pair: tuple[Tensor, Tensor]
    of_weight: Tensor
    of_bias: Tensor
    of_x: Tensor | None = None


class Kernels(NamedTuple):
    """The whole batch's statistics on one device, and the arithmetic of a part by torch's kernels, one launch each.

    `counts` are the values per channel of each part, int32 (P,).
    """

    mean: Tensor
    invstd: Tensor
    counts: Tensor
    eps: float

    def normalize(self, x: Tensor, weight_C: Tensor | None, bias_C: Tensor | None) -> Tensor:
        """Return the normalized part."""
        return torch.batch_norm_elemt(x, weight_C, bias_C, self.mean, self.invstd, self.eps)

    def sums(self, grad: Tensor, x: Tensor, weight_C: Tensor | None) -> Sums:
        """Return the sums of grad and of grad * (x - mean)."""
        grad_C, centred_C, of_weight_C, of_bias_C = torch.batch_norm_backward_reduce(
            grad, x, self.mean, self.invstd, self.mean, True, True, True
        )
        return Sums((grad_C, centred_C), of_weight_C, of_bias_C)

    def shared(self, total_2C: Tensor, weight_C: Tensor | None) -> Tensor:
        """Return the values that every part needs from the sums."""
        return total_2C

    def input_gradient(
        self, grad: Tensor, x: Tensor, weight_C: Tensor | None, sums: Sums, shared: Sequence[Tensor]
    ) -> Tensor:
        """Return the gradient of the part."""
        grad_C, centred_C = shared
        return torch.batch_norm_backward_elemt(
            grad, x, self.mean, self.invstd, weight_C, grad_C, centred_C, self.counts
        )


class Composed(NamedTuple):
    """The same with operators that every device has; `count` is the number of values per channel of all parts.

    With n = (x - mean) / deviation, the input's gradient is weight / deviation * (grad - E[grad] - n * E[grad * n]).
    The last two terms are a normalization of the input with another weight and bias.
    """

    mean: Tensor
    variance: Tensor
    count: Any
    eps: float

    def normalize(self, x: Tensor, weight_C: Tensor | None, bias_C: Tensor | None) -> Tensor:
        """Return the normalized part."""
        return torch.native_batch_norm(x, weight_C, bias_C, self.mean, self.variance, False, 0.0, self.eps)[0]

    def sums(self, grad: Tensor, x: Tensor, weight_C: Tensor | None) -> Sums:
        """Return the sums of grad and of grad * n, and the first term of the input's gradient."""
        mean, variance = self.mean, self.variance
        of_x, of_weight_C, of_bias_C = torch.ops.aten.native_batch_norm_backward.default(
            _as(grad, mean), _as(x, mean), weight_C, mean, variance, None, None, False, self.eps, [True, True, True]
        )
        return Sums((of_bias_C, of_weight_C), of_weight_C, of_bias_C, of_x)

    def shared(self, total_2C: Tensor, weight_C: Tensor | None) -> Tensor:
        """Return the bias and the weight of the normalization that is subtracted."""
        factor_C = torch.rsqrt(self.variance + self.eps)
        shared_2C: Tensor = total_2C * (factor_C if weight_C is None else factor_C * weight_C) / self.count
        return shared_2C

    def input_gradient(
        self, grad: Tensor, x: Tensor, weight_C: Tensor | None, sums: Sums, shared: Sequence[Tensor]
    ) -> Tensor:
        """Return the gradient of the part."""
        bias_C, of_normal_C = shared
        other_terms = self.normalize(_as(x, self.mean), of_normal_C, bias_C)
        return _as(cast(Tensor, sums.of_x).sub_(other_terms), x)


class Pass(NamedTuple):
    """A layer's constants in one forward pass: the statistics for each part of this process, on its device."""

    statistics: Sequence[Kernels | Composed]
    over_ranks: bool
    """True if the other parts of the batch are on other ranks."""


class Normalize(torch.autograd.Function):
    """P inputs, weights and biases -> P normalized inputs, with the statistics of all parts."""

    @staticmethod
    def forward(ctx: Any, layer: Pass, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Return the outputs from the parts' inputs, then their weights (C,) or None, then their biases or None."""
        ctx.layer, num_parts = layer, len(tensors) // 3
        ctx.save_for_backward(*tensors[: 2 * num_parts])
        ctx.has_bias = tensors[-1] is not None
        parts = zip(*(tensors[i * num_parts : (i + 1) * num_parts] for i in range(3)), layer.statistics, strict=True)
        return tuple(
            own.normalize(cast(Tensor, x), _as(weight, own.mean), _as(bias, own.mean))
            if cast(Tensor, x).numel()
            else torch.empty_like(cast(Tensor, x))
            for x, weight, bias, own in parts
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients in the order of the tensors."""
        num_parts = len(grads)
        saved = ctx.saved_tensors  # only once: a recomputed block gives out each saved tensor once
        xs, weights = saved[:num_parts], saved[num_parts:]
        gradients = _differentiable_gradients if torch.is_grad_enabled() else _gradients
        of_x, of_weight, of_bias = gradients(ctx.layer, grads, xs, weights, ctx.needs_input_grad[1 : num_parts + 1])
        of_weights = (None if w is None else g.to(w.dtype) for g, w in zip(of_weight, weights, strict=True))
        return (None, *of_x, *of_weights, *(of_bias if ctx.has_bias else [None] * num_parts))


class _Link:
    """Data that the two nodes of a part, `_Tie` and `_NormalizePart`, share in a backward pass."""

    own: Kernels | Composed
    grad: Tensor | None = None
    sums: Sums | None = None
    saved: tuple[Tensor | None, ...] = ()
    gradients: tuple[Tensor | None, ...] = ()
    """Gradients of input, weight and bias, under `create_graph`."""


class _Tie(torch.autograd.Function):
    """A part's input (N, C, ...), weight and bias -> a tensor (2, C) whose gradient is the sum over all parts.

    Its backward pass computes the gradient of the input. The values of the result are not used.
    """

    @staticmethod
    def forward(ctx: Any, link: _Link, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the tie."""
        ctx.link = link
        ctx.save_for_backward(x, weight)
        return torch.zeros(2, x.size(1), dtype=wide_dtype(x), device=x.device)

    @staticmethod
    def backward(ctx: Any, total_2C: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the input; under `create_graph`, all three gradients."""
        link: _Link = ctx.link
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            gradients, link.gradients = link.gradients, ()  # a remaining reference would be part of a cycle
            needed = zip(gradients, ctx.needs_input_grad[1:], strict=True)
            return None, *(gradient if is_needed else None for gradient, is_needed in needed)
        if not ctx.needs_input_grad[1] or not x.numel():
            return None, torch.zeros_like(x) if ctx.needs_input_grad[1] else None, None, None
        weight = _as(weight, link.own.mean)
        if link.grad is None:  # nothing depends only on the outputs of this part
            link.grad = torch.zeros_like(x)
        sums = link.own.sums(link.grad, x, weight) if link.sums is None else link.sums
        shared = link.own.shared(total_2C, weight).unbind()
        of_x = link.own.input_gradient(link.grad, x, weight, sums, shared)
        link.grad = link.sums = None
        return None, of_x, None, None


class _NormalizePart(torch.autograd.Function):
    """A part's input, weight, bias and tie -> its normalized input, with the statistics of all parts."""

    @staticmethod
    def forward(ctx: Any, link: _Link, x: Tensor, weight: Tensor | None, bias: Tensor | None, tie_2C: Tensor) -> Tensor:
        """Return the output."""
        ctx.link, ctx.has_bias = link, bias is not None
        ctx.save_for_backward(x, weight)
        if not x.numel():
            return torch.empty_like(x)
        return link.own.normalize(x, _as(weight, link.own.mean), _as(bias, link.own.mean))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of weight and bias, and the part's own two sums (2, C) for the tie."""
        link: _Link = ctx.link
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            link.grad, link.saved = grad, (x, weight)
            return None, None, None, None, torch.zeros_like(link.own.mean).expand(2, -1)
        own = link.own
        link.grad = grad.contiguous(memory_format=memory_format_of(x))
        if x.numel():
            link.sums = own.sums(link.grad, x, _as(weight, own.mean))
        else:
            zeros_C = torch.zeros_like(own.mean)
            link.sums = Sums((zeros_C, zeros_C), zeros_C, zeros_C)
        of_weight = None if weight is None else link.sums.of_weight.to(weight.dtype)
        of_bias = link.sums.of_bias if ctx.has_bias else None
        return None, None, of_weight, of_bias, torch.stack(link.sums.pair)


class _JoinTies(torch.autograd.Function):
    """The ties of all parts -> the same ties; backward: each gets the sum of all gradients. Saves nothing."""

    @staticmethod
    def forward(ctx: Any, links: Sequence[_Link], *ties: Tensor) -> tuple[Tensor, ...]:
        """Return new ties (2, C)."""
        ctx.links = links
        return tuple(tie.clone() for tie in ties)

    @staticmethod
    def backward(ctx: Any, *sums_2C: Tensor) -> tuple[Tensor | None, ...]:
        """Return the sums of the whole batch on each part's device."""
        links: Sequence[_Link] = ctx.links
        if torch.is_grad_enabled():
            if any(link.grad is None for link in links):
                raise RuntimeError(
                    "some outputs of a replica take no part in the second derivative: use all of them, or leave "
                    "SyncBatchNorm layers out of the recomputed blocks"
                )
            columns = _differentiable_gradients(
                Pass([link.own for link in links], over_ranks=False),
                [cast(Tensor, link.grad) for link in links],
                [cast(Tensor, link.saved[0]) for link in links],
                [link.saved[1] for link in links],
                [True] * len(links),
            )
            for link, of_x, of_weight, of_bias in zip(links, *columns, strict=True):
                link.gradients, link.grad, link.saved = (of_x, of_weight, of_bias), None, ()
            return None, *sums_2C
        home = sums_2C[0].device
        total_2C = torch.stack([to_device(sums, home) for sums in sums_2C]).sum(0)
        return None, *(to_device(total_2C, sums.device) for sums in sums_2C)


_Columns: TypeAlias = tuple[list[Tensor | None], list[Tensor], list[Tensor]]


def _gradients(
    layer: Pass,
    grads: Sequence[Tensor],
    xs: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    needs_x: Sequence[bool],
) -> _Columns:
    """Return the gradients of inputs, weights and biases."""
    all_own = layer.statistics
    grads = [grad.contiguous(memory_format=memory_format_of(x)) for grad, x in zip(grads, xs, strict=True)]
    wide_weights = [_as(weight, own.mean) for weight, own in zip(weights, all_own, strict=True)]
    parts: list[Sums] = []
    for grad, x, weight, own in zip(grads, xs, wide_weights, all_own, strict=True):
        if x.numel():
            parts.append(own.sums(grad, x, weight))
        else:
            zeros_C = torch.zeros_like(own.mean)
            parts.append(Sums((zeros_C, zeros_C), zeros_C, zeros_C))
    of_x: list[Tensor | None] = [None] * len(xs)
    if any(needs_x):
        pairs = [part.pair for part in parts]
        total_2C = all_reduce_in_place(torch.stack(pairs[0])) if layer.over_ranks else stack_pairs(pairs).sum(0)
        shared_2C = all_own[0].shared(total_2C, wide_weights[0])
        on = {device: to_device(shared_2C, device).unbind() for device in dict.fromkeys(x.device for x in xs)}
        for i, (grad, x, weight, own) in enumerate(zip(grads, xs, wide_weights, all_own, strict=True)):
            if needs_x[i] and x.numel():
                of_x[i] = own.input_gradient(grad, x, weight, parts[i], on[x.device])
            elif needs_x[i]:
                of_x[i] = torch.zeros_like(x)
    return of_x, [part.of_weight for part in parts], [part.of_bias for part in parts]


def _differentiable_gradients(
    layer: Pass,
    grads: Sequence[Tensor],
    xs: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    needs_x: Sequence[bool],
) -> _Columns:
    """Return the gradients of inputs, weights and biases with differentiable operations, including the statistics."""
    main = xs[0].device
    if layer.over_ranks:
        moments, counts_P = split_rows(wide(stack_ranks(row_of(moments_of(xs[0]), count_of(xs[0])))))
        counts = Counts(counts_P)
    else:
        moments_P2C = wide(stack_pairs([moments_of(x) for x in xs]))
        moments = moments_P2C.unbind(1)
        counts = Counts.of_replicas([count_of(x) for x in xs], moments_P2C)
    mean_C, variance_C = join_moments(moments, counts.shares)
    invstd_C = torch.rsqrt(variance_C + layer.statistics[0].eps)
    normals, scaled, rows, of_weight, of_bias = [], [], [], [], []
    for grad, x, weight in zip(grads, xs, weights, strict=True):
        dtype = wide_dtype(x)
        mean, invstd = (_per_channel(to_device(t.to(dtype), x.device), x) for t in (mean_C, invstd_C))
        normals.append((x.to(dtype) - mean) * invstd)
        grad = grad.to(dtype)
        of_bias.append(grad.sum(_summed_dims(x)))
        of_weight.append((grad * normals[-1]).sum(_summed_dims(x)))
        sums = torch.cat([of_bias[-1], of_weight[-1]])
        rows.append(sums if weight is None else sums * weight.to(dtype).repeat(2))
        scaled.append((grad if weight is None else grad * _per_channel(weight.to(dtype), x), invstd))
    total = sum_of_layer(rows[0]) if layer.over_ranks else reduce_add(rows, main)
    of_x: list[Tensor | None] = []
    for x, normal, (grad, invstd), is_needed in zip(xs, normals, scaled, needs_x, strict=True):
        grad_C, normal_C = to_device((total / counts.total).to(normal.dtype), x.device).chunk(2)
        own = invstd * (grad - _per_channel(grad_C, x) - normal * _per_channel(normal_C, x))
        of_x.append(own.to(x.dtype) if is_needed else None)
    return of_x, of_weight, of_bias


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return channels_last if x is dense in it, else the contiguous format; the kernels accept only these."""
    for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and x.is_contiguous(memory_format=layout):
            return layout
    return torch.contiguous_format


class _BatchPart(NamedTuple):
    """One part of the batch at a layer: its input, its copies of the weights, and two moments per channel."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    moments: tuple[Tensor, Tensor]


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

    _has_found_values = False
    """True after this rank, which has no values, has found two or more in the whole batch."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input (N, C, ...), with the same shape and dtype; see `nn.BatchNorm2d`."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        tape = current_tape()
        if tape is not None and tape.is_second_pass:
            return self._normalize_again(input, tape.take())
        replica = self._joined_replica()
        if replica is not None:
            key = f"{self._name()} with {self.num_features} channels"
            if self.__dict__.get(IN_BLOCK):
                return self._normalize_tied(self._part(input), replica, key)
            return cast(Tensor, replica.exchange(key, self._part(input), self._normalize))
        if self.training and has_other_ranks():
            part = self._part(input)
            return self._apply_pass([part], self._joined([part]))[0]
        if tape is not None:
            tape.keep(None)
        return super().forward(input)

    def _normalize_tied(self, part: _BatchPart, replica: ReplicaContext, key: str) -> Tensor:
        """Return a replica's output with separate nodes, so that its activations can be recomputed separately.

        The sums of the backward pass are exchanged through ties, which `_JoinTies` joins.
        """
        link = _Link()
        tie = _Tie.apply(link, part.x, part.weight, part.bias)
        link.own, joined = replica.exchange(key, (part, link, tie), self._join_replicas)
        tape = current_tape()
        if tape is not None:
            tape.keep(link.own)
        return cast(Tensor, _NormalizePart.apply(link, part.x, part.weight, part.bias, joined))

    def _join_replicas(self, all_values: list[tuple[_BatchPart, _Link, Tensor]]) -> list[tuple[Any, Tensor]]:
        parts, links, ties = zip(*all_values, strict=True)
        joined = self._joined(list(parts))
        return list(zip(joined.statistics, _JoinTies.apply(links, *ties), strict=True))

    def _normalize_again(self, input: Tensor, known: Any) -> Tensor:
        """Return the output in the second pass of a block, with the statistics of the first pass."""
        if known is None:
            return super().forward(input)
        x = input.contiguous(memory_format=memory_format_of(input))
        if isinstance(known, Pass):
            tensors = (x, self.weight, self.bias)
            return cast(Tensor, Normalize.apply(known, *tensors)[0])
        link = _Link()
        link.own = known
        tie = _Tie.apply(link, x, self.weight, self.bias)
        return cast(Tensor, _NormalizePart.apply(link, x, self.weight, self.bias, tie))

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

    def _is_tracked(self) -> bool:
        return self.training and self.track_running_stats and self.running_mean is not None

    def _joins_by_kernel(self, x: Tensor) -> bool:
        """Return True if torch's kernel joins and tracks the moments, as it can with a constant momentum."""
        if not has_kernels(x):
            return False
        if not self._is_tracked():
            return True
        return self.momentum is not None and cast(Tensor, self.running_mean).dtype == wide_dtype(x)

    def _part(self, x: Tensor) -> _BatchPart:
        x = x.contiguous(memory_format=memory_format_of(x))
        with torch.no_grad():
            moments = kernel_moments_of(x, self.eps) if self._joins_by_kernel(x) else moments_of(x)
        return _BatchPart(x, self.weight, self.bias, moments)

    def _normalize(self, parts: list[_BatchPart]) -> list[Tensor]:
        """Return the outputs of all replicas."""
        return self._apply_pass(parts, self._joined(parts))

    def _apply_pass(self, parts: list[_BatchPart], joined: Pass) -> list[Tensor]:
        """Return the outputs of this process's parts."""
        tape = current_tape()
        if tape is not None:
            tape.keep(joined)
        tensors = ([getattr(part, name) for part in parts] for name in ("x", "weight", "bias"))
        return list(Normalize.apply(joined, *(tensor for column in tensors for tensor in column)))

    def _joined(self, parts: list[_BatchPart]) -> Pass:
        """Return and track the whole batch's statistics for this process's parts: all replicas, or this rank."""
        over_ranks = len(parts) == 1
        if len({part.x.size(1) for part in parts}) > 1:
            raise ValueError("replicas have different numbers of channels in one BatchNorm layer: use the same layers")
        x = parts[0].x
        join = self._join_by_kernel if self._joins_by_kernel(x) else self._join
        with torch.no_grad():
            moments, counts = self._of_rank(parts[0]) if over_ranks else self._of_replicas(parts)
            joined = join(moments, counts, x)
            by_device = spread(joined, [part.x.device for part in parts])
            statistics: list[Kernels | Composed] = []
            for device in (part.x.device for part in parts):
                mean_C, scale_C = by_device[device]
                if has_kernels(x):
                    statistics.append(Kernels(mean_C, scale_C, counts.on(device), self.eps))
                else:
                    statistics.append(Composed(mean_C, scale_C, counts.total, self.eps))
        return Pass(statistics, over_ranks)

    def _of_replicas(self, parts: Sequence[_BatchPart]) -> tuple[Sequence[Tensor], Counts]:
        """Return the moments (P, C) of all replicas, and their counts."""
        num_values = [count_of(part.x) for part in parts]
        self._check_count(sum(num_values))
        moments_P2C = self._to_join(stack_pairs([part.moments for part in parts]), parts[0].x)
        replica = current_replica()
        known = {} if replica is None else replica.group.common
        key = (Counts, moments_P2C.dtype, *num_values)
        if key not in known:  # most layers of a pass have the same counts as another layer
            known[key] = Counts.of_replicas(num_values, moments_P2C)
        return moments_P2C.unbind(1), known[key]

    def _of_rank(self, part: _BatchPart) -> tuple[Sequence[Tensor], Counts]:
        """Return the moments (P, C) of all ranks, and their counts."""
        num_values = count_of(part.x)
        moments, counts_P = split_rows(self._to_join(stack_ranks(row_of(part.moments, num_values)), part.x))
        # A rank that has no samples waits for the device once; the others check every batch.
        if num_values < 2 and not (num_values == 0 and self._has_found_values):
            count = round(counts_P.sum().item())
            self._has_found_values = count > 1
            self._check_count(count)
        return moments, Counts(counts_P)

    def _to_join(self, moments: Tensor, x: Tensor) -> Tensor:
        """Return moments in the dtype in which they are joined."""
        return moments if self._joins_by_kernel(x) else wide(moments)

    def _check_count(self, count: int) -> None:
        if count < 2:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got {count} in the whole batch at"
                f" {self._name()}: use a larger batch or crop"
            )

    def _join_by_kernel(self, moments: Sequence[Tensor], counts: Counts, x: Tensor) -> tuple[Tensor, Tensor]:
        """Join the parts' moments and track them; return the first two fields of `Kernels`."""
        running_mean_C, running_var_C = (self.running_mean, self.running_var) if self._is_tracked() else (None, None)
        if self._is_tracked():
            cast(Tensor, self.num_batches_tracked).add_(1)
        means_PC, invstds_PC = moments
        return torch.batch_norm_gather_stats_with_counts(
            means_PC,
            means_PC,
            invstds_PC,
            running_mean_C,
            running_var_C,
            self.momentum or 0.0,
            self.eps,
            counts.of_parts_P,
        )

    def _join(self, moments: Sequence[Tensor], counts: Counts, x: Tensor) -> tuple[Tensor, Tensor]:
        """Join the parts' moments and track them; return the first two fields of `Kernels` or of `Composed`."""
        mean_C, variance_C = (each.to(wide_dtype(x)) for each in join_moments(moments, counts.shares))
        if self._is_tracked():
            self._track(mean_C, variance_C * (counts.total / (counts.total - 1)))
        return mean_C, torch.rsqrt(variance_C + self.eps) if has_kernels(x) else variance_C

    def _track(self, mean_C: Tensor, variance_C: Tensor) -> None:
        """Move the running mean and variance towards the batch's mean and unbiased variance."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # .data, as in torch's own batch_norm: the buffers' version must not change, or the backward pass of an earlier
        # micro-batch would report them as modified.
        running = [self.running_mean.data, self.running_var.data]
        values = [_as(mean_C, running[0]), _as(variance_C, running[1])]
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
            layer.__dict__.pop("_has_found_values", None)
    return module
