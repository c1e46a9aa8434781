"""Files whose data are wrong although they can be read, whose size is a lie, and about which libraries print."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
from PIL import EpsImagePlugin, Image

from segapp.datasets.files import IMAGE_FORMATS, MAX_SCANS, ImagePair, jpeg_damage, read_header
from segapp.datasets.images.pixel_format import RGB8
from segapp.datasets.images.reading import read_image
from segapp.datasets.images.tiff_tags import has_rasterio
from segapp.datasets.inspection import examine
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.masks import read_mask
from segapp.datasets.walk import IMAGE_SUFFIXES
from segapp.errors import DataError
from segapp.inference.predict.reading import InputFile, read_picture
from segapp.onboarding.content import stored_pixels
from tests.support import ROOT
from tests.support.drawn_folders import draw_mask


def photo(seed: int, **save: object) -> bytes:
    """Returns a JPEG with edges and noise."""
    rng = np.random.default_rng(seed)
    pixels = np.kron(rng.integers(0, 255, (6, 8, 3)), np.ones((16, 16, 1))) + rng.normal(0, 9, (96, 128, 3))
    buffer = io.BytesIO()
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    image.convert(str(save.pop("mode", "RGB"))).save(buffer, "JPEG", **save)
    return buffer.getvalue()


def damaged(data: bytes, num_bytes: int = 200) -> bytes:
    """Returns the data with zeros in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes(num_bytes) + data[middle + num_bytes :]


@pytest.mark.parametrize(
    "save", [{"progressive": True}, {"mode": "L"}, {"mode": "CMYK"}, {"quality": 20, "optimize": True}]
)
def test_sound_files_have_no_damage(save: dict[str, object]) -> None:
    assert jpeg_damage(photo(0, **save)) is None


def test_zeroed_bytes_are_noticed() -> None:
    found = [jpeg_damage(damaged(photo(seed))) for seed in range(20)]
    assert sum(one is not None for one in found) >= 17
    assert all(one is None or one.startswith("Corrupt JPEG data") for one in found)
    assert jpeg_damage(b"no JPEG") is None


def test_check_names_the_damaged_image(tmp_path: Path) -> None:
    pairs = []
    for number in range(3):
        path = tmp_path / f"{number}.jpg"
        path.write_bytes(photo(number))
        draw_mask(tmp_path / f"{number}.png", size=(96, 128))
        pairs.append(ImagePair(path, tmp_path / f"{number}.png", str(number)))
    seed = next(seed for seed in range(20) if jpeg_damage(damaged(photo(seed))))
    pairs[1].image.write_bytes(damaged(photo(seed)))
    scheme = class_scheme("list", classes=("a", "b", "c"))
    (report,) = examine({"train": pairs}, scheme, crop_px=(64, 64), pixels=RGB8, threads=1)
    named = [(one.severity, one.pair) for one in report.findings if one.kind == "damaged"]
    assert named == [("warning", pairs[1])]


geo = pytest.mark.skipif(not has_rasterio(), reason="rasterio is not installed")


def sparse(path: Path, side_px: int, bands: int = 3, **options: object) -> Path:
    """Writes a GeoTIFF of any size without pixels."""
    import rasterio

    profile = {"driver": "GTiff", "width": side_px, "height": side_px, "count": bands, "dtype": "uint8"}
    with rasterio.open(
        path, "w", **profile, tiled=True, blockxsize=4096, blockysize=4096, SPARSE_OK=True, BIGTIFF="YES", **options
    ):
        pass
    return path


@geo
@pytest.mark.filterwarnings("ignore")
def test_sparse_tiff_is_refused_by_the_size_of_its_file(tmp_path: Path) -> None:
    path = sparse(tmp_path / "a.tif", 300_000)
    with pytest.raises(DataError, match=r"too large \(300000x300000 pixels in \d+ bytes; at most 1073741824 pixels"):
        read_header(path)
    with path.open("r+b") as file:  # as if the file had pixels: 256 of them for a byte
        file.truncate(300_000**2 // 256)
    assert read_header(path).width_px == 300_000
    with pytest.raises(DataError, match="200 bands would take"):
        read_header(sparse(tmp_path / "b.tif", 16_384, bands=200))
    assert read_header(sparse(tmp_path / "c.tif", 30_000)).width_px == 30_000, "deflate packs a map of few colors so"


def test_tiff_of_eight_bands_prints_nothing() -> None:
    tifffile.imwrite("bands.tif", np.zeros((16, 16, 8), np.uint16), photometric="minisblack", planarconfig="contig")
    code = """if True:
        from PIL import Image, UnidentifiedImageError
        import segapp.datasets.files
        try:
            Image.open("bands.tif")
        except UnidentifiedImageError:
            print("not read")"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("not read\n", "")


def bytes_in(format: str) -> bytes:
    """Returns a drawn image in a format that Pillow writes."""
    buffer = io.BytesIO()
    mode = {"BLP": "P", "MSP": "1", "XBM": "1"}.get(format, "RGB")
    Image.fromarray(np.eye(64, dtype=np.uint8) * 200).convert(mode).save(buffer, format)
    return buffer.getvalue()


BY_HAND = {
    "PSD": b"8BPS\0\1" + bytes(7) + b"\3" + b"\0\0\0\4" * 2 + b"\0\x08\0\3" + bytes(64),
    "WMF": b"\xd7\xcd\xc6\x9a" + bytes(6) + b"\x40\0\x40\0\x60\0" + bytes(6) + b"\1\0\t\0" + bytes(18),
}
WRITTEN = ("AVIF", "BLP", "DDS", "DIB", "EPS", "ICNS", "ICO", "JPEG2000", "MSP", "PCX", "QOI", "SGI", "TGA", "XBM")
ROADS: list[Callable[[Path], Any]] = [
    read_image, lambda path: read_mask(path, class_scheme("list", classes=("a", "b", "c"))),
    lambda path: read_picture(InputFile(path, "a")), lambda path: stored_pixels(path, as_rgb=False),
]  # fmt: skip
"""Functions that decode an image for training, for the masks, to predict, and for `init`."""


@pytest.mark.parametrize("suffix", [".png", ".TIF", ".jpeg"])
def test_no_decoder_runs_but_for_the_formats_of_the_page(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, mark, path = tmp_path / "gs", tmp_path / "started", tmp_path / f"a{suffix}"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    for format in (*BY_HAND, *WRITTEN):
        path.write_bytes(BY_HAND.get(format) or bytes_in(format))
        with Image.open(path) as image:
            assert image.format == format, "Pillow has a decoder"
        for road in (read_header, *ROADS):
            with pytest.raises(DataError, match=rf"a{suffix}: no readable image: .* of a format that is not read"):
                road(path)
    assert not mark.exists()
    path.write_bytes(bytes_in("EPS"))
    with pytest.raises(OSError, match="cannot"), Image.open(path) as image:
        image.load()
    assert mark.exists(), "without a list of formats, the program is started"


def test_page_names_the_formats_that_are_read() -> None:
    page = (ROOT / "segapp/docs/reference/layouts.md").read_text()
    (named,) = re.findall(r"Its content may be in any of them: ([^.]*), and HEIF with pillow-heif\.", page)
    known = Image.registered_extensions()
    assert {known[f".{word.lower()}"] for word in re.findall(r"[A-Z]\w+", named)} == {*IMAGE_FORMATS} - {"HEIF"}
    assert {known[suffix] for suffix in IMAGE_SUFFIXES} == {*IMAGE_FORMATS}


def with_scans(num: int, before: bytes = b"", **save: object) -> bytes:
    """Returns a progressive JPEG of 10 scans, with `before` and copies of the second one behind the first."""
    parts = photo(0, progressive=True, **save).split(b"\xff\xc4")  # the first scan has two tables, the second has one
    first, repeated = b"\xff\xc4".join(parts[:3]), b"\xff\xc4" + parts[3]
    return b"\xff\xc4".join([first + before + repeated * num, *parts[3:]])


@pytest.mark.parametrize(
    "data",
    [
        with_scans(MAX_SCANS - 9),
        with_scans(150, before=b"\xff\xfe\0\6\xff\xd9\0\0"),  # a comment that holds an end marker
        with_scans(150, before=b"\xff\xec\0\0"),  # a segment shorter than its length
        with_scans(150).replace(b"\xff\xda", b"\xff\xff\xff\xda"),
        # libjpeg looks for the marker of a restart byte by byte, also behind 0x02, whatever length follows
        with_scans(150, restart_marker_rows=1).replace(b"\xff\xd0", b"\xff\x02\xff\xff\xff\xd0", 1),
    ],
    ids=range(5),
)
def test_jpeg_of_too_many_scans_reaches_no_decoder(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, decoded = (np.asarray(Image.open(io.BytesIO(each))) for each in (photo(0, progressive=True), data))
    np.testing.assert_array_equal(decoded, expected, "libjpeg reads up to the last scan")
    path = tmp_path / "a.tif"
    path.write_bytes(data)
    monkeypatch.setattr(cv2, "imdecode", None)
    monkeypatch.setattr(Image.Image, "load", None)
    for road in ROADS:
        with pytest.raises(DataError, match=rf"a\.tif: a JPEG with more than {MAX_SCANS} scans, .*: save the image"):
            road(path)


def test_previews_and_appended_data_count_as_no_scans(tmp_path: Path) -> None:
    several = io.BytesIO()
    frames = [Image.open(io.BytesIO(photo(seed))) for seed in range(12)]
    frames[0].save(several, "MPO", save_all=True, append_images=frames[1:], progressive=True)
    assert several.getvalue().count(b"\xff\xda") > MAX_SCANS
    preview = b"\xff\xda" * 300
    sound = [photo(0, exif=b"Exif\0\0" + preview), photo(0) + preview, several.getvalue(), with_scans(MAX_SCANS - 10)]
    for data in sound:
        (tmp_path / "a.jpg").write_bytes(data)
        expected = np.asarray(Image.open(tmp_path / "a.jpg")).astype(int)
        assert np.abs(read_image(tmp_path / "a.jpg") - expected).max() <= 3
