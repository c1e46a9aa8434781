"""Published data sets, read from `published.toml`: class names, colors, the ids in mask files, and their formats.

Colors are RGB in 0..255.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Color = tuple[int, int, int]


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
"""The data sets by their keys, such as "cityscapes"."""
FORMATS: Mapping[str, Mapping[str, Any]] = _TABLES["formats"]
"""The formats by their names in a config; each has the arguments of `DatasetFormat` except the classes."""
