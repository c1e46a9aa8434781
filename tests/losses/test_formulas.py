"""The formulas in plain torch, with which the modules of losses begin, against the criteria."""

import math
import re
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from segapp import losses
from segapp.losses import additive, cross_entropy, distillation, mask_classification, overlap, pixel_losses

C, SIZE = 4, (17, 20)


def computed(module: ModuleType, **values: Any) -> dict[str, Any]:
    """Return the variables of a module's formulas, of which each block without its inputs is left out."""
    values |= {"torch": torch, "F": F, "math": math}
    for block in re.findall(r"(?:^    \w+(?:, \w+)* = .*\n)+", f"{module.__doc__}\n", re.MULTILINE):
        if "overlap" not in module.__name__ or ("errors" in block) is ("valid" not in values):
            exec(re.sub(r"^    ", "", block, flags=re.MULTILINE), values)
    return values


@pytest.fixture
def case() -> dict[str, Any]:
    """Return low-resolution logits, a target with ignored pixels, and both at full resolution."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, C, 5, 6, generator=generator)
    target = torch.randint(0, C, (3, *SIZE), generator=generator)
    target[torch.rand(target.shape, generator=generator) < 0.2] = 255
    full = F.interpolate(logits, SIZE, mode="bilinear")
    valid = (target != 255)[:, None]
    one_hot = F.one_hot(torch.where(valid[:, 0], target, 0), C).permute(0, 3, 1, 2) * valid
    return {"logits": logits, "target": target, "full": full, "valid": valid, "t": one_hot.float()}


def check(found: torch.Tensor, criterion: losses.AdditiveCriterion, case: dict[str, Any], **tolerance: float) -> None:
    assert float(found) == pytest.approx(
        float(criterion(case["logits"], case["target"])), **(tolerance or {"rel": 1e-5})
    )


def test_formula_of_cross_entropy(case: dict[str, Any]) -> None:
    weight = torch.tensor([0.5, 1.0, 2.0, 3.0])
    given: dict[str, Any] = {"weight": weight, "ignore_index": 255, "align_corners": False}
    found = computed(cross_entropy, H=SIZE[0], W=SIZE[1], logits=case["logits"], target=case["target"], **given)
    check(found["loss"], losses.CriterionCE(**given), case)


def test_formulas_of_dice_and_tversky(case: dict[str, Any]) -> None:
    options = {"alpha": 0.3, "beta": 0.7, "gamma": 0.75, "smooth": 2.0}
    found = computed(overlap, **{name: case[name] for name in ("full", "valid", "t")}, **options)
    check(found["tversky"], losses.CriterionTversky(**options, align_corners=False), case)  # type: ignore[arg-type]
    check(found["dice"], losses.CriterionDice(smooth=2.0, align_corners=False), case)


def test_formula_of_lovasz(case: dict[str, Any]) -> None:
    images = zip(case["full"].softmax(1), case["t"], case["valid"][:, 0], strict=True)
    means = [
        torch.stack([computed(overlap, p=p[c][valid], t=t[c][valid])["lovasz"] for c in range(C)]).mean()
        for p, t, valid in images
    ]
    check(torch.stack(means).mean(), losses.CriterionLovasz(align_corners=False), case)


@pytest.mark.parametrize("min_kept", [10, 600, 10**6])
def test_formulas_of_pixel_losses(case: dict[str, Any], min_kept: int) -> None:
    valid, options = case["valid"][:, 0], {"threshold": 0.3, "min_kept": min_kept}
    pixels = {"full": case["full"].permute(0, 2, 3, 1)[valid], "target": case["target"][valid]}
    found = computed(pixel_losses, **pixels, C=C, gamma=2.0, **options)
    check(found["bce"], losses.CriterionBCE(align_corners=False), case)
    check(found["focal"], losses.CriterionFocal(align_corners=False), case)
    ohem = losses.CriterionOHEM(**options, align_corners=False)  # type: ignore[arg-type]
    check(found["ohem"], ohem, case, rel=4e-3)  # a bin is kept or dropped as a whole


def test_formulas_of_distillation() -> None:
    student, teacher, first, second = torch.randn(4, 2, 5, 8, 8, generator=torch.Generator().manual_seed(0))
    s, t = (losses.node_features(features, (4, 4)) for features in (first, second))
    found = computed(distillation, student=student, teacher=teacher, T=2.0, s=s, t=t)
    torch.testing.assert_close(found["pixel_wise"], losses.pixel_wise_divergence(student, teacher, temperature=2.0))
    torch.testing.assert_close(found["pair_wise"], losses.pair_wise_difference(s, t))


def test_formula_of_mask_classification() -> None:
    generator = torch.Generator().manual_seed(0)
    masks, class_logits = torch.zeros(1, 5, 4, 4), torch.randn(1, 5, C + 1, generator=generator)
    target = torch.arange(16).view(4, 4).div(4, rounding_mode="floor").repeat_interleave(4, 0).repeat_interleave(4, 1)
    masks[0, :C] = 9.0 * F.one_hot(target[::4, ::4], C).permute(2, 0, 1) - 4  # query c has the mask of class c
    cells = F.one_hot(target[::4, ::4].flatten(), C).T.float()
    factors = {"class_factor": 2.0, "bce_factor": 5.0, "dice_factor": 3.0, "no_object": 0.1}
    inputs = {"x": masks[0, :C].flatten(1), "t": cells, "class_logits": class_logits[0], "labels": torch.arange(C + 1)}
    found = computed(mask_classification, C=C, **inputs, **factors)
    criterion = losses.CriterionMaskClassification(5, C, **factors)  # type: ignore[arg-type]
    assert float(found["loss"]) == pytest.approx(float(criterion((masks, class_logits), target[None])), rel=1e-5)


def test_formula_of_the_sums(case: dict[str, Any]) -> None:
    criterion = losses.CriterionDice()
    chunks = [(case["logits"][part], case["target"][part]) for part in (slice(0, 1), slice(1, 3))]
    check(computed(additive, criterion=criterion, chunks=chunks)["loss"], criterion, case)
