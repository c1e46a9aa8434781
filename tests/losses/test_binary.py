"""Losses of independent classes (sigmoid) against torch's operators at full resolution."""

import pytest
import torch
import torch.nn.functional as F

from segapp.losses import CriterionBCE, CriterionDice, CriterionFocal
from tests.support.loss_cases import class_weight, draw, relative_error

CLASSES = 4


def draw_sets(seed=0):
    """Return logits, a target of sets of classes with 255 as ignored pixels, and the sets as (N, C, H, W)."""
    logits, target = draw(4, CLASSES, (5, 6), (17, 23), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    sets = torch.randint(0, 1 << CLASSES, target.shape, generator=generator)
    target = torch.where(target == 255, 255, sets)
    return logits, target, ((target.unsqueeze(1) >> torch.arange(CLASSES).view(1, -1, 1, 1)) & 1).double()


def upsampled(logits, target):
    return F.interpolate(logits, size=target.shape[-2:], mode="bilinear", align_corners=True)


def both(criterion, truth, logits, target):
    """Check a criterion's value and gradient against a function of upsampled logits."""
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, expected = criterion(mine, target), truth(upsampled(theirs, target))
    loss.backward()
    expected.backward()
    assert relative_error(loss.detach(), expected.detach()) < 1e-12
    assert relative_error(mine.grad, theirs.grad) < 1e-12


def over_pixels(losses, target, weight):
    """Return the mean over valid pixels and, by weight, over classes of losses (N, C, H, W)."""
    valid = (target != 255).unsqueeze(1).expand_as(losses)
    weights = weight.view(1, -1, 1, 1).expand_as(losses)[valid]
    return (losses[valid] * weights).sum() / weights.sum()


@pytest.mark.parametrize("full_bytes", [0, 1 << 60])
@pytest.mark.parametrize(("pos_weight", "smoothing"), [(1.0, 0.0), (3.0, 0.2)])
@pytest.mark.parametrize("weight", [torch.ones(CLASSES, dtype=torch.float64), class_weight()])
def test_bce_of_sets_matches_torch(weight, pos_weight, smoothing, full_bytes, monkeypatch):
    monkeypatch.setattr("segapp.losses.fused.pixel_sums.FULL_BYTES", full_bytes)
    logits, target, sets = draw_sets()

    def truth(values):
        factor = torch.tensor(pos_weight, dtype=torch.float64)
        smooth = sets * (1 - smoothing) + smoothing / 2
        losses = F.binary_cross_entropy_with_logits(values, smooth, reduction="none", pos_weight=factor)
        return over_pixels(losses, target, weight)

    criterion = CriterionBCE(weight, pos_weight=pos_weight, label_smoothing=smoothing, multilabel=True)
    both(criterion, truth, logits, target)


def test_bce_of_class_ids_is_that_of_one_hot_targets():
    logits, target = draw()
    sets = torch.where(target == 255, 255, 1 << target.clamp(max=CLASSES))
    one, several = CriterionBCE()(logits, target), CriterionBCE(multilabel=True)(logits, sets)
    assert relative_error(one, several) < 1e-14


def test_bce_of_one_logit_is_cross_entropy_against_a_zero():
    logits, target = draw(3, 1)
    target = torch.where(target == 255, 255, torch.arange(target.numel()).view_as(target) % 3 % 2)
    pair = upsampled(torch.cat([torch.zeros_like(logits), logits], 1), target)
    expected = F.cross_entropy(pair, target, ignore_index=255)
    assert relative_error(CriterionBCE(multilabel=True)(logits, target), expected) < 1e-12


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_of_sets_matches_its_formula(gamma):
    logits, target, sets = draw_sets()

    def truth(values):
        p = values.sigmoid()
        p_t = torch.where(sets > 0, p, 1 - p)
        return over_pixels(-((1 - p_t) ** gamma) * p_t.log(), target, class_weight())

    both(CriterionFocal(gamma=gamma, weight=class_weight(), multilabel=True), truth, logits, target)


def test_dice_of_sets_matches_its_formula():
    logits, target, sets = draw_sets()
    valid = (target != 255).unsqueeze(1)

    def truth(values):
        p, own = values.sigmoid() * valid, sets * valid
        both, total = (p * own).sum((0, 2, 3)), (p + own).sum((0, 2, 3))
        return (1 - (2 * both + 1) / (total + 1)).mean()

    both(CriterionDice(multilabel=True), truth, logits, target)


def test_targets_and_options_that_do_not_fit_are_named():
    logits, target = draw()
    with pytest.raises(ValueError, match="holds the ids 16"):
        CriterionBCE(multilabel=True)(logits, torch.full_like(target, 16))
    with pytest.raises(ValueError, match=r"pos_weight=0"):
        CriterionBCE(pos_weight=0)
    for smoothing in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=f"label_smoothing={smoothing}: give a number from 0 to 1"):
            CriterionBCE(label_smoothing=smoothing)
    with pytest.raises(ValueError, match=r"weight=\[0\.0, 0\.0\]"):
        CriterionBCE([0.0, 0.0])
