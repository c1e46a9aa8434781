"""Data set formats: the image and mask pairs of a folder, and the classes of their ids.

The formats are rows of a table (`DATASETS`): where images and masks are below the root, how their names end, and which
file lists a split. One search serves all formats except `list`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from segapp.datasets.demo import DEMO_ROOT
from segapp.datasets.files import ImagePair, shown
from segapp.datasets.layouts.pairing import (
    FolderLayout,
    RootGuard,
    existing_folder,
    find_images,
    list_lines,
    listed_pairs,
    match_masks,
)
from segapp.datasets.layouts.schemes import (
    FORMATS,
    PUBLISHED,
    ClassScheme,
    Color,
    Palettes,
    bit_palette,
    check_colors,
    check_label_map,
    check_names,
    default_ignore_index,
    instead_of_class,
)
from segapp.datasets.walk import on_disk
from segapp.errors import ConfigError, DataError, accepted_words, closest_words


@dataclass(frozen=True)
class DataLocation:
    """Location of a data set and the naming of its files."""

    format: str  # a key of `DATASETS`
    root: str | os.PathLike[str]  # the data set's folder, or the folder into which its archive was unpacked
    # Folder of the images below root, instead of the format's. `{split}` is replaced by the split's name; without it, a
    # subfolder with that name is used if it exists.
    image_dir: str | None = None
    mask_dir: str | None = None  # folder of the masks, relative to root, in the same way; format `list`: None is root
    image_suffix: str | None = None  # ending of image names, instead of the format's
    mask_suffix: str | None = None  # ending of mask names, instead of the format's
    list_dir: str | None = None  # folder of the split lists of format `list`; None: root
    # File, relative to root, that is 0 where masks are ignored; `*`: the image's name, or the last column of a `list`
    valid_area: str | None = None
    allow_outside_root: bool = False  # accept files outside root too: linked from it, or named by a `list` file
    # Classes that have their own mask files: `{class}` in mask_dir or mask_suffix is replaced by the name, and a line
    # of a list names the masks in this order. Empty: one mask for all.
    mask_classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DatasetFormat:
    """Data set format: its layouts and, if published, its classes."""

    expected: str  # the layout in words, for error messages
    source: str  # where to get the data
    # Tried in this order; the first whose folders exist is used. Empty: pairs are listed in a file.
    layouts: tuple[FolderLayout, ...] = ()
    roots: tuple[str, ...] = (".",)  # folders below the root into which archives unpack; tried in this order
    splits: Mapping[str, str] = field(default_factory=dict)  # published names of "train" and "val", if they differ
    names: tuple[str, ...] = ()  # class names; empty: given by the user
    palette: tuple[Color, ...] = ()  # one color per class; empty: generated
    # Id in the file -> train id, None for ignored; None: ids are train ids
    label_map: Mapping[int, int | None] | None = None
    train_id_suffix: str | None = None  # ending of mask names whose files hold train ids
    usual_px: tuple[int, int] | None = None  # usual height and width of its images, for a plan without the data


def _described(name: str, table: Mapping[str, Any]) -> DatasetFormat:
    """Return a format of `published.toml` with the classes of its data set."""
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    layouts = [{**each, "mask_suffixes": tuple(each.get("mask_suffixes", ()))} for each in table.get("layouts", ())]
    given["layouts"] = tuple(FolderLayout(**each) for each in layouts)
    if (known := PUBLISHED.get(name)) is not None:
        given |= {"names": known.names, "palette": known.colors, "label_map": known.label_map}
    return DatasetFormat(**given)


DATASETS: dict[str, DatasetFormat] = {name: _described(name, table) for name, table in FORMATS.items()}


def _format(format: str) -> DatasetFormat:
    if format not in DATASETS:
        raise ConfigError(
            f"data.format = {format!r} is not known: {accepted_words(format, DATASETS)}",
            key="data.format",
            value=format,
        )
    return DATASETS[format]


def class_scheme(
    format: str,
    *,
    classes: Sequence[str] | None = None,
    palette: Sequence[Sequence[int]] | None = None,
    label_map: Mapping[int, int] | None = None,
    ignore_index: int | None = None,
    rgb: bool | None = False,
    multilabel: Literal["files", "channels", "bits"] | None = None,
) -> ClassScheme:
    """Return the classes of a format; the user's values replace the published ones.

    Args:
        format: A key of `DATASETS`.
        classes: Names in the order of their train ids; required for `folder` and `list`.
        palette: RGB colors of 0..255, one per class. With `rgb`, more colors may follow: they are ignored pixels, or
            classes if `label_map` maps their positions to classes.
        label_map: Id in the mask file (with `rgb`: position in the palette) -> train id or `ignore_index`.
        ignore_index: Target value of pixels that losses and scores leave out; None: 255, or -1 with more than 255
            classes.
        rgb: Masks are RGB images with the colors of the palette; None: of ids, and palettes in them must agree.
        multilabel: How masks store several classes per pixel; None: one class per pixel. `ignore_index` is then the
            value of ignored pixels in the masks; None: there are none.

    Raises:
        ConfigError: Names, colors, map and ignore_index do not fit together.
    """
    known = _format(format)
    names = tuple(classes) if classes is not None else known.names
    check_names(format, names)
    has_own_classes = classes is not None and len(names) != len(known.names)
    colors = () if has_own_classes else known.palette
    if palette is not None:
        colors = tuple((red, green, blue) for red, green, blue in palette)
    colors = colors or bit_palette(len(names), first=1)
    check_colors(colors, len(names), rgb=bool(rgb), declared=palette is not None)
    if multilabel is not None:
        return ClassScheme(names, colors, ignore_index=-1, multilabel=multilabel, ignored_value=ignore_index)
    ignored = default_ignore_index(len(names)) if ignore_index is None else int(ignore_index)
    # A target is int16 at most, whose lowest value marks unknown ids.
    if not -32_767 <= ignored <= 32_767 or 0 <= ignored < len(names):
        advice = instead_of_class(names, ignored, label_map, is_fixed=bool(known.names) and not has_own_classes)
        raise ConfigError(f"ignore_index={ignored} {advice}", key="data.ignore_index", value=ignored)
    train_id_suffix = known.train_id_suffix if label_map is None else None
    if label_map is None and known.label_map is not None and not rgb:
        if has_own_classes:
            raise ConfigError(
                f"format {format} maps its ids to {len(known.names)} classes, but {len(names)} classes are given: "
                "give label_map too, or leave classes out",
                key="data.label_map",
            )
        label_map = {file_id: ignored if to is None else to for file_id, to in known.label_map.items()}
    check_label_map(label_map, len(names), ignored, len(colors) if rgb else None)
    scheme = ClassScheme(
        names=names,
        palette=colors[: len(names)],
        label_map=dict(label_map) if label_map else None,
        ignore_index=ignored,
        rgb=bool(rgb),
        mask_colors=colors if rgb else (),
        train_id_suffix=train_id_suffix,
    )
    # Palettes in the files are compared with these colors: if they disagree, the masks are no ids of these classes.
    if rgb is None:
        declared = zip(colors if palette is not None else (), scheme.file_ids, strict=False)
        scheme = replace(scheme, palettes=Palettes({color: (index, "data.palette") for color, index in declared}))
    if not rgb or label_map is None:
        return scheme
    # A label map reorders the colors, and a class has the color of its position in the files.
    return replace(scheme, palette=tuple(colors[file_id] for file_id in scheme.file_ids))


def find_pairs(location: DataLocation, split: str) -> tuple[ImagePair, ...]:
    """Return the image and mask pairs of a split, sorted by name.

    Names are matched exactly or, if that finds nothing, regardless of case and Unicode composition. Hidden files are
    ignored. A mask without an image is ignored; an image without a mask is an error.

    "train" and "val" are replaced by the published names of the format.

    Raises:
        DataError: The root, the split or a mask is missing; the message describes the expected layout and where to get
            the data. Or a file or folder is outside the root; the root itself may be a link.
        ConfigError: The format is unknown.
    """
    known = _format(location.format)
    folder, how_to_get = Path(location.root), check_root(location)
    guard = RootGuard(folder, is_open=location.allow_outside_root)
    area = (location.valid_area or "").replace("{split}", split)
    if not known.layouts:
        list_file = _list_file(location, split)
        if location.list_dir is None:
            guard.check(list_file)
        place = Path(os.path.normpath(folder / (location.mask_dir or "")))  # as named: the root may be a link
        masks = RootGuard(place, "data.mask_dir", is_open=location.allow_outside_root) if location.mask_dir else guard
        return listed_pairs(list_file, guard, masks, how_to_get, max(1, len(location.mask_classes)), area)
    base, layout = _choose_layout(known, location, split)
    images = find_images(base, layout, guard, how_to_get)
    names = location.mask_classes or ("",)
    found = [match_masks(base, _for_class(layout, name), images, guard, how_to_get, area) for name in names]
    pairs = [
        replace(first, others=tuple(pair.mask for pair in rest if pair.mask is not None))
        for first, *rest in zip(*found, strict=True)
    ]
    guard.check_all(pairs)
    return tuple(sorted(pairs, key=lambda pair: os.fsencode(pair.name)))


def check_root(location: DataLocation) -> str:
    """Return the expected layout and where to get the data; raise DataError if the root is not a folder."""
    known, folder = _format(location.format), Path(location.root)
    source = known.source if location.root != DEMO_ROOT else "segapp train --config demo.yaml draws it"
    how_to_get = f"format {location.format} expects {known.expected} below data.root; get it: {source}"
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(
            f"data root {shown(folder)} {what}: {_meant_folder(folder)}{how_to_get}",
            key="data.root",
            path=folder,
            value=location.root,
        )
    return how_to_get


def check_split(location: DataLocation, split: str) -> None:
    """Raise DataError if the root, or the folder or list of a split, is missing; the images are not looked for."""
    how_to_get = check_root(location)
    if not _format(location.format).layouts:
        list_lines(_list_file(location, split), how_to_get)
        return
    base, layout = _choose_layout(_format(location.format), location, split)
    existing_folder(base / layout.image_dir, how_to_get)
    if layout.split_file is not None:
        list_lines(base / layout.split_file, how_to_get)


def _list_file(location: DataLocation, split: str) -> Path:
    return Path(location.root if location.list_dir is None else location.list_dir) / f"{split}.txt"


def split_list(location: DataLocation, split: str) -> Path | None:
    """Return the file that lists the images of a split; None if the split is a folder."""
    known = _format(location.format)
    if not known.layouts:
        return _list_file(location, split)
    base, layout = _choose_layout(known, location, split)
    return base / layout.split_file if layout.split_file else None


def _meant_folder(folder: Path) -> str:
    """Return advice with the existing folder that is nearest to a missing one; "" if it exists or nothing is near."""
    above = next((each for each in folder.parents if each.is_dir()), None)
    if folder.exists() or above is None:
        return ""
    # The first missing part of the path is the mistake; the others depend on it.
    wanted = folder.relative_to(above).parts[0]
    there = sorted(each.name for each in above.iterdir() if each.is_dir() and not each.name.startswith("."))
    found = closest_words(wanted, there)
    if found:
        return f"did you mean {shown(above / found[0])}? "
    return f"there is no {shown(wanted)} in {shown(above.resolve())}: check data.root and the current folder; "


def _choose_layout(known: DatasetFormat, location: DataLocation, split: str) -> tuple[Path, FolderLayout]:
    """Return the first root and layout whose images or split file exist, else the format's first; names filled in."""
    folder, split = Path(location.root), known.splits.get(split, split)
    candidates = [
        (folder / below, _fill_in(layout, location, folder / below, split))
        for below in known.roots
        for layout in known.layouts
    ]
    existing = (c for c in candidates if (c[0] / (c[1].split_file or c[1].image_dir)).exists())
    return next(existing, candidates[0])


def _for_class(layout: FolderLayout, name: str) -> FolderLayout:
    suffixes = tuple(suffix.replace("{class}", name) for suffix in layout.mask_suffixes)
    return replace(layout, mask_dir=layout.mask_dir.replace("{class}", name), mask_suffixes=suffixes)


def _fill_in(layout: FolderLayout, location: DataLocation, base: Path, split: str) -> FolderLayout:
    """Return the layout with the user's folders and endings, and the split's name instead of `{split}`.

    The images of a split are in their own folder or are listed in its file; masks of all splits may be in one folder.
    """

    def folder(own: str, users: str | None, *, is_shared: bool) -> str:
        if users and "{split}" in own and "{split}" not in users:
            tried = users.replace("{class}", next(iter(location.mask_classes), ""))
            users = users if is_shared and not on_disk(base / tried / split).is_dir() else f"{users}/{{split}}"
        return (users or own).replace("{split}", split)

    return FolderLayout(
        image_dir=folder(layout.image_dir, location.image_dir, is_shared=False),
        mask_dir=folder(layout.mask_dir, location.mask_dir, is_shared=True),
        image_suffix=location.image_suffix or layout.image_suffix,
        mask_suffixes=(location.mask_suffix,) if location.mask_suffix else layout.mask_suffixes,
        split_file=layout.split_file and layout.split_file.replace("{split}", split),
    )
