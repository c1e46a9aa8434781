"""Supervisely: meta.json, and ann/NAME.json for each img/NAME; objects are drawn in their order, later ones on top."""

from __future__ import annotations

import base64
import zlib
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
    load_json,
    mask_target,
    painter,
    paste,
    split_said,
)
from segapp.onboarding.survey.tree import Tree

_MAX_PIECE_BYTES = 2**28


def find_supervisely(tree: Tree) -> Conversion | None:
    """Return the conversion of a Supervisely project."""
    candidates = [path for path in tree.others_named(".json") if path.rpartition("/")[0].endswith("ann")]
    images = Images(tree)
    found: list[tuple[str, str, list[Any]]] = []
    total = 0
    for path in candidates:
        content = load_json(tree, path)
        if not isinstance(content, dict) or not isinstance(content.get("objects"), list):
            continue
        total += 1
        folder, _, name = path.removesuffix(".json").rpartition("/")
        image = images.find(f"{folder[: -len('ann')]}img/{name}", path)
        if image is not None:
            found.append((path, image, content["objects"]))
    if not found:
        return None
    check_objects(objects for _, _, objects in found)
    metas = [path for path in tree.others_named(".json") if path.endswith("meta.json")][:1]
    meta = load_json(tree, metas[0]) if metas else None
    classes = meta.get("classes") if isinstance(meta, dict) else None
    known = [one for one in classes if isinstance(one, dict)] if isinstance(classes, list) else []
    objects_in = [one for _, _, objects in found for one in objects if isinstance(one, dict)]
    labels = dict.fromkeys(str(one["title"]) for one in known if "title" in one)
    labels |= dict.fromkeys(str(one["classTitle"]) for one in objects_in if "classTitle" in one)
    names, values = class_values(labels, found[0][0])
    items = []
    for path, image, objects in found:
        paint = painter(images, image, objects, lambda mask, one: _draw(mask, one, values))
        items.append(Item(image, mask_target(image), shown(path), objects, paint, split_said(image)))
    evidence = (f"{total} files of Supervisely", coverage_words(len(items), total, "files"), f"{len(names)} classes")
    reason = "the classes of the project, by name"
    sources = (*metas, *(path for path, _, _ in found))
    confidence = 0.97 * len(items) / total
    return Conversion("supervisely", "Supervisely", names, items, confidence, evidence, reason, (ON_TOP,), sources)


def _draw(mask: Mask, one: Mapping[str, Any], values: Mapping[str, int]) -> None:
    value = values[str(one["classTitle"])]
    kind = one["geometryType"]
    if kind == "polygon":
        fill_polygon(mask, [one["points"]["exterior"], *one["points"].get("interior", [])], value)
    elif kind == "rectangle":
        (x0, y0), (x1, y1) = one["points"]["exterior"]
        fill_polygon(mask, [[(x0, y0), (x1, y0), (x1, y1), (x0, y1)]], value)
    elif kind == "bitmap":
        packed = zlib.decompressobj().decompress(base64.b64decode(one["bitmap"]["data"]), _MAX_PIECE_BYTES)
        piece = cv2.imdecode(np.frombuffer(packed, np.uint8), cv2.IMREAD_UNCHANGED)
        if piece is None:
            raise ValueError("its bitmap is no PNG")
        left, top = one["bitmap"]["origin"]
        pixels = np.asarray(piece)
        paste(mask, (pixels[..., -1] if pixels.ndim == 3 else pixels) > 0, int(left), int(top), value)
    elif kind not in ("point", "line"):
        raise ValueError(f"geometryType {kind!r} is not known")
