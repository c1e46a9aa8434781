"""One image in a TIFF, however it is stored: every reader has the verdict and the pixels of every other one.

The files are written by rasterio and tifffile. Pixels of the images are their positions, so a crop says where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch

from segapp.datasets.augment import TrainTransform
from segapp.datasets.augment.entries import BandValues
from segapp.datasets.cache import PixelCache, disk_files, memory_files
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.files import ImagePair
from segapp.datasets.images import windows as windows_module
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.images.reading import read_image
from segapp.datasets.images.windows import measure_pixels
from segapp.datasets.inspection import examine
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.masks import read_mask
from segapp.datasets.sampling import SampleKey
from segapp.errors import DataError
from segapp.inference.predict.reading import InputFile, read_picture
from segapp.onboarding.content import read_contents

rasterio = pytest.importorskip("rasterio", reason="the extra geo is not installed")
copy = pytest.importorskip("rasterio.shutil").copy

SIZE = (203, 317)
SCHEME = class_scheme("folder", classes=["a", "b", "c"])
PIXELS = PixelFormat((1,), "uint16", ((0.0, 65535.0),))
POSITIONS = np.arange(SIZE[0] * SIZE[1], dtype=np.uint16).reshape(SIZE)  # below 65536: each has its own
SEVERAL = np.s_[[0, 0, 0]]


def gdal(path: Path, pixels: np.ndarray, *, mask: bool = False, overviews: bool = False, **options: Any) -> None:
    planes = pixels if pixels.ndim == 3 else pixels[None]
    profile = {"driver": "GTiff", "height": SIZE[0], "width": SIZE[1], "count": len(planes), "dtype": pixels.dtype}
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True), rasterio.open(path, "w", **profile, **options) as file:
        file.write(planes)
        if mask:
            file.write_mask(pixels % 2 == 0)
    if overviews:
        with rasterio.open(path, "r+") as file:
            file.build_overviews([2, 4, 8], rasterio.enums.Resampling.mode)


def cog(path: Path, pixels: np.ndarray) -> None:
    gdal(path.with_suffix(".plain"), pixels)
    copy(path.with_suffix(".plain"), path, driver="COG", blocksize=128, compress="deflate")
    path.with_suffix(".plain").unlink()


def pages(path: Path, pixels: np.ndarray, *others: Any, **marks: Any) -> None:
    """Write a TIFF with further pages, each a part of the pixels."""
    with tifffile.TiffWriter(path) as file:
        file.write(pixels, photometric="minisblack", metadata=None, subifds=marks.pop("subifds", None))
        for other in others:
            file.write(pixels[other], photometric="minisblack", metadata=None, **marks)


HALF, QUARTER = np.s_[::2, ::2], np.s_[::4, ::4]
STRUCTURES: dict[str, Callable[[Path, np.ndarray], None]] = {
    "tiles": lambda path, pixels: gdal(path, pixels, tiled=True, blockxsize=64, blockysize=32),
    "strips of BigTIFF": lambda path, pixels: tifffile.imwrite(path, pixels, bigtiff=True, rowsperstrip=7),
    "overviews": lambda path, pixels: gdal(path, pixels, overviews=True),
    "COG": cog,
    "mask page": lambda path, pixels: gdal(path, pixels, mask=True, overviews=True),
    "pyramid below the page": lambda path, pixels: pages(path, pixels, HALF, QUARTER, subifds=2, subfiletype=1),
    "pyramid after the page": lambda path, pixels: pages(path, pixels, HALF, QUARTER, subfiletype=1),
    "thumbnail": lambda path, pixels: pages(path, pixels, np.s_[:90, :120]),  # not marked
    "LERC": lambda path, pixels: gdal(path, pixels, compress="lerc"),  # which Pillow does not decode
    "frames": lambda path, pixels: pages(path, pixels, np.s_[::-1], np.s_[:, ::-1]),
    "other page": lambda path, pixels: pages(path, pixels, np.s_[9:, :], HALF),
    "stack with one page": lambda path, pixels: tifffile.imwrite(
        path, np.stack([pixels, pixels[::-1], pixels[:, ::-1]]).astype(np.uint16), imagej=True, truncate=True
    ),
}
REFUSED = {"frames", "other page", "stack with one page"}


def readers(pair: ImagePair, folder: Path) -> Iterator[tuple[str, Callable[[], tuple[Any, Any]]]]:
    """Yield the ways of reading a pair: what they return is compared with the pixels, or with the counts of classes."""
    scaled = {"ScaledCrop": {"scale": [1, 1], "cat_max_ratio": 1}}
    own = TrainTransform((48, 64), [scaled], bands=BandValues(PIXELS.ranges, PIXELS.fill))

    def dataset(**options: Any) -> SegmentationDataset:
        return SegmentationDataset([pair], SCHEME, pixels=PIXELS, **options)

    def cache(kind: str) -> PixelCache:
        files = memory_files() if kind == "ram" else disk_files(folder, "root", "train", SCHEME, PIXELS)
        return PixelCache(files, [pair], [SIZE], SCHEME.dtype, PIXELS)

    def crop(aim: int | None) -> tuple[Any, Any]:
        direct, kept = (
            dataset(transform=own, seed=5, cache=each)[SampleKey(1, 0, 0, aim)] for each in (None, cache("ram"))
        )
        assert torch.equal(direct.image, kept.image)
        assert torch.equal(direct.target, kept.target)
        assert aim is None or (direct.target == aim).any()
        return direct.image[0].numpy(), direct.target.numpy()

    def in_windows() -> tuple[Any, Any]:
        if not dataset().is_large(0):
            return dataset().read(0)
        batch = dataset().large_batch(0)
        images, targets = (
            torch.cat([each[..., :50, :], each[..., 50:, :]], -2) for each in (batch.images, batch.target)
        )
        return images[0, 0].numpy(), targets[0].numpy()

    def cached(kind: str) -> tuple[Any, Any]:
        filled = dataset(cache=cache(kind))
        filled.read(0)
        assert filled.cache is not None
        return filled.cache.get(0) or (None, None)

    def checked() -> tuple[Any, Any]:
        (report,) = examine({"train": [pair]}, SCHEME, crop_px=(9, 9), pixels=PIXELS)
        for finding in report.findings:
            if finding.severity == "error":
                raise DataError(finding.message)
        return None, report.targets.frequencies.pixels

    def proposed() -> tuple[Any, Any]:
        content = read_contents([pair])
        measure_pixels([pair.image])
        for mask, reason in content.unread.items():
            raise DataError(f"{mask}: {reason}")
        return None, tuple(content.values[value] for value in range(3))

    yield "whole", lambda: dataset().read(0)
    yield "windows", in_windows
    yield "crop", lambda: crop(None)
    yield "aimed crop", lambda: crop(2)
    yield "cache in memory", lambda: cached("ram")
    yield "cache on a disk", lambda: cached("disk")
    yield "check", checked
    yield "init", proposed
    yield "predict", lambda: (read_picture(InputFile(pair.image, "a"), PIXELS).pixels[:], dataset().read(0)[1])


@pytest.mark.sampled(2)  # of each role in windows or as a whole
@pytest.mark.parametrize(("role", "large_px"), [("image", 1), ("mask", 1), ("mask", 10**9), ("image", 10**9)])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_reader_means_the_same_image(
    structure: str, role: str, large_px: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segapp.datasets.images.tiff_tags.LARGE_PX", large_px)
    monkeypatch.setattr(windows_module, "_BLOCK_ROWS", 47)
    ids = np.random.default_rng(1).choice(3, SIZE, p=[0.9, 0.0999, 0.0001]).astype(np.uint8)
    ids[50, 60] = 2
    pair = ImagePair(tmp_path / "image.tif", tmp_path / "mask.tif", "a")
    for path, pixels in ((pair.image, POSITIONS), (tmp_path / "mask.tif", ids)):
        own = STRUCTURES[structure] if path.stem == role else STRUCTURES["tiles"]
        own(path, pixels)
    counts = tuple(np.bincount(ids.ravel(), minlength=3).tolist())
    verdicts = {}
    for name, read in readers(pair, tmp_path):
        try:
            image, mask = read()
        except DataError as error:
            verdicts[name] = str(error)
            continue
        verdicts[name] = ""
        if image is None:
            assert mask == counts, name
            continue
        image = np.squeeze(image)
        if "crop" in name:
            np.testing.assert_array_equal(mask, ids.ravel()[image], err_msg=name)
        else:
            np.testing.assert_array_equal(image, POSITIONS, err_msg=name)
            np.testing.assert_array_equal(mask, ids, err_msg=name)
    if structure in REFUSED:
        words = f"{role}.tif: " + ("the mask has several frames" if role == "mask" else "it holds")
        assert all(words in said for said in verdicts.values()), verdicts
    else:
        assert not any(verdicts.values()), verdicts


@pytest.mark.parametrize("large_px", [1, 10**9])
@pytest.mark.parametrize("options", [{"compress": "lerc"}, {"compress": "webp"}, {"photometric": "minisblack"}])
def test_picture_that_only_rasterio_decodes(
    options: dict[str, str], large_px: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache may not refuse what windows read, and a small file not what a large one may be."""
    pixels = np.random.default_rng(3).integers(0, 256, (3, *SIZE), np.uint8)
    gdal(tmp_path / "image.tif", pixels, **{"photometric": "rgb", "WEBP_LOSSLESS": True, **options})
    monkeypatch.setattr("segapp.datasets.images.tiff_tags.LARGE_PX", large_px)
    np.testing.assert_array_equal(read_image(tmp_path / "image.tif"), np.moveaxis(pixels, 0, -1))


@pytest.mark.parametrize("large_px", [1, 10**9])
def test_pages_of_classes_have_smaller_copies(large_px: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segapp.datasets.images.tiff_tags.LARGE_PX", large_px)
    planes = np.random.default_rng(2).integers(0, 2, (3, *SIZE), np.uint8)
    with tifffile.TiffWriter(tmp_path / "mask.tif") as file:
        for plane in planes:
            file.write(plane, photometric="minisblack", metadata=None)
            file.write(plane[::3, ::3], photometric="minisblack", metadata=None, subfiletype=1)
    scheme = class_scheme("folder", classes=["a", "b", "c"], multilabel="channels")
    np.testing.assert_array_equal(read_mask(tmp_path / "mask.tif", scheme), planes[0] + 2 * planes[1] + 4 * planes[2])
