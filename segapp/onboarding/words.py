"""Words in names of folders and files that distinguish images, masks and splits; `words.toml` lists them.

`hypotheses` weights them.
"""

import itertools
import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_TABLES = tomllib.loads(Path(__file__).parent.joinpath("words.toml").read_text(encoding="utf-8"))


def known_words(table: str, key: str) -> frozenset[str]:
    """Return the words of `words.toml` with one meaning."""
    return frozenset(_TABLES[table][key].split())


IMAGE_WORDS, MASK_WORDS = known_words("roles", "images"), known_words("roles", "masks")
OTHER_WORDS, GLUE_WORDS = known_words("roles", "others"), known_words("roles", "glue")
ROLE_WORDS = IMAGE_WORDS | MASK_WORDS | OTHER_WORDS
SPLIT_WORDS = {word: split for split, words in _TABLES["splits"].items() for word in words.split()}
SPLITS = ("train", "val", "test")
_SHORT = {"tr", "te", "ts", "trn", "tst"}

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


@dataclass(frozen=True)
class Role:
    """Meanings of the words in a name; several may be true."""

    is_image: bool = False
    is_mask: bool = False
    is_other: bool = False

    def __bool__(self) -> bool:
        return self.is_image or self.is_mask or self.is_other


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


def inner_role_word(stem: str) -> str:
    """Return the first role word inside a name, between other words; empty if there is none.

    >>> inner_role_word("case_001_seg_60"), inner_role_word("0001_mask"), inner_role_word("img_0001")
    ('seg', '', '')
    """
    found = tokens(stem)
    return next((token.word for token in found[1:-1] if token.word in ROLE_WORDS and len(token.word) > 1), "")


def without_zeros(text: str) -> str:
    """Return a number without leading zeros; empty for other texts."""
    return str(int(text)) if text.isascii() and text.isdigit() else ""


@lru_cache(maxsize=4096)
def split_in(name: str) -> tuple[str, str] | None:
    """Return the split in a folder's name, and the name with `{split}` instead of it; None if there is none.

    >>> split_in("train2017"), split_in("val_labels"), split_in("TrainVal_images")
    (('train', '{split}2017'), ('val', '{split}_labels'), None)
    """
    found = [token for token in tokens(name) if token.word in SPLIT_WORDS]
    if not role_of(name):
        found = [token for token in found if token.word not in _SHORT]
    if len(found) != 1:
        return None
    token = found[0]
    return SPLIT_WORDS[token.word], name[: token.start] + "{split}" + name[token.end :]


def _is_side(stem: str, token: Token) -> bool:
    """Return True for the l of `01L`, which means left; it means label only after a separator, as in `0001_L`."""
    return token.word == "l" and token.start > 0 and stem[token.start - 1].isalnum()


@lru_cache(maxsize=2**16)  # each interpretation of a folder needs the same stems
def affixes(stem: str) -> tuple[str, str, str]:
    """Return prefix, core and ending of a file's stem; prefix and ending consist of role words.

    >>> affixes("img_0001"), affixes("0001_mask"), affixes("a_labelTrainIds"), affixes("masks")
    (('img_', '0001', ''), ('', '0001', '_mask'), ('', 'a', '_labelTrainIds'), ('masks', '', ''))
    """
    found = tokens(stem)
    first = 0
    while first < len(found) and found[first].word in ROLE_WORDS - {"l", "ho", "data", "raw"}:
        first += 1
    last = len(found)
    while last > first and found[last - 1].word in ROLE_WORDS | GLUE_WORDS and not _is_side(stem, found[last - 1]):
        last -= 1
    while last < len(found) and found[last].word not in ROLE_WORDS:  # an ending begins with a role word
        last += 1
    if first == len(found) and first > 0:
        return stem, "", ""
    begin = found[first].start if first else 0
    end = len(stem)
    if last < len(found):
        end = found[last - 1].end if last else 0
        if last and found[last].start == end and not stem[end].isupper():
            end = len(stem)
    return stem[:begin], stem[begin:end], stem[end:]
