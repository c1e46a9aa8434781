"""Evaluation against torch in float64, the official Cityscapes evaluator, and itself on other devices and in tiles."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.files import ImagePair
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.loader import EvalLoader
from segapp.datasets.pool import Batch
from segapp.datasets.preprocessing import Preprocessing
from segapp.errors import OutOfMemoryError
from segapp.inference.evaluate import EnsembleEvaluator, EvaluationSettings, Evaluator, evaluate
from segapp.inference.predict.predictor import EnsemblePredictor, TrainedPredictor
from segapp.inference.sliding import Inference, window_corners
from segapp.inference.workspace import HostLimit, measure_bytes_per_px
from segapp.losses import CriterionCE, CriterionDice, CriterionLovasz, upsample_probabilities
from segapp.metrics import ConfusionMatrix
from tests.support.drawn_data import draw_image, draw_mask

CPU = torch.device("cpu")
NORMALIZER = Preprocessing(PixelFormat(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)))
WHOLE = EvaluationSettings(Inference(NORMALIZER), 3, 255, CPU, CriterionCE(weight=torch.tensor([1.0, 2.0, 3.0])))


class ColorNet(nn.Module):
    """A network whose logits are weighted colors averaged over 2 x 2 pixels, before others; it accepts multiples of 4.

    Out of memory for images of more pixels than its capacity. Every device needs its own copy of its weights.
    """

    fixed_size_px = None
    in_channels = 3

    def __init__(self, capacity_px: int = 10**9) -> None:
        super().__init__()
        self.capacity_px = capacity_px
        self.largest_px = 0
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))  # images have the dtype of the kernels
        self.factor = nn.Parameter(torch.tensor([1.0, 2.0, 0.5]).view(1, 3, 1, 1))
        self.register_buffer("offset", torch.tensor([0.1, -0.4, 0.3]).view(1, 3, 1, 1))

    def suitable_size(self, height: int, width: int) -> tuple[int, int]:
        return -(-height // 4) * 4, -(-width // 4) * 4

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        assert images.shape[-2] % 4 == images.shape[-1] % 4 == 0
        px = images.shape[0] * images.shape[-2] * images.shape[-1]
        if px > self.capacity_px:
            raise torch.OutOfMemoryError("no room")
        self.largest_px = max(self.largest_px, px)
        logits = F.avg_pool2d(images, 2) * 20 * self.factor + self.offset
        return logits, logits.flip(1)


def batch(height: int, width: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (1, 3, height, width), generator=generator, dtype=torch.uint8)
    target = torch.randint(0, 6, (1, height, width), generator=generator, dtype=torch.uint8)
    target = torch.where(target < 3, target, target % 2 * 2)  # classes of unequal size
    target[:, :3] = 255
    return Batch(images, target, (seed,))


BATCHES = [batch(9 + 3 * seed, 31 - seed, seed) for seed in range(7)]


@torch.no_grad()
def test_evaluation_of_mixed_sizes_equals_full_resolution() -> None:
    found = evaluate(ColorNet(), BATCHES, WHOLE)
    hits = np.zeros((3, 3), np.int64)
    loss_sum, weight_sum = 0.0, 0.0
    weights = torch.tensor([1.0, 2.0, 3.0]).double()
    for each in BATCHES:
        height, width = each.target.shape[-2:]
        size = ColorNet().suitable_size(height, width)
        padded = F.pad(each.images.double() / 255, (0, size[1] - width, 0, size[0] - height))
        logits = ColorNet().double()(padded)[0]
        full = F.interpolate(logits, size, mode="bilinear", align_corners=True)[..., :height, :width]
        target = each.target.long()
        loss_sum += float(F.cross_entropy(full, target, weights, ignore_index=255, reduction="sum"))
        weight_sum += float(weights[target[target != 255]].sum())
        np.add.at(hits, (target[target != 255].numpy(), full.argmax(1)[target != 255].numpy()), 1)
    iou = [hits[c, c] / (hits[c].sum() + hits[:, c].sum() - hits[c, c]) for c in range(3)]
    assert found.scores.iou == pytest.approx(iou, abs=2e-3)  # argmax ties between float32 and float64
    assert found.loss == pytest.approx(loss_sum / weight_sum, rel=1e-5)
    assert found.num_images == 7


@given(*map(st.integers, (1, 1, 1, 1), (60, 60, 70, 70)), st.sampled_from([0.0, 1 / 3, 0.5, 0.9]))
def test_windows_cover_every_pixel_inside_the_image(h: int, w: int, wh: int, ww: int, overlap: float) -> None:
    window = (min(wh, h), min(ww, w))
    covered = np.zeros((h, w), int)
    for top, left in window_corners((h, w), window, overlap):
        assert 0 <= top <= h - window[0]
        assert 0 <= left <= w - window[1]
        covered[top : top + window[0], left : left + window[1]] += 1
    assert covered.min() >= 1


def full_probabilities(inference: Inference, model: Any, images: torch.Tensor) -> torch.Tensor:
    views, size = inference.views_of_input(model, images)
    return upsample_probabilities(views, size, align_corners=inference.align_corners)


def naive(model: Any, images: torch.Tensor) -> torch.Tensor:
    return F.interpolate(model(images)[0], images.shape[-2:], mode="bilinear", align_corners=True)


def test_windows_that_are_not_square_by_hand() -> None:
    images = NORMALIZER(batch(18, 30, 0).images)
    inference = Inference(NORMALIZER, window_px=(12, 20), overlap=0.5)
    total, count = torch.zeros(1, 3, 18, 30), torch.zeros(18, 30)
    for top, left in itertools.product((0, 6), (0, 10)):
        place = (..., slice(top, top + 12), slice(left, left + 20))
        total[place] += naive(ColorNet(), images[place])
        count[place] += 1
    found = full_probabilities(inference, ColorNet(), images)
    torch.testing.assert_close(found, (total / count).softmax(1))


@pytest.mark.parametrize("window_px", [(16, 16), (40, 18)])
def test_mirrored_image_in_windows_gives_mirrored_prediction(window_px: tuple[int, int]) -> None:
    images = NORMALIZER(batch(19, 29, 0).images)
    found = full_probabilities(Inference(NORMALIZER, window_px=window_px, flip=True), ColorNet(), images)
    plain = Inference(NORMALIZER, window_px=window_px)
    one = full_probabilities(plain, ColorNet(), images)
    other = full_probabilities(plain, ColorNet(), images.flip(-1)).flip(-1)
    torch.testing.assert_close(found, (one + other) / 2, rtol=1e-4, atol=1e-6)


def test_views_of_several_scales_are_averaged_by_hand() -> None:
    """Of an image that is resized to 15 x 22 pixels, and then padded at the right and at the bottom."""
    sees, stored = Preprocessing(replace(NORMALIZER.pixels, resize_px=(15, 22))), batch(33, 51, 0).images
    images, expected = F.pad(sees(stored), (0, 2, 0, 1)), torch.zeros(1, 3, 33, 51)
    for scale, flip in itertools.product((0.5, 1.0, 1.5), (False, True)):
        size = int(16 * scale), int(24 * scale)
        seen = F.interpolate(images, size, mode="bilinear", align_corners=False, antialias=scale < 1)
        logits = ColorNet()(seen.flip(-1) if flip else seen)[0]
        full = F.interpolate(logits, (16, 24), mode="bilinear", align_corners=True)
        part = (full.flip(-1) if flip else full)[..., :15, :22]
        expected += F.interpolate(part, (33, 51), mode="bilinear", align_corners=True).softmax(1) / 6
    inference = Inference(sees, flip=True, scales=(0.5, 1.0, 1.5))
    views, size = inference.views(ColorNet(), stored)
    found = upsample_probabilities(views, size, align_corners=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    sees = Preprocessing(replace(NORMALIZER.pixels, resize_px=(16, 24)))
    windowed = replace(inference, preprocessing=sees, window_px=(16, 18))
    both = (windowed.views(ColorNet(), each) for each in (stored, stored.flip(-1)))
    found, mirrored = (upsample_probabilities(*each, align_corners=True) for each in both)
    torch.testing.assert_close(found, mirrored.flip(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("criterion", [CriterionCE(label_smoothing=0.1), CriterionDice(), CriterionLovasz()])
@pytest.mark.parametrize(
    "options", [{}, {"window_px": (16, 16)}, {"flip": True, "scales": (0.5, 1.0)}], ids=["whole", "windows", "views"]
)
def test_scores_and_loss_equal_those_of_upsampled_logits(criterion: Any, options: dict[str, Any]) -> None:
    batches = [batch(16, 24, 0), batch(19, 29, 1)]
    inference = Inference(NORMALIZER, **options)
    model = ColorNet()
    found = evaluate(model, batches, EvaluationSettings(inference, 3, 255, CPU, criterion))
    matrix = ConfusionMatrix(3)
    totals = None
    for each in batches:
        probabilities = full_probabilities(inference, model, NORMALIZER(each.images))
        height, width = each.target.shape[-2:]
        probabilities = probabilities[..., :height, :width]
        matrix.update(probabilities.argmax(1), each.target)
        statistics = criterion.statistics((probabilities.double().log(),), each.target)
        totals = statistics if totals is None else tuple(a + b for a, b in zip(totals, statistics, strict=True))
    assert found.scores == matrix.scores()
    assert found.loss == pytest.approx(float(criterion.finalize(totals)), rel=1e-4)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
@pytest.mark.parametrize("counter", [{}, {"counter": Evaluator}], ids=["of a training", "of eval"])
def test_evaluation_on_several_devices_equals_one(num_devices: int, counter: dict[str, Any]) -> None:
    alone = evaluate(ColorNet(), BATCHES, WHOLE)
    done: list[int] = []
    model, many = ColorNet(), replace(WHOLE, other_devices=(CPU,) * (num_devices - 1))
    spread = evaluate(model, BATCHES, many, progress=done.append, check=lambda: done.append(0), num_checks=9, **counter)
    assert done == [0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0, 0], "another rank has two batches more"
    assert spread.scores == alone.scores
    assert spread.loss == pytest.approx(alone.loss, rel=1e-6)
    assert spread.num_images == 7
    assert torch.equal(spread.matrix, alone.matrix)
    assert model.training


def test_error_of_any_device_ends_the_evaluation() -> None:
    class FailingNet(ColorNet):
        def forward(self, images: Tensor) -> tuple[Tensor, ...]:
            if images.shape[-1] == 28:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(images)

    num_threads = threading.active_count()
    for widths in ([28, 24, 24, 24], [24, 28, 24, 24, 24], [24, 24, 24, 24, 28]):
        for mode in (True, False):
            model = FailingNet().train(mode)
            with pytest.raises(torch.OutOfMemoryError):
                evaluate(
                    model, [batch(12, width, i) for i, width in enumerate(widths)],
                    replace(WHOLE, other_devices=(CPU, CPU)),
                )  # fmt: skip
            assert model.training == mode
    assert threading.active_count() == num_threads


def test_image_too_large_is_evaluated_in_smaller_windows() -> None:
    batches = [batch(200, 300, 0), batch(40, 50, 1), batch(60, 400, 2)]
    model = ColorNet(capacity_px=80 * 90)
    found = evaluate(model, batches, WHOLE, counter=Evaluator)
    parts = [
        evaluate(ColorNet(), [each], replace(WHOLE, inference=Inference(NORMALIZER, window_px=window))).matrix
        for each, window in zip(batches, ((64, 75), None, (64, 100)), strict=True)
    ]
    assert torch.equal(found.matrix, sum(parts[1:], parts[0]))
    assert "windows of" in found.notes[-1]
    assert model.largest_px <= model.capacity_px
    with pytest.raises(OutOfMemoryError, match="a window of 40x50 px of 1 images does not fit"):
        evaluate(ColorNet(capacity_px=100), batches[1:], WHOLE, counter=Evaluator)


class BlurNet(ColorNet):
    """A network that sees eight pixels around, which is less than the margin of a tile."""

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return super().forward(F.avg_pool2d(images, 17, stride=1, padding=8))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("criterion", [CriterionCE(), CriterionDice()])
def test_evaluation_in_tiles_equals_that_of_whole_images(criterion: Any) -> None:
    batches = [batch(96, 600, 2), batch(40, 50, 1), batch(300, 421, 0)]
    whole = replace(WHOLE, criterion=criterion)
    expected = evaluate(BlurNet(), batches, whole)
    for is_detailed in (False, True):
        model, host = BlurNet(), HostLimit(max_px=150 * 150)
        settings = replace(whole, host=host)
        if is_detailed:
            found = evaluate(model, batches, settings, counter=Evaluator)
        else:
            found = evaluate(model, batches, settings)
        assert model.largest_px <= 150 * 150
        assert found.scores.num_valid_px == expected.scores.num_valid_px
        assert found.scores.iou == pytest.approx(expected.scores.iou, abs=2e-3)
        assert found.loss == pytest.approx(expected.loss, rel=1e-3)
        (note,) = found.notes
        assert all(size in note for size in ("an image of 96x600 px does not fit", "this one of 96x192 px"))
        assert evaluate(model, batches, settings).notes == [], "told once"
    fits = replace(whole, host=HostLimit(max_px=300 * 421))
    assert evaluate(BlurNet(), batches[1:], fits) == evaluate(BlurNet(), batches[1:], whole)


@pytest.mark.parametrize("way", ["windows", "tiles"])
def test_large_tiff_in_parts_equals_the_decoded_whole(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tifffile = pytest.importorskip("tifffile")
    pytest.importorskip("rasterio", reason="the extra geo is not installed")
    monkeypatch.setattr("segapp.datasets.images.tiff_tags.LARGE_PX", 150 * 200)
    monkeypatch.setattr("segapp.inference.workspace.WINDOWED_TILE_PX", 60)
    pairs = []
    for number, size in enumerate([(150, 221), (40, 50), (190, 180)]):
        image, target = draw_image(number, *size), draw_mask(number, *size, 3)
        tifffile.imwrite(tmp_path / f"{number}.tif", image, tile=(64, 64), photometric="rgb")
        tifffile.imwrite(tmp_path / f"{number}m.tif", target, tile=(64, 64))
        pairs.append(ImagePair(tmp_path / f"{number}.tif", tmp_path / f"{number}m.tif", f"{number}"))
    dataset = SegmentationDataset(pairs, class_scheme("folder", classes=["a", "b", "c"]))
    inference = Inference(NORMALIZER, window_px=(64, 80) if way == "windows" else None)
    host = None if way == "windows" else HostLimit(max_px=150 * 150)
    settings = EvaluationSettings(inference, 3, 255, CPU, CriterionCE(), host=host)
    assert settings.reads_windows
    results = []
    for reads_windows in (False, True):
        batches = partial(EvalLoader(dataset).batches, reads_windows=reads_windows)
        detailed = evaluate(BlurNet(), batches(), settings, counter=Evaluator)
        results.append((detailed, evaluate(BlurNet(), batches(), settings).scores))
        assert [type(each).__name__ == "LargeBatch" for each in batches()] == [reads_windows, False, reads_windows]
    (whole, scores), (parts, scores_of_parts) = results
    assert torch.equal(parts.matrix, whole.matrix)
    assert scores_of_parts == scores
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_host_limit_is_the_budget_over_the_recorded_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(ColorNet):
        def forward(self, images: Tensor) -> tuple[Tensor, ...]:
            wide = images.repeat(1, 100, 1, 1)  # 1200 bytes for each pixel
            return super().forward(wide[:, :3] + 0)

    bytes_per_px = measure_bytes_per_px(Wide(), Inference(NORMALIZER), CPU)
    assert 1.5 * 1200 < bytes_per_px < 1.5 * 1300
    scaled = measure_bytes_per_px(Wide(), Inference(NORMALIZER, scales=(0.5, 1.75)), CPU)
    assert scaled == pytest.approx(1.75**2 * bytes_per_px)
    monkeypatch.setattr("segapp.inference.workspace.available_bytes", lambda: 3 << 30)
    limit = HostLimit(2)
    at = int((3 << 30) / 4 / bytes_per_px)
    assert limit.fits(at, Wide(), Inference(NORMALIZER), CPU)
    assert not limit.fits(at + 1, Wide(), Inference(NORMALIZER), CPU)
    assert limit.fits(10**9, Wide(), Inference(NORMALIZER, window_px=(512, 512)), CPU)
    assert limit.fits(10**9, Wide(), Inference(NORMALIZER), torch.device("cuda:0"))


@pytest.mark.parametrize("batch_size", [2, 3, 5])
def test_batches_of_several_images_score_as_single_images(batch_size: int, tmp_path: Path) -> None:
    """Images, targets and indices of a batch stay in one order, in the loader and in both evaluations."""
    pairs = []
    for number in range(7):
        image, mask = draw_image(number, 24, 30), draw_mask(number, 24, 30, 3)
        mask[: 3 * number] = 255
        for kind, pixels in (("image", image), ("mask", mask)):
            cv2.imwrite(str(tmp_path / f"{number}{kind}.png"), pixels)
        pairs.append(ImagePair(tmp_path / f"{number}image.png", tmp_path / f"{number}mask.png", f"{number}"))
    dataset = SegmentationDataset(pairs, class_scheme("folder", classes=["a", "b", "c"]))
    assert len(next(iter(EvalLoader(dataset, batch_size=batch_size))).indices) == batch_size
    single = evaluate(ColorNet(), EvalLoader(dataset), WHOLE)
    for counter in ({}, {"counter": Evaluator}):
        model, limited = ColorNet(), replace(WHOLE, host=HostLimit(max_px=2 * 24 * 32))
        several = evaluate(model, EvalLoader(dataset, batch_size=batch_size), limited, **counter)
        assert model.largest_px == (1 if batch_size == 3 else 2) * 24 * 32, "two images fit (of 7 = 5 + 2)"
        assert several.scores == single.scores
        assert several.loss == pytest.approx(single.loss, rel=1e-9)
        assert torch.equal(several.matrix, single.matrix)
    member = TrainedPredictor(ColorNet(), WHOLE.inference, dataset.scheme, CPU)  # type: ignore[arg-type]
    mean = partial(EnsembleEvaluator, EnsemblePredictor([("one", member)]))
    loader = EvalLoader(dataset, batch_size=batch_size)
    assert torch.equal(evaluate(ColorNet(), loader, WHOLE, counter=mean).matrix, single.matrix)


RANGES = ((-5.0, 4000.0), (100.0, 101.5), (0.0, 65535.0), (0.0, 1.0))
MEAN, STD = (0.1, 0.4, 0.5, 0.45), (0.2, 0.3, 0.25, 0.22)


@pytest.mark.parametrize("dtype", ["uint16", "int16", "float32"])
def test_bands_match_numpy_in_float64(dtype: str) -> None:
    values = np.random.default_rng(0).uniform(-100, 9000, (2, 4, 5, 7))
    stored = (values.clip(0) if dtype == "uint16" else values).astype(dtype)
    images = torch.from_numpy(stored.copy())
    found = Preprocessing(PixelFormat((1, 2, 3), "float32", RANGES, MEAN, STD))(images)
    low, high = np.array(RANGES).T.reshape(2, 1, 4, 1, 1)
    mean, std = (np.array(each).reshape(1, 4, 1, 1) for each in (MEAN, STD))
    expected = (((stored.astype(np.float64) - low) / (high - low)).clip(0, 1) - mean) / std
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-5)
    np.testing.assert_array_equal(images.numpy(), stored)


def test_pixels_without_data_become_the_low_end_of_the_range() -> None:
    values = [float("nan"), float("inf"), -float("inf"), -3.4e38]
    images = torch.tensor(values).view(1, 1, 1, 4)
    found = Preprocessing(PixelFormat((1,), "float32", ((0.0, 10.0),), (0.0,), (1.0,)))(images)
    assert found.flatten().tolist() == [0.0, 1.0, 0.0, 0.0]
