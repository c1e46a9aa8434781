"""Pages of TIFFs, written by tifffile: channels are bands; depth, time and unsaid pages are refused, never dropped.

What `segapp check` and `segapp init` say of bands: the measured ranges are numpy's percentiles.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import yaml

from segapp.assembly.data import build_dataset
from segapp.assembly.pairs import build_pairs, build_scheme
from segapp.commands.check import check_data
from segapp.config import validate_config
from segapp.datasets.files import ImagePair, check_pairs, read_header, tiff_tags
from segapp.datasets.images.pixel_format import RGB8, PixelFormat
from segapp.datasets.images.reading import pixels_of, read_image
from segapp.datasets.images.windows import image_windows, measure_pixels, measure_ranges
from segapp.errors import ConfigError, DataError
from tests.support.band_data import write_band_data
from tests.support.drawn_folders import SIZE, draw_mask

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
    "BigTIFF in tiles": {"ome": True, "bigtiff": True, "tile": (16, 16), "metadata": {"axes": "CYX"}},
}


@pytest.mark.parametrize(("writer", "dtype"), [*((each, "uint16") for each in CHANNELS), ("OME", "uint8")])
def test_pages_that_are_channels_are_bands(
    writer: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = planes(3, dtype=dtype)
    path = write(tmp_path / "a.tif", pixels, **CHANNELS[writer])
    stored = pixels_of(path)
    assert (stored.bands, stored.dtype, stored.pages) == (3, dtype, "")
    np.testing.assert_array_equal(read_image(path, PixelFormat((3, 1), dtype)), pixels[[2, 0]].transpose(1, 2, 0))
    with pytest.raises(DataError, match=r"data.bands: \[1, 2, 3\]"):
        read_image(path, RGB8)
    monkeypatch.setattr("segapp.datasets.images.tiff_tags.LARGE_PX", 1)
    windows = image_windows(path, PixelFormat((1, 2, 3), dtype))
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
        ((2, 3), {"metadata": None, "photometric": "rgb", "planarconfig": "separate"}, "2 pages of unsaid meaning"),
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
        measure_pixels([path, write(tmp_path / "b.tif", pixels, **options)])


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


def test_further_bands_are_bands_however_they_are_marked(tmp_path: Path) -> None:
    """RGB and near infrared, which writers mark as opacity or not at all."""
    paths, marks = [], ("unassalpha", "unspecified", "assocalpha")
    for number in range(3):
        own = [marks[number], marks[number - 1]]
        pixels = np.moveaxis(planes(5), 0, -1)
        paths.append(write(tmp_path / f"{number}.tif", pixels, photometric="rgb", extrasamples=own))
    found = measure_pixels(paths)
    assert found is not None
    assert (found.bands, found.dtype) == ((1, 2, 3, 4, 5), "uint16")
    paths.append(write(tmp_path / "3.tif", planes(dtype="uint8")))
    said = r"differ in bands or type: 3 are uint16 with 5 bands, such as \S+0\.tif; 1 are uint8 with 1 band, .*3\.tif"
    with pytest.raises(DataError, match=said):
        measure_pixels(paths)


@pytest.mark.parametrize("known", [[], ["bands", "dtype"]])
def test_check_prints_the_lines_that_the_training_asks_for(
    known: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_band_data(tmp_path / "data", num_images=2)
    for key in {"bands", "dtype", "value_range"} - set(known):
        data.pop(key)
    config = validate_config({"name": "bands", "data": data})
    with pytest.raises((ConfigError, DataError), match="value_range"):
        build_dataset(config.data, build_scheme(config.data), "train", is_training=True, seed=0)
    assert check_data(config, as_json=False) == 3
    out = capsys.readouterr().out
    lines: dict[str, Any] = yaml.safe_load(out[out.index("  bands: ", out.index("pixels: uint16 of 4 bands")) :])
    measured = measure_ranges(
        build_pairs(config.data, "train"), PixelFormat((1, 2, 3, 4), "uint16"), build_scheme(config.data)
    )
    assert lines == {"bands": [1, 2, 3, 4], "dtype": "uint16", "value_range": [[*ends] for ends in measured]}
    whole = validate_config({"name": "bands", "data": {**data, **lines}})
    assert check_data(whole, as_json=True) == 0
    pixels = json.loads(capsys.readouterr().out)["pixels"]
    assert (pixels["dtype"], pixels["value_range"]) == ("uint16", lines["value_range"])
    build_dataset(whole.data, build_scheme(whole.data), "train", is_training=True, seed=0)
