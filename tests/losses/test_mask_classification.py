"""Mask classification against a plain float64 form with masks at full resolution, all permutations, and by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from segapp.losses import CriterionMaskClassification, surrogate
from segapp.losses.mask_classification import match_queries
from tests.support.loss_cases import relative_error

C, STRIDE = 3, 4


def drawn(num_images=4, num_queries=5, num_predictions=2, seed=0, size=(3, 4)):
    """Outputs of a network in float64, and a target with ignored pixels; the last image has no valid pixel."""
    generator = torch.Generator().manual_seed(seed)
    outputs = []
    for _ in range(num_predictions):
        outputs.append(torch.randn(num_images, num_queries, *size, generator=generator, dtype=torch.float64) * 3)
        outputs.append(torch.randn(num_images, num_queries, C + 1, generator=generator, dtype=torch.float64))
    target = torch.randint(0, C + 1, (num_images, size[0] * STRIDE, size[1] * STRIDE), generator=generator)
    target[target == C] = 255
    target[0][target[0] == 1] = 255  # one class is absent in one image
    target[-1] = 255
    return [output.requires_grad_() for output in outputs], target.to(torch.uint8)


def plain_pair(mask, own, valid):
    """Binary cross-entropy and Dice loss of one upsampled mask (H, W) with one class, in units of the mask's cells."""
    bce = F.binary_cross_entropy_with_logits(mask[valid], own[valid].double())
    probability, cell = mask.sigmoid()[valid], STRIDE * STRIDE
    own = own[valid].double()
    dice = 1 - (2 * (probability * own).sum() / cell + 1) / (probability.sum() / cell + own.sum() / cell + 1)
    return bce, dice


def least_cost(num_queries, present, pairs, probability, factors):
    """The queries of the present classes, in their order, with the least cost of all permutations."""

    def cost(queries):
        matches = list(zip(queries, present, strict=True))
        masks = sum(factors["bce"] * pairs[match][0] + factors["dice"] * pairs[match][1] for match in matches)
        return float(masks.detach()) - factors["class"] * sum(float(probability[match]) for match in matches)

    return min(itertools.permutations(range(num_queries), len(present)), key=cost)


def plain_loss(outputs, target, factors, no_object, aux_weight, num_images=None):
    """The loss image by image, mask by mask, with every permutation tried; normalised over the whole step."""
    sums, num_masks, weights = torch.zeros(3, dtype=torch.float64), 0, 0.0
    for image in range(num_images or len(target)):
        valid = target[image] != 255
        present = target[image][valid].unique().long().tolist()
        if not present:
            continue
        for number in range(len(outputs) // 2):
            masks, classes = outputs[2 * number][image], outputs[2 * number + 1][image]
            upsampled = F.interpolate(masks[None], scale_factor=STRIDE, mode="nearest")[0]
            pairs = {
                (q, c): plain_pair(upsampled[q], target[image] == c, valid) for q in range(len(masks)) for c in present
            }
            best = least_cost(len(masks), present, pairs, classes.detach().softmax(-1), factors)
            labels = torch.full((len(masks),), C)
            labels[list(best)] = torch.tensor(present)
            weight = torch.tensor([1.0 if label < C else no_object for label in labels], dtype=torch.float64)
            terms = torch.stack([
                (F.cross_entropy(classes, labels, reduction="none") * weight).sum(),
                sum(pairs[q, c][0] for q, c in zip(best, present, strict=True)),
                sum(pairs[q, c][1] for q, c in zip(best, present, strict=True)),
            ])  # fmt: skip
            sums = sums + (1.0 if number == 0 else aux_weight) * terms
        num_masks += len(present)
        weights += float(weight.sum())
    return factors["class"] * sums[0] / weights + (factors["bce"] * sums[1] + factors["dice"] * sums[2]) / num_masks


@pytest.mark.parametrize("seed", range(3))
def test_loss_matches_plain_form_with_all_permutations(seed):
    factors = {"class": 1.5, "bce": 4.0, "dice": 3.0}
    criterion = CriterionMaskClassification(
        5, C, class_factor=1.5, bce_factor=4.0, dice_factor=3.0, no_object=0.2, aux_weight=0.7
    )
    outputs, target = drawn(seed=seed)
    loss, truth = criterion(outputs, target), plain_loss(outputs, target, factors, 0.2, 0.7)
    assert relative_error(loss.detach(), truth.detach()) < 1e-12
    mine, theirs = torch.autograd.grad(loss, outputs), torch.autograd.grad(truth, outputs)
    for own, other in zip(mine, theirs, strict=True):
        assert relative_error(own, other) < 1e-10


@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (1, 1, 1, 1), (2, 2)])
def test_any_split_has_the_loss_and_gradient_of_the_whole(sizes):
    criterion = CriterionMaskClassification(5, C, aux_weight=0.5)
    outputs, target = drawn()
    whole = torch.autograd.grad(criterion(outputs, target), outputs)
    parts = list(zip(*(output.split(sizes) for output in outputs), strict=True))
    statistics = [criterion.statistics(part, own) for part, own in zip(parts, target.split(sizes), strict=True)]
    totals = tuple(torch.stack(entry).sum(0) for entry in zip(*statistics, strict=True))
    assert len(totals) == criterion.num_statistics
    assert relative_error(criterion.finalize(totals).detach(), criterion(outputs, target).detach()) < 1e-12
    known = [criterion.target_statistics(own) for own in target.split(sizes)]
    assert [float(sum(entry)) for entry in zip(*known, strict=True)][3:] == [float(each) for each in totals[3:]]
    loss = sum(surrogate(criterion, each, totals) for each in statistics)
    for own, other in zip(torch.autograd.grad(loss, outputs), whole, strict=True):
        assert relative_error(own, other) < 1e-12


def test_loss_by_hand():
    """One image of 1x2 cells; query 0 has the mask of class 1 on the right, query 1 is left over."""
    masks = torch.tensor([[[[-2.0, 2.0]], [[1.0, 1.0]]]], dtype=torch.float64)
    classes = torch.log(torch.tensor([[[0.1, 0.6, 0.1, 0.2], [0.25, 0.25, 0.25, 0.25]]], dtype=torch.float64))
    target = torch.tensor([[[255, 255, 1, 1], [255, 255, 1, 1]]], dtype=torch.uint8)
    sure = 1 / (1 + math.exp(-2))
    dice = 1 - (2 * sure + 1) / (sure + 1 + 1)  # the ignored cell counts neither as mask nor as area
    cross_entropy = (-math.log(0.6) - 0.1 * math.log(0.25)) / (1 + 0.1)
    criterion = CriterionMaskClassification(2, C)
    expected = 2 * cross_entropy + 5 * -math.log(sure) + 5 * dice
    assert float(criterion([masks, classes], target)) == pytest.approx(expected, rel=1e-12)
    terms = criterion.terms(criterion.statistics([masks, classes], target))
    assert [float(terms[name]) for name in ("class", "mask_bce", "mask_dice")] == pytest.approx(
        [cross_entropy, -math.log(sure), dice]
    )


def test_no_valid_pixel_gives_loss_and_gradient_zero():
    outputs, target = drawn()
    loss = CriterionMaskClassification(5, C)(outputs, torch.full_like(target, 255))
    assert float(loss.detach()) == 0.0
    assert all(float(g.abs().max()) == 0.0 for g in torch.autograd.grad(loss, outputs))


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (2, 4)])
def test_matching_has_the_least_cost_of_all_permutations(shape):
    num_queries, num_classes = shape
    costs = torch.randn(3, 2, num_queries, num_classes, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    present = torch.ones(3, num_classes, dtype=torch.bool)
    present[1, 0] = False
    found = match_queries(costs, present)
    for image, number in itertools.product(range(3), range(2)):
        table = costs[image, number][:, present[image]]
        rows = table if table.shape[0] <= table.shape[1] else table.T
        least = min(
            sum(float(rows[i, j]) for i, j in enumerate(order))
            for order in itertools.permutations(range(rows.shape[1]), len(rows))
        )
        matches = [(int(q), c) for c, q in enumerate(found[image, number]) if q >= 0]
        assert all(present[image, c] for _, c in matches)
        assert len({q for q, _ in matches}) == len(matches) == len(rows)
        assert sum(float(costs[image, number, q, c]) for q, c in matches) == pytest.approx(least)


def test_evaluations_report_cross_entropy_of_semantic_logits():
    logits = torch.randn(2, C, 3, 4)
    target = drawn(2)[1]
    criterion = CriterionMaskClassification(5, C, ignore_index=7, align_corners=False)
    upsampled = F.interpolate(logits, target.shape[1:], mode="bilinear", align_corners=False)
    expected = F.cross_entropy(upsampled, target.long(), ignore_index=255)
    torch.testing.assert_close(criterion.task(logits, torch.where(target == 255, 7, target)), expected)
