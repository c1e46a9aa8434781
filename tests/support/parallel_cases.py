"""Shared parts of the parallel tests: a small network, a plain criterion, batches, relative errors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = 255
NUM_CLASSES = 4


class SmallNet(nn.Module):
    """Network with strided, dilated and residual convolutions, BatchNorm, a shared weight and auxiliary logits."""

    def __init__(self, width: int = 4, has_aux: bool = True) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.dilated = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=2, dilation=2, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.residual = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        self.head = nn.Conv2d(width, NUM_CLASSES, 1)
        self.aux = nn.Conv2d(width, NUM_CLASSES, 1) if has_aux else None
        if self.aux is not None:
            self.aux.weight = self.head.weight

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        stem = self.stem(images)
        middle = self.dilated(stem)
        heads = [self.head(F.relu(self.residual(middle) + stem))]
        if self.aux is not None:
            heads.append(self.aux(middle))
        size = images.shape[-2:]
        return tuple(F.interpolate(logits, size, mode="bilinear", align_corners=True) for logits in heads)


class Critic(nn.Module):
    """Remove biases before BatchNorm: their gradient is exactly 0, and relative errors have no meaning."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, 2, 1, bias=False)
        self.first_bn = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 8, 3, 2, 1, bias=False)
        self.second_bn = nn.BatchNorm2d(8)
        self.score = nn.Conv2d(8, 1, 3)

    def forward(self, images: Tensor) -> Tensor:
        features = F.leaky_relu(self.first_bn(self.first(images)), 0.2)
        features = F.leaky_relu(self.second_bn(self.second(features)), 0.2)
        return self.score(features).mean((2, 3))


class PlainCE:
    """Cross-entropy as (loss sum, weight sum), by torch's own cross_entropy: independent of segapp.losses."""

    def __init__(self, weight: Tensor | None = None, label_smoothing: float = 0.0, aux_weight: float = 0.4) -> None:
        self.weight, self.label_smoothing, self.aux_weight = weight, label_smoothing, aux_weight

    def statistics(self, outputs: tuple[Tensor, ...], target: Tensor) -> tuple[Tensor, Tensor]:
        weight = None if self.weight is None else self.weight.to(outputs[0])
        sums = [
            F.cross_entropy(
                logits,
                target,
                weight,
                ignore_index=IGNORE,
                reduction="sum",
                label_smoothing=self.label_smoothing,
            )
            for logits in outputs
        ]
        is_valid = target != IGNORE
        count = is_valid.double() if weight is None else torch.where(is_valid, weight[target * is_valid].double(), 0.0)
        return sums[0] + self.aux_weight * sum(sums[1:], torch.zeros_like(sums[0])), count.sum()

    def finalize(self, totals: tuple[Tensor, ...]) -> Tensor:
        loss_sum, weight_sum = totals
        return loss_sum / torch.where(weight_sum > 0, weight_sum, torch.ones_like(weight_sum)).to(loss_sum.dtype)

    def __call__(self, outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        return self.finalize(self.statistics(outputs, target))


def make_batch(
    num_samples: int, size: int = 11, dtype: torch.dtype = torch.float64, seed: int = 0, ignored: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return images whose statistics, and a target whose ignored share, differ between samples.

    `ignored` is the share of the last sample; above 1 every pixel of the batch is ignored.
    """
    generator = torch.Generator().manual_seed(seed)
    scale = torch.arange(1, num_samples + 1, dtype=torch.float64).view(-1, 1, 1, 1)
    images = torch.randn(num_samples, 3, size, size, generator=generator, dtype=torch.float64) * scale + scale
    target = torch.randint(0, NUM_CLASSES, (num_samples, size, size), generator=generator)
    part = torch.linspace(0, ignored, num_samples) if ignored <= 1 else torch.ones(num_samples)
    target[torch.rand(target.shape, generator=generator) < part.view(-1, 1, 1)] = IGNORE
    return images.to(dtype), target


def grads_of(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def relative_error(values: Iterable[Tensor | None], truths: Iterable[Tensor | None]) -> float:
    """Return the largest difference relative to the largest true entry; infinite for non-finite values.

    Both must be None or neither.
    """
    worst = 0.0
    for value, truth in zip(values, truths, strict=True):
        assert (value is None) == (truth is None)
        if value is None or truth is None or truth.numel() == 0:
            continue
        if not torch.isfinite(value).all():
            return float("inf")
        difference = (value.double() - truth.double()).abs().max().item()
        scale = truth.double().abs().max().item()
        worst = max(worst, difference / scale if scale > 0 else difference)
    return worst


def state_error(module: nn.Module, truth: nn.Module) -> float:
    """Return the `relative_error` of the buffers."""
    return relative_error(module.buffers(), truth.buffers())
