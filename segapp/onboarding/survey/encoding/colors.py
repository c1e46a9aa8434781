"""The classes of RGB masks: a file with their colours, a published palette, or the colours in order."""

from __future__ import annotations

from collections.abc import Sequence

from segapp.datasets.files import shown
from segapp.datasets.layouts.published_classes import Color
from segapp.errors import ConfigError, DataError
from segapp.onboarding.survey.class_files import ClassFile, described
from segapp.onboarding.survey.content import MAX_COLORS, MaskContent
from segapp.onboarding.survey.encoding.classes import NO_PALETTE, Classes, MaskChoices
from segapp.onboarding.survey.encoding.instances import ask_for_instances
from segapp.onboarding.survey.encoding.words import (
    CLEANING,
    check_several,
    is_class,
    is_stray,
    listed,
    percent,
    share_of,
    strays_note,
    unique,
    void_notes,
    void_of,
)
from segapp.onboarding.survey.palettes import PublishedPalette, is_certain, recognise
from segapp.onboarding.survey.questions import Answer, open_question

_MAX_PALETTES = 4


def classes_of_colors(content: MaskContent, files: Sequence[ClassFile], mask: str, choices: MaskChoices) -> Classes:
    """Return the classes of RGB masks.

    Args:
        content: of the masks.
        files: class names next to the data.
        mask: path of a mask.
        choices: of the user.

    Raises:
        DataError: the masks were smoothed, or hold one colour.
        OpenQuestionError: there are several plausible readings.
    """
    if content.num_smooth or len(content.colors) > 2 * MAX_COLORS:
        raise DataError(
            f"{max(content.num_smooth, 1)} of {content.num_masks} masks contain neither ids nor fewer than "
            f"{MAX_COLORS} colours, such as {shown(content.example.get('smooth', ''))}: they were smoothed or saved "
            f"with loss; {CLEANING} colours"
        )
    total = content.colors.total()
    strays = sorted(color for color in content.colors if is_stray(content, color, total))
    colors = sorted(color for color in content.colors if color not in strays)
    check_several(content, colors)
    notes = strays_note(content, strays, "colours")
    for file in files:
        if file.colors and share_of(content, [color for color in colors if color not in file.colors]) <= 0.05:
            return _from_named_colors(content, file, colors, strays, choices, notes)
    known = _chosen_palettes(recognise(colors), colors, mask, choices)
    if known:
        first, others = known[0], ", ".join(palette.title for palette in known[1:])
        ignored = list(dict.fromkeys([*first.ignored, *strays]))
        seen = [color for color in first.ignored if color in content.colors]
        if seen:
            notes = (*notes, f"{listed(seen)} is ignored as in {first.title}: {percent(content, seen)}")
        return Classes(
            first.names,
            f"the colours are those of {first.title}" + (f" (also possible: {others})" if others else ""),
            palette=(*first.colors, *ignored),
            palette_reason="as published" + ("; the last are ignored" if ignored else ""),
            notes=notes,
        )
    ordered = _names_in_order(files, len(colors))
    names: tuple[str, ...]
    if colors == [(0, 0, 0), (255, 255, 255)]:
        names, reason = ("background", "object"), "black and white; replace with their names"
    else:
        if ordered is None:
            ask_for_instances(content, colors, choices)
        names, reason = (
            tuple(f"class_{i}" for i in range(len(colors))),
            "replace with their names, in the palette's order",
        )
    if ordered is not None:
        names, reason = ordered.names, f"from {described(ordered)}: check that their order is the palette's"
    return Classes(
        names,
        reason,
        palette=(*colors, *strays),
        palette_reason=f"the masks are images with {len(colors)} colours"
        + ("; the last are ignored" if strays else ""),
        notes=notes,
        source="" if ordered is None else ordered.source,
    )


def _chosen_palettes(
    known: list[PublishedPalette], colors: Sequence[Color], mask: str, choices: MaskChoices
) -> list[PublishedPalette]:
    """Return the palettes that may be those of the masks, the chosen or most certain one first; none: no known one.

    Raises:
        ConfigError: `--palette` names another one.
        OpenQuestionError: few colours occur, and nothing else says of which data set they are.
    """
    if not known or choices.palette == NO_PALETTE:
        return []
    if choices.palette is not None:
        named = [one for one in known if one.title == choices.palette]
        if not named:
            raise ConfigError(
                f"--palette {choices.palette}: the colours of the masks are those of "
                f"{', '.join(one.title for one in known)}: name one of them, or {NO_PALETTE}"
            )
        return [*named, *(one for one in known if one not in named)]
    certain = [one for one in known if is_certain(one, colors, mask)]
    if certain:
        return [*certain, *(one for one in known if one not in certain)]
    answers = [Answer(one.title, f"classes {', '.join(one.names[:4])} ...") for one in known[:_MAX_PALETTES]]
    answers.append(Answer(NO_PALETTE, f"{len(colors)} classes without names, one for each colour"))
    raise open_question(
        f"the {len(colors)} colours of the masks are also colours of {known[0].title}, but too few to be sure",
        "--palette",
        answers,
        "a file with names and colours next to the data, such as class_dict.csv, answers it too",
    )


def _from_named_colors(
    content: MaskContent,
    file: ClassFile,
    colors: list[Color],
    strays: list[Color],
    choices: MaskChoices,
    notes: tuple[str, ...],
) -> Classes:
    """Return the classes of a file with colours; colours that it does not name are ignored, or classes on request."""
    unknown = [color for color in colors if color not in file.colors]
    named = dict(file.colors)
    if unknown:
        if is_class(content, unknown, file, choices):
            named |= {color: f"color_{bytes(color).hex()}" for color in unknown}
            unknown = []
        else:
            notes = (
                f"{len(unknown)} colours are not in {shown(file.source)} and are ignored: {percent(content, unknown)}",
                *notes,
            )
    void = void_of(named, choices)
    notes = (*notes, *void_notes(content, named, void))
    kept = {color: name for color, name in named.items() if color not in void}
    ignored = [*sorted(void), *unknown, *strays]
    return Classes(
        unique(list(kept.values())),
        f"from {described(file)}",
        palette=tuple(dict.fromkeys([*kept, *ignored])),
        palette_reason=f"the colours of {shown(file.source)}" + ("; the last are ignored" if ignored else ""),
        notes=notes,
        source=file.source,
    )


def _names_in_order(files: Sequence[ClassFile], count: int) -> ClassFile | None:
    return next((file for file in files if not file.colors and len(file.names) == count), None)
