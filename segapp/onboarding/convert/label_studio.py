"""Label Studio: the JSON export of tasks with polygons, brush strokes (run lengths) and rectangles.

Of a task the first annotation that was not cancelled is taken; its regions are drawn in their order, later ones on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    split_said,
)
from segapp.onboarding.survey.tree import Tree

_KINDS = ("polygonlabels", "brushlabels", "rectanglelabels")


def find_label_studio(tree: Tree) -> Conversion | None:
    """Return the conversion of Label Studio's tasks."""
    images = Images(tree)
    found: list[tuple[str, int, str, list[Any]]] = []
    total = 0
    for path in tree.others_named(".json"):
        if not first_bytes(tree, path, 64).lstrip().startswith(b"["):
            continue
        tasks = load_json(tree, path)
        if not isinstance(tasks, list):
            continue
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
                    one for one in kept[0].get("result", []) if not isinstance(one, dict) or one.get("type") in _KINDS
                ]
                found.append((path, number, image, regions))
    if not found:
        return None
    check_objects(regions for _, _, _, regions in found)
    labels = {
        name for _, _, _, regions in found for region in regions if isinstance(region, dict) for name in _labels(region)
    }
    names, values = class_values(labels, found[0][0])
    items = [
        Item(
            image,
            mask_target(image),
            f"{shown(path)}: task {number}",
            regions,
            painter(images, image, regions, lambda mask, region: _draw(mask, region, values), "region"),
            split_said(image),
        )
        for path, number, image, regions in found
    ]
    evidence = (f"{total} tasks of Label Studio", coverage_words(len(items), total, "tasks"), f"{len(labels)} labels")
    reason = "the labels, by name"
    sources = tuple(dict.fromkeys(path for path, _, _, _ in found))
    confidence = 0.97 * len(items) / total
    return Conversion("label-studio", "Label Studio", names, items, confidence, evidence, reason, (ON_TOP,), sources)


def _labels(region: Mapping[str, Any]) -> list[str]:
    value = region.get("value")
    names = value.get(region["type"]) if isinstance(value, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def _draw(mask: Mask, region: Mapping[str, Any], values: Mapping[str, int]) -> None:
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
