"""upsample_cross_entropy and CriterionCE against torch's operators in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from segapp.losses import CriterionCE, upsample_cross_entropy
from tests.support.loss_cases import class_weight, draw, loss_and_gradient, relative_error


def torch_mean(logits, target, weight, smoothing, align_corners, ignore_index=255):
    values = F.interpolate(logits.double(), size=target.shape[-2:], mode="bilinear", align_corners=align_corners)
    return F.cross_entropy(
        values, target.long(), weight=weight, ignore_index=ignore_index, label_smoothing=smoothing, reduction="mean"
    )


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("weight", [class_weight(), None], ids=["weighted", "plain"])
def test_mean_and_gradient_match_torch(align_corners, weight):
    logits, target = draw(ignored=0.4)
    criterion = CriterionCE(weight=weight, align_corners=align_corners, label_smoothing=0.1)
    truth = loss_and_gradient(lambda x, ids: torch_mean(x, ids, weight, 0.1, align_corners), logits, target)
    for mine, theirs in zip(loss_and_gradient(criterion, logits, target), truth, strict=True):
        assert relative_error(mine, theirs) < 1e-12


def test_loss_of_two_pixels_by_hand():
    logits = torch.tensor([[[[0.0, math.log(3)]], [[0.0, 0.0]]]], dtype=torch.float64)
    target = torch.tensor([[[0, 1]]])
    loss_sum, weight_sum = upsample_cross_entropy(logits, target)
    assert float(loss_sum) == pytest.approx(math.log(2) + math.log(4))
    assert float(weight_sum) == 2


def test_batch_without_images_has_loss_zero():
    logits = torch.zeros(0, 3, 4, 4, requires_grad=True)
    loss = CriterionCE()(logits, torch.zeros(0, 8, 8, dtype=torch.uint8))
    loss.backward()
    assert loss.item() == 0.0


@pytest.mark.parametrize("ignore_index", [-100, -1, 3, 300])
def test_any_ignore_index_is_honoured(ignore_index):
    logits, target = draw(ignored=0.0)
    target[:, :5] = ignore_index
    truth = torch_mean(logits, target, None, 0.0, True, ignore_index)
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
    expected = torch_mean(logits, target, class_weight(), 0.0, True)
    weight.fill_(1.0)
    assert relative_error(criterion(logits, target), expected) < 1e-12
    criterion.weight.fill_(2.0)
    assert torch.equal(weight, torch.ones_like(weight))
    assert dict(criterion.named_buffers()).keys() == {"weight"}
