"""The classes of masks, from what they hold and from the names beside the data: names, label map, palette, ignored ids.

One function for each way in which masks store classes; each says in words what it believes and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from segapp.datasets.files import shown
from segapp.datasets.layouts.published_classes import Color
from segapp.datasets.survey.class_files import ClassFile, described
from segapp.datasets.survey.content import MAX_COLORS, MaskContent, reason_unread
from segapp.datasets.survey.palettes import recognise, recognise_values
from segapp.errors import DataError

IGNORED = 255
_STRAY_SHARE = 1e-5
"""Share of the pixels below which a lone value is a stray one."""
_BINARY_STRAY_SHARE, _BINARY_SMOOTH_SHARE = 0.002, 0.1
_MAX_NAMED = 6


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
    """

    names: tuple[str, ...]
    names_reason: str
    label_map: Mapping[int, int] = field(default_factory=dict)
    label_map_reason: str = ""
    ignore_index: int | None = None
    palette: tuple[Color, ...] = ()
    palette_reason: str = ""
    notes: tuple[str, ...] = ()


def read_classes(content: MaskContent, files: Sequence[ClassFile], mask: str) -> Classes:
    """Return the classes of masks.

    Args:
        content: of the masks.
        files: class names beside the data.
        mask: path of a mask below the root.

    Raises:
        DataError: the masks do not say their classes: no ids, too many colours, saved with loss.
    """
    if content.num_lossy:
        raise DataError(
            f"{content.num_lossy} of {content.num_masks} masks are JPEGs, such as {shown(content.example['lossy'])}: "
            "JPEG changes ids at every edge; export them as PNG, or add --clean-masks, which writes copies beside the "
            "config with each pixel set to the nearest of the frequent values"
        )
    if not content.values and not content.colors:
        reason = f" ({reason_unread(content.unread[0])})" if content.unread else ""
        raise DataError(
            f"none of {content.num_all} masks can be read, such as {shown(mask)}{reason}: save them as PNG of ids"
        )
    if content.colors:
        return _from_colors(content, files)
    values = sorted(content.values)
    binary = _binary(content, files)
    return binary if binary is not None else _from_ids(content, values, files, mask)


def _from_colors(content: MaskContent, files: Sequence[ClassFile]) -> Classes:
    total = sum(content.colors.values())
    if content.num_smooth or len(content.colors) > 2 * MAX_COLORS:
        raise DataError(
            f"{max(content.num_smooth, 1)} of {content.num_masks} masks contain neither ids nor fewer than "
            f"{MAX_COLORS} colours, such as {shown(content.example.get('smooth', ''))}: they were smoothed or saved "
            "with loss; export them again without either, or add --clean-masks, which writes copies beside the config "
            "with each pixel set to the nearest of the frequent colours"
        )
    strays = {color for color in content.colors if _is_stray(content, color, total)}
    colors = [color for color in content.colors if color not in strays]
    note = _strays_note(content, sorted(strays), "colours")
    for file in files:
        unknown = [color for color in colors if color not in file.colors]
        if file.colors and sum(content.colors[color] for color in unknown) <= 0.05 * total:
            void = {color for color, name in file.colors.items() if _is_void(name)}
            named = {color: name for color, name in file.colors.items() if color not in void}
            ignored = [*sorted(void), *unknown, *sorted(strays)]
            notes = (f"{len(unknown)} colours are not in {shown(file.source)} and are ignored",) if unknown else ()
            return Classes(
                _unique(list(named.values())),
                f"from {described(file)}",
                palette=(*named, *dict.fromkeys(color for color in ignored if color not in named)),
                palette_reason=f"the colours of {shown(file.source)}" + ("; the last are ignored" if ignored else ""),
                notes=(*notes, *note),
            )
    known = recognise(colors)
    if known:
        first, others = known[0], ", ".join(palette.title for palette in known[1:])
        ignored = list(dict.fromkeys([*first.ignored, *sorted(strays)]))
        return Classes(
            first.names,
            f"the colours are those of {first.title}" + (f" (also possible: {others})" if others else ""),
            palette=(*first.colors, *ignored),
            palette_reason="as published" + ("; the last are ignored" if ignored else ""),
            notes=note,
        )
    names: tuple[str, ...]
    colors.sort()
    if colors == [(0, 0, 0), (255, 255, 255)]:
        names, reason = ("background", "object"), "black and white; replace with their names"
    else:
        names, reason = (
            tuple(f"class_{i}" for i in range(len(colors))),
            "replace with their names, in the palette's order",
        )
    ordered = _names_in_order(files, len(colors))
    if ordered is not None:
        names, reason = ordered.names, f"from {described(ordered)}: check that their order is the palette's"
    return Classes(
        names,
        reason,
        palette=(*colors, *sorted(strays)),
        palette_reason=f"the masks are images with {len(colors)} colours"
        + ("; the last are ignored" if strays else ""),
        notes=note,
    )


def _binary(content: MaskContent, files: Sequence[ClassFile]) -> Classes | None:
    """Return background and object, where masks hold 0 and 255 and hardly anything else; None where they do not."""
    total = sum(content.values.values())
    rest = sorted(value for value in content.values if value not in (0, 255))
    if not {0, 255} <= content.values.keys():
        return None
    share = sum(content.values[value] for value in rest) / total
    object_share = content.values[255] / total
    if rest and len(rest) < 16:
        is_counting = rest == list(range(1, len(rest) + 1))
        limit, factor = (_STRAY_SHARE, 100) if is_counting else (_BINARY_STRAY_SHARE, 20)
        few = len(rest) <= 3 and total < 1_000_000 and sum(content.values[value] for value in rest) <= 10
        if not (few or share < limit) or object_share < factor * share:
            return None
    elif rest and share > min(_BINARY_SMOOTH_SHARE, object_share):
        return None
    strays = rest if len(rest) < 16 else list(range(1, 255))
    names: tuple[str, ...] = ("background", "object")
    reason = "replace with their names"
    for file in files:
        if len(file.names) in (1, 2):
            names = _unique(["background", *file.names] if len(file.names) == 1 else list(file.names))
            reason = f"from {described(file)}"
            break
    why = "the masks contain only 0 and 255"
    if rest:
        why = f"0 and 255 are {1 - share:.3%} of the pixels; the rest is ignored"
    return Classes(
        names,
        reason,
        {255: 1, **dict.fromkeys(strays, -1)},
        why,
        ignore_index=-1,
        notes=_strays_note(content, rest, "values"),
    )


def _from_ids(content: MaskContent, values: list[int], files: Sequence[ClassFile], mask: str) -> Classes:
    total = sum(content.values.values())
    ignored_id = IGNORED if values[-1] <= 255 else -1
    ids = [value for value in values if value != ignored_id]
    if not ids:
        raise DataError("every pixel of the masks is 255, which is ignored: label some pixels with class ids")
    common = [value for value in ids if not _is_stray(content, value, total)]
    strays = [value for value in ids if value not in common and value > 2 * len(common) + 3]
    ids = [value for value in ids if value not in strays]
    notes = _strays_note(content, strays, "values")
    if ignored_id in values:
        notes = (*notes, f"value {IGNORED} is ignored: {content.values[IGNORED] / total:.1%} of the pixels")
    to_ignored = dict.fromkeys(strays, ignored_id)
    for file in files:
        found = _named_ids(file, ids)
        if found is not None:
            names, label_map, why = found
            return Classes(
                names,
                f"from {described(file)}",
                {**label_map, **to_ignored},
                why,
                notes=notes,
            )
    published = recognise_values(mask, ids)
    if published is not None:
        title, named, ignored = published
        order = {value: number for number, value in enumerate(sorted(named))}
        label_map = {} if all(k == v for k, v in order.items()) else order
        return Classes(
            tuple(named[value] for value in sorted(named)),
            f"folders and values are those of {title}",
            {**label_map, **dict.fromkeys(ignored, ignored_id), **to_ignored},
            f"the values of {title}",
            notes=notes,
        )
    unfit = [f"{described(file)} does not fit the values {_few(ids)}" for file in files if file.ids or not file.colors]
    dense = ids[-1] + 1 <= max(2 * len(ids), len(ids) + 3)
    dense &= ids[0] == 0 or len(ids) < ids[-1] or not content.is_complete
    named_ids = list(range(ids[-1] + 1)) if dense else ids
    names = tuple(f"class_{value}" for value in named_ids)
    if ids == [0, 1]:
        names = ("background", "object")
    return Classes(
        names,
        "replace with their names, in this order",
        {**({} if dense else {value: i for i, value in enumerate(ids)}), **to_ignored},
        "the values begin at 1, or have gaps" if not dense else "stray values are ignored",
        notes=(*notes, *unfit[:1]),
    )


def _named_ids(file: ClassFile, ids: list[int]) -> tuple[tuple[str, ...], dict[int, int], str] | None:
    """Return names, label map and its reason, if a file names all ids; None if not."""
    last = ids[-1]
    if file.ids and set(ids) <= file.ids.keys():
        void = [value for value, name in file.ids.items() if _is_void(name) and value != 0]
        named = {value: name for value, name in sorted(file.ids.items()) if value not in void and 0 <= value <= 65_535}
        order = {value: number for number, value in enumerate(named)}
        ignored = {value: IGNORED for value in void if value != IGNORED and 0 <= value <= 65_535}
        is_plain = not ignored and all(value == number for value, number in order.items())
        return _unique(list(named.values())), {} if is_plain else {**order, **ignored}, "the values of the file"
    if file.ids and set(ids) - {0} <= file.ids.keys() and 0 not in file.ids:
        named = dict(sorted(file.ids.items()))
        order = {0: 0, **{value: number for number, value in enumerate(named, start=1)}}
        is_plain = all(value == number for value, number in order.items())
        return _unique(["background", *named.values()]), {} if is_plain else order, "0 has no name: background"
    if file.ids:
        return None
    names = list(file.names)
    if last < len(names) <= max(last + 1, 2 * len(ids) + 3) and not (ids[0] > 0 and last == len(names)):
        return _unique(names), {}, ""
    if last == len(names) and 0 not in ids:
        return _unique(names), {value: value - 1 for value in range(1, last + 1)}, "the values begin at 1"
    if last == len(names) and 0 in ids:
        return _unique(["background", *names]), {}, ""
    return None


def _names_in_order(files: Sequence[ClassFile], count: int) -> ClassFile | None:
    return next((file for file in files if not file.colors and len(file.names) == count), None)


def _is_stray(content: MaskContent, value: int | Color, total: int) -> bool:
    pixels = content.values[value] if isinstance(value, int) else content.colors[value]
    is_rare = pixels < _STRAY_SHARE * total or pixels <= 3
    return is_rare and content.masks_with[value] <= max(1, content.num_masks // 50)


def _strays_note(content: MaskContent, strays: Sequence[int] | Sequence[Color], what: str) -> tuple[str, ...]:
    if not strays:
        return ()
    named = [
        f"{list(one) if isinstance(one, tuple) else one} "
        f"({content.colors[one] if isinstance(one, tuple) else content.values[one]} px)"
        for one in strays[:_MAX_NAMED]
    ]
    more = f" and {len(strays) - _MAX_NAMED} more" if len(strays) > _MAX_NAMED else ""
    return (f"stray {what} are ignored: {', '.join(named)}{more}",)


def _is_void(name: str) -> bool:
    return name.strip("_ ").lower() in {"void", "ignore", "ignored", "unlabeled", "unlabelled", "unknown", "no data"}


def _unique(names: list[str]) -> tuple[str, ...]:
    """Return the names, the second of equal ones with a number."""
    taken: dict[str, int] = {}
    unique = []
    for name in names:
        taken[name] = taken.get(name, 0) + 1
        unique.append(name if taken[name] == 1 else f"{name}_{taken[name]}")
    return tuple(unique)


def _few(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:_MAX_NAMED])) + (" ..." if len(values) > _MAX_NAMED else "")
