"""Tables next to the data as rows of text: CSV, TSV, JSON, JSON Lines, and lists with one name or pair per line."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from segapp.datasets.files import open_regular
from segapp.errors import DataError
from segapp.onboarding.survey.tree import Tree
from segapp.onboarding.survey.words import SPLIT_WORDS, is_trainval, tokens

_MAX_TABLE_BYTES = 64 * 2**20
_MAX_SIDECARS = 20
"""More files of one kind in a folder describe one image each; they are annotations rather than tables."""
_SUFFIXES = (".txt", ".lst", ".csv", ".tsv", ".json", ".jsonl")


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        path: relative to the root.
        header: names of the columns; empty: unknown.
        rows: the cells of each row, as text.
        row_splits: the split of each row, if the file divides its rows into splits; empty: it does not.
    """

    path: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    row_splits: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Its folder, relative to the root."""
        return self.path.rpartition("/")[0]

    @property
    def num_columns(self) -> int:
        """The number of columns that most rows have."""
        return Counter(map(len, self.rows)).most_common(1)[0][0] if self.rows else 0

    def column(self, number: int) -> list[str]:
        """Return the cells of a column; rows without it have an empty text."""
        return [row[number] if number < len(row) else "" for row in self.rows]

    @cached_property
    def split(self) -> str | None:
        """The split that the file's name says: "train", "val" or "test"."""
        return split_of_words(PurePosixPath(self.path).stem)


def split_of_words(name: str) -> str | None:
    """Return the one split that the words of a name say; trainval counts as training.

    >>> split_of_words("train_list"), split_of_words("trainval"), split_of_words("list")
    ('train', 'train', None)
    """
    if is_trainval(name):
        return "train"
    words = {SPLIT_WORDS[token.word] for token in tokens(name) if token.word in SPLIT_WORDS}
    return words.pop() if len(words) == 1 else None


def read_tables(tree: Tree) -> list[Table]:
    """Return the tables of a folder: those in folders of segmentation lists first, then those near the root."""
    paths = tree.others_named(*_SUFFIXES)
    crowds = Counter((path.rpartition("/")[0], PurePosixPath(path).suffix.lower()) for path in paths)
    found = []
    for path in paths:
        is_sidecar = crowds[path.rpartition("/")[0], PurePosixPath(path).suffix.lower()] > _MAX_SIDECARS
        if is_sidecar and split_of_words(PurePosixPath(path).stem) is None:
            continue
        if (table := read_table(tree, path)) is not None:
            found.append(table)
    return sorted(found, key=lambda table: ("seg" not in table.folder.lower(), table.folder.count("/"), table.path))


def read_table(tree: Tree, path: str) -> Table | None:
    """Return a table; None if the file cannot be read or holds no rows."""
    try:
        with open_regular(tree.root / path, None) as file:
            data = file.read(_MAX_TABLE_BYTES + 1)
    except (OSError, DataError):
        return None
    if len(data) > _MAX_TABLE_BYTES or b"\0" in data[:4096]:
        return None
    text = os.fsdecode(data.removeprefix(b"\xef\xbb\xbf"))
    suffix = PurePosixPath(path).suffix.lower()
    try:
        if suffix == ".json":
            return _from_json(path, json.loads(text))
        if suffix == ".jsonl":
            records = [json.loads(line) for line in text.splitlines() if line.strip()]
            return _from_records(path, [(None, record) for record in records])
    except (ValueError, RecursionError):
        return None
    rows = tuple(_delimited(text, suffix))
    return _with_header(path, rows) if rows else None


def _delimited(text: str, suffix: str) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each line: separated by tabs or commas, or by white space in lists."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for separator in ("\t", ",", ";"):
        if lines and sum(separator in line for line in lines) >= 0.9 * len(lines):
            for row in csv.reader(lines, delimiter=separator):
                yield tuple(cell.strip() for cell in row)
            return
    for line in lines:
        cells = (line,) if suffix in (".csv", ".tsv") else line.split()
        yield tuple(cell.strip().strip('"') for cell in cells)


def _with_header(path: str, rows: tuple[tuple[str, ...], ...]) -> Table:
    """Return the table; its first row is a header if its cells are plain words that no other row repeats."""
    first = rows[0]
    is_header = (
        len(rows) > 1
        and path.lower().endswith((".csv", ".tsv"))
        and all(cell and "/" not in cell and "." not in cell and not cell.isdigit() for cell in first)
        and not any(cell in row for row in rows[1:50] for cell in first)
    )
    return Table(path, first, rows[1:]) if is_header else Table(path, (), rows)


def _from_json(path: str, content: Any) -> Table | None:
    """Return the table of a JSON file: a list of records, or lists of names or of records by split."""
    if isinstance(content, list):
        return _from_records(path, [(None, one) for one in content])
    if not isinstance(content, Mapping):
        return None
    by_split = [(split_of_words(str(key)), value) for key, value in content.items() if isinstance(value, list)]
    if len(by_split) >= 2 and all(split is not None for split, _ in by_split):
        return _from_records(path, [(split, one) for split, value in by_split for one in value])
    records = [value for value in content.values() if isinstance(value, list) and _are_flat(value)]
    return _from_records(path, [(None, one) for one in records[0]]) if len(content) == len(records) == 1 else None


def _are_flat(records: Sequence[Any]) -> bool:
    return bool(records) and all(isinstance(one, Mapping) for one in records)


def _from_records(path: str, records: Sequence[tuple[str | None, Any]]) -> Table | None:
    header = list(dict.fromkeys(str(key) for _, one in records if isinstance(one, Mapping) for key in one))
    rows = []
    for _, one in records:
        if isinstance(one, Mapping):
            rows.append(tuple(_cell(one.get(key)) for key in header))
        elif isinstance(one, str | int):
            rows.append((str(one),))
        elif isinstance(one, list) and all(isinstance(cell, str | int) for cell in one):
            rows.append(tuple(map(str, one)))
        else:
            return None
    if not rows:
        return None
    splits = tuple(split for split, _ in records if split is not None)
    return Table(path, tuple(header), tuple(rows), splits if len(splits) == len(rows) else ())


def _cell(value: Any) -> str:
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
