"""Every criterion on bands against itself at full resolution."""

import pytest
import torch
import torch.nn.functional as F

from segapp.losses import CriterionLovasz, overlap, upsample_argmax, upsample_confusion
from segapp.losses.fused import bands
from segapp.losses.fused import pixel_sums as sums
from segapp.losses.overlap import lovasz_of_image
from tests.support.loss_cases import criteria, draw, relative_error

NAMES = list(criteria())


@pytest.fixture(params=[2, 40])
def _on_small_bands(request, monkeypatch):
    """Cut batches of any size, for a number of threads."""
    monkeypatch.setattr(sums, "FULL_BYTES", 0)
    monkeypatch.setattr(bands, "CPU_BAND_BYTES", 4000)
    for name in ("MIN_PART_BYTES", "MIN_SHARED_BYTES", "MIN_CELL_BYTES"):
        monkeypatch.setattr(bands, name, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def gradients(criterion, logits, target):
    x = logits.clone().requires_grad_()
    loss = criterion(x, target)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return loss.detach(), first.detach(), second


def plain(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(sums, "FULL_BYTES", 1 << 60)
    monkeypatch.setattr(overlap, "is_eager", lambda _: False)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("_on_small_bands")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ignored", [0.0, 0.4])
def test_loss_and_both_derivatives_match_the_full_resolution(name, ignored, monkeypatch):
    criterion = criteria()[name]
    logits, target = draw(3, low=(3, 6), high=(33, 41), ignored=ignored)  # fewer rows than classes
    ours = gradients(criterion, logits, target)
    plain(monkeypatch)
    for mine, truth in zip(ours, gradients(criterion, logits, target), strict=True):
        assert relative_error(mine, truth) < 1e-11


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("_on_small_bands")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_accumulated_in_float32(name, dtype, monkeypatch):
    criterion = criteria()[name]
    logits, target = draw(3, low=(5, 6), high=(33, 41), dtype=dtype)
    x = logits.clone().requires_grad_()
    loss = criterion(x, target)
    loss.backward()
    plain(monkeypatch)
    y = logits.double().requires_grad_()
    truth = criterion(y, target)
    truth.backward()
    assert loss.dtype == torch.float32
    assert relative_error(loss.detach(), truth.detach()) < 1e-5
    assert relative_error(x.grad, y.grad) < (8e-3 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize(("more_bytes", "is_full"), [(0, False), (1, True)])
def test_full_resolution_is_taken_below_a_limit_of_its_bytes(more_bytes, is_full, monkeypatch):
    calls, original = [], sums._at_full_resolution
    monkeypatch.setattr(sums, "_at_full_resolution", lambda *args: calls.append(args) or original(*args))
    monkeypatch.setattr(sums, "FULL_BYTES", 2 * 3 * 17 * 23 * 8 + more_bytes)
    logits, target = draw(2, 3, (5, 6), (17, 23))
    criteria()["focal"](logits, target)
    assert bool(calls) == is_full


def test_lovasz_passes_gradcheck_and_equals_sum_over_images():
    logits, target = draw(2, 3, (3, 3), (7, 8))
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: CriterionLovasz()(x, target), (logits,))
    plain_sum = sum(lovasz_of_image(logits[i : i + 1], target[i], True, 255, "present") for i in range(2))
    assert relative_error(CriterionLovasz()(logits, target).detach(), plain_sum.detach() / 2) < 1e-12


@pytest.mark.usefixtures("_on_small_bands")
def test_argmax_and_confusion_with_any_threads_match_torch():
    logits, target = draw(3, low=(5, 6), high=(33, 41))
    predicted = F.interpolate(logits, (33, 41), mode="bilinear", align_corners=True).argmax(1)
    valid = target != 255
    truth = torch.bincount(4 * target[valid] + predicted[valid], minlength=16).view(4, 4)
    assert torch.equal(upsample_argmax(logits, (33, 41)).long(), predicted)
    assert torch.equal(upsample_confusion(logits, target).confusion.long(), truth)
