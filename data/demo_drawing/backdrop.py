"""Sky and skyline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import RandomState

from demo_drawing.canvas import Canvas
from demo_drawing.constants import BUILDING, HEIGHT_PX, SKY, WIDTH_PX, Array, Rgb
from demo_drawing.plants import draw_foliage
from demo_drawing.texture import fractal
from demo_drawing.towns import COPPER, STONE, Town, choose, jitter


def draw_sky(canvas: Canvas, rng: RandomState, sky: tuple[Rgb, Rgb]) -> None:
    """Paint a gradient from zenith to horizon, and clouds."""
    zenith, horizon = (jitter(rng, rgb, 0.08) for rgb in sky)
    height = np.clip(1 - canvas.v / canvas.camera.horizon_v, 0, 1)[..., None]
    cloud = fractal(canvas.u / 40, canvas.v / 14, rng.randint(1 << 30), 4) + rng.uniform(-0.25, 0.45)
    density = np.clip(cloud * 2.2, 0, 0.85)[..., None]
    white = np.clip(horizon * 0.4 + 0.62 - 0.12 * density, 0, 1)
    rgb = (horizon * (1 - height) + zenith * height) * (1 - density) + white * density
    canvas.paint(canvas.window(0, 0, WIDTH_PX, HEIGHT_PX), np.ones(canvas.u.shape, dtype=bool), rgb, 0.0, SKY)


def draw_skyline(canvas: Canvas, rng: RandomState, town: Town) -> None:
    """Paint far houses, woods and, in some scenes, a church on the horizon, through haze."""
    foot, far_m = canvas.camera.horizon_v + 1, 75.0

    def fill(corners: Sequence[tuple[float, float]], rgb: Array, grain: float = 0) -> None:
        canvas.polygon(np.array(corners), rgb, far_m, BUILDING, grain)

    u = 0.0
    while u < WIDTH_PX:
        width, height = rng.uniform(8, 26), rng.uniform(4, 12)
        end, top = u + width, foot - height
        if rng.rand() < town.green:
            draw_foliage(canvas, rng, (u + width / 2, foot - height * 0.4), (width * 0.6, height * 0.7), far_m)
        else:
            fill([(u, foot), (end, foot), (end, top), (u, top)], choose(rng, town.walls), 0.12)
            ridge, inset = top - rng.uniform(1, 4), 0.3 * width
            fill([(u - 1, top), (end + 1, top), (end - inset, ridge), (u + inset, ridge)], choose(rng, town.roofs))
        u += width * rng.uniform(0.7, 1.1)
    if rng.rand() < 0.4:
        u, width, top = rng.uniform(0.2, 0.8) * WIDTH_PX, rng.uniform(4, 7), foot - rng.uniform(15, 23)
        fill([(u, foot), (u + width, foot), (u + width, top), (u, top)], jitter(rng, STONE, 0.1))
        fill([(u - 0.5, top), (u + width + 0.5, top), (u + width / 2, top - 2.2 * width)], jitter(rng, COPPER, 0.1))
