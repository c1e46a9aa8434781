"""A TIFF may say any size: what is read of it is bounded by the size of the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from segapp.datasets.files import read_header
from segapp.datasets.images.tiff_tags import has_rasterio
from segapp.errors import DataError

pytestmark = pytest.mark.skipif(not has_rasterio(), reason="rasterio is not installed")


def sparse(path: Path, side_px: int, bands: int = 3, **options: object) -> Path:
    """Writes a GeoTIFF of any size without pixels."""
    import rasterio

    profile = {"driver": "GTiff", "width": side_px, "height": side_px, "count": bands, "dtype": "uint8"}
    with rasterio.open(
        path, "w", **profile, tiled=True, blockxsize=4096, blockysize=4096, SPARSE_OK=True, BIGTIFF="YES", **options
    ):
        pass
    return path


@pytest.mark.filterwarnings("ignore")
def test_sparse_tiff_is_refused_by_the_size_of_its_file(tmp_path: Path) -> None:
    path = sparse(tmp_path / "a.tif", 300_000)
    with pytest.raises(DataError, match=r"too large \(300000x300000 pixels in \d+ bytes; at most 1073741824 pixels"):
        read_header(path)
    with path.open("r+b") as file:  # as if the file had pixels: 256 of them for a byte
        file.truncate(300_000**2 // 256)
    assert read_header(path).width_px == 300_000


@pytest.mark.filterwarnings("ignore")
def test_tiff_with_many_bands_is_refused_by_the_size_of_its_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="200 bands would take"):
        read_header(sparse(tmp_path / "a.tif", 16_384, bands=200))


@pytest.mark.filterwarnings("ignore")
def test_large_tiff_of_few_colors_is_read(tmp_path: Path) -> None:
    import rasterio

    profile = {"driver": "GTiff", "width": 40_000, "height": 9000, "count": 1, "dtype": "uint8", "compress": "deflate"}
    with rasterio.open(tmp_path / "a.tif", "w", **profile, tiled=True) as file:
        file.write(np.zeros((1, 9000, 40_000), np.uint8))
    assert (tmp_path / "a.tif").stat().st_size < 1_000_000
    assert read_header(tmp_path / "a.tif").width_px == 40_000
