"""The training transform against plain OpenCV calls, albumentations called by hand, and values computed by hand."""

import hashlib
import random
from typing import Any

import albumentations as A
import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segapp.config import DataConfig
from segapp.datasets.augment import TrainTransform
from segapp.datasets.augment.crop import AxisPlan, ScaledCrop, _pad, largest_share
from segapp.datasets.augment.entries import PhotometricChange, color_matrix
from tests.support.drawn_data import draw_image, draw_mask


def standard(
    crop_px: tuple[int, int],
    *,
    scale: tuple[float, float] = (0.5, 2.0),
    hflip: float = 0.5,
    photometric: bool | float = True,
    cat_max_ratio: float = 0.75,
    **options: Any,
) -> TrainTransform:
    """Return the built-in recipe of a config with these keys."""
    keys = {"scale": scale, "hflip": hflip, "photometric": photometric}
    entries = DataConfig(format="camvid", root="data", **keys).transforms
    entries[0]["ScaledCrop"]["cat_max_ratio"] = cat_max_ratio
    return TrainTransform(crop_px, entries, **options)


PLAIN = {"scale": (1.0, 1.0), "hflip": 0.0, "photometric": False, "cat_max_ratio": 1.0}


def coordinates(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an image with red = column and green = row, and a mask of 128 * row + column."""
    y, x = np.mgrid[:height, :width]
    image = np.stack([x, y, np.zeros_like(x)], -1).astype(np.uint8)
    return image, (y * 128 + x).astype(np.int16)


# --- geometry


@given(st.integers(1, 3000), st.floats(0.05, 20), st.integers(1, 1500), st.integers(0, 2**32))
def test_any_axis_plan_fits_source_and_crop(source_px: int, zoom: float, crop_px: int, seed: int) -> None:
    plan = AxisPlan(source_px, zoom, crop_px)
    assert plan.shown_px + plan.pad_px == crop_px
    assert plan.pad_px >= 0
    window = plan.draw(random.Random(seed))
    assert 0 <= window.start < window.stop <= source_px
    if plan.window_px < source_px:
        assert abs(plan.window_px - plan.shown_px / zoom) < 1
    if plan.pad_px:
        assert plan.shown_px == max(1, round(source_px * zoom))


def test_scale_and_flip_take_their_whole_range() -> None:
    image, mask = coordinates(120, 126)
    transform = standard((30, 30), photometric=False, ignore_index=-1, cat_max_ratio=1.0)
    slopes = np.array(
        [np.diff(transform(image, mask, seed)[1][10, 2:28] % 128).astype(int).mean() for seed in range(400)]
    )
    scales = 1 / np.abs(slopes)
    assert 0.48 <= scales.min() < 0.56
    assert 1.9 < scales.max() <= 2.1
    assert abs(scales.mean() - 1.25) < 0.06  # uniform from 0.5 to 2
    assert 0.4 < (slopes < 0).mean() < 0.6


# --- the share of one class


@pytest.mark.parametrize(
    ("ids", "ignore_index", "share"),
    [
        ([0, 0, 0, 1], 255, 0.75),
        ([0, 255, 255, 1], 255, 0.5),
        ([255, 255], 255, 1.0),
        ([7, 7, 7, 255], 255, 1.0),
        ([0, -1, -1, 1], -1, 0.5),
        ([300, 300, 2, 1000], 1000, 2 / 3),
    ],
)
def test_largest_class_share_by_hand(ids: list[int], ignore_index: int, share: float) -> None:
    array = np.array([ids], np.uint8 if min(ids) >= 0 and max(ids) < 256 else np.int16)
    assert largest_share(array, ignore_index) == pytest.approx(share)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32", "int64", "float32", "float64"])
@pytest.mark.parametrize("num_bands", [None, 1, 2, 3, 4, 6])
def test_padding_is_that_of_numpy(num_bands: int | None, dtype: str) -> None:
    """Of a view, with a fill between whole numbers, which an assignment cuts off."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 120, (9, 8, num_bands) if num_bands else (9, 8)).astype(dtype)[1:6, 2:]
    fill = (123.7, 7.5, 200.2, 9.9, 3.3, 80.0)[:num_bands] if num_bands else -1 if "u" not in dtype else 255
    expected = np.stack(
        [
            np.pad(band, ((3, 0), (1, 2)), constant_values=np.asarray(value).astype(dtype))
            for band, value in zip(np.atleast_3d(pixels).transpose(2, 0, 1), np.atleast_1d(fill), strict=True)
        ],
        -1,
    ).reshape(8, 9, *pixels.shape[2:])
    padded = _pad(pixels, (3, 0, 1, 2), fill)
    assert padded.dtype == dtype
    np.testing.assert_array_equal(padded, expected)


def test_crop_filled_by_one_class_is_drawn_again() -> None:
    mask = np.zeros((100, 200), np.uint8)
    mask[:, 100:] = 1
    mask[50:] = 255  # not valid: must not count as a second class
    image = draw_image(0, 100, 200)

    def filled(ratio: float) -> float:
        transform = standard((60, 60), scale=(1.0, 1.0), cat_max_ratio=ratio)
        return float(np.mean([largest_share(transform(image, mask, seed)[1], 255) >= 0.75 for seed in range(150)]))

    assert filled(1.0) > 0.6  # 110 of 141 columns give such a crop
    assert filled(0.75) < 0.2  # (110 / 141) ** 10 = 0.08


# --- colours


def test_colour_matrix_by_hand() -> None:
    np.testing.assert_allclose(color_matrix(), np.hstack([np.eye(3), np.zeros((3, 1))]), atol=2e-3)
    np.testing.assert_allclose(color_matrix(hue_deg=360), color_matrix(), atol=1e-6)
    grey = np.array([90.0, 90, 90, 1])
    np.testing.assert_allclose(color_matrix(hue_deg=18, saturation=0.5) @ grey, [90] * 3, atol=0.1)
    np.testing.assert_allclose(color_matrix(contrast=2) @ grey, [52.5] * 3, atol=0.1)
    np.testing.assert_allclose(color_matrix(brightness=10) @ grey, [100] * 3, atol=0.1)
    colorless = color_matrix(saturation=0) @ np.array([100.0, 50, 200, 1])
    np.testing.assert_allclose(colorless, [0.213 * 100 + 0.715 * 50 + 0.072 * 200] * 3, atol=0.1)
    red, green, blue = color_matrix(hue_deg=18) @ np.array([255.0, 0, 0, 1])
    assert red > green > 0 > blue  # from red towards yellow


# --- seeds


def results(transform: TrainTransform, seeds: list[int]) -> dict[int, bytes]:
    image, mask = draw_image(0, 60, 80), draw_mask(0, 60, 80)
    return {seed: b"".join(part.tobytes() for part in transform(image, mask, seed)) for seed in seeds}


@pytest.mark.parametrize(
    ("options", "digests"),
    [
        ({}, ["2687cab3850c8425", "de7b66ef39472d28", "3e8bf2c834cb2193"]),
        (PLAIN, ["11b11b76fd560f8f", "625114abf87d3627", "e147ec2c4e8123e3"]),
        (
            {"photometric": 0.5, "resize_px": (50, 90), "hflip": 1.0},
            ["cd262799c3a99877", "5b669d89ba0eedb0", "71c669a6df02f624"],
        ),
        ({"photometric": 0.0, "scale": (0.2, 0.4)}, ["ff7bd957de43bfbe", "0d44d1dc070a1e7f", "d6454a225be2a256"]),
    ],
)
def test_samples_of_older_runs_are_repeated(options: dict, digests: list[str]) -> None:
    """The digests were recorded before `data.augment`: a run that began then must resume with the same samples."""
    found = results(standard((32, 40), **options), [0, 1, 12345678901234])
    assert [hashlib.sha256(content).hexdigest()[:16] for content in found.values()] == digests


def test_photometric_numbers_are_uniform_in_their_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, ...]] = []
    monkeypatch.setattr("segapp.datasets.augment.entries.color_matrix", lambda *numbers: drawn.append(numbers))

    def numbers(change: PhotometricChange) -> np.ndarray:
        drawn.clear()
        change.set_random_seed(0)
        found = [change.get_params() for _ in range(2000)]
        return np.array(drawn or [(each["brightness"], each["contrast"]) for each in found])

    of_rgb = ((0, 32), (1, 0.5), (1, 0.5), (0, 18))
    of_bands = ((0, 32 / 255), (1, 0.5))
    for ranges, expected in ((None, of_rgb), (((0.0, 1.0),), of_bands)):
        for strength in (1.0, 1.5):
            table = numbers(PhotometricChange(strength, ranges))
            for column, (middle, limit) in zip(table.T, expected, strict=True):
                away = (column - middle) / (limit * strength)
                assert np.abs(away).max() <= 1
                assert away.min() < -0.98
                assert away.max() > 0.98
                assert abs((away == 0).mean() - 0.5) < 0.05
                assert abs(away.mean()) < 0.05
        table = numbers(PhotometricChange(4.0, ranges))
        assert [column.min() for column in table.T][1:3] == [0.0] * (2 if ranges is None else 1)  # no negative factor


# --- albumentations with the numbers that were drawn; a PhotometricChange has no counterpart there

NEAREST = {"mask_interpolation": cv2.INTER_NEAREST_EXACT}
"""What a list gives transforms that resize, where albumentations would take INTER_NEAREST."""

OUTSIDE = {"fill_mask": 255}
"""What a list gives transforms that show what lies outside the image, where albumentations would take class 0."""

LISTED: dict[str, tuple[dict[str, Any], list[A.BasicTransform]]] = {
    "HorizontalFlip": ({}, [A.HorizontalFlip()]),
    "VerticalFlip": ({"p": 0.7}, [A.VerticalFlip()]),
    "RandomRotate90": ({}, [A.RandomRotate90()]),
    "Rotate": ({"limit": 30, "p": 1.0}, [A.Rotate(limit=30, **OUTSIDE)]),
    "Affine": (
        {"rotate": [-20, 20], "shear": [-5, 5], "p": 1.0},
        [A.Affine(rotate=(-20, 20), shear=(-5, 5), **OUTSIDE)],
    ),
    "Perspective": ({"p": 1.0}, [A.Perspective(**OUTSIDE)]),
    "ElasticTransform": ({"alpha": 40, "sigma": 5, "p": 1.0}, [A.ElasticTransform(alpha=40, sigma=5, **OUTSIDE)]),
    "RandomScale": ({"scale_limit": 0.4, "p": 1.0}, [A.RandomScale(scale_limit=0.4, **NEAREST)]),
    "RandomCrop": (
        {"height": 31, "width": 27, "pad_if_needed": True},
        [A.RandomCrop(31, 27, pad_if_needed=True, **OUTSIDE)],
    ),
    "PadIfNeeded": ({"min_height": 51, "min_width": 51}, [A.PadIfNeeded(51, 51, **OUTSIDE)]),
    "GaussNoise": ({"p": 1.0}, [A.GaussNoise()]),
    "RandomBrightnessContrast": ({}, [A.RandomBrightnessContrast()]),
    "CoarseDropout": ({"p": 1.0}, [A.CoarseDropout()]),
    "OneOf": (
        {"transforms": [{"Blur": {}}, {"RandomGamma": {}}, {"Sharpen": {}}]},
        [A.Blur(), A.RandomGamma(), A.Sharpen()],
    ),
}
"""The arguments in a list, and the transforms to call by hand; those of `OneOf` that were not chosen drew nothing."""


def called(transform: A.BasicTransform, drawn: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Apply a transform made by hand with what another one drew; its arguments are its own."""
    numbers = {key: value for key, value in drawn.items() if key not in ("interpolation", "fill", "fill_mask")}
    return transform.apply_with_params(transform.update_transform_params(numbers, data), **data)


def cropped(step: ScaledCrop, data: dict[str, Any], ignore_index: int) -> dict[str, Any]:
    """Crop, resize and pad by albumentations' transforms for it."""
    drawn = step.get_applied_params()
    (rows, columns), (above, below, left, right) = drawn["window"], drawn["padding"]
    return A.Compose([
        A.Crop(columns.start, rows.start, columns.stop, rows.stop),
        A.Resize(*drawn["shown_px"], cv2.INTER_LINEAR, **NEAREST),
        A.Pad((left, above, right, below), fill=(124, 116, 104), fill_mask=ignore_index),
    ])(**data)  # fmt: skip


def assert_same(found: tuple[np.ndarray, np.ndarray], expected: dict[str, Any]) -> None:
    np.testing.assert_array_equal(found[0], expected["image"])
    np.testing.assert_array_equal(found[1], expected["mask"])


def odd(least: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(least // 2, (most - 1) // 2).map(lambda half: 2 * half + 1)


seeds = st.integers(0, 2**62)


@settings(max_examples=60)
@given(
    size=st.tuples(odd(1, 97), odd(1, 97)),
    crop_px=st.tuples(odd(1, 61), odd(1, 61)),
    resize_px=st.none() | st.tuples(odd(3, 81), odd(3, 81)),
    ignore_index=st.sampled_from([255, -1]),
    seed=seeds,
)
def test_recipe_is_albumentations_with_the_drawn_numbers(
    size: tuple[int, int], crop_px: tuple[int, int], resize_px: Any, ignore_index: int, seed: int
) -> None:
    """With `resize_px` too, which changes the scale only: the source is resampled once."""
    entries = DataConfig(format="camvid", root="data", photometric=False).transforms
    transform = TrainTransform(crop_px, entries, ignore_index=ignore_index, resize_px=resize_px)
    image, mask = draw_image(seed % 100, *size), draw_mask(seed % 101, *size).astype(np.int16)
    mask[mask == 255] = ignore_index
    found = transform(image, mask, seed)
    crop, flip = transform.steps
    expected = cropped(crop, {"image": image, "mask": mask}, ignore_index)
    drawn = flip.get_applied_params()
    assert_same(found, called(A.HorizontalFlip(), drawn, expected) if drawn else expected)


@settings(max_examples=60)
@given(st.tuples(odd(9, 71), odd(9, 71)), st.lists(st.sampled_from(sorted(LISTED)), min_size=1, max_size=4), seeds)
def test_list_is_albumentations_with_the_drawn_numbers(size: tuple[int, int], names: list[str], seed: int) -> None:
    transform = TrainTransform((32, 32), [{name: LISTED[name][0]} for name in names])
    image, mask = draw_image(seed % 100, *size), draw_mask(seed % 101, *size)
    expected: dict[str, Any] = {"image": image.copy(), "mask": mask.copy()}
    found = transform(image, mask, seed)
    for name, step in zip(names, transform.steps, strict=True):
        for ours, by_hand in zip(getattr(step, "transforms", [step]), LISTED[name][1], strict=True):
            drawn = ours.get_applied_params()
            expected = called(by_hand, drawn, expected) if drawn else expected
    assert_same(found, expected)
