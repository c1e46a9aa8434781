"""YOLO: text files with a class and a polygon per line, next to the images, or in labels/ if the images are in images/.

Larger polygons are drawn first, so that smaller ones lie on top. Pixels without annotation are background.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

from segapp.datasets.files import read_bytes, shown
from segapp.onboarding.convert.conversion import (
    ON_TOP,
    Images,
    area_of,
    check_classes,
    drawn_pair,
    fill_polygon,
    painter,
    split_said,
)
from segapp.onboarding.layout import Layout, Mask
from segapp.onboarding.survey.class_files import find_class_files
from segapp.onboarding.survey.tree import Tree

_LINE = re.compile(rb"\s*\d+(\s+-?[\d.]+(e-?\d+)?){6,}\s*")


def find_yolo(tree: Tree) -> Layout | None:
    """Return the conversion of YOLO polygons."""
    by_place = {str(PurePosixPath(path).with_suffix("")): path for path in tree.images}
    labels = {}
    for path in tree.others_named(".txt"):
        place = str(PurePosixPath(path).with_suffix(""))
        for image_place in (place, _images_for(place)):
            if image_place in by_place:
                labels[by_place[image_place]] = path
    polygons = [path for path in list(labels.values())[:200] if _has_polygon(tree, path)]
    if not polygons or len(polygons) < 0.3 * min(len(labels), 200):
        return None
    files = [one for one in find_class_files(tree) if not one.colors]
    named = next((one for one in files if one.source.endswith((".yaml", ".yml"))), next(iter(files), None))
    largest = max((_classes_in(tree, path) for path in labels.values()), default=0)
    if named is not None and largest < len(named.names):
        names = [named.ids.get(number, f"class_{number}") for number in range(max(named.ids) + 1)] if named.ids else []
        names, reason = names or list(named.names), f"from {shown(named.source)}; YOLO's 0 is 1 here"
    else:
        names, reason = [f"class_{number}" for number in range(largest + 1)], "replace with their names"
    images = Images(tree)
    without = {split_said(image) for image in labels}
    empty = [path for path in tree.images if path not in labels and split_said(path) in without]
    pairs = []
    for image, path in sorted(labels.items()):
        content = read_bytes(tree.root / path) if (tree.root / path).stat().st_size else b""
        paint = _painter(images, image, content, len(names))
        pairs.append(drawn_pair(image, shown(path), content, paint))
    evidence = [f"{len(labels)} label files of YOLO with polygons", f"{len(names)} classes"]
    if empty:
        evidence.append(f"{len(empty)} images without a label file are left out")
    confidence = 0.97 * len(labels) / (len(labels) + len(empty))
    classes = check_classes(["background", *names], "the labels")
    sources = (*sorted(labels.values()), *([named.source] if named is not None else []))
    return Layout(
        "yolo",
        pairs,
        confidence,
        tuple(evidence),
        sources,
        title="YOLO polygons",
        classes=classes,
        classes_reason=reason,
        notes=(ON_TOP,),
    )


def _images_for(place: str) -> str:
    """Return the path of the image where labels lie under labels/: the last such folder is images/ there."""
    head, found, tail = place.rpartition("labels/")
    return f"{head}images/{tail}" if found else place


def _has_polygon(tree: Tree, path: str) -> bool:
    lines = tree.read(path, 4096).splitlines()
    return bool(lines) and _LINE.fullmatch(lines[0]) is not None


def _classes_in(tree: Tree, path: str) -> int:
    """Return the largest class of a label file; 0 for an empty one."""
    found = [int(line.split()[0]) for line in _lines(tree, path) if line.split()[0].isdigit()]
    return max(found, default=0)


def _lines(tree: Tree, path: str) -> list[str]:
    data = tree.read(path, 2**26)
    return [line for line in data.decode("utf-8", "replace").splitlines() if line.strip()]


def _painter(images: Images, image: str, content: bytes, num_classes: int) -> Callable[[], Mask]:
    def draw(mask: Mask, line: bytes) -> None:
        number, corners = _shape(line, *mask.shape)
        if not 0 <= number < num_classes:
            raise ValueError(f"class {number} has no name")
        fill_polygon(mask, [corners], number + 1)

    lines = [line for line in content.splitlines() if line.strip()]
    return painter(images, image, lines, draw, "polygon", lambda line: area_of(_shape(line, 1, 1)[1]))


def _shape(line: bytes, height: int, width: int) -> tuple[int, Sequence[tuple[float, float]]]:
    """Return the class and the corners in pixels of a line; a box has four numbers, and is drawn as a rectangle."""
    number, *words = line.split()
    values = [float(word) for word in words]
    if len(values) in (4, 5):
        x, y, w, h = values[:4]
        values = [x - w / 2, y - h / 2, x + w / 2, y - h / 2, x + w / 2, y + h / 2, x - w / 2, y + h / 2]
    corners = [(x * width - 0.5, y * height - 0.5) for x, y in zip(values[0::2], values[1::2], strict=True)]
    return int(number), corners
