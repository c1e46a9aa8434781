"""Polygons of predictions: rings against GDAL's, files read by other programs, and back through `segapp init`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import cv2
import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from segapp.datasets.images.pixel_format import RGB8
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.errors import ConfigError
from segapp.inference.predict.outputs import OutputPlan
from segapp.inference.predict.pipeline import predict_files
from segapp.inference.predict.polygons import PolygonFormat, PolygonPlan, parse_polygons, rings_of
from segapp.inference.predict.reading import find_images
from segapp.inference.workspace import MIN_SIDE_PX, Workspace
from tests.support.drawn_folders import proposed

rasterio = pytest.importorskip("rasterio", reason="the extra geo is not installed")
features = pytest.importorskip("rasterio.features", reason="the extra geo is not installed")
shapely = pytest.importorskip("shapely", reason="the extra geo is not installed")
masks = pytest.importorskip("pycocotools.mask")

NAMES = ("background", "road", "tree", "roof & wall")
SCHEME = ClassScheme(NAMES, ((0, 0, 0), (200, 0, 0), (0, 0, 250), (9, 9, 9)))
PLACE = rasterio.transform.Affine(0.5, 0.1, 500_000.0, 0.2, -0.5, 5_400_000.0)


class Stored:
    """A predictor whose class is the value of the pixel."""

    scheme, pixels, device = SCHEME, RGB8, torch.device("cpu")
    threshold, align_corners = None, False

    def labels(self, images: NDArray[Any]) -> NDArray[Any]:
        return images[..., 0]


def drawn_labels(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """Blobs of four classes with islands, holes, pixels that touch at corners, and regions of one pixel."""
    rng = np.random.default_rng(seed)
    coarse = cv2.resize(rng.normal(0, 1, (height // 12 + 2, width // 12 + 2, 4)), (width, height))
    return (coarse + rng.normal(0, 0.12, coarse.shape)).argmax(2).astype(np.uint8)


@hypothesis.settings(max_examples=40)
@given(st.integers(1, 17), st.integers(1, 17), st.integers(0, 9999), st.floats(0.2, 0.9))
def test_rings_enclose_the_pixels_as_gdal_does(height: int, width: int, seed: int, share: float) -> None:
    pixels = (np.random.default_rng(seed).random((height, width)) < share).astype(np.uint8)
    count, ids = cv2.connectedComponents(pixels, connectivity=4)
    for number in range(1, count):
        outline, *holes = rings_of(ids == number)
        region = shapely.Polygon(outline)
        for hole in holes:
            region = region.difference(shapely.Polygon(hole))
        ((wanted, _),) = features.shapes((ids == number).astype(np.uint8), ids == number, connectivity=4)
        assert region.equals(shapely.geometry.shape(wanted))
        assert sum(map(cv2.contourArea, holes)) + region.area == cv2.contourArea(outline)
        corners = np.concatenate([outline, *holes])
        assert not ((corners == np.roll(corners, 1, 0)).all(1) & (len(corners) > 1)).any()


@pytest.mark.parametrize("tolerance_px", [1.5, 4.0])
def test_simplified_borders_are_shared_and_near(tolerance_px: float, tmp_path: Path) -> None:
    pyogrio = pytest.importorskip("pyogrio", reason="the extra geo is not installed")
    labels = drawn_labels(120, 150, 2)
    write_image(tmp_path / "d" / "a.png", labels)
    exact, simple = (
        shapely.from_wkb(pyogrio.raw.read(predict(tmp_path / "d", "gpkg", 9, each) / "a.gpkg")[2])
        for each in (0.0, tolerance_px)
    )
    assert shapely.coverage_is_valid(simple)  # no gaps and no overlaps between neighbors
    assert shapely.get_num_coordinates(simple).sum() < 0.6 * shapely.get_num_coordinates(exact).sum()
    distances = shapely.hausdorff_distance(shapely.boundary(simple), shapely.boundary(exact))
    assert np.median(distances) <= 1.5 * tolerance_px
    assert distances.max() <= 3 * tolerance_px


def write_image(path: Path, labels: NDArray[np.uint8], crs: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if crs is None:
        Image.fromarray(np.stack([labels] * 3, 2)).save(path)
        return
    profile = {"driver": "GTiff", "height": labels.shape[0], "width": labels.shape[1], "count": 3, "dtype": "uint8"}
    with rasterio.open(path, "w", **profile, crs=crs, transform=PLACE) as file:
        file.write(np.stack([labels] * 3))


def predict(root: Path, format: PolygonFormat, min_area_px: int = 0, simplify_px: float = 0.0) -> Path:
    """Predict the images of a folder in tiles, and return the folder of the polygons."""
    out = root.parent / f"out-{format}"
    plan = OutputPlan(out, SCHEME, kinds=(), polygons=PolygonPlan(format, min_area_px, simplify_px))
    tally = predict_files(Stored(), find_images([root])[0], plan, workspace=Workspace(MIN_SIDE_PX**2))
    assert tally.problems == []
    assert tally.paths
    assert all(path.is_file() for path in tally.paths)
    assert not [path for path in out.rglob("*") if path.name.startswith(".")]
    return out / "polygons"


def init(root: Path, files: Path) -> dict[str, NDArray[np.uint8]]:
    """Return the masks that `segapp init` writes for the polygons beside the images, with the class ids of SCHEME."""
    for path in files.rglob("*.*"):
        target = root / path.relative_to(files)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    config, _, _ = proposed(root, root.parent / "made.yaml")
    assert config.data.classes is not None
    ids = np.array([NAMES.index(name) for name in config.data.classes], np.uint8)
    found = sorted((root.parent / "made-masks").rglob("*.png"))
    return {path.stem: ids[np.asarray(Image.open(path))] for path in found}


def test_masks_of_init_equal_the_prediction(tmp_path: Path) -> None:
    wanted = {f"i{number}": drawn_labels(83, 71 + number, number) for number in range(4)}
    for name, labels in wanted.items():
        write_image(tmp_path / "d" / "sub" / f"{name}.png", labels)
    found = init(tmp_path / "d", predict(tmp_path / "d", "coco"))
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name])


def test_pycocotools_reads_the_same_pixels(tmp_path: Path) -> None:
    coco = pytest.importorskip("pycocotools.coco")
    labels = {name: drawn_labels(77, 64, number) for number, name in enumerate("abc")}
    for name, one in labels.items():
        write_image(tmp_path / "d" / f"{name}.png", one)
    data = coco.COCO(predict(tmp_path / "d", "coco") / "coco.json")
    assert [one["name"] for one in data.loadCats(data.getCatIds())] == list(NAMES[1:])
    assert [one["file_name"] for one in data.loadImgs(data.getImgIds())] == ["a.png", "b.png", "c.png"]
    for image in data.loadImgs(data.getImgIds()):
        found = np.zeros((77, 64), np.uint8)
        for one in data.loadAnns(data.getAnnIds(image["id"])):
            pixels = data.annToMask(one).astype(bool)
            assert pixels.sum() == one["area"]
            rows, columns = np.nonzero(pixels)
            corner = columns.min(), rows.min()
            assert one["bbox"] == [*corner, columns.max() + 1 - corner[0], rows.max() + 1 - corner[1]]
            assert not found[pixels].any()
            found[pixels] = one["category_id"] - 1
        np.testing.assert_array_equal(found, labels[image["file_name"][0]])


@pytest.mark.parametrize("format", ["geojson", "gpkg"])
@pytest.mark.parametrize("simplify_px", [0.0, 1.5])
def test_gdal_reads_valid_polygons_at_their_place(format: PolygonFormat, simplify_px: float, tmp_path: Path) -> None:
    pyogrio = pytest.importorskip("pyogrio", reason="the extra geo is not installed")
    labels = drawn_labels(60, 50, 5)
    write_image(tmp_path / "d" / "a.tif", labels, "EPSG:32632")
    write_image(tmp_path / "d" / "b.png", labels)
    folder = predict(tmp_path / "d", format, simplify_px=simplify_px)
    for name, crs, place in (("a", "EPSG:32632", PLACE), ("b", None, rasterio.transform.IDENTITY)):
        found, _, geometries, fields = pyogrio.raw.read(folder / f"{name}.{format}")
        # without a place: GDAL takes GeoJSON's null for degrees
        assert crs == found["crs"] or (crs is None and re.match("EPSG:4326|.*Undefined Cartesian", found["crs"]))
        shapes = shapely.from_wkb(geometries)
        assert shapely.is_valid(shapes).all()
        columns = dict(zip(found["fields"], fields, strict=True))
        assert set(columns) == {"class", "class_id", "area_px"}
        assert all(NAMES[number] == name for number, name in zip(columns["class_id"], columns["class"], strict=True))
        if not simplify_px:
            pairs = zip(shapes, columns["class_id"].tolist(), strict=True)
            drawn = features.rasterize(pairs, labels.shape, transform=place)
            np.testing.assert_array_equal(drawn, labels)
            assert shapely.area(shapes) / abs(place.determinant) == pytest.approx(columns["area_px"])


def test_small_polygons_and_holes_are_left_out(tmp_path: Path) -> None:
    labels = np.zeros((30, 40), np.uint8)
    labels[4:24, 5:30] = 1
    labels[8:10, 8:10] = 2  # 4 px: neither it nor its hole
    labels[14:20, 14:20] = 3  # 36 px: both
    labels[27:29, 33:36] = 2
    write_image(tmp_path / "d" / "a.png", labels)
    found = json.loads((predict(tmp_path / "d", "geojson", min_area_px=36) / "a.geojson").read_text())
    assert "crs" not in found
    kept = [(one["properties"]["class"], len(one["geometry"]["coordinates"])) for one in found["features"]]
    assert sorted(kept) == [("road", 2), ("roof & wall", 1)]
    found = json.loads((predict(tmp_path / "d", "coco", min_area_px=36) / "coco.json").read_text())
    kept = [(one["category_id"], len(one["segmentation"][0])) for one in found["annotations"]]
    assert sorted(kept) == [(2, 20), (4, 8)]  # a rectangle has 8 numbers; one with a rectangular hole 20
    labels[12, 12:28] = 0  # thinner than the tolerance
    write_image(tmp_path / "d" / "a.png", labels)
    found = json.loads((predict(tmp_path / "d", "coco", simplify_px=1.5) / "coco.json").read_text())
    assert [len(one["segmentation"][0]) for one in found["annotations"] if one["category_id"] == 2] == [20]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("shp", 0, 0.0), "--polygons shp is not known: .*geojson"),
        ((None, 5, 0.0), "--min-area 5 changes polygons, and none are written: add --polygons FORMAT"),
        ((None, 0, 0.5), "--simplify 0.5 changes polygons"),
        (("gpkg", 0, 0.0), "--polygons gpkg needs the package shapely: run `uv sync --extra geo`"),
    ],
)
def test_options_of_polygons_that_do_not_suit_are_named(
    options: tuple[Any, int, float], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("shapely", "pyogrio") if options[0] == "gpkg" else ():
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=message):
        parse_polygons(*options)
    assert parse_polygons("coco", 3, 1.5) == PolygonPlan("coco", 3, 1.5)
