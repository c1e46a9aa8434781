"""Augmentation against albumentations called by hand with the numbers that were drawn: equal pixel by pixel.

A `PhotometricChange` has no counterpart there: `test_augment.py` compares it with numpy.
"""

from typing import Any

import albumentations as A
import cv2
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from segapp.config import DataConfig
from segapp.datasets.augment import TrainTransform
from segapp.datasets.augment.crop import MEAN_COLOR, ScaledCrop
from tests.support.drawn_data import draw_image, draw_mask

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
        A.Pad((left, above, right, below), fill=MEAN_COLOR, fill_mask=ignore_index),
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
