"""Reading of annotation files, and the images that their entries name."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from segapp.datasets.files import open_regular, read_header
from segapp.errors import DataError
from segapp.onboarding.convert.conversion import BAD_ENTRY, IGNORED, Mask, check_classes, problem_of
from segapp.onboarding.convert.drawing import blank_mask
from segapp.onboarding.survey.class_files import is_background, is_void
from segapp.onboarding.survey.families import parse_file
from segapp.onboarding.survey.tree import Tree

ON_TOP = (
    "each pixel has one class: where objects of two classes overlap, the one drawn last covers the other; if both "
    "should count, write a mask for each class and set data.multilabel: files"
)
"""Note of converters that draw objects over each other."""


def load_json(tree: Tree, path: str) -> Any:
    """Return the content of a JSON file; None if it cannot be read or is none."""
    try:
        with open_regular(tree.root / path) as file:
            return json.load(file)
    except (OSError, DataError, ValueError, RecursionError):
        return None


def first_bytes(tree: Tree, path: str, count: int = 4096) -> bytes:
    """Return the beginning of a file; empty if it cannot be read."""
    try:
        with open_regular(tree.root / path) as file:
            return file.read(count)
    except (OSError, DataError):
        return b""


class Images:
    """The images of a folder, found by the path, the end of a path, or the name that an annotation says."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._paths = set(tree.images)
        self._by_name: dict[str, list[str]] = {}
        self._by_stem: dict[str, list[str]] = {}
        for path in tree.images:
            name = PurePosixPath(path)
            self._by_name.setdefault(name.name.casefold(), []).append(path)
            self._by_stem.setdefault(name.stem.casefold(), []).append(path)

    def find(self, said: str, near: str = "") -> str | None:
        """Return the image that an annotation names; None if there is none, or several that suit equally.

        Args:
            said: a path or a name, perhaps a URL, with either kind of slash.
            near: the annotation file: of several images of the name, the one with most of its folders is taken.
        """
        clean = unquote(said).replace("\\", "/").split("?")[0]
        folder = near.rpartition("/")[0]
        for place in (clean, os.path.normpath(f"{folder}/{clean}")):
            if place in self._paths:
                return place
        name = clean.rpartition("/")[2].casefold()
        found = self._by_name.get(name) or self._by_stem.get(name) or []
        if not found and "-" in name:  # Label Studio writes its own id in front of an uploaded name
            found = self._by_name.get(name.partition("-")[2], [])
        if len(found) < 2:
            return found[0] if found else None
        ends = [path for path in found if clean.casefold().endswith(path.casefold())]
        if len(ends) == 1:
            return ends[0]
        said_split = parse_file(near).split or parse_file(f"{PurePosixPath(near).stem}/x").split
        scored = Counter(
            {
                path: len(os.path.commonpath([f"/{folder}", f"/{path}"]))
                + 1000 * (parse_file(path).split == said_split)
                for path in found
            }
        )
        best = scored.most_common(2)
        return best[0][0] if best[0][1] > best[1][1] else None

    def size_of(self, path: str) -> tuple[int, int]:
        """Return the upright height and width of an image.

        Raises:
            DataError: it cannot be read.
        """
        header = read_header(self._tree.root / path)
        return header.height_px, header.width_px


def painter(
    images: Images, image: str, objects: Sequence[Any], draw: Callable[[Mask, Any], None], noun: str = "object"
) -> Callable[[], Mask]:
    """Return a function that paints the mask of an image: its objects in their order, later ones on top.

    It raises ValueError, with the number of the object, where `draw` raises an error of BAD_ENTRY.
    """

    def paint() -> Mask:
        mask = blank_mask(*images.size_of(image))
        for number, one in enumerate(objects):
            try:
                draw(mask, one)
            except BAD_ENTRY as error:
                raise ValueError(f"{noun} {number}: {problem_of(error)}") from error
        return mask

    return paint


def split_said(path: str) -> str | None:
    """Return the split that the folders or the name of a file say: train of annotations/instances_train2017.json."""
    return parse_file(path).split or parse_file(f"{PurePosixPath(path).stem}/x").split


def mask_target(image: str) -> str:
    """Return the mask of an image relative to the folder of the masks: the same path without extension."""
    return os.path.splitext(image)[0]


def coverage_words(found: int, total: int, what: str) -> str:
    """Return how many entries have an image, as a sentence."""
    return f"{found} of {total} {what} name an image that is there"


def check_objects(objects: Iterable[Sequence[Any]]) -> None:
    """Check that some image has an object.

    Args:
        objects: of each image.

    Raises:
        ValueError: no image has one.
    """
    listed = list(objects)
    if not any(listed):
        raise ValueError(f"there are no objects in its {len(listed)} images; annotate some and export them again")


def class_values(labels: Iterable[str], origin: str) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the class names in order, and the value in the mask of every label; ignored labels are no classes.

    Raises:
        DataError: there are more classes than fit into uint8 masks.
    """
    known = list(labels)
    names = check_classes(ordered_names(name for name in known if not is_void(name)), origin)
    return names, {name: i for i, name in enumerate(names)} | {name: IGNORED for name in known if is_void(name)}


def ordered_names(names: Iterable[str]) -> list[str]:
    """Return the class names in alphabetical order, background first; it is added where it is missing.

    >>> ordered_names(["road", "_background_", "car"])
    ['_background_', 'car', 'road']
    """
    known = set(names)
    first = sorted(name for name in known if is_background(name))
    return [*first, *sorted(known - set(first))] if first else ["background", *sorted(known)]


def missing_extra(package: str, what: str, extra: str = "import") -> DataError:
    """Return the error for a reader that is not installed."""
    return DataError(f"{what} need {package}, which is not installed: python3 -m pip install 'segapp[{extra}]'")
