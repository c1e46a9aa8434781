"""OHEM, Dice, Tversky, focal and Lovász against independent implementations and values computed by hand."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from segapp.losses import CriterionCE, CriterionDice, CriterionFocal, CriterionLovasz, CriterionOHEM, CriterionTversky
from segapp.losses.additive import PlainCriterion
from tests.support.loss_cases import class_weight, draw, relative_error


def mean_of_valid(logits, target):
    """Cross-entropy as a quotient of sums: without a valid pixel, its gradient is NaN too."""
    valid = target != 255
    losses = F.cross_entropy(logits, torch.where(valid, target, 0), reduction="none")
    return (losses * valid).sum() / valid.sum()


@pytest.mark.parametrize("num_valid", [0, 1, 2])
@pytest.mark.parametrize("function", [functools.partial(F.cross_entropy, ignore_index=255), mean_of_valid])
def test_plain_loss_of_few_pixels_matches_torch(function, num_valid):
    logits, target = draw(1)
    target.fill_(255)
    target.view(-1)[:num_valid] = torch.arange(num_valid)
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = PlainCriterion(function)(mine, target)
    loss.backward()
    with pytest.raises(TypeError, match=r"target is torch.float32: give integers, or derive .* from AdditiveCriterion"):
        PlainCriterion(function)(mine, target.float() / 2)
    if num_valid == 0:
        assert loss.item() == mine.grad.abs().max() == 0
        return
    truth = pixel_losses(theirs, target.long()).mean()
    truth.backward()
    assert relative_error(loss.detach(), truth.detach()) < 1e-12
    assert relative_error(mine.grad, theirs.grad) < 1e-12


def upsampled(logits, target):
    return F.interpolate(logits, size=target.shape[-2:], mode="bilinear", align_corners=True)


def pixel_losses(logits, target):
    return F.cross_entropy(upsampled(logits, target), target, ignore_index=255, reduction="none")[target != 255]


def field_ohem(logits, target, threshold, min_kept):
    """OHEM by sorting, as in HRNet and mmsegmentation."""
    losses = pixel_losses(logits, target)
    probability = torch.exp(-losses)
    ordered = probability.sort().values
    limit = max(ordered[min(min_kept, ordered.numel() - 1)].item(), threshold)
    return losses[probability < limit].mean()


@pytest.mark.parametrize("threshold", [0.2, 0.7, 0.95])
def test_ohem_matches_the_sorted_form_where_the_threshold_rules(threshold):
    logits, target = draw()
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, truth = CriterionOHEM(threshold, 10)(mine, target), field_ohem(theirs, target, threshold, 10)
    loss.backward()
    truth.backward()
    assert relative_error(loss.detach(), truth.detach()) < 1e-12
    assert relative_error(mine.grad, theirs.grad) < 1e-12


@pytest.mark.parametrize("min_kept", [100, 700, 1200])
def test_ohem_keeps_the_hardest_up_to_ties(min_kept):
    logits, target = draw()
    totals = CriterionOHEM(1e-4, min_kept).statistics(logits, target)
    loss = CriterionOHEM(1e-4, min_kept)(logits, target)
    ordered = pixel_losses(logits, target).sort(descending=True).values
    kept = next(k for k in range(min_kept, ordered.numel() + 1) if abs(float(ordered[:k].mean() - loss)) < 1e-12)
    assert kept - min_kept < 20
    assert ordered[min_kept - 1] / ordered[kept - 1] < 1.01
    assert int(totals[2].sum()) == ordered.numel()


def test_ohem_by_hand():
    probabilities = torch.tensor([0.1, 0.3, 0.6, 0.8, 0.9], dtype=torch.float64)
    logits = torch.stack([probabilities.log(), (1 - probabilities).log()]).view(1, 2, 1, 5)
    target = torch.zeros(1, 1, 5, dtype=torch.uint8)
    losses = -probabilities.log()
    assert float(CriterionOHEM(0.5, 0)(logits, target)) == pytest.approx(float(losses[:2].mean()))
    assert float(CriterionOHEM(0.5, 3)(logits, target)) == pytest.approx(float(losses[:3].mean()))
    assert float(CriterionOHEM(0.5, 100)(logits, target)) == pytest.approx(float(losses.mean()))
    assert float(CriterionOHEM(0.05, 0)(logits, target)) == 0.0


def test_ohem_of_threshold_one_is_cross_entropy():
    logits, target = draw()
    weight = class_weight()
    loss = CriterionOHEM(1.0, 0, weight=weight)(logits, target)
    assert relative_error(loss, CriterionCE(weight=weight)(logits, target)) < 1e-12


def test_dice_by_hand():
    logits = torch.full((1, 3, 1, 4), 0.0, dtype=torch.float64)
    target = torch.tensor([[[0, 0, 1, 255]]])
    dice_0, dice_1, dice_2 = (2 * 2 / 3 + 1) / (1 + 2 + 1), (2 / 3 + 1) / (1 + 1 + 1), 1 / (1 + 0 + 1)
    assert float(CriterionDice()(logits, target)) == pytest.approx(1 - (dice_0 + dice_1) / 2)
    assert float(CriterionDice(classes="all")(logits, target)) == pytest.approx(1 - (dice_0 + dice_1 + dice_2) / 3)


def test_dice_of_a_perfect_prediction_is_zero():
    _, target = draw(2, ignored=0.0)
    logits = 1000.0 * F.one_hot(target, 4).movedim(-1, 1).double()
    assert float(CriterionDice(smooth=0.0)(logits, target)) == pytest.approx(0.0, abs=1e-12)


def test_dice_without_smoothing_survives_an_absent_class():
    logits = torch.zeros(1, 2, 2, 2, requires_grad=True)
    logits.data[:, 1] = -1000.0
    loss = CriterionDice(smooth=0.0, classes="all")(logits, torch.zeros(1, 4, 4, dtype=torch.uint8))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize(("alpha", "beta", "gamma"), [(0.3, 0.7, 1.0), (0.6, 0.1, 0.75), (1.0, 1.0, 2.0)])
def test_tversky_matches_its_formula(alpha, beta, gamma):
    logits, target = draw()
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    valid = target != 255
    losses = []
    for c in range(4):
        p, own = upsampled(theirs, target).softmax(1)[:, c][valid], (target == c)[valid].double()
        tp, fp, fn = (p * own).sum(), (p * (1 - own)).sum(), ((1 - p) * own).sum()
        losses.append((1 - (tp + 0.5) / (tp + alpha * fp + beta * fn + 0.5)) ** gamma)
    truth = torch.stack(losses).mean()
    truth.backward()
    loss = CriterionTversky(alpha=alpha, beta=beta, gamma=gamma, smooth=0.5)(mine, target)
    loss.backward()
    assert relative_error(loss.detach(), truth.detach()) < 1e-12
    assert relative_error(mine.grad, theirs.grad) < 1e-12


def test_tversky_of_equal_halves_is_dice():
    logits, target = draw()
    for multilabel in (False, True):
        dice = CriterionDice(smooth=2.0, multilabel=multilabel)(logits, target)
        tversky = CriterionTversky(alpha=0.5, beta=0.5, multilabel=multilabel)(logits, target)
        assert relative_error(tversky, dice) < 1e-12


def test_focal_tversky_of_a_perfect_prediction_is_finite():
    logits = torch.zeros(1, 2, 2, 2, requires_grad=True)
    logits.data[:, 0] = 1000.0
    loss = CriterionTversky(gamma=0.75)(logits, torch.zeros(1, 4, 4, dtype=torch.uint8))
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 5.0])
def test_focal_matches_its_formula(gamma):
    logits, target = draw()
    losses = pixel_losses(logits, target)
    truth = ((1 - torch.exp(-losses)) ** gamma * losses).mean()
    assert relative_error(CriterionFocal(gamma=gamma)(logits, target), truth) < 1e-12


def test_focal_of_gamma_zero_is_weighted_cross_entropy():
    logits, target = draw()
    weight = class_weight()
    focal, plain = CriterionFocal(gamma=0.0, weight=weight), CriterionCE(weight=weight)
    assert relative_error(focal(logits, target), plain(logits, target)) < 1e-12


def test_focal_has_a_finite_gradient_where_the_model_is_sure():
    logits = torch.zeros(1, 2, 2, 2, requires_grad=True)
    logits.data[:, 0] = 200.0
    CriterionFocal(gamma=0.5)(logits, torch.zeros(1, 4, 4, dtype=torch.uint8)).backward()
    assert torch.isfinite(logits.grad).all()


def jaccard_extension(error, own):
    """The Lovász extension by its definition: a sum over the sorted errors of increments of the Jaccard loss."""
    order = error.argsort(descending=True, stable=True)
    total, before = 0.0, 0.0
    for k in range(1, len(order) + 1):
        wrong = torch.zeros_like(own)
        wrong[order[:k]] = True
        predicted = own ^ wrong
        union = (own | predicted).sum()
        loss = 1 - (own & predicted).sum() / union if union else torch.tensor(0.0)
        total, before = total + error[order[k - 1]] * (loss.double() - before), loss.double()
    return total


@pytest.mark.parametrize("classes", ["present", "all"])
def test_lovasz_matches_the_definition(classes):
    logits, target = draw(2, low=(3, 3), high=(7, 8))
    target[target == 1] = 2
    probabilities = upsampled(logits, target).softmax(1)
    images = []
    for image in range(2):
        valid = target[image] != 255
        ids, p = target[image][valid], probabilities[image][:, valid]
        chosen = [c for c in range(4) if classes == "all" or (ids == c).any()]
        parts = [jaccard_extension(((ids == c).double() - p[c]).abs(), ids == c) for c in chosen]
        images.append(sum(parts) / len(parts))
    assert relative_error(CriterionLovasz(classes)(logits, target), torch.stack(images).mean()) < 1e-6


def test_lovasz_skips_images_without_valid_pixels():
    logits, target = draw(3, ignored=[0.2, 1.0, 0.2])
    kept = [0, 2]
    assert relative_error(CriterionLovasz()(logits, target), CriterionLovasz()(logits[kept], target[kept])) < 1e-14


@pytest.mark.parametrize("kind", [CriterionDice, CriterionFocal, CriterionTversky])
def test_ignore_index_in_the_first_place_is_refused(kind):
    """It is the first argument of `CriterionCE` and of the published losses; here it would be a factor."""
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        kind(255)


def test_options_out_of_range_are_named():
    with pytest.raises(ValueError, match=r"threshold=0\.0"):
        CriterionOHEM(0.0)
    with pytest.raises(ValueError, match="min_kept=-1"):
        CriterionOHEM(0.5, -1)
    with pytest.raises(ValueError, match="smooth=-1"):
        CriterionDice(smooth=-1)
    with pytest.raises(ValueError, match="gamma=nan"):
        CriterionFocal(gamma=math.nan)
    with pytest.raises(ValueError, match="beta=-1"):
        CriterionTversky(beta=-1)
    with pytest.raises(ValueError, match="gamma=0"):
        CriterionTversky(gamma=0)
    with pytest.raises(ValueError, match="classes='some'"):
        CriterionLovasz("some")
