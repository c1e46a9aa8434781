"""Evaluation: windows, sizes, averages, and the official Cityscapes evaluator."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from dataclasses import replace
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

from segapp.datasets.pool import Batch
from segapp.inference.evaluate import EvaluationSettings, evaluate
from segapp.inference.sliding import Inference, window_corners
from segapp.losses import CriterionCE, CriterionDice, CriterionLovasz, upsample_probabilities
from segapp.metrics import ConfusionMatrix
from segapp.models.normalizer import Normalizer
from tests.support.runs import draw_scene, events, merged, segapp, train

CPU = torch.device("cpu")
NORMALIZER = Normalizer((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


class ColorNet(nn.Module):
    """A network whose logits are colours averaged over 2 x 2 pixels; like a strided one it accepts multiples of 4."""

    def suitable_size(self, height: int, width: int) -> tuple[int, int]:
        return -(-height // 4) * 4, -(-width // 4) * 4

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        assert images.shape[-2] % 4 == images.shape[-1] % 4 == 0
        return (F.avg_pool2d(images, 2) * 20,)


def batch(height: int, width: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (1, 3, height, width), generator=generator, dtype=torch.uint8)
    target = torch.randint(0, 3, (1, height, width), generator=generator, dtype=torch.uint8)
    target[:, :3] = 255
    return Batch(images, target, (seed,))


def test_evaluation_of_mixed_sizes_equals_full_resolution() -> None:
    batches = [batch(16, 24, 0), batch(13, 18, 1), batch(9, 31, 2)]
    settings = EvaluationSettings(Inference(NORMALIZER), 3, 255, CPU, CriterionCE())
    found = evaluate(ColorNet(), batches, settings)
    hits = np.zeros((3, 3), np.int64)
    loss_sum, count = 0.0, 0
    for each in batches:
        height, width = each.target.shape[-2:]
        size = ColorNet().suitable_size(height, width)
        padded = F.pad(each.images.double() / 255, (0, size[1] - width, 0, size[0] - height))
        logits = F.avg_pool2d(padded, 2) * 20
        full = F.interpolate(logits, size, mode="bilinear", align_corners=True)[..., :height, :width]
        target = each.target.long()
        loss_sum += float(F.cross_entropy(full, target, ignore_index=255, reduction="sum"))
        count += int((target != 255).sum())
        prediction = full.argmax(1)
        for t, p in zip(target[target != 255].tolist(), prediction[target != 255].tolist(), strict=True):
            hits[t, p] += 1
    iou = [hits[c, c] / (hits[c].sum() + hits[:, c].sum() - hits[c, c]) for c in range(3)]
    assert found.scores.iou == pytest.approx(iou, abs=2e-3)  # argmax ties between float32 and float64
    assert found.loss == pytest.approx(loss_sum / count, rel=1e-5)
    assert found.num_images == 3


@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from([0.0, 1 / 3, 0.5, 0.9]),
)
def test_windows_cover_every_pixel_inside_the_image(h: int, w: int, wh: int, ww: int, overlap: float) -> None:
    window = (min(wh, h), min(ww, w))
    covered = np.zeros((h, w), int)
    for top, left in window_corners((h, w), window, overlap):
        assert 0 <= top <= h - window[0]
        assert 0 <= left <= w - window[1]
        covered[top : top + window[0], left : left + window[1]] += 1
    assert covered.min() >= 1


def full_probabilities(inference: Inference, model: Any, images: torch.Tensor) -> torch.Tensor:
    views, size = inference.views(model, images)
    return upsample_probabilities(views, size, align_corners=inference.align_corners)


def naive(model: Any, images: torch.Tensor) -> torch.Tensor:
    return F.interpolate(model(images)[0], images.shape[-2:], mode="bilinear", align_corners=True)


def test_window_as_large_as_the_image_equals_no_window() -> None:
    images = NORMALIZER(batch(16, 24, 0).images)
    plain = full_probabilities(Inference(NORMALIZER), ColorNet(), images)
    slid = full_probabilities(Inference(NORMALIZER, window_px=(16, 24)), ColorNet(), images)
    torch.testing.assert_close(plain, slid)
    torch.testing.assert_close(plain, naive(ColorNet(), images).softmax(1))


def test_overlapping_windows_are_averaged() -> None:
    images = NORMALIZER(batch(16, 24, 0).images)
    found = full_probabilities(Inference(NORMALIZER, window_px=(16, 16), overlap=0.5), ColorNet(), images)
    left, right = naive(ColorNet(), images[..., :16]), naive(ColorNet(), images[..., 8:])
    middle = (left[..., 8:] + right[..., :8]) / 2
    torch.testing.assert_close(found, torch.cat([left[..., :8], middle, right[..., 8:]], -1).softmax(1))


@pytest.mark.parametrize("window_px", [None, (16, 16), (40, 20)])
def test_mirrored_padded_image_gives_mirrored_prediction(
    window_px: tuple[int, int] | None,
) -> None:
    images = NORMALIZER(batch(19, 29, 0).images)
    inference = Inference(NORMALIZER, window_px=window_px, flip=True)
    found = full_probabilities(inference, ColorNet(), images)[..., :19, :29]
    plain = Inference(NORMALIZER, window_px=window_px)
    one = full_probabilities(plain, ColorNet(), images)[..., :19, :29]
    frame = images
    if window_px is None:  # the padding stays at the right of the image
        frame = F.pad(images, (0, 3, 0, 1))
    other = full_probabilities(plain, ColorNet(), frame.flip(-1)).flip(-1)[..., :19, :29]
    torch.testing.assert_close(found, (one + other) / 2, rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize("window_px", [None, (16, 16)])
def test_flip_average_is_symmetric(window_px: tuple[int, int] | None) -> None:
    images = NORMALIZER(batch(16, 24, 0).images)
    inference = Inference(NORMALIZER, flip=True, scales=(0.5, 1.0, 1.5), window_px=window_px)
    found = full_probabilities(inference, ColorNet(), images)
    mirrored = full_probabilities(inference, ColorNet(), images.flip(-1)).flip(-1)
    torch.testing.assert_close(found, mirrored, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.sum(1), torch.ones(1, 16, 24))


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


class WeightedNet(ColorNet):
    """`ColorNet` with a parameter and a buffer, which every device needs its own copy of."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([1.0, 2.0, 0.5]).view(1, 3, 1, 1))
        self.register_buffer("offset", torch.tensor([0.1, 0.0, 0.3]).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        (logits,) = super().forward(images)
        return (logits * self.factor + self.offset,)


@pytest.mark.parametrize("num_devices", [2, 3, 8])
def test_evaluation_on_several_devices_equals_one(num_devices: int) -> None:
    batches = [batch(9 + 3 * seed, 31 - seed, seed) for seed in range(7)]
    settings = EvaluationSettings(Inference(NORMALIZER), 3, 255, CPU, CriterionCE(weight=torch.tensor([1.0, 2.0, 3.0])))
    model = WeightedNet()
    alone = evaluate(model, batches, settings)
    progress: list[int] = []
    several = replace(settings, other_devices=(CPU,) * (num_devices - 1))
    spread = evaluate(model, batches, several, progress=progress.append)
    assert spread.scores == alone.scores
    assert spread.loss == pytest.approx(alone.loss, rel=1e-12)
    assert (spread.num_images, progress[-1]) == (7, 7)
    assert model.training


def test_error_of_any_device_ends_the_evaluation() -> None:
    class FailingNet(WeightedNet):
        def forward(self, images: Tensor) -> tuple[Tensor, ...]:
            if images.shape[-1] == 28:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(images)

    settings = EvaluationSettings(Inference(NORMALIZER), 3, 255, CPU, CriterionCE(), other_devices=(CPU, CPU))
    num_threads = threading.active_count()
    for widths in ([28, 24, 24, 24], [24, 28, 24, 24], [24, 24, 24, 24, 28]):
        model = FailingNet()
        with pytest.raises(torch.OutOfMemoryError):
            evaluate(model, [batch(12, width, i) for i, width in enumerate(widths)], settings)
        assert model.training
    assert threading.active_count() == num_threads


def test_evaluation_restores_the_mode_of_the_model() -> None:
    for mode in (True, False):
        model = ColorNet().train(mode)
        evaluate(model, [batch(16, 16, 0)], EvaluationSettings(Inference(NORMALIZER), 3, 255, CPU))
        assert model.training == mode


@pytest.mark.slow
def test_training_evaluates_in_tiles_where_images_do_not_fit(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segapp.inference.workspace.SMALL_PX", 100)
    monkeypatch.setattr("segapp.inference.workspace.MAX_HOST_BYTES", 1)  # tiles of the smallest size
    config = merged(tiny, data={"resize_px": [200, 300]}, train={"epochs": 2})
    assert train(config, tmp_path / "run") == 0
    alerts = [event["message"] for event in events(tmp_path / "run", "alert") if event["kind"] == "memory"]
    assert len(alerts) == 1, "told once"
    assert "an image of 200x300 px does not fit" in alerts[0]
    assert "of 128x128 px" in alerts[0]
    assert sorted(path.name for path in (tmp_path / "run" / "samples").iterdir())[0] == "epoch_0001_0.png"


# --- Cityscapes ----------------------------------------------------------------------------------------------------

LABEL_IDS = np.array([7, 11, 26, 23], np.uint8)


@pytest.fixture(scope="module")
def cityscapes_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cityscapes")
    rng = np.random.default_rng(1)
    for split, count in (("train", 6), ("val", 3)):
        for kind in ("leftImg8bit", "gtFine"):
            (root / kind / split / "town").mkdir(parents=True)
        for i in range(count):
            image, mask = draw_scene(rng, 64, 96)
            ids = np.where(mask == 255, 0, LABEL_IDS[np.minimum(mask, 3)]).astype(np.uint8)
            name = f"town_000000_{i:06}"
            cv2.imwrite(str(root / "leftImg8bit" / split / "town" / f"{name}_leftImg8bit.png"), image)
            cv2.imwrite(str(root / "gtFine" / split / "town" / f"{name}_gtFine_labelIds.png"), ids)
    return root


def test_eval_equals_official_evaluator_on_written_predictions(
    cityscapes_root: Path, tiny: dict[str, Any], tmp_path: Path
) -> None:
    config = merged(
        {**tiny, "data": {"format": "cityscapes", "root": str(cityscapes_root), "crop_px": [32, 32], "workers": 0}},
        train={"epochs": 2, "batch_size": 2},
        optim={"name": "adamw", "lr": 0.003},
    )
    assert train(config, tmp_path / "run") == 0
    result = segapp("eval", "run", "--json", "--devices", "cpu,cpu", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    ours = json.loads(result.stdout)
    assert [dice and dice / (2 - dice) for dice in ours["dice"]] == pytest.approx(ours["iou"])
    matrix = np.array(ours["confusion"])
    with np.errstate(invalid="ignore"):
        for name, total in (("precision", matrix.sum(0)), ("recall", matrix.sum(1))):
            values = np.array(ours[name], float)
            np.testing.assert_allclose(values, matrix.diagonal() / total)
            assert ours[f"mean_{name}"] == pytest.approx(np.nanmean(values))
    images = cityscapes_root / "leftImg8bit" / "val"
    result = segapp("predict", "run", images, "--out", "predictions", "--label-ids", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    official = official_scores(cityscapes_root, tmp_path / "predictions" / "labels", tmp_path / "official.json")
    for name, iou in zip(ours["classes"], ours["iou"], strict=True):
        theirs = official["classScores"][name]
        if iou is None:
            assert np.isnan(theirs)
        else:
            assert theirs == pytest.approx(iou, abs=1e-6)
    assert official["averageScoreClasses"] == pytest.approx(ours["miou"], abs=1e-6)
    assert {*ours["groups"], "void"} == set(official["categoryScores"])  # theirs gives NaN for void
    for name, iou in ours["groups"].items():
        theirs = official["categoryScores"][name]
        assert np.isnan(theirs) if iou is None else theirs == pytest.approx(iou, abs=1e-6)
    assert official["averageScoreCategories"] == pytest.approx(ours["groups_miou"], abs=1e-6)


def official_scores(root: Path, predictions: Path, out: Path) -> dict[str, Any]:
    """Return the result of the cityscapesscripts package, run in a process of its own because of its global state."""
    code = (
        "import json, sys, glob\n"
        "import cityscapesscripts.evaluation.evalPixelLevelSemanticLabeling as official\n"
        "root, predictions, out = sys.argv[1:]\n"
        "args = official.args\n"
        "args.cityscapesPath, args.predictionPath, args.predictionWalk = root, predictions, None\n"
        "args.groundTruthSearch = root + '/gtFine/val/*/*_gtFine_labelIds.png'\n"
        "args.evalInstLevelScore = args.evalPixelAccuracy = False\n"
        "args.JSONOutput, args.quiet = False, True\n"
        "truth = sorted(glob.glob(args.groundTruthSearch))\n"
        "guesses = [official.getPrediction(args, path) for path in truth]\n"
        "result = official.evaluateImgLists(guesses, truth, args)\n"
        "json.dump(result, open(out, 'w'), default=float)\n"
    )
    command = [sys.executable, "-c", code, str(root), str(predictions), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    scores: dict[str, Any] = json.loads(out.read_text())
    return scores
