"""Values and colours of masks in words: which are stray, their share of the pixels, names that are unlike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from segapp.datasets.files import shown
from segapp.errors import DataError
from segapp.onboarding.survey.class_files import ClassFile, is_void
from segapp.onboarding.survey.content import MaskContent, Value
from segapp.onboarding.survey.encoding.classes import MaskChoices
from segapp.onboarding.survey.questions import Answer, open_question

MAX_UNSAID = 0.01
"""Largest share of the pixels that is ignored without a question or an order."""
CLEANING = (
    "export them again without either, or add --clean-masks, which writes copies next to the config with each pixel "
    "set to the nearest of the frequent"
)
STRAY_SHARE = 1e-5
"""Share of the pixels below which a lone value is a stray one."""
_MAX_NAMED = 6


def is_class(content: MaskContent, unnamed: Sequence[Value], file: ClassFile, choices: MaskChoices) -> bool:
    """Return True if values or colours without a name are classes, False if they are ignored.

    Raises:
        OpenQuestionError: they are frequent, and the user has not said it.
    """
    if choices.unlabelled is not None:
        return choices.unlabelled == "class"
    if share_of(content, unnamed) <= MAX_UNSAID:
        return False
    raise open_question(
        f"{listed(unnamed)} has no name in {shown(file.source)} and is {percent(content, unnamed)}",
        "--unlabelled",
        (
            Answer("ignore", "these pixels are neither trained nor scored"),
            Answer("class", "each of them is a class, to be named in the config"),
        ),
        "if they lie at the edges of objects, --clean-masks writes copies with the nearest of the frequent values",
    )


def void_of(named: Mapping[Any, str], choices: MaskChoices) -> list[Any]:
    """Return the values or colours whose names say that they are unlabelled, unless they are needed as a class."""
    void = [stored for stored, name in named.items() if is_void(name)]
    return [] if choices.unlabelled == "class" or len(named) - len(void) < 2 else void


def void_notes(content: MaskContent, named: Mapping[Any, str], void: Sequence[Value]) -> tuple[str, ...]:
    """Return a sentence for each value or colour that is named as unlabelled and occurs."""
    return tuple(
        f"{shown(named[stored])} ({listed([stored])}) is ignored: {percent(content, [stored])}; "
        "--unlabelled class makes it a class"
        for stored in void
        if share_of(content, [stored]) > 0
    )


def check_several(content: MaskContent, stored: Sequence[Value]) -> None:
    """Check that there is more than one value or colour.

    Raises:
        DataError: there is only one.
    """
    if len(stored) < 2:
        ignored = ", apart from ignored pixels" if len(content.values) + len(content.colors) > 1 else ""
        raise DataError(
            f"the {content.num_masks} masks read hold one value{ignored}: {listed(stored)}: there is nothing to tell "
            "apart; label the other pixels too, or take another folder with --layout"
        )


def is_stray(content: MaskContent, value: Value, total: int) -> bool:
    """Return True for a value or a colour of very few pixels in very few masks."""
    pixels = content.pixels_of(value)
    is_rare = pixels < STRAY_SHARE * total or pixels <= 3
    return is_rare and content.masks_with[value] <= max(1, content.num_masks // 50)


def strays_note(content: MaskContent, strays: Sequence[Value], what: str) -> tuple[str, ...]:
    """Return the sentence on stray values or colours, which are ignored; none if there are none."""
    if not strays:
        return ()
    named = [
        f"{list(one) if isinstance(one, tuple) else one} ({content.pixels_of(one)} px)" for one in strays[:_MAX_NAMED]
    ]
    more = f" and {len(strays) - _MAX_NAMED} more" if len(strays) > _MAX_NAMED else ""
    cleaning = "; --clean-masks sets them to the nearest class" if len(strays) > _MAX_NAMED else ""
    return (f"stray {what} are ignored: {', '.join(named)}{more}: {percent(content, strays)}{cleaning}",)


def share_of(content: MaskContent, stored: Iterable[Value]) -> float:
    """Return the share of the pixels read that have one of some values or colours."""
    return sum(content.pixels_of(one) for one in stored) / max(1, content.num_px)


def percent(content: MaskContent, stored: Iterable[Value]) -> str:
    """Return the share of some values or colours as text: "4.2% of the pixels"."""
    share = share_of(content, stored)
    number = f"{share:.1%}" if share >= 0.01 else f"{share:.3%}" if share >= 1e-5 else "below 0.001%"
    return f"{number} of the pixels" + ("" if content.is_complete else " read")


def listed(stored: Sequence[Value]) -> str:
    """Return values or colours as text: "value 0, 85"."""
    words = "value" if all(isinstance(one, int) for one in stored) else "colour"
    return f"{words} {few(stored)}"


def unique(names: list[str]) -> tuple[str, ...]:
    """Return the names, the second of equal ones with a number."""
    taken: dict[str, int] = {}
    unique = []
    for name in names:
        taken[name] = taken.get(name, 0) + 1
        unique.append(name if taken[name] == 1 else f"{name}_{taken[name]}")
    return tuple(unique)


def few(values: Sequence[Value]) -> str:
    """Return the first few of some values or colours as text."""
    named = (str(list(value)) if isinstance(value, tuple) else str(value) for value in values[:_MAX_NAMED])
    return ", ".join(named) + (" ..." if len(values) > _MAX_NAMED else "")
