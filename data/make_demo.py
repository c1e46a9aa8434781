"""Draws the demo data set: street scenes of three toy towns, in the Cityscapes layout.

    python data/make_demo.py [--out DIR]

writes OUT/leftImg8bit/{train,val}/<city>/<city>_<seq>_<frame>_leftImg8bit.png and
OUT/gtFine/{train,val}/<city>/<city>_<seq>_<frame>_gtFine_labelIds.png, OUT being `demo` beside this file if left out.

Each scene is a small three-dimensional world (metres; x to the right, y up, z ahead) seen by one pinhole camera and
painted back to front, colours and labels together. Texture is a function of the place in the world, colours overlap
between the classes (grey cars, green house fronts, red paving), and the town of `val` is not one of `train`: what
tells the classes apart is texture, shape and context. Labels are Cityscapes *label ids*, the ignored ones included.

Needs numpy and Pillow. The same pixels come out on every machine: shapes are filled here and not by a library, and the
random numbers are those of `RandomState`, whose streams numpy has frozen.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[np.float64]
Labels = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Window = tuple[slice, slice]
Point = tuple[float, float, float]
Rgb = tuple[float, float, float]

WIDTH_PX, HEIGHT_PX = 256, 128
OVERSAMPLING = 2  # drawn at twice the size, then averaged: smooth edges
COLOUR_STEP = 5  # colours are multiples of 5, which halves the PNG files and which nobody sees under the noise

EGO_VEHICLE, RECTIFICATION_BORDER, STATIC, DYNAMIC, GROUND = 1, 2, 4, 5, 6  # ignored in training and evaluation
ROAD, SIDEWALK, BUILDING, FENCE, POLE, TRAFFIC_LIGHT, TRAFFIC_SIGN = 7, 8, 11, 13, 17, 19, 20
VEGETATION, SKY, PERSON, CAR = 21, 23, 24, 26


# ---- towns and colours ----------------------------------------------------------------------------------------------

BLUE_SKY: tuple[Rgb, Rgb] = (0.30, 0.52, 0.86), (0.78, 0.87, 0.95)  # at the zenith, at the horizon
OVERCAST: tuple[Rgb, Rgb] = (0.62, 0.66, 0.71), (0.86, 0.87, 0.87)
EVENING: tuple[Rgb, Rgb] = (0.46, 0.50, 0.76), (0.98, 0.76, 0.58)
MORNING: tuple[Rgb, Rgb] = (0.52, 0.66, 0.82), (0.97, 0.91, 0.80)

CREAM, ROSE, OCHRE, MINT = (0.90, 0.84, 0.70), (0.84, 0.62, 0.58), (0.82, 0.66, 0.38), (0.66, 0.78, 0.66)
BRICK, CONCRETE, SKY_BLUE, STONE = (0.58, 0.34, 0.28), (0.62, 0.61, 0.58), (0.62, 0.74, 0.84), (0.72, 0.66, 0.58)
TILE, SLATE, COPPER = (0.60, 0.30, 0.22), (0.30, 0.32, 0.36), (0.40, 0.58, 0.52)
PAVING = ((0.66, 0.64, 0.61), (0.68, 0.52, 0.44), (0.72, 0.66, 0.54), (0.62, 0.65, 0.68))
LEAVES = ((0.26, 0.42, 0.18), (0.33, 0.45, 0.20), (0.18, 0.34, 0.20), (0.46, 0.44, 0.20), (0.58, 0.38, 0.16))
SKIN = ((0.92, 0.74, 0.62), (0.78, 0.56, 0.42), (0.48, 0.32, 0.24))
HAIR = ((0.16, 0.12, 0.10), (0.45, 0.32, 0.18), (0.70, 0.68, 0.64))
COATS = ((0.15, 0.14, 0.14), (0.45, 0.30, 0.18), (0.85, 0.78, 0.66))  # of dogs
CLOTHES = (
    (0.78, 0.18, 0.18), (0.22, 0.32, 0.66), (0.92, 0.88, 0.80), (0.90, 0.62, 0.14),
    (0.16, 0.50, 0.50), (0.58, 0.26, 0.56), (0.26, 0.26, 0.30),
)  # fmt: skip
PAINTS = (
    (0.75, 0.12, 0.12), (0.16, 0.26, 0.55), (0.90, 0.90, 0.89), (0.12, 0.12, 0.14), (0.55, 0.57, 0.60),
    (0.36, 0.37, 0.39), (0.86, 0.68, 0.16), (0.24, 0.42, 0.32), (0.60, 0.70, 0.78), (0.45, 0.24, 0.18),
)  # fmt: skip


@dataclass(frozen=True)
class Town:
    """What the scenes of one town have in common; every scene draws its own values from these."""

    name: str
    split: str
    num_scenes: int
    seed: int
    walls: Sequence[Rgb]
    roofs: Sequence[Rgb]
    skies: Sequence[tuple[Rgb, Rgb]]
    camera_height_m: tuple[float, float]
    green: float
    """Share of the street front that is trees and hedges."""


TOWNS = (
    Town(
        "rosenfurt", "train", 36, 11, (CREAM, ROSE, OCHRE, STONE, SKY_BLUE), (TILE, SLATE),
        (BLUE_SKY, MORNING, EVENING, OVERCAST), camera_height_m=(1.9, 2.7), green=0.30,
    ),
    Town(
        "tannwald", "train", 36, 22, (BRICK, CONCRETE, MINT, STONE, CREAM), (SLATE, COPPER, TILE),
        (OVERCAST, EVENING, BLUE_SKY), camera_height_m=(1.8, 2.5), green=0.45,
    ),
    Town(
        "muehlbruck", "val", 20, 33, (OCHRE, BRICK, SKY_BLUE, MINT, CONCRETE), (TILE, COPPER),
        (MORNING, BLUE_SKY, EVENING, OVERCAST), camera_height_m=(1.9, 2.6), green=0.38,
    ),
)  # fmt: skip


def choose(rng: RandomState, colours: Sequence[Rgb], amount: float = 0.15) -> Array:
    """One of the colours, a little different each time."""
    return jitter(rng, colours[rng.randint(len(colours))], amount)


def jitter(rng: RandomState, rgb: Rgb | Array, amount: float) -> Array:
    """The colour, a little different."""
    brightness, tint = rng.uniform(1 - amount, 1 + amount), rng.uniform(-amount, amount, 3)
    return np.clip(np.asarray(rgb) * brightness + 0.4 * tint, 0, 1)


# ---- texture: functions of the place --------------------------------------------------------------------------------


def hash_cells(x: Array, y: Array, seed: int) -> Array:
    """One number in [0, 1) for each integer cell (x, y); an integer hash, so it is the same everywhere."""
    h = x.astype(np.int64).astype(np.uint32) * np.uint32(0x9E3779B1)
    h ^= y.astype(np.int64).astype(np.uint32) * np.uint32(0x85EBCA77)
    h ^= np.uint32(seed * 0xC2B2AE3D & 0xFFFFFFFF)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x2C1B3C6D)
    h = (h ^ (h >> np.uint32(12))) * np.uint32(0x297A2D39)
    return np.asarray((h ^ (h >> np.uint32(15))) / 2.0**32)


def noise(x: Array, y: Array, seed: int) -> Array:
    """Smooth noise in [-1, 1] with features about one unit wide."""
    x0, y0 = np.floor(x), np.floor(y)
    s, t = x - x0, y - y0
    s, t = s * s * (3 - 2 * s), t * t * (3 - 2 * t)
    below = hash_cells(x0, y0, seed) * (1 - s) + hash_cells(x0 + 1, y0, seed) * s
    above = hash_cells(x0, y0 + 1, seed) * (1 - s) + hash_cells(x0 + 1, y0 + 1, seed) * s
    return 2 * (below * (1 - t) + above * t) - 1


def fractal(x: Array, y: Array, seed: int, octaves: int = 3) -> Array:
    """Noise on several scales, each half as wide and half as strong as the one before; in [-1, 1]."""
    total = np.zeros(x.shape)
    for i in range(octaves):
        total += 0.5**i * noise(x * 2**i, y * 2**i, seed + i)
    return total / (2 - 0.5 ** (octaves - 1))


def is_line(position: Array, pitch: float, width: float) -> Mask:
    """True within `width` after every multiple of `pitch`."""
    return np.mod(position, pitch) < width


# ---- camera and canvas ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Camera:
    """A pinhole camera looking along z; u and v are pixels of the finished picture."""

    focal_px: float
    center_u: float
    horizon_v: float
    height_m: float

    def project(self, points: Sequence[Point]) -> Array:
        """(N, 2) places (u, v) of world points (x, y, z) with z > 0."""
        x, y, z = np.asarray(points, dtype=np.float64).T
        u = self.center_u + self.focal_px * x / z
        v = self.horizon_v + self.focal_px * (self.height_m - y) / z
        return np.stack([u, v], axis=1)

    def scale_at(self, z: float) -> float:
        """Pixels per metre at distance z."""
        return self.focal_px / z


@dataclass
class Canvas:
    """Colours (H, W, 3) in [0, 1] and label ids (H, W), oversampled; u and v are each sample's place in the picture."""

    camera: Camera
    haze: Array
    """The colour of the air."""
    haze_m: float
    """The distance after which a third of a colour is left."""
    colour: Array = field(init=False)
    label: Labels = field(init=False)
    u: Array = field(init=False)
    v: Array = field(init=False)

    def __post_init__(self) -> None:
        height, width = HEIGHT_PX * OVERSAMPLING, WIDTH_PX * OVERSAMPLING
        self.colour = np.zeros((height, width, 3))
        self.label = np.zeros((height, width), dtype=np.uint8)
        v, u = np.mgrid[0:height, 0:width]
        self.u, self.v = (u + 0.5) / OVERSAMPLING, (v + 0.5) / OVERSAMPLING

    def window(self, u0: float, v0: float, u1: float, v1: float) -> Window:
        """The part of the canvas that holds everything between the corners (u0, v0) and (u1, v1)."""
        rows, columns = self.label.shape
        top, bottom = (min(max(math.floor(v * OVERSAMPLING), 0), rows) for v in (v0, v1 + 1))
        left, right = (min(max(math.floor(u * OVERSAMPLING), 0), columns) for u in (u0, u1 + 1))
        return slice(top, bottom), slice(left, right)

    def window_around(self, points: Array) -> Window:
        """The part of the canvas that holds these (N, 2) places."""
        (u0, v0), (u1, v1) = points.min(axis=0), points.max(axis=0)
        return self.window(u0, v0, u1, v1)

    def paint(
        self, window: Window, where: Mask, rgb: Array, z: Array | float, label: int | None, alpha: float = 1
    ) -> None:
        """Colour the samples `where` (a mask over the window), seen through z metres of air.

        Args:
            window: a part of the canvas.
            where: which of its samples.
            rgb: one colour, or one for each sample of the window.
            z: one distance, or one for each sample of the window.
            label: their new label id; None keeps what they have.
            alpha: 1 covers what was there, less lets it shine through.
        """
        clear = np.exp(-np.asarray(z, dtype=np.float64) / self.haze_m)[..., None]
        seen = np.clip(np.broadcast_to(rgb * clear + self.haze * (1 - clear), (*where.shape, 3)), 0, 1)
        part = self.colour[window]
        part[where] = part[where] * (1 - alpha) + seen[where] * alpha
        if label is not None:
            self.label[window][where] = label

    def polygon(
        self, corners: Array, rgb: Rgb | Array, z: float, label: int | None, grain: float = 0, alpha: float = 1
    ) -> None:
        """Fill a convex polygon given by its (N, 2) corners in pixels; `grain` is the strength of a coarse texture."""
        window = self.window_around(corners)
        u, v = self.u[window], self.v[window]
        following = np.roll(corners, -1, axis=0)
        area = float(np.sum(corners[:, 0] * following[:, 1] - following[:, 0] * corners[:, 1]))
        inside = np.ones(u.shape, dtype=bool)
        for (u0, v0), (u1, v1) in zip(corners, following, strict=True):
            inside &= ((u1 - u0) * (v - v0) - (v1 - v0) * (u - u0)) * math.copysign(1, area) >= 0
        shade = 1 + grain * noise(u * 0.8, v * 0.8, 5)[..., None]
        self.paint(window, inside, np.asarray(rgb) * shade, z, label, alpha)

    def ellipse(self, center: Array, radii: tuple[float, float], rgb: Rgb | Array, z: float, label: int | None) -> None:
        """Fill an ellipse given in pixels."""
        (u, v), (radius_u, radius_v) = center, radii
        window = self.window(u - radius_u, v - radius_v, u + radius_u, v + radius_v)
        inside = ((self.u[window] - u) / radius_u) ** 2 + ((self.v[window] - v) / radius_v) ** 2 <= 1
        self.paint(window, inside, np.asarray(rgb), z, label)


@dataclass(frozen=True)
class Billboard:
    """A flat thing facing the camera: shapes are given in metres beside and above its foot (x, 0, z)."""

    canvas: Canvas
    x: float
    z: float
    label: int

    def polygon(self, corners: Sequence[tuple[float, float]], rgb: Rgb | Array, grain: float = 0) -> None:
        """A convex polygon with corners (metres to the right, metres up)."""
        points = self.canvas.camera.project([(self.x + dx, y, self.z) for dx, y in corners])
        self.canvas.polygon(points, rgb, self.z, self.label, grain)

    def bar(self, dx0: float, dx1: float, y0: float, y1: float, rgb: Rgb | Array, grain: float = 0) -> None:
        """An upright rectangle."""
        self.polygon([(dx0, y0), (dx1, y0), (dx1, y1), (dx0, y1)], rgb, grain)

    def limb(self, start: tuple[float, float], end: tuple[float, float], width: float, rgb: Rgb | Array) -> None:
        """A thick line from start to end."""
        (x0, y0), (x1, y1) = start, end
        half = width / 2 / math.hypot(x1 - x0, y1 - y0)
        nx, ny = (y1 - y0) * half, (x0 - x1) * half
        self.polygon([(x0 + nx, y0 + ny), (x1 + nx, y1 + ny), (x1 - nx, y1 - ny), (x0 - nx, y0 - ny)], rgb)

    def post(self, y1: float, rgb: Rgb | Array, width: float = 0.24) -> None:
        """A bar standing on the foot, three and a half pixels wide at least."""
        half = max(width, 3.6 / self.canvas.camera.scale_at(self.z)) / 2
        self.bar(-half, half, 0, y1, rgb)

    def disc(self, dx: float, y: float, radius: float, rgb: Rgb | Array, stretch: float = 1) -> None:
        """A disc, or an ellipse `stretch` times as high as wide."""
        camera = self.canvas.camera
        radius_px = radius * camera.scale_at(self.z)
        center = camera.project([(self.x + dx, y, self.z)])[0]
        self.canvas.ellipse(center, (radius_px, radius_px * stretch), rgb, self.z, self.label)


@dataclass(frozen=True)
class SidePlane:
    """The upright plane x = `x_m`, along the street: each sample's place on it, by inverse projection.

    `window` holds the rectangle from z0 to z1 and from the ground to `height_m`; `inside` says which of its samples
    lie in the rectangle; z and y are their places in metres.
    """

    window: Window
    inside: Mask
    z: Array
    y: Array


def project_side_plane(canvas: Canvas, x_m: float, z0: float, z1: float, height_m: float) -> SidePlane:
    """The samples in which the camera sees the rectangle z0 <= z <= z1, 0 <= y <= height_m of the plane x = x_m."""
    camera, side = canvas.camera, math.copysign(1, x_m)
    window = canvas.window_around(camera.project([(x_m, 0, z0), (x_m, height_m, z0), (x_m, 0, z1)]))
    offset = (canvas.u[window] - camera.center_u) * side
    z = np.minimum(camera.focal_px * abs(x_m) / np.maximum(offset, 0.05), 400)
    y = camera.height_m - (canvas.v[window] - camera.horizon_v) * z / camera.focal_px
    inside = (offset > 0) & (z >= z0) & (z <= z1) & (y >= 0) & (y <= height_m)
    return SidePlane(window, inside, z, y)


# ---- sky, horizon, ground -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Street:
    """One scene's layout and light."""

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
    """Where on the ground the shadow of the houses ends."""
    road_rgb: Array
    paving_rgb: Array
    is_cobbled: bool
    has_zebra: bool

    def kerb(self, side: int) -> float:
        """The x of the kerb on the left (side -1) or on the right (side 1)."""
        return self.left_m if side < 0 else self.right_m

    def front(self, side: int) -> float:
        """The x of the house fronts."""
        return self.left_m - self.pavement_m[0] if side < 0 else self.right_m + self.pavement_m[1]

    def on_pavement(self, side: int, share: float) -> float:
        """A place on the pavement: share 0 at the kerb, 1 at the house fronts."""
        return self.kerb(side) * (1 - share) + self.front(side) * share

    def light_on(self, side: int) -> float:
        """How bright a face turned to the left (side -1) or to the right (side 1) is."""
        return self.sun if side < 0 else 2 - self.sun


def build_street(rng: RandomState) -> Street:
    """A street's measures and light."""
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


def draw_sky(canvas: Canvas, rng: RandomState, sky: tuple[Rgb, Rgb]) -> None:
    """A gradient from zenith to horizon, and clouds."""
    zenith, horizon = (jitter(rng, rgb, 0.08) for rgb in sky)
    height = np.clip(1 - canvas.v / canvas.camera.horizon_v, 0, 1)[..., None]
    cloud = fractal(canvas.u / 40, canvas.v / 14, rng.randint(1 << 30), 4) + rng.uniform(-0.25, 0.45)
    density = np.clip(cloud * 2.2, 0, 0.85)[..., None]
    white = np.clip(horizon * 0.4 + 0.62 - 0.12 * density, 0, 1)
    rgb = (horizon * (1 - height) + zenith * height) * (1 - density) + white * density
    canvas.paint(canvas.window(0, 0, WIDTH_PX, HEIGHT_PX), np.ones(canvas.u.shape, dtype=bool), rgb, 0.0, SKY)


def draw_skyline(canvas: Canvas, rng: RandomState, town: Town) -> None:
    """Far houses, woods and now and then a church on the horizon, half lost in the haze."""
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


def draw_ground(canvas: Canvas, street: Street) -> None:
    """Road, pavements, a side street, courtyards behind the houses (`ground`, so ignored), and the shadows on them."""
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
    """Asphalt or cobbles, with patches, drain covers, lane marks and a zebra crossing."""
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
    """Slabs, each a little different, with joints and a kerb of pale stone."""
    seed, pitch = street.seed, 0.55 + 0.08 * (street.seed % 7)
    slab = 0.20 * hash_cells(np.floor(x / pitch), np.floor(z / pitch), seed + 1) - 0.10
    joint = is_line(x, pitch, 0.07) | is_line(z, pitch, 0.08)
    shade = 1 + detail * (np.where(joint, -0.28, slab) + 0.10 * fractal(x * 3, z * 3, seed + 2, 2))
    to_street = np.minimum(np.abs(x - street.left_m), np.abs(x - street.right_m))
    kerb = np.minimum(to_street, np.abs(z - street.crossing_z) - 3.5) < 0.3
    rgb = street.paving_rgb * shade[..., None]
    return np.where(kerb[..., None], 0.35 * rgb + 0.48, rgb)


# ---- houses and greenery --------------------------------------------------------------------------------------------

STOREY_M, ROOF_M, GABLE_M = 3.1, 1.6, 9.0
GLASS, LIT = np.array([0.20, 0.25, 0.32]), np.array([0.96, 0.84, 0.52])


@dataclass(frozen=True)
class House:
    """A box along the street, from z0 to z1."""

    side: int
    z0: float
    z1: float
    height_m: float
    wall: Array
    roof: Array
    window_m: float
    """From one window to the next."""
    seed: int
    has_shop: bool
    is_brick: bool


def build_house(rng: RandomState, town: Town, side: int, z0: float, z1: float) -> House:
    """A house in the town's colours."""
    return House(
        side=side,
        z0=z0,
        z1=z1,
        height_m=STOREY_M * rng.randint(2, 6) + 0.8,
        wall=choose(rng, town.walls),
        roof=choose(rng, town.roofs),
        window_m=rng.uniform(1.7, 3.0),
        seed=rng.randint(1 << 30),
        has_shop=rng.rand() < 0.4,
        is_brick=rng.rand() < 0.4,
    )


def house_rgb(house: House, along: Array, y: Array, light: float, detail: Array) -> Array:
    """A house front, `along` metres from its corner and y metres up: wall, windows, shop, eaves, roof."""
    rgb = wall_rgb(house, along, y, detail) * light
    upper = (y >= STOREY_M) | (not house.has_shop)
    s, t = np.mod(along / house.window_m, 1), np.mod(y / STOREY_M, 1)
    kind = hash_cells(np.floor(along / house.window_m), np.floor(y / STOREY_M), house.seed + 5)
    frame = upper & (np.abs(s - 0.5) < 0.29) & (np.abs(t - 0.52) < 0.29)
    pane = upper & (np.abs(s - 0.5) < 0.23) & (np.abs(t - 0.52) < 0.24) & (np.abs(s - 0.5) > 0.025)
    glass = np.where((kind > 0.86)[..., None], LIT, GLASS) + (0.25 * np.clip(t - 0.3, 0, 1) + 0.12 * kind)[..., None]
    rgb = np.where(frame[..., None], 0.3 * rgb + 0.58 * light, rgb)
    rgb = np.where(pane[..., None], glass, rgb)
    if house.has_shop:
        display = (y > 0.5) & (y < 2.3) & (np.mod(along, 3.4) > 0.4)
        rgb = np.where(display[..., None], GLASS + 0.10 * kind[..., None], rgb)
        stripes = np.where(is_line(along, 0.8, 0.4)[..., None], 0.9, np.clip(house.roof * 1.3, 0, 1))
        rgb = np.where(((y > 2.3) & (y < 2.95))[..., None], stripes * light, rgb)
    eaves = (y > house.height_m - 0.35) & (y <= house.height_m)
    tiles = house.roof * (light * (1 + 0.25 * detail * noise(along * 3, y * 4, house.seed + 6)))[..., None]
    rgb = np.where(eaves[..., None], rgb * 0.72, rgb)
    return np.where((y > house.height_m)[..., None], tiles, rgb)


def wall_rgb(house: House, along: Array, y: Array, detail: Array) -> Array:
    """Plaster or brick, darker towards the ground."""
    shade = 1 + 0.10 * fractal(along * 0.7, y * 0.7, house.seed, 3) - 0.05 * np.clip(1.5 - y, 0, 1)
    if house.is_brick:
        course = np.floor(y / 0.25)
        joint = is_line(y, 0.25, 0.05) | is_line(along + 0.3 * np.mod(course, 2), 0.6, 0.06)
        brick = 0.24 * hash_cells(np.floor(along / 0.6), course, 3) - 0.12
        shade += detail * np.where(joint, 0.22, brick)
    return house.wall * shade[..., None]


def draw_house(canvas: Canvas, street: Street, house: House) -> None:
    """The gable that looks towards the camera, then the front along the street."""
    camera, front, top_m = canvas.camera, street.front(house.side), house.height_m + ROOF_M
    if house.z0 > 3:
        z0 = house.z0
        corners = camera.project([(front, 0, z0), (front + house.side * GABLE_M, top_m, z0)])
        window = canvas.window_around(corners)
        along = ((canvas.u[window] - camera.center_u) * z0 / camera.focal_px - front) * house.side
        y = camera.height_m - (canvas.v[window] - camera.horizon_v) * z0 / camera.focal_px
        slope = np.minimum(along, GABLE_M - along)
        inside = (slope >= 0) & (y >= 0) & (y <= house.height_m + np.minimum(ROOF_M, slope))
        rgb = house_rgb(house, along, y, 0.92, np.full(y.shape, max(0.0, 1 - z0 / 40)))
        canvas.paint(window, inside, rgb, z0, BUILDING)
    plane = project_side_plane(canvas, front, max(house.z0, 0.8), house.z1, top_m)
    detail = np.clip(1 - plane.z / 40, 0, 1)
    rgb = house_rgb(house, plane.z - house.z0, plane.y, street.light_on(-house.side), detail)
    canvas.paint(plane.window, plane.inside, rgb, plane.z, BUILDING)


def draw_foliage(
    canvas: Canvas, rng: RandomState, center: tuple[float, float], radii: tuple[float, float], z: float
) -> None:
    """Leaves in a ragged ellipse (pixels), bright above and dark below."""
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
    """Trunk and crown; both are vegetation, as in Cityscapes."""
    scale, height = canvas.camera.scale_at(z), rng.uniform(4.0, 7.5)
    trunk = Billboard(canvas, x, z, VEGETATION)
    trunk.bar(-0.13, 0.13, 0, height * 0.6, jitter(rng, (0.32, 0.25, 0.19), 0.15), 0.25)
    for _ in range(rng.randint(2, 5)):
        u, v = canvas.camera.project([(x + rng.uniform(-0.9, 0.9), height * rng.uniform(0.62, 0.9), z)])[0]
        draw_foliage(canvas, rng, (u, v), (scale * rng.uniform(1.3, 2.1), scale * rng.uniform(1.1, 1.8)), z)


def draw_hedge(canvas: Canvas, rng: RandomState, x: float, z: float) -> None:
    """A piece of hedge, one of a row."""
    scale, height = canvas.camera.scale_at(z), rng.uniform(0.9, 1.5)
    u, v = canvas.camera.project([(x, height * 0.45, z)])[0]
    draw_foliage(canvas, rng, (u, v), (scale * 1.7, scale * height * 0.8), z)


# ---- what stands in the street --------------------------------------------------------------------------------------


def draw_fence(canvas: Canvas, rng: RandomState, x: float, z0: float, z1: float, is_railing: bool) -> None:
    """One panel along the street: planks, or a railing (one sees through it, yet all of it is labelled fence)."""
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
    """A street lamp whose arm reaches over the road."""
    rgb, height = jitter(rng, (0.34, 0.35, 0.36), 0.25), rng.uniform(4.6, 6.4)
    reach = -math.copysign(rng.uniform(0.8, 1.5), x)
    lamp = Billboard(canvas, x, z, POLE)
    lamp.post(height, rgb, 0.30)
    lamp.post(0.6, rgb * 0.8, 0.44)
    lamp.limb((0, height - 0.06), (reach, height + 0.15), 0.26, rgb)
    lamp.limb((reach * 0.7, height + 0.1), (reach * 1.25, height + 0.16), 0.44, rgb * 1.25)


def draw_traffic_light(canvas: Canvas, rng: RandomState, x: float, z: float) -> None:
    """A mast with a dark box; one of its three lamps is lit."""
    Billboard(canvas, x, z, POLE).post(2.7, jitter(rng, (0.42, 0.43, 0.42), 0.2), 0.28)
    box = Billboard(canvas, x, z - 0.05, TRAFFIC_LIGHT)
    box.bar(-0.42, 0.42, 2.3, 4.1, jitter(rng, (0.13, 0.15, 0.14), 0.3))
    lit = rng.randint(3)
    for i, rgb in enumerate(((0.20, 0.86, 0.46), (0.98, 0.78, 0.20), (0.96, 0.22, 0.16))):
        box.disc(0, 2.65 + 0.55 * i, 0.23, np.array(rgb) * (1 if i == lit else 0.28))


def draw_sign(canvas: Canvas, rng: RandomState, x: float, z: float) -> None:
    """A post with one of six signs."""
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


def draw_person(canvas: Canvas, rng: RandomState, x: float, z: float) -> None:
    """Someone walking or standing, wrapped up warm, with or without a bag."""
    size, step, swing = rng.uniform(1.0, 1.25), rng.uniform(0.02, 0.26), rng.uniform(-0.2, 0.2)
    coat, trousers = choose(rng, CLOTHES), choose(rng, CLOTHES) * 0.6
    shoulder, hem = 1.38 * size, rng.uniform(0.60, 0.8) * size
    body = Billboard(canvas, x, z, PERSON)
    for sign in (-1, 1):
        foot = sign * (0.10 + step)
        body.limb((sign * 0.12, 0.88 * size), (foot, 0.02), 0.28, trousers * (1 if sign < 0 else 0.85))
        body.limb((foot, 0.06), (foot + 0.14, 0.06), 0.13, trousers * 0.4)
    body.limb((-0.30, shoulder), (-0.38 - swing, 0.85 * size), 0.20, coat * 0.8)
    neck = [(0.37, shoulder), (0.17, 1.48 * size), (-0.17, 1.48 * size), (-0.37, shoulder)]
    body.polygon([(-0.34, hem), (0.34, hem), *neck], coat, 0.15)
    body.limb((0.30, shoulder), (0.38 + swing, 0.85 * size), 0.20, coat * 0.9)
    body.disc(0, 1.60 * size, 0.20, choose(rng, SKIN, 0.1), 1.15)
    body.disc(-0.01, 1.70 * size, 0.205, choose(rng, HAIR, 0.2), 0.7)
    if rng.rand() < 0.35:
        body.bar(0.34 + swing, 0.64 + swing, 0.5 * size, 0.86 * size, choose(rng, CLOTHES))


def draw_bin(canvas: Canvas, rng: RandomState, x: float, z: float) -> None:
    """A litter bin: `static`, so ignored."""
    rgb = choose(rng, ((0.32, 0.36, 0.34), (0.75, 0.42, 0.14)), 0.2)
    litter_bin = Billboard(canvas, x, z, STATIC)
    litter_bin.polygon([(-0.22, 0), (0.22, 0), (0.28, 0.85), (-0.28, 0.85)], rgb, 0.2)
    litter_bin.bar(-0.31, 0.31, 0.85, 0.97, rgb * 0.6)


def draw_dog(canvas: Canvas, rng: RandomState, x: float, z: float) -> None:
    """A dog out on its own: `dynamic`, so ignored."""
    coat = choose(rng, COATS)
    dog = Billboard(canvas, x, z, DYNAMIC)
    for dx in (-0.28, -0.18, 0.18, 0.28):
        dog.bar(dx - 0.04, dx + 0.04, 0, 0.32, coat * 0.85)
    dog.bar(-0.34, 0.34, 0.28, 0.52, coat)
    dog.disc(0.42, 0.62, 0.14, coat)
    dog.limb((-0.34, 0.48), (-0.52, 0.74), 0.07, coat)


# ---- cars -----------------------------------------------------------------------------------------------------------

Face = tuple[Point, Point, Point, Point]
"""Bottom near (or left), bottom far (or right), top far (or right), top near (or left)."""
Shape = Sequence[tuple[float, float]]
"""Corners on a face: (share along, share up)."""


@dataclass(frozen=True)
class Frustum:
    """A box whose top may be smaller than its bottom; both are (x0, x1, z0, z1)."""

    bottom: tuple[float, float, float, float]
    top: tuple[float, float, float, float]
    y0: float
    y1: float

    def corner(self, x: int, y: int, z: int) -> Point:
        """One of the eight corners; each argument is 0 or 1."""
        rectangle, height = (self.top, self.y1) if y else (self.bottom, self.y0)
        return rectangle[x], height, rectangle[2 + z]

    def near(self) -> Face:
        """The face turned to the camera."""
        return self.corner(0, 0, 0), self.corner(1, 0, 0), self.corner(1, 1, 0), self.corner(0, 1, 0)

    def flank(self) -> Face:
        """The side that the camera sees."""
        x = 0 if self.bottom[0] + self.bottom[1] > 0 else 1
        return self.corner(x, 0, 0), self.corner(x, 0, 1), self.corner(x, 1, 1), self.corner(x, 1, 0)

    def lid(self) -> Face:
        """The top."""
        return self.corner(0, 1, 0), self.corner(1, 1, 0), self.corner(1, 1, 1), self.corner(0, 1, 1)


def on_face(face: Face, shape: Shape) -> list[Point]:
    """A shape of a face, in the world."""
    a, b, c, d = (np.array(corner) for corner in face)
    return [tuple((a * (1 - s) + b * s) * (1 - t) + (d * (1 - s) + c * s) * t) for s, t in shape]


def rectangle(s0: float, s1: float, t0: float, t1: float) -> Shape:
    """A rectangle on a face."""
    return [(s0, t0), (s1, t0), (s1, t1), (s0, t1)]


def circle(s: float, t: float, radius_s: float, radius_t: float) -> Shape:
    """A circle on a face (a polygon of 14 corners)."""
    angles = [2 * math.pi * i / 14 for i in range(14)]
    return [(s + radius_s * math.cos(a), t + radius_t * math.sin(a)) for a in angles]


WHOLE: Shape = rectangle(0, 1, 0, 1)
TYRE, HUB, NUMBER_PLATE = (0.07, 0.07, 0.08), (0.55, 0.56, 0.58), (0.92, 0.92, 0.88)
HEADLIGHT, TAIL_LIGHT = (0.97, 0.95, 0.84), (0.78, 0.10, 0.08)


@dataclass(frozen=True)
class Car:
    """A car or a van: a body with a cabin on it, one coat of paint."""

    body: Frustum
    cabin: Frustum
    paint: Array
    pane: Array
    lights: Rgb
    is_across: bool
    """Crossing the street: its long side is the near face."""


def build_car(rng: RandomState, x: float, z: float, heading: str) -> Car:
    """A car whose nearest end is at distance z; heading `away`, `towards` or `across`."""
    is_van = rng.rand() < 0.2
    length, width = rng.uniform(3.7, 4.6), rng.uniform(1.65, 1.85)
    belt, roof = (1.05, rng.uniform(1.9, 2.1)) if is_van else (rng.uniform(0.82, 0.95), rng.uniform(1.38, 1.6))
    boot, bonnet = (0.15, 0.7) if is_van else ((0.2, 0.7)[rng.randint(2)], 1.2)
    is_front_first = heading == "towards" or (heading == "across" and rng.rand() < 0.5)
    start, end = (bonnet, boot) if is_front_first else (boot, bonnet)
    if heading == "across":
        low = (x - length / 2, x + length / 2, z, z + width)
        mid = (low[0] + start, low[1] - end, z + 0.04, z + width - 0.04)
        high = (mid[0] + 0.45, mid[1] - 0.45, z + 0.2, z + width - 0.2)
    else:
        low = (x - width / 2, x + width / 2, z, z + length)
        mid = (low[0] + 0.04, low[1] - 0.04, z + start, z + length - end)
        high = (mid[0] + 0.16, mid[1] - 0.16, mid[2] + 0.45, mid[3] - 0.45)
    return Car(
        body=Frustum(low, low, 0.22, belt),
        cabin=Frustum(mid, high, belt, roof),
        paint=choose(rng, PAINTS),
        pane=jitter(rng, (0.20, 0.25, 0.30), 0.2),
        lights=HEADLIGHT if heading == "towards" else TAIL_LIGHT,
        is_across=heading == "across",
    )


def draw_car(canvas: Canvas, rng: RandomState, street: Street, x: float, z: float, heading: str) -> None:
    """Shadow, body, cabin; what is farther away first."""
    car = build_car(rng, x, z, heading)
    flank_light, near_light = street.light_on(-1 if x > 0 else 1), 0.95

    def fill(face: Face, shape: Shape, rgb: Array | Rgb, grain: float = 0) -> None:
        canvas.polygon(canvas.camera.project(on_face(face, shape)), rgb, z, CAR, grain)

    def draw_cabin_side(face: Face, light: float, is_long: bool) -> None:
        fill(face, WHOLE, car.paint * light)
        for s0, s1 in ((0.06, 0.47), (0.53, 0.94)) if is_long else ((0.08, 0.92),):
            fill(face, rectangle(s0, s1, 0.15, 0.86), car.pane * (0.7 + 0.3 * light), 0.25)

    def draw_long_side(face: Face, light: float) -> None:
        wheel = 0.33 / (car.body.y1 - car.body.y0)
        fill(face, WHOLE, car.paint * light, 0.06)
        fill(face, rectangle(0, 1, 0, 0.16), np.array(TYRE) * 2)
        for s in (0.19, 0.81):
            fill(face, circle(s, 0.04, 0.085, wheel * 0.92), TYRE)
            fill(face, circle(s, 0.04, 0.045, wheel * 0.48), HUB)

    def draw_short_side(face: Face, light: float) -> None:
        for s in (0.02, 0.82):
            fill(face, rectangle(s, s + 0.16, -0.3, 0.1), TYRE)
        fill(face, WHOLE, car.paint * light, 0.06)
        fill(face, rectangle(0, 1, 0, 0.26), np.array(TYRE) * 2.2)
        for s in (0.03, 0.79):
            fill(face, rectangle(s, s + 0.18, 0.55, 0.82), car.lights)
        fill(face, rectangle(0.36, 0.64, 0.32, 0.5), NUMBER_PLATE)

    x0, x1, z0, z1 = car.body.bottom
    ground = [(x0 - 0.15, 0.0, z0 - 0.1), (x1 + 0.15, 0.0, z0 - 0.1), (x1 + 0.15, 0.0, z1), (x0 - 0.15, 0.0, z1)]
    canvas.polygon(canvas.camera.project(ground), (0.05, 0.05, 0.06), z, None, alpha=0.65)
    draw_flank, draw_near = (draw_short_side, draw_long_side) if car.is_across else (draw_long_side, draw_short_side)
    fill(car.body.lid(), WHOLE, car.paint * 1.08)
    draw_cabin_side(car.cabin.flank(), flank_light, is_long=not car.is_across)
    draw_cabin_side(car.cabin.near(), near_light, is_long=car.is_across)
    fill(car.cabin.lid(), WHOLE, car.paint * 1.12)
    draw_flank(car.body.flank(), flank_light)
    draw_near(car.body.near(), near_light)


# ---- putting a scene together ---------------------------------------------------------------------------------------


@dataclass
class Things:
    """What stands in the street, to be drawn once all of it is known, the farthest first."""

    canvas: Canvas
    rng: RandomState
    items: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def add(self, draw: Callable[..., None], at_z: float, *args: object) -> None:
        """Draw it later; its order is that of `at_z`, the place of its nearest point."""
        self.items.append((at_z, lambda: draw(self.canvas, self.rng, *args)))

    def draw(self) -> None:
        """Draw all of them."""
        for _, draw in sorted(self.items, key=lambda item: -item[0]):
            draw()


def place_fronts(things: Things, town: Town, street: Street, side: int) -> list[House]:
    """Houses along one side of the street; between them trees behind hedges, which go to the things."""
    rng, x, houses, z = things.rng, street.front(side), [], 0.0
    while z < 70:
        end = z + rng.uniform(6, 14)
        if z < street.crossing_z + 4 and end > street.crossing_z - 4:  # leave room for the side street
            z, end = (z, street.crossing_z - 4) if z < street.crossing_z - 8 else (street.crossing_z + 4, end + 8)
        if rng.rand() > town.green:
            houses.append(build_house(rng, town, side, z, end))
        else:
            for at in np.arange(z + 2, end, 2.2):
                things.add(draw_hedge, at, x, at)
            for _ in range(rng.randint(1, 4)):
                at = rng.uniform(z + 2, end)
                things.add(draw_tree, at, x + side * rng.uniform(0.5, 5), at)
        z = end
    return houses


def place_on_pavement(things: Things, street: Street, side: int) -> None:
    """Lamps, signs, trees, people, traffic lights, fences, bins, and the cars parked along the kerb."""
    rng = things.rng

    def place(draw: Callable[..., None], z: float, near: float = 0.08, far: float = 0.20) -> None:
        things.add(draw, z, street.on_pavement(side, rng.uniform(near, far)), z)

    for z in np.arange(rng.uniform(5, 13), 28, rng.uniform(10, 16)):
        place(draw_lamp, z)
    for _ in range(rng.randint(1, 4)):
        place(draw_sign, rng.uniform(5, 13))
    for _ in range(rng.randint(0, 3)):
        place(draw_tree, rng.uniform(6, 26), 0.15, 0.5)
    for _ in range(rng.randint(2, 5)):
        place(draw_person, rng.uniform(4, 9), 0.3, 0.8)
    if rng.rand() < 0.75:
        place(draw_traffic_light, street.crossing_z - rng.uniform(4.2, 5))
    if rng.rand() < 0.4:
        place(draw_bin, rng.uniform(5, 14))
    if rng.rand() < 0.85:
        x, is_railing, z = street.on_pavement(side, rng.uniform(0.8, 1.0)), rng.rand() < 0.5, rng.uniform(2, 9)
        for at in np.arange(z, z + rng.uniform(8, 18), 2.0):
            if abs(at + 1 - street.crossing_z) > 5:
                things.add(draw_fence, at, x, at, at + 2.0, is_railing)
    for z in np.arange(rng.uniform(3.5, 9), 40, rng.uniform(5.5, 7.5)):
        if rng.rand() < 0.35 and abs(z + 2 - street.crossing_z) > 6:
            things.add(draw_car, z, street, street.kerb(side) - side * 1.1, z, "away" if side > 0 else "towards")


def place_on_road(things: Things, street: Street) -> None:
    """Cars that drive, people who cross, and a dog."""
    rng = things.rng
    if rng.rand() < 0.7:
        z = rng.uniform(7, 26)
        things.add(draw_car, z, street, rng.uniform(-0.4, 0.4), z, "away")
    if rng.rand() < 0.6:
        z = rng.uniform(6, 24)
        things.add(draw_car, z, street, street.left_m * 0.55, z, "towards")
    if rng.rand() < 0.4:
        z = street.crossing_z - 0.8
        things.add(draw_car, z, street, rng.uniform(-7, 6), z, "across")
    for _ in range(rng.randint(0, 3) if street.has_zebra else 0):
        z = street.crossing_z - rng.uniform(4.5, 6.5)
        things.add(draw_person, z, rng.uniform(street.left_m, street.right_m), z)
    if rng.rand() < 0.25:
        z = rng.uniform(5, 11)
        things.add(draw_dog, z, rng.uniform(-3, 3), z)


def draw_own_car(canvas: Canvas, rng: RandomState) -> None:
    """The bonnet of the car that carries the camera, and the black edge left by rectification: both ignored."""
    paint, top = choose(rng, PAINTS), HEIGHT_PX - rng.uniform(7, 12)
    window = canvas.window(0, top, WIDTH_PX, HEIGHT_PX)
    depth = canvas.v[window] - top - 9 * ((canvas.u[window] - WIDTH_PX / 2) / (WIDTH_PX * 0.62)) ** 2
    shine = 0.5 + 0.05 * depth + 0.25 * np.exp(-((depth - 1.5) ** 2))
    canvas.paint(window, depth > 0, paint * shine[..., None], 0.0, EGO_VEHICLE)
    edge = canvas.window(0, 0, 1, HEIGHT_PX)
    canvas.paint(edge, np.ones(canvas.u[edge].shape, dtype=bool), np.zeros(3), 0.0, RECTIFICATION_BORDER)


def blur(rgb: Array) -> Array:
    """Average of each sample and its neighbours, weighted 1 2 1 both ways."""
    for axis in (0, 1):
        before, after = (np.concatenate(parts, axis) for parts in _shifted(rgb, axis))
        rgb = 0.25 * before + 0.5 * rgb + 0.25 * after
    return rgb


def _shifted(rgb: Array, axis: int) -> tuple[list[Array], list[Array]]:
    """The parts of the array moved by one either way along the axis; its edge is repeated."""
    first, last = np.split(rgb, [1], axis), np.split(rgb, [-1], axis)
    return [first[0], last[0]], [first[1], last[1]]


def finish(canvas: Canvas, rng: RandomState) -> tuple[Labels, Labels]:
    """Lens and sensor: blur, vignette, exposure, white balance, contrast, noise. Gives pixels and label ids."""
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


def draw_scene(town: Town, index: int) -> tuple[Labels, Labels]:
    """Scene number `index` of a town: its pixels (H, W, 3) and its Cityscapes label ids (H, W)."""
    rng = RandomState(town.seed * 1000 + index)
    camera = Camera(
        focal_px=WIDTH_PX * rng.uniform(0.62, 0.85),
        center_u=WIDTH_PX * rng.uniform(0.36, 0.64),
        horizon_v=HEIGHT_PX * rng.uniform(0.38, 0.5),
        height_m=rng.uniform(*town.camera_height_m),
    )
    sky, street = town.skies[rng.randint(len(town.skies))], build_street(rng)
    canvas = Canvas(camera, haze=np.array(sky[1]) * 0.95, haze_m=rng.uniform(70, 220))
    things = Things(canvas, rng)
    houses = place_fronts(things, town, street, -1) + place_fronts(things, town, street, 1)
    place_on_pavement(things, street, -1)
    place_on_pavement(things, street, 1)
    place_on_road(things, street)
    draw_sky(canvas, rng, sky)
    draw_skyline(canvas, rng, town)
    draw_ground(canvas, street)
    for house in sorted(houses, key=lambda house: -house.z0):
        draw_house(canvas, street, house)
    things.draw()
    draw_own_car(canvas, rng)
    return finish(canvas, rng)


def write_demo(out: Path) -> None:
    """Draw all scenes of all towns into the folder `out`."""
    for town in TOWNS:
        for index in range(town.num_scenes):
            pixels, labels = draw_scene(town, index)
            for array, kind, suffix in ((pixels, "leftImg8bit", "leftImg8bit"), (labels, "gtFine", "gtFine_labelIds")):
                folder = out / kind / town.split / town.name
                folder.mkdir(parents=True, exist_ok=True)
                name = f"{town.name}_000000_{index + 1:06d}_{suffix}.png"
                Image.fromarray(array).save(folder / name, optimize=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Draws the demo data set.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "demo", help="folder to write to")
    write_demo(parser.parse_args().out)


if __name__ == "__main__":
    main()
