"""Predictions and scores from low-resolution logits against the same at full resolution in float64."""

import pytest
import torch
import torch.nn.functional as F

from segapp.losses import CriterionCE, confusion
from segapp.losses.confusion import (
    LogitsTile,
    class_of_largest,
    upsample_argmax,
    upsample_confusion,
    upsample_label_counts,
    upsample_logits,
    upsample_probabilities,
    upsample_sets,
)
from tests.support.loss_cases import class_weight, draw, relative_error


def upsampled(logits, size, align_corners=True):
    return F.interpolate(logits.double(), size, mode="bilinear", align_corners=align_corners)


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("num_classes", [1, 2, 19, 150, 300])
@pytest.mark.parametrize(("low", "high"), [((5, 6), (40, 37)), ((6, 6), (6, 6)), ((8, 9), (5, 4))])
def test_argmax_matches_the_upsampled_logits(low, high, num_classes, align_corners):
    logits, _ = draw(2, num_classes, low, high)
    prediction = upsample_argmax(logits, high, align_corners=align_corners)
    assert prediction.dtype == (torch.uint8 if num_classes <= 256 else torch.int64)
    assert torch.equal(prediction.long(), upsampled(logits, high, align_corners).argmax(1))


def test_argmax_ties_go_to_the_first_class():
    assert class_of_largest(torch.zeros(1, 5, 2, 2)).max() == 0
    values = torch.tensor([0.0, 3.0, 1.0, 3.0]).view(1, 4, 1, 1)
    assert class_of_largest(values).item() == 1


@pytest.mark.parametrize("target_dtype", [torch.uint8, torch.int64])
@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("with_loss", [True, False])
def test_confusion_and_loss_in_one_pass_match_separate_ones(ignored, target_dtype, with_loss):
    logits, target = draw(3, 7, (5, 6), (40, 37), ignored=ignored, target_dtype=target_dtype)
    scores = upsample_confusion(logits, target, weight=class_weight(7), label_smoothing=0.1, with_loss=with_loss)
    valid = target != 255
    predicted = upsampled(logits, (40, 37)).argmax(1)
    expected = torch.zeros(7, 7, dtype=torch.int64)
    expected.index_put_((target[valid].long(), predicted[valid]), torch.tensor(1), accumulate=True)
    assert torch.equal(scores.confusion, expected)
    criterion = CriterionCE(weight=class_weight(7), label_smoothing=0.1, implementation="reference")
    loss_sum, weight_sum = criterion.statistics(logits, target)
    if with_loss:
        assert relative_error(scores.loss_sum, loss_sum) < 1e-12
        assert relative_error(scores.weight_sum, weight_sum) < 1e-12
    else:
        assert float(scores.loss_sum) == float(scores.weight_sum) == 0.0


def test_probability_equal_to_the_threshold_is_not_above_it():
    logits = torch.tensor([0.0, 1e-6], dtype=torch.float64).view(1, 2, 1, 1)
    assert upsample_sets(logits, (1, 1), 0.5).tolist() == [[[0b10]]]
    counts = upsample_label_counts(logits, torch.full((1, 1, 1), 0b11), 0.5)
    assert counts.tolist() == [[[0, 0], [1, 0]], [[0, 0], [0, 1]]]


@pytest.mark.parametrize("function", [upsample_argmax, upsample_probabilities, upsample_logits])
def test_sizes_may_be_those_of_a_target_or_a_list(function):
    logits, target = torch.randn(2, 3, 4, 5), torch.zeros(2, 7, 11)
    expected = function(logits, (7, 11))
    assert expected.shape[-2:] == (7, 11)
    assert all(torch.equal(function(logits, size), expected) for size in (target.shape[-2:], [7, 11]))


def tile_case():
    """Return two overlapping tiles of a 12 x 20 output, with logits of a larger frame, and their plain mean."""
    generator = torch.Generator().manual_seed(4)
    left, right = (torch.randn(2, 5, 4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    tiles = [LogitsTile(left, 0, 0, (12, 14), (16, 15)), LogitsTile(right, 0, 8, (12, 12), (16, 15), skip=3)]
    wide = [F.interpolate(t.logits, t.frame, mode="bilinear", align_corners=True) for t in tiles]
    total, count = torch.zeros(2, 5, 12, 20, dtype=torch.float64), torch.zeros(12, 20)
    total[..., :14] += wide[0][..., :12, :14]
    count[:, :14] += 1
    total[..., 8:] += wide[1][..., :12, 3:15]
    count[:, 8:] += 1
    return tiles, total / count


@pytest.mark.parametrize("band_bytes", [1, 1 << 25])
def test_tiles_in_rows_and_columns_are_averaged(band_bytes, monkeypatch):
    monkeypatch.setattr("segapp.losses.confusion.CPU_BAND_BYTES", band_bytes)
    generator = torch.Generator().manual_seed(7)
    total, count = torch.zeros(1, 3, 12, 13, dtype=torch.float64), torch.zeros(12, 13, dtype=torch.float64)
    tiles = []
    for top in (0, 3):
        for left in (0, 4):
            logits = torch.randn(1, 3, 4, 5, generator=generator, dtype=torch.float64)
            tiles.append(LogitsTile(logits, top, left, (9, 9), (9, 9)))
            place = (..., slice(top, top + 9), slice(left, left + 9))
            total[place] += F.interpolate(logits, (9, 9), mode="bilinear", align_corners=True)
            count[place] += 1
    torch.testing.assert_close(upsample_probabilities([iter(tiles)], (12, 13)), (total / count).softmax(1))


def test_tiles_and_views_are_averaged_as_probabilities(monkeypatch):
    monkeypatch.setattr(confusion, "CPU_BAND_BYTES", 1)  # each row of each image
    tiles, of_tiles = tile_case()
    fine, coarse = (draw(2, 5, low, seed=low[0])[0] for low in ((30, 41), (3, 7)))
    means = [of_tiles, *(upsampled(view, (12, 20)) for view in (fine, coarse))]
    expected = sum(each.softmax(1) for each in means) / 3
    views = [tiles, fine, coarse]
    torch.testing.assert_close(upsample_probabilities(views, (12, 20)), expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(upsample_argmax(views, (12, 20)).long(), expected.argmax(1))
    target = torch.randint(0, 5, (2, 12, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(6))
    target[0, :4] = 255
    found = upsample_confusion(views, target)
    flat = target.long()
    valid = flat != 255
    pairs = flat[valid] * 5 + expected.argmax(1)[valid]
    assert torch.equal(found.confusion.flatten(), torch.bincount(pairs, minlength=25))
    loss = F.nll_loss(expected.log(), flat, ignore_index=255, reduction="sum")
    torch.testing.assert_close(found.loss_sum, loss)
    assert float(found.weight_sum) == int(valid.sum())


@pytest.mark.parametrize("part_bytes", [400, confusion.ONE_HOT_BYTES])
@pytest.mark.parametrize("is_amp", [False, True])
def test_pairs_of_classes_are_counted_exactly(part_bytes, is_amp, monkeypatch):
    """Most pixels have one pair, as in pictures; bfloat16 would round counts above 256."""
    monkeypatch.setattr(confusion, "ONE_HOT_BYTES", part_bytes)
    rows, columns = torch.randint(0, 4, (2, 3, 41, 57)).unbind()
    rows[:2], columns[:2] = 3, 1
    with torch.autocast("cpu", torch.bfloat16, enabled=is_amp):
        counts = confusion.count_pairs(rows, columns.to(torch.uint8), 4, 5)
    expected = torch.bincount((rows * 5 + columns).flatten(), minlength=20).view(4, 5)
    assert counts.dtype == torch.int64
    assert torch.equal(counts, expected)
    assert int(counts[3, 1]) >= 2 * 41 * 57
