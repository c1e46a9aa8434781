"""COCO: convert instance annotations (polygons, run lengths) and panoptic ones to masks of the categories.

Larger objects are drawn first, so that smaller ones are on top; a crowd region belongs to its category. Pixels without
annotation are background.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import shown
from segapp.errors import DataError
from segapp.onboarding.convert.conversion import (
    IGNORED,
    Annotated,
    Annotations,
    Images,
    area_of,
    check_classes,
    coverage_words,
    decode_runs,
    fill_area,
    json_files,
    missing_extra,
)
from segapp.onboarding.layout import Layout, Mask
from segapp.onboarding.survey.class_files import is_background
from segapp.onboarding.survey.content import stored_pixels
from segapp.onboarding.survey.tree import Tree


def find_coco(tree: Tree) -> Layout | None:
    """Return the conversion of COCO files with segmentations; instance files are preferred to panoptic ones."""
    files: dict[str, Any] = {}
    for path, content in json_files(tree, dict):
        is_coco = all(isinstance(content.get(key), list) for key in ("images", "annotations", "categories"))
        if is_coco and any("segmentation" in one or "segments_info" in one for one in content["annotations"][:50]):
            files[path] = content
    if not files:
        return None
    things = {path: one for path, one in files.items() if "segments_info" not in one["annotations"][0]}
    return _conversion(tree, things or files, is_panoptic=not things)


def _conversion(tree: Tree, files: Mapping[str, Any], *, is_panoptic: bool) -> Layout | None:
    categories = {int(one["id"]): str(one["name"]) for content in files.values() for one in content["categories"]}
    own_background = next((number for number, name in categories.items() if is_background(name)), None)
    others = [number for number in sorted(categories) if number != own_background]
    value_of = {number: value for value, number in enumerate(others, start=1)}
    if own_background is not None:
        value_of[own_background] = 0
    names = check_classes(["background", *(categories[number] for number in others)], next(iter(files)))
    found = Annotations("coco", "COCO", "annotation", Images(tree))
    for path, content in files.items():
        by_image: dict[Any, list[Any]] = {}
        for annotation in content["annotations"]:
            by_image.setdefault(annotation.get("image_id"), []).append(annotation)
        for entry in content["images"]:
            found.total += 1
            name = str(entry.get("file_name", ""))
            image = found.images.find(name, path)
            own = by_image.get(entry.get("id"), [])
            if image is not None and (own or not is_panoptic):
                objects = [(path, own[0])] if is_panoptic else own
                found.found.append(Annotated(path, f"{shown(path)}: image {shown(name)}", image, objects))
    if not found.found:
        return None
    evidence = (
        f"{len(files)} COCO files of {'panoptic' if is_panoptic else 'instance'} annotations",
        coverage_words(len(found.found), found.total, "entries"),
        f"{len(categories)} categories",
    )
    reason = f"the categories of {shown(next(iter(files)))}"
    if not is_panoptic:
        return found.layout(partial(_draw, value_of=value_of), evidence, names, reason, [*files], _area)
    folders = tuple(f"{path.rpartition('.')[0]}/" for path in files)  # folders with the PNGs of segments
    sources = [*files, *(path for path in tree.images if path.startswith(folders))]
    draw = partial(_draw_segments, tree=tree, value_of=value_of)
    return replace(found.layout(draw, evidence, names, reason, sources), notes=())


def _draw(mask: Mask, annotation: Mapping[str, Any], value_of: Mapping[int, int]) -> None:
    draw_segmentation(mask, annotation["segmentation"], value_of[int(annotation["category_id"])])


def _area(annotation: Mapping[str, Any]) -> float:
    if isinstance(annotation.get("area"), int | float):
        return float(annotation["area"])
    segmentation = annotation["segmentation"]
    return sum(area_of(_corners(ring)) for ring in segmentation) if isinstance(segmentation, list) else 0.0


def _corners(flat: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(flat[0::2], flat[1::2], strict=True))


def draw_segmentation(mask: Mask, segmentation: Any, value: int) -> None:
    """Draw a COCO segmentation in place: a list of polygons, or run lengths by columns, compressed or not."""
    if isinstance(segmentation, list):
        for flat in segmentation:
            fill_area(mask, [_corners(flat)], value)
        return
    height, width = (int(side) for side in segmentation["size"])
    if (height, width) != mask.shape:
        raise ValueError(f"run lengths of {width} x {height} pixels for an image of {mask.shape[1]} x {mask.shape[0]}")
    counts = segmentation["counts"]
    pixels = decode_runs(counts, height, width, order="F") if isinstance(counts, list) else _decompressed(segmentation)
    mask[pixels] = value


def _decompressed(segmentation: Mapping[str, Any]) -> NDArray[np.bool_]:
    try:
        from pycocotools import mask as coco_masks
    except ImportError:
        raise missing_extra("pycocotools", "compressed run lengths of COCO") from None
    counts = segmentation["counts"]
    encoded = {"size": segmentation["size"], "counts": counts.encode() if isinstance(counts, str) else counts}
    return np.asarray(coco_masks.decode(encoded)).astype(bool)


def _draw_segments(mask: Mask, entry: tuple[str, Any], tree: Tree, value_of: Mapping[int, int]) -> None:
    """Draw the segments of a panoptic annotation, whose file comes first; pixels without a segment are unlabeled."""
    path, annotation = entry
    name = str(annotation["file_name"])
    folder = path.rpartition(".")[0]  # named like the JSON file, or the only folder whose name has "panoptic"
    places = [one for one in tree.images if one.rpartition("/")[2] == name and "panoptic" in one.lower()]
    places = [one for one in places if one == f"{folder}/{name}"] or places
    if len(places) != 1:
        raise DataError(f"{shown(folder)}/{shown(name)}: the PNG of segments is missing: restore it", path=folder)
    pixels = stored_pixels(tree.root / places[0], as_rgb=True)[0].astype(np.int64)
    ids = pixels @ [1, 256, 65536]
    values = {int(one["id"]): value_of[int(one["category_id"])] for one in annotation["segments_info"]}
    present, inverse = np.unique(ids, return_inverse=True)
    mask[:] = np.array([values.get(one, IGNORED) for one in present.tolist()], np.uint8)[inverse].reshape(ids.shape)
