"""What the masks of a data set say about the model and the augmentation that suit them: its fingerprint.

Shapes: H, W height and width in pixels; C classes; M masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import ImagePair, turn_of_mask
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.images.reading import read_with_nodata
from segapp.datasets.images.windows import load_ignored, load_missing
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.masks import read_masks, without_nodata
from segapp.datasets.orientation import upright
from segapp.datasets.resources import MASK_READERS, evenly_spread, side_by_side
from segapp.errors import DataError

MAX_MASKS, MAX_PX = 200, 100_000_000
"""Largest number of masks that are measured, and of their pixels: ten seconds on two cores for 11 classes."""
MAX_SIDE_PX = 2048
"""Of larger masks, the middle is measured on the grids, and every second or third row for the profiles."""
GRIDS_PX = (4, 8, 16, 32)
"""Output strides of networks."""
MIN_FOR_SYMMETRY = 50
"""Number of masks with a class from which its profile can be distinguished from chance."""
_NUM_BANDS = 4
"""Few, because every band adds chance to the difference of two profiles."""
_NUM_DRAWS, _CHANCE = 999, 0.01
_MIN_MOVED = 0.03  # share of a class's pixels: a smaller difference does no harm, even if many masks prove it


@dataclass(frozen=True)
class Fingerprint:
    """Measurements of masks. A class without a pixel has the share 0 and keeps no Dice."""

    num_masks: int
    is_gray: bool  # the bands of the images are equal
    shares: tuple[float, ...]  # of the valid pixels, by class
    kept: Mapping[int, tuple[float | None, ...]]  # grid in pixels -> Dice by class
    has_up: bool  # a class lies higher or lower in the images than its mirror image does, or too few masks tell
    has_sides: bool  # the same for quarter turns, which also exchange rows and columns

    def kept_of_classes(self, grid_px: int) -> list[float]:
        return [dice for dice in self.kept[grid_px] if dice is not None] or [1.0]


@dataclass(frozen=True)
class _Measured:
    """Sums over one mask."""

    pixels: NDArray[np.int64]  # of each class, (C,)
    # On the whole cells of each grid, pixels of each class that stay in it, that it has afterwards, and that it had
    on_grids: NDArray[np.int64]  # (3, grids, C)
    profiles: NDArray[np.float32]  # share of each class in bands of rows, and in bands of columns, (C, 2, bands)


def measure(
    pairs: Sequence[ImagePair], scheme: ClassScheme, pixels: PixelFormat, median_px: tuple[int, int]
) -> Fingerprint:
    """Return the fingerprint of a split: of up to `MAX_MASKS` masks and 16 images that are evenly spread.

    A file that cannot be read is left out; `segapp check` names it. `median_px` is the usual height and width.
    """
    masked = [pair for pair in pairs if pair.mask is not None]
    chosen = evenly_spread(masked, min(MAX_MASKS, max(8, MAX_PX // (median_px[0] * median_px[1]))))

    def measured(pair: ImagePair) -> _Measured | None:
        try:
            ids = upright(read_masks(pair.masks, scheme), turn_of_mask(pair, scheme.mask_orientation))
            ignored = load_ignored(pair, load_missing(pair.image, pixels))
            if ignored is not None and ignored.shape[:2] == ids.shape:
                ids = without_nodata(ids, ignored[: len(ids)], scheme)
        except DataError:
            return None
        return measure_ids(ids, scheme.num_classes)

    found = [each for each in side_by_side(measured, chosen, MASK_READERS, 4) if each is not None]
    counts = sum((each.pixels for each in found), np.zeros(scheme.num_classes, np.int64))
    overlap, kept, inside = sum(
        (each.on_grids for each in found), np.zeros((3, len(GRIDS_PX), scheme.num_classes), np.int64)
    )
    profiles = np.stack([each.profiles for each in found]) if found else np.zeros((0, scheme.num_classes, 2, 1))
    own = [profiles[profiles[:, number].any(axis=(1, 2)), number] for number in np.flatnonzero(counts)]
    has_up = any(_differ(rows, rows[:, ::-1]) for rows in (each[:, 0] for each in own))
    # Columns that differ from their own mirror image also differ from rows that do not.
    has_sides = has_up or any(_differ(each[:, 0], each[:, 1]) for each in own)
    return Fingerprint(
        num_masks=len(found),
        is_gray=all(_is_gray(pair, pixels) for pair in evenly_spread(pairs, 16)),
        shares=tuple((counts / max(1, counts.sum())).tolist()),
        kept={
            grid_px: tuple(
                2 * int(both) / int(there + true) if true else None
                for both, there, true in zip(overlap[i], kept[i], inside[i], strict=True)
            )
            for i, grid_px in enumerate(GRIDS_PX)
        },
        has_up=has_up,
        has_sides=has_sides,
    )


def _is_gray(pair: ImagePair, pixels: PixelFormat) -> bool:
    try:
        image, _ = read_with_nodata(pair.image, pixels)
    except DataError:
        return True  # says nothing
    return bool((image == image[..., :1]).all())


def measure_ids(ids: NDArray[np.integer], num_classes: int) -> _Measured:
    """Return the sums over one mask (H, W); ids outside the classes are ignored.

    A network of output stride s knows a mask as shares of the classes in cells of s x s pixels, and its logits are
    enlarged. So the mask is averaged over cells, enlarged bilinearly, and each pixel gets the class with the largest
    share: the Dice of the result with the mask is what the grid keeps of a class. It is an estimate and no bound,
    because logits are not shares.
    """
    pixels = np.bincount(ids[(ids >= 0) & (ids < num_classes)], minlength=num_classes)
    present = np.flatnonzero(pixels).tolist()
    profiles = np.zeros((num_classes, 2, _NUM_BANDS), np.float32)
    sparse = ids[tuple(slice(None, None, -(-length // MAX_SIDE_PX)) for length in ids.shape)]
    for number in present:
        plane = (sparse == number).astype(np.float32)
        for axis, size in enumerate([(1, _NUM_BANDS), (_NUM_BANDS, 1)]):
            profiles[number, axis] = cv2.resize(plane, size, interpolation=cv2.INTER_AREA).ravel()
    top, left = (max(0, length - MAX_SIDE_PX) // 2 for length in ids.shape)
    ids = ids[top : top + MAX_SIDE_PX, left : left + MAX_SIDE_PX]
    planes = {number: (ids == number).astype(np.float32) for number in present}
    sums = np.zeros((3, len(GRIDS_PX), num_classes), np.int64)
    for row, grid_px in enumerate(GRIDS_PX):
        rows, columns = (length // grid_px for length in ids.shape)
        if not rows or not columns:
            continue
        whole = np.s_[: rows * grid_px, : columns * grid_px]
        most, winner = np.zeros(ids[whole].shape, np.float32), np.zeros(ids[whole].shape, np.int64)
        for number, plane in planes.items():
            cells = cv2.resize(plane[whole], (columns, rows), interpolation=cv2.INTER_AREA)
            share = cv2.resize(cells, most.shape[::-1], interpolation=cv2.INTER_LINEAR)
            np.copyto(winner, number, where=share > most)
            np.maximum(most, share, out=most)
        is_valid = (ids[whole] >= 0) & (ids[whole] < num_classes)
        true, there = ids[whole][is_valid], winner[is_valid]
        for place, each in enumerate((true[true == there], there, true)):
            sums[place, row] = np.bincount(each, minlength=num_classes)
    return _Measured(pixels, sums, profiles)


def _differ(profiles: NDArray[np.floating], images: NDArray[np.floating]) -> bool:
    """Return True if the mean of profiles (M, bands) differs from the mean of their images by more than chance.

    If both are equally likely for every mask, exchanging them at random changes the difference of the means only by
    chance. With few masks nothing is known, and they count as different.
    """
    if len(profiles) < MIN_FOR_SYMMETRY:
        return True
    differences = profiles - images
    random = np.random.default_rng(0)
    signs = random.choice([-1.0, 1.0], (_NUM_DRAWS, len(differences)))
    by_chance = np.quantile(np.abs(signs @ differences).sum(axis=1), 1 - _CHANCE)
    moved = np.abs(differences.sum(axis=0)).sum()
    return bool(moved > by_chance and moved > 2 * _MIN_MOVED * profiles.sum())
