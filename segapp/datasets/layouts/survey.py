"""Looks at a folder of unknown layout: which format it is in, which splits there are, and what its masks hold."""

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

from segapp.datasets.files import ImagePair, open_bytes, read_bytes, read_header, shown
from segapp.datasets.layouts.formats import DATASETS, DataLocation, find_pairs
from segapp.datasets.layouts.pairing import IMAGE_SUFFIXES
from segapp.errors import ConfigError, DataError

SPLITS = {"train": ("train", "training"), "val": ("val", "validation", "valid", "test", "testing")}
"""Names that a split goes by."""
IMAGE_DIRS = ("images", "image", "imgs", "img", "JPEGImages", "rgb", "frames")
MASK_DIRS = ("masks", "mask", "labels", "label", "annotations", "annots", "gt", "SegmentationClass", "segmentation")
MAX_HEADERS, MAX_MASKS = 400, 120
MAX_COLORS = 64
"""More colours than this are no palette, but a photograph or a JPEG."""


@dataclass(frozen=True)
class Found:
    """A layout that fits.

    Attributes:
        format: a key of `DATASETS`.
        folders: `image_dir` and `mask_dir` where they are not the format's own.
        splits: their names on disk by their usual ones; "val" may be missing.
        pairs: the training split's.
        num_val: pairs of the validation split.
        leads_outside: links below the root lead out of it.
    """

    format: str
    folders: dict[str, str]
    splits: dict[str, str]
    pairs: tuple[ImagePair, ...]
    num_val: int
    leads_outside: bool = False


@dataclass
class MaskContent:
    """What the masks hold that were looked at.

    Attributes:
        num_masks: looked at.
        values: pixels by value, of masks whose values are ids.
        colors: pixels by RGB colour, of masks that are pictures.
        sizes_px: height and width of every image looked at.
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
    """The first known layout in which training images with masks are found.

    Args:
        root: the data set's folder.

    Raises:
        DataError: none fits; the message says what there is and what is expected.
        ConfigError: the folder is not there.
    """
    if not root.is_dir():
        raise ConfigError(f"{shown(root)} is no folder: name the folder that holds the images and the masks")
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
    """Folders of images and masks that are not divided into splits; None where there are none."""
    here = {entry.name for entry in root.iterdir() if entry.is_dir()}
    for images in IMAGE_DIRS:
        for masks in MASK_DIRS:
            if images in here and masks in here and _has_images(root / images) and _has_images(root / masks):
                return {"image_dir": images, "mask_dir": masks}
    return None


def _has_images(folder: Path) -> bool:
    return any(entry.is_file() and entry.suffix.lower() in IMAGE_SUFFIXES for entry in folder.iterdir())


def write_split_lists(root: Path, folders: dict[str, str], val_share: float) -> tuple[int, int]:
    """Writes train.txt and val.txt for images without splits; an image's name alone decides, so more may be added.

    Args:
        root: the data set's folder.
        folders: as `flat_folders` gives them.
        val_share: share of the images for validation, above 0 and below 1.

    Returns:
        Number of training and of validation images.

    Raises:
        ConfigError: a list is there already, or the share leaves one of them empty.
    """
    for name in ("train.txt", "val.txt"):
        if (root / name).exists():
            raise ConfigError(f"{shown(root / name)} is there already: take it away, or leave --val-share out")
    names = sorted(
        entry.name
        for entry in (root / folders["image_dir"]).iterdir()
        if entry.is_file() and entry.suffix.lower() in IMAGE_SUFFIXES
    )
    ranked = sorted(names, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
    num_val = round(val_share * len(ranked))
    if not 0 < num_val < len(ranked):
        raise ConfigError(f"--val-share {val_share:g} of {len(ranked)} images leaves nothing for one split: change it")
    val = set(ranked[:num_val])
    for file, chosen in (("val.txt", val), ("train.txt", set(names) - val)):
        lines = "".join(f"{Path(name).stem}\n" for name in names if name in chosen)
        (root / file).write_bytes(os.fsencode(lines))
    return len(names) - num_val, num_val


def look_into(pairs: Sequence[ImagePair]) -> MaskContent:
    """Reads some headers and some masks, evenly over the split; what cannot be read is left to `segapp check`."""
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
        raise DataError(f"none of {len(pairs)} images can be read, for one {shown(pairs[0].image)}: see segapp check")
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
    """Pixels by value, or by colour, of one mask."""
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
