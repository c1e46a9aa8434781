"""Three data sets as people bring them, drawn: thin bright lines, touching cells, large regions with texture.

Each differs from the others in size, colors and shares of the classes. What is drawn has neighbors that look like it:
scratches that are no lines, organelles as dark as membranes, land of two kinds with the same mean color.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import distance_transform_edt, gaussian_filter, map_coordinates
from scipy.spatial import cKDTree

Random = np.random.Generator
Pixels = NDArray[np.float64]


def noise(random: Random, size: tuple[int, int], sigma_px: float) -> Pixels:
    """Return smooth noise (H, W) of mean 0 and standard deviation 1."""
    smooth = gaussian_filter(random.standard_normal(size), sigma_px, mode="wrap")
    return (smooth - smooth.mean()) / smooth.std()


def curve(random: Random, size: tuple[int, int], length_px: float, bend: float) -> NDArray[np.float64]:
    """Return points (N, 2) half a pixel apart along a random curve that begins in the image."""
    num = int(length_px * 2)
    turns = gaussian_filter(random.standard_normal(num), 20) * bend
    angle = random.uniform(0, 2 * np.pi) + np.cumsum(turns)
    steps = np.stack([np.sin(angle), np.cos(angle)], axis=1) * 0.5
    return random.uniform(0, 1, 2) * size + np.cumsum(steps, axis=0)


def near(points: NDArray[np.float64], size: tuple[int, int]) -> Pixels:
    """Return the distance (H, W) of each pixel to the nearest point, in pixels."""
    inside = points[((points >= 0) & (points < np.array(size) - 1)).all(axis=1)].round().astype(int)
    away = np.ones(size, bool)
    away[inside[:, 0], inside[:, 1]] = False
    return np.asarray(distance_transform_edt(away)) if len(inside) else np.full(size, 99.0)


def lines(random: Random) -> tuple[Pixels, NDArray[np.uint8]]:
    """Bright lines of 2 to 5 pixels on stained ground, 2 % of the pixels; dark scratches and spots are no lines."""
    size = int(random.integers(300, 380)), int(random.integers(400, 500))
    ground = 105 + 14 * noise(random, size, 40) + 9 * noise(random, size, 4) + 7 * random.standard_normal(size)
    mask = np.zeros(size, np.uint8)
    for _ in range(random.integers(2, 5)):
        width_px, gain = random.uniform(0.8, 2.2), random.uniform(28, 55)
        distance = near(curve(random, size, random.uniform(250, 600), 0.12), size)
        fading = 1 + 0.35 * noise(random, size, 30)
        ground += gain * fading * np.exp(-((distance / width_px) ** 2) / 2)
        mask[distance <= width_px * 1.1] = 1
    for _ in range(random.integers(3, 7)):
        ground -= 30 * np.exp(-((near(curve(random, size, random.uniform(30, 120), 0.05), size) / 1.2) ** 2) / 2)
    for _ in range(random.integers(4, 12)):
        spot = near(random.uniform(0, 1, (1, 2)) * size, size)
        ground += random.uniform(25, 60) * np.exp(-((spot / random.uniform(2, 6)) ** 2) / 2)
    return ground[..., None] * np.array([1.0, 0.93, 0.85]), mask


def cells(random: Random) -> tuple[Pixels, NDArray[np.uint8]]:
    """Gray cells that touch, with dark membranes of 3 to 6 pixels and dark organelles inside; the membranes are 1."""
    size = 400, 352
    rows, columns = np.meshgrid(*map(np.arange, size), indexing="ij")
    warp = [7 * noise(random, size, 18) + 2 * noise(random, size, 6) for _ in size]
    centers = random.uniform(-30, 430, (int(random.integers(90, 170)), 2))
    distance, nearest = cKDTree(centers).query(np.stack([rows + warp[0], columns + warp[1]], axis=-1), k=2)
    border = distance[..., 1] - distance[..., 0]
    width_px = 3.5 + 1.2 * noise(random, size, 25)
    mask = (border < width_px).astype(np.uint8)
    shade = 168 + 14 * random.standard_normal(len(centers))
    image = shade[nearest[..., 0]] + 9 * noise(random, size, 2) - 75 * gaussian_filter(mask.astype(float), 1.0)
    for _ in range(random.integers(25, 60)):
        center, radius = random.uniform(0, 1, 2) * size, random.uniform(3, 9, 2)
        ellipse = ((rows - center[0]) / radius[0]) ** 2 + ((columns - center[1]) / radius[1]) ** 2
        image -= 55 * np.exp(-(ellipse**3)) * (border > 8)
    image = gaussian_filter(image, 0.7) + 9 * random.standard_normal(size)
    return image, mask


def land(random: Random) -> tuple[Pixels, NDArray[np.uint8]]:
    """Regions of four kinds of land; forest and field have the same mean color, and differ in their texture."""
    size = int(random.integers(340, 450)), int(random.integers(340, 450))
    rows, columns = np.meshgrid(*map(np.arange, size), indexing="ij")
    warp = [18 * noise(random, size, 25) for _ in size]
    centers = random.uniform(-40, 490, (int(random.integers(9, 18)), 2))
    nearest = cKDTree(centers).query(np.stack([rows + warp[0], columns + warp[1]], axis=-1))[1]
    kind = random.choice(4, len(centers), p=[0.38, 0.34, 0.2, 0.08])
    mask = kind[nearest].astype(np.uint8)
    image = np.zeros((*size, 3))
    for number in range(len(centers)):
        angle, wave_px = random.uniform(0, np.pi), random.uniform(6, 11)
        stripes = np.sin((rows * np.sin(angle) + columns * np.cos(angle)) * 2 * np.pi / wave_px)
        blocks = map_coordinates(
            random.standard_normal((80, 80)), [rows / 9 % 79, columns / 9 % 79], order=0, mode="wrap"
        )
        texture = [11 * stripes, 13 * noise(random, size, 2.5), 5 * noise(random, size, 12), 12 * blocks][kind[number]]
        color = np.array([[96, 112, 70], [92, 110, 66], [70, 92, 104], [128, 120, 116]][kind[number]])
        own = color + 16 * random.standard_normal() + 6 * random.standard_normal(3) + texture[..., None]
        image[nearest == number] = own[nearest == number]
    return gaussian_filter(image, (0.6, 0.6, 0)) + 9 * random.standard_normal(image.shape), mask


DRAWN: dict[str, tuple[int, Callable[[Random], tuple[Pixels, NDArray[np.uint8]]]]] = {
    "lines": (90, lines),
    "cells": (30, cells),
    "land": (110, land),
}
"""Name -> number of images, and what draws one."""


def draw_set(name: str, folder: Path, most: int = 1000) -> None:
    """Write `images/NNN.png` and `masks/NNN.png`, `most` at most; masks of two classes hold 0 and 255."""
    num_images, draw = min(most, DRAWN[name][0]), DRAWN[name][1]
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for number in range(num_images):
        image, mask = draw(np.random.default_rng([ord(name[0]), number]))
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / "images" / f"{number:03}.png")
        Image.fromarray(mask if name == "land" else mask * 255).save(folder / "masks" / f"{number:03}.png")
