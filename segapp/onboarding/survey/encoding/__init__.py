"""The classes of masks, from their values and from class files: names, label map, palette, ignored ids.

One module for each way in which masks store classes; each says in words what it believes and why. Ignored pixels are
named with their share; two plausible readings are a question.
"""

from __future__ import annotations

from collections.abc import Sequence

from segapp.datasets.files import shown
from segapp.errors import DataError
from segapp.onboarding.survey.class_files import ClassFile
from segapp.onboarding.survey.content import MaskContent, reason_unread
from segapp.onboarding.survey.encoding.classes import (
    FOUND,
    IGNORED,
    INSTANCE_STEP,
    MASK_KINDS,
    Classes,
    MaskChoices,
    ignored_shares,
)
from segapp.onboarding.survey.encoding.colors import classes_of_colors
from segapp.onboarding.survey.encoding.ids import binary_classes, classes_of_ids

__all__ = ["IGNORED", "INSTANCE_STEP", "MASK_KINDS", "Classes", "MaskChoices", "ignored_shares", "read_classes"]


def read_classes(
    content: MaskContent, files: Sequence[ClassFile], masks: Sequence[str], choices: MaskChoices = FOUND
) -> Classes:
    """Return the classes of masks.

    Args:
        content: of the masks.
        files: class names next to the data.
        masks: their paths, beginning with the name of the data folder.
        choices: of the user.

    Raises:
        DataError: the masks do not say their classes: no ids, one value, too many colours, saved with loss.
        OpenQuestionError: there are several plausible readings.
    """
    if content.num_lossy:
        raise DataError(
            f"{content.num_lossy} of {content.num_masks} masks are JPEGs, such as {shown(content.example['lossy'])}: "
            "JPEG changes ids at every edge; export them as PNG, or add --clean-masks, which writes copies next to the "
            "config with each pixel set to the nearest of the frequent values"
        )
    if not content.values and not content.colors:
        reason = f" ({reason_unread(content.unread[0])})" if content.unread else ""
        raise DataError(
            f"none of {content.num_all} masks can be read, such as {shown(masks[0])}{reason}: save them as PNG of ids"
        )
    if content.colors:
        return classes_of_colors(content, files, masks[0], choices)
    binary = binary_classes(content, files, masks)
    return binary if binary is not None else classes_of_ids(content, files, masks, choices)
