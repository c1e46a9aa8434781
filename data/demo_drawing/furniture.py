"""Street furniture: fences, lamps, traffic lights, signs, litter bins."""

from __future__ import annotations

import math

import numpy as np
from numpy.random import RandomState

from demo_drawing.canvas import Billboard, Canvas, project_side_plane
from demo_drawing.constants import FENCE, POLE, STATIC, TRAFFIC_LIGHT, TRAFFIC_SIGN, Array, Rgb
from demo_drawing.texture import hash_cells, is_line
from demo_drawing.towns import choose, jitter


def draw_fence(canvas: Canvas, rng: RandomState, x: float, z0: float, z1: float, is_railing: bool) -> None:
    """Paint one panel along the street: planks, or a railing, whose gaps are labelled fence too."""
    plane = project_side_plane(canvas, x, z0, z1, 1.3)
    z, y = plane.z, plane.y
    if is_railing:
        canvas.label[plane.window][plane.inside] = FENCE
        bars = plane.inside & (is_line(z, 0.32, 0.17) | (np.abs(y - 1.22) < 0.08) | (np.abs(y - 0.2) < 0.06))
        canvas.paint(plane.window, bars, jitter(rng, (0.88, 0.88, 0.84), 0.1), z, FENCE)
    else:
        plank = hash_cells(np.floor(z / 0.24), np.zeros(z.shape), 4) - 0.5
        shade = 1 + np.where(z < 25, 0.5 * plank, 0) - 0.35 * is_line(z, 0.24, 0.05)
        canvas.paint(plane.window, plane.inside, np.array([0.50, 0.36, 0.24]) * shade[..., None], z, FENCE)


def draw_lamp(canvas: Canvas, rng: RandomState, x: float, z: float) -> None:
    """Paint a street lamp whose arm reaches over the road."""
    rgb, height = jitter(rng, (0.34, 0.35, 0.36), 0.25), rng.uniform(4.6, 6.4)
    reach = -math.copysign(rng.uniform(0.8, 1.5), x)
    lamp = Billboard(canvas, x, z, POLE)
    lamp.post(height, rgb, 0.30)
    lamp.post(0.6, rgb * 0.8, 0.44)
    lamp.limb((0, height - 0.06), (reach, height + 0.15), 0.26, rgb)
    lamp.limb((reach * 0.7, height + 0.1), (reach * 1.25, height + 0.16), 0.44, rgb * 1.25)


def draw_traffic_light(canvas: Canvas, rng: RandomState, x: float, z: float) -> None:
    """Paint a mast with a dark box; one of its three lamps is lit."""
    Billboard(canvas, x, z, POLE).post(2.7, jitter(rng, (0.42, 0.43, 0.42), 0.2), 0.28)
    box = Billboard(canvas, x, z - 0.05, TRAFFIC_LIGHT)
    box.bar(-0.42, 0.42, 2.3, 4.1, jitter(rng, (0.13, 0.15, 0.14), 0.3))
    lit = rng.randint(3)
    for i, rgb in enumerate(((0.20, 0.86, 0.46), (0.98, 0.78, 0.20), (0.96, 0.22, 0.16))):
        box.disc(0, 2.65 + 0.55 * i, 0.23, np.array(rgb) * (1 if i == lit else 0.28))


def draw_sign(canvas: Canvas, rng: RandomState, x: float, z: float) -> None:
    """Paint a post with one of six signs."""
    y, r = rng.uniform(2.2, 3.0), rng.uniform(0.45, 0.58)
    red, white, blue = (jitter(rng, rgb, 0.1) for rgb in ((0.80, 0.14, 0.14), (0.93, 0.93, 0.92), (0.12, 0.30, 0.68)))
    Billboard(canvas, x, z, POLE).post(y, jitter(rng, (0.55, 0.56, 0.57), 0.2))
    sign = Billboard(canvas, x, z - 0.05, TRAFFIC_SIGN)

    def plate(num_corners: int, radius: float, turn: float, rgb: Array | Rgb) -> None:
        angles = [2 * math.pi * (i + turn) / num_corners for i in range(num_corners)]
        sign.polygon([(radius * math.cos(a), y + radius * math.sin(a)) for a in angles], rgb)

    match rng.randint(6):
        case 0:  # no entry
            sign.disc(0, y, r, red)
            sign.bar(-0.62 * r, 0.62 * r, y - 0.16 * r, y + 0.16 * r, white)
        case 1:  # speed limit
            sign.disc(0, y, r, red)
            sign.disc(0, y, r * 0.72, white)
            sign.bar(-0.3 * r, 0.3 * r, y - 0.28 * r, y + 0.28 * r, (0.25, 0.25, 0.27))
        case 2:  # danger
            plate(3, r * 1.25, 0.75, red)
            plate(3, r * 0.72, 0.75, white)
        case 3:  # parking
            sign.bar(-r, r, y - r, y + r, blue)
            sign.bar(-0.35 * r, 0.2 * r, y - 0.6 * r, y + 0.6 * r, white)
        case 4:  # priority road
            plate(4, r * 1.2, 0.0, white)
            plate(4, r * 0.85, 0.0, (0.95, 0.76, 0.16))
        case _:  # stop
            plate(8, r * 1.1, 0.5, red)
            sign.bar(-0.75 * r, 0.75 * r, y - 0.2 * r, y + 0.2 * r, white)


def draw_bin(canvas: Canvas, rng: RandomState, x: float, z: float) -> None:
    """Paint a litter bin, labelled `static`, so ignored."""
    rgb = choose(rng, ((0.32, 0.36, 0.34), (0.75, 0.42, 0.14)), 0.2)
    litter_bin = Billboard(canvas, x, z, STATIC)
    litter_bin.polygon([(-0.22, 0), (0.22, 0), (0.28, 0.85), (-0.28, 0.85)], rgb, 0.2)
    litter_bin.bar(-0.31, 0.31, 0.85, 0.97, rgb * 0.6)
