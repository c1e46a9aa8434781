"""A coordinate system is read from a code or from WKT, never from an address or a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from segapp.datasets.images.raster import Georeference, on_image
from tests.support.network import network

rasterio = pytest.importorskip("rasterio")

UTM = "EPSG:32632"
POINTS = np.array([[9.0, 50.0], [9.001, 50.001]])


def place() -> Georeference:
    from rasterio.crs import CRS

    return Georeference(CRS.from_epsg(32632).to_wkt(), (2.0, 0.0, 500000.0, 0.0, -2.0, 5538700.0))


def wkt(code: str) -> str:
    from rasterio.crs import CRS

    return str(CRS.from_user_input(code).to_wkt())


@pytest.mark.parametrize(
    "crs",
    [
        *("OGC:CRS84", "urn:ogc:def:crs:OGC:1.3:CRS84", "urn:ogc:def:crs:OGC::CRS84", "EPSG:4326", "epsg:4326"),
        *(
            "urn:ogc:def:crs:EPSG::4326",
            "urn:x-ogc:def:crs:EPSG:4326",
            "urn:ogc:def:crs:EPSG:6.18:4326",
            wkt("EPSG:4326"),
        ),
    ],
)
def test_codes_and_wkt_give_the_pixels_that_pyproj_gives(crs: str) -> None:
    # 9 degrees east is the central meridian of zone 32: x = 500 km; y from pyproj 3.7.
    np.testing.assert_allclose(on_image(POINTS, crs, place())[0], [0.0, (5538700.0 - 5538630.702867474) / 2], atol=1e-3)


def test_points_in_the_system_of_the_image_are_only_shifted() -> None:
    points = np.array([[500020.0, 5538690.0]])
    for crs in (UTM, "urn:ogc:def:crs:EPSG::32632", wkt(UTM)):
        np.testing.assert_array_equal(on_image(points, crs, place()), [[10.0, 5.0]])


ADDRESSES = [
    "http://ADDRESS/crs",
    "/vsicurl/http://ADDRESS/crs",
    "http:ADDRESS",
    "+proj=longlat +nadgrids=http://ADDRESS/grid",
    'GEOGCS["x",DATUM["y",SPHEROID["z",6378137,298.2],EXTENSION["PROJ4_GRIDS","http://ADDRESS/grid"]],UNIT["degree",0.0174]]',
    "file:crs",
    "crs.txt",
    "a:b",
]


@pytest.mark.parametrize("crs", ADDRESSES)
def test_addresses_and_files_are_refused(crs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROJ_NETWORK", "ON")
    with network(tmp_path / "network") as seen:
        for name in ("crs.txt", "file:crs", "a:b"):  # GDAL reads a coordinate system from a file of this name
            (tmp_path / name).write_text(f"http://{seen.address}/crs")
        with pytest.raises(ValueError):  # noqa: PT011 -- of GDAL for an unknown code
            on_image(POINTS, crs.replace("ADDRESS", seen.address), place())
        assert seen.take() == []
