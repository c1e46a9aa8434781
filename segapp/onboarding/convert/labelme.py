"""labelme: a JSON file for each image; shapes are drawn in their order, later ones on top."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import cv2
import numpy as np

from segapp.datasets.files import shown
from segapp.onboarding.convert.conversion import (
    ON_TOP,
    Conversion,
    Images,
    Item,
    Mask,
    check_objects,
    class_values,
    coverage_words,
    fill_polygon,
    first_bytes,
    load_json,
    mask_target,
    painter,
    paste,
    split_said,
)
from segapp.onboarding.survey.tree import Tree


def find_labelme(tree: Tree) -> Conversion | None:
    """Return the conversion of labelme files."""
    images, items, total = Images(tree), [], 0
    labels: set[str] = set()
    found: list[tuple[str, str, Any]] = []
    for path in tree.others_named(".json"):
        if b"{" not in first_bytes(tree, path, 16):
            continue
        content = load_json(tree, path)
        if not isinstance(content, dict) or not isinstance(content.get("shapes"), list) or "imagePath" not in content:
            continue
        total += 1
        stem = path.rpartition("/")[2].rpartition(".")[0]
        image = images.find(str(content["imagePath"]), path) or images.find(stem, path)
        labels |= {str(shape.get("label")) for shape in content["shapes"] if isinstance(shape, dict)}
        if image is not None:
            found.append((path, image, content["shapes"]))
    if not found:
        return None
    check_objects(shapes for _, _, shapes in found)
    names, values = class_values(labels, found[0][0])
    for path, image, shapes in found:
        items.append(
            Item(
                image,
                mask_target(image),
                shown(path),
                shapes,
                painter(images, image, shapes, lambda mask, shape: draw_shape(mask, shape, values), "shape"),
                split_said(image),
            )
        )
    evidence = (f"{total} files of labelme", coverage_words(len(items), total, "files"), f"{len(labels)} labels")
    sources = tuple(path for path, _, _ in found)
    confidence = 0.97 * len(items) / total
    return Conversion(
        "labelme", "labelme", names, items, confidence, evidence, "the labels, by name", (ON_TOP,), sources
    )


def draw_shape(mask: Mask, shape: Mapping[str, Any], values: Mapping[str, int]) -> None:
    """Draw a shape in place: polygon, rectangle, circle, mask, linestrip; points are left out.

    Raises:
        ValueError: its kind is unknown, or it has too few points.
    """
    value = values[str(shape["label"])]
    kind, points = shape.get("shape_type") or "polygon", shape["points"]
    if kind == "polygon":
        fill_polygon(mask, [points], value)
    elif kind == "rectangle":
        (x0, y0), (x1, y1) = points
        fill_polygon(mask, [[(x0, y0), (x1, y0), (x1, y1), (x0, y1)]], value)
    elif kind == "circle":
        (x0, y0), (x1, y1) = points
        cv2.circle(mask, (round(x0), round(y0)), round(math.hypot(x1 - x0, y1 - y0)), value, -1)
    elif kind in ("line", "linestrip"):
        cv2.polylines(mask, [np.rint(np.asarray(points)).astype(np.int32)], False, value)
    elif kind == "mask":
        encoded = np.frombuffer(base64.b64decode(shape["mask"]), np.uint8)
        piece = cv2.imdecode(encoded, cv2.IMREAD_GRAYSCALE)
        if piece is None:
            raise ValueError("its mask is no PNG")
        paste(mask, np.asarray(piece) > 0, round(points[0][0]), round(points[0][1]), value)
    elif kind not in ("point", "points"):
        raise ValueError(f"shape_type {kind!r} is not known")
