"""The classes of masks, from their values and from class files: names, label map, palette, ignored ids.

Each way in which masks store classes describes its findings and reasons. Ignored pixels are reported with their share.
If two interpretations are plausible, the user is asked.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from segapp.datasets.files import shown
from segapp.datasets.layouts.schemes import Color
from segapp.errors import DataError
from segapp.onboarding.class_files import ClassFile, described, is_void, recognise
from segapp.onboarding.content import IGNORED, MAX_COLORS, MaskContent, Value
from segapp.onboarding.layout import open_question
from segapp.scores import is_background

_INSTANCE_STEP = 1000  # in most instance masks, a pixel's value is class x this + number of the instance
_INSTANCES = (
    "save masks of classes instead, such as np.where(ids < 1000, ids, ids // 1000).astype(np.uint8) of class x 1000 + "
    "instance, or (ids > 0).astype(np.uint8) of objects of one class"
)
MASKS = ("ids", "colors")  # values of `--masks`
UNLABELLED = ("ignore", "class")  # values of `--unlabelled`
MAX_UNSAID = 0.01  # largest share of the pixels that is ignored without a question or an option
CLEANING = (
    "export them again as PNG of ids; of two classes, magick mogrify -path clean -format png -threshold 50% 'masks/*' "
    "writes clean copies, and of more, +dither -remap COLORS.png does instead of -threshold 50%"
)
"""What to do about smoothed masks; COLORS.png has a pixel of each class."""
STRAY_SHARE = 1e-5  # share of the pixels below which a single value is a stray one
_MAX_NAMED = 6
_MIN_FACTOR = 16  # smallest factor of ids that is neither 255 nor due to 16 bits
_MANY_VALUES = 32  # values that no file names, from which masks were probably smoothed
_MAX_UNNAMED = 0.5  # share of the pixels from which values without a name mean that a file does not fit
_TAG = re.compile(r"-tag-(.+?)-\d+\.\w+$")


@dataclass(frozen=True, kw_only=True)
class MaskChoices:
    """The user's answers about masks, as options of `segapp init`; None: determined from the masks, or asked."""

    # one of MASKS: each value is a class although they look like instances or the palettes disagree, or each color is
    masks: str | None = None
    unlabelled: str | None = None  # one of UNLABELLED


@dataclass(frozen=True)
class Classes:
    """Classes of masks, as config values."""

    names: tuple[str, ...]  # of the classes, by id
    names_reason: str  # source of the names
    label_map: Mapping[int, int] = field(default_factory=dict)  # value in the mask -> class or ignored
    ignore_index: int | None = None  # None: 255
    palette: tuple[Color, ...] = ()  # colors of RGB masks, the ignored ones last; empty: masks of ids
    stored_reason: str = ""  # source of the label map or the palette
    notes: tuple[str, ...] = ()  # sentences about values that are ignored, or about files that do not fit
    source: str = ""  # file next to the data that contains the names; empty: none

    def class_of(self, stored: Value) -> int | None:
        """Return the class of a value or color in the masks; None if it is ignored, or has no class."""
        if isinstance(stored, tuple):
            number = self.palette.index(stored) if stored in self.palette else -1
        else:
            number = self.label_map.get(stored, stored)
            number = -1 if number == (IGNORED if self.ignore_index is None else self.ignore_index) else number
        return number if 0 <= number < len(self.names) else None


def _said_class(choices: MaskChoices, question: str, ignored: str, is_class: str, advice: str = "") -> bool:
    """Return True if the user treats pixels as a class, False if as ignored; ask if no option is given."""
    if choices.unlabelled is not None:
        return choices.unlabelled == "class"
    raise open_question(question, "--unlabelled", {"ignore": ignored, "class": is_class}, advice)


def _check_several(content: MaskContent, stored: Sequence[Value]) -> None:
    """Raise DataError if there is only one value or color."""
    if not stored:
        raise DataError("every pixel of the masks is 255, which is ignored: label some pixels with class ids")
    if len(stored) < 2:
        ignored = ", apart from ignored pixels" if len(content.pixels) > 1 else ""
        opacity = (
            "; masks in the opacity: magick mogrify -path clean -alpha extract 'masks/*'" if content.colors else ""
        )
        raise DataError(
            f"the {content.num_masks} masks that were read contain only one value{ignored}: {listed(stored)}: label "
            f"the other pixels too, or choose another folder with --layout{opacity}"
        )


def is_stray(content: MaskContent, value: Value) -> bool:
    """Return True for a value or a color with very few pixels in very few masks."""
    pixels = content.pixels_of(value)
    is_rare = pixels <= 3 or content.share([value]) < STRAY_SHARE
    return is_rare and content.masks_with[value] <= max(1, content.num_masks // 50)


def _strays_note(content: MaskContent, strays: Sequence[Value]) -> tuple[str, ...]:
    return (f"stray {listed(strays)} is ignored: {content.percent(strays)}",) if strays else ()


def listed(stored: Sequence[Value]) -> str:
    """Return the first few values or colors as text: "value 0, 85"."""
    some = ", ".join(str(list(one)) if isinstance(one, tuple) else str(one) for one in stored[:_MAX_NAMED])
    kind = "color" if any(isinstance(one, tuple) for one in stored) else "value"
    return f"{kind} {some}" + (" ..." if len(stored) > _MAX_NAMED else "")


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
    # Instances are counted from 1 in each image, so the largest value differs from mask to mask.
    counting = Counter(max(own) for own in content.values_of.values() if own | {0} == {*range(len(own | {0}))} != {0})
    look = ""
    if len({value // _INSTANCE_STEP for value in high}) < len(high):
        look = f"hold {len(values)} values up to {values[-1]}, which look like class x {_INSTANCE_STEP} + instance"
    elif counting.total() >= 0.9 * content.num_masks and len(counting) > 3 and values[-1:] > [7]:
        look = f"hold the values 1 to n, n from {min(counting)} to {max(counting)}, as masks of instances do"
    elif len(stored) > max(8, content.num_masks) and lone > len(stored) / 2:
        look = f"hold {len(stored)} values, {lone} of which occur in one mask each, as numbers of instances do"
    if look:
        raise DataError(f"the {content.num_masks} masks {look}: {_INSTANCES}; if each is a class, add --masks ids")
    if len(values) >= _MANY_VALUES:
        raise DataError(
            f"the masks hold {len(values)} values without names, up to {values[-1]}, as smoothed masks do: {CLEANING}; "
            "if each is a class, add --masks ids"
        )


def binary_classes(content: MaskContent, files: Sequence[ClassFile], masks: Sequence[str]) -> Classes | None:
    """Return background and object if masks have 0 and 255 (or 65535) and hardly any other values; else None.

    DataError is raised if the masks were smoothed and more than a hundredth of the pixels are in between.
    """
    white = 65_535 if 65_535 in content.values else 255
    if not {0, white} <= content.values.keys() or min(content.values) < 0:
        return None
    rest = sorted(content.values.keys() - {0, white})
    share = content.share(rest)
    is_smoothed = len(rest) >= 16 and rest[0] < white // 4 and rest[-1] > white - white // 4
    if is_smoothed and share > MAX_UNSAID:
        raise DataError(
            f"the masks were smoothed or saved with loss: {content.percent(rest)} are neither 0 nor {white}, but "
            f"{len(rest)} values between; {CLEANING}"
        )
    # 1, 2 and so on between 0 and 255 are classes, and 255 is void.
    are_ids = rest == [*range(1, len(rest) + 1)]
    is_noise = share <= min(MAX_UNSAID, content.share([white]) / 20) and not are_ids
    if not (is_smoothed or is_noise or all(is_stray(content, value) for value in rest)):
        return None
    # Only some masks were read, and others may hold any value between.
    strays = rest if len(rest) < 16 or white > 255 else list(range(1, 255))
    names, reason, source = _names_of_two(files, masks)
    return Classes(
        names,
        reason,
        {white: 1, **dict.fromkeys(strays, -1)},
        stored_reason=f"0 and {white} are {1 - share:.3%} of the pixels" + ("; the rest is ignored" if rest else ""),
        ignore_index=-1,
        notes=_strays_note(content, rest),
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


def _sorted_out(
    content: MaskContent, files: Sequence[ClassFile], choices: MaskChoices
) -> tuple[list[Any], list[Any], list[str]]:
    """Return the values or colors that may be classes, those that are ignored, and notes about the latter.

    Values up to twice the number of frequent ones may be rare classes. 255 is in neither list if it is no class.
    """
    found = sorted(content.pixels)
    strays: list[Any] = [one for one in found if is_stray(content, one)]
    void: set[Any] = set()
    if not content.colors:
        common = content.values.keys() - {*strays}
        if max(common, default=0) <= IGNORED and not _is_255_class(content, files, choices):
            void = {IGNORED}
        # A rare value next to the frequent ones is a rare class, and one far beyond them an error.
        largest = 2 * len(common - void) + 3
        strays = [one for one in strays if one > largest and one not in void]
    stored = [one for one in found if one not in void and one not in strays]
    if outside := [one for one in found if isinstance(one, int) and ((one < 0 and one in stored) or one > 65_535)]:
        raise DataError(
            f"the masks hold the {listed(outside)}, and ids are 0 to 65535: save ignored pixels as 255, such as "
            "np.where(mask < 0, 255, mask), and classes as values from 0 on"
        )
    named = f"nodata of the masks ({content.nodata[IGNORED]:.7g})" if IGNORED in content.nodata else listed([IGNORED])
    notes = [f"{named} is ignored: {content.percent([one])}" for one in sorted(void) if one in content.values]
    return stored, strays, [*_strays_note(content, strays), *notes]


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


def _classes(
    named: Mapping[Any, str], reason: str, ignored: Iterable[Any], why: str, notes: Sequence[str], source: str = ""
) -> Classes:
    """Return the classes of named values or colors; `ignored` ones are ignored, and so is 255 if it has no name."""
    names = _unique(named.values())
    if isinstance(next(iter(named)), tuple):
        palette = tuple(dict.fromkeys([*named, *ignored]))
        why += "; the last are ignored" if len(palette) > len(named) else ""
        return Classes(names, reason, palette=palette, stored_reason=why, notes=tuple(notes), source=source)
    void = set(ignored)
    # 255 is a class here.
    ignore_index = -1 if IGNORED in named or len(named) > IGNORED else IGNORED
    label_map = {} if [*named] == [*range(len(named))] else {value: number for number, value in enumerate(named)}
    label_map |= {value: ignore_index for value in sorted(void) if value != ignore_index and 0 <= value <= 65_535}
    return Classes(
        names,
        reason,
        label_map,
        stored_reason=why if label_map else "",
        ignore_index=None if ignore_index == IGNORED else ignore_index,
        notes=tuple(notes),
        source=source,
    )


@dataclass(frozen=True)
class FileFit:
    """A file that names most values or colors: the name of each, and those in the masks without a name."""

    file: ClassFile
    named: Mapping[Any, str]
    unnamed: Sequence[Any]
    why: str = ""


def _fit(file: ClassFile, content: MaskContent, stored: Sequence[Any]) -> FileFit | None:
    """Return the values or colors that a file names; None if it does not fit those in the masks."""
    if content.colors:
        unnamed = [color for color in stored if color not in file.colors]
        return FileFit(file, file.colors, unnamed, "the colors of the file") if content.share(unnamed) <= 0.05 else None
    if file.ids:
        named = {value: name for value, name in sorted(file.ids.items()) if 0 <= value <= 65_535}
        unnamed = [value for value in stored if value not in named]
        is_fit = content.share(value for value in unnamed if value) < _MAX_UNNAMED
        return FileFit(file, named, unnamed, "the values of the file") if is_fit else None
    count = len(file.names)
    beyond = [value for value in stored if value > count]
    known = [value for value in stored if value <= count]
    if not known or content.share(beyond) > MAX_UNSAID:
        return None
    last = known[-1]
    if last < count <= max(last + 1, 2 * len(known) + 3):
        return FileFit(file, dict(enumerate(file.names)), beyond)
    if last != count:
        return None
    if is_background(file.names[0]):  # a value beyond the names is a stray one
        is_fit = content.share([last]) <= MAX_UNSAID
        return FileFit(file, dict(enumerate(file.names)), [last, *beyond]) if is_fit else None
    unnamed = [0, *beyond] if known[0] == 0 else beyond
    return FileFit(file, dict(enumerate(file.names, start=1)), unnamed, "the values begin at 1")


def _from_file(
    fit: FileFit, content: MaskContent, strays: Sequence[Any], choices: MaskChoices, notes: Sequence[str]
) -> Classes:
    """Return the classes of a file; a note describes what has no name, or the user is asked if it is frequent."""
    named, why, notes, unnamed = dict(fit.named), fit.why, list(notes), list(fit.unnamed)
    if 0 in unnamed and choices.unlabelled is None and (content.share([0]) >= 0.5 or len(named) == 1):
        named, why = {0: "background", **named}, "0 has no name: background"
        unnamed.remove(0)
    source = shown(fit.file.source)
    is_known_ignored = not unnamed or (choices.unlabelled is None and content.share(unnamed) <= MAX_UNSAID)
    if not is_known_ignored and _said_class(
        choices,
        f"{listed(unnamed)} has no name in {source} and is {content.percent(unnamed)}",
        "these pixels are neither trained nor scored",
        "each of them is a class, to be named in the config",
        f"if they lie at the edges of objects, {CLEANING}",
    ):
        named = dict(sorted((named | _placeholders(unnamed) | ({0: "background"} if 0 in unnamed else {})).items()))
    elif unnamed:
        notes.append(f"{listed(unnamed)} has no name in {source} and is ignored: {content.percent(unnamed)}")
    void = [stored for stored, name in named.items() if is_void(name)]
    if choices.unlabelled == "class" or len(named) - len(void) < 2:  # they are needed as a class
        void = []
    notes += [
        f"{shown(named[one])} ({listed([one])}) is ignored: {content.percent([one])}; "
        "--unlabelled class makes it a class"
        for one in void
        if one != IGNORED and content.pixels_of(one)
    ]
    kept = {stored: name for stored, name in named.items() if stored not in void}
    ignored = [*void, *(stored for stored in unnamed if stored not in named), *strays]
    return _classes(kept, f"from {described(fit.file)}", ignored, why, notes, fit.file.source)


def _placeholders(stored: Iterable[Value]) -> dict[Value, str]:
    return {one: f"color_{bytes(one).hex()}" if isinstance(one, tuple) else f"class_{one}" for one in stored}


def read_classes(
    content: MaskContent, files: Sequence[ClassFile], masks: Sequence[str], choices: MaskChoices
) -> Classes:
    """Return the classes of masks; `masks` are their paths, beginning with the name of the data folder.

    The nodata value of GeoTIFFs is ignored, unless a class file names it or fewer than two values would remain.

    Raises:
        DataError: the classes cannot be determined: no ids, one value, too many colors, or lossy masks.
        OpenQuestionError: there are several plausible interpretations.
    """
    notes = [file.note for file in files if file.note]
    files = [file for file in files if file.names or file.ids]
    nodata: list[Any] = [one for one in content.nodata if content.pixels_of(one)]
    others = {one for one in content.pixels if one not in nodata and not is_stray(content, one)}
    are_enough = choices.unlabelled != "class" and (len(others - {IGNORED}) >= 2 or others == {0, IGNORED})
    void = [one for one in nodata if are_enough and one != IGNORED and not _is_named(one, content, files)]
    # A copy, because the shares in the notes are shares of all pixels.
    with_data = replace(content, values=content.values.copy(), colors=content.colors.copy())
    for one in void:
        del with_data.values[one], with_data.colors[one]
    classes = _classes_of_data(with_data, files, masks, choices)
    notes += classes.notes
    for one in nodata:
        what, share = f"{listed([one])}, nodata of the masks,", content.percent([one])
        if one in void:
            notes.append(f"{what} is ignored: {share}; --unlabelled class makes it a class")
        elif (number := classes.class_of(one)) is not None:
            notes.append(f"{what} stays class {shown(classes.names[number])}: {share}")
    classes = replace(classes, notes=tuple(notes))
    if classes.palette or not void:
        return replace(classes, palette=tuple(dict.fromkeys((*classes.palette, *void))))
    ignored = IGNORED if classes.ignore_index is None else classes.ignore_index
    label_map, why = {**classes.label_map, **dict.fromkeys(void, ignored)}, classes.stored_reason
    return replace(classes, label_map=label_map, stored_reason=why or "nodata is ignored")


def _is_named(stored: Value, content: MaskContent, files: Sequence[ClassFile]) -> bool:
    """Return True if a class file names a value or a color, and not as one that is ignored."""
    last = max((value for value in content.values if value != IGNORED), default=0)
    for file in files:
        # If the ids reach beyond the names, the list leaves out id 0.
        ids = file.ids or dict(enumerate(file.names, start=int(last >= len(file.names))))
        name = file.colors.get(stored) if isinstance(stored, tuple) else ids.get(stored)
        if name is not None and not is_void(name):
            return True
    return False


def _classes_of_data(
    content: MaskContent, files: Sequence[ClassFile], masks: Sequence[str], choices: MaskChoices
) -> Classes:
    """Return the classes of masks without nodata.

    The first of these that fits names the classes: only the values 0 and 255, the file that names the most pixels,
    a published data set with these colors or with these folders and values, and the values or colors themselves.
    """
    _refuse_lossy(content, masks)
    _ask_about_palettes(content.disagreement, choices)
    _refuse_scales(content, choices)
    if (two := binary_classes(content, files, masks)) is not None:
        return two
    stored, strays, notes = _sorted_out(content, files, choices)
    _check_several(content, stored)
    fits = [fit for file in files if (fit := _fit(file, content, stored)) is not None]
    fits.sort(key=lambda fit: content.share(fit.unnamed))
    for file in files:
        if file.num_images not in (None, content.num_all):
            said = f"{shown(file.source)} says numTraining {file.num_images}"
            notes.append(f"{said}, and {content.num_all} images have masks")
    if fits:
        _ask_about_palettes(_clash(fits[0], content), choices)
        for other in fits[1:]:
            notes += name_clash(fits[0], other, stored)
        return _from_file(fits[0], content, strays, choices, notes)
    if (known := recognise(stored, masks[0])) is not None:
        ignored: Sequence[Any] = known.ignored_colors if content.colors else known.ignored_ids
        named: Mapping[Any, str] = known.palette if content.colors else known.values
        if seen := [one for one in ignored if content.pixels_of(one)]:
            notes.append(f"{listed(seen)} is ignored as in {known.title}: {content.percent(seen)}")
        reason = f"{'colors' if content.colors else 'folders and values'} match {known.title}"
        return _classes(named, reason, [*ignored, *strays], "as published", [*notes, *known.notes])
    _refuse_instances(content, stored, choices)
    if stored in ([0, 1], [(0, 0, 0), (255, 255, 255)]):
        names, reason, _ = _names_of_two((), masks)
        named = dict(zip(stored, names, strict=True))
    elif content.colors:
        reason = "replace with their names, in the palette's order"
        named = dict(zip(stored, (f"class_{number}" for number in range(len(stored))), strict=True))
    else:
        # ids from 0 with few gaps: an id that no mask holds may be a class that is rare
        is_dense = stored[-1] + 1 <= max(2 * len(stored), len(stored) + 3)
        is_dense &= stored[0] == 0 or len(stored) < stored[-1] or content.num_masks < content.num_all
        reason = "replace with their names, in this order"
        named = _placeholders(range(stored[-1] + 1) if is_dense else stored)
    unfit = [f"{described(file)} does not fit {listed(stored)}" for file in files if file.ids or not file.colors]
    why = f"{len(stored)} colors" if content.colors else "other values are ignored, and the first class is 0"
    return _classes(named, reason, strays, why, [*notes, *unfit[:1]])


def _ask_about_palettes(why: str, choices: MaskChoices) -> None:
    if why and choices.masks is None:
        answers = {"colors": "each color is a class", "ids": "each value is a class, whatever its color"}
        raise open_question(why, "--masks", answers)


def _clash(fit: FileFit, content: MaskContent) -> str:
    """Return a sentence on a value whose color in the palettes a file gives to another class; "" if there is none."""
    for value, (color, mask) in content.palettes.color_of.items():
        if fit.file.colors.get(color, said := fit.named.get(value)) != said:
            source = shown(fit.file.source)
            return f"{source} names {value} {said}, and its color in {shown(mask)} {fit.file.colors[color]}"
    return ""


def name_clash(used: FileFit, other: FileFit, stored: Sequence[Any]) -> list[str]:
    """Return a note on a value or color that two files name differently, if there is one."""
    for one in stored:
        names = [fit.named.get(one, "").strip("_ ").casefold() for fit in (used, other)]
        if all(names) and names[0] != names[1]:
            also = f"{shown(other.file.source)} names {listed([one])} {shown(other.named[one])}"
            return [f"{also}, but {shown(used.file.source)} is used: {shown(used.named[one])}; remove the wrong file"]
    return []


def _refuse_scales(content: MaskContent, choices: MaskChoices) -> None:
    """Raise DataError if some masks hold the ids of the others multiplied: 0, 127 and 254 next to 0, 1 and 2."""
    for factor, low, high in _scales(content.values) if choices.masks != "ids" else ():
        scaled, rest = ({mask for mask, own in content.values_of.items() if own & {*part}} for part in (high, low))
        if not scaled & rest:
            raise DataError(
                f"{len(scaled)} masks hold {listed(high)}, such as {shown(min(scaled))}, and {len(rest)} hold "
                f"{listed(low)}, such as {shown(min(rest))}, as if saved with another scale: divide the former "
                f"by {factor:g}; if these are different classes, add --masks ids"
            )


def _scales(known: Iterable[int]) -> Iterator[tuple[float, list[int], list[int]]]:
    """Yield each factor with which the high values are the ids of the low ones: equal ones, or 1 to n; 255 is void."""
    for void in ({0}, {0, IGNORED}):
        values = sorted({*known} - void)
        for count in range(1, min(len(values), IGNORED)):
            low, high = values[:-count], values[-count:]
            for ids in ([value // 257 for value in high], [*range(1, count + 1)], low):
                factor = high[-1] / max(ids[-1], 1)
                is_depth = {*ids} <= {*low} and (factor == 257 or (low == [1] and factor in (255, 65_535)))
                is_likely = is_depth or (factor >= _MIN_FACTOR and len({*ids} & {*low}) > 1)
                at = [id * factor for id in ids]  # levels of gray are rounded
                if is_likely and len(at) == count and all(abs(a - b) < 1 for a, b in zip(at, high, strict=True)):
                    yield factor, low, high


def _refuse_lossy(content: MaskContent, masks: Sequence[str]) -> None:
    """Raise DataError for JPEGs, for masks with too many colors, and if no mask can be read."""
    if content.lossy:
        raise DataError(
            f"{len(content.lossy)} of {content.num_masks} masks are JPEGs, such as {shown(content.lossy[0])}: "
            f"JPEG changes ids at every edge; {CLEANING}"
        )
    if not content.pixels:
        reason = "".join(f" ({why})" for why in [*content.unread.values()][:1])
        raise DataError(f"none of {content.num_all} masks can be read, such as {shown(masks[0])}{reason}")
    smooth = [mask for mask, own in content.values_of.items() if content.colors and len(own) > MAX_COLORS]
    if smooth or len(content.colors) > 2 * MAX_COLORS:
        raise DataError(
            f"{max(len(smooth), 1)} of {content.num_masks} masks contain neither ids nor fewer than "
            f"{MAX_COLORS} colors, such as {shown(smooth[0] if smooth else masks[0])}: they were "
            f"smoothed or saved with loss; {CLEANING}"
        )
