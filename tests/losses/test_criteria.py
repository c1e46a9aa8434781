"""Edge cases of the criteria by hand and against torch; test_against_smp.py has their definitions."""

import functools

import pytest
import torch
import torch.nn.functional as F

from segapp import losses
from segapp.losses import (
    AdditiveCriterion,
    CriterionBCE,
    CriterionCE,
    CriterionDice,
    CriterionDistilled,
    CriterionFocal,
    CriterionLovasz,
    CriterionMaskClassification,
    CriterionOHEM,
    CriterionSum,
    CriterionTversky,
    PlainCriterion,
    upsample_cross_entropy,
)
from tests.support.loss_cases import class_weight, criteria, draw, loss_and_gradient, relative_error


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
    is_aligned = num_valid == 1
    loss, gradient = loss_and_gradient(PlainCriterion(function, align_corners=is_aligned), logits, target)
    with pytest.raises(TypeError, match=r"target is torch.float32: give integers, or derive .* from AdditiveCriterion"):
        PlainCriterion(function)(logits, target.float() / 2)
    if num_valid == 0:
        assert loss.item() == gradient.abs().max() == 0
        return

    def torchs(logits, target):
        values = F.interpolate(logits, target.shape[-2:], mode="bilinear", align_corners=is_aligned)
        return F.cross_entropy(values, target, ignore_index=255)

    truth, slope = loss_and_gradient(torchs, logits, target)
    assert relative_error(loss, truth) < 1e-12
    assert relative_error(gradient, slope) < 1e-12


class OwnLoss(torch.nn.PReLU):
    """Cross-entropy with a learned slope for each class."""

    def forward(self, logits, target):
        return F.cross_entropy(super().forward(logits), target, ignore_index=255)


@pytest.mark.parametrize("is_learned", [True, False])
def test_plain_criterion_leaves_its_module_as_it_was(is_learned):
    logits, target = draw(low=(17, 23))
    mine, theirs = (OwnLoss(4, dtype=torch.float64).requires_grad_(is_learned) for _ in range(2))
    for loss in (PlainCriterion(mine), theirs):
        loss(logits.requires_grad_(), target).backward()
    assert (mine.weight.requires_grad, mine.weight.grad is None) == (is_learned, not is_learned)
    assert not is_learned or relative_error(mine.weight.grad, theirs.weight.grad) < 1e-12


def upsampled(logits, target):
    return F.interpolate(logits, size=target.shape[-2:], mode="bilinear", align_corners=True)


def pixel_losses(logits, target):
    return F.cross_entropy(upsampled(logits, target), target, ignore_index=255, reduction="none")[target != 255]


def test_batch_without_images_has_loss_zero():
    logits = torch.zeros(0, 3, 4, 4, requires_grad=True)
    loss = CriterionCE()(logits, torch.zeros(0, 8, 8, dtype=torch.uint8))
    loss.backward()
    assert loss.item() == 0.0


@pytest.mark.parametrize("ignore_index", [-100, -1, 3, 300])
def test_any_ignore_index_is_honoured(ignore_index):
    logits, target = draw(ignored=0.0)
    target[:, :5] = ignore_index
    truth = F.cross_entropy(upsampled(logits, target), target, ignore_index=ignore_index)
    assert relative_error(CriterionCE(ignore_index)(logits, target), truth) < 1e-12


def test_ignore_index_outside_the_dtype_ignores_nothing():
    logits = torch.zeros(1, 200, 2, 2, dtype=torch.float64)
    target = torch.full((1, 4, 4), 156, dtype=torch.uint8)
    _, weight_sum = upsample_cross_entropy(logits, target, ignore_index=-100)
    assert int(weight_sum) == 16


def test_weight_is_a_copy_of_the_caller_s():
    logits, target = draw()
    weight = class_weight()
    criterion = CriterionCE(weight=weight)
    expected = F.cross_entropy(upsampled(logits, target), target, weight, ignore_index=255)
    weight.fill_(1.0)
    assert relative_error(criterion(logits, target), expected) < 1e-12
    criterion.weight.fill_(2.0)
    assert torch.equal(weight, torch.ones_like(weight))
    assert dict(criterion.named_buffers()).keys() == {"weight"}


@pytest.mark.parametrize("min_kept", [100, 700, 1200])
def test_ohem_keeps_the_hardest_up_to_ties(min_kept):
    logits, target = draw()
    totals = CriterionOHEM(threshold=1e-4, min_kept=min_kept).statistics(logits, target)
    loss = CriterionOHEM(threshold=1e-4, min_kept=min_kept)(logits, target)
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
    assert float(CriterionOHEM(threshold=0.5, min_kept=0)(logits, target)) == pytest.approx(float(losses[:2].mean()))
    assert float(CriterionOHEM(threshold=0.5, min_kept=3)(logits, target)) == pytest.approx(float(losses[:3].mean()))
    assert float(CriterionOHEM(threshold=0.5, min_kept=100)(logits, target)) == pytest.approx(float(losses.mean()))
    assert float(CriterionOHEM(threshold=0.05, min_kept=0)(logits, target)) == 0.0


def test_dice_by_hand():
    logits = torch.full((1, 3, 1, 4), 0.0, dtype=torch.float64)
    target = torch.tensor([[[0, 0, 1, 255]]])
    dice_0, dice_1, dice_2 = (2 * 2 / 3 + 1) / (1 + 2 + 1), (2 / 3 + 1) / (1 + 1 + 1), 1 / (1 + 0 + 1)
    assert float(CriterionDice()(logits, target)) == pytest.approx(1 - (dice_0 + dice_1) / 2)
    assert float(CriterionDice(classes="all")(logits, target)) == pytest.approx(1 - (dice_0 + dice_1 + dice_2) / 3)


@pytest.mark.parametrize(
    "criterion", [CriterionDice(smooth=0.0, classes="all"), CriterionTversky(gamma=0.75), CriterionFocal(gamma=0.5)]
)
def test_gradient_of_a_sure_and_right_model_is_finite(criterion):
    logits = torch.zeros(1, 2, 2, 2, requires_grad=True)
    logits.data[:, 1] = -1000.0
    loss = criterion(logits, torch.zeros(1, 4, 4, dtype=torch.uint8))
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    assert torch.isfinite(logits.grad).all()


def another(name, ignore_index):
    """Return a criterion with other values of the options that all criteria have."""
    criterion = criteria()[name]
    for module in criterion.modules():
        if isinstance(module, AdditiveCriterion) and not isinstance(module, CriterionSum):
            module.ignore_index, module.aux_weight = ignore_index, 0.7
    return criterion


@pytest.mark.parametrize("name", criteria())
def test_repr_of_a_criterion_builds_it_again(name):
    """The weights have four digits. The names and values of the options are compared by the loss."""
    criterion = another(name, 1)
    logits, target = draw(3, ignored=0.0)
    target[target == 2] = 3  # an absent class
    again = eval(repr(criterion), vars(losses))
    loss = criterion([logits, -logits], target)
    assert relative_error(again([logits, -logits], target), loss) < 1e-4
    assert repr(again) == repr(criterion)
    assert torch.equal(another(name, 255)([logits, -logits], torch.where(target == 1, 255, target)), loss)


def test_repr_is_short_whatever_a_criterion_holds():
    options, module = {"ignore_index": 7, "align_corners": False, "aux_weight": 0.25}, torch.nn.NLLLoss()
    shown = ", ".join(f"{key}={value}" for key, value in options.items())
    task = CriterionSum([
        (0.5, CriterionCE(weight=torch.ones(19), implementation="sums", **options)),
        (2.0, PlainCriterion(F.cross_entropy, **options)),
    ])  # fmt: skip
    assert repr(CriterionDistilled(task, {"pixel_wise": 10.0, "pair_wise": 0.5})).splitlines() == [
        "CriterionDistilled(",
        "  factors={'pixel_wise': 10.0, 'pair_wise': 0.5}",
        "  (_task): CriterionSum([",
        "    (0.5, CriterionCE(ignore_index=7, weight=<shape (19,)>, align_corners=False, label_smoothing=0.0, "
        "aux_weight=0.25, implementation='sums')),",
        f"    (2.0, PlainCriterion(function=cross_entropy, {shown})),",
        "  ])",
        ")",
    ]
    assert repr(PlainCriterion(module, **options)) == f"PlainCriterion(\n  {shown}\n  (function): NLLLoss()\n)"
    factors = {"class_factor": 1.0, "bce_factor": 2.0, "dice_factor": 3.0, "no_object": 0.5}
    numbers = "num_queries=6, num_classes=4, class_factor=1.0, bce_factor=2.0, dice_factor=3.0, no_object=0.5"
    assert repr(CriterionMaskClassification(6, 4, **factors, **options)) == (
        f"CriterionMaskClassification({numbers}, {shown})"
    )


def test_bce_of_one_logit_is_cross_entropy_against_a_zero():
    logits, target = draw(3, 1)
    target = torch.where(target == 255, 255, torch.arange(target.numel()).view_as(target) % 3 % 2)
    pair = upsampled(torch.cat([torch.zeros_like(logits), logits], 1), target)
    expected = F.cross_entropy(pair, target, ignore_index=255)
    assert relative_error(CriterionBCE(multilabel=True)(logits, target), expected) < 1e-12


@pytest.mark.parametrize(
    ("kind", "defaults"),
    [
        (CriterionCE, {"label_smoothing": 0.0}),
        (CriterionOHEM, {"threshold": 0.7, "min_kept": 100_000}),
        (CriterionDice, {"smooth": 1.0, "classes": "present"}),
        (CriterionTversky, {"alpha": 0.3, "beta": 0.7, "gamma": 1.0, "smooth": 1.0}),
        (CriterionFocal, {"gamma": 2.0}),
        (CriterionLovasz, {"classes": "present"}),
        (CriterionBCE, {"pos_weight": 1.0, "label_smoothing": 0.0}),
    ],
)
def test_defaults_are_those_of_the_pages(kind, defaults):
    logits, target = draw(2)
    target[target == 1] = 2  # an absent class
    common = {"ignore_index": 255, "align_corners": True, "aux_weight": 0.4}
    assert torch.equal(kind()([logits, -logits], target), kind(**defaults, **common)([logits, -logits], target))
