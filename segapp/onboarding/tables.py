"""Tables next to the data as rows of text, and the pairs and data splits in them.

Tables are CSV, TSV, and lists with one name or pair per line.
"""

from __future__ import annotations

import codecs
import csv
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from segapp.datasets.files import shown
from segapp.datasets.walk import IMAGE_SUFFIXES, composed
from segapp.errors import DataError
from segapp.onboarding.conversion import Find, Images
from segapp.onboarding.hypotheses import common_affixes
from segapp.onboarding.layout import Layout, Pair, by_image
from segapp.onboarding.tree import (
    Tree,
    affixes,
    is_trainval,
    known_words,
    role_of,
    split_said,
    tokens,
    without_zeros,
)

_MAX_TABLE_BYTES = 64 * 2**20
_MAX_SIDECARS = 20
"""If a folder has more files of one kind, each describes one image; they are annotations, not tables."""
_MIN_FOUND = 0.9  # share of a list's names that must be images
_SPLIT_HEADERS, _GROUP_HEADERS = known_words("columns", "splits"), known_words("columns", "groups")


@dataclass(frozen=True)
class Table:
    """A table as rows of text; its header is empty if it is unknown."""

    path: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def folder(self) -> str:
        """Its folder, relative to the root."""
        return self.path.rpartition("/")[0]

    @property
    def num_columns(self) -> int:
        return Counter(map(len, self.rows)).most_common(1)[0][0] if self.rows else 0

    def column(self, number: int) -> list[str]:
        """Return the cells of a column; a missing cell is an empty text."""
        return [row[number] if number < len(row) else "" for row in self.rows]


def read_tables(tree: Tree) -> list[Table]:
    """Return the tables of a folder: first those in folders of segmentation lists, then those near the root."""
    paths = {path: PurePosixPath(path) for path in tree.others_named(".txt", ".lst", ".csv", ".tsv")}
    crowds = Counter((path.parent, path.suffix.lower()) for path in paths.values())
    found = []
    for name, path in paths.items():
        is_sidecar = crowds[path.parent, path.suffix.lower()] > _MAX_SIDECARS and split_said(path.name) is None
        if not is_sidecar and (table := read_table(tree, name)) is not None:
            found.append(table)
    return sorted(found, key=lambda table: ("seg" not in table.folder.lower(), table.folder.count("/"), table.path))


def read_table(tree: Tree, path: str) -> Table | None:
    """Return a table with its text in NFC; None if the file cannot be read or has no rows."""
    data = tree.read(path, _MAX_TABLE_BYTES + 1)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{shown(path)} is in UTF-16: save the file as UTF-8, or remove it", path=path)
    if not data or len(data) > _MAX_TABLE_BYTES or b"\0" in data[:4096]:
        return None
    text = composed(os.fsdecode(data.removeprefix(b"\xef\xbb\xbf")))
    rows = tuple(_delimited(text, PurePosixPath(path).suffix.lower()))
    if not rows:
        return None
    first = rows[0]  # it is a header if its cells are plain words that no other row repeats
    is_header = (
        len(rows) > 1
        and path.lower().endswith((".csv", ".tsv"))
        and all(cell and "/" not in cell and "." not in cell and not cell.isdecimal() for cell in first)
        and not any(cell in row for row in rows[1:50] for cell in first)
    )
    return Table(path, first, rows[1:]) if is_header else Table(path, (), rows)


def _delimited(text: str, suffix: str) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each line: separated by tabs or commas, or by white space in lists."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for separator in ("\t", ",", ";"):
        if lines and sum(separator in line for line in lines) >= 0.9 * len(lines):
            for row in csv.reader(lines, delimiter=separator):
                yield tuple(cell.strip() for cell in row)
            return
    for line in lines:
        # A CSV file without separators has one column, whose cells may contain spaces.
        cells = (line,) if suffix in (".csv", ".tsv") else line.split()
        yield tuple(cell.strip().strip('"') for cell in cells)


def paired_lists(tree: Tree, tables: Sequence[Table]) -> Layout | None:
    """Return the layout of the tables of the first folder whose rows have an image and its mask.

    DataError is raised if an image is in two splits, or has two masks.
    """
    find_image, find_mask = _finders(tree)
    by_folder: dict[str, list[Table]] = defaultdict(list)
    for table in tables:
        by_folder[table.folder].append(table)
    for same_folder in by_folder.values():
        pairs: dict[str, Pair] = {}
        num_rows, used = 0, []
        for table in same_folder:
            columns = _pair_columns(table, find_image)
            if columns is None:
                continue
            used.append(table.path)
            num_rows += len(table.rows)
            for pair in _rows_of(table, columns, find_image, find_mask):
                earlier = pairs.get(pair.image)
                if earlier is not None and None not in (earlier.split, pair.split) and earlier.split != pair.split:
                    raise DataError(_overlap([pair.image]))
                if earlier is not None and earlier.mask != pair.mask:
                    both = f"{earlier.mask} and {pair.mask}"
                    raise DataError(
                        f"{table.path}: {pair.image} has two masks, {both}: keep one of the rows", path=table.path
                    )
                if earlier is None or earlier.split is None:
                    pairs[pair.image] = pair
        # A column with the same few files in all rows does not hold the masks.
        if pairs and len({pair.mask for pair in pairs.values()}) > len(pairs) / 2:
            evidence = [f"{', '.join(used)}: {len(pairs)} pairs of image and mask"]
            if left_out := num_rows - len(pairs):
                evidence.append(f"{left_out} rows name no pair of files, or one named before")
            confidence = 0.99 * min(1.0, len(pairs) / num_rows)
            return Layout("lists", by_image([*pairs.values()]), confidence, tuple(evidence), tuple(used))
    return None


def _pair_columns(table: Table, find: Find) -> tuple[int, int] | None:
    """Return the columns of the images and of the masks; None if the table does not have both."""
    found = {}
    for number in range(table.num_columns):
        cells = [cell for cell in table.column(number) if cell]
        if cells and len(cells) >= 0.5 * len(table.rows):
            known = sum(find(cell, table.path) is not None for cell in cells)
            if known >= _MIN_FOUND * len(cells):
                found[number] = role_of(table.header[number]) if number < len(table.header) else role_of("")
    masks = [number for number, role in found.items() if role.is_mask and not role.is_other]
    images = [number for number, role in found.items() if not role.is_mask and not role.is_other]
    images.sort(key=lambda number: not found[number].is_image)
    if masks and images:
        return images[0], masks[0]
    # Lists without a header name the image first.
    return (images[0], images[1]) if len(images) == 2 and not found[images[1]].is_image else None


def _rows_of(table: Table, columns: tuple[int, int], find_image: Find, find_mask: Find) -> Iterable[Pair]:
    splits = _row_splits(table)
    named = (at for at, name in enumerate(table.header) if {token.word for token in tokens(name)} & _GROUP_HEADERS)
    groups = next(filter(all, map(table.column, named)), None)  # of a column such as patient_id
    for number, cells in enumerate(zip(*map(table.column, columns), strict=True)):
        image, mask = find_image(cells[0], table.path), find_mask(cells[1], table.path)
        if image is not None and mask is not None and image != mask:
            yield Pair(image, mask, splits[number], group=groups[number] if groups else None)


def _row_splits(table: Table) -> list[str | None]:
    """Return the split of each row: from its cell, or the file's name."""
    for number in range(table.num_columns):
        said = [split_said(cell) if cell else None for cell in table.column(number)]
        header = table.header[number].lower() if number < len(table.header) else ""
        is_named = any(token.word in _SPLIT_HEADERS for token in tokens(header))
        plain = all(len(tokens(cell)) <= 2 for cell in table.column(number))
        if plain and all(said) and (len(set(said)) > 1 or is_named):
            return said
    return [split_said(PurePosixPath(table.path).name)] * len(table.rows)


def with_listed_splits(tables: Sequence[Table], layout: Layout) -> Layout:
    """Return the layout with the splits in the tables of one folder, if no folder or name of the images says them.

    DataError is raised if an image is in the lists of two splits.
    """
    splits = {pair.split for pair in layout.pairs}
    if "train" in splits and not splits.isdisjoint(("val", "test")):
        return layout
    names = _NamedPairs(layout.pairs)
    by_folder: dict[str, dict[str, _Said]] = defaultdict(dict)
    notes = []
    for table in tables:
        said, missing = _said_by(table, names)
        if said:
            by_folder[table.folder][table.path] = said
        # A list of which most lines name nothing is of something else.
        if missing and 2 * len(missing) < len(table.rows) and split_said(PurePosixPath(table.path).name):
            some = f"{len(missing)} of its {len(table.rows)} lines name no image with a mask, such as {missing[0]}"
            notes.append(f"{table.path}: {some}: {'the others are' if said else 'the list is not'} used")
    layout = replace(layout, notes=(*layout.notes, *notes[:3]))
    found = (_divided(layout, lists) for lists in by_folder.values())
    return next((divided for divided in found if divided is not None), layout)


_Said = Sequence[tuple[str | None, Pair]]
"""The pairs that a table names, each with its split."""


def _said_by(table: Table, names: _NamedPairs) -> tuple[_Said, list[str]]:
    """Return the contents of a table about the pairs, empty if most rows name none of them, and the other rows."""
    columns = [
        [names.find(cell) if cell else () for cell in table.column(number)] for number in range(table.num_columns)
    ]
    columns.append([names.find(" ".join(row)) for row in table.rows])  # names with spaces
    best = max(columns, key=lambda column: sum(map(bool, column)), default=[])
    missing = [" ".join(row) for row, pairs in zip(table.rows, best, strict=True) if not pairs]
    if len(table.rows) - len(missing) < max(1, _MIN_FOUND * len(table.rows)):
        return (), missing
    return [(split, pair) for split, own in zip(_row_splits(table), best, strict=True) for pair in own], missing


def _divided(layout: Layout, lists: Mapping[str, _Said]) -> Layout | None:
    """Return the layout with the splits of lists; None if they do not divide it."""
    # A list trainval repeats the images of train and val, and would put them into both.
    plain = {path: pairs for path, pairs in lists.items() if not is_trainval(PurePosixPath(path).stem)}
    if {"train", "val"} <= {split for pairs in plain.values() for split, _ in pairs}:
        lists = plain
    said: dict[str, set[str]] = defaultdict(set)
    for pairs in lists.values():
        for split, pair in pairs:
            if split is not None:
                said[split].add(pair.image)
    used = [path for path, pairs in lists.items() if any(split is not None for split, _ in pairs)]
    if "train" not in said or len(said) < 2:
        return None
    evaluated = said.get("val") or said["test"]
    if both := sorted(said["train"] & evaluated):
        raise DataError(_overlap(both))
    # The later splits win, because a list of test images may repeat images for training.
    splits = {image: split for split in ("test", "val", "train") for image in said.get(split, ())}
    divided = tuple(replace(p, split=splits[p.image]) for p in layout.pairs if p.image in splits)
    evidence = [f"the splits come from {', '.join(used)}"]
    if left_out := len(layout.pairs) - len(divided):
        evidence.append(f"{left_out} pairs are in no list and are left out")
    return replace(layout, pairs=divided, evidence=(*layout.evidence, *evidence), sources=(*layout.sources, *used))


def _overlap(both: list[str]) -> str:
    return (
        f"{len(both)} validation images are also training images, such as {both[0]}: remove them from one of the lists"
    )


def _finders(tree: Tree) -> tuple[Find, Find]:
    """Return the functions that find the image and the mask for a cell of a table.

    Of files of one name, the mask lies in a folder with a word for masks, and the image in another folder.
    """
    known = Images(tree)

    def finder(*, in_masks: bool) -> Find:
        own = tuple(path for path in tree.images if role_of(path.rpartition("/")[0]).is_mask == in_masks)
        other = Images(replace(tree, images=own))
        return lambda cell, table: known.find(cell, table) or other.find(cell, table)

    return finder(in_masks=False), finder(in_masks=True)


class _NamedPairs:
    """Finds the pairs for a line of a list.

    It matches the path, the end of a path, the name or the stem of the image; the stem without the part that all stems
    share, or without role words; and the folder of a scene, which means all its pairs.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._by_name: dict[str, tuple[Pair, ...]] = {}
        self._loose: dict[str, tuple[Pair, ...]] = {}
        self._scenes: dict[str, list[Pair]] = defaultdict(list)
        paths = [PurePosixPath(composed(pair.image)) for pair in pairs]
        stems = [path.stem for path in paths]
        prefix, ending = common_affixes(stems)
        for pair, path, stem in zip(pairs, paths, stems, strict=True):
            for key in {str(path), str(path.with_suffix("")), path.name, stem}:
                # A name of two images means none of them.
                self._by_name[key] = () if key in self._by_name else (pair,)
            for key in {
                stem[len(prefix) : len(stem) - len(ending)],
                affixes(stem)[1],
                PurePosixPath(composed(pair.mask)).stem,
            }:
                for own in {key, without_zeros(key)} - {""}:
                    self._loose[own] = () if own in self._loose else (pair,)
            for key in {"/".join(pair.scene), *pair.scene[-1:]} - {""}:
                self._scenes[key].append(pair)

    def find(self, line: str) -> Sequence[Pair]:
        """Return the pairs; none if there are none, or if a name fits several images."""
        line = line.strip().replace("\\", "/").removeprefix("./").lstrip("/")
        name = PurePosixPath(line).name
        stem = name.rpartition(".")[0] if name.lower().endswith(IMAGE_SUFFIXES) else name
        for table, key in (
            (self._by_name, line),
            (self._by_name, name),
            (self._by_name, stem),
            (self._scenes, line.rstrip("/")),
            (self._loose, stem),
            (self._loose, without_zeros(stem)),
        ):
            if found := table.get(key):
                return found
        return ()
