"""Images of any bands and type: read exactly as another library wrote them, or refused with the next move."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray

from segapp.datasets.files import ImagePair, check_pairs, read_header
from segapp.datasets.images.pixel_format import RGB8, PixelFormat, per_band
from segapp.datasets.images.raster import encode_bands
from segapp.datasets.images.reading import read_image
from segapp.datasets.images.tiff_tags import read_tiff_tags
from segapp.errors import DataError

pytest.importorskip("rasterio", reason="the extra geo is not installed")

BYTE_ORDERS = ("<", ">")


def drawn(dtype: str, num_bands: int, size: tuple[int, int] = (20, 30)) -> NDArray[Any]:
    """Values over the whole range of a type."""
    rng = np.random.default_rng(num_bands)
    if dtype == "float32":
        return rng.normal(0, 1e3, (*size, num_bands)).astype(np.float32)
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max + 1, (*size, num_bands)).astype(dtype)


def write_tiff(path: Path, image: NDArray[Any], planes: str = "contig", **options: Any) -> Path:
    stored = image[..., 0] if image.shape[2] == 1 else image if planes == "contig" else np.moveaxis(image, -1, 0)
    kind = {} if image.shape[2] == 1 else {"planarconfig": planes}
    tifffile.imwrite(path, stored, **{"photometric": "minisblack", **kind, **options})
    return path


@pytest.mark.parametrize(
    ("dtype", "num_bands", "planes"),
    [("uint8", 1, "contig"), ("uint8", 7, "contig"), ("uint16", 4, "separate"), ("uint16", 7, "contig"),
     ("int16", 2, "separate"), ("float32", 4, "contig"), ("float32", 2, "separate")],
)  # fmt: skip
def test_tiff_bands_are_those_that_tifffile_wrote(dtype: str, num_bands: int, planes: str, tmp_path: Path) -> None:
    image = drawn(dtype, num_bands)
    path = write_tiff(tmp_path / "a.tif", image, planes, compression="zlib")
    bands = tuple(range(num_bands, 0, -1))
    read = read_image(path, PixelFormat(bands, dtype))
    np.testing.assert_array_equal(read, image[..., ::-1])
    assert read.dtype == dtype
    header = read_header(path)
    assert (header.format, header.height_px, header.width_px) == ("TIFF", *image.shape[:2])
    assert header.stored is not None
    assert (header.stored.bands, header.stored.dtype) == (num_bands, dtype)


@pytest.mark.parametrize("size", [(20, 30), (256, 300), (600, 257)])
def test_written_bands_are_read_back_by_tifffile(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    image = drawn("uint16", 5, size)
    with tifffile.TiffFile(io.BytesIO(encode_bands(image, ["red", "green", "blue", "nir", "height"], "made"))) as file:
        (page,) = file.pages
        assert (page.is_tiled, page.description) == (min(size) >= 256, "made")
        np.testing.assert_array_equal(page.asarray(), image)
    monkeypatch.setitem(sys.modules, "rasterio", None)  # as if it were not installed
    with pytest.raises(DataError, match=r"^red: writing an image of several bands needs the package rasterio: run"):
        encode_bands(image, ["red", "nir"], "made")


@pytest.mark.parametrize(("dtype", "num_bands"), [("uint8", 4), ("uint16", 1), ("uint16", 3), ("uint16", 4)])
def test_png_bands_are_those_that_opencv_wrote(dtype: str, num_bands: int, tmp_path: Path) -> None:
    image = drawn(dtype, num_bands)
    blue_first = image[..., [2, 1, 0, 3][:num_bands]] if num_bands > 1 else image[..., 0]
    assert cv2.imwrite(str(tmp_path / "a.png"), blue_first)
    read = read_image(tmp_path / "a.png", PixelFormat(tuple(range(1, num_bands + 1)), dtype))
    np.testing.assert_array_equal(read, image)


@pytest.mark.parametrize(
    ("dtype", "num_bands", "suffix"),
    [("uint16", 1, ".png"), ("uint16", 3, ".png"), ("uint16", 4, ".tif"), ("uint8", 4, ".tif"), ("uint8", 2, ".tif"),
     ("float32", 1, ".tif"), ("int16", 3, ".tif"), ("uint16", 1, ".pgm"), ("uint16", 3, ".ppm")],
)  # fmt: skip
def test_images_that_8_bit_rgb_would_squeeze_are_refused(
    dtype: str, num_bands: int, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a{suffix}"
    image = drawn(dtype, num_bands)
    if suffix == ".tif":
        write_tiff(path, image)
    else:
        assert cv2.imwrite(str(path), image[..., ::-1])
    with pytest.raises(DataError) as caught:
        read_image(path)
    named = f"a{suffix}: its pixels are {dtype} with {num_bands} band"
    assert named in str(caught.value)
    assert f"data.dtype: {dtype}, data.bands: {list(range(1, num_bands + 1))}" in str(caught.value)
    if suffix in {".tif", ".png"}:
        with pytest.raises(DataError, match=r"data\.value_range, which segapp check measures"):
            check_pairs([ImagePair(path, None, "a")])


def test_fourth_band_marked_alpha_is_dropped_only_if_opacity(tmp_path: Path) -> None:
    image = drawn("uint8", 4)
    options = {"photometric": "rgb", "extrasamples": ["unassalpha"]}
    with pytest.raises(DataError, match="uint8 with 4 bands"):
        read_image(write_tiff(tmp_path / "infrared.tif", image, **options))
    image[..., 3] = np.where(image[..., 3] > 99, 255, 0)
    path = write_tiff(tmp_path / "opacity.tif", image, **options)
    opaque = image[..., 3] == 255
    np.testing.assert_array_equal(read_image(path)[opaque], image[opaque][:, :3])
    np.testing.assert_array_equal(read_image(path, PixelFormat((4, 1))), image[..., [3, 0]])


@pytest.mark.parametrize(
    ("pixels", "match"),
    [
        (PixelFormat((1, 2, 5), "uint16"), "no band 5 of data.bands"),
        (PixelFormat((1,), "float32"), "its pixels are uint16 with 4 bands, data.dtype is float32"),
    ],
)
def test_other_bands_or_type_than_the_config_says_are_refused(pixels: PixelFormat, match: str, tmp_path: Path) -> None:
    path = write_tiff(tmp_path / "a.tif", drawn("uint16", 4))
    with pytest.raises(DataError, match=match):
        read_image(path, pixels)
    with pytest.raises(DataError, match=match):
        check_pairs([ImagePair(path, None, "a")], pixels)
    trained = replace(pixels, value_range=((3, 9),) * pixels.num_bands, is_trained=True)  # its keys cannot be changed
    with pytest.raises(
        DataError, match=rf"uint16 with 4 bands, but .* {pixels.dtype} of .*bands \[1.*\[3, 9\].*: convert"
    ):
        read_image(path, trained)


def test_unread_types_name_the_conversion(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((4, 4), np.float64))
    with pytest.raises(DataError, match="float64 with 1 band, which is not read: convert it to"):
        read_image(tmp_path / "a.tif")


@pytest.mark.parametrize("order", BYTE_ORDERS)
@pytest.mark.parametrize("is_big", [False, True])
def test_tags_of_both_byte_orders_and_sizes(order: Any, is_big: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, drawn("uint16", 5), photometric="minisblack", planarconfig="contig", byteorder=order,
                     bigtiff=is_big, tile=(16, 16))  # fmt: skip
    with path.open("rb") as file:
        tags = read_tiff_tags(file)
    assert (tags.height_px, tags.width_px, tags.bands, tags.dtype) == (20, 30, 5, "uint16")


@pytest.mark.parametrize(("stored", "orientation"), [(0, 1), (1, 1), (6, 6), (8, 8), (9, 1)])
def test_orientation_that_means_nothing_is_upright(stored: int, orientation: int, tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.zeros((4, 6), np.uint8), extratags=[(274, "H", 1, stored, True)])
    with path.open("rb") as file:
        assert read_tiff_tags(file).orientation == orientation


def test_pictures_show_the_first_three_bands_over_their_ranges() -> None:
    pixels = PixelFormat((3, 1, 2, 4), "uint16", ((0, 1000), (0, 2000), (1000, 3000), (0, 1)))
    image = np.array([[[500, 3000, 2000, 9], [1000, 0, 0, 0]]], np.uint16)
    np.testing.assert_array_equal(pixels.as_rgb(image), [[[128, 255, 128], [255, 0, 0]]])
    first = PixelFormat((4, 2), "uint16", ((0, 1000), (0, 1000))).as_rgb(image[..., :2])
    np.testing.assert_array_equal(first, [[[128] * 3, [255] * 3]])  # of two bands
    grey = PixelFormat((1,), "float32", ((-1.0, 1.0),))
    np.testing.assert_array_equal(grey.as_rgb(np.array([[[0.0], [np.nan]]], np.float32)), [[[128] * 3, [0] * 3]])


def test_statistics_of_rgb_are_continued_for_further_bands() -> None:
    assert per_band((0.1, 0.2, 0.6), 5) == (0.1, 0.2, 0.6, 0.3, 0.3)
    assert per_band((0.1, 0.2, 0.6), 2) == (0.3, 0.3)
    ranges = ((0.0, 100.0),) * 3
    others = [PixelFormat((1, 2)), PixelFormat((1, 2, 3, 4)), PixelFormat((1, 2, 3), "uint16")]
    others.append(PixelFormat((1, 2, 3), "uint8", ranges))
    assert [each.is_rgb8 for each in (RGB8, PixelFormat((3, 2, 1)), *others)] == [True, True, *[False] * 4]
