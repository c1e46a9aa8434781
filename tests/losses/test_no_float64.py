"""Losses on a device without float64 against those with sums in float64, over many pixels of different losses."""

from __future__ import annotations

import pytest
import torch

from segapp.accelerator import ACCELERATORS
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
from tests.support.loss_cases import loss_and_gradient
from tests.test_accelerator import NoFloat64

N, C = 2, 7
WEIGHT = torch.linspace(0.3, 1.7, C)


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
    loss, gradient = loss_and_gradient(criterion, logits, target)
    monkeypatch.setitem(ACCELERATORS, "cpu", NoFloat64("cpu"))
    found, slope = loss_and_gradient(criterion, logits, target)
    assert float(found) == pytest.approx(float(loss), rel=bound)
    assert float((slope - gradient).abs().max() / gradient.abs().max()) < 1e-5
