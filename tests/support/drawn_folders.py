"""Folders of drawn images and masks in many layouts, and the config that `segapp init` writes for them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from segapp.assembly.data import build_dataset
from segapp.assembly.pairs import build_scheme, split_names
from segapp.config import RunConfig, load_config
from segapp.onboarding.init import InitRequest, InitResult, propose_config

SIZE = (48, 64)
IDS = np.array([0, 1, 2], np.uint8)
BINARY = np.array([0, 255], np.uint8)


def seeded(text: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little"))


def touch(root: Path, *names: str) -> None:
    """Writes files of a byte; their folders are made."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def save(path: Path, pixels: np.ndarray, **options: Any) -> None:
    """Saves pixels as an image; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


def draw_image(path: Path, size: tuple[int, int] = SIZE) -> None:
    """Writes a picture of noise."""
    save(path, seeded(path.name).integers(0, 255, (*size, 3), np.uint8))


def draw_mask(
    path: Path, values: np.ndarray = IDS, size: tuple[int, int] = SIZE, *, key: str | None = None, **options: Any
) -> None:
    """Writes a mask of stripes of all the values, whose widths depend on the key, or on folder and name of the file."""
    edges = np.sort(seeded(key or f"{path.parent.name}/{path.name}").integers(2, size[1] - 2, len(values) - 1))
    columns = np.searchsorted(edges, np.arange(size[1]), side="right")
    columns[: len(values)] = np.arange(len(values))
    save(path, np.broadcast_to(values[columns], (size[0], *values[columns].shape)).copy(), **options)


def draw(root: Path, names: Iterable[str], image: str, mask: str, values: np.ndarray = IDS) -> None:
    """Writes images and masks; `{}` in their paths is the name."""
    for name in names:
        draw_image(root / image.replace("{}", name))
        draw_mask(root / mask.replace("{}", name), values)


def listing(root: Path) -> dict[str, tuple[int, bytes]]:
    """Returns every file and folder below a root with its time of change and its content."""
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(root.rglob("*"))
    }


def proposed(root: Path, out: Path, **request: Any) -> tuple[RunConfig, InitResult, dict[str, list[str]]]:
    """Returns the config that init writes, what it said, and the names of each split; every mask is read."""
    before = listing(root)
    result = propose_config(InitRequest(root, out, **request))
    assert listing(root) == before
    config = load_config(result.configs[0])
    return config, result, names_read(config)


def number_in(path: Path, root: str) -> list[str]:
    """Returns the number of an image, which its mask has too."""
    return sorted(set(re.findall(r"\d{4,}", str(path.relative_to(root)))) - {"2017", "2018", "0000"}) or ["0000"]


def names_read(config: RunConfig) -> dict[str, list[str]]:
    """Returns the names of each split's images, all read with their masks."""
    names = {}
    for key, split in zip(("train", "val"), split_names(config.data), strict=True):
        dataset = build_dataset(config.data, build_scheme(config.data), split, is_training=False, seed=0)
        for index in range(len(dataset)):
            dataset.read(index)
        names[key] = [pair.image.name for pair in dataset.pairs]
        for pair in dataset.pairs:
            assert pair.mask is not None
            assert pair.image != pair.mask
            mask_root = os.path.normpath(Path(config.data.root, config.data.mask_dir or ""))
            assert number_in(pair.image, config.data.root) == number_in(pair.mask, mask_root)
    return names


def samples_read(config: RunConfig) -> Iterator[tuple[str, Path, np.ndarray, np.ndarray]]:
    """Yields split, image file, pixels and target of every image, as training and validation read them."""
    for key, split in zip(("train", "val"), split_names(config.data), strict=True):
        dataset = build_dataset(config.data, build_scheme(config.data), split, is_training=False, seed=0)
        for index, pair in enumerate(dataset.pairs):
            pixels, target = dataset.read(index)
            yield key, pair.image, np.asarray(pixels), np.asarray(target)


def targets_read(config: RunConfig) -> dict[str, np.ndarray]:
    """Returns the target of every image by the image's stem."""
    return {image.stem: target for _, image, _, target in samples_read(config)}


def with_orientation(upright: np.ndarray, orientation: int) -> np.ndarray:
    """Returns the pixels as a camera stores them with an EXIF orientation, so that viewers show `upright`."""
    stored: dict[int, Callable[[np.ndarray], np.ndarray]] = {
        1: lambda a: a,
        2: np.fliplr,
        3: lambda a: np.rot90(a, 2),
        4: np.flipud,
        5: lambda a: np.fliplr(np.rot90(a, -1)),
        6: np.rot90,
        7: lambda a: np.fliplr(np.rot90(a)),
        8: lambda a: np.rot90(a, -1),
    }
    return np.ascontiguousarray(stored[orientation](upright))
