"""Houses along the street."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import RandomState

from demo_drawing.canvas import Canvas, project_side_plane
from demo_drawing.constants import BUILDING, Array
from demo_drawing.street import Street
from demo_drawing.texture import fractal, hash_cells, is_line, noise
from demo_drawing.towns import Town, choose

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
    """Distance from one window to the next."""
    seed: int
    has_shop: bool
    is_brick: bool


def build_house(rng: RandomState, town: Town, side: int, z0: float, z1: float) -> House:
    """Return a random house in the colours of the town."""
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
    """Return the colour of a house front at `along` metres from its corner and y metres up."""
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
    """Return the colour of plaster or brick, darker towards the ground."""
    shade = 1 + 0.10 * fractal(along * 0.7, y * 0.7, house.seed, 3) - 0.05 * np.clip(1.5 - y, 0, 1)
    if house.is_brick:
        course = np.floor(y / 0.25)
        joint = is_line(y, 0.25, 0.05) | is_line(along + 0.3 * np.mod(course, 2), 0.6, 0.06)
        brick = 0.24 * hash_cells(np.floor(along / 0.6), course, 3) - 0.12
        shade += detail * np.where(joint, 0.22, brick)
    return house.wall * shade[..., None]


def draw_house(canvas: Canvas, street: Street, house: House) -> None:
    """Paint the gable that faces the camera, then the front along the street."""
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
