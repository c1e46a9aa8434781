"""The layout and light of a street, and its ground: road, pavements, shadows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import RandomState

from demo_drawing.canvas import Canvas
from demo_drawing.constants import GROUND, HEIGHT_PX, ROAD, SIDEWALK, WIDTH_PX, Array
from demo_drawing.texture import fractal, hash_cells, is_line, noise
from demo_drawing.towns import PAVING, choose, jitter


@dataclass(frozen=True)
class Street:
    """Layout and light of one scene."""

    seed: int
    left_m: float
    right_m: float
    """Where the road ends and the pavement begins, on either side of the camera (left is negative)."""
    pavement_m: tuple[float, float]
    """Width of the pavement on the left and on the right."""
    crossing_z: float
    """The middle of the side street."""
    sun: float
    """Brightness of faces turned to the left; faces turned to the right get 2 - sun."""
    shadow_m: float
    """The x at which the shadow of the houses ends."""
    road_rgb: Array
    paving_rgb: Array
    is_cobbled: bool
    has_zebra: bool

    def kerb(self, side: int) -> float:
        """Return the x of the kerb on the left (side -1) or on the right (side 1)."""
        return self.left_m if side < 0 else self.right_m

    def front(self, side: int) -> float:
        """Return the x of the house fronts."""
        return self.left_m - self.pavement_m[0] if side < 0 else self.right_m + self.pavement_m[1]

    def on_pavement(self, side: int, share: float) -> float:
        """Return the x of a position on the pavement: share 0 at the kerb, 1 at the house fronts."""
        return self.kerb(side) * (1 - share) + self.front(side) * share

    def light_on(self, side: int) -> float:
        """Return the brightness of a face turned to the left (side -1) or to the right (side 1)."""
        return self.sun if side < 0 else 2 - self.sun


def build_street(rng: RandomState) -> Street:
    """Return a street with random measures and light."""
    grey = rng.uniform(0.27, 0.42)
    return Street(
        seed=rng.randint(1 << 28),
        left_m=-rng.uniform(3.2, 6.5),
        right_m=rng.uniform(2.2, 4.2),
        pavement_m=(rng.uniform(3.0, 5.5), rng.uniform(2.8, 5.0)),
        crossing_z=rng.uniform(11, 20),
        sun=rng.uniform(0.68, 1.32),
        shadow_m=rng.uniform(-6, 6),
        road_rgb=jitter(rng, (grey, grey, grey * 1.03), 0.06),
        paving_rgb=choose(rng, PAVING, 0.1),
        is_cobbled=rng.rand() < 0.25,
        has_zebra=rng.rand() < 0.5,
    )


def draw_ground(canvas: Canvas, street: Street) -> None:
    """Paint road, pavements, a side street and their shadows; courtyards behind the houses are `ground`, so ignored."""
    camera = canvas.camera
    window = canvas.window(0, camera.horizon_v + 0.5, WIDTH_PX, HEIGHT_PX)
    z = camera.focal_px * camera.height_m / np.maximum(canvas.v[window] - camera.horizon_v, 0.3)
    x = (canvas.u[window] - camera.center_u) * z / camera.focal_px
    detail = np.clip(1.15 - z / 28, 0, 1)  # texture finer than a pixel fades instead of flickering
    is_road = ((x > street.left_m) & (x < street.right_m)) | (np.abs(z - street.crossing_z) < 3.5)
    rgb = np.where(is_road[..., None], road_rgb(street, x, z, detail), paving_rgb(street, x, z, detail))
    of_houses = 0.28 * np.clip((x - street.shadow_m) * (-2 if street.sun > 1 else 2), 0, 1)
    of_trees = 0.20 * np.clip(3 * fractal(x / 2.5, z / 2.5, street.seed + 60) - 0.8, 0, 1)
    rgb = rgb * (1 - np.maximum(of_houses, of_trees))[..., None]
    canvas.paint(window, is_road, rgb, z, ROAD)
    canvas.paint(window, ~is_road, rgb, z, SIDEWALK)
    is_courtyard = ~is_road & ((x < street.front(-1)) | (x > street.front(1)))
    canvas.label[window][is_courtyard] = GROUND


def road_rgb(street: Street, x: Array, z: Array, detail: Array) -> Array:
    """Return the colour of asphalt or cobbles, with patches, drain covers, lane marks and a zebra crossing."""
    seed, middle = street.seed, (street.left_m + street.right_m) / 2
    shade = 1 + detail * (0.16 * fractal(x * 5, z * 5, seed, 2) + 0.10 * noise(x * 1.1, z * 0.25, seed + 7))
    if street.is_cobbled:
        row = np.floor(z / 0.35)
        along = x + 0.11 * np.mod(row, 2)
        joint = is_line(z, 0.35, 0.07) | is_line(along, 0.30, 0.06)
        shade += detail * np.where(joint, -0.30, 0.22 * hash_cells(np.floor(along / 0.30), row, seed + 8) - 0.11)
    shade = np.where(noise(x / 3, z / 6, seed + 9) > 0.45, shade * 0.86, shade)
    marks = (np.abs(x - middle) < 0.10) & is_line(z + seed % 5, 6.0, 3.2)
    marks |= np.abs(x - street.left_m - 0.45) < 0.07
    if street.has_zebra:
        marks |= (np.abs(z - street.crossing_z + 5.6) < 1.5) & is_line(x + 50, 1.0, 0.5)
    marks &= (np.abs(z - street.crossing_z) > 3.7) & (noise(x * 3, z * 3, seed + 10) > -0.75)  # worn off in places
    cover = (x - middle - 1.1) ** 2 + (np.mod(z + seed % 11, 13) - 6) ** 2 < 0.16
    rgb = street.road_rgb * np.where(cover, shade * 0.55, shade)[..., None]
    return np.where(marks[..., None], 0.25 * rgb + 0.62, rgb)


def paving_rgb(street: Street, x: Array, z: Array, detail: Array) -> Array:
    """Return the colour of paving slabs, each slightly different, with joints and a kerb of pale stone."""
    seed, pitch = street.seed, 0.55 + 0.08 * (street.seed % 7)
    slab = 0.20 * hash_cells(np.floor(x / pitch), np.floor(z / pitch), seed + 1) - 0.10
    joint = is_line(x, pitch, 0.07) | is_line(z, pitch, 0.08)
    shade = 1 + detail * (np.where(joint, -0.28, slab) + 0.10 * fractal(x * 3, z * 3, seed + 2, 2))
    to_street = np.minimum(np.abs(x - street.left_m), np.abs(x - street.right_m))
    kerb = np.minimum(to_street, np.abs(z - street.crossing_z) - 3.5) < 0.3
    rgb = street.paving_rgb * shade[..., None]
    return np.where(kerb[..., None], 0.35 * rgb + 0.48, rgb)
