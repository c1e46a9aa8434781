"""Class names from the files next to the data: lists, tables, YAML, JSON of labelling tools.

A file gives names by the value in the mask, by colour, or in an order; a file that is none of the known kinds gives
nothing. Every reader takes text, so that a test needs no file.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from segapp.datasets.files import shown
from segapp.datasets.layouts.published_classes import Color
from segapp.onboarding.survey.tree import Tree

_MAX_FILE_BYTES = 64 * 2**20
_MAX_DEPTH = 3
_LIST_NAMES = re.compile(
    r"(?i)^(_?class(es)?|labels?|label_?names?|class_?names?|categor(y|ies)|names|obj|codes|predefined_classes|"
    r"object_?names?|.*_(classes|class_names|labels))\.(txt|names|lst)$"
)
_COLOR_LISTS = re.compile(
    r"(?i)^(?:.*[_-])?(label_?map|label_?colou?rs|colou?r_?map|class_?dict|palette|class_?colou?rs)\.txt$"
)
_TABLES = re.compile(r"(?i)^.*(class|label|categor|colou?r|palette).*\.csv$")
_JSONS = re.compile(
    r"(?i)^(dataset|meta|config.*|id2label|class_?list|classes|labels|categories|_?annotations.*"
    r"|obj_class_to_machine_color)\.json$"
)
_YAMLS = re.compile(r"(?i)^(data|dataset|classes|labels|.*data.*)\.ya?ml$")


def nearest_first(files: Sequence[ClassFile], mask: str) -> list[ClassFile]:
    """Return class files in their order, but those that share most words with the path of a mask first.

    Two versions of labels have a class file each: `config_v2.0.json` names the classes of `v2.0/labels`.
    """
    words = set(re.findall(r"[a-z]+|\d+(?:\.\d+)*", mask.lower()))

    def shared(file: ClassFile) -> int:
        return len(words & set(re.findall(r"[a-z]+|\d+(?:\.\d+)*", file.source.rpartition(".")[0].lower())))

    return sorted(files, key=lambda file: -shared(file))


@dataclass(frozen=True)
class ClassFile:
    """Class names from a file.

    Attributes:
        source: the file, relative to the root.
        names: in the order of the file.
        ids: value in the mask -> name, if the file says it.
        colors: colour in the mask -> name, if the file says it.
    """

    source: str
    names: tuple[str, ...]
    ids: Mapping[int, str] = field(default_factory=dict)
    colors: Mapping[Color, str] = field(default_factory=dict)


VOID_NAMES = frozenset(
    [
        "void", "ignore", "ignored", "unlabeled", "unlabelled", "unknown", "nodata", "undefined", "unannotated",
        "unclassified", "dontcare",
    ]
)  # fmt: skip
"""Names of pixels that count nowhere, without their blanks and marks; `background` and `other` are classes."""


def is_void(name: str) -> bool:
    """Return True for the usual names of pixels that count nowhere.

    >>> [is_void(name) for name in ("Unlabelled", "no data", "don't care", "__ignore__", "background", "other")]
    [True, True, True, True, False, False]
    >>> is_void("void--unlabeled"), is_void("void--car-mount")
    (True, False)
    """
    parts = re.split(r"--| - ", name)  # Mapillary Vistas: groups and names
    return any(re.sub(r"[\W_]+", "", part).lower() in VOID_NAMES for part in (name, parts[-1]))


def is_background(name: str) -> bool:
    """Return True for the usual names of the class of pixels without an object."""
    return name.strip("_ ").lower() in {"background", "bg"}


def find_class_files(tree: Tree) -> list[ClassFile]:
    """Return the class names of all files that hold some: with values or colours first, then near the root."""
    found = []
    for path in tree.others_named(".csv", ".txt", ".names", ".lst", ".json", ".yaml", ".yml"):
        name = path.rpartition("/")[2]
        reader = _reader_of(name)
        if reader is None or path.count("/") > _MAX_DEPTH:
            continue
        data = tree.read(path, _MAX_FILE_BYTES + 1)
        if not data or len(data) > _MAX_FILE_BYTES:
            continue
        try:
            read = reader(data.decode("utf-8-sig"), path)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, csv.Error, yaml.YAMLError, RecursionError):
            continue  # another kind of file with such a name
        if read is not None and read.names:
            found.append(read)
    return sorted(found, key=lambda one: not (one.ids or one.colors))


def _reader_of(name: str) -> Callable[[str, str], ClassFile | None] | None:
    if name.lower() == "objectinfo150.txt":
        return read_object_info
    if _TABLES.match(name):
        return read_table
    if _COLOR_LISTS.match(name):
        return read_color_list
    if _LIST_NAMES.match(name):
        return read_name_list
    if _JSONS.match(name):
        return read_json
    return read_yaml if _YAMLS.match(name) else None


def read_table(text: str, source: str) -> ClassFile | None:
    r"""Return the classes of a CSV file with a header: name and r, g, b, or a pixel value and a class, in any order.

    >>> read_table("Pixel Value, Class\n0, sky\n1, road", "").ids
    {0: 'sky', 1: 'road'}
    >>> read_table("name,r,g,b\nroad,128,64,128", "").colors
    {(128, 64, 128): 'road'}
    """
    rows = [
        [cell.strip() for cell in row] for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)
    ]
    if len(rows) == 0:
        return None
    header = [cell.lower() for cell in rows[0]]
    name_at = _column(header, "name", "class", "label", "class_name", "class name", "category", "classes", "title")
    rgb_at = [_column(header, letter, word) for letter, word in (("r", "red"), ("g", "green"), ("b", "blue"))]
    id_at = _column(header, "pixel value", "id", "value", "class_id", "index", "pixel_value", "label_id", "train_id")
    if name_at is None:
        ids = {int(row[0]): row[1] for row in rows if len(row) == 2 and row[0].isdigit()}
        return ClassFile(source, tuple(ids.values()), ids) if len(ids) == len(rows) else None
    rows = [row for row in rows[1:] if len(row) > name_at and row[name_at]]
    names = tuple(row[name_at] for row in rows)
    colors = {}
    if None not in rgb_at:
        red, green, blue = (int(at) for at in rgb_at if at is not None)
        colors = {(int(row[red]), int(row[green]), int(row[blue])): row[name_at] for row in rows}
    ids = {int(row[id_at]): row[name_at] for row in rows} if id_at is not None and id_at != name_at else {}
    return ClassFile(source, names, ids, colors)


def _column(header: list[str], *names: str) -> int | None:
    return next((header.index(name) for name in names if name in header), None)


def read_color_list(text: str, source: str) -> ClassFile | None:
    """Return the classes of lines with a name and a colour: CVAT's `name:r,g,b::`, `r g b name`, `id name r g b`."""
    colors: dict[Color, str] = {}
    names = []
    for line in _meant_lines(text):
        numbers = re.search(r"(?<![\w.])(\d{1,3})[,\s]+(\d{1,3})[,\s]+(\d{1,3})(?![\w.])", line)
        if numbers is None:
            return read_name_list(text, source)
        name = (line[: numbers.start()] + " " + line[numbers.end() :]).strip(" \t:,;")
        name = re.sub(r"^\d+[\s:,]+(?=\D)", "", name)  # its number in the list
        red, green, blue = (int(number) for number in numbers.groups())
        colors[red, green, blue] = name
        names.append(name)
    return ClassFile(source, tuple(names), {}, colors)


def read_name_list(text: str, source: str) -> ClassFile | None:
    r"""Return the classes of a list: one a line, perhaps with its id or its colour.

    >>> read_name_list("0: sky\n1: road", "").ids
    {0: 'sky', 1: 'road'}
    """
    lines = _meant_lines(text)
    if not lines or any(len(line) > 120 for line in lines):
        return None
    if all(re.search(r"\b\d{1,3}[,\s]+\d{1,3}[,\s]+\d{1,3}\b", line) for line in lines):
        return read_color_list(text, source)
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


def read_object_info(text: str, source: str) -> ClassFile | None:
    r"""Return the classes of ADE20K's list: number, frequencies and name in columns; 0 is what has none of the names.

    >>> read_object_info("Idx\tRatio\tName\n1\t0.16\twall\n2\t0.1\thouse, villa", "").ids
    {0: 'unlabeled', 1: 'wall', 2: 'house'}
    """
    rows = [line.split("\t") for line in _meant_lines(text)[1:]]
    ids = {0: "unlabeled"} | {int(row[0]): row[-1].partition(",")[0].strip() for row in rows}
    return ClassFile(source, tuple(ids.values()), ids)


def _meant_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def read_yaml(text: str, source: str) -> ClassFile | None:
    """Return the `names` of a YOLO data.yaml, or `classes`: a list, or id -> name."""
    content = yaml.safe_load(text)
    named = content.get("names", content.get("classes", content.get("labels")))
    if isinstance(named, Mapping):
        ids = {int(key): str(name) for key, name in named.items()}
        return ClassFile(source, tuple(ids.values()), ids)
    names = tuple(str(name) for name in named)
    return ClassFile(source, names)


def read_json(text: str, source: str) -> ClassFile | None:
    """Return the classes of COCO, nnU-Net, Supervisely, Mapillary, A2D2, Hugging Face (id2label), or a plain list."""
    content: Any = json.loads(text)
    if isinstance(content, list):
        if all(isinstance(name, str) for name in content):
            return ClassFile(source, tuple(content))
        content = {"categories": content}
    if "categories" in content:
        ids = {int(one["id"]): str(one["name"]) for one in content["categories"]}
        colors = {_color(one["color"]): str(one["name"]) for one in content["categories"] if "color" in one}
        return ClassFile(source, tuple(ids.values()), ids, colors)
    if isinstance(content.get("classes"), list) and all(isinstance(one, dict) for one in content["classes"]):
        names = tuple(str(one["title"]) for one in content["classes"])
        colors = {_color(one["color"]): str(one["title"]) for one in content["classes"] if "color" in one}
        return ClassFile(source, names, {}, colors)
    labels = content.get("labels", content)
    if isinstance(labels, list):
        names = tuple(str(one.get("readable") or one["name"]) for one in labels)
        colors = {_color(one["color"]): name for one, name in zip(labels, names, strict=True) if "color" in one}
        return ClassFile(source, names, dict(enumerate(names)), colors)
    if labels and all(re.fullmatch(r"#[0-9a-fA-F]{6}", key) for key in labels):  # A2D2: colour -> name
        colors = {_color(key): str(name) for key, name in labels.items()}
        return ClassFile(source, tuple(colors.values()), {}, colors)
    if labels and all(key.isdigit() for key in labels):
        ids = {int(key): str(name) for key, name in labels.items()}
    else:
        ids = {int(value): str(name) for name, value in labels.items() if not isinstance(value, list | dict | str)}
    ids = dict(sorted(ids.items()))
    return ClassFile(source, tuple(ids.values()), ids)


def _color(value: Any) -> Color:
    if isinstance(value, str):
        code = int(value.lstrip("#")[:6], 16)
        return code >> 16, code >> 8 & 255, code & 255
    red, green, blue = (int(part) for part in value[:3])
    return red, green, blue


def described(found: ClassFile) -> str:
    """Return a file and what it holds as text."""
    kind = "by colour" if found.colors else "by value" if found.ids else "in order"
    return f"{shown(found.source)} ({len(found.names)} names {kind})"
