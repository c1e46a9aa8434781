"""A folder under the pencil: images and masks are drawn into it, and what is true of each image is noted meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

from tests.support.drawn_folders import seeded

SIZE = (37, 53)
TWELVE = tuple(f"{number:04}" for number in (0, 1, 2, 3, 5, 8, 11, 12, 14, 20, 21, 33))
EIGHT, FOUR = TWELVE[:8], TWELVE[8:]
SPLITS = (("train", EIGHT), ("val", FOUR))
Codes = Mapping[Any, str | None]
"""Value or color in the masks -> name of its class; None: ignored pixels."""
UNNAMED: Codes = {0: "class_0", 1: "class_1", 2: "class_2"}
BINARY: Codes = {0: "background", 255: "object"}


@dataclass(frozen=True)
class Picture:
    """A drawn image and what is true of it.

    Attributes:
        image: its file, relative to the root.
        source: the file that its labels are in.
        split: as the data have it; None: they have none.
        group: patient, scene or video, which must not be divided.
        planes: pixels of each class, by its name; a class may be missing.
        ignored: pixels that must not be trained.
        thumbnail: what its content is recognized by.
        is_broken: its files cannot be read.
    """

    image: str
    source: str
    split: str | None
    group: str
    planes: Mapping[str, np.ndarray]
    ignored: np.ndarray
    thumbnail: np.ndarray
    is_broken: bool = False


@dataclass(frozen=True)
class Read:
    """`init` writes a config without a question."""


@dataclass(frozen=True)
class Ask:
    """`init` asks, and with one of the answers that it offers, such as these, it reads the truth."""

    option: str
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refuse:
    """`init` refuses with the words."""

    words: tuple[str, ...]


Draw = Callable[["Canvas"], None]


@dataclass(frozen=True)
class DrawnLayout:
    """A layout of a folder: how it is drawn, what is true of it, and what `segapp init` is to do with it."""

    name: str
    drawing: Draw
    expected: Read | Ask | Refuse = Read()

    def draw(self, root: Path) -> Canvas:
        """Draws the layout into a folder, which is made, and returns what is true."""
        root.mkdir(parents=True, exist_ok=True)
        canvas = Canvas(root)
        self.drawing(canvas)
        return canvas


def scene(key: str, size: tuple[int, int] = SIZE, bands: int = 3, like: str | None = None) -> np.ndarray:
    """Returns smooth pixels (H, W, bands) of 0..255 as float32 that depend on the key; `like`: similar ones."""
    grid = seeded(f"scene {key}").uniform(0, 255, (6, 8, bands)).astype(np.float32)
    if like is not None:
        grid = 0.75 * seeded(f"scene {like}").uniform(0, 255, (6, 8, bands)).astype(np.float32) + 0.25 * grid
    pixels = cv2.resize(grid, size[::-1], interpolation=cv2.INTER_CUBIC).reshape(*size, bands)
    return np.clip(pixels + seeded(f"grain {key}").normal(0, 3, pixels.shape), 0, 255).astype(np.float32)


def gray(key: str, size: tuple[int, int] = SIZE) -> np.ndarray:
    """Returns smooth pixels (H, W) of 8 bits."""
    return scene(key, size, 1)[..., 0].astype(np.uint8)


def patches(key: str, count: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """Returns areas 0 to count - 1 (H, W), all present and none small, whose places depend on the key."""
    rng = seeded(f"patches {key}")
    rows, columns = (2, 3) if count <= 3 else (3, 4) if count <= 12 else (4, -(-count // 4))
    cell = np.array([size[0] / rows, size[1] / columns])
    points = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1).reshape(-1, 2)
    points = (points + 0.5 + rng.uniform(-0.3, 0.3, points.shape)) * cell
    owners = rng.permutation(np.resize(np.arange(count), len(points)))
    pixels = np.stack(np.mgrid[: size[0], : size[1]], -1).reshape(-1, 1, 2)
    return np.asarray(owners[((pixels - points) ** 2).sum(-1).argmin(1)].reshape(size))


def thumbnail(pixels: np.ndarray) -> np.ndarray:
    """Returns 12 x 16 of the mean of the bands, of mean 0 and length 1, which brightness does not change."""
    planes = pixels.astype(np.float32).reshape(*pixels.shape[:2], -1)
    small = cv2.resize(planes.mean(2), (16, 12), interpolation=cv2.INTER_AREA)
    small = small - small.mean()
    return np.asarray(small / max(1e-9, float(np.linalg.norm(small))))


def coded(areas: np.ndarray, codes: Sequence[Any]) -> np.ndarray:
    """Returns a mask of the codes of areas: uint8 or uint16 (H, W), or colors (H, W, 3)."""
    table = np.array(codes)
    return table[areas].astype(np.uint8 if table.ndim == 2 or table.max() < 256 else np.uint16)


def planes_of(areas: np.ndarray, names: Sequence[str | None]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the pixels of each name, and the ignored ones, of areas whose names are given."""
    planes: dict[str, np.ndarray] = {}
    ignored = np.zeros(areas.shape, bool)
    for number, name in enumerate(names):
        if name is None:
            ignored |= areas == number
        else:
            planes[name] = planes.get(name, np.zeros(areas.shape, bool)) | (areas == number)
    return planes, ignored


def save(path: Path, pixels: np.ndarray, **options: Any) -> None:
    """Writes pixels in the format of the path's extension: TIFF by tifffile, .npy, all others by Pillow."""
    path.parent.mkdir(parents=True, exist_ok=True)
    suffix = path.suffix.lower()
    if suffix == ".npy":
        np.save(path, pixels)
    elif suffix == ".tif" and (pixels.dtype != np.uint8 or pixels.ndim == 3):
        import tifffile

        photometric = "rgb" if pixels.ndim == 3 and pixels.shape[2] == 3 else "minisblack"
        tifffile.imwrite(path, pixels, **{"photometric": photometric, "planarconfig": "contig", **options})
    elif pixels.dtype == np.uint16 and pixels.ndim == 3:
        cv2.imwrite(str(path), pixels[..., ::-1])
    else:
        palette = options.pop("palette", None)
        image = Image.fromarray(pixels, "P" if palette else None)
        if palette is not None:
            image.putpalette(palette)
        if suffix in (".jpg", ".jpeg"):
            options.setdefault("quality", 92)
        with path.open("wb") as file:
            image.save(file, {".jpg": "JPEG", ".tif": "TIFF"}.get(suffix, suffix[1:].upper()), **options)


@dataclass
class Canvas:
    """A root to draw into.

    Attributes:
        root: the folder.
        pictures: what was drawn with labels.
        unused: kind -> files that are no part of the data; `init` has to name one of each kind, or its folder.
        names_said: the data name their classes.
    """

    root: Path
    pictures: list[Picture] = field(default_factory=list)
    unused: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    names_said: bool = False

    def text(self, path: str, content: str | Iterable[str]) -> None:
        """Writes a text file, or lines."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content if isinstance(content, str) else "".join(f"{line}\n" for line in content))

    def image(self, path: str, pixels: np.ndarray | None = None) -> np.ndarray:
        """Writes an image, a smooth one of its own if no pixels are given, and returns its pixels."""
        drawn = scene(path).astype(np.uint8) if pixels is None else pixels
        save(self.root / path, drawn)
        return drawn

    def other(self, kind: str, path: str, pixels: np.ndarray | None = None) -> None:
        """Writes an image that is no part of the data."""
        self.image(path, pixels)
        self.unused[kind].append(path)

    def pair(
        self,
        image: str,
        mask: str,
        codes: Codes,
        *,
        split: str | None = None,
        group: str | None = None,
        pixels: np.ndarray | None = None,
        like: str | None = None,
        as_rgb: bool = False,
        **options: Any,
    ) -> np.ndarray:
        """Writes an image and its mask, notes them, and returns the areas of the mask, in which all codes occur.

        Without `pixels`, the image is smooth 8-bit RGB, and resembles the scene of the key `like`. `as_rgb` saves a
        mask of gray values with three equal channels; the options are those of the mask's format.
        """
        if pixels is None:
            pixels = scene(image, like=like).astype(np.uint8)
        self.image(image, pixels)
        areas = patches(image, len(codes), pixels.shape[:2])
        mask_pixels = coded(areas, list(codes))
        save(self.root / mask, np.dstack([mask_pixels] * 3) if as_rgb else mask_pixels, **options)
        self.note(image, mask, pixels, areas, list(codes.values()), split=split, group=group)
        return areas

    def note(
        self,
        image: str,
        source: str,
        pixels: np.ndarray,
        areas: np.ndarray,
        names: Sequence[str | None],
        *,
        split: str | None = None,
        group: str | None = None,
    ) -> None:
        """Notes the truth of an image whose areas 0, 1, ... have the names; None: ignored."""
        planes, ignored = planes_of(areas, names)
        self.pictures.append(Picture(image, source, split, group or image, planes, ignored, thumbnail(pixels)))


def known_split(word: str) -> str:
    """Returns the split that a word such as Training or validation means."""
    return next(known for known in ("train", "val", "test") if word.lower().startswith(known))


def unsplit(image: str, mask: str, codes: Codes = UNNAMED, **options: Any) -> Draw:
    """Draws a layout without splits; `{}` in the paths is the name."""

    def drawing(canvas: Canvas) -> None:
        for name in TWELVE:
            canvas.pair(image.replace("{}", name), mask.replace("{}", name), codes, **options)

    return drawing


def split(
    image: str, mask: str, words: Sequence[str] = ("train", "val"), codes: Codes = UNNAMED, **options: Any
) -> Draw:
    """Draws a layout with a folder for each split, `{s}` in the paths."""

    def drawing(canvas: Canvas) -> None:
        for word, stems in zip(words, (EIGHT, FOUR), strict=True):
            for stem in stems:
                paths = [path.replace("{s}", word).replace("{}", stem) for path in (image, mask)]
                canvas.pair(paths[0], paths[1], codes, split=known_split(word), **options)

    return drawing


def listed(image: str, mask: str, lists: str, line: str = "{}") -> Draw:
    """Draws a layout with lists of names, `{s}` in their path."""

    def drawing(canvas: Canvas) -> None:
        for word, names in SPLITS:
            for name in names:
                canvas.pair(image.replace("{}", name), mask.replace("{}", name), UNNAMED, split=word)
            canvas.text(lists.replace("{s}", word), [line.replace("{}", name) for name in names])

    return drawing


def named(drawing: Draw, texts: Mapping[str, str | Iterable[str]] | None = None) -> Draw:
    """Draws a layout whose folders, values or further text files say the names of its classes."""

    def both(canvas: Canvas) -> None:
        drawing(canvas)
        canvas.names_said = True
        for name, content in (texts or {}).items():
            canvas.text(name, content)

    return both
