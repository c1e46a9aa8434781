"""Supervisely: meta.json, and ann/NAME.json for each img/NAME; objects are drawn in their order, later ones on top."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cv2
import numpy as np

from segapp.datasets.convert.conversion import Conversion, Item, Mask
from segapp.datasets.convert.drawing import blank_mask, fill_polygon, paste
from segapp.datasets.convert.sources import (
    Images,
    class_values,
    coverage_words,
    load_json,
    mask_target,
    split_said,
)
from segapp.datasets.files import shown
from segapp.datasets.survey.tree import Tree

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
    meta = (
        next((load_json(tree, path) for path in tree.others_named(".json") if path.endswith("meta.json")), None) or {}
    )
    labels = {str(one["title"]): None for one in meta.get("classes", [])}
    labels |= {str(one.get("classTitle")): None for _, _, objects in found for one in objects}
    names, values = class_values(labels, found[0][0])
    items = [
        Item(
            image, mask_target(image), shown(path), objects, _painter(images, image, objects, values), split_said(image)
        )
        for path, image, objects in found
    ]
    evidence = (f"{total} files of Supervisely", coverage_words(len(items), total, "files"), f"{len(names)} classes")
    reason = "the classes of the project, by name"
    return Conversion("supervisely", "Supervisely", names, items, 0.97 * len(items) / total, evidence, reason)


def _painter(images: Images, image: str, objects: Sequence[Any], values: Mapping[str, int]) -> Callable[[], Mask]:
    def paint() -> Mask:
        height, width = images.size_of(image)
        mask = blank_mask(height, width)
        for number, one in enumerate(objects):
            try:
                _draw(mask, one, values[str(one["classTitle"])])
            except (ValueError, KeyError, TypeError, IndexError, zlib.error) as error:
                raise ValueError(f"object {number}: {error}") from error
        return mask

    return paint


def _draw(mask: Mask, one: Mapping[str, Any], value: int) -> None:
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
