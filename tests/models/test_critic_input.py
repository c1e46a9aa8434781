"""The critic's input against means and interpolations by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segapp.models import critic_size
from segapp.models.critic import critic_input

ONTO_FOUR = torch.tensor([[1.0, 0.0], [0.75, 0.25], [0.25, 0.75], [0.0, 1.0]], dtype=torch.float64)
"""Weights of 2 values for 4 places between their centers, as bilinear interpolation has them."""


@pytest.mark.parametrize(("crop_px", "size"), [((64, 65), (8, 8)), ((63, 7), (7, 1))])
def test_grid_has_a_cell_for_8_pixels(crop_px, size):
    assert critic_size(crop_px) == size


def test_images_and_probabilities_are_averaged_over_cells():
    torch.manual_seed(0)
    images, logits = torch.randn(2, 3, 8, 12, dtype=torch.float64), torch.randn(2, 5, 4, 6, dtype=torch.float64)
    found = critic_input(images, logits, (2, 3))
    powers = np.exp(logits.numpy())
    probabilities = powers / powers.sum(1, keepdims=True)
    expected = [
        images.numpy().reshape(2, 3, 2, 4, 3, 4).mean((3, 5)),
        probabilities.reshape(2, 5, 2, 2, 3, 2).mean((3, 5)),
    ]
    np.testing.assert_allclose(found.numpy(), np.concatenate(expected, 1), atol=1e-12)


@pytest.mark.parametrize("size", [(2, 2), (4, 2), (2, 4)])
def test_probabilities_below_the_grid_are_interpolated(size):
    torch.manual_seed(0)
    logits = torch.randn(1, 2, *size, dtype=torch.float64)
    found = critic_input(torch.zeros(1, 1, 8, 8), logits, (4, 4))[:, 1:]
    rows, columns = (ONTO_FOUR if each == 2 else torch.eye(4, dtype=torch.float64) for each in size)
    np.testing.assert_allclose(found.numpy(), (rows @ logits.softmax(1) @ columns.T).numpy(), atol=1e-12)


def test_half_precision_is_widened():
    assert critic_input(torch.zeros(1, 3, 8, 8).half(), torch.zeros(1, 2, 8, 8).half(), (1, 1)).dtype == torch.float32
