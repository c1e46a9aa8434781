"""The converters to masks, one per kind of annotations or arrays."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from segapp.errors import DataError
from segapp.onboarding.annotations import (
    find_coco,
    find_cvat,
    find_label_studio,
    find_labelme,
    find_supervisely,
    find_yolo,
)
from segapp.onboarding.arrays import find_arrays
from segapp.onboarding.conversion import UNUSABLE, problem_of
from segapp.onboarding.layout import Layout
from segapp.onboarding.pieces import find_pieces
from segapp.onboarding.rle import find_rle
from segapp.onboarding.tree import Tree

CONVERTERS: dict[str, Callable[[Tree], Layout | Sequence[Layout] | None]] = {
    "COCO": find_coco,
    "YOLO": find_yolo,
    "labelme": find_labelme,
    "Label Studio": find_label_studio,
    "CVAT": find_cvat,
    "Supervisely": find_supervisely,
    "tables of run lengths": find_rle,
    "arrays": find_arrays,
    "several masks for each image": find_pieces,
}
"""Each returns its findings in a folder: nothing, a layout, or one layout per possible interpretation."""


def find_conversions(tree: Tree, *, has_masks: bool) -> tuple[list[Layout], list[str]]:
    """Return the results of the converters, and the reasons why a converter cannot read its annotations.

    Existing masks are preferred to masks that a converter draws, but not to other interpretations of these masks.
    Without masks, DataError is raised if a converter needs a package that is not installed.
    """
    found: list[Layout] = []
    problems, known = [], set(tree.images)
    for title, convert in CONVERTERS.items():
        try:
            result = convert(tree)
        except DataError as error:
            if not has_masks:
                raise
            problems.append(str(error))
            continue
        except UNUSABLE as error:
            problems.append(f"the annotations look like {title}, but cannot be read: {problem_of(error)}")
            continue
        for reading in [result] if isinstance(result, Layout) else result or ():
            is_new = reading.is_drawn and not set(reading.sources) & known
            confidence = (0.85 if has_masks and is_new else 1.0) * reading.confidence
            found.append(replace(reading, confidence=confidence))
    return found, problems


def with_layouts(readings: Sequence[Layout], layouts: Sequence[Layout]) -> list[Layout]:
    """Return interpretations and layouts without repetitions.

    A layout is left out if a conversion makes its masks from all of the layout's (one of several classes), because the
    conversion reads more. A conversion of several masks per image is left out if a layout has the same pairs.
    """
    pairs = {layout.files for layout in layouts}
    kept = [one for one in readings if one.is_drawn or one.files not in pairs]
    for layout in layouts:
        masks = {pair.mask for pair in layout.pairs}
        if not any(one.is_drawn and masks.issubset(one.sources) for one in readings):
            kept.append(layout)
    return kept
