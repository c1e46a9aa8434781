"""Polygons of predictions: outlines against GDAL's, files read by other programs, and back through `segapp init`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

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
from segapp.inference.predict import OutputPlan, PolygonPlan, find_images, outlines, parse_polygons, predict_files
from segapp.inference.predict.outlines import OutlineTracer, Region, simplified
from segapp.inference.predict.polygons import PolygonFormat, joined
from segapp.inference.workspace import MIN_SIDE_PX, Workspace
from segapp.onboarding.conversion import fill_area
from tests.support.drawn_folders import proposed

rasterio = pytest.importorskip("rasterio", reason="the extra geo is not installed")
features = pytest.importorskip("rasterio.features", reason="the extra geo is not installed")
shapely = pytest.importorskip("shapely", reason="the extra geo is not installed")
masks = pytest.importorskip("pycocotools.mask", reason="the extra import is not installed")

NAMES = ("background", "road", "tree", "roof & wall")
SCHEME = ClassScheme(NAMES, ((0, 0, 0), (200, 0, 0), (0, 0, 250), (9, 9, 9)))
PLACE = rasterio.transform.Affine(0.5, 0.1, 500_000.0, 0.1, -0.5, 5_400_000.0)


class Stored:
    """A predictor whose class is the value of the pixel."""

    scheme, pixels, device = SCHEME, RGB8, torch.device("cpu")
    frame_px = threshold = None

    def labels(self, images: NDArray[Any]) -> NDArray[Any]:
        return images[..., 0]


def drawn_labels(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """Blobs of four classes with islands, holes, pixels that touch at corners, and regions of one pixel."""
    rng = np.random.default_rng(seed)
    coarse = cv2.resize(rng.normal(0, 1, (height // 12 + 2, width // 12 + 2, 4)), (width, height))
    return (coarse + rng.normal(0, 0.12, coarse.shape)).argmax(2).astype(np.uint8)


def trace(labels: NDArray[Any], steps: list[int], values: Any = range(9)) -> list[Region]:
    tracer = OutlineTracer(labels.shape, values)  # type: ignore[arg-type]
    found, at = [], 0
    for step in [*steps, labels.shape[0]]:
        found += list(tracer.add(labels[at : at + step]))
        at += step
    return found


def as_shape(region: Region) -> Any:
    return shapely.Polygon(region.outline[:, :2], [hole[:, :2] for hole in region.holes])


@hypothesis.settings(max_examples=40)
@given(st.data())
def test_outlines_of_rows_equal_those_of_gdal(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 17)), data.draw(st.integers(1, 17))
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    labels = rng.integers(0, data.draw(st.integers(1, 3)), (height, width)).astype(np.uint8)
    found = trace(labels, data.draw(st.lists(st.integers(1, 5), max_size=9)))
    wanted = [(int(value), shapely.geometry.shape(one)) for one, value in features.shapes(labels, connectivity=4)]
    assert all(as_shape(region).is_valid for region in found)
    assert [region.area_px for region in found] == [as_shape(region).area for region in found]

    def ordered(shapes: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        return sorted(shapes, key=lambda one: (one[0], one[1].bounds, one[1].area))

    ours = ordered([(region.value, as_shape(region)) for region in found])
    for (value, shape), (wanted_value, wanted_shape) in zip(ours, ordered(wanted), strict=True):
        assert value == wanted_value
        assert shape.equals(wanted_shape)


def test_blocks_do_not_change_the_outlines(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = drawn_labels(90, 70, 1)
    whole = trace(labels, [])
    monkeypatch.setattr(outlines, "_BLOCK_PX", 70)
    rows = trace(labels, [7] * 12)
    assert {(region.value, as_shape(region).normalize().wkt) for region in whole} == {
        (region.value, as_shape(region).normalize().wkt) for region in rows
    }
    assert len(whole) == len(rows) > 50


@pytest.mark.parametrize("tolerance_px", [0.7, 1.5, 4.0])
def test_simplified_borders_are_shared_and_near(tolerance_px: float) -> None:
    labels = drawn_labels(120, 150, 2)
    sides: dict[Any, int] = {}
    for region in trace(labels, [50, 30]):
        for ring in (region.outline, *region.holes):
            simple = simplified(ring, tolerance_px)
            for first, second in zip(simple.tolist(), np.roll(simple, -1, axis=0).tolist(), strict=True):
                sides[tuple(first), tuple(second)] = sides.get((tuple(first), tuple(second)), 0) + 1
            line = shapely.LinearRing(ring[:, :2])
            if len(simple) > 2:
                assert shapely.LinearRing(simple).hausdorff_distance(line) <= tolerance_px * 1.5 + 1e-9
    for (first, second), count in sides.items():  # every side is followed once in each direction, but for the frame's
        on_frame = any(first[axis] == second[axis] in (0, end) for axis, end in ((0, 150), (1, 120)))
        assert on_frame or sides.get((second, first), 0) == count


def test_areas_hold_the_pixel_centers_as_gdal_fills_them() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        rings = [rng.uniform(-5, 35, (int(rng.integers(3, 9)), 2)).tolist()]
        wanted = features.rasterize(
            [{"type": "Polygon", "coordinates": [[*rings[0], rings[0][0]]]}],
            (30, 25),
            transform=rasterio.transform.IDENTITY,
        )
        found = np.zeros((30, 25), np.uint8)
        fill_area(found, rings, 1)
        is_simple = shapely.Polygon(rings[0]).is_valid  # GDAL fills crossed outlines in another way
        assert (found == wanted).all() or not is_simple or not wanted.any()
    thin = np.zeros((5, 5), np.uint8)
    fill_area(thin, [[(1.1, 1.1), (1.3, 1.1), (1.3, 1.3)]], 7)
    assert np.argwhere(thin).tolist() == [[1, 1]]


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
    tally = predict_files(Stored(), find_images([root]), plan, workspace=Workspace(MIN_SIDE_PX**2))
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


def test_simplified_masks_differ_near_borders_only(tmp_path: Path) -> None:
    smooth = cv2.resize(np.random.default_rng(3).normal(0, 1, (6, 6, 4)), (160, 140)).argmax(2).astype(np.uint8)
    for name in ("a", "b", "c", "d"):
        write_image(tmp_path / "d" / f"{name}.png", smooth)
    for mask in init(tmp_path / "d", predict(tmp_path / "d", "coco", simplify_px=2.0)).values():
        borders = (cv2.morphologyEx(smooth, cv2.MORPH_GRADIENT, np.ones((3, 3), np.uint8)) > 0).astype(np.uint8)
        distance = cv2.distanceTransform(1 - borders, cv2.DIST_L2, 5)
        assert distance[mask != smooth].max(initial=0) <= 3.0
        assert (mask != smooth).mean() < 0.03


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
    found = json.loads((predict(tmp_path / "d", "geojson", min_area_px=10) / "a.geojson").read_text())
    assert found["crs"] is None
    kept = [(one["properties"]["class"], len(one["geometry"]["coordinates"])) for one in found["features"]]
    assert sorted(kept) == [("road", 2), ("roof & wall", 1)]


def test_holes_are_joined_to_the_outline() -> None:
    square = np.array([[0, 0], [9, 0], [9, 9], [0, 9]])
    holes = [np.array([[1, 1], [1, 2], [2, 2], [2, 1]]), np.array([[7, 6], [7, 8], [8, 8], [8, 6]])]
    found = np.zeros((9, 9), np.uint8)
    fill_area(found, [joined([square, *holes]).tolist()], 1)
    wanted = np.ones((9, 9), np.uint8)
    wanted[1, 1] = wanted[6:8, 7] = 0
    np.testing.assert_array_equal(found, wanted)


def test_files_of_labeling_tools_hold_what_they_import(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_image(tmp_path / "d" / f"{name}.png", drawn_labels(20, 30, 3))
    top = ElementTree.parse(predict(tmp_path / "d", "cvat") / "cvat.xml").getroot()
    assert [one.text for one in top.iterfind("meta/task/labels/label/name")] == list(NAMES[1:])
    assert [one.attrib for one in top.iterfind("image")] == [
        {"id": str(number), "name": f"{name}.png", "width": "30", "height": "20"} for number, name in enumerate("ab")
    ]
    folder = predict(tmp_path / "d", "labelstudio")
    view = ElementTree.parse(folder / "labelstudio.xml").getroot()
    assert [one.get("value") for one in view.iter("Label")] == list(NAMES[1:])
    tasks = json.loads((folder / "labelstudio.json").read_text())
    assert [re.sub(".*/", "", task["data"]["image"]) for task in tasks] == ["a.png", "b.png"]
    region = tasks[0]["predictions"][0]["result"][0]
    assert (region["from_name"], region["to_name"], region["original_width"]) == ("label", "image", 30)
    assert np.array(region["value"]["points"]).max() <= 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("shp", 0, 0.0), "--polygons shp is not known: .*geojson"),
        ((None, 5, 0.0), "--min-area 5 changes polygons, and none are written: add --polygons FORMAT"),
        ((None, 0, 0.5), "--simplify 0.5 changes polygons"),
    ],
)
def test_options_of_polygons_that_do_not_suit_are_named(options: tuple[Any, int, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_polygons(*options)
    assert parse_polygons("coco", 3, 1.5) == PolygonPlan("coco", 3, 1.5)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segapp.inference.predict.polygons.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--polygons gpkg needs the package shapely: run uv sync --extra geo"):
        parse_polygons("gpkg", 0, 0.0)


def test_video_gets_no_polygons_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"")
    plan = OutputPlan(tmp_path / "out", SCHEME, polygons=PolygonPlan("coco"))
    problems = predict_files(Stored(), find_images([tmp_path / "a.mp4"]), plan).problems
    assert "extract its frames first" in problems[0]
