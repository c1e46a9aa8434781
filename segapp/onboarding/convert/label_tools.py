"""Exports of labeling tools: objects of CVAT, Label Studio, labelme and Supervisely, drawn in their order.

CVAT for images 1.1 is XML with polygons, boxes, ellipses and run lengths, drawn by z_order, then in their order. Label
Studio exports JSON of tasks with polygons, brush strokes (run lengths) and rectangles; of a task the first annotation
that was not cancelled is taken. labelme has a JSON file for each image. Supervisely has meta.json, and ann/NAME.json
for each img/NAME. Objects that come later lie on top.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from xml.etree import ElementTree

import cv2
import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import read_bytes, shown
from segapp.errors import DataError
from segapp.onboarding.convert.conversion import (
    ON_TOP,
    Images,
    check_objects,
    class_values,
    coverage_words,
    decode_runs,
    drawn_pair,
    fill_box,
    fill_polygon,
    json_files,
    painter,
    paste,
)
from segapp.onboarding.layout import Layout, Mask
from segapp.onboarding.survey.tree import Tree

_CVAT_KINDS = ("polygon", "box", "mask", "ellipse", "polyline")
_LABEL_STUDIO_KINDS = ("polygonlabels", "brushlabels", "rectanglelabels")
_MAX_PIECE_BYTES = 2**28

_CvatShape = tuple[str, Mapping[str, str]]


@dataclass(frozen=True)
class _Export:
    """What the exports of one tool hold.

    Attributes:
        name: of the conversion.
        title: of the tool.
        entries: what there is for each image: "files".
        noun: of an object.
        draw: draws an object in a mask, with the values of the labels as `values`.
        classes_reason: where the class names are from.
    """

    name: str
    title: str
    entries: str
    noun: str
    draw: Callable[..., None]
    classes_reason: str = "the labels, by name"

    def conversion(
        self,
        images: Images,
        found: Sequence[_Annotated],
        labels: Iterable[str],
        total: int,
        sources: Sequence[str] = (),
    ) -> Layout | None:
        """Return the conversion to masks; None without images.

        Args:
            images: of the folder.
            found: the annotated images that are there.
            labels: of all objects.
            total: number of entries, with those whose images are not there.
            sources: files that are read besides those of `found`.

        Raises:
            ValueError: no image has an object.
            DataError: there are more classes than fit into uint8 masks.
        """
        if not found:
            return None
        check_objects(one.objects for one in found)
        names, values = class_values(labels, found[0].path)
        draw = partial(self.draw, values=values)
        pairs = [
            drawn_pair(one.image, one.origin, one.objects, painter(images, one.image, one.objects, draw, self.noun))
            for one in found
        ]
        return Layout(
            self.name,
            pairs,
            0.97 * len(pairs) / total,
            (
                f"{total} {self.entries} of {self.title}",
                coverage_words(len(pairs), total, self.entries),
                f"{len(names)} classes",
            ),
            (*sources, *dict.fromkeys(one.path for one in found)),
            title=self.title,
            classes=names,
            classes_reason=self.classes_reason,
            notes=(ON_TOP,),
        )


@dataclass(frozen=True)
class _Annotated:
    """An image with its objects in the order in which they are drawn.

    Attributes:
        path: of the annotation file.
        origin: file and entry of the annotation, for messages.
        image: relative to the data's root.
        objects: as the file holds them.
    """

    path: str
    origin: str
    image: str
    objects: Sequence[Any]


def find_cvat(tree: Tree) -> Layout | None:
    """Return the conversion of CVAT's XML files."""
    images = Images(tree)
    found: list[_Annotated] = []
    labels: dict[str, None] = {}
    total = 0
    for path in tree.others_named(".xml"):
        if b"<annotations" not in tree.read(path, 4096):
            continue
        try:
            data = read_bytes(tree.root / path)
            if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
                continue
            top = ElementTree.fromstring(data)
        except (ElementTree.ParseError, DataError):
            continue
        labels |= dict.fromkeys(one.text for one in top.iterfind("./meta//labels/label/name") if one.text)
        for entry in top.iterfind("image"):
            total += 1
            name = entry.get("name", "")
            image = images.find(name, path)
            if image is not None:
                shapes: list[_CvatShape] = [(one.tag, dict(one.attrib)) for one in entry if one.tag in _CVAT_KINDS]
                shapes.sort(key=lambda shape: float(shape[1].get("z_order") or 0))
                found.append(_Annotated(path, f"{shown(path)}: image {shown(name)}", image, shapes))
                labels |= dict.fromkeys(shape["label"] for _, shape in shapes if "label" in shape)
    export = _Export("cvat", "CVAT", "entries in XML", "shape", _draw_cvat)
    return export.conversion(images, found, labels, total)


def _draw_cvat(mask: Mask, kind_and_shape: _CvatShape, values: Mapping[str, int]) -> None:
    kind, shape = kind_and_shape
    value = values[shape["label"]]
    if kind == "polygon":
        corners = [tuple(float(side) for side in corner.split(",")) for corner in shape["points"].split(";") if corner]
        fill_polygon(mask, [corners], value)
    elif kind == "box":
        x0, y0, x1, y1 = (float(shape[key]) for key in ("xtl", "ytl", "xbr", "ybr"))
        fill_box(mask, (x0, y0), (x1, y1), value)
    elif kind == "mask":
        left, top, width, height = (int(shape[key]) for key in ("left", "top", "width", "height"))
        counts = [int(count) for count in shape["rle"].split(",")]
        paste(mask, decode_runs(counts, height, width), left, top, value)
    elif kind == "ellipse":
        x, y, rx, ry = (round(float(shape[key])) for key in ("cx", "cy", "rx", "ry"))
        cv2.ellipse(mask, (x, y), (rx, ry), float(shape.get("rotation", 0)), 0, 360, value, -1)
    else:
        raise ValueError("a line has no area: draw it as a polygon")


def find_label_studio(tree: Tree) -> Layout | None:
    """Return the conversion of Label Studio's tasks."""
    images = Images(tree)
    found: list[_Annotated] = []
    total = 0
    for path, tasks in json_files(tree, list):
        for number, task in enumerate(tasks):
            if not isinstance(task, dict) or not isinstance(task.get("annotations"), list) or "data" not in task:
                continue
            total += 1
            said = next((value for value in task["data"].values() if isinstance(value, str)), "")
            image = images.find(said, path)
            annotations = [one for one in task["annotations"] if isinstance(one, dict)]
            kept = [one for one in annotations if not one.get("was_cancelled")]
            if image is not None and kept:
                regions = [
                    one
                    for one in kept[0].get("result", [])
                    if not isinstance(one, dict) or one.get("type") in _LABEL_STUDIO_KINDS
                ]
                found.append(_Annotated(path, f"{shown(path)}: task {number}", image, regions))
    labels = {name for one in found for region in one.objects if isinstance(region, dict) for name in _labels(region)}
    export = _Export("label-studio", "Label Studio", "tasks", "region", _draw_label_studio)
    return export.conversion(images, found, labels, total)


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
            raise ValueError("a turned rectangle: draw it as a polygon")
        x, y, w, h = (float(content[key]) for key in ("x", "y", "width", "height"))
        corners = [(x, y), (x + w, y), (x + w, y + h), (x, y + h)]
    ring = [(x / 100 * width - 0.5, y / 100 * height - 0.5) for x, y in corners]  # percent of the sides
    fill_polygon(mask, [ring], value)


def decode_brush(data: Sequence[int], height_px: int, width_px: int) -> NDArray[np.bool_]:
    """Return the pixels of a brush stroke: Label Studio's run lengths in bits, of RGBA values; those not transparent.

    The format is that of label-studio-converter (brush.py): 32 bits of length, the bits of a value, four bit counts of
    run lengths, then runs: a flag (repeated or not), which bit count, the length, the values.

    Raises:
        ValueError: it ends early, or has another size.
    """
    bits = np.unpackbits(np.asarray(data, np.uint8))
    position = 0

    def read(count: int) -> int:
        nonlocal position
        if position + count > len(bits):
            raise ValueError("the run lengths end early")
        number = 0
        for bit in bits[position : position + count]:
            number = number << 1 | int(bit)
        position += count
        return number

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
    images, total = Images(tree), 0
    labels: set[str] = set()
    found: list[_Annotated] = []
    for path, content in json_files(tree, dict):
        if not isinstance(content.get("shapes"), list) or "imagePath" not in content:
            continue
        total += 1
        stem = path.rpartition("/")[2].rpartition(".")[0]
        image = images.find(str(content["imagePath"]), path) or images.find(stem, path)
        labels |= {str(shape.get("label")) for shape in content["shapes"] if isinstance(shape, dict)}
        if image is not None:
            found.append(_Annotated(path, shown(path), image, content["shapes"]))
    return _Export("labelme", "labelme", "files", "shape", _draw_labelme).conversion(images, found, labels, total)


def _draw_labelme(mask: Mask, shape: Mapping[str, Any], values: Mapping[str, int]) -> None:
    """Draw a shape in place: polygon, rectangle, circle, mask, linestrip; points are left out.

    Raises:
        ValueError: its kind is unknown, or it has too few points.
    """
    value = values[str(shape["label"])]
    kind, points = shape.get("shape_type") or "polygon", shape["points"]
    if kind == "polygon":
        fill_polygon(mask, [points], value)
    elif kind == "rectangle":
        first, last = points
        fill_box(mask, first, last, value)
    elif kind == "circle":
        (x0, y0), (x1, y1) = points
        cv2.circle(mask, (round(x0), round(y0)), round(math.hypot(x1 - x0, y1 - y0)), value, -1)
    elif kind in ("line", "linestrip"):
        cv2.polylines(mask, [np.rint(np.asarray(points)).astype(np.int32)], False, value)
    elif kind == "mask":
        piece = _piece(base64.b64decode(shape["mask"]), cv2.IMREAD_GRAYSCALE)
        paste(mask, piece, round(points[0][0]), round(points[0][1]), value)
    elif kind not in ("point", "points"):
        raise ValueError(f"shape_type {kind!r} is not known")


def _piece(png: bytes, flags: int) -> NDArray[np.bool_]:
    """Return the pixels of a PNG that are not 0, (H, W); of several channels the last one counts.

    Raises:
        ValueError: it is no PNG.
    """
    piece = cv2.imdecode(np.frombuffer(png, np.uint8), flags)
    if piece is None:
        raise ValueError("its bitmap is no PNG")
    pixels = np.asarray(piece)
    return np.asarray((pixels[..., -1] if pixels.ndim == 3 else pixels) > 0)


def find_supervisely(tree: Tree) -> Layout | None:
    """Return the conversion of a Supervisely project."""
    images, total = Images(tree), 0
    found: list[_Annotated] = []
    for path, content in json_files(tree, dict, folder="ann"):
        if not isinstance(content.get("objects"), list):
            continue
        total += 1
        folder, _, name = path.removesuffix(".json").rpartition("/")
        image = images.find(f"{folder[: -len('ann')]}img/{name}", path)
        if image is not None:
            found.append(_Annotated(path, shown(path), image, content["objects"]))
    metas = [path for path in tree.others_named(".json") if path.endswith("meta.json")][:1]
    meta = tree.read_json(metas[0]) if metas and found else None
    classes = meta.get("classes") if isinstance(meta, dict) else None
    known = [one for one in classes if isinstance(one, dict)] if isinstance(classes, list) else []
    labels = dict.fromkeys(str(one["title"]) for one in known if "title" in one)
    objects = [one for annotated in found for one in annotated.objects if isinstance(one, dict)]
    labels |= dict.fromkeys(str(one["classTitle"]) for one in objects if "classTitle" in one)
    reason = "the classes of the project, by name"
    export = _Export("supervisely", "Supervisely", "files", "object", _draw_supervisely, reason)
    return export.conversion(images, found, labels, total, metas)


def _draw_supervisely(mask: Mask, one: Mapping[str, Any], values: Mapping[str, int]) -> None:
    value = values[str(one["classTitle"])]
    kind = one["geometryType"]
    if kind == "polygon":
        fill_polygon(mask, [one["points"]["exterior"], *one["points"].get("interior", [])], value)
    elif kind == "rectangle":
        first, last = one["points"]["exterior"]
        fill_box(mask, first, last, value)
    elif kind == "bitmap":
        packed = zlib.decompressobj().decompress(base64.b64decode(one["bitmap"]["data"]), _MAX_PIECE_BYTES)
        left, top = one["bitmap"]["origin"]
        paste(mask, _piece(packed, cv2.IMREAD_UNCHANGED), int(left), int(top), value)
    elif kind not in ("point", "line"):
        raise ValueError(f"geometryType {kind!r} is not known")
