"""Class names from files next to the data: lists, tables, YAML, JSON of labeling tools.

A file gives names by mask value, by color, or in an order; a file of unknown kind gives nothing. Every reader takes
text, so tests need no files.
"""

import csv
import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from segapp.bounds import decoded
from segapp.config.yaml_reader import parse_yaml
from segapp.datasets.files import shown
from segapp.datasets.layouts.formats import DATASETS, DataLocation, find_pairs
from segapp.datasets.layouts.schemes import PUBLISHED, Color, PublishedSet
from segapp.errors import ConfigError, DataError
from segapp.onboarding.content import Value
from segapp.onboarding.fields import Field, FieldError
from segapp.onboarding.layout import Layout, Pair
from segapp.onboarding.tree import Tree, known_words

_MAX_FILE_BYTES = 64 * 2**20
_MAX_DEPTH = 3
_VOID_NAMES = known_words("classes", "void")


@dataclass(frozen=True)
class ClassFile:
    """Class names in the order of a file; by value or color in the mask, if the file has these."""

    source: str
    names: tuple[str, ...]
    ids: Mapping[int, str] = field(default_factory=dict)
    colors: Mapping[Color, str] = field(default_factory=dict)
    num_images: int | None = None  # training images, as nnU-Net counts them
    note: str = ""  # sentence on the names, or why the file is not used: then it has none


def is_void(name: str) -> bool:
    """Return True for the usual names of ignored pixels.

    >>> [is_void(name) for name in ("Unlabelled", "no data", "don't care", "__ignore__", "background", "other")]
    [True, True, True, True, False, False]
    >>> is_void("void--unlabeled"), is_void("void--car-mount")
    (True, False)
    """
    parts = re.split(r"--| - ", name)  # Mapillary Vistas: groups and names
    return any(re.sub(r"[\W_]+", "", part).lower() in _VOID_NAMES for part in (name, parts[-1]))


def find_class_files(tree: Tree, mask: str = "") -> list[ClassFile]:
    """Return the class names of all files that have some: with values or colors first, then near the root.

    A damaged file has no names, and a note that says why it is not used.

    Those that share the most words with the path of a mask precede others: two versions of labels have one class file
    each, so `config_v2.0.json` names the classes of `v2.0/labels`.
    """
    found = []
    for path in tree.others_named(".csv", ".txt", ".names", ".lst", ".json", ".yaml", ".yml"):
        name = path.rpartition("/")[2]
        reader = next((read for pattern, read in _READERS if re.fullmatch(pattern, name, re.IGNORECASE)), None)
        if reader is None or path.count("/") > _MAX_DEPTH:
            continue
        data = tree.read(path, _MAX_FILE_BYTES)
        try:
            text = decoded(data) if len(data) < _MAX_FILE_BYTES else ""
        except ValueError as error:  # the names would be lost without a word
            raise DataError(f"{shown(path)}: {error}, or remove it", path=path) from None
        try:
            read = reader(text, path)
        except FieldError as error:
            read = ClassFile(path, (), note=f"{shown(path)} is not used: {error}")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, csv.Error, ConfigError, RecursionError):
            continue  # another kind of file with such a name
        if read is not None and (read.names or read.note):
            found.append(read)
    word = re.compile(r"[A-Za-z]+|\d+(?:\.\d+)*")
    own = {*word.findall(mask)}

    def rank(file: ClassFile) -> tuple[int, bool]:
        shared = own.intersection(word.findall(file.source.rpartition(".")[0]))
        return -len(shared), not (file.ids or file.colors)

    return sorted(found, key=rank)


def read_table(text: str, source: str) -> ClassFile | None:
    r"""Return the classes of a CSV file with a header: name and r, g, b, or a pixel value and a class, in any order.

    >>> read_table("Pixel Value, Class\n0, sky\n1, road", "").ids
    {0: 'sky', 1: 'road'}
    >>> read_table("name,r,g,b\nroad,128,64,128", "").colors
    {(128, 64, 128): 'road'}
    """
    # Spreadsheets separate by semicolons in languages whose decimal point is a comma.
    separator = ";" if ";" in text.partition("\n")[0] else ","
    lines = csv.reader(io.StringIO(text), delimiter=separator)
    rows = [row for cells in lines if any(row := [cell.strip() for cell in cells])]
    if not rows:
        return None
    header = [cell.lower() for cell in rows[0]]
    name_at = _column(header, "name", "class", "label", "class_name", "class name", "category", "classes", "title")
    rgb_at = [_column(header, letter, word) for letter, word in (("r", "red"), ("g", "green"), ("b", "blue"))]
    id_at = _column(header, "pixel value", "id", "value", "class_id", "index", "pixel_value", "label_id", "train_id")
    if name_at is None:
        # Without a header, only a table in which each row is an id and a name is about classes.
        if not all(len(row) == 2 and re.fullmatch(r"\d+(\.0+)?", row[0]) for row in rows):
            return None
        return _class_file(source, [row[1] for row in rows], [row[0] for row in rows])
    rows = [row for row in rows[1:] if len(row) > name_at]
    keys = [row[id_at] for row in rows] if id_at is not None and id_at != name_at else None
    columns = [at for at in rgb_at if at is not None]
    colors = [[row[at] for at in columns] for row in rows] if len(columns) == 3 else None
    return _class_file(source, [row[name_at] for row in rows], keys, colors)


def _class_file(
    source: str, said: Sequence[Any], keys: Sequence[Any] | None = None, colors: Sequence[Any] | None = None
) -> ClassFile:
    """Return the classes of entries with their names, and their values and colors in the masks, if there are any.

    A name that is missing, or not text, is replaced, and noted. FieldError is raised if all are, for a value of two
    names, and for a value or a color that is none.
    """
    problems = list[str]()
    ids = [Field(key, f"the id of entry {at}").whole() for at, key in enumerate(keys or ())]
    places = range(len(said)) if keys is None else ids
    names = [
        Field(name, f"the name of {at}").name_or(f"class_{at}", problems) for at, name in zip(places, said, strict=True)
    ]
    if len(problems) == len(names) > 0:
        raise FieldError(problems[0].partition(": ")[0])
    named = dict(zip(ids, names, strict=False))
    if twice := [number for number, name in zip(ids, names, strict=False) if named[number] != name]:
        raise FieldError(f"{twice[0]} is the id of two names")
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    note = f"{shown(source)}: {problems[0]}{more}" if problems else ""
    by_color = {_color(one): name for one, name in zip(colors or (), names, strict=False) if one is not None}
    return ClassFile(source, tuple(names), named, by_color, note=note)


def _column(header: list[str], *names: str) -> int | None:
    return next((header.index(name) for name in names if name in header), None)


def read_list(text: str, source: str) -> ClassFile | None:
    r"""Return the classes of a list: one per line, perhaps with its id, or with its color: `name:r,g,b`, `r g b name`.

    >>> read_list("0: sky\n1: road", "").ids
    {0: 'sky', 1: 'road'}
    >>> read_list("road:128,64,128::", "").colors
    {(128, 64, 128): 'road'}
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    if not lines or any(len(line) > 120 for line in lines):
        return None
    colored = [re.search(r"(?<![\w.])(\d{1,3})[,\s]+(\d{1,3})[,\s]+(\d{1,3})(?![\w.])", line) for line in lines]
    if all(colored):
        colors = {}
        for match in filter(None, colored):
            name = f"{match.string[: match.start()]} {match.string[match.end() :]}".strip(" \t:,;")
            colors[_color(match.groups())] = re.sub(r"^\d+[\s:,]+(?=\D)", "", name)  # without its number in the list
        return ClassFile(source, tuple(colors.values()), {}, colors)
    numbered = [re.fullmatch(r"(\d+)\s*[:,;=\t ]\s*(.*\S)", line) for line in lines]
    if all(numbered):
        ids = {int(match[1]): match[2].strip("'\"") for match in numbered if match}
        return ClassFile(source, tuple(ids.values()), ids)
    if len(lines) == 1 and "," in lines[0]:
        lines = [name.strip() for name in lines[0].split(",")]
    names = tuple(line.strip("'\", ") for line in lines)
    if names[:2] == ("__ignore__", "_background_"):  # labelme's list begins with the name of value -1
        names = names[1:]
    return ClassFile(source, names)


def read_yaml(text: str, source: str) -> ClassFile | None:
    """Return the `names` of a YOLO data.yaml, or `classes`: a list, or id -> name."""
    content, _ = parse_yaml(text, source)
    named = content.get("names", content.get("classes", content.get("labels")))
    if named is None:
        return None
    if isinstance(named, Mapping):
        found = _class_file(source, [*named.values()], [*named])
    else:
        found = _class_file(source, [name.value for name in Field(named, "the list of names").items()])
    said, num = content.get("nc", len(found.names)), len(found.names)
    note = f"{shown(source)} says nc {shown(str(said))}, and has {num} names" if said != num else ""
    return replace(found, note="; ".join(filter(None, (found.note, note))))


def read_json(text: str, source: str) -> ClassFile | None:
    """Return the classes of COCO, nnU-Net, Mapillary, Hugging Face (id2label), or a plain list."""
    content: Any = json.loads(text)
    if isinstance(content, list):
        if not any(isinstance(name, Mapping) for name in content):
            return _class_file(source, content)
        content = {"categories": content}
    if "categories" in content:
        return _of_entries(source, content["categories"], "name", [one["id"] for one in content["categories"]])
    labels = content.get("labels", content)
    if isinstance(labels, list):
        # Mapillary has a readable name next to a technical one.
        key = "readable" if all(one.get("readable") for one in labels) else "name"
        return _of_entries(source, labels, key, range(len(labels)))
    if labels and all(key.isdecimal() for key in labels):
        named = {int(key): name for key, name in labels.items()}
    else:
        # nnU-Net maps a name to its number, and names of regions to lists.
        named = {int(value): name for name, value in labels.items() if not isinstance(value, list | dict | str)}
    named = dict(sorted(named.items()))
    return replace(_class_file(source, [*named.values()], [*named]), num_images=content.get("numTraining"))


def _of_entries(source: str, entries: Sequence[Any], key: str, ids: Sequence[Any]) -> ClassFile:
    return _class_file(source, [one[key] for one in entries], ids, [one.get("color") for one in entries])


def _color(value: Any) -> Color:
    if isinstance(value, str):
        code = int(value.lstrip("#")[:6], 16)
        return code >> 16, code >> 8 & 255, code & 255
    red, green, blue = (Field(part, "a color").whole() for part in value[:3])
    if not all(0 <= part <= 255 for part in (red, green, blue)):
        raise FieldError(f"the color {red} {green} {blue} is not from 0 to 255")
    return red, green, blue


def described(found: ClassFile) -> str:
    kind = "by color" if found.colors else "by value" if found.ids else "in order"
    return f"{shown(found.source)} ({len(found.names)} names {kind})"


_READERS: Sequence[tuple[str, Callable[[str, str], ClassFile | None]]] = (
    (r".*(class|label|categor|colou?r|palette).*\.csv", read_table),
    (
        r"(.*[_-])?(label_?map|label_?colou?rs|colou?r_?map|class_?dict|palette|class_?colou?rs)\.txt"
        r"|(_?class(es)?|labels?|(label|class|object)_?names?|categor(y|ies)|names|obj|codes|predefined_classes"
        r"|.*_(classes|class_names|labels))\.(txt|names|lst)",
        read_list,
    ),
    (r"(dataset|meta|config.*|id2label|classes|labels|categories|_?annotations.*)\.json", read_json),
    (r"(data|dataset|classes|labels|.*data.*)\.ya?ml", read_yaml),
)
"""Names of files -> reader; the first pattern that matches a name is used."""


PALETTES = tuple(known for known in PUBLISHED.values() if known.colors)
"""The data sets whose masks may be images of colors."""
_MIN_RARE = 2  # number of colors that no other palette has and that do not occur by chance


def recognise(stored: Sequence[Value], mask: str) -> PublishedSet | None:
    """Return the data set with the folders of a mask and these values, or almost certainly with these colors.

    All colors are in the palette, and either it has no others, or two of them are in no other palette, or a folder is
    named after the data set. Few colors may come from an unknown data set: black, red, green and blue occur in most
    palettes.
    """
    if not isinstance(stored[0], tuple):
        fits = (one for one in PUBLISHED.values() if {*stored} <= one.values.keys() | {*one.ignored_ids})
        return next((one for one in fits if one.masks and re.search(one.masks, mask)), None)
    found = []
    colors = {color for color in stored if isinstance(color, tuple)}
    for palette in PALETTES:
        own, named = colors - {*palette.ignored_colors}, {*palette.colors}
        others = {color for other in PALETTES if _family(other) != _family(palette) for color in other.colors}
        plain = {color for color in own if {*color} <= {0, 255} or {*color} <= {0, 128}}  # red, green, blue, sums
        is_certain = len(own - plain - others) >= _MIN_RARE or own == named or _family(palette) in mask.lower()
        if own and own <= named and is_certain:
            found.append((len(own) / len(named), palette))
    return max(found, key=lambda one: one[0], default=(0, None))[1]


def _family(palette: PublishedSet) -> str:
    """Return the name that all palettes of a data set share."""
    return palette.title.lower().replace("pascal ", "").split()[0]


def published_layout(tree: Tree) -> Layout | None:
    """Return the layout of a published data set, named after its format; None for other folders."""
    for format, known in PUBLISHED.items():
        splits = [_pairs_of(tree.root, format, split) for split in ("train", "val")] if known.images else [[]]
        if not all(splits):
            continue
        pairs = [pair for found in splits for pair in found]
        if sum(re.fullmatch(known.images, Path(pair.image).stem) is not None for pair in pairs) < 0.9 * len(pairs):
            continue
        evidence = (f"folders and names of {format}: {DATASETS[format].expected}",)
        return Layout(format, tuple(pairs), 0.99, evidence)
    return None


def _pairs_of(root: Path, format: str, split: str) -> list[Pair]:
    """Return the pairs that a format of `DATASETS` finds, relative to the root; none if it finds no complete split."""
    try:
        found = find_pairs(DataLocation(format, root, allow_outside_root=True), split)
    except DataError:
        return []
    masked = ((pair.image, pair.mask) for pair in found if pair.mask is not None)
    return [Pair(os.path.relpath(image, root), os.path.relpath(mask, root), split) for image, mask in masked]
