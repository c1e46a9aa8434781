"""Polygons of predictions as GeoJSON, GeoPackage, COCO, Label Studio, and CVAT files.

GeoJSON and GeoPackage have one file per image, in the coordinates of a GeoTIFF, else in columns and rows of pixels. The
other formats have one file for all images, in pixels (Label Studio: percent of the sides). They do not support holes: a
hole is joined to the outline by a line that is traversed twice, which the even-odd rule, the nonzero rule and
pycocotools fill in the same way.

Shapes: V vertices of a ring.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import IO, Any, Literal, get_args
from xml.sax.saxutils import quoteattr

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree  # type: ignore[import-untyped]

from segapp.datasets.images.raster import IDENTITY, Georeference, crs_name
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.errors import ConfigError, accepted_words, storage_errors
from segapp.inference.predict.outlines import OutlineTracer, Region, area, simplified
from segapp.inference.predict.reading import InputFile, Picture
from segapp.run.files import remove_quietly, temporary_name, write_atomic

PolygonFormat = Literal["geojson", "gpkg", "coco", "labelstudio", "cvat"]
POLYGON_FORMATS: tuple[PolygonFormat, ...] = get_args(PolygonFormat)
_PER_IMAGE = ("geojson", "gpkg")
_NAMES = {"coco": "coco.json", "labelstudio": "labelstudio.json", "cvat": "cvat.xml"}
_GPKG_CHUNK = 10_000
_PIXEL_CRS = (
    'ENGCRS["Undefined Cartesian SRS with unknown unit",EDATUM["Unknown engineering datum"],CS[Cartesian,2],'
    'AXIS["X",unspecified,ORDER[1],LENGTHUNIT["unknown",0]],AXIS["Y",unspecified,ORDER[2],LENGTHUNIT["unknown",0]]]'
)
"""Coordinate system of pixels in a GeoPackage, as GDAL writes it."""

Rings = list[NDArray[Any]]
"""The outline of a polygon, then its holes, (V, 2) each."""


@dataclass(frozen=True)
class PolygonPlan:
    """Format of polygons, and limits for small ones; see `segapp predict --polygons`."""

    format: PolygonFormat
    min_area_px: int = 0  # smaller regions are left out, smaller holes are filled
    simplify_px: float = 0.0  # largest distance of a simplified border from the border of the pixels

    @property
    def is_per_image(self) -> bool:
        """True if there is one file per image."""
        return self.format in _PER_IMAGE


def parse_polygons(format: str | None, min_area_px: int, simplify_px: float) -> PolygonPlan | None:
    """Return the plan of the options `--polygons`, `--min-area` and `--simplify`; None without the first.

    Raises:
        ConfigError: an unknown format, an option without `--polygons`, or a missing package.
    """
    if format is None:
        if min_area_px or simplify_px:
            option = f"--min-area {min_area_px}" if min_area_px else f"--simplify {simplify_px:g}"
            raise ConfigError(f"{option} changes polygons, and none are written: add --polygons FORMAT")
        return None
    known = next((one for one in POLYGON_FORMATS if one == format), None)
    if known is None:
        raise ConfigError(f"--polygons {format} is not known: {accepted_words(format, POLYGON_FORMATS)}", value=format)
    packages = {"geojson": ["shapely"], "gpkg": ["shapely", "pyogrio"]}.get(known, [])
    if missing := [package for package in packages if find_spec(package) is None]:
        raise ConfigError(f"--polygons {known} needs the package {missing[0]}: run uv sync --extra geo")
    return PolygonPlan(known, min_area_px, simplify_px)


def is_background(name: str) -> bool:
    """Return True for a class that gets no polygons."""
    return name.strip("_ ").lower() in {"background", "bg"}


@dataclass(frozen=True)
class Polygon:
    """A region of a class as rings in pixels."""

    class_id: int
    area_px: int
    rings: Rings


class PolygonTracer:
    """Finds the polygons of an image whose rows are added from top to bottom."""

    def __init__(self, size_px: tuple[int, int], scheme: ClassScheme, plan: PolygonPlan) -> None:
        self._plan, self._is_set = plan, scheme.multilabel is not None
        wanted = [number for number, name in enumerate(scheme.names) if not is_background(name)]
        if self._is_set:
            self._tracers = {number: OutlineTracer(size_px, wanted=(1,)) for number in wanted}
        else:
            self._tracers = {0: OutlineTracer(size_px, wanted)}

    def add(self, labels_RW: NDArray[Any]) -> Iterator[Polygon]:
        """Yield the polygons that these rows complete; see `OutlineTracer.add`."""
        for number, tracer in self._tracers.items():
            for region in tracer.add((labels_RW >> number) & 1 if self._is_set else labels_RW):
                polygon = _polygon(number if self._is_set else region.value, region, self._plan)
                if polygon is not None:
                    yield polygon


def _polygon(class_id: int, region: Region, plan: PolygonPlan) -> Polygon | None:
    if region.area_px < plan.min_area_px:
        return None
    rings = [region.outline, *(hole for hole in region.holes if -area(hole) >= plan.min_area_px)]
    outline, *holes = [simplified(ring, plan.simplify_px) for ring in rings]
    if len(outline) < 3 or not area(outline):  # a region that is thinner than the tolerance
        return None
    return Polygon(class_id, region.area_px, [outline, *(hole for hole in holes if len(hole) > 2 and area(hole))])


def joined(rings: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return one ring for an outline and its holes; each hole is joined to the nearest vertex of the outline."""
    outline, *holes = rings
    if not holes:
        return outline
    starts = [hole[np.lexsort(hole.T)[0]] for hole in holes]
    nearest = KDTree(outline).query(np.array(starts))[1]
    pieces, done = [], 0
    for number in np.argsort(nearest, kind="stable"):
        at, hole = int(nearest[number]), holes[number]
        first = int(np.lexsort(hole.T)[0])
        pieces += [outline[done : at + 1], hole[first:], hole[: first + 1]]
        done = at  # the vertex of the outline is repeated after the hole
    return np.concatenate([*pieces, outline[done:]])


class VectorFile:
    """GeoJSON or GeoPackage of one image, written polygon by polygon; closed by `finish`."""

    def __init__(self, path: Path, picture: Picture, scheme: ClassScheme, plan: PolygonPlan) -> None:
        self._path, self._picture, self._scheme, self._plan = path, picture, scheme, plan
        if picture.georeference is None and picture.world is not None:
            raise ConfigError(
                f"{picture.file.path} has map coordinates, and --polygons {plan.format} needs the package rasterio to "
                "use them: run uv sync --extra geo"
            )
        self._place = picture.georeference or Georeference(None, IDENTITY)
        a, b, _, d, e, _ = self._place.transform
        self._is_flipped = a * e - b * d < 0
        # A millionth of a pixel, so that coordinates have no digits from rounding errors
        self._digits = 6 - int(np.floor(np.log10(max(abs(side) for side in (a, b, d, e)))))

    def on_map(self, polygon: Polygon) -> Rings:
        """Return the rings in the coordinates of the file; outlines are counterclockwise if y points up."""
        a, b, c, d, e, f = self._place.transform
        rings = []
        for ring in polygon.rings:
            x, y = (ring[::-1] if self._is_flipped else ring).astype(np.float64).T
            rings.append(np.stack([a * x + b * y + c, d * x + e * y + f], 1).round(self._digits))
        return rings

    def geometry(self, polygon: Polygon) -> Any:
        """Return the polygon as a shapely geometry; simplified borders that cross each other are repaired."""
        import shapely

        outline, *holes = self.on_map(polygon)
        found = shapely.Polygon(outline, holes)
        if not self._plan.simplify_px or found.is_valid:
            return found
        return shapely.make_valid(found, method="structure", keep_collapsed=False)


class GeoJsonFile(VectorFile):
    """GeoJSON of one image; its member `crs` (GeoJSON 2008) names the coordinate system, or is null for pixels."""

    def __init__(self, path: Path, picture: Picture, scheme: ClassScheme, plan: PolygonPlan) -> None:
        super().__init__(path, picture, scheme, plan)
        name = crs_name(self._place.crs) if self._place.crs else None
        if self._place.crs and name is None:
            raise ConfigError(
                f"{picture.file.path}: its coordinate system has no EPSG code, which GeoJSON needs: use --polygons gpkg"
            )
        crs = None if name is None else {"type": "name", "properties": {"name": name}}
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        self._file.write(f'{{"type": "FeatureCollection", "crs": {json.dumps(crs)}, "features": [')
        self._separator = "\n"

    def write(self, polygons: Iterator[Polygon]) -> None:
        """Append polygons."""
        import shapely

        for polygon in polygons:
            geometry = shapely.geometry.mapping(self.geometry(polygon))
            properties = {
                "class": self._scheme.names[polygon.class_id], "class_id": polygon.class_id, "area_px": polygon.area_px
            }  # fmt: skip
            feature = {"type": "Feature", "properties": properties, "geometry": geometry}
            self._file.write(self._separator + json.dumps(feature))
            self._separator = ",\n"

    def finish(self) -> None:
        """Write the end and close the file."""
        self._file.write("\n]}\n")
        self._file.close()


class GeoPackageFile(VectorFile):
    """GeoPackage of one image, with a layer `polygons`."""

    def __init__(self, path: Path, picture: Picture, scheme: ClassScheme, plan: PolygonPlan) -> None:
        super().__init__(path, picture, scheme, plan)
        self._waiting: list[Polygon] = []
        self._is_begun = False

    def write(self, polygons: Iterator[Polygon]) -> None:
        """Append polygons."""
        for polygon in polygons:
            self._waiting.append(polygon)
            if len(self._waiting) == _GPKG_CHUNK:
                self._flush()

    def _flush(self) -> None:
        import pyogrio
        import shapely

        rows = self._waiting
        names = np.array([self._scheme.names[row.class_id] for row in rows], object)
        ids, areas = ([getattr(row, key) for row in rows] for key in ("class_id", "area_px"))
        options = {
            "geometry_type": "MultiPolygon" if self._plan.simplify_px else "Polygon",
            "promote_to_multi": bool(self._plan.simplify_px),
        }
        pyogrio.raw.write(
            self._path,
            geometry=shapely.to_wkb(np.array([self.geometry(row) for row in rows], object)),
            field_data=[names, np.array(ids, np.int64), np.array(areas, np.int64)],
            fields=["class", "class_id", "area_px"],
            layer="polygons",
            driver="GPKG",
            crs=self._place.crs or _PIXEL_CRS,
            append=self._is_begun,
            **options,
        )
        self._is_begun, self._waiting = True, []

    def finish(self) -> None:
        """Write the remaining polygons."""
        if self._waiting or not self._is_begun:
            self._flush()


@dataclass(frozen=True)
class _Entry:
    """An image in a file of all images: its name and size, and the position of its lines among the parts."""

    file: str
    size_px: tuple[int, int]
    first: int
    last: int


class SharedPolygons:
    """Context manager of the file of all images in COCO's, Label Studio's, or CVAT's format.

    Several threads may add images; the file has them in the order of `files`. It is written at the end of the context,
    or removed if there was an exception.

    Raises:
        StorageError: the file cannot be written.
    """

    def __init__(self, folder: Path, scheme: ClassScheme, plan: PolygonPlan, files: Sequence[InputFile]) -> None:
        self._scheme, self._plan = scheme, plan
        self.path = folder / "polygons" / _NAMES[plan.format]
        self._order = {file.name: number for number, file in enumerate(files)}
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> SharedPolygons:
        with storage_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._parts = tempfile.TemporaryFile(dir=self.path.parent)
        return self

    def image(self, picture: Picture) -> SharedImage:
        """Return the writer of an image."""
        return SharedImage(self, picture, self._scheme, self._plan)

    def add(self, picture: Picture, lines: IO[bytes]) -> None:
        """Append the lines of an image, one per polygon."""
        name = picture.file.name
        with self._lock:
            first = self._parts.seek(0, os.SEEK_END)
            lines.seek(0)
            shutil.copyfileobj(lines, self._parts)
            shown = (PurePath(name).parent / picture.file.path.name).as_posix()
            if self._plan.format == "labelstudio":
                shown = picture.file.path.as_posix().lstrip("/")
            height, width = picture.pixels.shape[:2]
            self._entries[name] = _Entry(shown, (height, width), first, self._parts.tell())

    def __exit__(self, error: object, *_: object) -> None:
        temporary = self.path.parent / temporary_name()
        try:
            if error is None:
                with storage_errors(self.path):
                    with open(temporary, "w", encoding="utf-8") as file:
                        file.writelines(self._text())
                    os.replace(temporary, self.path)
                    if self._plan.format == "labelstudio":
                        write_atomic(self.path.with_suffix(".xml"), _label_studio_config(self._scheme))
        finally:
            self._parts.close()
            remove_quietly(temporary)

    def _lines(self, entry: _Entry) -> Iterator[str]:
        self._parts.seek(entry.first)
        while self._parts.tell() < entry.last:
            yield self._parts.readline().decode().rstrip("\n")

    def _text(self) -> Iterator[str]:
        ordered = [self._entries[name] for name in sorted(self._entries, key=self._order.__getitem__)]
        return {"coco": self._coco, "labelstudio": self._label_studio, "cvat": self._cvat}[self._plan.format](ordered)

    def _coco(self, entries: Sequence[_Entry]) -> Iterator[str]:
        # Category ids are class ids plus 1, because many readers treat 0 as the background.
        names = [(number + 1, name) for number, name in enumerate(self._scheme.names) if not is_background(name)]
        images = [
            {"id": number, "file_name": entry.file, "height": entry.size_px[0], "width": entry.size_px[1]}
            for number, entry in enumerate(entries, start=1)
        ]
        yield f'{{"categories": {json.dumps([{"id": number, "name": name} for number, name in names])},\n'
        yield f'"images": {json.dumps(images)},\n"annotations": ['
        number = 0
        for image, entry in enumerate(entries, start=1):
            for line in self._lines(entry):
                number += 1
                yield f'{"," if number > 1 else ""}\n{{"id": {number}, "image_id": {image}, {line}}}'
        yield "\n]}\n"

    def _label_studio(self, entries: Sequence[_Entry]) -> Iterator[str]:
        yield "["
        for number, entry in enumerate(entries):
            data = json.dumps({"image": f"/data/local-files/?d={entry.file}"})
            yield f'{"," if number else ""}\n{{"data": {data}, "predictions": [{{"model_version": "segapp", "result": ['
            for region, line in enumerate(self._lines(entry), start=1):
                yield f'{"," if region > 1 else ""}\n{{"id": "{region}", {line}}}'
            yield "]}]}"
        yield "\n]\n"

    def _cvat(self, entries: Sequence[_Entry]) -> Iterator[str]:
        labels = "".join(
            f"<label><name>{quoteattr(name)[1:-1]}</name><color>{_hex(self._scheme, number)}</color></label>"
            for number, name in enumerate(self._scheme.names)
            if not is_background(name)
        )
        yield '<?xml version="1.0" encoding="utf-8"?>\n<annotations>\n<version>1.1</version>\n'
        yield f"<meta><task><labels>{labels}</labels></task></meta>\n"
        for number, entry in enumerate(entries):
            height, width = entry.size_px
            yield f'<image id="{number}" name={quoteattr(entry.file)} width="{width}" height="{height}">\n'
            yield from (f"{line}\n" for line in self._lines(entry))
            yield "</image>\n"
        yield "</annotations>\n"


class SharedImage:
    """The polygons of one image in the file of all images; they are added by `finish`."""

    def __init__(self, shared: SharedPolygons, picture: Picture, scheme: ClassScheme, plan: PolygonPlan) -> None:
        self._shared, self._picture, self._names = shared, picture, scheme.names
        height, width = picture.pixels.shape[:2]
        sides = np.array([width, height])
        self._line: Callable[[Polygon, str], str] = {
            "coco": _coco_line,
            "labelstudio": lambda polygon, name: _label_studio_line(polygon, name, sides),
            "cvat": _cvat_line,
        }[plan.format]
        folder = shared.path.parent
        self._lines = tempfile.SpooledTemporaryFile(2**24, dir=str(folder))  # noqa: SIM115

    def write(self, polygons: Iterator[Polygon]) -> None:
        """Append polygons."""
        for polygon in polygons:
            self._lines.write(f"{self._line(polygon, self._names[polygon.class_id])}\n".encode())

    def finish(self) -> None:
        """Add the polygons to the file."""
        self._shared.add(self._picture, self._lines)
        self._lines.close()


def _coco_line(polygon: Polygon, name: str) -> str:
    outline = polygon.rings[0]
    (left, top), (right, bottom) = outline.min(0).tolist(), outline.max(0).tolist()
    fields = {
        "category_id": polygon.class_id + 1,
        "segmentation": [joined(polygon.rings).ravel().tolist()],
        "area": polygon.area_px,
        "bbox": [left, top, right - left, bottom - top],
        "iscrowd": 0,
    }
    return json.dumps(fields)[1:-1]


def _label_studio_line(polygon: Polygon, name: str, sides_px: NDArray[Any]) -> str:
    points = (joined(polygon.rings) * 100 / sides_px).round(9).tolist()
    width, height = sides_px.tolist()
    fields = {
        "from_name": "label",
        "to_name": "image",
        "type": "polygonlabels",
        "original_width": width,
        "original_height": height,
        "image_rotation": 0,
        "value": {"points": points, "polygonlabels": [name], "closed": True},
    }
    return json.dumps(fields)[1:-1]


def _cvat_line(polygon: Polygon, name: str) -> str:
    points = ";".join(f"{x}.0,{y}.0" for x, y in joined(polygon.rings).tolist())
    return f'<polygon label={quoteattr(name)} source="auto" occluded="0" points="{points}" z_order="0"></polygon>'


def _hex(scheme: ClassScheme, number: int) -> str:
    return "#{:02x}{:02x}{:02x}".format(*scheme.palette[number])


def _label_studio_config(scheme: ClassScheme) -> str:
    """Return the labeling interface of a Label Studio project for these classes."""
    labels = "".join(
        f"    <Label value={quoteattr(name)} background={quoteattr(_hex(scheme, number))}/>\n"
        for number, name in enumerate(scheme.names)
        if not is_background(name)
    )
    return (
        '<View>\n  <Image name="image" value="$image"/>\n'
        f'  <PolygonLabels name="label" toName="image">\n{labels}  </PolygonLabels>\n</View>\n'
    )
