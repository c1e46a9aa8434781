"""Exports of labeling tools: objects of CVAT, Label Studio, labelme and Supervisely, drawn in their order.

CVAT for images 1.1 is XML with polygons, boxes, ellipses and run lengths, drawn by z_order, then in their order. Label
Studio exports JSON of tasks with polygons, brush strokes (run lengths) and rectangles; of each task, the first
annotation that was not canceled is used. labelme has one JSON file per
image. Supervisely has meta.json, and ann/NAME.json for each img/NAME. Later objects are drawn on top.
"""

import base64
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import cv2
import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import open_bytes, read_bytes, shown
from segapp.datasets.images.reading import decode
from segapp.errors import DataError
from segapp.onboarding.convert.conversion import (
    IGNORED,
    Annotated,
    Annotations,
    Images,
    check_classes,
    checked_points,
    coverage_words,
    decode_runs,
    draw_lines,
    fill_area,
    fill_box,
    fill_ellipse,
    fill_polygon,
    json_files,
    paste,
)
from segapp.onboarding.layout import Layout, Mask
from segapp.onboarding.survey.class_files import is_background, is_void
from segapp.onboarding.survey.tree import Tree

_CVAT_KINDS = ("polygon", "box", "mask", "ellipse", "polyline")
_LABEL_STUDIO_KINDS = ("polygonlabels", "brushlabels", "rectanglelabels")

_CvatShape = tuple[str, Mapping[str, str]]


@dataclass
class Export(Annotations):
    """The exports of a tool; the labels of all objects become classes."""

    labels: set[str] = field(default_factory=set)

    def by_label(
        self,
        draw: Callable[..., None],
        entries: str = "files",
        sources: Sequence[str] = (),
        reason: str = "the labels, by name",
    ) -> Layout | None:
        """Return the conversion; None if there are no images.

        `draw` draws an object in a mask; `values` maps labels to mask values; `sources` are files that are read in
        addition to the annotations. ValueError is raised if no image has an object.
        """
        if not self.found:
            return None
        if not any(one.objects for one in self.found):
            raise ValueError(
                f"there are no objects in its {len(self.found)} images; annotate some and export them again"
            )
        void = {label for label in self.labels if is_void(label)}
        names = check_classes(ordered_names(self.labels - void), self.found[0].path)
        values = {label: number for number, label in enumerate(names)} | dict.fromkeys(void, IGNORED)
        evidence = (
            f"{self.total} {entries} of {self.title}",
            coverage_words(len(self.found), self.total, entries),
            f"{len(names)} classes",
        )
        files = [*sources, *dict.fromkeys(one.path for one in self.found)]
        return self.layout(partial(draw, values=values), evidence, names, reason, files)


def ordered_names(names: Iterable[str]) -> list[str]:
    """Return the class names in alphabetical order, background first; it is added if it is missing.

    >>> ordered_names(["road", "_background_", "car"])
    ['_background_', 'car', 'road']
    """
    ordered = sorted(names, key=lambda name: (not is_background(name), name))
    return ordered if ordered and is_background(ordered[0]) else ["background", *ordered]


def find_cvat(tree: Tree) -> Layout | None:
    """Return the conversion of CVAT's XML files."""
    export = Export("cvat", "CVAT", "shape", Images(tree))
    for path in tree.others_named(".xml"):
        if b"<annotations" not in tree.read(path, 4096):
            continue
        try:
            top = parse_xml(read_bytes(tree.root / path))
        except (ElementTree.ParseError, ValueError, LookupError, DataError):
            continue
        export.labels.update(one.text for one in top.iterfind("./meta//labels/label/name") if one.text)
        for entry in top.iterfind("image"):
            export.total += 1
            name = entry.get("name", "")
            image = export.images.find(name, path)
            if image is not None:
                shapes: list[_CvatShape] = [(one.tag, dict(one.attrib)) for one in entry if one.tag in _CVAT_KINDS]
                shapes.sort(key=lambda shape: float(shape[1].get("z_order") or 0))
                export.found.append(Annotated(path, f"{shown(path)}: image {shown(name)}", image, shapes))
                export.labels.update(shape["label"] for _, shape in shapes if "label" in shape)
    return export.by_label(_draw_cvat, "entries in XML")


class _PlainBuilder(ElementTree.TreeBuilder):
    """Builder of XML without a document type, which could define entities; in any encoding, as the parser reads it."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError("XML with a document type is not read: remove <!DOCTYPE ...>")


def parse_xml(data: bytes) -> ElementTree.Element:
    """Return the top element of XML; raise ValueError if it has a document type, and ParseError if it is damaged."""
    parser = ElementTree.XMLParser(target=_PlainBuilder())
    for start in range(0, len(data), 2**16):  # so that nothing after a document type is parsed
        parser.feed(data[start : start + 2**16])
    top: ElementTree.Element = parser.close()
    return top


def _draw_cvat(mask: Mask, kind_and_shape: _CvatShape, values: Mapping[str, int]) -> None:
    kind, shape = kind_and_shape
    value = values[shape["label"]]
    if kind == "polygon":
        corners = [tuple(float(side) for side in corner.split(",")) for corner in shape["points"].split(";") if corner]
        fill_area(mask, [corners], value)
    elif kind == "box":
        x0, y0, x1, y1 = (float(shape[key]) for key in ("xtl", "ytl", "xbr", "ybr"))
        fill_box(mask, (x0, y0), (x1, y1), value)
    elif kind == "mask":
        left, top, width, height = (int(shape[key]) for key in ("left", "top", "width", "height"))
        counts = [int(count) for count in shape["rle"].split(",")]
        paste(mask, decode_runs(counts, height, width, num_px=mask.size), left, top, value)
    elif kind == "ellipse":
        x, y, rx, ry = (round(float(shape[key])) for key in ("cx", "cy", "rx", "ry"))
        fill_ellipse(mask, (x, y), (rx, ry), value, float(shape.get("rotation", 0)))
    else:
        raise ValueError("a line has no area: draw it as a polygon")


def find_label_studio(tree: Tree) -> Layout | None:
    """Return the conversion of Label Studio's tasks that have annotations."""
    export = Export("label-studio", "Label Studio", "region", Images(tree))
    for path, tasks in json_files(tree, list):
        for number, task in enumerate(tasks):
            if not isinstance(task, dict) or "data" not in task:
                continue
            made = task.get("annotations")
            if not isinstance(made, list):
                continue
            export.total += 1
            said = next((value for value in task["data"].values() if isinstance(value, str)), "")
            image = export.images.find(said.partition("/data/local-files/?d=")[2] or said, path)
            annotations = [one for one in made if isinstance(one, dict)]
            kept = [one for one in annotations if not one.get("was_cancelled")]
            if image is not None and kept:
                regions = [
                    one
                    for one in kept[0].get("result", [])
                    if not isinstance(one, dict) or one.get("type") in _LABEL_STUDIO_KINDS
                ]
                export.found.append(Annotated(path, f"{shown(path)}: task {number}", image, regions))
                export.labels.update(name for one in regions if isinstance(one, dict) for name in _labels(one))
    return export.by_label(_draw_label_studio, "tasks")


def _labels(region: Mapping[str, Any]) -> list[str]:
    value = region.get("value")
    names = value.get(region["type"]) if isinstance(value, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def _draw_label_studio(mask: Mask, region: Mapping[str, Any], values: Mapping[str, int]) -> None:
    height, width = mask.shape
    value = values[_labels(region)[0]]
    content = region["value"]
    if region["type"] == "brushlabels":
        mask[decode_brush(content["rle"], height, width)] = value
        return
    corners = content.get("points")
    if region["type"] == "rectanglelabels":
        if content.get("rotation"):
            raise ValueError("a rotated rectangle cannot be read: draw it as a polygon")
        x, y, w, h = (float(content[key]) for key in ("x", "y", "width", "height"))
        corners = [(x, y), (x + w, y), (x + w, y + h), (x, y + h)]
    fill_area(mask, [[(x / 100 * width, y / 100 * height) for x, y in corners]], value)  # percent of the sides


def decode_brush(data: Sequence[int], height_px: int, width_px: int) -> NDArray[np.bool_]:
    """Return the opaque pixels of a brush stroke, from Label Studio's bitwise run lengths of RGBA values.

    The format comes from label-studio-converter (brush.py): 32 bits of length, the number of bits of a value, four bit
    counts of run lengths, then runs: a flag (repeated or not), the index of the bit count, the length, the values.

    Raises:
        ValueError: the data end early, or have another size.
    """
    bits = bytes(np.unpackbits(np.asarray(data, np.uint8)) + ord("0"))
    position = 0

    def read(count: int) -> int:
        nonlocal position
        if position + count > len(bits):
            raise ValueError("the run lengths end early")
        position += count
        return int(bits[position - count : position], 2)

    num_values = read(32)
    if num_values != height_px * width_px * 4:
        raise ValueError(f"run lengths of {num_values // 4} pixels for {width_px} x {height_px}")
    value_bits = read(5) + 1
    length_bits = [read(4) + 1 for _ in range(4)]
    values = np.zeros(num_values, np.uint8)
    at = 0
    while at < num_values:
        is_repeated = read(1)
        end = at + 1 + read(length_bits[read(2)])
        if is_repeated:
            values[at:end] = read(value_bits)
        else:
            values[at:end] = [read(value_bits) for _ in range(end - at)][: num_values - at]
        at = end
    return np.asarray(values.reshape(height_px, width_px, 4)[..., 3] > 0)


def find_labelme(tree: Tree) -> Layout | None:
    """Return the conversion of labelme files."""
    export = Export("labelme", "labelme", "shape", Images(tree))
    for path, content in json_files(tree, dict):
        if not isinstance(content.get("shapes"), list) or "imagePath" not in content:
            continue
        export.total += 1
        stem = path.rpartition("/")[2].rpartition(".")[0]
        image = export.images.find(str(content["imagePath"]), path) or export.images.find(stem, path)
        export.labels.update(str(shape.get("label")) for shape in content["shapes"] if isinstance(shape, dict))
        if image is not None:
            export.found.append(Annotated(path, shown(path), image, content["shapes"]))
    return export.by_label(_draw_labelme)


def _draw_labelme(mask: Mask, shape: Mapping[str, Any], values: Mapping[str, int]) -> None:
    """Draw a shape in place, without points. Raise ValueError if its kind is unknown, or it has too few points."""
    value = values[str(shape["label"])]
    kind, points = shape.get("shape_type") or "polygon", shape["points"]
    if kind == "polygon":
        fill_polygon(mask, [points], value)
    elif kind == "rectangle":
        first, last = points
        fill_box(mask, first, last, value)
    elif kind == "circle":
        (x0, y0), (x1, y1) = points
        radius = round(math.hypot(x1 - x0, y1 - y0))
        fill_ellipse(mask, (round(x0), round(y0)), (radius, radius), value)
    elif kind in ("line", "linestrip"):
        draw_lines(mask, np.rint(checked_points(np.asarray(points, np.float64))), value)
    elif kind == "mask":
        piece = _piece(base64.b64decode(shape["mask"]), cv2.IMREAD_GRAYSCALE, mask.size)
        paste(mask, piece, round(points[0][0]), round(points[0][1]), value)
    elif kind not in ("point", "points"):
        raise ValueError(f"shape_type {kind!r} is not known")


def _piece(png: bytes, flags: int, num_px: int) -> NDArray[np.bool_]:
    """Return the pixels of a PNG that are not 0, (H, W); of several channels, the last one is used.

    DataError is raised if it is larger than its image, of `num_px` pixels.
    """
    if not png.startswith(b"\x89PNG"):
        raise ValueError("its bitmap is not a PNG")
    open_bytes(png, Path("bitmap"), num_px)
    pixels = decode(png, flags)
    if pixels is None:
        raise ValueError("its bitmap is damaged")
    return np.asarray((pixels[..., -1] if pixels.ndim == 3 else pixels) > 0)


def find_supervisely(tree: Tree) -> Layout | None:
    """Return the conversion of a Supervisely project."""
    export = Export("supervisely", "Supervisely", "object", Images(tree))
    for path, content in json_files(tree, dict, folder="ann"):
        objects = content.get("objects")
        if not isinstance(objects, list):
            continue
        export.total += 1
        folder, _, name = path.removesuffix(".json").rpartition("/")
        image = export.images.find(f"{folder[: -len('ann')]}img/{name}", path)
        if image is not None:
            export.found.append(Annotated(path, shown(path), image, objects))
            export.labels.update(
                str(one["classTitle"]) for one in objects if isinstance(one, dict) and "classTitle" in one
            )
    metas = [path for path in tree.others_named(".json") if path.endswith("meta.json")][:1]
    meta = tree.read_json(metas[0]) if metas and export.found else None
    classes = meta.get("classes") if isinstance(meta, dict) else None
    known = classes if isinstance(classes, list) else []
    export.labels.update(str(one["title"]) for one in known if isinstance(one, dict) and "title" in one)
    return export.by_label(_draw_supervisely, sources=metas, reason="the classes of the project, by name")


def _draw_supervisely(mask: Mask, one: Mapping[str, Any], values: Mapping[str, int]) -> None:
    value = values[str(one["classTitle"])]
    kind = one["geometryType"]
    if kind == "polygon":
        fill_polygon(mask, [one["points"]["exterior"], *one["points"].get("interior", [])], value)
    elif kind == "rectangle":
        first, last = one["points"]["exterior"]
        fill_box(mask, first, last, value)
    elif kind == "bitmap":
        most_bytes = 2**20 + 9 * mask.size  # of a PNG of the image's size, uncompressed
        png = zlib.decompressobj().decompress(base64.b64decode(one["bitmap"]["data"]), most_bytes)
        left, top = one["bitmap"]["origin"]
        paste(mask, _piece(png, cv2.IMREAD_UNCHANGED, mask.size), int(left), int(top), value)
    elif kind not in ("point", "line"):
        raise ValueError(f"geometryType {kind!r} is not known")
