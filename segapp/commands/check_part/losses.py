"""Checks of an own loss: finite, a mean, exact at splits, on the device of its inputs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from segapp.commands.check_part.checks import IGNORED, NUM_CLASSES, Check, tried
from segapp.commands.check_part.elsewhere import follows
from segapp.errors import ConfigError
from segapp.losses import AdditiveCriterion, PlainCriterion, surrogate


def checks_of_loss(criterion: AdditiveCriterion) -> Iterator[Check]:
    """Yield the checks of the criterion that a loss has become."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(4, NUM_CLASSES, 8, 12, generator=generator, dtype=torch.float64)
    logits = wide.float()
    target = torch.randint(NUM_CLASSES, (4, 16, 24), generator=generator, dtype=torch.uint8)
    target[0, :9], target[3, :, 5:] = IGNORED, IGNORED

    def whole(of: Tensor = target) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        loss = criterion((leaf,), of)
        if loss.dim() or not loss.is_floating_point():
            raise ConfigError(
                f"the loss is {loss.dtype} of shape {tuple(loss.shape)}: return a floating-point scalar, the mean over "
                "valid pixels"
            )
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient

    def finite() -> str | None:
        loss, gradient = whole()
        wrong = "loss" if not loss.isfinite() else "gradient" if not gradient.isfinite().all() else ""
        return f"the {wrong} is not: guard logarithms and divisions" if wrong else None

    def nothing_valid() -> str | None:
        loss, gradient = whole(torch.full_like(target, IGNORED))
        if loss == 0 and not gradient.any():
            return None
        return f"the loss is {float(loss):g}: sum over target != ignore_index, and divide by at least 1"

    def statistics() -> str | None:
        found = criterion.statistics((logits,), target)
        if len(found) != criterion.num_statistics:
            return f"statistics gives {len(found)} tensors: set num_statistics to {len(found)}"
        if criterion.is_linear and not torch.equal(criterion.target_statistics(target)[-1], found[-1]):
            return "target_statistics gives another denominator than statistics: compute both from the target alone"
        return None

    def doubled() -> str | None:
        once = float(whole()[0])
        twice = float(criterion((logits.repeat(2, 1, 1, 1),), target.repeat(2, 1, 1)).detach())
        if once == 0 or abs(twice / once - 2) > 1e-3:
            return None
        return (
            f"it is {twice / once:.3g} times as large for each image given twice: it is a sum, and the learning rate "
            'would depend on batch, crop and split: divide by the valid pixels (reduction="mean")'
        )

    def moved() -> str | None:
        return follows(criterion, lambda copied, device: copied((logits.to(device),), target.to(device)))

    values = tried("loss and gradient are finite", finite)
    yield values
    if values.problem:
        return
    repeats = "draws random numbers: make it a function of logits and target"
    yield tried("it does not grow with the number of images", doubled)
    yield tried("it repeats its result", lambda: None if torch.equal(whole()[1], whole()[1]) else repeats)
    yield tried("without a valid pixel it is 0", nothing_valid)
    yield tried("statistics and declarations agree", statistics)
    yield from _of_split(criterion, wide, target)
    yield tried("it can be copied and moved to another device", moved)


def _of_split(criterion: AdditiveCriterion, logits: Tensor, target: Tensor) -> Iterator[Check]:
    """Yield whether a divided step equals the whole one in float32, and in float64 where the loss computes in it.

    Args:
        criterion: of the loss.
        logits: (N, C, h, w) float64, of values that float32 does not hold.
        target: (N, H, W).
    """
    what = "a divided step gives the same loss and gradient in"
    narrow = logits.float()
    found = [tried(f"{what} float32", lambda: _gap_problem(criterion, _split_gap(criterion, narrow, target), 1e-4))]
    precise = copy.deepcopy(criterion).double()
    try:
        in_float64 = not torch.equal(*(precise((each,), target) for each in (logits, narrow.double())))
        reason = "it rounds float64 logits"
    except Exception as error:
        in_float64, reason = False, f"with float64 logits it fails ({str(error).partition(chr(10))[0]})"
    if in_float64:
        found.append(tried(f"{what} float64", lambda: _gap_problem(precise, _split_gap(precise, logits, target), 1e-9)))
    for check in found:
        yield replace(check, kind="note") if isinstance(criterion, PlainCriterion) else check
    if not in_float64:
        yield Check(f"{what} float64", f"{reason}; float32 shows no error below 0.01 %", "not tried")


def _split_gap(criterion: AdditiveCriterion, logits: Tensor, target: Tensor) -> float:
    """Return the largest relative difference in loss and gradient of a step of two chunks from the whole step."""
    leaf = logits.clone().requires_grad_()
    expected = criterion((leaf,), target)
    (gradient,) = torch.autograd.grad(expected, leaf)
    parts = [criterion.statistics((leaf[a:b],), target[a:b]) for a, b in ((0, 1), (1, len(logits)))]
    totals = tuple(sum(entries[1:], entries[0]) for entries in zip(*parts, strict=True))
    for part in parts:
        surrogate(criterion, part, totals).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    difference = (criterion.finalize(totals) - expected).detach().abs()
    loss_gap = float(difference / expected.detach().abs().clamp(min=1e-6))
    return max(loss_gap, float((leaf.grad - gradient).abs().max() / gradient.abs().max().clamp(min=1e-12)))


def _gap_problem(criterion: AdditiveCriterion, gap: float, tolerance: float) -> str | None:
    if gap <= tolerance:
        return None
    if isinstance(criterion, PlainCriterion):
        return (
            f"no mean over valid pixels (off by {gap:.2g} of its size): it is exact on one device without "
            "train.accumulate; elsewhere write it as an AdditiveCriterion"
        )
    return f"off by {gap:.2g} of its size: return sums in statistics, and divide in finalize alone"
