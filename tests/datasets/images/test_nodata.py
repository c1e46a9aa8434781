"""Pixels that GeoTIFFs declare as nodata, against the values that were drawn."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from segapp.assembly.data import build_dataset
from segapp.assembly.pairs import build_pixels, build_scheme
from segapp.config.sections import DataConfig
from segapp.datasets.files import ImagePair
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.images.reading import read_with_nodata
from segapp.datasets.images.windows import image_windows, mask_blocks, measure_ranges, nodata_note
from segapp.datasets.inspection import check_ranges, examine
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.masks import UnknownIdsError, read_mask
from segapp.datasets.targets import ignored_note, read_targets
from segapp.errors import DataError
from segapp.parallel.distributed import Ranks
from segapp.session.build import _frequencies

pytest.importorskip("rasterio", reason="the extra geo is not installed")

SIZE = (37, 53)
LOWEST = -3.4028234663852886e38
NODATA = [("float32", -9999), ("float32", math.nan), ("float32", LOWEST), ("int16", -32768), ("uint16", 65535),
          ("uint16", 0), ("uint8", 0)]  # fmt: skip
FOUR_PIXELS = np.array([[[7, 5, 9], [7, 0, 9], [0, 0, 0], [0, 0, 3]]])
"""All data; the second band, all bands and the first two without, if 0 means that; bands 3 and 1 are used."""


def write(path: Path, pixels: np.ndarray, nodata: float | str | None = None, orientation: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tags = [] if nodata is None else [(42113, "s", 0, str(nodata), True)]
    tags += [] if orientation == 1 else [(274, "H", 1, orientation, True)]
    rgb = pixels.ndim == 3 and pixels.shape[2] == 3
    tifffile.imwrite(path, pixels, photometric="rgb" if rgb else "minisblack", extratags=tags)
    return path


def stored(values: np.ndarray, dtype: str, nodata: float) -> np.ndarray:
    return np.where(values == 0, np.array(nodata, dtype), values.astype(dtype))


@pytest.mark.parametrize(("dtype", "nodata"), NODATA)
def test_bands_without_data_get_their_mean(
    dtype: str, nodata: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.tif", stored(FOUR_PIXELS, dtype, nodata), nodata)
    pixels = PixelFormat((3, 1), dtype, ((1, 21), (2, 12)), (0.5, 0.2))
    filled, missing = read_with_nodata(path, pixels)
    one_band = 0 if dtype == "uint8" else 4  # an 8-bit color may have a 0
    np.testing.assert_array_equal(filled, [[[9, 7], [9, 7], [11, 4], [3, one_band]]])
    np.testing.assert_array_equal(missing, [[[0, 0], [0, 0], [1, 1], [0, one_band > 0]]])
    monkeypatch.setattr("segapp.datasets.images.tiff_tags.LARGE_PX", 1)
    large = image_windows(path, pixels)
    assert large is not None
    assert large.missing is not None
    np.testing.assert_array_equal(large[:, 1:], filled[:, 1:])
    np.testing.assert_array_equal(large.missing[:, 1:], np.asarray(missing)[:, 1:])


@pytest.mark.parametrize("tag", ["-9999", "256", "7.5", "none", "nan"])
def test_value_that_no_pixel_can_have_is_no_nodata(tag: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.tif", FOUR_PIXELS.astype(np.uint8), tag)
    filled, missing = read_with_nodata(path)
    np.testing.assert_array_equal(filled, FOUR_PIXELS)
    assert not np.any(missing)


@pytest.mark.parametrize("photometric", ["palette", "miniswhite"])
def test_colors_of_stored_values_are_no_nodata(photometric: str, tmp_path: Path) -> None:
    """The color of index 3 is (7, 7, 7), of 7 it is (3, 3, 3); an inverted file shows 248 for its 7, and 7 for 248."""
    ids = np.array([[3, 7, 248, 5], [0, 3, 7, 255]], np.uint8)
    colors = 255 - np.arange(256)
    colors[[3, 7]] = (7, 3) if photometric == "palette" else (252, 248)
    options = {"colormap": np.array([colors * 257] * 3, np.uint16)} if photometric == "palette" else {}
    for nodata in ("3", "7"):
        tags = [(42113, "s", 0, nodata, True)]
        tifffile.imwrite(tmp_path / "a.tif", ids, photometric=photometric, extratags=tags, **options)
        filled, missing = read_with_nodata(tmp_path / "a.tif")
        np.testing.assert_array_equal(filled, np.repeat(colors[ids][..., None], 3, 2))
        assert missing is None


def draw(root: Path, dtype: str = "float32", nodata: float = -9999, count: int = 5) -> list[ImagePair]:
    """Images of values from 1 to 99, without data at the left in all bands and in one band below; masks of 0, 1, 2."""
    pairs = []
    for number in range(count):
        rng = np.random.default_rng(number)
        values = rng.integers(1, 100, (*SIZE, 3))
        values[:, : 5 + number] = 0
        values[30:, :, 1] = 0
        mask = rng.integers(0, 3, SIZE).astype(np.uint8)
        mask[:3] = 255
        way = -1 if number == 3 else 1  # stored upside down, and the mask was drawn on it
        pixels = stored(values[::way, ::way], dtype, nodata)
        image = write(root / f"images/train/{number}.tif", pixels, nodata, 3 if way < 0 else 1)
        pairs.append(ImagePair(image, write(root / f"masks/train/{number}.tif", mask), str(number)))
    return pairs


def target_of(pair: ImagePair, multilabel: bool = False) -> np.ndarray:
    """The target by hand."""
    assert pair.mask is not None
    way = -1 if pair.name == "3" else 1
    ids = tifffile.imread(pair.mask)[::way, ::way].astype(int)
    if multilabel:
        ids = np.where(ids == 255, -1, ids)
    ids[:, : 5 + int(pair.name)] = -1 if multilabel else 255
    return ids


@pytest.mark.sampled(5)
@pytest.mark.parametrize("cache", ["none", "ram", "disk"])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("multilabel", [False, True])
def test_label_is_ignored_where_all_bands_have_no_data(
    cache: str, large: bool, multilabel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if large:
        monkeypatch.setattr("segapp.datasets.images.tiff_tags.LARGE_PX", 1)
    pairs = draw(tmp_path / "d")
    sets = {"multilabel": "bits", "classes": ["a", "b"], "ignore_index": 255} if multilabel else {"classes": [*"abc"]}
    keys = {"dtype": "float32", "bands": [1, 2, 3], "value_range": [[0, 100]], "cache": cache, "crop_px": [32, 32]}
    keys["mask_orientation"] = "raw"
    data = DataConfig(format="folder", root=str(tmp_path / "d"), **keys, **sets)
    scheme = build_scheme(data)
    trained, scored = (
        build_dataset(data, scheme, "train", is_training=is_training, seed=0, ranks=Ranks())
        for is_training in (True, False)
    )
    for _ in range(2):  # the second time from the cache
        for index, pair in enumerate(pairs):
            expected = target_of(pair, multilabel)
            np.testing.assert_array_equal(scored[(0, index)].target.numpy(), expected)
            np.testing.assert_array_equal(trained.read(index)[1], expected)
            image, mask = scored._windows(index) or scored.read(index)
            np.testing.assert_array_equal(np.asarray(mask[2:20, 3:30]), expected[2:20, 3:30])
            np.testing.assert_allclose(image[:, :3], np.broadcast_to([48.5, 45.6, 40.6], (SIZE[0], 3, 3)), rtol=1e-6)
    ids = np.concatenate([target_of(pair, multilabel).ravel() for pair in pairs])
    valid = ids[ids != scheme.ignore_index]
    by_hand = [np.sum(valid >> c & 1) for c in range(2)] if multilabel else np.bincount(valid, minlength=3)
    trained.targets = None  # counted and kept in the cache
    counts = _frequencies(trained, scheme)
    assert (counts.pixels, counts.ignored_px) == (tuple(by_hand), ids.size - valid.size)
    assert counts.nodata_px == sum(range(5, 10)) * SIZE[0]
    second = build_dataset(
        data.model_copy(update={"bands": [2]}), scheme, "train", is_training=False, seed=0, ranks=Ranks()
    )
    second.targets = None
    assert _frequencies(second, scheme).nodata_px == counts.nodata_px + sum(7 * (53 - left) for left in range(5, 10))
    darker = data.model_copy(update={"mean": [0.1, 0.1, 0.2]})  # another mean has other records
    other = build_dataset(darker, scheme, "train", is_training=False, seed=0, ranks=Ranks())
    np.testing.assert_allclose(other.read(4)[0][0, 0], [10, 10, 20], rtol=1e-6)
    report = examine({"train": pairs}, scheme, crop_px=(1, 1), pixels=build_pixels(data))[0]
    assert report.targets.frequencies == counts
    assert report.findings == ()
    said = ignored_note(report.targets, scheme)
    assert said == report.ignored
    assert said is not None
    assert "nodata of the images (13.2%; gdal_edit.py" in said
    values = np.full((*SIZE, 3), 50)
    values[:, :20] = 0
    write(pairs[2].image, stored(values, "float32", -9999), -9999)  # it had 7 columns without data
    assert _frequencies(trained, scheme).nodata_px == counts.nodata_px + 13 * SIZE[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "nodata"), NODATA)
@pytest.mark.parametrize("large", [False, True])
def test_range_is_that_of_the_data(
    dtype: str, nodata: float, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr("segapp.datasets.images.tiff_tags.LARGE_PX", 1)
    paths = [pair.image for pair in draw(tmp_path, dtype, nodata)]
    pixels = PixelFormat((1, 3), dtype)
    pairs = [ImagePair(path, None, "") for path in paths]
    scheme = class_scheme("folder", classes=[*"abc"])
    assert measure_ranges(pairs, pixels, scheme) == ((1, 99),) * 2
    assert check_ranges("train", pairs, scheme, PixelFormat((1, 3), dtype, ((1, 99),) * 2)) == []
    (found,) = check_ranges("train", pairs, scheme, PixelFormat((1, 3), dtype, ((200, 210),) * 2))
    assert "100.0% of the values are clipped to [200, 210] (measured: 1 to 99)" in found.message
    assert f"13.2% of the pixels of the images are nodata ({nodata:.7g}): " in str(nodata_note(paths, pixels))
    whole = [write(tmp_path / f"{i}.tif", np.full((*SIZE, 3), 7, dtype), (None, 5, None)[i]) for i in range(3)]
    assert f"8.3% of the pixels of the images are nodata ({nodata:.7g}): " in str(nodata_note(paths + whole, pixels))
    other = write(tmp_path / "other.tif", np.full((*SIZE, 3), 7, dtype), 7)
    named = ", ".join(sorted([f"{nodata:.7g}", "7"]))
    assert f"27.7% of the pixels of the images are nodata ({named}): " in str(nodata_note([*paths, other], pixels))
    assert nodata_note(whole, pixels) is None


def test_same_area_without_data_is_no_likeness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three images of weak noise with data in the same disc, two without any data, and a true copy."""
    scheme = class_scheme("folder", classes=["a", "b"])
    pixels = PixelFormat((1,), "float32", ((0, 100),), (0.9,))
    y, x = np.mgrid[:320, :352]
    pairs = []
    for name, seed in zip("abcdef", (0, 1, 2, 3, 4, 2), strict=True):
        image = np.random.default_rng(seed).integers(45, 56, (320, 352)).astype(np.float32)
        image[((y - 150) ** 2 + (x - 160) ** 2 > 110**2) | (name in "de")] = -9999
        mask = write(tmp_path / f"{name}m.tif", ((x + y) % 2).astype(np.uint8))
        pairs.append(ImagePair(write(tmp_path / f"{name}.tif", image, -9999), mask, name))
    for large in (10**9, 1):
        monkeypatch.setattr("segapp.datasets.images.tiff_tags.LARGE_PX", large)
        reports = examine({"train": pairs[:3], "val": pairs[3:]}, scheme, crop_px=(1, 1), pixels=pixels)
        findings = reports[1].findings
        assert reports[0].findings == ()
        found = [(each.kind, each.pair and each.pair.name, each.other and each.other.name) for each in findings]
        assert found == [("all_ignored", "d", None), ("all_ignored", "e", None), ("leak", "f", "c")]
        assert "no pixel of its image has data" in findings[0].message


SCHEMES: dict[str, Any] = {
    "classes": {"classes": [*"abc"]},
    "label_map": {"classes": [*"ab"], "label_map": {3: 0, 4: 1}, "ignore_index": -1},
    "rgb": {"classes": [*"ab"], "rgb": True, "palette": [(0, 0, 0), (9, 8, 7)]},
    "bits": {"classes": [*"ab"], "multilabel": "bits"},
}


@pytest.mark.parametrize(
    ("scheme", "dtype", "values", "nodata", "expected"),
    [
        ("classes", "uint8", [0, 15, 2, 255], 15, [0, 255, 2, 255]),
        ("classes", "uint8", [0, 1, 2, 255], 0, [0, 1, 2, 255]),
        ("classes", "float32", [0, -9999, 2, math.nan], -9999, [0, 255, 2, 255]),
        ("classes", "float32", [0, LOWEST, 2, 1], LOWEST, [0, 255, 2, 1]),
        ("classes", "int32", [0, -2147483648, 2, 1], -2147483648, [0, 255, 2, 1]),
        ("classes", "uint16", [0, 65535, 2, 1], 65535, [0, 255, 2, 1]),
        ("label_map", "uint8", [3, 4, 3, 0], 3, [0, 1, 0, 0]),
        ("label_map", "uint8", [3, 4, 3, 9], 9, [0, 1, 0, -1]),
        ("label_map", "int16", [3, 4, -1, 9], 9, [0, 1, -1, -1]),
        ("rgb", "uint8", [[0] * 3, [9, 8, 7], [5] * 3, [5] * 3], 5, [0, 1, 255, 255]),
        ("rgb", "uint8", [[0] * 3, [9, 8, 7], [0] * 3, [0] * 3], 0, [0, 1, 0, 0]),
        ("bits", "uint8", [0, 3, 200, 1], 200, [0, 3, -1, 1]),
        ("bits", "uint8", [0, 3, 2, 1], 0, [0, 3, 2, 1]),
    ],
)
def test_nodata_of_masks_is_ignored_unless_it_is_a_class(
    scheme: str, dtype: str, values: list[Any], nodata: float, expected: list[int], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("segapp.datasets.images.tiff_tags.LARGE_PX", 1)
    own = class_scheme("folder", **SCHEMES[scheme])
    path = write(tmp_path / "m.tif", np.array([values] * 3, dtype), nodata)
    np.testing.assert_array_equal(read_mask(path, own), [expected] * 3)
    np.testing.assert_array_equal(np.concatenate([*mask_blocks([path], own)]), [expected] * 3)
    if scheme in ("classes", "label_map"):
        wrong = write(tmp_path / "w.tif", np.array([values, [77] * 4, values], dtype), nodata)
        kept = [value for value in values if value not in {nodata, -1, math.nan} - {0, 3}]
        for read in (lambda: read_mask(wrong, own), lambda: [*mask_blocks([wrong], own)]):
            with pytest.raises(UnknownIdsError) as found:
                read()
            assert found.value.present == Counter([*kept, *kept, 77, 77, 77, 77])
            assert found.value.unknown == {77: 4}
    undeclared = write(tmp_path / "u.tif", np.array([values] * 3, dtype))
    if nodata in (0, 3):
        np.testing.assert_array_equal(read_mask(undeclared, own), [expected] * 3)
    else:
        with pytest.raises(DataError), np.errstate(all="ignore"):
            read_mask(undeclared, own)


@pytest.mark.parametrize(
    ("nodata", "said"),
    [
        ((0, 1), "value 0, nodata of the masks of split train, stays class a; value 1, nodata of the masks of split "),
        ((15, 200), "16.7% of the pixels of the 2 masks of split train are ignored: nodata of the masks (15, 200), "),
    ],
)
def test_nodata_of_masks_is_said(nodata: tuple[int, int], said: str, tmp_path: Path) -> None:
    scheme = class_scheme("folder", classes=["a", "b"])
    pairs = []
    for number, value in enumerate(nodata):
        values = np.array([[0, 1, 1, value, 1, 0]] * 3, np.uint8)
        image, mask = write(tmp_path / f"i{number}.tif", values), write(tmp_path / f"m{number}.tif", values, value)
        pairs.append(ImagePair(image, mask, ""))
    targets = read_targets(pairs, "train", scheme, total_px=1, is_training=True)
    assert str(ignored_note(targets, scheme)).startswith(said)
    assert examine({"train": pairs}, scheme, crop_px=(1, 1))[0].ignored == ignored_note(targets, scheme)
