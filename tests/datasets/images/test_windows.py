"""Windows of large TIFFs: the pixels that tifffile wrote, and the samples of whole decoding."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch

from segapp.datasets.augment import TrainTransform
from segapp.datasets.cache import PixelCache, memory_files
from segapp.datasets.dataset import SegmentationDataset, TensorOnDisk
from segapp.datasets.files import ImagePair, check_pairs
from segapp.datasets.images import windows as windows_module
from segapp.datasets.images.pixel_format import RGB8, PixelFormat, Pixels
from segapp.datasets.images.raster import Window, read_bands
from segapp.datasets.images.reading import read_image
from segapp.datasets.images.windows import (
    Windows,
    _spread_pixels,
    image_windows,
    mask_blocks,
    mask_windows,
    measure_ranges,
    places_of,
)
from segapp.datasets.inspection import check_ranges
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.masks import UnknownIdsError, read_mask
from segapp.datasets.sampling import SampleKey
from segapp.errors import DataError

rasterio = pytest.importorskip("rasterio", reason="the extra geo is not installed")

SIZE = (203, 317)
SCHEME = class_scheme("folder", classes=["a", "b", "c"])


@pytest.fixture(autouse=True)
def every_tiff_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and blocks of rows are for images of megapixels: these limits are constants that no option sets."""
    for name, value in {"_BLOCK_ROWS": 47, "_BLOCK_PX": 1}.items():
        monkeypatch.setattr(windows_module, name, value)
    monkeypatch.setattr("segapp.datasets.images.tiff_tags.LARGE_PX", 1)


def write_pair(folder: Path, num_bands: int, dtype: str, **options: Any) -> ImagePair:
    rng = np.random.default_rng(num_bands)
    image = rng.integers(0, 255, (*SIZE, num_bands)).astype(dtype)
    kind = {"planarconfig": "contig", "photometric": "rgb" if num_bands == 3 else "minisblack"}
    stored = image[..., 0] if num_bands == 1 else image
    kind = {} if num_bands == 1 else kind
    tifffile.imwrite(folder / "image.tif", stored, compression="zlib", **kind, **options)
    tifffile.imwrite(folder / "mask.tif", rng.integers(0, 3, SIZE).astype(np.uint8), compression="zlib", **options)
    return ImagePair(folder / "image.tif", folder / "mask.tif", "image")


@pytest.mark.parametrize(
    ("num_bands", "dtype", "options"),
    [
        (1, "uint8", {"tile": (64, 64)}),
        (3, "uint8", {"rowsperstrip": 16}),
        (5, "uint16", {"tile": (64, 64)}),
        (5, "uint16", {}),
    ],
)
def test_windows_hold_the_pixels_of_the_whole(
    num_bands: int, dtype: str, options: dict[str, Any], tmp_path: Path
) -> None:
    pair = write_pair(tmp_path, num_bands, dtype, **options)
    pixels = RGB8 if dtype == "uint8" else PixelFormat(tuple(range(5, 0, -1)), dtype)
    image = image_windows(pair.image, pixels)
    assert image is not None
    whole = read_image(pair.image, pixels)
    assert (image.shape, image.dtype) == (whole.shape, whole.dtype)
    for rows, columns in (
        (slice(0, 7), slice(299, 317)),
        (slice(50, 180), slice(3, 131)),
        (slice(199, None), slice(None)),
    ):
        np.testing.assert_array_equal(image[rows, columns], whole[rows, columns])
    np.testing.assert_array_equal(image[:], whole)
    target = mask_windows(pair.masks[0], SCHEME)
    assert target is not None
    for large, expected in (
        (TensorOnDisk(image), torch.from_numpy(whole.copy()).permute(2, 0, 1)[None]),
        (TensorOnDisk(target), torch.from_numpy(read_mask(pair.masks[0], SCHEME))[None]),
    ):
        assert (large.shape, len(large)) == (expected.shape, len(expected))
        assert torch.equal(large[..., 3:50, 100:], expected[..., 3:50, 100:])
    stored = tifffile.imread(pair.image).reshape(*SIZE, -1)
    np.testing.assert_array_equal(
        whole, stored[..., ::-1] if dtype == "uint16" else np.broadcast_to(stored, whole.shape)
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
@pytest.mark.parametrize("in_windows", [True, False])
def test_places_of_a_value_are_all_its_pixels_found_in_one_cell(in_windows: bool, dtype: type) -> None:
    size = (101, 151)
    stored = np.random.default_rng(0).choice([0, 3, 9], size, p=[0.5, 0.4995, 0.0005]).astype(dtype)
    stored[60:, :100], stored[100, 150] = 0, 9  # cells without the value 3; the last pixel
    reads: list[tuple[int, int]] = []

    def read(window: Window) -> Pixels:
        reads.append(stored[window].shape)
        return stored[window]

    mask = Windows(size, stored.dtype, read) if in_windows else stored
    for value in (0, 3, 9, 5):
        found = places_of(mask, value)
        del reads[:]
        assert sorted(found[at] for at in range(len(found))) == np.flatnonzero(stored == value).tolist()
        assert max(reads, default=(0, 0)) <= (47, 47)
        assert not in_windows or len(reads) == len(found)


def test_aimed_crops_of_a_large_image_read_their_window_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, the image is read too if it declares nodata: a pixel without data has no class."""
    rng, reads = np.random.default_rng(0), list[tuple[str, int]]()
    image = rng.integers(1, 200, (*SIZE, 3), np.uint8)
    ids = (rng.random(SIZE) < 0.2).astype(np.uint8)
    ids[:100, 0], ids[5, 7] = 2, 2
    image[:100, 0] = 0  # of 101 pixels of the class, one has data
    pairs = []
    for name in ("plain", "with nodata"):
        tags = [(42113, "s", 0, "0", True)] * (name == "with nodata")
        tifffile.imwrite(tmp_path / f"{name}.tif", image, photometric="rgb", tile=(64, 64), extratags=tags)
        tifffile.imwrite(tmp_path / f"{name}_m.tif", ids, tile=(64, 64))
        pairs.append(ImagePair(tmp_path / f"{name}.tif", tmp_path / f"{name}_m.tif", name))

    def counted(path: Path, bands: Sequence[int], window: Window | None = None) -> Pixels:
        found = read_bands(path, bands, window)
        reads.append((path.name, found.shape[0] * found.shape[1]))
        return found

    for module in ("images.windows", "images.reading", "masks"):
        monkeypatch.setattr(f"segapp.datasets.{module}.read_bands", counted)
    transform = TrainTransform((20, 30), [{"ScaledCrop": {"scale": [1, 1], "cat_max_ratio": 1}}])
    dataset = SegmentationDataset(pairs, SCHEME, transform, seed=3)
    for index, name in ((0, "plain.tif"), (1, "with nodata.tif")):
        for epoch in range(9):
            del reads[:]
            target = dataset[SampleKey(epoch, index, 0, 2)].target
            assert (target == 2).any()
            of_image = [num_px for path, num_px in reads if path == name]
            of_mask = [num_px for path, num_px in reads if path != name]
            if epoch:
                assert max(of_mask) <= 47 * 47
                assert set(of_image) <= {20 * 30, 47 * 47, 47 * 35, 15 * 47, 15 * 35}
                assert name != "plain.tif" or of_image == [20 * 30]
            else:
                assert sum(of_mask) < SIZE[0] * SIZE[1] + 2 * 47 * 47


@pytest.mark.parametrize(("most_px", "step"), [(4_022, 4), (7_151, 3)])
def test_measured_pixels_lie_on_a_grid_over_the_whole_image(
    most_px: int, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the rows of a block, 47, are no multiple of the step; ranges do not show which pixels they are of."""
    pair = write_pair(tmp_path, 5, "uint16", rowsperstrip=16)
    monkeypatch.setattr(windows_module, "_MAX_PX", most_px)
    expected = tifffile.imread(pair.image)[::step, ::step].reshape(-1, 5)
    np.testing.assert_array_equal(_spread_pixels(pair.image, PixelFormat((1, 2, 3, 4, 5), "uint16")), expected)


def test_ranges_are_of_images_from_the_whole_list(tmp_path: Path) -> None:
    """Of 130, 64 are measured, of which the last one has the number 63 * 130 // 64."""
    pairs = [ImagePair(tmp_path / f"{number}.tif", None, str(number)) for number in range(130)]
    for number, pair in enumerate(pairs):
        tifffile.imwrite(pair.image, np.full((3, 5), number, np.uint16))
    assert measure_ranges(pairs, PixelFormat((1,), "uint16"), SCHEME) == ((0.0, 127.0),)


@pytest.mark.parametrize("large_px", [1, 10**9])
def test_rare_class_lies_in_the_range(large_px: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against numpy's percentiles of each class; a hot pixel and a class of a few pixels do not count."""
    monkeypatch.setattr("segapp.datasets.images.tiff_tags.LARGE_PX", large_px)
    rng, pairs, seen, classes = np.random.default_rng(1), [], [], []
    for number in range(3):
        ids = np.where(rng.random(SIZE) < 0.005, 1, 0).astype(np.uint8)
        ids[5, 9 * number : 9 * number + 9] = 2
        image = np.stack(
            [300 + 40 * rng.standard_normal(SIZE) + 1500.0 * ids, 900 - 500 * (ids == 1) + rng.random(SIZE)], 2
        )
        image[ids == 2], image[100, 100] = 9000, 40_000
        stored = image.clip(0).astype(np.uint16)
        pair = ImagePair(tmp_path / f"{number}.tif", tmp_path / f"{number}_m.tif", str(number))
        tifffile.imwrite(pair.image, stored, photometric="minisblack", planarconfig="contig")
        tifffile.imwrite(pair.masks[0], ids)
        pairs.append(pair)
        seen.append(stored.reshape(-1, 2))
        classes.append(ids.ravel())
    values, of_class = np.concatenate(seen), np.concatenate(classes)
    ends = np.array([np.percentile(values[of_class == each], (0.5, 99.5), axis=0) for each in (0, 1)])
    expected = [(low, high) for low, high in zip(np.floor(ends[:, 0].min(0)), np.ceil(ends[:, 1].max(0)), strict=True)]
    measured = measure_ranges(pairs, PixelFormat((1, 2), "uint16"), SCHEME)
    assert measured == tuple(expected)
    assert measured[0][1] > 1800 > 500 > measured[1][0]
    pairs[1].masks[0].write_bytes(b"damaged")  # then its image counts as one class
    assert measure_ranges(pairs, PixelFormat((1, 2), "uint16"), SCHEME)[0][0] == pytest.approx(measured[0][0], abs=9)


def test_squares_of_a_large_image_are_compared_with_the_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine around the middle, of 64 x 64 pixels; the clipped border is not read."""
    image = np.full((*SIZE, 2), 9, np.int16)
    image[60:-60, 70:-70] = [[5, -3]]
    tifffile.imwrite(tmp_path / "image.tif", image, photometric="minisblack", planarconfig="contig")
    places: list[tuple[int, int]] = []

    def count(path: Path, bands: Sequence[int], window: Window | None = None) -> Pixels:
        assert window is not None
        places.append((window[0].start, window[1].start))
        return read_bands(path, bands, window)

    monkeypatch.setattr(windows_module, "read_bands", count)
    pixels = PixelFormat((1, 2), "int16", ((0.0, 9.0), (0.0, 9.0)))
    (found,) = check_ranges("val", [ImagePair(tmp_path / "image.tif", None, "image")], SCHEME, pixels)
    assert places == [(top, left) for top in (34, 69, 104) for left in (63, 126, 189)]
    assert found.message.startswith("val: band 2: ")


def test_windows_of_coloured_masks_hold_the_ids_of_the_whole(tmp_path: Path) -> None:
    palette = [(0, 0, 0), (0, 0, 255), (0, 255, 0), (255, 0, 0)]
    scheme = class_scheme("folder", classes=["a", "b", "c", "d"], palette=palette, rgb=True)
    ids = np.random.default_rng(0).integers(0, 4, SIZE)
    tifffile.imwrite(tmp_path / "mask.tif", np.array(palette, np.uint8)[ids], photometric="rgb", tile=(64, 64))
    found = mask_windows(tmp_path / "mask.tif", scheme)
    assert found is not None
    np.testing.assert_array_equal(found[50:180, 3:131], ids[50:180, 3:131])
    np.testing.assert_array_equal(read_mask(tmp_path / "mask.tif", scheme), ids)


def test_rotated_and_palette_tiffs_are_read_whole(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "rotated.tif", np.zeros((*SIZE, 3), np.uint8), extratags=[(274, "H", 1, 6, True)])
    palette = np.zeros((3, 256), np.uint16)
    tifffile.imwrite(tmp_path / "palette.tif", np.zeros(SIZE, np.uint8), photometric="palette", colormap=palette)
    profile = {"driver": "GTiff", "height": 9, "width": 16, "count": 1, "dtype": "uint8", "nbits": 4}
    with rasterio.open(tmp_path / "scaled.tif", "w", **profile, transform=rasterio.Affine.scale(2)) as file:
        file.write(np.arange(144, dtype=np.uint8).reshape(1, 9, 16) % 16)  # shown as grays from 0 to 255
    for name in ("rotated", "palette", "scaled"):
        assert image_windows(tmp_path / f"{name}.tif", RGB8) is None


def test_images_beyond_the_pixel_limit_are_allowed_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = write_pair(tmp_path, 3, "uint8", tile=(64, 64))
    monkeypatch.setattr("segapp.datasets.files.MAX_PIXELS", 1000)
    assert check_pairs([pair]) == (SIZE,)
    assert read_image(pair.image, max_pixels=1000).shape == (*SIZE, 3)
    for most_px, is_large in ((1000, True), (SIZE[0] * SIZE[1], False)):  # a smaller one is decoded once, for the cache
        monkeypatch.setattr("segapp.datasets.dataset.MAX_PIXELS", most_px)
        cache = PixelCache(memory_files(), [pair], [SIZE], SCHEME.dtype)
        assert SegmentationDataset([pair], SCHEME, cache=cache).is_large(0) is is_large
    monkeypatch.setitem(sys.modules, "rasterio", None)  # as if it were not installed
    with pytest.raises(DataError, match="at most 1000 pixels are read"):
        read_image(pair.image, max_pixels=1000)


def test_damaged_tile_names_the_file(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, 5, "uint16", tile=(64, 64))
    content = bytearray(pair.image.read_bytes())
    with tifffile.TiffFile(pair.image) as file:
        start = file.pages[0].dataoffsets[0]  # type: ignore[union-attr]
    content[start : start + 400] = bytes(400)
    pair.image.write_bytes(bytes(content))
    image = image_windows(pair.image, PixelFormat((1, 2), "uint16"))
    assert image is not None
    with pytest.raises(DataError, match=r"image\.tif: cannot be decoded"):
        image[0:10, 0:10]


def test_rows_of_blocks_are_the_whole_and_its_ids_together(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, 3, "uint8", tile=(64, 64))
    blocks = list(mask_blocks(pair.masks, SCHEME))
    assert [len(block) for block in blocks] == [47, 47, 47, 47, 15]
    np.testing.assert_array_equal(np.concatenate(blocks), read_mask(pair.masks[0], SCHEME))
    mask = np.zeros(SIZE, np.uint8)
    mask[10, :5], mask[190, :7], mask[191, :3] = 9, 9, 8
    tifffile.imwrite(tmp_path / "wrong.tif", mask, tile=(64, 64))
    with pytest.raises(UnknownIdsError, match=r"8 \(3 px\), 9 \(12 px\)") as found:
        list(mask_blocks([tmp_path / "wrong.tif"], SCHEME))
    assert found.value.present == {0: mask.size - 15, 8: 3, 9: 12}
