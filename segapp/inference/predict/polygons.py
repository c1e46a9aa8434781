"""Polygons of predictions as GeoJSON, GeoPackage and COCO files.

A polygon is a region of a class: pixels that are connected by their sides. GeoJSON and GeoPackage have one file per
image, in the coordinates of a GeoTIFF, else in columns and rows of pixels. COCO has one file for all images, in pixels,
and needs no other package. It does not support holes: a hole is joined to the outline by a line that is traversed
twice, which the even-odd rule, the nonzero rule and pycocotools fill in the same way.

Shapes: H x W pixels of an image, V vertices of a ring, P polygons.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from numbers import Real
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

import cv2
import numpy as np
from numpy.typing import NDArray

from segapp.datasets.images.raster import IDENTITY, Georeference, crs_name, known_place, outlines
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.errors import ConfigError, accepted_words, install_command, some_names, storage_errors
from segapp.inference.predict.reading import InputFile, Picture
from segapp.run.files import write_atomic
from segapp.scores import is_background

PolygonFormat = Literal["geojson", "gpkg", "coco"]
POLYGON_FORMATS: tuple[PolygonFormat, ...] = get_args(PolygonFormat)
_PIXEL_CRS = (
    'ENGCRS["Undefined Cartesian SRS with unknown unit",EDATUM["Unknown engineering datum"],CS[Cartesian,2],'
    'AXIS["X",unspecified,ORDER[1],LENGTHUNIT["unknown",0]],AXIS["Y",unspecified,ORDER[2],LENGTHUNIT["unknown",0]]]'
)
"""Coordinate system of pixels in a GeoPackage, as GDAL writes it."""


@dataclass(frozen=True)
class PolygonPlan:
    """Format of polygons, and limits for small ones; see `segapp predict --polygons`."""

    format: PolygonFormat
    min_area_px: int = 0  # smaller regions are left out, smaller holes are filled
    simplify_px: float = 0.0  # tolerance of simplified borders

    @property
    def writers(self) -> tuple[str, ...]:
        return () if self.format == "coco" else ("shapely", "rasterio.features", "pyogrio")

    def check_places(self, files: Sequence[InputFile]) -> None:
        """Raise ConfigError if the format cannot name the coordinate systems of images; import what writes them."""
        for name in self.writers:
            import_module(name)  # here, because the threads that write the files would wait for each other
        places = {file.name: known_place(file.path) for file in files if self.format == "geojson"}
        unnamed = [name for name, place in places.items() if place and place.crs and crs_name(place.crs) is None]
        if unnamed:
            raise ConfigError(
                f"{some_names(unnamed)}: the coordinate system has no EPSG code, which GeoJSON needs: "
                "use --polygons gpkg"
            )


def parse_polygons(format: str | None, min_area_px: int, simplify_px: float) -> PolygonPlan | None:
    """Return the plan of the options `--polygons`, `--min-area` and `--simplify`; None without the first.

    Raises:
        ConfigError: an unknown format, an option without `--polygons`, or a missing package.
    """
    for option, value in (("--min-area", min_area_px), ("--simplify", simplify_px)):
        # Callers from Python pass values of any type; NaN fails the comparison.
        if not isinstance(value, Real) or not 0 <= value < math.inf:
            raise ConfigError(f"{option} {value!r} is no number of 0 or more")
    if format is None:
        if min_area_px or simplify_px:
            option = f"--min-area {min_area_px}" if min_area_px else f"--simplify {simplify_px:g}"
            raise ConfigError(f"{option} changes polygons, and none are written: add --polygons FORMAT")
        return None
    known = next((one for one in POLYGON_FORMATS if one == format), None)
    if known is None:
        raise ConfigError(
            f"--polygons {format} is not known: {accepted_words(str(format), POLYGON_FORMATS)}", value=format
        )
    plan = PolygonPlan(known, min_area_px, simplify_px)
    packages = [name.partition(".")[0] for name in plan.writers]
    if missing := [package for package in packages if find_spec(package) is None]:
        raise ConfigError(f"--polygons {known} needs the package {missing[0]}: {install_command('geo')}")
    return plan


def _label_maps(labels_HW: NDArray[Any], scheme: ClassScheme) -> Iterator[tuple[NDArray[Any], Mapping[int, int]]]:
    """Yield (H, W) maps, and the class of each value with polygons: one map, or for sets of classes one per class."""
    wanted = [number for number, name in enumerate(scheme.names) if not is_background(name)]
    if scheme.multilabel is None:
        yield labels_HW.astype(np.uint16), {number: number for number in wanted}
    else:
        yield from (((labels_HW >> number & 1).astype(np.uint8), {1: number}) for number in wanted)


def encode_vectors(labels_HW: NDArray[Any], picture: Picture, scheme: ClassScheme, plan: PolygonPlan) -> bytes:
    """Return the polygons of an image as GeoJSON or as a GeoPackage with the layer `polygons`.

    Outlines are counterclockwise if y points up.
    """
    import pyogrio
    import shapely

    place = picture.georeference or Georeference(None, IDENTITY)
    found = [_simple_regions(values, classes, plan) for values, classes in _label_maps(labels_HW, scheme)]
    polygons, ids, areas_px = (np.concatenate(each) for each in zip(*found, strict=True))
    a, b, c, d, e, f = place.transform
    # A millionth of a pixel, so that coordinates have no digits from rounding errors
    digits = 6 - int(np.floor(np.log10(max(abs(side) for side in (a, b, d, e)))))
    on_map = shapely.transform(polygons, lambda xy: (xy @ np.array([[a, d], [b, e]]) + (c, f)).round(digits))
    file = io.BytesIO()  # GDAL reports no error of what it writes last to a disk
    pyogrio.raw.write(
        file,
        geometry=shapely.to_wkb(shapely.orient_polygons(on_map)),
        field_data=[np.array(scheme.names, object)[ids], ids, areas_px],
        fields=["class", "class_id", "area_px"],
        layer="polygons",
        driver="GeoJSON" if plan.format == "geojson" else "GPKG",
        crs=place.crs or _PIXEL_CRS,
        geometry_type="Polygon",
        layer_options={"COORDINATE_PRECISION": max(digits, 0)} if plan.format == "geojson" else None,
    )
    return file.getvalue()


def _simple_regions(values_HW: NDArray[Any], classes: Mapping[int, int], plan: PolygonPlan) -> tuple[NDArray[Any], ...]:
    """Return the regions of a label map: polygons in pixels (P,), their classes (P,) and numbers of pixels (P,)."""
    import shapely

    found = [
        (shapely.geometry.shape(one), classes[value])
        for one, value in outlines(values_HW, np.isin(values_HW, list(classes)))
    ]
    areas_px = np.array([round(one.area) for one, _ in found], np.int64)
    ids = np.array([number for _, number in found], np.int64)
    kept = areas_px >= plan.min_area_px
    holes = ([ring for ring in one.interiors if shapely.Polygon(ring).area >= plan.min_area_px] for one, _ in found)
    filled = [shapely.Polygon(one.exterior, own) for (one, _), own in zip(found, holes, strict=True)]
    polygons = np.array(filled, object)[kept]
    if plan.simplify_px:  # neighbors keep a common border if both have its vertices
        polygons = shapely.coverage_simplify(shapely.segmentize(polygons, 1.0), plan.simplify_px)
    return polygons, ids[kept], areas_px[kept]


def rings_of(region_HW: NDArray[np.bool_]) -> list[NDArray[np.int32]]:
    """Return the outline of a region, then its holes: corners of pixels (V, 2), as columns and rows.

    `cv2.findContours` follows points, not sides of pixels. So the pixels with their sides and corners are drawn on a
    grid of half pixels, where corners of pixels have even coordinates. It leaves out the corner at each inner angle,
    where it makes a diagonal step; that corner is put back.
    """
    height, width = region_HW.shape
    grid = np.zeros((2 * height + 1, 2 * width + 1), np.uint8)
    grid[1::2, 1::2] = region_HW
    contours, _ = cv2.findContours(cv2.dilate(grid, np.ones((3, 3))), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    rings = []
    for contour in contours:
        here = contour[:, 0]
        after = np.roll(here, -1, axis=0)
        corner = np.where(here % 2 == 0, here, after)  # equal to `after` in one coordinate, except at a diagonal step
        path = np.stack([here, np.where((here != after).all(1)[:, None], corner, here)], 1).reshape(-1, 2)
        path = path[(path != np.roll(path, 1, axis=0)).any(1)]
        steps = np.sign(np.roll(path, -1, axis=0) - path)
        rings.append((path[(steps != np.roll(steps, 1, axis=0)).any(1)] // 2).astype(np.int32))
    return sorted(rings, key=cv2.contourArea, reverse=True)


def joined(rings: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return one ring for an outline and its holes; each hole is joined to the nearest vertex of the outline."""
    outline, *holes = rings
    if not holes:
        return outline
    from scipy.spatial import KDTree  # type: ignore[import-untyped]

    starts = [hole[np.lexsort(hole.T)[0]] for hole in holes]
    nearest = KDTree(outline).query(np.array(starts))[1]
    pieces, done = [], 0
    for number in np.argsort(nearest, kind="stable"):
        at, hole = int(nearest[number]), holes[number]
        first = int(np.lexsort(hole.T)[0])
        pieces += [outline[done : at + 1], hole[first:], hole[: first + 1]]
        done = at  # the vertex of the outline is repeated after the hole
    return np.concatenate([*pieces, outline[done:]])


def coco_lines(labels_HW: NDArray[Any], scheme: ClassScheme, plan: PolygonPlan) -> Iterator[str]:
    """Yield the polygons of an image as the fields of COCO annotations, in JSON without braces."""
    for values, classes in _label_maps(labels_HW, scheme):
        for value, class_id in classes.items():
            count, regions, boxes, _ = cv2.connectedComponentsWithStats(
                (values == value).astype(np.uint8), connectivity=4
            )
            for number in range(1, count):  # 0: the pixels of other classes
                left, top, width, height, area_px = boxes[number].tolist()
                if area_px >= plan.min_area_px:
                    rings = rings_of(regions[top : top + height, left : left + width] == number)
                    if rings := _large_and_simple(rings, plan):
                        yield _coco_line(class_id, area_px, [ring + np.array([left, top]) for ring in rings])


def _large_and_simple(rings: Sequence[NDArray[np.int32]], plan: PolygonPlan) -> list[NDArray[np.int32]]:
    """Return the rings of a region without small holes, simplified; nothing for one thinner than the tolerance."""
    outline, *holes = rings
    kept = [outline, *(hole for hole in holes if cv2.contourArea(hole) >= plan.min_area_px)]
    if plan.simplify_px:
        kept = [np.asarray(cv2.approxPolyDP(ring, plan.simplify_px, True), np.int32)[:, 0] for ring in kept]
    outline, *holes = kept
    return [outline, *(hole for hole in holes if cv2.contourArea(hole))] if cv2.contourArea(outline) else []


def _coco_line(class_id: int, area_px: int, rings: Sequence[NDArray[Any]]) -> str:
    (left, top), (right, bottom) = rings[0].min(0).tolist(), rings[0].max(0).tolist()
    fields = {
        "category_id": class_id + 1,  # because many readers treat 0 as the background
        "segmentation": [joined(rings).ravel().tolist()],
        "area": area_px,
        "bbox": [left, top, right - left, bottom - top],
        "iscrowd": 0,
    }
    return json.dumps(fields)[1:-1]


class CocoFile:
    """The COCO file of all images; several threads may add images, whose polygons stay in memory until `write`."""

    def __init__(self, folder: Path, scheme: ClassScheme, plan: PolygonPlan) -> None:
        self._scheme, self._plan = scheme, plan
        self.path = folder / "polygons" / "coco.json"
        self._images: dict[str, tuple[dict[str, Any], list[str]]] = {}  # fields of an image, and of its annotations

    def add(self, picture: Picture, labels_HW: NDArray[Any]) -> None:
        height, width = labels_HW.shape
        name = (PurePath(picture.file.name).parent / picture.file.path.name).as_posix()
        lines = list(coco_lines(labels_HW, self._scheme, self._plan))
        self._images[picture.file.name] = {"file_name": name, "height": height, "width": width}, lines

    def write(self, files: Sequence[InputFile]) -> None:
        """Write the images in the order of `files`; StorageError if the file cannot be written."""
        found = [self._images[file.name] for file in files if file.name in self._images]
        images = [{"id": number, **fields} for number, (fields, _) in enumerate(found, start=1)]
        numbered = [
            f'"image_id": {number}, {line}' for number, (_, lines) in enumerate(found, start=1) for line in lines
        ]
        annotations = ",\n".join(f'{{"id": {number}, {line}}}' for number, line in enumerate(numbered, start=1))
        names = [(number + 1, name) for number, name in enumerate(self._scheme.names) if not is_background(name)]
        categories = [{"id": number, "name": name} for number, name in names]
        with storage_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(
                self.path,
                f'{{"categories": {json.dumps(categories)},\n"images": {json.dumps(images)},\n'
                f'"annotations": [\n{annotations}\n]}}\n',
            )
