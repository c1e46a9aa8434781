"""CVAT for images 1.1: XML with polygons, boxes, ellipses and run lengths, drawn by z_order, then in their order."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree import ElementTree

import cv2

from segapp.datasets.files import read_bytes, shown
from segapp.errors import DataError
from segapp.onboarding.convert.conversion import (
    ON_TOP,
    Conversion,
    Images,
    Item,
    Mask,
    check_objects,
    class_values,
    coverage_words,
    decode_runs,
    fill_polygon,
    first_bytes,
    mask_target,
    painter,
    paste,
    split_said,
)
from segapp.onboarding.survey.tree import Tree

_KINDS = ("polygon", "box", "mask", "ellipse", "polyline")
_Shape = tuple[str, Mapping[str, str]]


def find_cvat(tree: Tree) -> Conversion | None:
    """Return the conversion of CVAT's XML files."""
    images = Images(tree)
    found: list[tuple[str, str, str, list[_Shape]]] = []
    labels: dict[str, None] = {}
    total = 0
    for path in tree.others_named(".xml"):
        if b"<annotations" not in first_bytes(tree, path):
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
                shapes: list[_Shape] = [(one.tag, dict(one.attrib)) for one in entry if one.tag in _KINDS]
                shapes.sort(key=lambda shape: float(shape[1].get("z_order") or 0))
                found.append((path, name, image, shapes))
                labels |= dict.fromkeys(shape["label"] for _, shape in shapes if "label" in shape)
    if not found:
        return None
    check_objects(shapes for _, _, _, shapes in found)
    names, values = class_values(labels, found[0][0])
    items = [
        Item(
            image,
            mask_target(image),
            f"{shown(path)}: image {shown(name)}",
            shapes,
            painter(images, image, shapes, lambda mask, shape: _draw(mask, shape, values), "shape"),
            split_said(image),
        )
        for path, name, image, shapes in found
    ]
    evidence = (f"{total} images in XML of CVAT", coverage_words(len(items), total, "entries"), f"{len(names)} classes")
    sources = tuple(dict.fromkeys(path for path, _, _, _ in found))
    confidence = 0.97 * len(items) / total
    return Conversion("cvat", "CVAT", names, items, confidence, evidence, "the labels, by name", (ON_TOP,), sources)


def _draw(mask: Mask, kind_and_shape: _Shape, values: Mapping[str, int]) -> None:
    kind, shape = kind_and_shape
    value = values[shape["label"]]
    if kind == "polygon":
        corners = [tuple(float(side) for side in corner.split(",")) for corner in shape["points"].split(";") if corner]
        fill_polygon(mask, [corners], value)
    elif kind == "box":
        x0, y0, x1, y1 = (float(shape[key]) for key in ("xtl", "ytl", "xbr", "ybr"))
        fill_polygon(mask, [[(x0, y0), (x1, y0), (x1, y1), (x0, y1)]], value)
    elif kind == "mask":
        left, top, width, height = (int(shape[key]) for key in ("left", "top", "width", "height"))
        counts = [int(count) for count in shape["rle"].split(",")]
        paste(mask, decode_runs(counts, height, width), left, top, value)
    elif kind == "ellipse":
        x, y, rx, ry = (round(float(shape[key])) for key in ("cx", "cy", "rx", "ry"))
        cv2.ellipse(mask, (x, y), (rx, ry), float(shape.get("rotation", 0)), 0, 360, value, -1)
    else:
        raise ValueError("a line has no area: draw it as a polygon")
