"""Tables of run lengths, such as Kaggle's: each CSV row has an image, perhaps a class, and "start length start ...".

Rows of an image are united. Pixels are numbered down the columns or along the rows, from 0 or 1. The correct order is
the one in which shapes are smooth instead of ragged; for square images, the table's column names decide.
"""

import csv
import io
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from segapp.datasets.files import open_regular, shown
from segapp.errors import DataError
from segapp.onboarding.conversion import UNUSABLE, Images, check_classes
from segapp.onboarding.layout import Layout, evenly
from segapp.onboarding.pieces import Plane, both_readings, overlap_share, pairs_of_planes
from segapp.onboarding.tree import Tree, known_words, role_of

_RUNS = re.compile(r"\s*\d+ +\d+( +\d+ +\d+)*\s*")
_EMPTY = {"", "nan", "none", "null", "-1", "-1.0"}
_RUN_NAMES, _CLASS_NAMES = known_words("columns", "run_lengths"), known_words("columns", "classes")
_BY_ROWS = {("img", "rlemask"), ("id", "segmentation"), ("id", "annotation")}
"""Names of the image and run columns in published tables that number the pixels along the rows: Carvana, UW-Madison
tract, Sartorius. Other published tables number them down the columns: Severstal, TGS, Airbus, clouds, HuBMAP."""
_NUM_LOOKED = 200
_NUM_DECODED = 24
_RAGGED = 1.2  # borders are this much longer in the wrong order
_MIN_FOUND = 0.3
_ORDERS = {"F": "columns", "C": "rows"}


@dataclass(frozen=True)
class _Table:
    """A table of run lengths: the names of its image and run columns, and image, class and runs of each row."""

    path: str
    columns: tuple[str, str]
    rows: tuple[tuple[str, str, str], ...]


def find_rle(tree: Tree) -> list[Layout]:
    """Return the conversions of tables of run lengths: one, or one per possible interpretation."""
    images = Images(replace(tree, images=tuple(path for path in tree.images if not _is_in_folder_of_masks(path))))
    paths = [path for path in tree.others_named(".csv") if "submission" not in path.rpartition("/")[2].lower()]
    tables = [table for path in paths if (table := _read(tree, path, images)) is not None]
    if not tables:
        return []
    return _conversions(tree, images, tables)


def _is_in_folder_of_masks(path: str) -> bool:
    roles = [role_of(folder) for folder in path.split("/")[:-1]]
    return any(role.is_mask for role in roles) and not any(role.is_image for role in roles)


def _normal(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _read(tree: Tree, path: str, images: Images) -> _Table | None:
    """Return a table; None for a file without runs of existing images."""
    limit = csv.field_size_limit(sys.maxsize)  # cells may hold megabytes
    try:
        with io.TextIOWrapper(open_regular(tree.root / path, None), "utf-8-sig", "replace", newline="") as file:
            return _parse(path, csv.reader(file), images)
    except (OSError, DataError, csv.Error):
        return None
    finally:
        csv.field_size_limit(limit)


def _parse(path: str, cells: Iterator[list[str]], images: Images) -> _Table | None:
    head = next(cells, [])
    if not 2 <= len(head) <= 100:
        return None
    looked = [row for row, _ in zip(cells, range(_NUM_LOOKED), strict=False) if len(row) == len(head)]
    runs = _run_column(head, looked)
    if runs is None:
        return None
    values = [list(dict.fromkeys(row[i] for row in looked)) for i in range(len(head))]
    counts = {
        (i, is_joined): sum(images.find(_image_in(value, is_joined), path) is not None for value in values[i])
        / max(1, len(values[i]))
        for i in range(len(head))
        if i != runs
        for is_joined in (False, True)
    }
    (column, is_joined), share = max(counts.items(), key=lambda one: one[1])
    if share < _MIN_FOUND:
        return None
    classes = [i for i, name in enumerate(head) if _normal(name) in _CLASS_NAMES and i not in (column, runs)]
    label = None if is_joined or not classes else classes[0]
    rows = []
    for row in [*looked, *cells]:
        if len(row) != len(head):
            continue
        value = row[column]
        name = row[label] if label is not None else value.rpartition("_")[2] if is_joined else ""
        text = row[runs].strip()
        rows.append((_image_in(value, is_joined), name.strip(), "" if text.lower() in _EMPTY else text))
    return _Table(path, (head[column], head[runs]), tuple(rows))


def _image_in(value: str, is_joined: bool) -> str:
    return value.rpartition("_")[0] if is_joined else value


def _run_column(head: Sequence[str], rows: Sequence[Sequence[str]]) -> int | None:
    """Return the run column: by its name, or the only column whose runs ascend."""
    by_name, by_content = [], []
    for i, name in enumerate(head):
        cells = [row[i] for row in rows if row[i].strip().lower() not in _EMPTY]
        if not cells or not all(_RUNS.fullmatch(cell) for cell in cells):
            continue
        if _normal(name) in _RUN_NAMES:
            by_name.append(i)
            continue
        runs = [np.array(cell.split(), np.int64) for cell in cells]
        ascend = all((own[2::2] >= own[:-2:2] + own[1:-2:2]).all() for own in runs)
        if ascend and any(len(own) >= 6 for own in runs):
            by_content.append(i)
    found = by_name or by_content
    return found[0] if len(found) == 1 else None


def _conversions(tree: Tree, images: Images, tables: Sequence[_Table]) -> list[Layout]:
    by_image: dict[str, list[tuple[str, str]]] = defaultdict(list)
    tables_of: dict[str, _Table] = {}
    total = 0
    for table in tables:
        places = {said: images.find(said, table.path) for said in dict.fromkeys(row[0] for row in table.rows)}
        total += len(places)
        for said, name, runs in table.rows:
            if (image := places[said]) is not None:
                by_image[image].append((name, runs))
                tables_of.setdefault(image, table)
    if not any(runs for rows in by_image.values() for _, runs in rows):
        return []
    evidence = (
        f"{len(tables)} {'tables' if len(tables) > 1 else 'table'} of run lengths, such as {shown(tables[0].path)}",
        f"{len(by_image)} of {total} images that it names are there",
    )
    coverage = len(by_image) / total
    notes = _notes_on_empty(tree, tables, by_image)
    labels_said = {name for rows in by_image.values() for name, _ in rows}
    labels = sorted(labels_said, key=lambda name: (int(name), "") if name.isdigit() else (sys.maxsize, name))
    names = ["object"] if labels in ([], [""]) else [f"class_{name}" if name.isdigit() else name for name in labels]
    check_classes(["background", *names], tables[0].path)
    is_named = labels != [""] and not labels[0].isdigit()
    first = 0 if any(runs.split(" ", 1)[0] == "0" for table in tables for _, _, runs in table.rows) else 1
    orders = _orders(images, by_image, tables[0], first)

    def planes(order: str, image: str, size: tuple[int, int]) -> dict[int, Plane]:
        united: dict[int, list[str]] = defaultdict(list)
        for name, runs in by_image[image]:
            if runs:
                united[labels.index(name)].append(runs)
        return {number: decode_starts(" ".join(runs), *size, first, order) for number, runs in united.items()}

    several = [image for image, rows in by_image.items() if len({name for name, runs in rows if runs}) > 1]
    samples = evenly(several, _NUM_DECODED) if len(names) > 1 else []
    share = overlap_share(list(planes("F", image, images.size_of(image)).values()) for image in samples)
    found = []
    for order, (confidence, reason) in orders.items():
        base = Layout(
            "rle" if len(orders) == 1 else f"rle-{_ORDERS[order]}",
            (),
            confidence * coverage,
            (*evidence, f"pixels are numbered by {_ORDERS[order]} from {first}: {reason}"),
            tuple(table.path for table in tables),
            title="tables of run lengths",
            classes_reason="from the table" if is_named else "replace with their names",
            notes=notes,
        )
        entries = {}
        for image, rows in by_image.items():
            path = tables_of[image].path if image in tables_of else ""
            origin = f"{shown(path)}: image {shown(image)}" if path else f"{shown(image)} without a row"
            entries[image] = (origin, (order, first, rows), path)
        pairs_of = partial(pairs_of_planes, images, entries, partial(planes, order), len(labels))
        found += both_readings(share, names, base, pairs_of)
    return found


def _notes_on_empty(
    tree: Tree, tables: Sequence[_Table], by_image: dict[str, list[tuple[str, str]]]
) -> tuple[str, ...]:
    """Return notes on images without objects; images without a row become background if no row is empty.

    A table with empty rows lists every image, so an image without a row was not annotated.
    """
    notes = []
    empty = [image for image, rows in by_image.items() if not any(runs for _, runs in rows)]
    folders = {image.rpartition("/")[0] for image in by_image}
    silent = [path for path in tree.images if path not in by_image and path.rpartition("/")[0] in folders]
    if silent and any(not runs for table in tables for _, _, runs in table.rows):
        notes.append(
            f"{len(silent)} images without a row are not used, such as {shown(silent[0])}: the table has empty rows "
            "for images without objects"
        )
    elif silent:
        by_image |= {image: [] for image in silent}
        notes.append(f"{len(silent)} images without a row are background, such as {shown(silent[0])}")
    if empty:
        notes.append(f"{len(empty)} images whose runs are empty are background, such as {shown(empty[0])}")
    return tuple(notes)


def _orders(
    images: Images, by_image: dict[str, list[tuple[str, str]]], table: _Table, first: int
) -> dict[str, tuple[float, str]]:
    """Return the possible orders of the pixels, each with its confidence and the reason, the most likely first."""
    borders = Counter({"F": 0, "C": 0})  # number of neighbors that differ
    longest = sorted(
        ((image, runs) for image, rows in by_image.items() for _, runs in rows if runs), key=lambda one: -len(one[1])
    )
    for image, runs in evenly(longest, _NUM_DECODED):
        try:
            height, width = images.size_of(image)
            if height == width:
                continue
            for order in borders:
                mask = decode_starts(runs, height, width, first, order)
                borders[order] += int((mask[1:] != mask[:-1]).sum() + (mask[:, 1:] != mask[:, :-1]).sum())
        except UNUSABLE:
            continue
    (worst, most), (best, least) = borders.most_common()
    if most > _RAGGED * least:
        return {best: (0.97, f"by {_ORDERS[worst]} the shapes are {most / max(1, least):.1f} times as ragged")}
    columns = tuple(map(_normal, table.columns))
    if columns in _BY_ROWS or columns[1] in _RUN_NAMES - {"mask", "runs", "segmentation", "annotation"}:
        own, other = ("C", "F") if columns in _BY_ROWS else ("F", "C")
        said = f"as in published tables with the column {table.columns[1]}"
        return {own: (0.95, said), other: (0.3, "unlike published tables with such columns")}
    why = "the shapes of square images do not tell"
    return {"F": (0.9, why), "C": (0.9, why)}


def decode_starts(runs: str, height_px: int, width_px: int, first: int = 1, order: str = "F") -> Plane:
    """Return the pixels (H, W) of runs "start length start length ..."; without runs there are no pixels.

    >>> decode_starts("1 2 4 1", 2, 2).astype(int).tolist()
    [[1, 0], [1, 1]]

    Pixels are numbered from `first` (0 or 1) down the columns ("F") or along the rows ("C"). ValueError is raised if a
    number is missing or invalid, or a run leaves the image.
    """
    numbers = np.array(runs.split(), np.int64)
    if len(numbers) % 2:
        raise ValueError(f"{len(numbers)} numbers, which are not pairs of a start and a length")
    starts, lengths = numbers[0::2] - first, numbers[1::2]
    size = height_px * width_px
    if (wrong := (starts < 0) | (lengths < 0) | (starts + lengths > size)).any():
        start, length = starts[wrong][0] + first, lengths[wrong][0]
        raise ValueError(f"the run {start} {length} leaves the image of {width_px} x {height_px} pixels")
    changes = np.zeros(size + 1, np.int32)
    np.add.at(changes, starts, 1)
    np.add.at(changes, starts + lengths, -1)
    covered = np.cumsum(changes[:-1]) > 0
    return covered.reshape((height_px, width_px), order=order)  # type: ignore[call-overload, no-any-return]
