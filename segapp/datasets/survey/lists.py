"""Text files that list the splits: names of images, or pairs of an image and its mask, one a line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

from segapp.datasets.files import open_regular
from segapp.datasets.layouts.pairing import IMAGE_SUFFIXES
from segapp.datasets.survey.hypotheses import Layout, Pair
from segapp.datasets.survey.tree import Tree
from segapp.datasets.survey.words import SPLIT_WORDS, tokens
from segapp.errors import DataError

_MAX_LIST_BYTES = 64 * 2**20
_MIN_FOUND = 0.9
"""Share of a list's names that must be images."""


def list_files(tree: Tree) -> dict[str, dict[str, str]]:
    """Return folder -> split -> list file, for files whose name says one split; folders of segmentation lists first."""
    found: dict[str, dict[str, str]] = {}
    for path in tree.others_named(".txt", ".lst", ".csv"):
        folder, _, name = path.rpartition("/")
        words = [SPLIT_WORDS[token.word] for token in tokens(name.rpartition(".")[0]) if token.word in SPLIT_WORDS]
        if len(words) == 1:
            found.setdefault(folder, {}).setdefault(words[0], path)
    return dict(sorted(found.items(), key=lambda item: ("seg" not in item[0].lower(), item[0].count("/"), item[0])))


def paired_lists(tree: Tree) -> Layout | None:
    """Return the layout that lists of image and mask say (Paddle's); None without such lists."""
    known = set(tree.images)
    for files in list_files(tree).values():
        pairs: dict[str, Pair] = {}
        num_lines = 0
        for split, path in files.items():
            for words in _columns(tree.root / path):
                num_lines += 1
                placed = _placed(words, path, known) if len(words) == 2 else None
                if placed is not None:
                    if (earlier := pairs.get(placed[0])) is not None and earlier.split != split:
                        raise DataError(_overlap([placed[0]]))
                    pairs[placed[0]] = Pair(*placed, split)
        if pairs and len(pairs) >= _MIN_FOUND * num_lines:
            shares = ", ".join(files.values())
            left_out = num_lines - len(pairs)
            evidence = [f"{shares} list {len(pairs)} pairs of image and mask"]
            if left_out:
                evidence.append(f"{left_out} lines name no pair of files and are left out")
            ordered = sorted(pairs.values(), key=lambda pair: os.fsencode(pair.image))
            return Layout("lists", tuple(ordered), 0.99 * len(pairs) / num_lines, tuple(evidence))
    return None


def with_listed_splits(tree: Tree, layout: Layout) -> Layout:
    """Return the layout with the splits that lists of names say, if no folder says them.

    Raises:
        DataError: an image is in the list of two splits.
    """
    if {"train", "val"} <= layout.splits.keys() or {"train", "test"} <= layout.splits.keys():
        return layout
    names = _Names(layout.pairs)
    for files in list_files(tree).values():
        if "train" not in files or len(files) < 2:
            continue
        said: dict[str, list[Pair]] = {}
        num_lines = 0
        for split, path in files.items():
            lines = [words[0] for words in _columns(tree.root / path) if words]
            num_lines += len(lines)
            said[split] = [pair for line in lines if (pair := names.find(line)) is not None]
        if sum(map(len, said.values())) < max(1, _MIN_FOUND * num_lines) or not said["train"]:
            continue
        _check_apart(said)
        splits = {pair.image: split for split, pairs in said.items() for pair in pairs}
        pairs = tuple(replace(p, split=splits[p.image], split_word=None) for p in layout.pairs if p.image in splits)
        lists = ", ".join(files.values())
        left_out = len(layout.pairs) - len(pairs)
        evidence = [f"the splits are those of {lists}"]
        if left_out:
            evidence.append(f"{left_out} pairs are in no list and are left out")
        return replace(layout, pairs=pairs, evidence=(*layout.evidence, *evidence))
    return layout


def _check_apart(said: dict[str, list[Pair]]) -> None:
    train = {pair.image for pair in said["train"]}
    evaluated = said.get("val") or said.get("test") or []
    if both := sorted({pair.image for pair in evaluated} & train):
        raise DataError(_overlap(both))


def _overlap(both: list[str]) -> str:
    return (
        f"{len(both)} validation images are training images too, such as {both[0]}: take them out of one of the lists"
    )


class _Names:
    """Finds the pair that a line of a list names: by path, the end of a path, the name or the stem of its image."""

    def __init__(self, pairs: tuple[Pair, ...]) -> None:
        self._by_name: dict[str, Pair | None] = {}
        for pair in pairs:
            path = PurePosixPath(pair.image)
            keys = {pair.image, str(path.with_suffix("")), path.name, path.stem}
            for key in keys:
                self._by_name[key] = None if key in self._by_name else pair

    def find(self, line: str) -> Pair | None:
        line = line.strip().lstrip("./")
        return self._by_name.get(line) or self._by_name.get(PurePosixPath(line).name) or self._by_name.get(_stem(line))


def _stem(line: str) -> str:
    name = PurePosixPath(line).name
    return name.rpartition(".")[0] if name.lower().endswith(IMAGE_SUFFIXES) else name


def _placed(words: list[str], list_path: str, known: set[str]) -> tuple[str, str] | None:
    """Return the image and the mask of a line, relative to the root, the list's folder or the folder above it."""
    clean = [os.path.normpath(word).lstrip("/") for word in words]
    folder = list_path.rpartition("/")[0]
    for base in dict.fromkeys(("", folder, folder.rpartition("/")[0])):
        paths = [os.path.normpath(os.path.join(base, word)) for word in clean]
        if all(path in known for path in paths):
            return paths[0], paths[1]
    tails = [word.partition("/")[2] for word in clean]  # the name of the data set's own folder in front
    return (tails[0], tails[1]) if all(tail in known for tail in tails) else None


def _columns(path: Path) -> Iterator[list[str]]:
    """Yield the columns of each line: separated by a tab, a comma or white space."""
    try:
        with open_regular(path) as file:
            data = file.read(_MAX_LIST_BYTES)
    except (OSError, DataError):
        return
    text = os.fsdecode(data.removeprefix(b"\xef\xbb\xbf"))
    for line in text.splitlines():
        line = line.strip()
        if line and not line.startswith("#"):
            for separator in ("\t", ",", None):
                words = [word.strip() for word in line.split(separator)]
                if len(words) > 1 or separator is None:
                    yield words
                    break
