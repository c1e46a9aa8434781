"""The files below a folder, and the words in their names that tell images, masks, splits and scenes apart.

Only names are read here. `words.toml` lists the words; `hypotheses` weights them.
"""

import itertools
import json
import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from segapp.datasets.files import MAX_FILE_BYTES, PointerError, open_regular, shown
from segapp.datasets.layouts.pairing import RootGuard
from segapp.datasets.walk import IMAGE_SUFFIXES, composed, has_cure, left_out, walk
from segapp.errors import ConfigError, DataError

_TABLES = tomllib.loads(Path(__file__).parent.joinpath("words.toml").read_text(encoding="utf-8"))


def known_words(table: str, key: str) -> frozenset[str]:
    """Return the words of `words.toml` with one meaning."""
    return frozenset(_TABLES[table][key].split())


IMAGE_WORDS, MASK_WORDS = known_words("roles", "images"), known_words("roles", "masks")
OTHER_WORDS, GLUE_WORDS = known_words("roles", "others"), known_words("roles", "glue")
ROLE_WORDS = IMAGE_WORDS | MASK_WORDS | OTHER_WORDS
SPLIT_WORDS = {word: split for split, words in _TABLES["splits"].items() for word in words.split()}
SPLITS = ("train", "val", "test")

_MAX_GROUPS = 12

_TOKEN = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


class Token(NamedTuple):
    """A word of a name, in lower case, and its position."""

    word: str
    start: int
    end: int


def tokens(name: str) -> list[Token]:
    """Return the words of a name: letters in one case, capitalized words, numbers.

    >>> [token.word for token in tokens("JPEGImages_2")]
    ['jpeg', 'images', '2']
    >>> [token.word for token in tokens("trainannot")]
    ['train', 'annot']
    """
    found = []
    for match in _TOKEN.finditer(name):
        word = match[0].lower()
        cut = next(
            (len(s) for s in SPLIT_WORDS if word.startswith(s) and word[len(s) :] in MASK_WORDS | IMAGE_WORDS), 0
        )
        if cut:
            found.append(Token(word[:cut], match.start(), match.start() + cut))
        found.append(Token(word[cut:], match.start() + cut, match.end()))
    return found


class Role(NamedTuple):
    """Meanings of the words in a name; several may be true."""

    is_image: bool
    is_mask: bool
    is_other: bool

    def __bool__(self) -> bool:
        return any(self)


@lru_cache(maxsize=4096)
def role_of(name: str) -> Role:
    """Return the meanings of the words in a folder's name, or in a file's prefix or ending."""
    words = {token.word for token in tokens(name)}
    return Role(bool(words & IMAGE_WORDS), bool(words & MASK_WORDS), bool(words & OTHER_WORDS))


def is_trainval(name: str) -> bool:
    """Return True for a name that means training and validation images together: trainval, train_val, TrainVal.

    >>> is_trainval("train_val"), is_trainval("trainval_images"), is_trainval("train")
    (True, True, False)
    """
    words = [token.word for token in tokens(name)]
    return "trainval" in words or ("train", "val") in itertools.pairwise(words)


def without_zeros(text: str) -> str:
    return str(int(text)) if text.isascii() and text.isdecimal() else ""


@lru_cache(maxsize=4096)
def split_in(name: str) -> tuple[str, str] | None:
    """Return the split in a folder's name, and the name with `{split}` instead of it; None if there is none.

    A number with a leading zero marks one of many scenes, such as `Case_Training_001`.

    >>> split_in("train2017"), split_in("val_labels"), split_in("TrainVal_images")
    (('train', '{split}2017'), ('val', '{split}_labels'), None)
    """
    found = [token for token in tokens(name) if token.word in SPLIT_WORDS]
    if len(found) != 1 or re.search(r"(?<!\d)0\d", name):
        return None
    token = found[0]
    return SPLIT_WORDS[token.word], name[: token.start] + "{split}" + name[token.end :]


@lru_cache(maxsize=2**16)  # each interpretation of a folder needs the same stems
def affixes(stem: str) -> tuple[str, str, str]:
    """Return prefix, core and ending of a file's stem; prefix and ending consist of role words.

    >>> affixes("img_0001"), affixes("0001_mask"), affixes("a_labelTrainIds"), affixes("masks")
    (('img_', '0001', ''), ('', '0001', '_mask'), ('', 'a', '_labelTrainIds'), ('masks', '', ''))
    """
    found = tokens(stem)
    first, last = 0, len(found)
    while first < len(found) and found[first].word in ROLE_WORDS - {"l", "ho", "data", "raw"}:
        first += 1
    if found and first == len(found):
        return stem, "", ""
    while last > first and found[last - 1].word in ROLE_WORDS | GLUE_WORDS:
        if found[last - 1].word == "l" and stem[: found[last - 1].start][-1:].isalnum():
            break  # the l of 01L means left; it means label only after a separator, as in 0001_L
        last -= 1
    begin = found[first].start if first else 0
    end = len(stem) if last == len(found) else found[last - 1].end if last else 0
    if last < len(found) and found[last].start == end and not stem[end].isupper():  # the st of 1st
        end = len(stem)
    return stem[:begin], stem[begin:end], stem[end:]


@dataclass(frozen=True)
class SurveyedImage:
    """An image file below the root."""

    path: str
    # its folders: those with role words unchanged, a split as `{split}`, any other as `*`
    pattern: tuple[str, ...]
    scenes: tuple[str, ...]  # the folders that are `*`
    split: str | None  # "train", "val" or "test", if a folder names it

    @cached_property
    def stem(self) -> str:
        """The name without its extension, in NFC."""
        return composed(os.path.splitext(self.path.rpartition("/")[2])[0])

    @cached_property
    def suffix(self) -> str:
        return os.path.splitext(self.path)[1].lower()


def parse_file(path: str) -> SurveyedImage:
    pattern: list[str] = []
    scenes: list[str] = []
    split = None
    folders = composed(path).split("/")[:-1]
    splits = [split_in(folder) for folder in folders]
    for folder, said in zip(folders, splits, strict=True):
        if said is not None:
            split, shape = said
            pattern.append(shape)
        elif is_trainval(folder) and not any(splits):
            split = "train"
            pattern.append("{split}")
        elif role_of(folder):
            pattern.append(folder)
        else:
            pattern.append("*")
            scenes.append(folder)
    return SurveyedImage(path, tuple(pattern), tuple(scenes), split)


def split_said(path: str) -> str | None:
    """Return the split in the folders or the name of a file; trainval counts as training.

    >>> split_said("annotations/instances_train2017.json"), split_said("trainval.txt"), split_said("list.txt")
    ('train', 'train', None)
    """
    return parse_file(path).split or parse_file(f"{PurePosixPath(path).stem}/x").split


def affix_pattern(file: SurveyedImage) -> str:
    """Return a name as a pattern: `img_*` or `*_mask` for role words around a core."""
    prefix, core, ending = affixes(file.stem)
    return f"{prefix}*{ending}" if core else prefix or ending


@dataclass(frozen=True)
class Tree:
    """The files below a folder, as paths relative to it in their byte order."""

    root: Path
    images: tuple[str, ...]
    others: tuple[str, ...]  # annotations, class names, lists, and files of any other kind
    leads_outside: bool  # a folder or an image is a link out of the root
    hidden: tuple[str, ...] = ()

    def others_named(self, *suffixes: str) -> list[str]:
        """Return the non-image files with one of the extensions, nearest to the root first."""
        found = [path for path in self.others if PurePosixPath(path).suffix.lower() in suffixes]
        return sorted(found, key=lambda path: (path.count("/"), path))

    def read(self, path: str, most: int = MAX_FILE_BYTES) -> bytes:
        """Return the first bytes of a file; empty if it cannot be read, PointerError for a pointer of Git LFS."""
        try:
            with open_regular(self.root / path) as file:
                return file.read(min(most, os.fstat(file.fileno()).st_size))  # of a larger number, all is allocated
        except PointerError:  # it may be the annotations
            raise
        except (OSError, DataError):
            return b""

    def read_json(self, path: str) -> Any:
        """Return the content of a JSON file; DataError with the place if it is not JSON."""
        try:
            return json.loads(self.read(path))
        except (ValueError, RecursionError) as error:
            place = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
            raise DataError(f"{shown(path)} is not complete JSON{place}: export it again, or remove it") from None


def survey_tree(root: Path) -> Tree:
    """Return the files below a folder; hidden ones are left out, and links to folders are followed once."""
    if not root.is_dir():
        raise ConfigError(
            f"{shown(root)} is not a folder: give the folder that holds the images and the masks", path=root
        )
    guard = RootGuard(root)
    images, others, hidden = list[str](), list[str](), list[str]()
    leads_outside = False
    for folder in walk(root):
        leads_outside |= not guard.holds(folder.path)
        hidden += [folder.below + name for name in folder.hidden]
        for name in folder.files:
            is_image = name.lower().endswith(IMAGE_SUFFIXES)
            (images if is_image else others).append(folder.below + name)
            leads_outside |= is_image and name in folder.links and not guard.holds(os.path.join(folder.path, name))
    return Tree(root, tuple(images), tuple(others), leads_outside, tuple(hidden))


def unused_files(tree: Tree, used: Collection[str]) -> list[list[str]]:
    """Return the files that are not in `used`, grouped by place and kind of name, large groups first.

    Every file that is not hidden is counted once.
    """
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for path in (*tree.images, *tree.others):
        if path not in used:
            file = parse_file(path)
            groups[file.pattern, file.split, affix_pattern(file), file.suffix].append(path)
    return sorted(groups.values(), key=lambda paths: -len(paths))


def unused_lines(tree: Tree, unused: Sequence[Sequence[str]]) -> list[str]:
    """Return a line with the numbers of files, and a line for each group that is not used, see `unused_files`."""
    total, rest = (sum(map(len, own)) for own in ((tree.images, tree.others), unused))
    lines = [f"{total} files: {total - rest} used, {rest} not used"]
    for paths in unused[:_MAX_GROUPS]:
        many = f"{len(paths)} files such as " if len(paths) > 1 else ""
        lines.append(f"not used: {many}{shown(paths[0])}")
    if more := unused[_MAX_GROUPS:]:
        lines.append(f"not used: {sum(map(len, more))} more files in {len(more)} groups")
    pixels = [path for paths in unused for path in paths if has_cure(path)]
    return [*lines, *left_out(pixels, tree.hidden)]
