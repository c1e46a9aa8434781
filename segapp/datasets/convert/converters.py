"""The converters by the annotations that they know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from segapp.datasets.convert.coco import find_coco
from segapp.datasets.convert.conversion import BAD_ENTRY, Conversion, problem_of
from segapp.datasets.convert.cvat import find_cvat
from segapp.datasets.convert.label_studio import find_label_studio
from segapp.datasets.convert.labelme import find_labelme
from segapp.datasets.convert.nnunet import find_nnunet
from segapp.datasets.convert.parquet import find_parquet
from segapp.datasets.convert.supervisely import find_supervisely
from segapp.datasets.convert.yolo import find_yolo
from segapp.datasets.survey.tree import Tree

CONVERTERS: dict[str, Callable[[Tree], Conversion | None]] = {
    "COCO": find_coco,
    "YOLO": find_yolo,
    "labelme": find_labelme,
    "Label Studio": find_label_studio,
    "CVAT": find_cvat,
    "Supervisely": find_supervisely,
    "parquet": find_parquet,
    "nnU-Net": find_nnunet,
}
"""Each returns what it finds in a folder; None where there is nothing of its kind."""


def find_conversions(tree: Tree, *, has_masks: bool) -> tuple[list[Conversion], list[str]]:
    """Return what the converters find, and why a converter cannot read the annotations of its kind.

    Args:
        tree: the folder.
        has_masks: there are masks already: they are preferred.
    """
    found, problems = [], []
    for title, convert in CONVERTERS.items():
        try:
            conversion = convert(tree)
        except BAD_ENTRY as error:
            problems.append(f"the annotations look like those of {title}, but cannot be read: {problem_of(error)}")
            continue
        if conversion is not None:
            confidence = (0.85 if has_masks else 1.0) * conversion.confidence
            found.append(replace(conversion, confidence=confidence))
    return found, problems
