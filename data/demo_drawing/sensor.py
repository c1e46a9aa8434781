"""Lens and sensor: from the oversampled canvas to the pixels of an image."""

from __future__ import annotations

import numpy as np
from numpy.random import RandomState

from demo_drawing.canvas import Canvas
from demo_drawing.constants import COLOUR_STEP, HEIGHT_PX, OVERSAMPLING, WIDTH_PX, Array, Labels


def blur(rgb: Array) -> Array:
    """Return the average of each sample and its neighbours, weighted 1 2 1 in both directions."""
    for axis in (0, 1):
        before, after = (np.concatenate(parts, axis) for parts in _shifted(rgb, axis))
        rgb = 0.25 * before + 0.5 * rgb + 0.25 * after
    return rgb


def _shifted(rgb: Array, axis: int) -> tuple[list[Array], list[Array]]:
    """Return the parts of the array shifted by one in either direction along the axis, with its edge repeated."""
    first, last = np.split(rgb, [1], axis), np.split(rgb, [-1], axis)
    return [first[0], last[0]], [first[1], last[1]]


def finish(canvas: Canvas, rng: RandomState) -> tuple[Labels, Labels]:
    """Return pixels and label ids after blur, vignette, exposure, white balance, contrast and noise."""
    rgb = canvas.colour
    for _ in range(rng.randint(1, 3)):
        rgb = blur(rgb)
    rgb = rgb.reshape(HEIGHT_PX, OVERSAMPLING, WIDTH_PX, OVERSAMPLING, 3).mean(axis=(1, 3))
    v, u = np.mgrid[-1 : 1 : HEIGHT_PX * 1j, -1 : 1 : WIDTH_PX * 1j]
    vignette = 1 - rng.uniform(0.03, 0.14) * (u**2 + v**2)
    rgb = rgb * vignette[..., None] * rng.uniform(0.95, 1.05, 3) * rng.uniform(0.88, 1.1)
    rgb = 0.5 + (rgb - 0.5) * rng.uniform(0.92, 1.15)
    rgb = rgb + rng.uniform(0.003, 0.007) * rng.standard_normal((HEIGHT_PX, WIDTH_PX, 1))
    pixels = np.clip(np.rint(rgb * (255 / COLOUR_STEP)), 0, 255 // COLOUR_STEP) * COLOUR_STEP
    return pixels.astype(np.uint8), canvas.label[1::OVERSAMPLING, 1::OVERSAMPLING].copy()
