"""The question of `--masks`: masks that look like instances, or smoothed, rather than like classes."""

from __future__ import annotations

from collections.abc import Sequence

from segapp.onboarding.survey.content import MaskContent, Value, dominant_levels
from segapp.onboarding.survey.encoding.classes import INSTANCE_STEP, MASK_KINDS, MaskChoices
from segapp.onboarding.survey.encoding.words import CLEANING, listed, percent, share_of
from segapp.onboarding.survey.questions import Answer, open_question


def ask_for_instances(content: MaskContent, stored: Sequence[Value], choices: MaskChoices) -> None:
    """Check that values or colours are rather classes than instances.

    Raises:
        OpenQuestionError: they may be instances, or were smoothed, and the user has not said it.
    """
    if choices.masks is not None:
        return
    values = [value for value in stored if isinstance(value, int)]
    high = [value for value in values if value >= INSTANCE_STEP]
    classes = {value // INSTANCE_STEP for value in high}
    lone = sum(content.masks_with[value] == 1 for value in stored)
    ids = Answer("ids", f"{len(stored)} classes: {MASK_KINDS['ids']}")
    one = Answer("object", f"2 classes: {MASK_KINDS['object'].replace('0 is', 'black is' if not values else '0 is')}")
    if high and len(classes) < len(high):
        low = [value for value in values if 0 < value < INSTANCE_STEP]
        answers = [
            Answer(
                "instances", f"{len({value // INSTANCE_STEP for value in values})} classes: {MASK_KINDS['instances']}"
            ),
            ids,
        ]
        if low:
            answers.insert(0, Answer("panoptic", f"{MASK_KINDS['panoptic']}"))
        raise open_question(
            f"the masks hold {len(values)} values up to {values[-1]}, which look like class x {INSTANCE_STEP} + "
            "instance",
            "--masks",
            answers,
        )
    if content.num_counting >= 0.9 * content.num_masks and len(content.counts_up_to) > 3 and values[-1:] > [7]:
        raise open_question(
            f"each mask holds the values 1 to n, n from {min(content.counts_up_to)} to {max(content.counts_up_to)}, "
            "as masks of instances do, which name no class",
            "--masks",
            (one, ids),
        )
    if len(stored) > max(8, content.num_masks) and lone > len(stored) / 2:
        raise open_question(
            f"{content.num_masks} masks hold {len(stored)} {'values' if values else 'colours'}, {lone} of which occur "
            "in one mask each, as numbers of instances do",
            "--masks",
            (one, ids) if values or (0, 0, 0) in stored else (ids,),
        )
    levels = dominant_levels(content) if len(values) >= 32 else []
    near = [value for value in values if any(abs(value - level) <= 3 for level in levels if isinstance(level, int))]
    if 2 <= len(levels) <= 16 and share_of(content, near) >= 0.7:
        raise open_question(
            f"the masks hold {len(values)} values, but {percent(content, near)} are near {listed(levels)}, as in "
            "masks that were smoothed or saved with loss",
            "--masks",
            (ids,),
            f"if they were smoothed, {CLEANING} values",
        )
