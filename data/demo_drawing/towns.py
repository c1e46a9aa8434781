"""The towns and their colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import RandomState

from demo_drawing.constants import Array, Rgb

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
    """The ranges and colours from which each scene of a town draws its own values."""

    name: str
    split: str
    num_scenes: int
    seed: int
    walls: Sequence[Rgb]
    roofs: Sequence[Rgb]
    skies: Sequence[tuple[Rgb, Rgb]]
    camera_height_m: tuple[float, float]
    green: float
    """Share of the street front that is trees and hedges, in [0, 1]."""


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
    """Return one of the colours, jittered by `amount`."""
    return jitter(rng, colours[rng.randint(len(colours))], amount)


def jitter(rng: RandomState, rgb: Rgb | Array, amount: float) -> Array:
    """Return the colour with its brightness and tint changed by up to `amount`."""
    brightness, tint = rng.uniform(1 - amount, 1 + amount), rng.uniform(-amount, amount, 3)
    return np.clip(np.asarray(rgb) * brightness + 0.4 * tint, 0, 1)
