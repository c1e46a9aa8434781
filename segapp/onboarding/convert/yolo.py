"""YOLO: text files with a class and a polygon per line, next to the images, or in labels/ if the images are in images/.

Larger polygons are drawn first, so that smaller ones are on top. Pixels without annotation are background.
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import PurePosixPath

from segapp.datasets.files import shown
from segapp.onboarding.convert.conversion import (
    Annotated,
    Annotations,
    Images,
    area_of,
    check_classes,
    fill_polygon,
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
        head, below_labels, tail = place.rpartition("labels/")  # the last such folder is images/ for the images
        for image_place in (place, f"{head}images/{tail}" if below_labels else place):
            if image_place in by_place:
                labels[by_place[image_place]] = path
    first_lines = [tree.read(path, 4096).partition(b"\n")[0] for path in list(labels.values())[:200]]
    num_polygons = sum(_LINE.fullmatch(line) is not None for line in first_lines)
    if not num_polygons or num_polygons < 0.3 * len(first_lines):
        return None
    files = [one for one in find_class_files(tree) if not one.colors]
    named = next((one for one in files if one.source.endswith((".yaml", ".yml"))), next(iter(files), None))
    lines = {image: _lines(tree, path) for image, path in sorted(labels.items())}
    largest = max(map(_largest_class, lines.values()), default=0)
    if named is not None and largest < len(named.names):
        numbers = check_classes(range(max(named.ids, default=-1) + 1), named.source)
        names = [named.ids.get(number, f"class_{number}") for number in numbers] or list(named.names)
        reason = f"from {shown(named.source)}; YOLO's 0 is 1 here"
    else:
        names = [f"class_{number}" for number in check_classes(range(largest + 1), "the labels")]
        reason = "replace with their names"
    splits = {split_said(image) for image in labels}
    empty = [path for path in tree.images if path not in labels and split_said(path) in splits]
    found = Annotations("yolo", "YOLO polygons", "polygon", Images(tree), total=len(labels) + len(empty))
    found.found = [Annotated(labels[image], shown(labels[image]), image, own) for image, own in lines.items()]
    evidence = [f"{len(labels)} label files of YOLO with polygons", f"{len(names)} classes"]
    if empty:
        evidence.append(f"{len(empty)} images without a label file are left out")
    classes = check_classes(["background", *names], "the labels")
    sources = [*sorted(labels.values()), *([named.source] if named is not None else [])]
    return found.layout(partial(_draw, num_classes=len(names)), evidence, classes, reason, sources, _area)


def _lines(tree: Tree, path: str) -> list[bytes]:
    return [line for line in tree.read(path).splitlines() if line.strip()]


def _largest_class(lines: Sequence[bytes]) -> int:
    """Return the largest class in the lines of a label file; 0 if there is none."""
    return max((int(line.split()[0]) for line in lines if line.split()[0].isdigit()), default=0)


def _draw(mask: Mask, line: bytes, num_classes: int) -> None:
    number, corners = _shape(line, *mask.shape)
    if not 0 <= number < num_classes:
        raise ValueError(f"class {number} has no name")
    fill_polygon(mask, [corners], number + 1)


def _area(line: bytes) -> float:
    return area_of(_shape(line, 1, 1)[1])


def _shape(line: bytes, height: int, width: int) -> tuple[int, Sequence[tuple[float, float]]]:
    """Return the class and the corners in pixels from a line; a box has four numbers, and is drawn as a rectangle."""
    number, *words = line.split()
    values = [float(word) for word in words]
    if len(values) in (4, 5):
        x, y, w, h = values[:4]
        values = [x - w / 2, y - h / 2, x + w / 2, y - h / 2, x + w / 2, y + h / 2, x - w / 2, y + h / 2]
    corners = [(x * width - 0.5, y * height - 0.5) for x, y in zip(values[0::2], values[1::2], strict=True)]
    return int(number), corners
