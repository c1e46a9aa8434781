"""Predictions of GeoTIFFs: read in windows, written as GeoTIFFs that rasterio finds at the same place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.inference.predict.outputs import OutputPlan
from segapp.inference.predict.pipeline import predict_files
from segapp.inference.predict.reading import find_images, read_picture
from segapp.inference.workspace import MIN_SIDE_PX, Workspace

rasterio = pytest.importorskip("rasterio", reason="the extra geo is not installed")

SCHEME = ClassScheme(("dark", "red", "bright"), ((10, 20, 30), (200, 0, 0), (0, 0, 250)), {4: 0, 9: 1, 7: 2})
PIXELS = PixelFormat((4, 2, 1), "uint16", ((0.0, 4000.0),) * 3)
SIZE = (2100, 2200)


class Thresholds:
    """A predictor whose class is the number of its first band's thresholds that are passed; holds what it was asked."""

    scheme, pixels, device = SCHEME, PIXELS, torch.device("cpu")
    threshold = None

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def labels(self, images: NDArray[Any]) -> NDArray[np.uint8]:
        self.asked.append(images.shape)
        assert images.dtype == np.uint16
        return ((images[..., 0] > 1000).astype(np.uint8) + (images[..., 0] > 2500)).astype(np.uint8)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NDArray[np.uint16]]:
    path = tmp_path_factory.mktemp("geo") / "scene.tif"
    bands = np.random.default_rng(0).integers(0, 4000, (4, 1, 1), np.uint16)
    rows = np.arange(SIZE[0], dtype=np.uint16)[:, None] + np.arange(SIZE[1], dtype=np.uint16)
    image = (rows + bands * 0).astype(np.uint16)
    image[0] //= 2
    where = rasterio.transform.Affine(0.5, 0.1, 500_000.0, 0.1, -0.5, 5_400_000.0)
    profile = {"driver": "GTiff", "height": SIZE[0], "width": SIZE[1], "count": 4, "dtype": "uint16", "tiled": True}
    with rasterio.open(
        path, "w", **profile, crs="EPSG:32632", transform=where, interleave="band", compress="deflate"
    ) as file:
        file.write(image)
    return path, image


def test_labels_colours_and_overlay_keep_place_and_ids(scene: tuple[Path, NDArray[np.uint16]], tmp_path: Path) -> None:
    path, image = scene
    predictor = Thresholds()
    plan = OutputPlan(tmp_path, SCHEME, pixels=PIXELS)
    tally = predict_files(predictor, find_images([path])[0], plan, workspace=Workspace(4 * MIN_SIDE_PX**2))
    assert tally.problems == []
    assert max(height * width for _, height, width, _ in predictor.asked) <= 4 * MIN_SIDE_PX**2
    expected = (image[3] > 1000).astype(np.uint8) + (image[3] > 2500)
    with rasterio.open(path) as source:
        for kind in ("labels", "color", "overlay"):
            with rasterio.open(tmp_path / kind / "scene.tif") as written:
                assert (written.crs, written.transform, written.shape) == (source.crs, source.transform, source.shape)
                if kind != "overlay":
                    np.testing.assert_array_equal(written.read(1), expected)
                if kind == "color":
                    assert [written.colormap(1)[i][:3] for i in range(3)] == list(SCHEME.palette)
                if kind == "overlay":
                    assert written.count == 3


def test_large_scene_is_not_decoded_whole(
    scene: tuple[Path, NDArray[np.uint16]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, image = scene
    found = find_images([path])[0][0]
    monkeypatch.setattr("segapp.inference.predict.reading.read_image", None)
    picture = read_picture(found, PIXELS)
    assert picture.num_px == SIZE[0] * SIZE[1]
    assert picture.georeference is not None
    np.testing.assert_array_equal(picture.pixels[100:110, 7:9], np.moveaxis(image[[3, 1, 0], 100:110, 7:9], 0, -1))


def test_file_without_georeference_gives_png(tmp_path: Path) -> None:
    with (
        pytest.warns(rasterio.errors.NotGeoreferencedWarning),
        rasterio.open(
            tmp_path / "plain.tif", "w", driver="GTiff", height=20, width=30, count=4, dtype="uint16"
        ) as file,
    ):
        file.write(np.zeros((4, 20, 30), np.uint16))
    plan = OutputPlan(tmp_path / "out", SCHEME, kinds=("labels",), pixels=PIXELS)
    files = find_images([tmp_path / "plain.tif"])[0]
    assert predict_files(Thresholds(), files, plan, workspace=Workspace(10**9)).problems == []
    assert [path.name for path in (tmp_path / "out" / "labels").iterdir()] == ["plain.png"]
