"""Pages of TIFFs, written by tifffile: channels are bands; depth, time and unsaid pages are refused, never dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from segapp.config import load_config
from segapp.datasets.files import ImagePair, check_pairs, read_header, tiff_tags
from segapp.datasets.images.pixel_format import RGB8, PixelFormat
from segapp.datasets.images.reading import pixels_of, read_image
from segapp.datasets.images.windows import image_windows, measure_pixels
from segapp.errors import DataError
from segapp.onboarding.init import InitRequest, propose_config
from tests.support.drawn_folders import IDS, SIZE, draw_mask, proposed

pytest.importorskip("rasterio")


def planes(*shape: int, dtype: str = "uint16") -> np.ndarray:
    return np.random.default_rng(0).integers(0, 200, (*shape, *SIZE)).astype(dtype)


def write(path: Path, pixels: np.ndarray, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(path, pixels, **{"photometric": "minisblack", **options})
    return path


CHANNELS = {
    "OME": {"ome": True, "metadata": {"axes": "CYX"}},
    "ImageJ": {"imagej": True, "metadata": {"axes": "CYX"}},
    "tifffile": {"metadata": {"axes": "CYX"}},
    "BigTIFF": {"ome": True, "bigtiff": True, "metadata": {"axes": "CYX"}},
    "tiles": {"ome": True, "tile": (16, 16), "metadata": {"axes": "CYX"}},
}


@pytest.mark.parametrize("writer", CHANNELS)
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_pages_that_are_channels_are_bands(writer: str, dtype: str, tmp_path: Path) -> None:
    pixels = planes(3, dtype=dtype)
    path = write(tmp_path / "a.tif", pixels, **CHANNELS[writer])
    stored = pixels_of(path)
    assert (stored.bands, stored.dtype, stored.pages) == (3, dtype, "")
    np.testing.assert_array_equal(read_image(path, PixelFormat((3, 1), dtype)), pixels[[2, 0]].transpose(1, 2, 0))
    with pytest.raises(DataError, match=r"data.bands: \[1, 2, 3\]"):
        read_image(path, RGB8)
    windows = image_windows(path, PixelFormat((1, 2, 3), dtype), least_px=1)
    assert windows is not None
    np.testing.assert_array_equal(windows[5:20, 7:30], pixels[:, 5:20, 7:30].transpose(1, 2, 0))


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [
        ((3,), {"ome": True, "metadata": {"axes": "ZYX"}}, "3 pages (depth, axes ZYX)"),
        ((3,), {"ome": True, "metadata": {"axes": "TYX"}}, "3 pages (time, axes TYX)"),
        ((3, 2), {"ome": True, "metadata": {"axes": "ZCYX"}}, "6 pages (depth x channels, axes ZCYX)"),
        ((3, 2), {"imagej": True, "metadata": {"axes": "ZCYX"}}, "6 pages (depth x channels, axes ZCYX)"),
        ((4,), {"imagej": True, "metadata": {"axes": "TYX"}}, "4 pages (time, axes TYX)"),
        ((3,), {"metadata": None}, "3 pages of unsaid meaning"),
    ],
)
def test_other_pages_are_refused_by_every_reader(
    shape: tuple[int, ...], options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    pixels = planes(*shape)
    path = write(tmp_path / "a.tif", pixels, **options)
    mask = tmp_path / "a.png"
    draw_mask(mask)
    match = rf"a.tif: it holds {said.replace('(', '[(]').replace(')', '[)]')}, and an image would be"
    for format in (RGB8, PixelFormat((1,), "uint16")):
        with pytest.raises(DataError, match=match):
            read_image(path, format)
        with pytest.raises(DataError, match=match):
            check_pairs([ImagePair(path, mask, "a")], format)
    with pytest.raises(DataError, match=match):
        measure_pixels([path])


def test_pages_of_rgb_are_refused(tmp_path: Path) -> None:
    first = Image.new("RGB", (64, 48), (9, 8, 7))
    first.save(tmp_path / "a.tif", save_all=True, append_images=[Image.new("RGB", (64, 48))])
    with pytest.raises(DataError, match="2 pages of unsaid meaning"):
        read_image(tmp_path / "a.tif")


def test_smaller_copies_are_no_pages(tmp_path: Path) -> None:
    pixels = planes(dtype="uint8")
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        file.write(pixels, photometric="minisblack", metadata=None)
        file.write(pixels[::2, ::2], photometric="minisblack", metadata=None)  # not marked
        file.write(pixels, subfiletype=1, photometric="minisblack", metadata=None)
    tags = tiff_tags(tmp_path / "a.tif")
    assert tags is not None
    assert (tags.pages, tags.axes) == ((1,), "")
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif")[..., 0], pixels)


def test_one_plane_of_a_series_of_files_is_an_image(tmp_path: Path) -> None:
    """OME may describe all files of a series in each."""
    path = write(tmp_path / "a.tif", planes(2), ome=True, metadata={"axes": "CYX"})
    with tifffile.TiffFile(path) as file:
        description = file.pages[0].description  # type: ignore[union-attr]
    write(path, planes(), description=description, metadata=None)
    assert read_header(path).stored is not None
    assert pixels_of(path).bands == 1


def test_damaged_chain_of_pages_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tif", planes(2), metadata=None)
    data = bytearray(path.read_bytes())
    with tifffile.TiffFile(path) as file:
        first = file.pages[0].offset
        count = int.from_bytes(data[first : first + 2], "little")
    data[first + 2 + 12 * count : first + 6 + 12 * count] = first.to_bytes(4, "little")  # its own successor
    path.write_bytes(bytes(data))
    tags = tiff_tags(path)
    assert tags is not None
    assert len(tags.pages) == 2


def drawn(root: Path, count: int, *axes: str, shape: tuple[int, ...] = (2,), start: int = 0, **options: Any) -> None:
    for number in range(start, start + count):
        metadata = {"metadata": {"axes": axes[0]}} if axes else {}
        pixels = np.random.default_rng(number).integers(0, 200, (*shape, *SIZE)).astype("uint16")
        write(root / "images" / f"{number:04}.tif", pixels, **metadata, **options)
        draw_mask(root / "masks" / f"{number:04}.png", IDS)


def test_bands_of_ome_tiffs_are_written_and_read(tmp_path: Path) -> None:
    drawn(tmp_path / "d", 8, "CYX", ome=True)
    config, result, _ = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert (config.data.bands, config.data.dtype) == ((1, 2), "uint16")
    assert "images: uint16 of 2 bands" in " ".join(result.lines)


def test_init_names_the_axes_that_it_does_not_read(tmp_path: Path) -> None:
    drawn(tmp_path / "d", 8, "ZYX", ome=True, shape=(5,))
    with pytest.raises(DataError, match=r"5 pages \(depth, axes ZYX\).*save each image as a file of its own"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))


def test_init_writes_the_bands_of_four_band_tiffs_of_8_bits(tmp_path: Path) -> None:
    """RGB and near infrared, which writers mark as opacity or not at all."""
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 200, (*SIZE, 4)).astype("uint8")
        extra = {"extrasamples": ["unassalpha"]} if number % 2 else {"extrasamples": ["unspecified"]}
        write(tmp_path / "d" / "images" / f"{number:04}.tif", pixels, photometric="rgb", **extra)
        draw_mask(tmp_path / "d" / "masks" / f"{number:04}.png", IDS)
    config, result, _ = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert (config.data.bands, config.data.dtype) == ((1, 2, 3, 4), "uint8")
    assert "images: uint8 of 4 bands" in " ".join(result.lines)
    again = load_config(tmp_path / "made.yaml")
    assert again.data.value_range is not None
    assert len(again.data.value_range) == 4


def test_init_names_the_files_of_a_folder_with_8_and_16_bits(tmp_path: Path) -> None:
    drawn(tmp_path / "d", 6, shape=())
    for number in range(6, 8):
        write(tmp_path / "d" / "images" / f"{number:04}.tif", planes(dtype="uint8"))
        draw_mask(tmp_path / "d" / "masks" / f"{number:04}.png", IDS)
    with pytest.raises(
        DataError,
        match=r"differ in bands or type: 6 are uint16 with 1 band, such as .*; 2 are uint8 with 1 band, such as .*0006",
    ):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))


def test_grey_and_rgb_of_8_bits_are_one_kind(tmp_path: Path) -> None:
    for number in range(8):
        mode = "L" if number % 2 else "RGB"
        path = tmp_path / "d" / "images" / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 255, (*SIZE, 3)).astype("uint8")
        Image.fromarray(noise).convert(mode).save(path)
        draw_mask(tmp_path / "d" / "masks" / f"{number:04}.png", IDS)
    assert proposed(tmp_path / "d", tmp_path / "made.yaml")[0].data.bands is None
