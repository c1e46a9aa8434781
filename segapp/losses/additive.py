"""Criteria as sums that can be added over chunks, replicas, ranks and micro-batches; the division happens once.

A mean of means is not the mean, because chunks have different numbers of valid pixels. So a criterion returns
*statistics* (sums and counts) per chunk, and `finalize` computes the scalar loss of the whole step from their totals:

    rows = [criterion.statistics(outputs, target) for outputs, target in chunks]
    loss = criterion.finalize(tuple(sum(column) for column in zip(*rows)))

Shapes: N images, C classes, h x w of the logits, H x W of the target.
"""

from __future__ import annotations

import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.accelerator import wide_sum
from segapp.chunks import check_flag, check_number
from segapp.losses.fused.checks import check_ignore_index, check_inputs, check_stride, has_values, valid_pixels

LossStatistics = tuple[Tensor, ...]
"""Tensors that can be summed: differentiable sums in float32 or better, counts in float64."""

ModelOutputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""Outputs of a model: logits, (logits, *auxiliary logits), or torchvision's {"out": ..., "aux": ...}."""


def as_whole(outputs: Any) -> Any:
    """Return outputs that are not a DataParallelModel's, whose `__torch_function__` raises and names the remedy."""
    if isinstance(outputs, list) and hasattr(outputs, "__torch_function__"):
        outputs.__torch_function__("segapp.losses")
    return outputs


def heads_of(outputs: ModelOutputs) -> tuple[Tensor, ...]:
    """Return the main logits, then the auxiliary ones, each (N, C, h, w).

    Raises:
        TypeError: another type, outputs of a `DataParallelModel`, or a mapping without "out".
        ValueError: an empty sequence.
    """
    if isinstance(outputs, Tensor):
        return (outputs,)
    if isinstance(outputs, Mapping):
        if "out" not in outputs:
            raise TypeError(
                f'the model returned a mapping with keys {sorted(outputs)}: the main logits belong under "out"'
            )
        return (outputs["out"], *(value for key, value in outputs.items() if key != "out"))
    if not isinstance(as_whole(outputs), Sequence):
        raise TypeError(f"outputs are a {type(outputs).__name__}: give logits, a sequence of logits or a mapping")
    if not outputs:
        raise ValueError("outputs are an empty sequence: the first element must be the main logits")
    return tuple(map(as_whole, outputs))


def _marked_as_sums(statistics: Callable[..., LossStatistics]) -> Callable[..., LossStatistics]:
    """Decorate a criterion's `statistics`: a `DataParallelModel` that returns them knows that they are no means."""

    @functools.wraps(statistics)
    def marked(*args: Any, **kwargs: Any) -> LossStatistics:
        sums = statistics(*args, **kwargs)
        if not torch.compiler.is_compiling():
            for entry in sums:
                entry.is_sum = True  # type: ignore[attr-defined]
        return sums

    return marked


class AdditiveCriterion(nn.Module):
    """Loss that is a function of sums over pixels or images.

    `forward` is `finalize(statistics(...))`: on one device a criterion is used like any other loss module.

    Attributes:
        is_sigmoid: the loss uses each logit separately (sigmoid); otherwise the logits of a pixel together (softmax).
        is_linear: `finalize` is linear in the differentiable entries, and the others depend only on the target. Then
            `target_statistics` gives the denominators of a step before any logits exist.
        num_statistics: number of entries of `statistics`.
        takes_any_aspect: logits that no stride explains are resampled, as of a squashed image, instead of refused.
    """

    is_sigmoid: bool = False
    is_linear: bool = False
    num_statistics: int = 0
    takes_any_aspect: bool = False
    ignore_index: int
    align_corners: bool

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "statistics" in vars(cls):
            cls.statistics = _marked_as_sums(cls.statistics)  # type: ignore[method-assign]

    def _set_options(self, *, ignore_index: int, align_corners: bool, **more: bool) -> None:
        """Set the attributes that the criteria of a target's pixels share."""
        check_ignore_index(ignore_index)
        self.ignore_index = ignore_index
        for name, value in {"align_corners": align_corners, **more}.items():
            setattr(self, name, check_flag(name, value))

    def statistics(self, outputs: ModelOutputs, target: Tensor) -> LossStatistics:
        """Return the sums of a chunk, with the same shapes for every chunk of a step.

        Args:
            outputs: logits (N, C, h, w) at any resolution: a tensor, a sequence or a mapping (see `heads_of`).
            target: class ids (N, H, W), uint8 or a signed integer type.
        """
        raise NotImplementedError

    def _heads(self, outputs: ModelOutputs, target: Tensor) -> tuple[Tensor, ...]:
        """Return the heads, each with a stride that explains its size, unless the criterion `takes_any_aspect`."""
        heads = heads_of(outputs)
        for logits in () if self.takes_any_aspect else heads:
            check_stride(logits, target)
        return heads

    @property
    def task(self) -> AdditiveCriterion:
        """The criterion that needs only the model's outputs and a target; evaluations report its loss."""
        return self

    def terms(self, totals: LossStatistics) -> dict[str, Tensor]:
        """Return the parts of the loss for display, by name, without weights."""
        return {}

    def target_statistics(self, target: Tensor) -> LossStatistics:
        """Return `statistics` with numerators 0, computed only from the target (N, H, W).

        Raises:
            TypeError: the criterion is not linear.
        """
        raise TypeError(f"{type(self).__name__} is not linear: its statistics need the logits")

    def finalize(self, totals: LossStatistics) -> Tensor:
        """Return the scalar loss from the summed statistics; 0 with zero gradient if no pixel was valid."""
        raise NotImplementedError

    def forward(self, outputs: ModelOutputs, target: Tensor) -> Tensor:
        """Return the scalar loss of a step with one chunk; see `statistics` for the arguments."""
        return self.finalize(self.statistics(as_whole(outputs), target))

    def extra_repr(self) -> str:
        """Return the arguments of the constructor with their values, defaults included; modules follow as children."""
        values = {key: getattr(self, key, self) for key in inspect.signature(type(self)).parameters}
        shown = {key: value for key, value in values.items() if not isinstance(value, nn.Module)}
        return ", ".join(f"{key}={shown_value(value)}" for key, value in shown.items())


class MeanCriterion(AdditiveCriterion):
    """Criterion of the form sum / count, where the count depends only on the target.

    Statistics: (loss sum over all heads, count). Each auxiliary head's loss is multiplied by `aux_weight`.
    """

    is_linear = True
    num_statistics = 2

    def __init__(self, aux_weight: float) -> None:
        super().__init__()
        self.aux_weight = check_number("aux_weight", aux_weight)

    def head_sums(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scalar (numerator, denominator) of one head's logits (N, C, h, w)."""
        raise NotImplementedError

    def denominator(self, target: Tensor) -> Tensor:
        """Return the denominator of `head_sums`, computed only from the target (N, H, W): by default the valid pixels.

        It is a float64 scalar.
        """
        return wide_sum(valid_pixels(target, self.ignore_index))

    def statistics(self, outputs: ModelOutputs, target: Tensor) -> LossStatistics:
        """Return (loss sum, denominator); see the base class."""
        main, *auxiliary = self._heads(outputs, target)
        total, count = self.head_sums(main, target)
        for logits in auxiliary:
            total = total + self.aux_weight * self.head_sums(logits, target)[0]
        return total, count

    def target_statistics(self, target: Tensor) -> LossStatistics:
        """Return (0, denominator); see the base class."""
        return torch.zeros((), device=target.device), self.denominator(target)

    def finalize(self, totals: LossStatistics) -> Tensor:
        """Return loss sum / denominator in the loss sum's dtype; 0 if the denominator is 0."""
        total, count = totals
        return (total * reciprocal_or_zero(count)).to(total.dtype)


class PlainLossError(TypeError):
    """A plain loss returned something other than a scalar tensor."""


class PlainCriterion(MeanCriterion):
    """An additive criterion from a function (logits, target) -> mean over the valid pixels.

    Use it for a loss of your own or of another library. The loss of a step is the mean of the losses of its chunks,
    weighted by their numbers of valid pixels. On several devices or with micro-batches, this equals the loss of the
    whole step only if the function is a mean over valid pixels. A step of one chunk is always exact.

    Args:
        function: takes logits (N, C, H, W), float32 or float64, at the target's resolution and int64 targets (N, H, W)
            with `ignore_index`; returns a scalar. A module's parameters and buffers follow the device.
        ignore_index: target value of the pixels that are not valid.
        align_corners: as in `F.interpolate`, but True by default.
        aux_weight: weight of the loss of each auxiliary head.
    """

    def __init__(
        self,
        function: Callable[[Tensor, Tensor], Tensor],
        *,
        ignore_index: int = 255,
        align_corners: bool = True,
        aux_weight: float = 0.4,
    ) -> None:
        super().__init__(aux_weight)
        self._set_options(ignore_index=ignore_index, align_corners=align_corners)
        self.function = function

    def head_sums(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return (mean x valid pixels, valid pixels) of one head's logits (N, C, h, w)."""
        if isinstance(target, Tensor) and target.is_floating_point():
            raise TypeError(f"target is {target.dtype}: give integers, or derive your loss from AdditiveCriterion")
        check_inputs(logits, target)
        count = self.denominator(target)
        # Without a valid pixel a mean is NaN; neither it nor its gradient may reach the sums.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = torch.where(count > 0, logits, 0.0)
        if logits.shape[-2:] != target.shape[-2:]:
            logits = F.interpolate(logits, target.shape[-2:], mode="bilinear", align_corners=self.align_corners)
        mean = self.function(logits, target.long())
        if not isinstance(mean, Tensor) or mean.ndim:
            what = f"a tensor of shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else f"a {type(mean).__name__}"
            raise PlainLossError(f"the loss returned {what}: return a scalar tensor, the mean over the valid pixels")
        mean = mean.to(logits.dtype)
        return torch.where(count > 0, mean * count.to(logits.dtype), 0.0), count


class HeadCriterion(AdditiveCriterion):
    """Criterion with separate statistics per head: every entry is (heads, ...), row 0 is the main head.

    Each auxiliary head's loss is multiplied by `aux_weight`.
    """

    def __init__(self, aux_weight: float) -> None:
        super().__init__()
        self.aux_weight = check_number("aux_weight", aux_weight)

    def head_statistics(self, logits: Tensor, target: Tensor) -> LossStatistics:
        """Return the sums of one head's logits (N, C, h, w)."""
        raise NotImplementedError

    def finalize_head(self, totals: LossStatistics) -> Tensor:
        """Return the scalar loss of one head."""
        raise NotImplementedError

    def statistics(self, outputs: ModelOutputs, target: Tensor) -> LossStatistics:
        """Return the heads' sums, stacked; see the base class."""
        rows = [self.head_statistics(logits, target) for logits in self._heads(outputs, target)]
        return tuple(torch.stack(entry) for entry in zip(*rows, strict=True))

    def finalize(self, totals: LossStatistics) -> Tensor:
        """Return main loss + aux_weight x each auxiliary loss."""
        main, *auxiliary = (self.finalize_head(row) for row in zip(*(entry.unbind(0) for entry in totals), strict=True))
        for loss in auxiliary:
            main = main + self.aux_weight * loss
        return main


class CriterionSum(AdditiveCriterion):
    """Weighted sum of criteria; its statistics are the concatenated statistics of the criteria.

    Use it when one loss is not enough, such as cross-entropy with Dice. It takes the outputs and the target of its
    terms.

    Args:
        terms: (factor, criterion) pairs.

    Raises:
        TypeError: a term is no such pair, as for a loss of torch: wrap it in `PlainCriterion`.
        ValueError: no terms, or a factor that is not finite.

    Example:
        >>> import torch
        >>> from segapp.losses import CriterionCE, CriterionDice, CriterionSum
        >>> logits, target = torch.zeros(1, 3, 8, 8), torch.zeros(1, 32, 32, dtype=torch.uint8)
        >>> round(float(CriterionSum([(1.0, CriterionCE()), (0.5, CriterionDice(smooth=0.0))])(logits, target)), 4)
        1.3486
    """

    def __init__(self, terms: Iterable[tuple[float, AdditiveCriterion]]) -> None:
        super().__init__()
        pairs: list[Any] = list(terms) if isinstance(terms, Iterable) else [terms]
        if not pairs:
            raise ValueError("CriterionSum has no terms: give at least one (factor, criterion)")
        # The usual mistakes are (criterion, factor), and a loss of torch instead of a criterion.
        for pair in pairs:
            given = [type(part).__name__ for part in (pair if isinstance(pair, Sequence) else [pair])]
            if len(given) != 2 or not isinstance(pair[0], Real) or not isinstance(pair[1], AdditiveCriterion):
                wanted = "pairs such as (1.0, CriterionCE()), and a loss of your own as (1.0, PlainCriterion(loss))"
                raise TypeError(f"CriterionSum has the term ({', '.join(given)}): give {wanted}")
        self.factors = tuple(check_number("factor", factor, least=-math.inf) for factor, _ in pairs)
        self.criteria = cast(Sequence[AdditiveCriterion], nn.ModuleList(criterion for _, criterion in pairs))
        self.is_linear = all(criterion.is_linear for criterion in self.criteria)
        self.is_sigmoid = any(criterion.is_sigmoid for criterion in self.criteria)
        self.num_statistics = sum(criterion.num_statistics for criterion in self.criteria)

    def __repr__(self) -> str:
        pairs = zip(self.factors, self.criteria, strict=True)
        lines = "".join(f"({factor}, {criterion!r}),\n" for factor, criterion in pairs).splitlines()
        shown = lines if len(lines) <= 7 else [*lines[:6], f"... and {len(lines) - 6} more"]
        terms = textwrap.indent("\n".join(shown), "  ")
        return f"{type(self).__name__}([\n{terms}\n])"

    def statistics(self, outputs: ModelOutputs, target: Tensor) -> LossStatistics:
        """Return the concatenated statistics of the terms."""
        return tuple(entry for criterion in self.criteria for entry in criterion.statistics(outputs, target))

    def target_statistics(self, target: Tensor) -> LossStatistics:
        """Return the concatenated target statistics of the terms; TypeError unless all are linear."""
        return tuple(entry for criterion in self.criteria for entry in criterion.target_statistics(target))

    def finalize(self, totals: LossStatistics) -> Tensor:
        """Return the sum of factor x loss over the terms."""
        losses, start = [], 0
        for factor, criterion in zip(self.factors, self.criteria, strict=True):
            stop = start + criterion.num_statistics
            losses.append(factor * criterion.finalize(totals[start:stop]))
            start = stop
        return torch.stack(losses).sum() if len({loss.dtype for loss in losses}) == 1 else sum(losses[1:], losses[0])


def surrogate(criterion: Any, statistics: LossStatistics, totals: LossStatistics, *, average: bool = True) -> Tensor:
    """Return a scalar whose gradient is this chunk's exact share of the gradient of the loss of the whole step.

    Use it in your own DDP or gradient-accumulation loop: compute the statistics of each chunk, add them over ranks and
    micro-batches to `totals`, and call `backward()` on the surrogate of each chunk. Its value is not the loss, which is
    `criterion.finalize(totals)`. It is the sum over statistics s of (d finalize / d s at `totals`) times s, so it is
    exact for any `finalize` by the chain rule. Second derivatives are exact for linear criteria only.

    Args:
        criterion: the `AdditiveCriterion` of the statistics, or a `DataParallelCriterion` with one.
        statistics: statistics of this chunk, with their graph.
        totals: statistics of the whole step, added over all chunks and ranks; they are constants here.
        average: the ranks' gradients are averaged afterwards, as by `DistributedDataParallel` and by
            `all_reduce_gradients`: the result is multiplied by the size of the default process group. False if they are
            summed, or for a DDP with another `process_group`: multiply the result by that group's size yourself.

    Returns:
        A scalar on the device of the statistics.

    Example:
        >>> import torch
        >>> from segapp.losses import CriterionCE, surrogate
        >>> criterion, logits = CriterionCE(), torch.zeros(2, 3, 4, 4, requires_grad=True)
        >>> target = torch.zeros(2, 8, 8, dtype=torch.uint8)
        >>> halves = [criterion.statistics(logits[i : i + 1], target[i : i + 1]) for i in range(2)]
        >>> totals = tuple(a + b for a, b in zip(*halves))
        >>> for half in halves:
        ...     surrogate(criterion, half, totals).backward()
        >>> whole = torch.zeros(2, 3, 4, 4, requires_grad=True)
        >>> criterion(whole, target).backward()
        >>> torch.allclose(logits.grad, whole.grad)
        True
    """
    # In the entry's dtype: the numerators of `target_statistics` are float32, and slopes at them would be rounded.
    at = [total.detach().to(entry.device, entry.dtype) for total, entry in zip(totals, statistics, strict=True)]
    live = [i for i, entry in enumerate(statistics) if entry.requires_grad]
    if not live:
        return statistics[0].detach().sum() * 0.0
    with torch.enable_grad():
        for i in live:
            at[i].requires_grad_()
        slopes = torch.autograd.grad(criterion.finalize(tuple(at)), [at[i] for i in live], allow_unused=True)
    terms = [
        (statistics[i] * (torch.zeros_like(at[i]) if slope is None else slope)).sum()
        for i, slope in zip(live, slopes, strict=True)
    ]
    share = sum(terms[1:], terms[0])
    is_divided = average and dist.is_available() and dist.is_initialized()
    return share * dist.get_world_size() if is_divided else share


def shown_value(value: object) -> str:
    """Return the text of an argument: up to eight weights as a list, more as a shape, and a function as its name."""
    if isinstance(value, Tensor):
        is_short = value.numel() <= 8 and has_values(value)
        return (
            f"[{', '.join(f'{each:.4g}' for each in value.tolist())}]" if is_short else f"<shape {tuple(value.shape)}>"
        )
    return getattr(value, "__name__", repr(value))


def reciprocal_or_zero(count: Tensor) -> Tensor:
    """Return 1 / count, and 0 for count 0: without a valid pixel the loss and its gradient are 0, not NaN."""
    return torch.where(count > 0, 1 / torch.where(count > 0, count, 1.0), 0.0)
