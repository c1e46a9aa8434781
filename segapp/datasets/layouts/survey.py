"""Detect the format, the splits and the contents of the masks of a folder of unknown layout."""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np

from segapp.datasets.files import ImagePair, open_bytes, read_bytes, read_header, shared_images, shown
from segapp.datasets.layouts.formats import DATASETS, DataLocation, find_pairs
from segapp.datasets.layouts.pairing import IMAGE_SUFFIXES
from segapp.errors import ConfigError, DataError

SPLITS = {"train": ("train", "training"), "val": ("val", "validation", "valid", "test", "testing")}
"""Usual names of the splits."""
IMAGE_DIRS = ("images", "image", "imgs", "img", "JPEGImages", "rgb", "frames")
MASK_DIRS = ("masks", "mask", "labels", "label", "annotations", "annots", "gt", "SegmentationClass", "segmentation")
MAX_HEADERS, MAX_MASKS = 400, 120
MAX_COLORS = 64
"""Masks with more colours are not palette masks, but photographs or JPEGs."""


@dataclass(frozen=True)
class Found:
    """A detected layout.

    Attributes:
        format: a key of `DATASETS`.
        folders: `image_dir` and `mask_dir` where they differ from the format's.
        splits: names on disk of "train" and "val"; "val" may be missing.
        pairs: pairs of the training split.
        num_val: number of pairs of the validation split.
        leads_outside: files below the root are links to files outside it.
    """

    format: str
    folders: dict[str, str]
    splits: dict[str, str]
    pairs: tuple[ImagePair, ...]
    num_val: int
    leads_outside: bool = False


@dataclass
class MaskContent:
    """Contents of a sample of the masks.

    Attributes:
        num_masks: number of masks read.
        values: pixels by value, of masks of ids.
        colors: pixels by RGB colour, of RGB masks.
        sizes_px: height and width of every image whose header was read.
    """

    num_masks: int = 0
    values: Counter[int] = field(default_factory=Counter)
    colors: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    sizes_px: list[tuple[int, int]] = field(default_factory=list)

    @property
    def median_px(self) -> tuple[int, int]:
        """Median height and width."""
        return int(median(h for h, _ in self.sizes_px)), int(median(w for _, w in self.sizes_px))


def find_layout(root: Path) -> Found:
    """Return the first known layout that has training images with masks.

    Raises:
        DataError: no layout fits; the message says what the folder holds and what is expected.
        ConfigError: the folder does not exist.
    """
    if not root.is_dir():
        raise ConfigError(f"{shown(root)} is not a folder: give the folder that holds the images and the masks")
    reasons: list[str] = []
    for leads_outside, (format, folders) in product((False, True), list(_candidates(root))):
        train = _first_split(format, root, "train", folders, reasons, allow_outside_root=leads_outside)
        if train is None:
            continue
        name, pairs = train
        found = {"train": name}
        val = _first_split(format, root, "val", folders, reasons, allow_outside_root=leads_outside)
        if val is not None:
            found["val"] = val[0]
            if both := shared_images(pairs, val[1]):
                raise DataError(
                    f"{len(both)} validation images are training images too, such as {shown(both[0])}: take them out "
                    "of one of the lists"
                )
        return Found(format, folders, found, pairs, 0 if val is None else len(val[1]), leads_outside)
    raise DataError(_no_layout(root, reasons))


def _candidates(root: Path) -> Iterable[tuple[str, dict[str, str]]]:
    for format in DATASETS:
        if format != "folder":
            yield format, {}
    yield "folder", {}
    here = {entry.name for entry in root.iterdir() if entry.is_dir()}
    for images in IMAGE_DIRS:
        for masks in MASK_DIRS:
            if images in here and masks in here and (images, masks) != ("images", "masks"):
                yield "folder", {"image_dir": images, "mask_dir": masks}


def _first_split(
    format: str, root: Path, kind: str, folders: dict[str, str], reasons: list[str], *, allow_outside_root: bool
) -> tuple[str, tuple[ImagePair, ...]] | None:
    for name in SPLITS[kind]:
        try:
            image_dir, mask_dir = folders.get("image_dir"), folders.get("mask_dir")
            pairs = find_pairs(
                DataLocation(format, root, image_dir, mask_dir, allow_outside_root=allow_outside_root), name
            )
        except DataError as error:
            if kind == "train" and (root / folders.get("image_dir", "images")).is_dir():
                reasons.append(str(error).split(": format", 1)[0])
            continue
        if pairs:
            return name, pairs
    return None


def _no_layout(root: Path, reasons: Sequence[str]) -> str:
    entries = sorted(entry.name for entry in root.iterdir() if not entry.name.startswith("."))
    there = ", ".join(shown(name) for name in entries[:8]) + (" and more" if len(entries) > 8 else "")
    why = f" ({reasons[-1]})" if reasons else ""
    return (
        f"{shown(root)} is in none of the known layouts{why}: it holds {there or 'nothing'}; lay it out as "
        "images/train, images/val, masks/train, masks/val, or as images/ and masks/ and give --val-share 0.15"
    )


def flat_folders(root: Path) -> dict[str, str] | None:
    """Return folders of images and masks without splits; None if there are none."""
    here = {entry.name for entry in root.iterdir() if entry.is_dir()}
    for images in IMAGE_DIRS:
        for masks in MASK_DIRS:
            if images in here and masks in here and _has_images(root / images) and _has_images(root / masks):
                return {"image_dir": images, "mask_dir": masks}
    return None


def _has_images(folder: Path) -> bool:
    return any(entry.is_file() and entry.suffix.lower() in IMAGE_SUFFIXES for entry in folder.iterdir())


def write_split_lists(root: Path, folders: dict[str, str], val_share: float) -> tuple[int, int]:
    """Write train.txt and val.txt for images without splits.

    Images are ranked by a hash of their names, so that images added later hardly change the split.

    Args:
        root: the data set's folder.
        folders: result of `flat_folders`.
        val_share: share of the images for validation, above 0 and below 1.

    Returns:
        Numbers of training and of validation images.

    Raises:
        ConfigError: a list already exists, or one would be empty.
    """
    for name in ("train.txt", "val.txt"):
        if (root / name).exists():
            raise ConfigError(f"{shown(root / name)} already exists: remove it, or omit --val-share")
    names = sorted(
        entry.name
        for entry in (root / folders["image_dir"]).iterdir()
        if entry.is_file() and entry.suffix.lower() in IMAGE_SUFFIXES
    )
    ranked = sorted(names, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
    num_val = round(val_share * len(ranked))
    if not 0 < num_val < len(ranked):
        raise ConfigError(f"--val-share {val_share:g} of {len(ranked)} images leaves one split empty: change it")
    val = set(ranked[:num_val])
    for file, chosen in (("val.txt", val), ("train.txt", set(names) - val)):
        lines = "".join(f"{Path(name).stem}\n" for name in names if name in chosen)
        (root / file).write_bytes(os.fsencode(lines))
    return len(names) - num_val, num_val


def read_samples(pairs: Sequence[ImagePair]) -> MaskContent:
    """Read some headers and some masks, evenly over the split; unreadable files are skipped."""
    content = MaskContent()
    with ThreadPoolExecutor(4) as pool:
        for header in pool.map(_size, _evenly(pairs, MAX_HEADERS)):
            if header is not None:
                content.sizes_px.append(header)
        for counted in pool.map(_count, _evenly(pairs, MAX_MASKS)):
            if counted is None:
                continue
            values, colors = counted
            content.num_masks += 1
            content.values.update(values)
            content.colors.update(colors)
    if not content.sizes_px:
        raise DataError(f"none of {len(pairs)} images can be read, e.g. {shown(pairs[0].image)}: run segapp check")
    return content


def _evenly(pairs: Sequence[ImagePair], count: int) -> list[ImagePair]:
    step = max(1, len(pairs) // count)
    return list(pairs[::step][:count])


def _size(pair: ImagePair) -> tuple[int, int] | None:
    try:
        header = read_header(pair.image)
    except DataError:
        return None
    return header.height_px, header.width_px


def _count(pair: ImagePair) -> tuple[dict[int, int], dict[tuple[int, int, int], int]] | None:
    """Return the pixels by value and by colour of one mask; None if it cannot be read."""
    if pair.mask is None:
        return None
    try:
        image = open_bytes(read_bytes(pair.mask), pair.mask)
        if image.mode in ("RGB", "RGBA", "CMYK", "YCbCr"):
            pixels = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(np.int32)
            codes, counts = np.unique(pixels @ np.array([65536, 256, 1], np.int32), return_counts=True)
            if len(codes) > MAX_COLORS:
                return {}, {}
            rgb = [(int(c) >> 16, (int(c) >> 8) & 255, int(c) & 255) for c in codes]
            return {}, dict(zip(rgb, counts.tolist(), strict=True))
        ids, counts = np.unique(np.asarray(image).astype(np.int64), return_counts=True)
        return dict(zip(ids.tolist(), counts.tolist(), strict=True)), {}
    except (DataError, OSError, ValueError, io.UnsupportedOperation):
        return None
