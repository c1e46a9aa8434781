"""Trees, hedges and the foliage of both."""

from __future__ import annotations

import numpy as np
from numpy.random import RandomState

from demo_drawing.canvas import Billboard, Canvas
from demo_drawing.constants import VEGETATION
from demo_drawing.texture import fractal, noise
from demo_drawing.towns import LEAVES, choose, jitter


def draw_foliage(
    canvas: Canvas, rng: RandomState, center: tuple[float, float], radii: tuple[float, float], z: float
) -> None:
    """Paint leaves in a ragged ellipse (pixels), bright above and dark below."""
    (u, v), (radius_u, radius_v) = center, radii
    window = canvas.window(u - radius_u, v - radius_v, u + radius_u, v + radius_v)
    du, dv = (canvas.u[window] - u) / radius_u, (canvas.v[window] - v) / radius_v
    seed, scale = rng.randint(1 << 30), max(1.6, canvas.camera.scale_at(z) * 0.28)
    leaves = fractal(canvas.u[window] / scale, canvas.v[window] / scale, seed, 3)
    clumps = noise(canvas.u[window] / scale / 3.5, canvas.v[window] / scale / 3.5, seed + 9)
    inside = du**2 + dv**2 + 0.35 * clumps + 0.25 * leaves < 0.72
    shade = np.clip(1 - 0.35 * dv + 0.55 * leaves + 0.25 * clumps, 0.25, 1.9)
    canvas.paint(window, inside, choose(rng, LEAVES, 0.12) * shade[..., None], z, VEGETATION)


def draw_tree(canvas: Canvas, rng: RandomState, x: float, z: float) -> None:
    """Paint trunk and crown; both are vegetation, as in Cityscapes."""
    scale, height = canvas.camera.scale_at(z), rng.uniform(4.0, 7.5)
    trunk = Billboard(canvas, x, z, VEGETATION)
    trunk.bar(-0.13, 0.13, 0, height * 0.6, jitter(rng, (0.32, 0.25, 0.19), 0.15), 0.25)
    for _ in range(rng.randint(2, 5)):
        u, v = canvas.camera.project([(x + rng.uniform(-0.9, 0.9), height * rng.uniform(0.62, 0.9), z)])[0]
        draw_foliage(canvas, rng, (u, v), (scale * rng.uniform(1.3, 2.1), scale * rng.uniform(1.1, 1.8)), z)


def draw_hedge(canvas: Canvas, rng: RandomState, x: float, z: float) -> None:
    """Paint one section of a hedge."""
    scale, height = canvas.camera.scale_at(z), rng.uniform(0.9, 1.5)
    u, v = canvas.camera.project([(x, height * 0.45, z)])[0]
    draw_foliage(canvas, rng, (u, v), (scale * 1.7, scale * height * 0.8), z)
