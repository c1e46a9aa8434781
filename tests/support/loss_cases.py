"""Random logits and targets of the loss tests."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from segapp.losses import (
    AdditiveCriterion,
    CriterionBCE,
    CriterionCE,
    CriterionDice,
    CriterionFocal,
    CriterionLovasz,
    CriterionOHEM,
    CriterionSum,
    CriterionTversky,
    confusion,
)
from segapp.losses.fused import bands, pixel_sums

CLASSES = 4


def draw(
    num_images: int = 5,
    num_classes: int = CLASSES,
    low: tuple[int, int] = (5, 6),
    high: tuple[int, int] = (17, 23),
    *,
    ignored: float | list[float] = 0.3,
    dtype: torch.dtype = torch.float64,
    target_dtype: torch.dtype = torch.int64,
    sigma: float = 2.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return logits (N, C, h, w) and a target (N, H, W); `ignored` is the share of ignored pixels, or one per image."""
    generator = torch.Generator().manual_seed(seed)
    logits = sigma * torch.randn(num_images, num_classes, *low, dtype=torch.float64, generator=generator)
    target = torch.randint(0, num_classes, (num_images, *high), generator=generator)
    share = torch.as_tensor(ignored, dtype=torch.float64).expand(num_images).view(-1, 1, 1)
    target[torch.rand(target.shape, dtype=torch.float64, generator=generator) < share] = 255
    return logits.to(dtype), target.to(target_dtype)


def class_weight(num_classes: int = CLASSES) -> Tensor:
    return torch.linspace(0.25, 2.0, num_classes, dtype=torch.float64)


def criteria() -> dict[str, AdditiveCriterion]:
    """Return one criterion of each kind and a sum, with options that cover every branch."""
    weight = class_weight()
    return {
        "ce": CriterionCE(),
        "ce-weighted": CriterionCE(weight=weight, label_smoothing=0.1, align_corners=False),
        "ohem": CriterionOHEM(threshold=0.5, min_kept=20),
        "ohem-min-kept": CriterionOHEM(threshold=0.05, min_kept=900, weight=weight),
        "dice": CriterionDice(),
        "dice-all": CriterionDice(smooth=0.5, classes="all", align_corners=False),
        "dice-multilabel": CriterionDice(multilabel=True),
        "tversky": CriterionTversky(),
        "tversky-focal": CriterionTversky(alpha=0.6, beta=0.4, gamma=0.75, smooth=0.5),
        "tversky-multilabel": CriterionTversky(gamma=1.5, multilabel=True),
        "bce": CriterionBCE(),
        "bce-multilabel": CriterionBCE(weight=weight, pos_weight=3.0, label_smoothing=0.1, multilabel=True),
        "focal-multilabel": CriterionFocal(gamma=0.5, weight=weight, multilabel=True),
        "focal": CriterionFocal(gamma=2.0),
        "focal-alpha": CriterionFocal(gamma=0.5, weight=weight),
        "lovasz": CriterionLovasz(),
        "lovasz-all": CriterionLovasz(classes="all"),
        "sum": CriterionSum([(1.0, CriterionCE()), (0.5, CriterionDice()), (2.0, CriterionLovasz())]),
    }


def cut_into_bands(patch: pytest.MonkeyPatch) -> None:
    """Cut batches of any size into bands, for all threads of torch."""
    patch.setattr(pixel_sums, "FULL_BYTES", 0)
    patch.setattr(bands, "CPU_BAND_BYTES", 4000)
    patch.setattr(confusion, "CPU_BAND_BYTES", 4000)
    for name in ("MIN_PART_BYTES", "MIN_SHARED_BYTES", "MIN_CELL_BYTES"):
        patch.setattr(bands, name, 1)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Return the largest difference relative to the largest true entry (to 1 if that is 0)."""
    scale = truth.abs().max().double()
    return float((value.double() - truth.double()).abs().max() / (scale if scale > 0 else 1.0))


def loss_and_gradient(
    criterion: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    loss = criterion(logits, target)
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss.detach(), gradient
