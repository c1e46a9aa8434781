"""Losses on a device without float64 against those with sums in float64, over many pixels of different losses."""

from __future__ import annotations

import pytest
import torch

from segapp.accelerator import ACCELERATORS, Accelerator
from segapp.losses import (
    CriterionBCE,
    CriterionCE,
    CriterionDice,
    CriterionFocal,
    CriterionLovasz,
    CriterionOHEM,
    CriterionTversky,
)
from segapp.losses.additive import AdditiveCriterion
from tests.support.gpu.as_on_cuda import take_cuda_road

N, C = 2, 7
WEIGHT = torch.linspace(0.3, 1.7, C)


class NoFloat64(Accelerator):
    """The CPU, but without float64."""

    def has_float64(self, device: torch.device) -> bool:
        return False


def value_and_gradient(
    criterion: AdditiveCriterion, logits: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.clone().requires_grad_()
    loss = criterion(logits, target)
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss.detach().double(), gradient.double()


@pytest.mark.parametrize(
    ("criterion", "bound"),
    [
        (CriterionCE(implementation="reference"), 1e-6),
        (CriterionCE(weight=WEIGHT, implementation="sums"), 1e-6),
        (CriterionDice(), 1e-6),
        (CriterionTversky(), 1e-6),
        (CriterionFocal(), 1e-6),
        (CriterionLovasz(), 1e-6),
        (CriterionBCE(), 1e-6),
        (CriterionOHEM(weight=WEIGHT), 1e-5),  # its bins are added in float32
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, AdditiveCriterion) else "",
)
def test_loss_without_float64_is_that_with_float64_sums(
    criterion: AdditiveCriterion, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_cuda_road(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(N, C, 32, 32, generator=generator)
    target = torch.randint(0, C, (N, 256, 256), generator=generator)
    target[:, :40] = 255
    loss, gradient = value_and_gradient(criterion, logits, target)
    monkeypatch.setitem(ACCELERATORS, "cpu", NoFloat64("cpu"))
    found, slope = value_and_gradient(criterion, logits, target)
    assert float(found) == pytest.approx(float(loss), rel=bound)
    assert float((slope - gradient).abs().max() / gradient.abs().max()) < 1e-5
