"""Families of image files: those whose folders and names follow one pattern, such as all of `<split>/masks/*_mask`."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from segapp.onboarding.survey.words import SPLIT_WORDS, affixes, inner_role_word, is_trainval, role_of, split_in, tokens

_MAX_FAMILIES = 40
_MIN_NUMBERED = 3
"""Number of folders with the same name but for a number from which they are scenes rather than splits."""


@dataclass(frozen=True)
class ImageFile:
    """An image file below the root.

    Attributes:
        path: relative to the root.
        pattern: its folders: those with words of roles as they are, a split as `{split}`, any other as `*`.
        scenes: the folders that are `*`.
        split: "train", "val" or "test", if a folder says it.
        split_word: the split as the folder writes it.
    """

    path: str
    pattern: tuple[str, ...]
    scenes: tuple[str, ...]
    split: str | None
    split_word: str | None

    @cached_property
    def name(self) -> str:
        """The file's name."""
        return self.path.rpartition("/")[2]

    @cached_property
    def stem(self) -> str:
        """The name without its extension."""
        return self.name.rpartition(".")[0]

    @cached_property
    def suffix(self) -> str:
        """The extension with its dot, in lower case."""
        return "." + self.name.rpartition(".")[2].lower()


def parse_file(path: str, scenes_named: frozenset[str] = frozenset()) -> ImageFile:
    """Return an image file with the words of its folders.

    Args:
        path: relative to the root.
        scenes_named: folders whose names hold the word of a split by chance, as `Case_Training_001`.
    """
    pattern: list[str] = []
    scenes: list[str] = []
    split = word = None
    folders = path.split("/")[:-1]
    splits = [None if folder in scenes_named else split_in(folder) for folder in folders]
    for folder, said in zip(folders, splits, strict=True):
        if said is None and is_trainval(folder) and not any(splits):
            split, word = "train", folder
            pattern.append("{split}")
            continue
        if said is not None:
            split, shape = said
            start = shape.index("{split}")
            word = folder[start : len(folder) - (len(shape) - start - len("{split}"))]
            pattern.append(shape)
        elif role_of(folder) and folder not in scenes_named:
            pattern.append(folder)
        else:
            pattern.append("*")
            scenes.append(folder)
    return ImageFile(path, tuple(pattern), tuple(scenes), split, word)


@dataclass(frozen=True)
class Family:
    """Files that follow one pattern.

    Attributes:
        pattern: of their folders.
        ending: prefix and ending of their names, if the family is restricted to them: `img_*`, `*_mask`, `*.png`.
        files: in the order of the paths.
    """

    pattern: tuple[str, ...]
    ending: str
    files: tuple[ImageFile, ...]

    @cached_property
    def varying(self) -> tuple[int, ...]:
        """Positions in `ImageFile.scenes` that differ between files."""
        if not self.files or not self.files[0].scenes:
            return ()
        first = self.files[0].scenes
        return tuple(i for i in range(len(first)) if any(file.scenes[i] != first[i] for file in self.files))

    def divided_at(self, position: int) -> list[Family]:
        """Return one family for each folder at a position of `ImageFile.scenes`, with its name in the pattern."""
        places = [i for i, part in enumerate(self.pattern) if part == "*"]
        by_folder: dict[str, list[ImageFile]] = defaultdict(list)
        for file in self.files:
            by_folder[file.scenes[position]].append(file)
        divided = []
        for folder, files in by_folder.items():
            pattern = list(self.pattern)
            pattern[places[position]] = folder
            divided.append(Family(tuple(pattern), self.ending, tuple(files)))
        return divided

    @cached_property
    def label(self) -> str:
        """A short name: the folders that are not one of many, and the ending."""
        folders = [part for part in self.pattern if part not in ("*", "{split}")]
        words = [part.replace("{split}", "").strip("_-. ") for part in folders]
        return "/".join([*(word for word in words if word), *([self.ending] if self.ending else [])]) or "."

    @cached_property
    def place(self) -> str:
        """The label with the folders that all files share, whatever their names say."""
        first = iter(enumerate(self.files[0].scenes if self.files else ()))
        shared = []
        for part in self.pattern:
            position, folder = next(first, (0, part)) if part == "*" else (-1, part)
            if position not in self.varying:
                shared.append(folder.replace("{split}", "").strip("_-. "))
        return "/".join([*(word for word in shared if word), *([self.ending] if self.ending else [])]) or "."


def find_families(paths: Iterable[str]) -> list[Family]:
    """Return the families of image files: by folders, also with ending or extension; largest first."""
    by_folder: dict[tuple[str, ...], list[ImageFile]] = defaultdict(list)
    listed = list(paths)
    scenes_named = _scenes_with_split_words({folder for path in listed for folder in path.split("/")[:-1]})
    for path in listed:
        file = parse_file(path, scenes_named)
        by_folder[file.pattern].append(file)
    total = sum(len(files) for files in by_folder.values())
    least = max(1, min(2, total // 4), total // 200)
    families: list[Family] = []
    for pattern, files in by_folder.items():
        families.append(Family(pattern, "", tuple(files)))
        for groups in (
            _by(files, _affix_pattern),
            _by(files, lambda file: f"*{file.suffix}"),
            _by(files, lambda file: f"*{inner_role_word(affixes(inner_stem(file))[1])}*"),
        ):
            if len(groups) > 1:
                families += [Family(pattern, key, tuple(own)) for key, own in groups.items() if len(own) >= least]
    return sorted(families, key=lambda family: -len(family.files))[:_MAX_FAMILIES]


def _scenes_with_split_words(folders: Iterable[str]) -> frozenset[str]:
    """Return the folders of which several differ by a number, although their names hold the word of a split."""
    by_shape: dict[str, list[str]] = defaultdict(list)
    for folder in folders:
        if split_in(folder) is not None:
            by_shape[re.sub(r"\d+", "#", folder)].append(folder)
    return frozenset(folder for same in by_shape.values() if len(same) >= _MIN_NUMBERED for folder in same)


def _by(files: Iterable[ImageFile], key: object) -> dict[str, list[ImageFile]]:
    groups: dict[str, list[ImageFile]] = defaultdict(list)
    for file in files:
        groups[key(file)].append(file)  # type: ignore[operator]
    return groups


def _affix_pattern(file: ImageFile) -> str:
    prefix, core, ending = affixes(inner_stem(file))
    return f"{prefix}*{ending}" if core else prefix or ending


def inner_stem(file: ImageFile) -> str:
    """Return the stem without a second extension: a of a.jpg.png."""
    head, dot, last = file.stem.rpartition(".")
    return head if dot and last.lower() in ("jpg", "jpeg", "png", "tif", "tiff", "bmp") else file.stem


def split_of_name(stem: str) -> str | None:
    """Return the split that the first or the last word of a file's stem says."""
    words = [token.word for token in tokens(stem)]
    said = {SPLIT_WORDS[word] for word in (words[:1] + words[-1:]) if SPLIT_WORDS.get(word)}
    return said.pop() if len(said) == 1 else None


def common_affixes(stems: Iterable[str]) -> tuple[str, str]:
    """Return prefix and ending that all stems share, without digits at their inner ends.

    >>> common_affixes(["img_001_x1", "img_002_x1"])
    ('img_', '_x1')
    """
    listed = list(stems)
    if len(listed) < 2:
        return "", ""
    low, high = min(listed), max(listed)
    prefix = common_beginning(low, high)
    low, high = min(s[::-1] for s in listed), max(s[::-1] for s in listed)
    ending = common_beginning(low, high)[::-1]
    return prefix.rstrip("0123456789"), ending.lstrip("0123456789")


def common_beginning(first: str, second: str) -> str:
    """Return the characters that both texts begin with."""
    length = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return first[:length]


def frequent_endings(image_stems: set[str], mask_stems: list[str], most: int = 3) -> list[tuple[str, str]]:
    """Return the prefixes and endings that turn image stems into mask stems, the most frequent first."""
    votes: Counter[tuple[str, str]] = Counter()
    for stem in mask_stems[:: max(1, len(mask_stems) // 60)]:
        for length in range(len(stem) - 1, 0, -1):
            if stem[:length] in image_stems:
                votes["", stem[length:]] += 1
                break
            if stem[len(stem) - length :] in image_stems:
                votes[stem[: len(stem) - length], ""] += 1
                break
    enough = max(1, max(votes.values(), default=0) // 2)
    return [affix for affix, count in votes.most_common(most) if count >= enough]
