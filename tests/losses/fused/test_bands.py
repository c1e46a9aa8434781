"""Every criterion on bands against itself at full resolution."""

import pytest
import torch
import torch.nn.functional as F

from segapp.losses import (
    CriterionFocal,
    CriterionLovasz,
    CriterionTversky,
    overlap,
    upsample_argmax,
    upsample_confusion,
    upsample_probabilities,
)
from segapp.losses.confusion import upsample_label_counts, upsample_sets
from segapp.losses.fused import pixel_sums as sums
from segapp.metrics import LabelCounts
from tests.support.loss_cases import criteria, cut_into_bands, draw, loss_and_gradient, relative_error

NAMES = list(criteria())


@pytest.fixture(params=[2, 40])
def _on_small_bands(request, monkeypatch, set_threads):
    cut_into_bands(monkeypatch)
    set_threads(request.param)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("_on_small_bands")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_accumulated_in_float32(name, dtype, set_full_bytes, monkeypatch):
    criterion = criteria()[name]
    logits, target = draw(3, low=(5, 6), high=(33, 41), dtype=dtype)
    loss, gradient = loss_and_gradient(criterion, logits, target)
    torch.set_num_threads(1)
    set_full_bytes(1 << 60)
    monkeypatch.setattr(overlap, "is_eager", lambda _: False)
    truth, slope = loss_and_gradient(criterion, logits.double(), target)
    assert loss.dtype == torch.float32
    assert relative_error(loss, truth) < 1e-5
    assert relative_error(gradient, slope) < (8e-3 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize(("more_bytes", "is_full"), [(0, False), (1, True)])
def test_full_resolution_is_taken_below_a_limit_of_its_bytes(more_bytes, is_full, set_full_bytes, monkeypatch):
    calls, original = [], sums._at_full_resolution
    monkeypatch.setattr(sums, "_at_full_resolution", lambda *args: calls.append(args) or original(*args))
    set_full_bytes(2 * 3 * 17 * 23 * 8 + more_bytes)
    logits, target = draw(2, 3, (5, 6), (17, 23))
    criteria()["focal"](logits, target)
    assert bool(calls) == is_full


@pytest.mark.usefixtures("_on_small_bands")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("align_corners", [True, False])
def test_predictions_with_any_threads_match_torch(align_corners, mode):
    """A class is masked in an image, another one in half of another, and a third one in a pixel."""
    logits, target = draw(3, low=(5, 6), high=(33, 41))
    logits[0, 3] = logits[1, 0, 2:] = logits[2, 1, 3, 4] = -torch.inf
    full = F.interpolate(logits.clamp_min(-1e200), (33, 41), mode="bilinear", align_corners=align_corners)
    full[full < -1e100] = -torch.inf
    valid, how = target != 255, {"align_corners": align_corners}
    sets, target_sets = (((full.sigmoid() > 0.3) << torch.arange(4).view(-1, 1, 1)).sum(1), target.clamp(max=16) - 1)
    counts = LabelCounts(4)
    counts.update(sets, target_sets)
    with mode():
        assert torch.equal(upsample_argmax(logits, (33, 41), **how).long(), full.argmax(1))
        assert torch.equal(upsample_sets(logits, (33, 41), 0.3, **how), sets.int())
        assert torch.equal(upsample_label_counts(logits, target_sets, 0.3, **how), counts.matrix)
        torch.testing.assert_close(upsample_probabilities(logits, (33, 41), **how), full.softmax(1))
        scores = upsample_confusion(logits, target, **how)
    pairs = 4 * target[valid] + full.argmax(1)[valid]
    assert torch.equal(scores.confusion, torch.bincount(pairs, minlength=16).view(4, 4))
    torch.testing.assert_close(scores.loss_sum, F.cross_entropy(full, target, ignore_index=255, reduction="sum"))


@pytest.mark.usefixtures("_on_small_bands")
@pytest.mark.parametrize("num_threads", [1, 2])
def test_autocast_changes_nothing(num_threads):
    logits, target = draw(3, low=(5, 6), high=(33, 41))
    logits, size = logits.float().requires_grad_(), (33, 41)

    def found():
        loss = CriterionLovasz()(logits, target) + CriterionTversky(alpha=0.3, beta=0.7)(logits, target)
        loss = loss + CriterionFocal()(logits, target)
        return [
            loss.detach(),
            *torch.autograd.grad(loss, logits),
            upsample_argmax(logits, size),
            upsample_argmax([logits, logits.flip(3)], size),
            upsample_probabilities(logits, size),
            upsample_sets(logits, size, 0.3),
            upsample_label_counts(logits, target.clamp(max=16) - 1, 0.3),
            *upsample_confusion(logits, target),
        ]

    torch.set_num_threads(num_threads)
    expected = found()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, found(), expected))


@pytest.mark.usefixtures("_on_small_bands")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("high", [(34, 44), (18, 20)])
def test_infinite_or_nan_logit_changes_its_neighbors_only(high, value):
    """At these sizes, no weight of the logit is 0, which gives NaN in `F.interpolate`."""
    logits, _ = draw(3, low=(5, 6))
    logits[1, 2, 2, 3] = value
    full = F.interpolate(logits, high, mode="bilinear", align_corners=False)
    found = upsample_probabilities(logits, high, align_corners=False)
    torch.testing.assert_close(found, full.softmax(1), equal_nan=True)
    if value != value:
        return
    assert torch.equal(upsample_argmax(logits, high, align_corners=False).long(), full.argmax(1))
