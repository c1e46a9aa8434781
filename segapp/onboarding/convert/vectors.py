"""GeoJSON and GeoPackage files next to images: their polygons become masks of the classes in a text property.

A file belongs to the image with the same name. Polygons for an image with map coordinates are converted to its
coordinate system; GeoJSON without a member `crs` is then in degrees (RFC 7946). Polygons for other images are in
pixels.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from segapp.datasets.files import shown, tiff_tags
from segapp.datasets.images.raster import on_image, read_georeference
from segapp.datasets.images.tiff_tags import has_rasterio
from segapp.errors import DataError
from segapp.onboarding.convert.conversion import Annotated, Images, fill_area, missing_extra
from segapp.onboarding.convert.label_tools import Export
from segapp.onboarding.layout import Layout, Mask
from segapp.onboarding.survey.tree import Tree

_CLASS_KEYS = ("class", "label", "category", "class_name", "name", "type")
_DEGREES = "OGC:CRS84"

_Feature = tuple[dict[str, Any], Any]  # properties and geometry, as in GeoJSON


def find_vectors(tree: Tree) -> Layout | None:
    """Return the conversion of GeoJSON and GeoPackage files whose features name classes."""
    export = Export("geojson", "GeoJSON", "feature", Images(tree))
    for path in tree.others_named(".geojson", ".gpkg"):
        crs, features = _read(tree, path)
        export.total += 1
        image = export.images.find(re.sub(r"\.\w+$", "", path), path)
        if image is None or not features:
            continue
        place = read_georeference(tree.root / image) if tiff_tags(tree.root / image) and has_rasterio() else None
        key = next((key for key in _CLASS_KEYS if isinstance(features[0][0].get(key), str)), None)
        if key is None:
            raise DataError(f"{shown(path)}: no property names a class: name it one of {', '.join(_CLASS_KEYS)}")
        objects = []
        for properties, geometry in features:
            for rings in _polygons(geometry):
                on_pixels = [on_image(np.asarray(ring, np.float64)[:, :2], crs, place).tolist() for ring in rings]
                objects.append((str(properties[key]), on_pixels))
        export.found.append(Annotated(path, shown(path), image, objects))
        export.labels.update(label for label, _ in objects)
    return export.by_label(_draw, reason=f"the values of {' or '.join(_CLASS_KEYS[:2])}, by name")


def _draw(mask: Mask, named: tuple[str, list[Any]], values: dict[str, int]) -> None:
    fill_area(mask, named[1], values[named[0]])


def _read(tree: Tree, path: str) -> tuple[str | None, list[_Feature]]:
    """Return the coordinate system, or None for pixels, and the features of a file."""
    if path.endswith(".gpkg"):
        return _read_geopackage(tree.root / path)
    content = tree.read_json(path)
    if not isinstance(content, dict) or content.get("type") != "FeatureCollection":
        return None, []
    crs = content.get("crs", {"properties": {"name": _DEGREES}})
    features = [(one.get("properties") or {}, one["geometry"]) for one in content["features"]]
    return None if crs is None else str(crs["properties"]["name"]), features


def _read_geopackage(path: Path) -> tuple[str | None, list[_Feature]]:
    try:
        import pyogrio
        import shapely
    except ImportError:
        raise missing_extra("pyogrio", "GeoPackages", "geo") from None
    with path.open("rb") as file:
        if file.read(16) != b"SQLite format 3\0":  # GDAL would try all of its formats
            return None, []
    found, _, geometries, columns = pyogrio.raw.read(path.absolute())
    shapes = [json.loads(text) for text in shapely.to_geojson(shapely.from_wkb(geometries))]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    properties = [dict(zip(found["fields"], row, strict=True)) for row in rows]
    return found["crs"], list(zip(properties, shapes, strict=True))


def _polygons(geometry: Any) -> Iterator[list[Any]]:
    """Yield the rings of each polygon of a GeoJSON geometry; lines and points have none."""
    if geometry and geometry["type"] == "Polygon":
        yield geometry["coordinates"]
    elif geometry and geometry["type"] == "MultiPolygon":
        yield from geometry["coordinates"]
