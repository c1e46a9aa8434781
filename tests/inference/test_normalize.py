"""Normalisation of stored images, compared with numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segapp.models.normalizer import Normalizer

RANGES = ((-5.0, 4000.0), (100.0, 101.5), (0.0, 65535.0), (0.0, 1.0))
MEAN, STD = (0.1, 0.4, 0.5, 0.45), (0.2, 0.3, 0.25, 0.22)


def test_rgb_of_8_bits_equals_the_arithmetic_before_bit_for_bit() -> None:
    images = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    scale = torch.tensor([1 / (255 * s) for s in std]).view(1, 3, 1, 1)
    shift = torch.tensor([m / s for m, s in zip(mean, std, strict=True)]).view(1, 3, 1, 1)
    assert torch.equal(Normalizer(mean, std)(images), images.float() * scale - shift)


@pytest.mark.parametrize("dtype", ["uint16", "int16", "float32"])
def test_bands_match_numpy_in_float64(dtype: str) -> None:
    values = np.random.default_rng(0).uniform(-100, 9000, (2, 4, 5, 7))
    stored = (values.clip(0) if dtype == "uint16" else values).astype(dtype)
    images = torch.from_numpy(stored.copy())
    found = Normalizer(MEAN, STD, ranges=RANGES)(images)
    low, high = np.array(RANGES).T.reshape(2, 1, 4, 1, 1)
    mean, std = (np.array(each).reshape(1, 4, 1, 1) for each in (MEAN, STD))
    expected = (((stored.astype(np.float64) - low) / (high - low)).clip(0, 1) - mean) / std
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-5)
    np.testing.assert_array_equal(images.numpy(), stored)


def test_pixels_without_data_become_the_low_end_of_the_range() -> None:
    values = [float("nan"), float("inf"), -float("inf"), -3.4e38]
    images = torch.tensor(values).view(1, 1, 1, 4)
    found = Normalizer([0.0], [1.0], ranges=[(0.0, 10.0)])(images)
    assert found.flatten().tolist() == [0.0, 1.0, 0.0, 0.0]
