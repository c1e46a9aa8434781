"""COCO: instance annotations (polygons, run lengths) and panoptic ones become masks of the categories.

Larger objects are drawn first, so that smaller ones lie on top; a crowd region belongs to its category. Pixels without
annotation are background.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import shown
from segapp.errors import DataError
from segapp.onboarding.convert.conversion import (
    IGNORED,
    ON_TOP,
    Images,
    area_of,
    blank_mask,
    check_classes,
    coverage_words,
    decode_runs,
    drawn_pair,
    fill_polygon,
    json_files,
    missing_extra,
    painter,
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
    images, pairs, total = Images(tree), [], 0
    for path, content in files.items():
        by_image: dict[Any, list[Any]] = {}
        for annotation in content["annotations"]:
            by_image.setdefault(annotation.get("image_id"), []).append(annotation)
        for entry in content["images"]:
            total += 1
            file_name = str(entry.get("file_name", ""))
            found = images.find(file_name, path)
            own = by_image.get(entry.get("id"), [])
            if found is None or (is_panoptic and not own):
                continue
            if is_panoptic:
                paint = _panoptic(tree, path, own, value_of)
            else:
                paint = painter(images, found, own, partial(_draw, value_of=value_of), "annotation", _area)
            pairs.append(drawn_pair(found, f"{shown(path)}: image {shown(file_name)}", own, paint, near=path))
    if not pairs:
        return None
    kind = "panoptic" if is_panoptic else "instance"
    evidence = (
        f"{len(files)} COCO files of {kind} annotations",
        coverage_words(len(pairs), total, "entries"),
        f"{len(categories)} categories",
    )
    return Layout(
        "coco",
        pairs,
        0.97 * len(pairs) / total,
        evidence,
        (*files, *(_pngs_of(tree, files) if is_panoptic else ())),
        title="COCO",
        classes=names,
        classes_reason=f"the categories of {shown(next(iter(files)))}",
        notes=() if is_panoptic else (ON_TOP,),
    )


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
    """Draw a COCO segmentation in place: a list of polygons, or run lengths by columns, compressed or not.

    Raises:
        ValueError: the run lengths have another size than the mask.
        DataError: compressed run lengths without pycocotools.
    """
    if isinstance(segmentation, list):
        for flat in segmentation:
            fill_polygon(mask, [_corners(flat)], value)
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


def _panoptic(tree: Tree, path: str, annotations: Sequence[Any], value_of: Mapping[int, int]) -> Callable[[], Mask]:
    def paint() -> Mask:
        annotation = annotations[0]
        png = _panoptic_png(tree, path, str(annotation["file_name"]))
        pixels = stored_pixels(tree.root / png, as_rgb=True)[0].astype(np.int64)
        ids = pixels[..., 0] + 256 * pixels[..., 1] + 65536 * pixels[..., 2]
        mask = blank_mask(ids.shape[0], ids.shape[1], IGNORED)  # pixels of no segment are unlabelled
        for segment in annotation["segments_info"]:
            mask[ids == int(segment["id"])] = value_of[int(segment["category_id"])]
        return mask

    return paint


def _pngs_of(tree: Tree, files: Iterable[str]) -> list[str]:
    """Return the PNGs of segments in the folders named as the files of panoptic annotations."""
    folders = tuple(f"{path.rpartition('.')[0]}/" for path in files)
    return [path for path in tree.images if path.startswith(folders)]


def _panoptic_png(tree: Tree, path: str, name: str) -> str:
    """Return the PNG of segments: in the folder named as the JSON file, or the only one whose folder says panoptic."""
    folder = path.rpartition(".")[0]
    places = [one for one in tree.images if one.rpartition("/")[2] == name and "panoptic" in one.lower()]
    exact = [one for one in places if one == f"{folder}/{name}"]
    if len(exact or places) != 1:
        raise DataError(f"{shown(folder)}/{shown(name)}: the PNG of segments is missing: restore it", path=folder)
    return (exact or places)[0]
