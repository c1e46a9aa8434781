"""The classes of masks, from their values and from class files: names, label map, palette, ignored ids.

Each way in which masks store classes says in words what it believes and why. Ignored pixels are named with their share;
two plausible readings are a question.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from segapp.datasets.files import shown
from segapp.datasets.layouts.published_classes import Color, PublishedSet
from segapp.errors import ConfigError, DataError
from segapp.onboarding.survey.class_files import ClassFile, described, is_background, is_void
from segapp.onboarding.survey.content import MAX_COLORS, MaskContent, Value, dominant_levels, reason_unread
from segapp.onboarding.survey.published import is_certain, recognise, recognise_values
from segapp.onboarding.survey.questions import Answer, open_question

IGNORED = 255
INSTANCE_STEP = 1000
"""Class x this + number of the instance is the value of a pixel in most masks of instances."""
MASK_KINDS = {
    "ids": "each value is a class",
    "instances": f"value // {INSTANCE_STEP} is the class",
    "panoptic": f"values from {INSTANCE_STEP} on are class x {INSTANCE_STEP} + instance, smaller ones are classes",
    "object": "each value above 0 is an object of one class; 0 is the background",
}
"""Values of `--masks`."""
NO_PALETTE = "none"
"""Value of `--palette`: the colours are those of no published data set."""
UNLABELLED = ("ignore", "class")
"""Values of `--unlabelled`."""
MAX_UNSAID = 0.01
"""Largest share of the pixels that is ignored without a question or an order."""
CLEANING = (
    "export them again without either, or add --clean-masks, which writes copies next to the config with each pixel "
    "set to the nearest of the frequent"
)
STRAY_SHARE = 1e-5
"""Share of the pixels below which a lone value is a stray one."""
_MAX_NAMED = 6
_MAX_PALETTES = 4
_BINARY_SMOOTH_SHARE = 0.1
_TAG = re.compile(r"-tag-(.+?)-\d+\.\w+$")


@dataclass(frozen=True, kw_only=True)
class MaskChoices:
    """What the user says about masks; None: found, or asked.

    Attributes:
        masks: what the values are: a key of `MASK_KINDS`.
        unlabelled: what becomes of pixels without a class name: one of `UNLABELLED`.
        palette: title of the published data set whose colours the masks have, or `NO_PALETTE`.
    """

    masks: str | None = None
    unlabelled: str | None = None
    palette: str | None = None

    def check(self) -> None:
        """Check that the values exist.

        Raises:
            ConfigError: one does not.
        """
        for option, value, known in (
            ("--masks", self.masks, tuple(MASK_KINDS)),
            ("--unlabelled", self.unlabelled, UNLABELLED),
        ):
            if value is not None and value not in known:
                raise ConfigError(f"{option} {value}: choose {', '.join(known[:-1])} or {known[-1]}")


FOUND = MaskChoices()


@dataclass(frozen=True)
class Classes:
    """Classes of masks, as config values.

    Attributes:
        names: of the classes, by id.
        names_reason: where they are from.
        label_map: value in the mask -> class or ignored.
        label_map_reason: why.
        ignore_index: None: 255.
        palette: colours of RGB masks, those of ignored pixels last; empty: masks of ids.
        palette_reason: what they are.
        notes: sentences about values that are ignored, or about files that do not fit.
        source: file next to the data that the names are from; empty: none.
    """

    names: tuple[str, ...]
    names_reason: str
    label_map: Mapping[int, int] = field(default_factory=dict)
    label_map_reason: str = ""
    ignore_index: int | None = None
    palette: tuple[Color, ...] = ()
    palette_reason: str = ""
    notes: tuple[str, ...] = ()
    source: str = ""

    def class_of(self, stored: Value) -> int | None:
        """Return the class of a value or colour in the masks; None if it is ignored, or of no class."""
        if isinstance(stored, tuple):
            number = self.palette.index(stored) if stored in self.palette else len(self.names)
        else:
            ignore_index = IGNORED if self.ignore_index is None else self.ignore_index
            number = self.label_map.get(stored, stored)
            number = len(self.names) if number == ignore_index else number
        return number if 0 <= number < len(self.names) else None


def ignored_shares(content: MaskContent, classes: Classes) -> dict[Value, float]:
    """Return the values and colours that have no class -> their share of the pixels read."""
    total = max(1, content.num_px)
    return {stored: count / total for stored, count in content.pixels.items() if classes.class_of(stored) is None}


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
        ignored = list(dict.fromkeys([*first.ignored_colors, *strays]))
        seen = [color for color in first.ignored_colors if color in content.colors]
        if seen:
            notes = (*notes, f"{listed(seen)} is ignored as in {first.title}: {percent(content, seen)}")
        return Classes(
            tuple(first.palette.values()),
            f"the colours are those of {first.title}" + (f" (also possible: {others})" if others else ""),
            palette=(*first.palette, *ignored),
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
    known: list[PublishedSet], colors: Sequence[Color], mask: str, choices: MaskChoices
) -> list[PublishedSet]:
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


def binary_classes(content: MaskContent, files: Sequence[ClassFile], masks: Sequence[str]) -> Classes | None:
    """Return background and object, where masks hold 0 and 255 (or 65535) and hardly anything else; else None.

    Raises:
        DataError: the masks were smoothed, and more than a hundredth of the pixels lies between the two.
    """
    white = 65_535 if 65_535 in content.values else 255
    rest = sorted(value for value in content.values if value not in (0, white))
    if not {0, white} <= content.values.keys() or min(content.values) < 0:
        return None
    share, object_share = share_of(content, rest), share_of(content, [white])
    is_spread = len(rest) >= 16 and rest[0] < white // 4 and rest[-1] > white - white // 4
    if is_spread and share > MAX_UNSAID and object_share >= 0.005:
        raise _smoothed(f"{percent(content, rest)} are neither 0 nor {white}, but {len(rest)} values between")
    if rest and len(rest) < 16:
        is_counting = rest == list(range(1, len(rest) + 1))
        limit, factor = (STRAY_SHARE, 100) if is_counting else (MAX_UNSAID, 20)
        few = len(rest) <= 3 and content.values.total() < 1_000_000 and sum(content.values[v] for v in rest) <= 10
        if not (few or share < limit) or object_share < factor * share:
            return None
    elif rest and share > min(_BINARY_SMOOTH_SHARE, object_share):
        return None
    elif share > MAX_UNSAID:
        raise _smoothed(f"{percent(content, rest)} are neither 0 nor {white}, but {len(rest)} other values")
    strays = rest if len(rest) < 16 or white > 255 else list(range(1, 255))
    names, reason, source = _names_of_two(files, masks)
    why = f"the masks contain only 0 and {white}"
    if rest:
        why = f"0 and {white} are {1 - share:.3%} of the pixels; the rest is ignored"
    return Classes(
        names,
        reason,
        {white: 1, **dict.fromkeys(strays, -1)},
        why,
        ignore_index=-1,
        notes=strays_note(content, rest, "values"),
        source=source,
    )


def _smoothed(found: str) -> DataError:
    return DataError(f"the masks were smoothed or saved with loss: {found}; {CLEANING} values")


def _names_of_two(files: Sequence[ClassFile], masks: Sequence[str]) -> tuple[tuple[str, ...], str, str]:
    """Return the names of two classes, why, and their file: one next to the data, or none.

    Masks that Label Studio exported have the name of their tag.
    """
    for file in files:
        if len(file.names) in (1, 2):
            names = ["background", *file.names] if len(file.names) == 1 else list(file.names)
            return unique(names), f"from {described(file)}", file.source
    tags = {match[1] if (match := _TAG.search(mask)) else "" for mask in masks}
    tag = tags.pop() if len(tags) == 1 else ""
    if tag:
        return unique(["background", tag]), f"the masks are named tag-{tag}", ""
    return ("background", "object"), "replace with their names", ""


def classes_of_ids(
    content: MaskContent, files: Sequence[ClassFile], masks: Sequence[str], choices: MaskChoices
) -> Classes:
    """Return the classes of masks of ids.

    Raises:
        DataError: the masks hold one value.
        OpenQuestionError: there are several plausible readings.
    """
    values = sorted(content.values)
    common = [value for value in values if not is_stray(content, value, content.values.total())]
    is_wide = max(common, default=0) > IGNORED
    has_class_255 = is_wide or _is_255_class(content, files, choices)
    ids = [value for value in values if value >= 0 and (value != IGNORED or has_class_255)]
    if not ids:
        raise DataError("every pixel of the masks is 255, which is ignored: label some pixels with class ids")
    num_common = sum(value in common for value in ids)
    strays = [value for value in ids if value not in common and value > 2 * num_common + 3]
    ids = [value for value in ids if value not in strays]
    check_several(content, ids)
    notes = strays_note(content, strays, "values")
    if negative := [value for value in values if value < 0]:
        notes = (*notes, f"value {few(negative)} is ignored: {percent(content, negative)}")
        if negative != [-1]:
            raise DataError(f"the masks hold negative values, {few(negative)}: save the classes as values from 0 on")
        strays = [*strays, *negative]
    if IGNORED in values and not has_class_255:
        notes = (*notes, f"value {IGNORED} is ignored: {percent(content, [IGNORED])}")
    fits = [fit for file in files if (fit := _fit(file, content, ids)) is not None]
    if fits:
        best = min(fits, key=lambda fit: share_of(content, fit.unnamed))
        return _from_fit(best, content, strays, choices, notes)
    published = recognise_values(masks[0], ids)
    if published is not None:
        unlabelled = [value for value in published.ignored_ids if value in content.values]
        if unlabelled:
            said = f"value {few(unlabelled)} is ignored as in {published.title}: {percent(content, unlabelled)}"
            notes = (*notes, said)
        return _of_values(
            published.values,
            f"folders and values are those of {published.title}",
            [*published.ignored_ids, *strays],
            f"the values of {published.title}",
            (*notes, *published.notes),
        )
    ask_for_instances(content, ids, choices)
    unfit = [f"{described(file)} does not fit the values {few(ids)}" for file in files if file.ids or not file.colors]
    dense = ids[-1] + 1 <= max(2 * len(ids), len(ids) + 3)
    dense &= ids[0] == 0 or len(ids) < ids[-1] or not content.is_complete
    if ids == [0, 1]:
        names, reason, _ = _names_of_two((), masks)
    else:
        names = tuple(f"class_{value}" for value in (range(ids[-1] + 1) if dense else ids))
        reason = "replace with their names, in this order"
    return _of_values(
        dict(zip(range(ids[-1] + 1) if dense else ids, names, strict=True)),
        reason,
        strays,
        "the values begin at 1, or have gaps" if not dense else "stray values are ignored",
        (*notes, *unfit[:1]),
    )


def _is_255_class(content: MaskContent, files: Sequence[ClassFile], choices: MaskChoices) -> bool:
    """Return True if value 255 is a class, False if it marks ignored pixels, as it usually does.

    Raises:
        OpenQuestionError: it fills half of the masks or is one of a few levels, and no file names it.
    """
    if any(IGNORED in file.ids and not is_void(file.ids[IGNORED]) for file in files):
        return True
    share, others = share_of(content, [IGNORED]), sorted(content.values.keys() - {IGNORED})
    is_level = share > 0.05 and 0 < len(others) < 8 and others[-1] >= 100  # grey levels, of which 255 may be one
    if len(others) < 2 or not (share >= 0.5 or is_level):
        return False
    if choices.unlabelled is not None:
        return choices.unlabelled == "class"
    raise open_question(
        f"value 255 is {percent(content, [IGNORED])}: unlabelled or a class",
        "--unlabelled",
        (
            Answer("ignore", "255 is unlabelled: neither trained nor scored"),
            Answer("class", "255 is a class, such as the background"),
        ),
    )


def _of_values(
    named: Mapping[int, str], reason: str, ignored: Iterable[int], why: str, notes: tuple[str, ...]
) -> Classes:
    """Return the classes of named values; the ignored ones are those of `ignored`, and 255 if it has no name."""
    order = {value: number for number, value in enumerate(named)}
    ignored = set(ignored)
    ignore_index = -1 if IGNORED in named or len(named) > IGNORED or -1 in ignored else IGNORED
    is_plain = all(value == number for value, number in order.items())
    label_map = {} if is_plain else order
    if -1 in ignored and IGNORED not in named:
        ignored.add(IGNORED)
    label_map |= {value: ignore_index for value in sorted(ignored) if value != ignore_index and 0 <= value <= 65_535}
    return Classes(
        unique(list(named.values())),
        reason,
        label_map,
        why if label_map else "",
        ignore_index=None if ignore_index == IGNORED else ignore_index,
        notes=notes,
    )


@dataclass(frozen=True)
class _Fit:
    """A file whose names are those of most values: the name of each value, and the values in the masks without one."""

    file: ClassFile
    named: Mapping[int, str]
    unnamed: tuple[int, ...]
    why: str


def _fit(file: ClassFile, content: MaskContent, ids: Sequence[int]) -> _Fit | None:
    """Return the values that a file names; None if it does not fit those in the masks."""
    if file.ids:
        named = {value: name for value, name in sorted(file.ids.items()) if 0 <= value <= 65_535}
        unnamed = tuple(value for value in ids if value not in named)
        strange = [value for value in unnamed if value != 0]
        is_fit = not strange or share_of(content, strange) < 0.5
        return _Fit(file, named, unnamed, "the values of the file") if is_fit else None
    beyond = [value for value in ids if value > len(file.names)]
    known = [value for value in ids if value not in beyond]
    if not known or share_of(content, beyond) > MAX_UNSAID:
        return None
    last, count = known[-1], len(file.names)
    if last < count <= max(last + 1, 2 * len(known) + 3):
        return _Fit(file, dict(enumerate(file.names)), tuple(beyond), "")
    if last != count:
        return None
    if is_background(file.names[0]):  # the value beyond the names is a stray one, if any
        is_fit = share_of(content, [last]) <= MAX_UNSAID
        return _Fit(file, dict(enumerate(file.names)), (last, *beyond), "") if is_fit else None
    unnamed = (0, *beyond) if known[0] == 0 else tuple(beyond)
    return _Fit(file, dict(enumerate(file.names, start=1)), unnamed, "the values begin at 1")


def _from_fit(
    fit: _Fit, content: MaskContent, strays: Sequence[int], choices: MaskChoices, notes: tuple[str, ...]
) -> Classes:
    """Return the classes of a file; what becomes of values without a name is said, or asked if they are frequent."""
    named, ignored, why = dict(fit.named), list(strays), fit.why
    source = shown(fit.file.source)
    if 0 in fit.unnamed:
        if _is_zero_class(content, fit, choices):
            named = {0: "background", **named}
            why = "0 has no name: background"
        else:
            ignored.append(0)
            notes = (*notes, f"value 0 has no name in {source} and is ignored: {percent(content, [0])}")
    strange = [value for value in fit.unnamed if value != 0]
    if strange and is_class(content, strange, fit.file, choices):
        named = dict(sorted({**named, **{value: f"class_{value}" for value in strange}}.items()))
    elif strange:
        ignored += strange
        masks = max(content.masks_with[value] for value in strange)
        notes = (
            *notes,
            f"value {few(strange)} has no name in {source} and is ignored: "
            f"{sum(content.values[value] for value in strange)} px in {masks} masks, {percent(content, strange)}",
        )
    void = void_of(named, choices)
    notes = (*notes, *void_notes(content, named, [value for value in void if value != IGNORED]))
    kept = {value: name for value, name in named.items() if value not in void}
    classes = _of_values(kept, f"from {described(fit.file)}", [*void, *ignored], why, notes)
    return replace(classes, source=fit.file.source)


def _is_zero_class(content: MaskContent, fit: _Fit, choices: MaskChoices) -> bool:
    """Return True if value 0, which has no name, is the background; False if it marks unlabelled pixels.

    Raises:
        OpenQuestionError: both are plausible.
    """
    if choices.unlabelled is not None:
        return choices.unlabelled == "class"
    share = share_of(content, [0])
    if any(is_background(name) or name.lower() in ("other", "others") for name in fit.named.values()):
        return False
    if share >= 0.5 or len(fit.named) == 1:
        return True
    if share <= MAX_UNSAID:
        return False
    raise open_question(
        f"value 0 has no name in {shown(fit.file.source)} and is {percent(content, [0])}: background or unlabelled",
        "--unlabelled",
        (
            Answer("ignore", "0 is unlabelled: neither trained nor scored"),
            Answer("class", "0 is the class background"),
        ),
    )


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
