"""Files whose data are wrong although they can be read, whose size is a lie, and about which libraries print."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from segapp.datasets.files import ImagePair, jpeg_damage, read_header
from segapp.datasets.images.pixel_format import RGB8
from segapp.datasets.images.tiff_tags import has_rasterio
from segapp.datasets.inspection import examine
from segapp.datasets.layouts.formats import class_scheme
from segapp.errors import DataError
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


@geo
@pytest.mark.filterwarnings("ignore")
def test_large_tiff_of_few_colors_is_read(tmp_path: Path) -> None:
    import rasterio

    profile = {"driver": "GTiff", "width": 40_000, "height": 9000, "count": 1, "dtype": "uint8", "compress": "deflate"}
    with rasterio.open(tmp_path / "a.tif", "w", **profile, tiled=True) as file:
        file.write(np.zeros((1, 9000, 40_000), np.uint8))
    assert (tmp_path / "a.tif").stat().st_size < 1_000_000
    assert read_header(tmp_path / "a.tif").width_px == 40_000


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
