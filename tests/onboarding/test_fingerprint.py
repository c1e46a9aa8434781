"""The fingerprint of masks: what a grid keeps of a class, and if classes know up from down; by hand and by torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from segapp.datasets.files import ImagePair
from segapp.datasets.images.pixel_format import RGB8
from segapp.datasets.layouts.formats import class_scheme
from segapp.onboarding import fingerprint
from segapp.onboarding.fingerprint import GRIDS_PX, Fingerprint, measure, measure_ids
from tests.support.drawn_folders import exif_of

SIZE = (37, 53)
SCHEME = class_scheme("folder", classes=["a", "b", "c", "d"])


def saved(folder: Path, masks: list[np.ndarray], *, is_gray: bool = True) -> list[ImagePair]:
    """Writes masks, with images whose bands are equal, or differ in one pixel of the last one."""
    pairs = []
    for number, mask in enumerate(masks):
        image = np.full((*mask.shape, 3), number % 250, np.uint8)
        if not is_gray and number == len(masks) - 1:
            image[-1, -1, 2] += 1
        paths = folder / f"i{number}.png", folder / f"m{number}.png"
        for path, pixels in zip(paths, (image, mask), strict=True):
            Image.fromarray(pixels).save(path)
        pairs.append(ImagePair(*paths, str(number)))
    return pairs


def measured(folder: Path, masks: list[np.ndarray], *, is_gray: bool = True) -> Fingerprint:
    folder.mkdir(exist_ok=True)
    return measure(saved(folder, masks, is_gray=is_gray), SCHEME, RGB8, SIZE)


def blobs(seed: int, *, shift: tuple[int, int] = (0, 0), values: tuple[int, ...] = (1, 3)) -> np.ndarray:
    """Returns one disk for each value on 0, shifted from a random place; `values` are ids with a gap."""
    random, mask = np.random.default_rng(seed), np.zeros(SIZE, np.uint8)
    rows, columns = np.mgrid[: SIZE[0], : SIZE[1]]
    for value in values:
        center = random.uniform(0, 1, 2) * SIZE + shift
        mask[(rows - center[0]) ** 2 + (columns - center[1]) ** 2 < random.uniform(5, 9) ** 2] = value
    return mask


def test_a_line_of_one_pixel_is_lost_on_every_grid() -> None:
    """Its share of a cell is a quarter at most; an edge on a multiple of 4 is kept there, up to the enlarging."""
    ids = np.zeros((64, 64), np.int64)
    ids[:, 32:] = 2
    ids[:, 9] = 1
    on_grid_4 = measure_ids(ids, 4).on_grids[:, 0]
    assert on_grid_4[:, 1].tolist() == [0, 0, 64]
    assert on_grid_4[:, 2].tolist() == [64 * 32] * 3
    assert on_grid_4[:, 0].tolist() == [64 * 31, 64 * 32, 64 * 31]


@pytest.mark.parametrize("row", range(len(GRIDS_PX)))
def test_kept_dice_matches_pooling_and_interpolation_of_torch(row: int) -> None:
    """Sums over whole cells; pixels of 255 are in no class and count nowhere."""
    ids = np.maximum(blobs(3), 2 * (blobs(4, values=(1,)) == 1))
    ids[10:14, 20:40] = 255
    grid_px = GRIDS_PX[row]
    part = torch.from_numpy(ids[: SIZE[0] // grid_px * grid_px, : SIZE[1] // grid_px * grid_px].astype(np.int64))
    planes = torch.stack([(part == number).double() for number in range(4)])[None]
    cells = torch.nn.functional.avg_pool2d(planes, grid_px)
    shares = torch.nn.functional.interpolate(cells, scale_factor=grid_px, mode="bilinear", align_corners=False)
    winner, is_valid = shares[0].argmax(0)[part != 255], part[part != 255]
    for number, (both, there, true) in enumerate(measure_ids(ids, 4).on_grids[:, row].T.tolist()):
        assert true == int((is_valid == number).sum())
        assert abs(there - int((winner == number).sum())) <= 2  # ties of float32
        assert abs(both - int(((winner == number) & (is_valid == number)).sum())) <= 2


def test_dice_and_shares_are_of_all_masks_together(tmp_path: Path) -> None:
    """A class of one mask counts by its pixels; a class without any has no Dice; a damaged mask is left out."""
    masks = [blobs(number, values=(1,)) for number in range(3)]
    masks[1][:4, :8] = 3
    pairs = saved(tmp_path, [*masks, masks[0]])
    (tmp_path / "m3.png").write_bytes(b"no png")
    found = measure(pairs, SCHEME, RGB8, SIZE)
    pixels = np.bincount(np.concatenate([mask.ravel() for mask in masks]), minlength=4)
    assert found.num_masks == 3
    assert found.shares == pytest.approx((pixels / pixels.sum()).tolist())
    assert found.kept[4][2] is None
    sums = sum(measure_ids(mask, 4).on_grids for mask in masks)[:, 1]
    assert found.kept[8][1] == pytest.approx(2 * sums[0, 1] / (sums[1, 1] + sums[2, 1]))
    assert found.kept_of_classes(8) == [found.kept[8][0], found.kept[8][1], found.kept[8][3]]


@pytest.mark.parametrize(
    ("shift", "num_masks", "has_up", "has_sides"),
    [((0, 0), 70, False, False), ((14, 0), 70, True, True), ((0, 18), 70, False, True), ((0, 0), 49, True, True)],
    ids=["anywhere", "lower", "further right", "too few"],
)
def test_flips_are_for_classes_without_a_place(
    tmp_path: Path, shift: tuple[int, int], num_masks: int, has_up: bool, has_sides: bool
) -> None:
    """Class 3 has a place and class 1 has none; a mask without class 3 says nothing about it."""
    masks = []
    for number in range(num_masks):
        mask = blobs(number, values=(1,))
        lower = blobs(number + 1000, values=(3,), shift=shift)
        masks.append(np.where(lower == 3, lower, mask))
    found = measured(tmp_path, masks)
    assert (found.has_up, found.has_sides) == (has_up, has_sides)


def test_a_difference_of_a_few_pixels_does_no_harm(tmp_path: Path) -> None:
    """In each mask, 8 of 408 pixels of the class are in the lowest quarter and have no image: certain, and small."""
    masks = []
    for number in range(60):
        mask = np.zeros((40, 40), np.uint8)
        mask[:, number % 20 : number % 20 + 10] = 3
        mask[38:, 33:37] = 3
        masks.append(mask)
    assert not measured(tmp_path, masks).has_up


def test_stripes_forbid_quarter_turns_and_allow_flips(tmp_path: Path) -> None:
    """Wide and flat: the profile of the rows is not that of the columns."""
    masks = []
    for number in range(60):
        mask = np.zeros((40, 40), np.uint8)
        mask[(2, 32)[number % 2] :][:6] = 2
        masks.append(mask)
    found = measured(tmp_path, masks)
    assert (found.has_up, found.has_sides) == (False, True)


def test_masks_are_measured_as_they_lie_on_the_upright_image(tmp_path: Path) -> None:
    """Every second photo is stored upside down, with its mask; upright, class 3 is in the lower half of all."""
    masks = []
    for number in range(60):
        mask = np.zeros(SIZE, np.uint8)
        mask[20 + number % 9 :, 5 : 20 + number % 7] = 3
        masks.append(mask[::-1, ::-1] if number % 2 else mask)
    pairs = saved(tmp_path, masks)
    for pair in pairs[1::2]:
        Image.open(pair.image).save(pair.image.with_suffix(".jpg"), exif=exif_of(3))
    pairs = [replace(pair, image=pair.image.with_suffix(".jpg")) if i % 2 else pair for i, pair in enumerate(pairs)]
    scheme = replace(SCHEME, mask_orientation="raw")
    assert measure(pairs, scheme, RGB8, SIZE).has_up
    assert not measure(saved(tmp_path, masks), scheme, RGB8, SIZE).has_up


def test_images_of_equal_bands_are_gray(tmp_path: Path) -> None:
    masks = [blobs(number) for number in range(5)]
    assert measured(tmp_path / "gray", masks).is_gray
    assert not measured(tmp_path / "color", masks, is_gray=False).is_gray


def test_pass_over_the_masks_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their number and by their pixels, evenly spread; of a large mask the middle is measured on the grids."""
    monkeypatch.setattr(fingerprint, "MAX_MASKS", 11)
    masks = [blobs(number) for number in range(23)]
    assert measured(tmp_path, masks).num_masks == 11
    monkeypatch.setattr(fingerprint, "MAX_PX", 9 * SIZE[0] * SIZE[1])
    assert measured(tmp_path, masks).num_masks == 9
    monkeypatch.setattr(fingerprint, "MAX_SIDE_PX", 208)
    ids = np.zeros((300, 217), np.int64)
    ids[:46], ids[254:] = 1, 2
    found = measure_ids(ids, 4)
    assert found.pixels[:3].tolist() == [208 * 217, 46 * 217, 46 * 217]
    assert found.on_grids[2, 0].tolist() == [208 * 208, 0, 0, 0]
    assert found.profiles[2, 0].argmax() == 3
