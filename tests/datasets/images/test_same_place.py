"""A GeoTIFF and its mask must lie in the same place: checked before a training, by `check` and by `init`."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

rasterio = pytest.importorskip("rasterio", reason="the extra geo is not installed")

from rasterio.transform import Affine  # noqa: E402

from segapp.datasets.files import ImagePair  # noqa: E402
from segapp.datasets.images.raster import (  # noqa: E402
    IDENTITY,
    Georeference,
    GeoTiffWriter,
    check_same_place,
    outlines,
    read_bands,
    read_georeference,
)
from segapp.datasets.inspection import examine  # noqa: E402
from segapp.datasets.layouts.formats import DataLocation, class_scheme, find_pairs  # noqa: E402
from segapp.datasets.targets import read_targets  # noqa: E402
from segapp.errors import DataError  # noqa: E402
from tests.support.drawn_folders import proposed  # noqa: E402

HEIGHT, WIDTH = 37, 53
GRID = (10.0, 0.0, 500_000.0, 0.0, -10.0, 5_000_000.0)


def write(path: Path, pixels: np.ndarray, grid: Any = GRID, crs: str | None = "EPSG:32632") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = {"driver": "GTiff", "height": pixels.shape[1], "width": WIDTH, "count": len(pixels), "dtype": "uint8"}
    place = {} if grid is None else {"transform": Affine(*grid), "crs": crs}
    with rasterio.open(path, "w", **kind, **place) as file:
        file.write(pixels)
    return path


def pixels_of(number: int, count: int, top: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, top, (count, HEIGHT, WIDTH), np.uint8)


def shifted(**changes: float) -> tuple[float, ...]:
    return tuple(value + changes.get(name, 0.0) for name, value in zip("abcdef", GRID, strict=True))


def test_files_without_georeference_warn_nobody(tmp_path: Path) -> None:
    """In several threads at a time, after which the caller's filters are those of before."""
    for number in range(3):
        Image.fromarray(np.full((5 + number, 7), number, np.uint8)).save(tmp_path / f"{number}.tif")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        with ThreadPoolExecutor(6) as threads:
            shapes = list(threads.map(lambda n: read_bands(tmp_path / f"{n % 3}.tif", [1]).shape, range(60)))
        regions = outlines(np.arange(6, dtype=np.uint8).reshape(2, 3), np.ones((2, 3), bool))
        assert sorted(value for _, value in regions) == [0, 1, 2, 3, 4, 5]
        writer = GeoTiffWriter(tmp_path / "new.tif", (2, 3), Georeference(None, IDENTITY))
        writer.write(np.zeros((2, 3), np.uint8))
        writer.finish()
        assert list(warnings.filters) == filters
    assert [each for each in caught if "Georeferenced" in each.category.__name__] == []
    assert shapes == [(5 + n % 3, 7, 1) for n in range(60)]


@pytest.mark.parametrize(
    ("grid", "crs", "is_same"),
    [
        (GRID, "EPSG:32632", True),
        (shifted(c=5, f=-5), "EPSG:32632", True),  # half a pixel: corners or centers
        (shifted(c=10), "EPSG:32632", False),
        (shifted(f=-10), "EPSG:32632", False),
        (shifted(a=10, e=-10), "EPSG:32632", False),
        (shifted(e=20), "EPSG:32632", False),  # upside down
        (GRID, "EPSG:32633", False),
        (GRID, None, True),  # the mask does not say its system
        (shifted(c=10), None, False),
        (None, None, True),
    ],
)
def test_another_place_is_refused(grid: Any, crs: Any, is_same: bool, tmp_path: Path) -> None:
    image = write(tmp_path / "image.tif", pixels_of(0, 3, 255))
    pair = ImagePair(image, write(tmp_path / "mask.TIFF", pixels_of(1, 1, 3), grid, crs), "image")
    if is_same:
        check_same_place(pair)
        return
    with pytest.raises(DataError, match=r"mask\.TIFF: its georeference is .* its image .*image\.tif has ") as raised:
        check_same_place(pair)
    of_mask, of_image = str(raised.value).split(", its image ")
    name = None if crs is None else f"urn:ogc:def:crs:{crs.replace(':', '::')}"
    assert of_mask.endswith(f" is {tuple(grid)} of {name}")
    assert f"{GRID} of urn:ogc:def:crs:EPSG::32632:" in of_image


@pytest.mark.parametrize("moved", ["first", "second", "area"])
def test_each_mask_and_the_valid_area_are_compared(moved: str, tmp_path: Path) -> None:
    image = write(tmp_path / "image.tif", pixels_of(0, 3, 255))
    first, second, area = (
        write(tmp_path / f"{name}.tif", pixels_of(1, 1, 2), shifted(c=40 * (name == moved)))
        for name in ("first", "second", "area")
    )
    with pytest.raises(
        DataError, match=rf"/{moved}\.tif: its georeference is .*500040\.0, .* has .*500000\.0"
    ) as raised:
        check_same_place(ImagePair(image, first, "image", (second,), area))
    assert raised.value.path == str(tmp_path / f"{moved}.tif")


def test_every_reader_compares_the_places(tmp_path: Path) -> None:
    for number, (split, name) in enumerate([("train", "s"), ("train", "b"), ("val", "k"), ("val", "d")]):
        grid = tuple(np.add(GRID, (0, 0, 530 * number, 0, 0, 0)))
        write(tmp_path / "d" / "images" / split / f"{name}.tif", pixels_of(number, 3, 255), grid)
        moved = tuple(np.add(grid, (0, 0, 40 * (name == "k"), 0, 0, 0)))
        write(tmp_path / "d" / "masks" / split / f"{name}.tif", pixels_of(number, 1, 3), moved)
    scheme = class_scheme("folder", classes=["a", "b", "c"])
    splits = {name: find_pairs(DataLocation("folder", str(tmp_path / "d")), name) for name in ("train", "val")}
    reports = examine(splits, scheme, crop_px=(16, 16))
    found = [one for report in reports for one in report.findings if one.severity == "error"]
    assert [(one.kind, one.split, "val/k.tif" in one.message) for one in found] == [("size", "val", True)]
    read_targets(splits["train"], "train", scheme, total_px=1, is_training=True)
    for read in (
        lambda: read_targets(splits["val"], "val", scheme, total_px=1, is_training=False),
        lambda: proposed(tmp_path / "d", tmp_path / "made.yaml"),
    ):
        with pytest.raises(DataError, match=r"masks/val/k.tif: its georeference"):
            read()


def test_init_lists_all_pairs_that_lie_elsewhere(tmp_path: Path) -> None:
    """Ten of them by name, each with its reason, and the number of the others."""
    grids = {"right": shifted(c=80), "coarse": shifted(a=3), "turned": shifted(b=2, d=2)}
    for number in range(16):
        kind = "good" if number % 5 == 4 else [*grids][number % 3]
        own = tuple(np.add(GRID, (0, 0, 5300 * number, 0, 0, 0)))
        moved = tuple(np.add(grids.get(kind, GRID), (0, 0, 5300 * number, 0, 0, 0)))
        write(tmp_path / "d" / "images" / f"{number:04}_{kind}.tif", pixels_of(number, 3, 255), own)
        write(tmp_path / "d" / "masks" / f"{number:04}_{kind}.tif", pixels_of(number, 1, 3), moved)
    with pytest.raises(DataError) as caught:
        proposed(tmp_path / "d", tmp_path / "made.yaml")
    heading, *listed, rest = str(caught.value).split("\n  ")
    assert heading.startswith("13 of 16 masks do not lie on their image: ")
    assert rest.startswith("and 3 more")
    assert len(listed) == len({*listed}) == 10
    for line in listed:
        name = line.partition(": its georeference is ")[0].rpartition("/")[2]
        number, kind = int(name[:4]), name[5:-4]
        assert str(tuple(np.add(grids[kind], (0, 0, 5300 * number, 0, 0, 0)).tolist())) in line


def test_init_refuses_masks_that_were_cut_in_their_place(tmp_path: Path) -> None:
    for number in range(5):
        own = tuple(np.add(GRID, (0, 0, 5300 * number, 0, 0, 0)))
        kept = pixels_of(number, 1, 3)[:, : HEIGHT - number % 2]
        write(tmp_path / "d" / "images" / f"{number}.tif", pixels_of(number, 3, 255), own)
        write(tmp_path / "d" / "masks" / f"{number}.tif", kept, own)
    with pytest.raises(DataError) as caught:
        proposed(tmp_path / "d", tmp_path / "made.yaml")
    heading, *listed = str(caught.value).split("\n  ")
    assert heading.startswith("2 of 5 masks do not lie on their image: ")
    assert all(
        f"masks/{number}.tif: the mask has 53x36 pixels" in line for number, line in zip("13", listed, strict=True)
    )


def test_a_pipe_or_a_damaged_file_is_left_to_its_reader(tmp_path: Path) -> None:
    image = write(tmp_path / "image.tif", pixels_of(0, 3, 255))
    os.mkfifo(tmp_path / "pipe.tif")
    check_same_place(ImagePair(image, tmp_path / "pipe.tif", "image"))
    with pytest.raises(DataError, match=r"pipe\.tif: .*not a regular file"):
        read_georeference(tmp_path / "pipe.tif")
    mask = write(tmp_path / "mask.tif", pixels_of(1, 1, 3), shifted(c=990))
    mask.write_bytes(mask.read_bytes()[:9])
    check_same_place(ImagePair(image, mask, "image"))
    check_same_place(ImagePair(image, None, "image"))
    check_same_place(ImagePair(image, tmp_path / "mask.png", "image"))
