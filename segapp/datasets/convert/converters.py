"""The converters by the annotations that they know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from segapp.datasets.convert.coco import find_coco
from segapp.datasets.convert.conversion import Conversion
from segapp.datasets.convert.cvat import find_cvat
from segapp.datasets.convert.label_studio import find_label_studio
from segapp.datasets.convert.labelme import find_labelme
from segapp.datasets.convert.parquet import find_parquet
from segapp.datasets.convert.supervisely import find_supervisely
from segapp.datasets.convert.yolo import find_yolo
from segapp.datasets.survey.tree import Tree

CONVERTERS: tuple[Callable[[Tree], Conversion | None], ...] = (
    find_coco,
    find_yolo,
    find_labelme,
    find_label_studio,
    find_cvat,
    find_supervisely,
    find_parquet,
)
"""Each returns what it finds in a folder; None where there is nothing of its kind."""


def find_conversions(tree: Tree, *, has_masks: bool) -> list[Conversion]:
    """Return what the converters find.

    Args:
        tree: the folder.
        has_masks: there are masks already: they are preferred.
    """
    found = [conversion for convert in CONVERTERS if (conversion := convert(tree)) is not None]
    return [replace(one, confidence=0.85 * one.confidence) for one in found] if has_masks else found
