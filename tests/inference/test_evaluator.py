"""Detailed evaluation: devices, memory and groups, each compared with an independent computation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import hypothesis
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.loader import EvalLoader
from segapp.datasets.pool import Batch
from segapp.errors import OutOfMemoryError
from segapp.inference.evaluate import EvaluationCounts, EvaluationSettings, evaluate
from segapp.inference.evaluator import Evaluator
from segapp.inference.sliding import Inference
from segapp.inference.workspace import MIN_SIDE_PX, HostLimit, measure_bytes_per_px, tile_frame, tiles_of
from segapp.losses import CriterionCE, CriterionDice
from segapp.metrics import ConfusionMatrix, group_iou, group_matrix
from segapp.models.normalizer import Normalizer
from tests.support.drawn_data import draw_image, draw_mask

CPU = torch.device("cpu")
NORMALIZER = Normalizer((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


class ColorNet(nn.Module):
    """A network whose logits are averaged colours; out of memory for images of more pixels than its capacity."""

    fixed_size_px = None
    in_channels = 3

    def __init__(self, capacity_px: int = 10**9) -> None:
        super().__init__()
        self.capacity_px = capacity_px
        self.largest_px = 0

    def suitable_size(self, height: int, width: int) -> tuple[int, int]:
        return -(-height // 4) * 4, -(-width // 4) * 4

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        px = images.shape[0] * images.shape[-2] * images.shape[-1]
        if px > self.capacity_px:
            raise torch.OutOfMemoryError("no room")
        self.largest_px = max(self.largest_px, px)
        return (F.avg_pool2d(images, 2) * 20,)


def batch(height: int, width: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (1, 3, height, width), generator=generator, dtype=torch.uint8)
    target = torch.randint(0, 3, (1, height, width), generator=generator, dtype=torch.uint8)
    target[:, :3] = 255
    return Batch(images, target, (seed,))


def evaluator(model: Any = None, inference: Inference | None = None, **options: Any) -> Evaluator:
    settings = EvaluationSettings(inference or Inference(NORMALIZER), 3, 255, CPU, CriterionCE())
    return Evaluator(model or ColorNet(), settings, **options)


BATCHES = [batch(16 + i, 24 + 2 * i, i) for i in range(7)]


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_eval_on_any_number_of_devices_equals_training_scores(num_devices: int) -> None:
    settings = EvaluationSettings(Inference(NORMALIZER), 3, 255, CPU, CriterionCE())
    expected = evaluate(ColorNet(), BATCHES, settings)
    done: list[int] = []
    on_all = replace(settings, other_devices=(CPU,) * (num_devices - 1))
    found = evaluate(ColorNet(), BATCHES, on_all, counter=Evaluator, progress=done.append)
    assert found.scores == expected.scores
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.num_images == done[-1] == len(BATCHES)
    assert int(found.matrix.sum()) == expected.scores.num_valid_px


def test_failing_device_ends_the_evaluation() -> None:
    class Broken(ColorNet):
        def forward(self, images: Tensor) -> tuple[Tensor, ...]:
            raise ValueError("no such layer")

    networks: Any = iter([ColorNet(), Broken()])
    settings = replace(evaluator().settings, other_devices=(CPU,))
    with pytest.raises(ValueError, match="no such layer"):
        evaluate(ColorNet(), BATCHES, settings, counter=lambda _, own: Evaluator(next(networks), own))


def test_image_too_large_is_evaluated_in_smaller_windows() -> None:
    batches = [batch(200, 300, 0), batch(40, 50, 1)]
    model = ColorNet(capacity_px=80 * 90)
    found = evaluate(model, batches, evaluator().settings, counter=Evaluator)
    windowed = evaluator(inference=Inference(NORMALIZER, window_px=(64, 75)))
    windowed.add(batches[0])
    whole = evaluator()
    whole.add(batches[1])
    assert torch.equal(found.matrix, windowed.counts.confusion.matrix + whole.counts.confusion.matrix)
    assert len(found.notes) >= 1
    assert "windows of" in found.notes[-1]
    assert model.largest_px <= model.capacity_px
    with pytest.raises(OutOfMemoryError, match="does not fit"):
        evaluate(ColorNet(capacity_px=100), batches, evaluator().settings, counter=Evaluator)


@given(st.integers(0, 10_000))
def test_group_scores_equal_scores_of_relabelled_images(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    prediction, target = (torch.randint(0, 6, (1, 8, 9), generator=generator) for _ in range(2))
    matrix = ConfusionMatrix(6)
    matrix.update(prediction, target)
    groups = [(0, 3), (5,)]
    relabel = torch.tensor([0, 2, 2, 0, 2, 1])
    expected = ConfusionMatrix(3)
    expected.update(relabel[prediction], relabel[target])
    assert torch.equal(group_matrix(matrix.matrix, groups), expected.matrix)
    assert group_iou(matrix.matrix, groups) == expected.scores().iou[:2]


@hypothesis.settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(1, 700), st.integers(MIN_SIDE_PX**2, 200_000))
def test_cores_of_tiles_hold_every_pixel_once(height: int, width: int, max_px: int) -> None:
    seen = np.zeros((height, width), int)
    where = np.arange(height * width).reshape(height, width)
    for tile in tiles_of((height, width), tile_frame((height, width), max_px)):
        seen[tile.place] += 1
        assert where[tile.whole].size <= max_px
        assert np.array_equal(where[tile.whole][tile.core], where[tile.place])
    assert (seen == 1).all()


class BlurNet(ColorNet):
    """A network that sees eight pixels around, which is less than the margin of a tile."""

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return super().forward(F.avg_pool2d(images, 17, stride=1, padding=8))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("criterion", [CriterionCE(), CriterionDice()])
def test_evaluation_in_tiles_equals_that_of_whole_images(criterion: Any) -> None:
    batches = [batch(300, 421, 0), batch(40, 50, 1), batch(128, 600, 2)]
    whole = EvaluationSettings(Inference(NORMALIZER), 3, 255, CPU, criterion)
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
        assert len(found.notes) == 1
        assert "an image of 300x421 px does not fit" in found.notes[0]
        assert evaluate(model, batches, settings).notes == [], "told once"


@pytest.mark.parametrize("way", ["windows", "tiles"])
def test_large_tiff_in_parts_equals_the_decoded_whole(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tifffile = pytest.importorskip("tifffile")
    pytest.importorskip("rasterio", reason="the extra geo is not installed")
    for name in ("segapp.datasets.images.windows", "segapp.datasets.dataset"):
        monkeypatch.setattr(f"{name}.LARGE_PX", 150 * 200)
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


def test_images_that_fit_are_not_divided() -> None:
    batches = [batch(300, 421, 0), batch(128, 600, 2)]
    whole = EvaluationSettings(Inference(NORMALIZER), 3, 255, CPU, CriterionCE())
    assert evaluate(ColorNet(), batches, replace(whole, host=HostLimit(max_px=300 * 421))) == evaluate(
        ColorNet(), batches, whole
    )


def test_host_limit_is_the_budget_over_the_recorded_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(ColorNet):
        def forward(self, images: Tensor) -> tuple[Tensor, ...]:
            wide = images.repeat(1, 100, 1, 1)  # 1200 bytes for each pixel
            return super().forward(wide[:, :3] + 0)

    bytes_per_px = measure_bytes_per_px(Wide(), Inference(NORMALIZER), CPU)
    assert 1.5 * 1200 < bytes_per_px < 1.5 * 1300
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
    settings = EvaluationSettings(Inference(NORMALIZER), 3, 255, CPU, CriterionCE())
    single, several = (
        (
            evaluate(ColorNet(), EvalLoader(dataset, batch_size=size), settings),
            evaluate(ColorNet(), EvalLoader(dataset, batch_size=size), settings, counter=Evaluator),
        )
        for size in (1, batch_size)
    )
    assert len(next(iter(EvalLoader(dataset, batch_size=batch_size))).indices) == batch_size
    assert several[0].scores == single[0].scores == several[1].scores
    assert several[0].loss == pytest.approx(single[0].loss, rel=1e-9)
    assert several[1].loss == pytest.approx(single[0].loss, rel=1e-9)
    assert torch.equal(several[1].matrix, single[1].matrix)


def test_counts_of_parts_add_up_to_those_of_the_whole() -> None:
    """Devices and ranks add whatever tensors the counts consist of: confusion and loss."""
    settings = EvaluationSettings(Inference(NORMALIZER), 3, 255, CPU, CriterionCE())

    def counted(batches: list[Batch]) -> EvaluationCounts:
        evaluator = Evaluator(ColorNet(), settings)
        for each in batches:
            evaluator.add(each)
        return evaluator.counts

    whole, first, second = counted(BATCHES), counted(BATCHES[:1]), counted(BATCHES[1:])
    assert len(whole.tensors()) == 3, "confusion, loss sum, weight sum"
    first.merge(second)
    for own, expected in zip(first.tensors(), whole.tensors(), strict=True):
        torch.testing.assert_close(own, expected)
        assert expected.any()
    assert first.num_images == whole.num_images == len(BATCHES)
