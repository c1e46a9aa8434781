"""The classes of masks, from their values and from class files: names, label map, palette, ignored ids.

Each way in which masks store classes describes its findings and reasons. Ignored pixels are reported with their share.
If two interpretations are plausible, the user is asked.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from segapp.datasets.files import shown
from segapp.datasets.layouts.schemes import Color
from segapp.errors import DataError
from segapp.onboarding.class_files import (
    ClassFile,
    described,
    is_background,
    is_void,
    recognise,
    recognise_values,
)
from segapp.onboarding.content import MAX_COLORS, MaskContent, Value, reason_unread
from segapp.onboarding.layout import Answer, open_question

IGNORED = 255
_INSTANCE_STEP = 1000  # in most instance masks, a pixel's value is class x this + number of the instance
_INSTANCES = (
    "save masks of classes instead, such as np.where(ids < 1000, ids, ids // 1000).astype(np.uint8) of class x 1000 + "
    "instance, or (ids > 0).astype(np.uint8) of objects of one class"
)
UNLABELLED = ("ignore", "class")  # values of `--unlabelled`
MAX_UNSAID = 0.01  # largest share of the pixels that is ignored without a question or an option
CLEANING = (
    "export them again as PNG of ids; of two classes, magick mogrify -path clean -format png -threshold 50% 'masks/*' "
    "writes clean copies, and of more, +dither -remap COLORS.png does instead of -threshold 50%"
)
"""What to do about smoothed masks; COLORS.png has a pixel of each class."""
STRAY_SHARE = 1e-5  # share of the pixels below which a single value is a stray one
_MAX_NAMED = 6
_MANY_VALUES = 32  # values that no file names, from which masks were probably smoothed
_BINARY_SMOOTH_SHARE = 0.1
_TAG = re.compile(r"-tag-(.+?)-\d+\.\w+$")


@dataclass(frozen=True, kw_only=True)
class MaskChoices:
    """The user's answers about masks, as options of `segapp init`; None: determined from the masks, or asked."""

    masks: str | None = None  # "ids": each value is a class, although the values look like instances
    unlabelled: str | None = None  # one of UNLABELLED


@dataclass(frozen=True)
class Classes:
    """Classes of masks, as config values."""

    names: tuple[str, ...]  # of the classes, by id
    names_reason: str  # source of the names
    label_map: Mapping[int, int] = field(default_factory=dict)  # value in the mask -> class or ignored
    label_map_reason: str = ""  # why
    ignore_index: int | None = None  # None: 255
    palette: tuple[Color, ...] = ()  # colors of RGB masks, the ignored ones last; empty: masks of ids
    palette_reason: str = ""  # description of the colors
    notes: tuple[str, ...] = ()  # sentences about values that are ignored, or about files that do not fit
    source: str = ""  # file next to the data that contains the names; empty: none

    def class_of(self, stored: Value) -> int | None:
        """Return the class of a value or color in the masks; None if it is ignored, or has no class."""
        if isinstance(stored, tuple):
            number = self.palette.index(stored) if stored in self.palette else len(self.names)
        else:
            ignore_index = IGNORED if self.ignore_index is None else self.ignore_index
            number = self.label_map.get(stored, stored)
            number = len(self.names) if number == ignore_index else number
        return number if 0 <= number < len(self.names) else None


def _is_class(content: MaskContent, unnamed: Sequence[Value], file: ClassFile, choices: MaskChoices) -> bool:
    """Return True if unnamed values or colors are classes, False if they are ignored; ask if they are many."""
    if choices.unlabelled is None and content.share(unnamed) <= MAX_UNSAID:
        return False
    return _said_class(
        choices,
        f"{listed(unnamed)} has no name in {shown(file.source)} and is {content.percent(unnamed)}",
        "these pixels are neither trained nor scored",
        "each of them is a class, to be named in the config",
        f"if they lie at the edges of objects, {CLEANING}",
    )


def _said_class(choices: MaskChoices, question: str, ignored: str, is_class: str, advice: str = "") -> bool:
    """Return True if the user treats pixels as a class, False if as ignored; ask if no option is given."""
    if choices.unlabelled is not None:
        return choices.unlabelled == "class"
    answers = (Answer("ignore", ignored), Answer("class", is_class))
    raise open_question(question, "--unlabelled", answers, advice)


def _void_of(named: Mapping[Any, str], choices: MaskChoices) -> list[Any]:
    """Return the values or colors whose names mean unlabeled, unless they are needed as a class."""
    void = [stored for stored, name in named.items() if is_void(name)]
    return [] if choices.unlabelled == "class" or len(named) - len(void) < 2 else void


def _void_notes(content: MaskContent, named: Mapping[Any, str], void: Sequence[Value]) -> tuple[str, ...]:
    """Return a sentence per value or color that is named as unlabeled and occurs."""
    return tuple(
        f"{shown(named[stored])} ({listed([stored])}) is ignored: {content.percent([stored])}; "
        "--unlabelled class makes it a class"
        for stored in void
        if content.pixels_of(stored)
    )


def _check_several(content: MaskContent, stored: Sequence[Value]) -> None:
    """Raise DataError if there is only one value or color."""
    if len(stored) < 2:
        ignored = ", apart from ignored pixels" if len(content.pixels) > 1 else ""
        opacity = (
            "; masks in the opacity: magick mogrify -path clean -alpha extract 'masks/*'" if content.colors else ""
        )
        raise DataError(
            f"the {content.num_masks} masks that were read contain only one value{ignored}: {listed(stored)}: label "
            f"the other pixels too, or choose another folder with --layout{opacity}"
        )


def is_stray(content: MaskContent, value: Value, total: int) -> bool:
    """Return True for a value or a color with very few pixels in very few masks."""
    pixels = content.pixels_of(value)
    is_rare = pixels < STRAY_SHARE * total or pixels <= 3
    return is_rare and content.masks_with[value] <= max(1, content.num_masks // 50)


def _strays_note(content: MaskContent, strays: Sequence[Value], what: str) -> tuple[str, ...]:
    """Return the sentence on stray values or colors, which are ignored; empty if there are none."""
    if not strays:
        return ()
    named = ", ".join(
        f"{list(one) if isinstance(one, tuple) else one} ({content.pixels_of(one)} px)" for one in strays[:_MAX_NAMED]
    )
    more = f" and {len(strays) - _MAX_NAMED} more" if len(strays) > _MAX_NAMED else ""
    return (f"stray {what} are ignored: {named}{more}: {content.percent(strays)}",)


def listed(stored: Sequence[Value]) -> str:
    """Return the first few values or colors as text: "value 0, 85"."""
    return f"{'value' if all(isinstance(one, int) for one in stored) else 'color'} {_few(stored)}"


def _few(values: Sequence[Value]) -> str:
    named = (str(list(value)) if isinstance(value, tuple) else str(value) for value in values[:_MAX_NAMED])
    return ", ".join(named) + (" ..." if len(values) > _MAX_NAMED else "")


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names; the second of two equal ones gets a number."""
    taken = Counter[str]()
    unique = []
    for name in names:
        taken[name] += 1
        unique.append(name if taken[name] == 1 else f"{name}_{taken[name]}")
    return tuple(unique)


def _refuse_instances(content: MaskContent, stored: Sequence[Value], choices: MaskChoices) -> None:
    """Raise DataError for values or colors that are numbers of instances, or so many that the masks were smoothed."""
    if choices.masks is not None:
        return
    values = [value for value in stored if isinstance(value, int)]
    high = [value for value in values if value >= _INSTANCE_STEP]
    lone = sum(content.masks_with[value] == 1 for value in stored)
    counting = content.counts_up_to
    look = ""
    if len({value // _INSTANCE_STEP for value in high}) < len(high):
        look = f"hold {len(values)} values up to {values[-1]}, which look like class x {_INSTANCE_STEP} + instance"
    elif counting.total() >= 0.9 * content.num_masks and len(counting) > 3 and values[-1:] > [7]:
        look = f"hold the values 1 to n, n from {min(counting)} to {max(counting)}, as masks of instances do"
    elif len(stored) > max(8, content.num_masks) and lone > len(stored) / 2:
        kind = "values" if values else "colors"
        look = f"hold {len(stored)} {kind}, {lone} of which occur in one mask each, as numbers of instances do"
    if look:
        raise DataError(f"the {content.num_masks} masks {look}: {_INSTANCES}; if each is a class, add --masks ids")
    if len(values) >= _MANY_VALUES:
        raise DataError(
            f"the masks hold {len(values)} values without names, up to {values[-1]}, as smoothed masks do: {CLEANING}; "
            "if each is a class, add --masks ids"
        )


def _classes_of_colors(content: MaskContent, files: Sequence[ClassFile], mask: str, choices: MaskChoices) -> Classes:
    """Return the classes of RGB masks; raise DataError if they were smoothed or have only one color."""
    if content.smooth or len(content.colors) > 2 * MAX_COLORS:
        raise DataError(
            f"{max(len(content.smooth), 1)} of {content.num_masks} masks contain neither ids nor fewer than "
            f"{MAX_COLORS} colors, such as {shown(content.smooth[0] if content.smooth else '')}: they were smoothed "
            f"or saved with loss; {CLEANING}"
        )
    total = content.colors.total()
    strays = sorted(color for color in content.colors if is_stray(content, color, total))
    colors = sorted(content.colors.keys() - set(strays))
    _check_several(content, colors)
    notes = _strays_note(content, strays, "colours")
    for file in files:
        if file.colors and content.share([color for color in colors if color not in file.colors]) <= 0.05:
            return _from_named_colors(content, file, colors, strays, choices, notes)
    if known := recognise(colors, mask):
        first = known[0]
        ignored = list(dict.fromkeys([*first.ignored_colors, *strays]))
        seen = [color for color in first.ignored_colors if color in content.colors]
        if seen:
            notes = (*notes, f"{listed(seen)} is ignored as in {first.title}: {content.percent(seen)}")
        return Classes(
            tuple(first.palette.values()),
            f"the colors match {first.title}",
            palette=(*first.palette, *ignored),
            palette_reason="as published" + ("; the last are ignored" if ignored else ""),
            notes=notes,
        )
    ordered = next((file for file in files if not file.colors and len(file.names) == len(colors)), None)
    if ordered is not None:
        names, reason = ordered.names, f"from {described(ordered)}: check that their order is the palette's"
    elif colors == [(0, 0, 0), (255, 255, 255)]:
        names, reason = ("background", "object"), "black and white; replace with their names"
    else:
        _refuse_instances(content, colors, choices)
        names = tuple(f"class_{i}" for i in range(len(colors)))
        reason = "replace with their names, in the palette's order"
    return Classes(
        names,
        reason,
        palette=(*colors, *strays),
        palette_reason=f"the masks are images with {len(colors)} colors" + ("; the last are ignored" if strays else ""),
        notes=notes,
        source="" if ordered is None else ordered.source,
    )


def _from_named_colors(
    content: MaskContent,
    file: ClassFile,
    colors: list[Color],
    strays: list[Color],
    choices: MaskChoices,
    notes: tuple[str, ...],
) -> Classes:
    """Return the classes from a file with colors; unnamed colors are ignored, or classes if the user wants this."""
    unknown = [color for color in colors if color not in file.colors]
    named = dict(file.colors)
    source = shown(file.source)
    if unknown and _is_class(content, unknown, file, choices):
        named |= {color: f"color_{bytes(color).hex()}" for color in unknown}
        unknown = []
    elif unknown:
        said = f"{len(unknown)} colors are not in {source} and are ignored: {content.percent(unknown)}"
        notes = (said, *notes)
    void = _void_of(named, choices)
    kept = {color: name for color, name in named.items() if color not in void}
    ignored = [*sorted(void), *unknown, *strays]
    return Classes(
        _unique(kept.values()),
        f"from {described(file)}",
        palette=tuple(dict.fromkeys([*kept, *ignored])),
        palette_reason=f"the colors of {source}" + ("; the last are ignored" if ignored else ""),
        notes=(*notes, *_void_notes(content, named, void)),
        source=file.source,
    )


def binary_classes(content: MaskContent, files: Sequence[ClassFile], masks: Sequence[str]) -> Classes | None:
    """Return background and object if masks have 0 and 255 (or 65535) and hardly any other values; else None.

    DataError is raised if the masks were smoothed and more than a hundredth of the pixels are in between.
    """
    white = 65_535 if 65_535 in content.values else 255
    rest = sorted(value for value in content.values if value not in (0, white))
    if not {0, white} <= content.values.keys() or min(content.values) < 0:
        return None
    share, object_share = content.share(rest), content.share([white])
    smoothed = f"the masks were smoothed or saved with loss: {content.percent(rest)} are neither 0 nor {white}, but"
    is_spread = len(rest) >= 16 and rest[0] < white // 4 and rest[-1] > white - white // 4
    if is_spread and share > MAX_UNSAID and object_share >= 0.005:
        raise DataError(f"{smoothed} {len(rest)} values between; {CLEANING}")
    if rest and len(rest) < 16:
        is_counting = rest == list(range(1, len(rest) + 1))
        limit, factor = (STRAY_SHARE, 100) if is_counting else (MAX_UNSAID, 20)
        few = len(rest) <= 3 and content.values.total() < 1_000_000 and sum(content.values[v] for v in rest) <= 10
        if not (few or share < limit) or object_share < factor * share:
            return None
    elif rest and share > min(_BINARY_SMOOTH_SHARE, object_share):
        return None
    elif share > MAX_UNSAID:
        raise DataError(f"{smoothed} {len(rest)} other values; {CLEANING}")
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
        notes=_strays_note(content, rest, "values"),
        source=source,
    )


def _names_of_two(files: Sequence[ClassFile], masks: Sequence[str]) -> tuple[tuple[str, ...], str, str]:
    """Return the names of two classes, the reason, and their file: one next to the data, or none.

    Masks that Label Studio exported are named after their tag.
    """
    for file in files:
        if len(file.names) in (1, 2):
            return _unique(["background", *file.names][-2:]), f"from {described(file)}", file.source
    tags = {match[1] if (match := _TAG.search(mask)) else "" for mask in masks}
    tag = tags.pop() if len(tags) == 1 else ""
    if tag:
        return _unique(["background", tag]), f"the masks are named tag-{tag}", ""
    return ("background", "object"), "replace with their names", ""


def _classes_of_ids(
    content: MaskContent, files: Sequence[ClassFile], masks: Sequence[str], choices: MaskChoices
) -> Classes:
    """Return the classes of masks of ids; raise DataError if they have only one value, or negative ones."""
    values = sorted(content.values)
    common = [value for value in values if not is_stray(content, value, content.values.total())]
    has_class_255 = max(common, default=0) > IGNORED or _is_255_class(content, files, choices)
    ids = [value for value in values if value >= 0 and (value != IGNORED or has_class_255)]
    if not ids:
        raise DataError("every pixel of the masks is 255, which is ignored: label some pixels with class ids")
    num_common = sum(value in common for value in ids)
    strays = [value for value in ids if value not in common and value > 2 * num_common + 3]
    ids = [value for value in ids if value not in strays]
    _check_several(content, ids)
    notes = [*_strays_note(content, strays, "values")]
    if negative := [value for value in values if value < 0]:
        if negative != [-1]:
            raise DataError(f"the masks hold negative values, {_few(negative)}: save the classes as values from 0 on")
        notes.append(f"value -1 is ignored: {content.percent(negative)}")
        strays.append(-1)
    if IGNORED in values and not has_class_255:
        notes.append(f"value {IGNORED} is ignored: {content.percent([IGNORED])}")
    fits = [fit for file in files if (fit := _fit(file, content, ids)) is not None]
    if fits:
        best = min(fits, key=lambda fit: content.share(fit.unnamed))
        return _from_fit(best, content, strays, choices, notes)
    published = recognise_values(masks[0], ids)
    if published is not None:
        if unlabelled := [value for value in published.ignored_ids if value in content.values]:
            said = f"value {_few(unlabelled)} is ignored as in {published.title}: {content.percent(unlabelled)}"
            notes.append(said)
        return _of_values(
            published.values,
            f"folders and values match {published.title}",
            [*published.ignored_ids, *strays],
            f"the values of {published.title}",
            [*notes, *published.notes],
        )
    _refuse_instances(content, ids, choices)
    unfit = [f"{described(file)} does not fit the values {_few(ids)}" for file in files if file.ids or not file.colors]
    is_dense = ids[-1] + 1 <= max(2 * len(ids), len(ids) + 3)
    is_dense &= ids[0] == 0 or len(ids) < ids[-1] or content.num_masks < content.num_all
    named = range(ids[-1] + 1) if is_dense else ids
    if ids == [0, 1]:
        names, reason, _ = _names_of_two((), masks)
    else:
        names = tuple(f"class_{value}" for value in named)
        reason = "replace with their names, in this order"
    return _of_values(
        dict(zip(named, names, strict=True)),
        reason,
        strays,
        "stray values are ignored" if is_dense else "the values begin at 1, or have gaps",
        [*notes, *unfit[:1]],
    )


def _is_255_class(content: MaskContent, files: Sequence[ClassFile], choices: MaskChoices) -> bool:
    """Return True if value 255 is a class, False if it marks ignored pixels, as it usually does.

    A question is asked if it covers half of the pixels or is one of a few levels, and no file names it.
    """
    if any(IGNORED in file.ids and not is_void(file.ids[IGNORED]) for file in files):
        return True
    share, others = content.share([IGNORED]), sorted(content.values.keys() - {IGNORED})
    is_level = share > 0.05 and 0 < len(others) < 8 and others[-1] >= 100  # gray levels, of which 255 may be one
    if len(others) < 2 or not (share >= 0.5 or is_level):
        return False
    return _said_class(
        choices,
        f"value 255 is {content.percent([IGNORED])}: unlabeled or a class",
        "255 is unlabeled: neither trained nor scored",
        "255 is a class, such as the background",
    )


def _of_values(
    named: Mapping[int, str], reason: str, ignored: Iterable[int], why: str, notes: Sequence[str]
) -> Classes:
    """Return the classes of named values; `ignored` values are ignored, and so is 255 if it has no name."""
    ignored = set(ignored)
    ignore_index = -1 if IGNORED in named or len(named) > IGNORED or -1 in ignored else IGNORED
    is_plain = [*named] == [*range(len(named))]
    label_map = {} if is_plain else {value: number for number, value in enumerate(named)}
    if -1 in ignored and IGNORED not in named:
        ignored.add(IGNORED)
    label_map |= {value: ignore_index for value in sorted(ignored) if value != ignore_index and 0 <= value <= 65_535}
    return Classes(
        _unique(named.values()),
        reason,
        label_map,
        why if label_map else "",
        ignore_index=None if ignore_index == IGNORED else ignore_index,
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Fit:
    """A file that names most values: the name of each value, and the values in the masks without a name."""

    file: ClassFile
    named: Mapping[int, str]
    unnamed: Sequence[int]
    why: str = ""


def _fit(file: ClassFile, content: MaskContent, ids: Sequence[int]) -> _Fit | None:
    """Return the values that a file names; None if it does not fit the values in the masks."""
    if file.ids:
        named = {value: name for value, name in sorted(file.ids.items()) if 0 <= value <= 65_535}
        unnamed = [value for value in ids if value not in named]
        strange = [value for value in unnamed if value != 0]
        is_fit = not strange or content.share(strange) < 0.5
        return _Fit(file, named, unnamed, "the values of the file") if is_fit else None
    count = len(file.names)
    beyond = [value for value in ids if value > count]
    known = [value for value in ids if value <= count]
    if not known or content.share(beyond) > MAX_UNSAID:
        return None
    last = known[-1]
    if last < count <= max(last + 1, 2 * len(known) + 3):
        return _Fit(file, dict(enumerate(file.names)), beyond)
    if last != count:
        return None
    if is_background(file.names[0]):  # a value beyond the names is a stray one
        is_fit = content.share([last]) <= MAX_UNSAID
        return _Fit(file, dict(enumerate(file.names)), [last, *beyond]) if is_fit else None
    unnamed = [0, *beyond] if known[0] == 0 else beyond
    return _Fit(file, dict(enumerate(file.names, start=1)), unnamed, "the values begin at 1")


def _from_fit(
    fit: _Fit, content: MaskContent, strays: Sequence[int], choices: MaskChoices, notes: Sequence[str]
) -> Classes:
    """Return the classes of a file; a note describes unnamed values, or the user is asked if they are frequent."""
    named, ignored, why, notes = dict(fit.named), list(strays), fit.why, list(notes)
    source = shown(fit.file.source)
    if 0 in fit.unnamed:
        if _is_zero_class(content, fit, choices):
            named = {0: "background", **named}
            why = "0 has no name: background"
        else:
            ignored.append(0)
            notes.append(f"value 0 has no name in {source} and is ignored: {content.percent([0])}")
    strange = [value for value in fit.unnamed if value != 0]
    if strange and _is_class(content, strange, fit.file, choices):
        named = dict(sorted({**named, **{value: f"class_{value}" for value in strange}}.items()))
    elif strange:
        ignored += strange
        masks = max(content.masks_with[value] for value in strange)
        notes.append(
            f"value {_few(strange)} has no name in {source} and is ignored: "
            f"{sum(content.values[value] for value in strange)} px in {masks} masks, {content.percent(strange)}"
        )
    void = _void_of(named, choices)
    notes += _void_notes(content, named, [value for value in void if value != IGNORED])
    kept = {value: name for value, name in named.items() if value not in void}
    classes = _of_values(kept, f"from {described(fit.file)}", [*void, *ignored], why, notes)
    return replace(classes, source=fit.file.source)


def _is_zero_class(content: MaskContent, fit: _Fit, choices: MaskChoices) -> bool:
    """Return True if value 0, which has no name, is the background; False if it marks unlabeled pixels.

    A question is asked if both are plausible.
    """
    share = content.share([0])
    if choices.unlabelled is None:
        if any(is_background(name) or name.lower() in ("other", "others") for name in fit.named.values()):
            return False
        if share >= 0.5 or len(fit.named) == 1:
            return True
        if share <= MAX_UNSAID:
            return False
    return _said_class(
        choices,
        f"value 0 has no name in {shown(fit.file.source)} and is {content.percent([0])}: background or unlabeled",
        "0 is unlabeled: neither trained nor scored",
        "0 is the class background",
    )


def read_classes(
    content: MaskContent, files: Sequence[ClassFile], masks: Sequence[str], choices: MaskChoices
) -> Classes:
    """Return the classes of masks; `masks` are their paths, beginning with the name of the data folder.

    Raises:
        ConfigError: a choice does not fit the masks.
        DataError: the classes cannot be determined: no ids, one value, too many colors, or lossy masks.
        OpenQuestionError: there are several plausible interpretations.
    """
    if content.lossy:
        raise DataError(
            f"{len(content.lossy)} of {content.num_masks} masks are JPEGs, such as {shown(content.lossy[0])}: "
            f"JPEG changes ids at every edge; {CLEANING}"
        )
    if not content.values and not content.colors:
        reason = f" ({reason_unread(content.unread[0])})" if content.unread else ""
        raise DataError(
            f"none of {content.num_all} masks can be read, such as {shown(masks[0])}{reason}: save them as PNG of ids"
        )
    if content.colors:
        return _classes_of_colors(content, files, masks[0], choices)
    return binary_classes(content, files, masks) or _classes_of_ids(content, files, masks, choices)
