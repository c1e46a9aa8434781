"""The classes of masks of ids: black and white, named by a file, published, or in order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from segapp.datasets.files import shown
from segapp.errors import DataError
from segapp.onboarding.survey.class_files import ClassFile, described, is_background, is_void
from segapp.onboarding.survey.content import MaskContent
from segapp.onboarding.survey.encoding.classes import IGNORED, Classes, MaskChoices
from segapp.onboarding.survey.encoding.instances import ask_for_instances
from segapp.onboarding.survey.encoding.words import (
    CLEANING,
    MAX_UNSAID,
    STRAY_SHARE,
    check_several,
    few,
    is_class,
    is_stray,
    percent,
    share_of,
    strays_note,
    unique,
    void_notes,
    void_of,
)
from segapp.onboarding.survey.palettes import recognise_values
from segapp.onboarding.survey.questions import Answer, open_question

_BINARY_SMOOTH_SHARE = 0.1
_TAG = re.compile(r"-tag-(.+?)-\d+\.\w+$")


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
        unlabelled = [value for value in published.ignored if value in content.values]
        if unlabelled:
            said = f"value {few(unlabelled)} is ignored as in {published.title}: {percent(content, unlabelled)}"
            notes = (*notes, said)
        return _of_values(
            published.names,
            f"folders and values are those of {published.title}",
            [*published.ignored, *strays],
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
