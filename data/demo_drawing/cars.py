"""Cars in the street, and the bonnet of the car that carries the camera."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import RandomState

from demo_drawing.canvas import Canvas
from demo_drawing.constants import CAR, EGO_VEHICLE, HEIGHT_PX, RECTIFICATION_BORDER, WIDTH_PX, Array, Point, Rgb
from demo_drawing.street import Street
from demo_drawing.towns import PAINTS, choose, jitter

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
        """Return one of the eight corners; each argument is 0 or 1."""
        rectangle, height = (self.top, self.y1) if y else (self.bottom, self.y0)
        return rectangle[x], height, rectangle[2 + z]

    def near(self) -> Face:
        """Return the face turned to the camera."""
        return self.corner(0, 0, 0), self.corner(1, 0, 0), self.corner(1, 1, 0), self.corner(0, 1, 0)

    def flank(self) -> Face:
        """Return the side that the camera sees."""
        x = 0 if self.bottom[0] + self.bottom[1] > 0 else 1
        return self.corner(x, 0, 0), self.corner(x, 0, 1), self.corner(x, 1, 1), self.corner(x, 1, 0)

    def lid(self) -> Face:
        """Return the top face."""
        return self.corner(0, 1, 0), self.corner(1, 1, 0), self.corner(1, 1, 1), self.corner(0, 1, 1)


def on_face(face: Face, shape: Shape) -> list[Point]:
    """Return the world points of a shape on a face."""
    a, b, c, d = (np.array(corner) for corner in face)
    return [tuple((a * (1 - s) + b * s) * (1 - t) + (d * (1 - s) + c * s) * t) for s, t in shape]


def rectangle(s0: float, s1: float, t0: float, t1: float) -> Shape:
    """Return a rectangle on a face."""
    return [(s0, t0), (s1, t0), (s1, t1), (s0, t1)]


def circle(s: float, t: float, radius_s: float, radius_t: float) -> Shape:
    """Return a circle on a face, as a polygon of 14 corners."""
    angles = [2 * math.pi * i / 14 for i in range(14)]
    return [(s + radius_s * math.cos(a), t + radius_t * math.sin(a)) for a in angles]


WHOLE: Shape = rectangle(0, 1, 0, 1)
TYRE, HUB, NUMBER_PLATE = (0.07, 0.07, 0.08), (0.55, 0.56, 0.58), (0.92, 0.92, 0.88)
HEADLIGHT, TAIL_LIGHT = (0.97, 0.95, 0.84), (0.78, 0.10, 0.08)


@dataclass(frozen=True)
class Car:
    """A car or a van: a body with a cabin on it, in one colour."""

    body: Frustum
    cabin: Frustum
    paint: Array
    pane: Array
    lights: Rgb
    is_across: bool
    """Crossing the street: its long side is the near face."""


def build_car(rng: RandomState, x: float, z: float, heading: str) -> Car:
    """Return a random car whose nearest end is at distance z; heading is `away`, `towards` or `across`."""
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
    """Paint shadow, body and cabin, the farthest first."""
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


def draw_own_car(canvas: Canvas, rng: RandomState) -> None:
    """Paint the bonnet of the car with the camera and the black edge left by rectification; both are ignored."""
    paint, top = choose(rng, PAINTS), HEIGHT_PX - rng.uniform(7, 12)
    window = canvas.window(0, top, WIDTH_PX, HEIGHT_PX)
    depth = canvas.v[window] - top - 9 * ((canvas.u[window] - WIDTH_PX / 2) / (WIDTH_PX * 0.62)) ** 2
    shine = 0.5 + 0.05 * depth + 0.25 * np.exp(-((depth - 1.5) ** 2))
    canvas.paint(window, depth > 0, paint * shine[..., None], 0.0, EGO_VEHICLE)
    edge = canvas.window(0, 0, 1, HEIGHT_PX)
    canvas.paint(edge, np.ones(canvas.u[edge].shape, dtype=bool), np.zeros(3), 0.0, RECTIFICATION_BORDER)
