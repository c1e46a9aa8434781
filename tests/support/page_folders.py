"""Draws the folders that the pages name: photos with masks, and those of the page layouts."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.support.drawn_folders import BINARY, draw, draw_image, draw_mask, seeded

NAMES = [f"{number:04}" for number in range(10)]
HEIGHT, WIDTH = 40, 56


def draw_folders(root: Path) -> None:
    """Draw `photos`, `patients`, `walk`, `steel`, `street` and `cells` below a root."""
    draw(root / "photos", [f"{i:02}" for i in range(20)], "images/{}.jpg", "masks/{}_mask.png", BINARY)
    slices = [f"slice{s}_patient{p:02}_{k}" for s in range(3) for p in range(6) for k in range(2)]
    draw(root / "patients", slices, "images/{}.png", "masks/{}.png")
    _draw_walk(root / "walk")
    _draw_steel(root / "steel")
    _draw_street(root / "street")
    _draw_cells(root / "cells")


def _draw_walk(root: Path) -> None:
    """Frames of which every fourth has a mask, lists of the splits, and a text that is no list."""
    for number in range(48):
        draw_image(root / f"frames/{number:05}.jpg")
        if number % 4 == 0:
            draw_mask(root / f"labels/{number:05}.png")
    for split, numbers in (("train", range(0, 32, 4)), ("val", range(32, 48, 4))):
        (root / f"{split}.txt").write_text("".join(f"{number:05}\n" for number in numbers))
    (root / "notes.txt").write_text("The camera was moved after frame 20.\n")


def _blob(name: str) -> NDArray[np.bool_]:
    """A disk whose place depends on the name."""
    y, x = seeded(name).integers(14, HEIGHT - 14), seeded(name).integers(14, WIDTH - 14)
    rows, columns = np.ogrid[:HEIGHT, :WIDTH]
    return np.asarray((rows - y) ** 2 + (columns - x) ** 2 < 80)


def _draw_steel(root: Path) -> None:
    """Images whose defects are run lengths of a table, numbered by columns from 1."""
    rows = []
    for number, name in enumerate(NAMES):
        draw_image(root / f"train_images/{name}.jpg", (HEIGHT, WIDTH))
        if number % 3:
            edges = np.diff(np.concatenate([[0], _blob(name).ravel("F").astype(int), [0]]))
            starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
            runs = np.stack([starts + 1, ends - starts], axis=1).ravel()
            rows.append((f"{name}.jpg", (1, 3, 4)[number % 3 + number // 6 - 1], " ".join(map(str, runs))))
    with (root / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("ImageId", "ClassId", "EncodedPixels"), *rows])


def _draw_street(root: Path) -> None:
    """Images with a mask for each of two classes."""
    for name in NAMES:
        draw_image(root / f"images/{name}.jpg", (HEIGHT, WIDTH))
        car = _blob(name)
        road = np.broadcast_to(np.arange(HEIGHT)[:, None] > 25, car.shape) & ~car
        for kind, plane in (("car", car), ("road", road)):
            path = root / f"masks/{kind}/{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(plane.astype(np.uint8) * 255).save(path)


def _draw_cells(root: Path) -> None:
    """An array of images and one of masks."""
    root.mkdir(parents=True)
    np.save(root / "images.npy", seeded("cells").integers(0, 255, (len(NAMES), HEIGHT, WIDTH, 3), np.uint8))
    masks = (np.arange(WIDTH)[None, None] // 9 + np.arange(len(NAMES))[:, None, None]) % 3
    np.save(root / "masks.npy", np.broadcast_to(masks, (len(NAMES), HEIGHT, WIDTH)).astype(np.uint8))
