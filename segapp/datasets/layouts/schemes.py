"""Classes of a data set and the ids of its mask files: `ClassScheme`, and the published data sets (`published.toml`).

Colors are RGB in 0..255. The palettes of indexed masks say the class of a pixel a second time.
"""

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from segapp.datasets.files import shown
from segapp.datasets.walk import composed
from segapp.errors import ConfigError
from segapp.scores import foreground_of

Color = tuple[int, int, int]
BLACK_AND_WHITE = {0: (0, 0, 0), 1: (255, 255, 255)}


def parse_colors(text: str) -> tuple[Color, ...]:
    """Return colors from six hexadecimal digits each, separated by white space.

    >>> parse_colors("804080 f423e8")
    ((128, 64, 128), (244, 35, 232))
    """
    return tuple((code >> 16, code >> 8 & 255, code & 255) for code in (int(word, 16) for word in text.split()))


def parse_names(text: str) -> tuple[str, ...]:
    """Return names separated by commas, over any number of lines.

    >>> parse_names("road, traffic light")
    ('road', 'traffic light')
    """
    return tuple(" ".join(name.split()) for name in text.split(","))


def bit_palette(num_colors: int, *, first: int = 0) -> tuple[Color, ...]:
    """Return distinct colors by the rule of PASCAL VOC: bits of the index go in turn to red, green and blue.

    Index 0 is black, which published palettes use for background or ignored pixels.

    >>> bit_palette(4)
    ((0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0))
    """
    return tuple(
        (_spread(index), _spread(index >> 1), _spread(index >> 2)) for index in range(first, first + num_colors)
    )


def _spread(index: int) -> int:
    """Return every third bit of the index, placed from bit 7 downwards."""
    return sum((index >> 3 * bit & 1) << 7 - bit for bit in range(8))


def palette_of(image: Image.Image) -> dict[int, Color]:
    """Return the colors of the ids in a mask; none without a palette, or if it says nothing about the classes.

    A ramp of grays says nothing, and neither does an id with the color of a lower one: programs write both by default.
    """
    flat = (image.getpalette("RGB") if image.mode == "P" else None) or []
    colors = [*zip(flat[::3], flat[1::3], flat[2::3], strict=True)]
    counts = enumerate(zip(colors, image.histogram() if flat else (), strict=False))
    found = {index: color for index, (color, count) in counts if count and colors.index(color) == index}
    grays = [color for color in found.values() if len({*color}) == 1]
    return found if grays != sorted(grays) or len(grays) < len(found) or found == BLACK_AND_WHITE else {}


@dataclass
class Palettes:
    """The palettes of several masks, which must agree."""

    index_of: dict[Color, tuple[int, str | Path]] = field(default_factory=dict)
    color_of: dict[int, tuple[Color, str | Path]] = field(default_factory=dict)

    def add(self, source: str | Path, palette: Mapping[int, Color]) -> str:
        """Return how a palette disagrees with an earlier one: a color has two ids, or an id two colors; else ""."""
        for index, color in palette.items():
            at, earlier = self.index_of.setdefault(color, (index, source))
            if at != index:
                return f"the palettes disagree: {[*color]} is {at} in {shown(earlier)} and {index} in {shown(source)}"
            known, earlier = self.color_of.setdefault(index, (color, source))
            if known != color:
                two = f"{[*known]} in {shown(earlier)} and {[*color]} in {shown(source)}"
                return f"the palettes disagree: {index} is {two}"
        return ""


@dataclass(frozen=True)
class PublishedSet:
    """The classes of a published data set."""

    title: str
    names: tuple[str, ...]  # by train id
    colors: tuple[Color, ...]  # one per class; empty: none are published
    ignored_colors: tuple[Color, ...]
    values: Mapping[int, str]  # id in a mask file -> class name
    # Id in a mask file -> train id, None for ignored; None: ids are train ids
    label_map: Mapping[int, int | None] | None
    ignored_ids: tuple[int, ...]  # ignored ids in mask files at the paths of `masks`
    groups: Mapping[str, tuple[str, ...]]  # group -> names of its classes
    images: str  # regular expression of its image stems; other images in such folders have other classes
    masks: str  # regular expression of the paths of its masks; empty: paths do not tell
    notes: tuple[str, ...]  # notes for users about classes

    @property
    def palette(self) -> dict[Color, str]:
        """Color -> name; if classes share a color, the name of the first."""
        return {color: self.names[self.colors.index(color)] for color in dict.fromkeys(self.colors)}


def _set(table: Mapping[str, Any]) -> PublishedSet:
    names = parse_names((_TABLES["sets"][table["names_of"]] if "names_of" in table else table)["names"])
    first_id = table.get("first_id", 0)
    ids = table.get("file_ids", range(first_id, first_id + len(names)))
    train_ids = {file_id: number for number, file_id in enumerate(ids)}
    return PublishedSet(
        table["title"],
        names,
        parse_colors(table.get("colors", "")),
        parse_colors(table.get("ignored_colors", "")),
        dict(zip(ids, names, strict=True)),
        {**dict.fromkeys(range(table["num_ids"])), **train_ids} if "num_ids" in table else None,
        tuple(table.get("ignored_ids", ())),
        {group: parse_names(members) for group, members in table.get("groups", {}).items()},
        table.get("images", ""),
        table.get("masks", ""),
        tuple(table.get("notes", ())),
    )


_TABLES = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))
PUBLISHED: Mapping[str, PublishedSet] = {key: _set(table) for key, table in _TABLES["sets"].items()}
FORMATS: Mapping[str, Mapping[str, Any]] = _TABLES["formats"]
"""The formats by their names in a config; each has the arguments of `DatasetFormat` except the classes."""


MAX_CLASSES = 32_767
UNKNOWN_ID = -32_768
"""Entry of `ClassScheme.table` for unknown ids."""


@dataclass(frozen=True)
class ClassScheme:
    """The classes of a data set and their ids or colors in its mask files."""

    names: tuple[str, ...]  # in the order of their train ids
    palette: tuple[Color, ...]  # one RGB color per class, for images
    label_map: Mapping[int, int] | None = None  # id in the file -> train id or `ignore_index`; others are train ids
    ignore_index: int = 255  # target value of pixels that losses and scores leave out
    rgb: bool = False  # masks have the colors of `mask_colors`; a color's position there is the id in the file
    # Colors of RGB masks; empty: the palette. Positions beyond the classes are ignored without a `label_map` entry.
    mask_colors: tuple[Color, ...] = ()
    train_id_suffix: str | None = None  # ending of mask names whose files hold train ids
    # How masks store several classes per pixel (see `data.multilabel`): a target is then a set of classes, bit c for
    # class c, and -1 (`ignore_index`) for ignored pixels. None: one class per pixel.
    multilabel: Literal["files", "channels", "bits"] | None = None
    ignored_value: int | None = None  # value of ignored pixels in masks of several classes; None: there are none
    # Palettes of the masks that were read, which must agree; None: they are not compared
    palettes: Palettes | None = field(default=None, compare=False, repr=False)
    mask_orientation: Literal["upright", "raw"] | None = None  # of masks whose sizes do not tell (see `orientation`)

    @property
    def num_classes(self) -> int:
        return len(self.names)

    @property
    def foreground(self) -> Sequence[str]:
        """Names of the classes but the background; empty without one, and with several classes per pixel."""
        return () if self.multilabel is not None else foreground_of(self.names)

    @property
    def dtype(self) -> np.dtype[np.uint8] | np.dtype[np.int16] | np.dtype[np.int32]:
        """Dtype of a target: uint8 if all ids, `ignore_index` and one unused value fit, else int16; int32 for sets."""
        if self.multilabel is not None:
            return np.dtype(np.int32)
        fits = self.num_classes <= 254 and 0 <= self.ignore_index <= 255
        return np.dtype(np.uint8) if fits else np.dtype(np.int16)

    @property
    def unused_id(self) -> int:
        """A value of the target's dtype that is neither a class nor `ignore_index`."""
        if self.dtype == np.int16:
            return UNKNOWN_ID
        return self.num_classes + (self.ignore_index == self.num_classes)

    def count(self, mask: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
        """Return the number of pixels of each class in a mask of train ids, (C,), and the number of ignored pixels."""
        if mask.dtype == self.dtype == np.uint8:
            values = _histogram(mask)
            return values[: self.num_classes], int(values[self.ignore_index])
        valid = mask[mask != self.ignore_index]
        if self.multilabel is None:
            counts = np.bincount(valid, minlength=self.num_classes)
        else:
            counts = np.array([np.count_nonzero(valid & (1 << number)) for number in range(self.num_classes)])
        return counts, int(mask.size - valid.size)

    @cached_property
    def file_ids(self) -> tuple[int, ...]:
        """The file id of every train id: the lowest if there are several; the train id itself if there is none."""
        inverse = {train_id: train_id for train_id in range(self.num_classes)}
        inverse |= {train_id: file_id for file_id, train_id in sorted((self.label_map or {}).items(), reverse=True)}
        return tuple(inverse[train_id] for train_id in range(self.num_classes))

    @cached_property
    def table(self) -> NDArray[np.int16]:
        """Id in an index mask (0..65535) -> train id, `ignore_index` or `UNKNOWN_ID`; shape (65536,)."""
        table = self.train_id_table.copy()
        for file_id, train_id in (self.label_map or {}).items():
            if 0 <= file_id < len(table):
                table[file_id] = train_id
        return table

    @cached_property
    def train_id_table(self) -> NDArray[np.int16]:
        """Id in a mask that holds train ids -> the same id or `UNKNOWN_ID`; shape (65536,)."""
        table = np.full(65_536, UNKNOWN_ID, np.int16)
        table[: self.num_classes] = np.arange(self.num_classes)
        if self.ignore_index >= 0:
            table[self.ignore_index] = self.ignore_index
        return table

    @cached_property
    def color_table(self) -> dict[Color, int]:
        """Color in an RGB mask -> train id or `ignore_index`."""
        label_map = self.label_map or {}
        colors = self.mask_colors or self.palette
        default = [i if i < self.num_classes else self.ignore_index for i in range(len(colors))]
        return {color: label_map.get(i, default[i]) for i, color in enumerate(colors)}


def _histogram(values: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the number of pixels of each value, (256,), in blocks, because `bincount` makes an int64 of each pixel."""
    flat, counts = values.reshape(-1), np.zeros(256, np.int64)
    for start in range(0, flat.size, 1 << 20):
        counts += np.bincount(flat[start : start + (1 << 20)], minlength=256)
    return counts


def check_names(format: str, names: tuple[str, ...]) -> None:
    """Raise ConfigError for no names, duplicate names, or more names than a target can hold."""
    if not names:
        raise ConfigError(
            f"format {format} needs classes: list the class names in the order of their ids", key="data.classes"
        )
    twice = [name for name, count in Counter(map(composed, names)).items() if count > 1]
    if twice:
        raise ConfigError(
            f"classes: {twice[0]!r} is listed twice: give every class a different name",
            key="data.classes",
            value=twice[0],
        )
    if len(names) > MAX_CLASSES:
        raise ConfigError(f"classes: {len(names)} names, at most {MAX_CLASSES} are possible", key="data.classes")


def without_id(ignored: int, to: int, ids: Iterable[int]) -> dict[int, int]:
    """Return the label map that maps one of the ids of masks to `to`, and the others to the classes from 0 on.

    >>> without_id(1, 255, range(4))
    {0: 0, 1: 255, 2: 1, 3: 2}
    """
    return {value: to if value == ignored else value - (value > ignored) for value in ids}


def instead_of_class(names: Sequence[str], ignored: int, label_map: Mapping[int, int] | None, *, is_fixed: bool) -> str:
    """Return why an `ignore_index` is refused, and the keys that ignore these pixels instead."""
    to, num = default_ignore_index(len(names)), len(names)
    if not 0 <= ignored < num or is_fixed:
        why = "is a class of the format" if 0 <= ignored < num else "must be within -32767..32767"
        return f"{why}: leave data.ignore_index out, which is {to} then"
    ways = []
    if not label_map:
        new = without_id(ignored, to, range(num + 1))
        ways.append(f"if it marks pixels of none of the {num} classes, set data.label_map: {new}")
    if num > 2:
        ids = {value: value for value in range(num)} | dict(label_map or {})
        classes = without_id(ignored, to, range(num)) | {to: to}
        new = {value: classes[train_id] for value, train_id in ids.items() if train_id in classes}
        ways.append(f"to ignore {names[ignored]}, remove it from data.classes and set data.label_map: {new}")
    does = "; ".join(f"{way} and data.ignore_index: {to}" for way in ways) or f"use data.ignore_index: {to}"
    return f"is the id of the class {names[ignored]}: {does}"


def default_ignore_index(num_classes: int) -> int:
    """Return the value of ignored pixels if the config names none."""
    return 255 if num_classes <= 255 else -1


def check_label_map(
    label_map: Mapping[int, int] | None, num_classes: int, ignore_index: int, num_colors: int | None
) -> None:
    """Raise ConfigError if an entry maps to neither a class nor `ignore_index`, or from an id that no file can hold.

    The ids of RGB masks are the positions of `num_colors` colors; None: the masks hold ids.
    """
    for file_id, train_id in (label_map or {}).items():
        if not 0 <= train_id < num_classes and train_id != ignore_index:
            raise ConfigError(
                f"label_map: {file_id} -> {train_id} is not a class id: map to 0..{num_classes - 1}, "
                f"or to ignore_index={ignore_index}",
                key="data.label_map",
                value={file_id: train_id},
            )
        if not 0 <= file_id <= 65_535:
            raise ConfigError(
                f"label_map: no mask can contain the id {file_id}: ids in files are 0..65535",
                key="data.label_map",
                value={file_id: train_id},
            )
        if num_colors is not None and file_id >= num_colors:
            raise ConfigError(
                f"label_map: {file_id} is the position of no color: data.palette has {num_colors} colors, from 0 to "
                f"{num_colors - 1}",
                key="data.label_map",
                value={file_id: train_id},
            )


def check_colors(colors: tuple[Color, ...], num_classes: int, *, rgb: bool, declared: bool) -> None:
    """Raise ConfigError for a wrong number of colors, or for missing or ambiguous colors of RGB masks."""
    if rgb and not declared:
        raise ConfigError(
            "RGB masks need a palette: list one color per class, in the order of the classes", key="data.palette"
        )
    if len(colors) < num_classes or (len(colors) > num_classes and not rgb):
        raise ConfigError(
            f"palette has {len(colors)} colors for {num_classes} classes: give one color per class", key="data.palette"
        )
    twice = [color for color, count in Counter(colors).items() if count > 1]
    if rgb and twice:
        raise ConfigError(
            f"palette: the color {list(twice[0])} is used for two classes: give each class a different color",
            key="data.palette",
            value=list(twice[0]),
        )
