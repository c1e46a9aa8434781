"""Groups of images that show the same patient, video or place, and the division of images into splits by groups.

Images of a group resemble each other, so a group on both sides of a division makes the scores too good. Every folder
and every word of the names is a candidate. Group words such as `patient` have priority, then folders, words with
letters, and numbers. Of several plausible candidates the coarsest is used, because it also keeps the finer groups
together. If no candidate is coarser than the others, the user is asked.
"""

import hashlib
import math
import os
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from segapp.datasets.files import shown
from segapp.errors import ConfigError, DataError
from segapp.onboarding.layout import Pair
from segapp.onboarding.questions import Answer, open_question
from segapp.onboarding.words import SPLIT_WORDS, known_words

MIN_GROUPS = 5  # a kind with fewer groups is used only if there is no other kind
_FEW_GROUPS = 3
_MOST_IN_ONE = 0.8  # largest share of the images in one group, unless a group word names it
_LEAST_STEP_PX = 16  # numbers that are multiples of such a step are positions of tiles

EACH_IMAGE = ".+"  # value of `--group` with which each image is its own group

_PERSONS, _RECORDINGS = known_words("groups", "persons"), known_words("groups", "recordings")
_IMAGES, _PARTS = known_words("groups", "images"), known_words("groups", "parts")
_WORD, _GAP = r"[^_\-. /]+", r"[_\-. ]+"
_DATE = re.compile(
    r"(?<!\d)((?:19|20)\d\d([_\-.]?)(?:0[1-9]|1[0-2])\2(?:0[1-9]|[12]\d|3[01]))"
    r"(?:[_\-. T](?:[01]\d|2[0-3])([_\-.h]?)[0-5]\d\3[0-5]\d\d*)?(?!\d)"
)


class Evidence(IntEnum):
    """Strength of the evidence for a candidate."""

    COUNTER = 0
    NUMBER = 1
    WORD = 2
    FOLDER = 3
    RECORDING = 4
    PERSON = 5


_ROLES = {
    **dict.fromkeys(known_words("groups", "places"), Evidence.WORD),
    **dict.fromkeys(_RECORDINGS, Evidence.RECORDING),
    **dict.fromkeys(_PERSONS, Evidence.PERSON),
}  # evidence of a word in a name


@dataclass(frozen=True)
class Grouping:
    """The group of each image, and the part of the path that names it, with a regular expression if there is one."""

    groups: tuple[str, ...]
    kind: str
    pattern: str = ""
    evidence: Evidence | None = None

    @property
    def num_groups(self) -> int:
        """Number of different groups."""
        return len(set(self.groups))

    def examples(self, images: Sequence[str]) -> str:
        """Return the first two groups as text, each with its number of images and an example."""
        members = _members(self.groups, images)
        return "; ".join(f"{shown(group)}: {_some(members[group])}" for group in sorted(members)[:2])


def group_pairs(pairs: Sequence[Pair], pattern: str | None) -> Grouping:
    """Return the group of each pair.

    It is the first group, or else the whole match, of a regular expression in the image's path. Without a pattern, it
    is the group in a table, or else the best candidate of the folders and names. If several plausible candidates divide
    the images differently, the user is asked.
    """
    images = [pair.image for pair in pairs]
    if pattern is not None:
        groups = find_by_expression(images, pattern)
        kind = "image" if pattern == EACH_IMAGE else f"--group {pattern}"
        return Grouping(groups, kind, pattern)
    if pairs and all(pair.group is not None for pair in pairs):
        return Grouping(tuple(str(pair.group) for pair in pairs), "column of the table")
    scenes = [pair.scene for pair in pairs]
    found = _chosen(list(_candidates(images, scenes)), images)
    return found or Grouping(tuple(images), "image", EACH_IMAGE)


def find_by_expression(images: Sequence[str], pattern: str) -> tuple[str, ...]:
    """Return the match of an expression in each image's path; ConfigError if it is invalid or has no match."""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"--group {pattern}: not a regular expression ({error}): write one such as '^([^/_]+)_'"
        ) from None
    groups = []
    for image in images:
        match = expression.search(image)
        if match is None:
            raise ConfigError(
                f"--group {pattern}: matches nothing in {shown(image)}: write one that matches every image"
            )
        groups.append(match[1] if expression.groups and match[1] is not None else match[0])
    return tuple(groups)


def find_shared_groups(
    images: Mapping[str, Sequence[str]], columns: Mapping[str, Sequence[str | None]] | None = None
) -> str | None:
    """Return a sentence on the patients, videos or other groups that have images in two splits, with the next move.

    They are found in the names of the images in both splits, or in a column of a table, which may be empty for an
    image. Numbers that start again in each split, so that the same names are in both, are ignored.
    """
    (first, firsts), (second, seconds) = images.items()
    if columns is not None and None not in (*columns[first], *columns[second]):
        groups = [str(group) for group in (*columns[first], *columns[second])]
        return _shared(images, Grouping(tuple(groups), "column of the table"))
    same = len(set(firsts) & set(seconds))
    if not firsts or not seconds or same > min(len(firsts), len(seconds)) / 2:
        return None
    paths = [*firsts, *seconds]
    found = _candidates(paths, [tuple(path.split("/")[:-1]) for path in paths])
    strong = [each for each in found if each.evidence in (Evidence.PERSON, Evidence.RECORDING)]
    said = (_shared(images, each) for each in sorted(strong, key=lambda each: -(each.evidence or 0)))
    return next((one for one in said if one is not None), None)


def _shared(images: Mapping[str, Sequence[str]], grouping: Grouping) -> str | None:
    """Return a sentence on the groups with images in both splits, with two examples; None if there are none."""
    (first, firsts), (second, seconds) = images.items()
    trained = _members(grouping.groups[: len(firsts)], firsts)
    scored = _members(grouping.groups[len(firsts) :], seconds)
    both = sorted(trained.keys() & scored.keys(), key=lambda group: (-len(scored[group]), group))
    if not both:
        return None
    examples = "; ".join(
        f"{_some(trained[group], f'of {first}')} and {_some(scored[group], f'of {second}')}" for group in both[:2]
    )
    return (
        f"{len(both)} of the {len(scored)} groups of {second} ({grouping.kind}) are in {first} too, such as "
        f"{examples}: scores on {second} are too good; divide anew with segapp init --folds 5"
        + (f" --group {shlex.quote(grouping.pattern)}" if grouping.pattern else "")
    )


def _members(groups: Sequence[str], images: Sequence[str]) -> dict[str, list[str]]:
    members: dict[str, list[str]] = defaultdict(list)
    for group, image in zip(groups, images, strict=True):
        members[group].append(image)
    return members


def _some(images: Sequence[str], whose: str = "") -> str:
    words = [f"{len(images)} {'images' if len(images) > 1 else 'image'}", whose, f"such as {shown(images[0])}"]
    return " ".join(word for word in words if word)


def _chosen(candidates: Sequence[Grouping], images: Sequence[str]) -> Grouping | None:
    """Return the groups with the strongest evidence; None if there are none."""
    of = {kind: [each for each in candidates if each.evidence == kind] for kind in Evidence}
    many = {kind: [each for each in own if each.num_groups >= MIN_GROUPS] for kind, own in of.items()}
    recordings = many[Evidence.RECORDING] + many[Evidence.FOLDER]
    for plausible in (
        of[Evidence.PERSON],
        recordings or of[Evidence.RECORDING],
        many[Evidence.WORD],
        of[Evidence.FOLDER][:1],
        of[Evidence.WORD] + of[Evidence.NUMBER],
        many[Evidence.COUNTER],
    ):
        if plausible:
            return _coarsest(plausible, images)
    return None


def _coarsest(plausible: Sequence[Grouping], images: Sequence[str]) -> Grouping:
    """Return the candidate that keeps the groups of all candidates together; ask if there is none."""
    for candidate in sorted(plausible, key=lambda each: each.num_groups):
        if all(_is_coarser(candidate, other) for other in plausible):
            return candidate
    answers = [
        Answer(each.pattern, f"{each.kind}: {each.num_groups} groups; {each.examples(images)}")
        for each in plausible
        if _expresses(each, images)
    ]
    raise open_question(
        "images of one patient, scene or video must stay on one side of the division, and several parts of the names "
        "may say it",
        "--group",
        [*answers, Answer(EACH_IMAGE, "each image is its own group")],
    )


def _is_coarser(one: Grouping, other: Grouping) -> bool:
    """Return True if each group of the other candidate lies within one group."""
    return len(set(zip(one.groups, other.groups, strict=True))) == other.num_groups


def _expresses(grouping: Grouping, images: Sequence[str]) -> bool:
    """Return True if the pattern finds the same groups."""
    try:
        found = Grouping(find_by_expression(images, grouping.pattern), "")
    except ConfigError:
        return False
    return _is_coarser(found, grouping) and _is_coarser(grouping, found)


def _candidates(images: Sequence[str], scenes: Sequence[tuple[str, ...]]) -> Iterator[Grouping]:
    """Yield the parts of the paths that may name a group, coarsest first."""
    yielded: set[tuple[int, ...]] = set()
    for found in (*_folders(images, scenes), *_parts_of_names(images)):
        numbers: dict[str, int] = {}
        partition = tuple(numbers.setdefault(group, len(numbers)) for group in found.groups)
        if partition not in yielded and _may_be_groups(found):
            yielded.add(partition)
            yield found


def _may_be_groups(found: Grouping) -> bool:
    sizes = Counter(found.groups)
    if found.evidence in (Evidence.PERSON, Evidence.RECORDING):
        return 2 <= len(sizes) < len(found.groups)
    most = _MOST_IN_ONE * len(found.groups)
    return _FEW_GROUPS <= len(sizes) <= len(found.groups) / 2 and max(sizes.values()) <= most


def _folders(images: Sequence[str], scenes: Sequence[tuple[str, ...]]) -> Iterator[Grouping]:
    """Yield each level of folders that differ, and the first levels together."""
    if not scenes or len({len(scene) for scene in scenes}) != 1:
        return
    folders = [image.split("/")[:-1] for image in images]
    for level in range(len(scenes[0])):
        values = [scene[level] for scene in scenes]
        role = _ROLES.get(_lead(values))
        if role is None and _lead(values) in _PARTS | _IMAGES:
            continue
        depth = next((i for i in range(min(map(len, folders))) if [each[i] for each in folders] == values), None)
        pattern = "" if depth is None else f"^(?:[^/]+/){{{depth}}}([^/]+)/" if depth else "^([^/]+)/"
        evidence = Evidence.FOLDER if role in (None, Evidence.WORD) else role
        yield Grouping(tuple(values), _in_words(_lead(values), "folder") if role else "folder", pattern, evidence)
        if level:
            joined = tuple("/".join(scene[: level + 1]) for scene in scenes)
            pattern = "" if depth is None else f"^((?:[^/]+/){{{depth}}}[^/]+)/"
            yield Grouping(joined, "folder", pattern, Evidence.FOLDER)


def _parts_of_names(images: Sequence[str]) -> Iterator[Grouping]:
    """Yield the words of the names; if the names have different shapes, the group words and the beginnings."""
    stems = [os.path.splitext(image.rpartition("/")[2])[0] for image in images]
    dates = [_DATE.search(stem) for stem in stems]
    if all(dates):
        days = tuple(date[1] for date in dates if date is not None)
        yield Grouping(days, "date in the name", _DATE.pattern, Evidence.WORD)
        stems = [stem.replace(date[0], "0") for stem, date in zip(stems, dates, strict=True) if date is not None]
    words = [re.findall(_WORD, stem) for stem in stems]
    if len({len(own) for own in words}) == 1:
        for found in _columns([list(column) for column in zip(*words, strict=True)]):
            yield found if not all(dates) else replace(found, pattern="")
        return
    for word in sorted(_PERSONS | _RECORDINGS):
        pattern = rf"(?i)(?<![^\W\d_])({word}[_\-. ]?\d+)"
        matches = [re.search(pattern, image) for image in images]
        if all(matches):
            groups = tuple(match[1] for match in matches if match is not None)
            yield Grouping(groups, _in_words(word, "name"), pattern, _ROLES.get(word))
    for count in range(1, min(max(map(len, words), default=0), 8)):
        pattern = rf"^(?:.*/)?(?:((?:{_WORD}{_GAP}){{1,{count}}})(?={_WORD}[^/]*\.[^./]*$)|{_WORD}(?=\.[^./]*$))"
        groups = tuple(match[1] or match[0] if (match := re.search(pattern, image)) else image for image in images)
        yield Grouping(groups, "beginning of the name", pattern, Evidence.WORD)


def _columns(columns: Sequence[list[str]]) -> Iterator[Grouping]:
    """Yield the words at each position of equally long names, if they vary and do not count images or parts."""
    varying = [number for number, column in enumerate(columns) if len(set(column)) > 1]
    leads = {number: _context(columns, number) for number in varying}
    parts = [number for number in varying if leads[number] in _PARTS]
    counted = [number for number in varying if leads[number] in _IMAGES and _is_number(columns[number])]
    if parts and counted:
        counted = counted[:-1] if len(counted) > 1 else []  # several tiles per image
    digits = [number for number in varying if all(word.isdigit() for word in columns[number])]
    positions = [number for number in digits if math.gcd(*map(int, columns[number])) >= _LEAST_STEP_PX]
    skipped = {*parts, *counted, *positions}
    if not parts and not counted:
        numbers = [number for number in varying if _is_number(columns[number]) and _ROLES.get(leads[number]) is None]
        bare = [number for number in numbers if columns[number][0].isdigit()]
        skipped |= set((bare or numbers)[-1:])
    for number in varying:
        column, role = columns[number], _ROLES.get(leads[number])
        if number in skipped and role is None and not column[0].isdigit():
            continue
        position = f"word {number + 1} of the name" if number else "beginning of the name"
        kind = _in_words(leads[number], "name") if role else position
        before = rf"^(?:.*/)?[_\-. ]*(?:{_WORD}{_GAP}){{{number}}}" if number else r"^(?:.*/)?[_\-. ]*"
        evidence = Evidence.NUMBER if all(word.isdigit() for word in column) else Evidence.WORD
        if role is None and number in skipped:
            evidence = Evidence.COUNTER
        elif role is None:
            yield from _beginnings_of_words(column, kind, before)
        yield Grouping(tuple(column), kind, rf"{before}({_WORD})[^/]*$", role or evidence)


def _beginnings_of_words(column: Sequence[str], kind: str, before: str) -> Iterator[Grouping]:
    """Yield the letters or digits with which words of one shape begin, such as 01 of 01L and austin of austin1."""
    shapes = {re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+", "0", word)) for word in column}
    if shapes not in ({"a0"}, {"0a"}):
        return
    run, evidence = (r"[^\W\d_]+", Evidence.WORD) if shapes == {"a0"} else (r"\d+", Evidence.NUMBER)
    groups = tuple(match[0] for word in column if (match := re.match(run, word)))
    if len(set(groups)) > 1:
        yield Grouping(groups, kind, rf"{before}({run})[^/]*$", evidence)


def _is_number(column: Sequence[str]) -> bool:
    """Return True if the words are numbers, or numbers after the same letters."""
    leads = {word.rstrip("0123456789") for word in column}
    return len(leads) == 1 and all(word != lead for word in column for lead in leads)


def _lead(column: Sequence[str]) -> str:
    """Return the letters with which all words begin, in lower case: patient of patient01, patientA and Patient."""
    runs = {match[0] if (match := re.match(r"[^\W\d_]+", word)) else "" for word in column}
    if len(runs) > 1:
        runs = {run[:-1] if re.search(r"[a-z][A-Z]$", run) else run for run in runs}
    lowered = {run.lower() for run in runs}
    return lowered.pop() if len(lowered) == 1 else ""


def _context(columns: Sequence[Sequence[str]], number: int) -> str:
    """Return the letters with which the words of a column begin, or else the constant word before it."""
    lead = _lead(columns[number])
    if lead or number == 0 or len(set(columns[number - 1])) > 1:
        return lead
    before = columns[number - 1][0].lower()
    return before if before.isalpha() else ""


def _in_words(lead: str, place: str) -> str:
    word = {"pt": "patient", "pat": "patient", "subj": "subject", "sub": "subject"}.get(lead, lead)
    return f"{word} in the {place}"


def divide(pairs: Sequence[Pair], grouping: Grouping, share: float, seed: int) -> list[str]:
    """Return "train" or "val" for each pair.

    Groups are processed in the order of a hash of their names and the seed, so images that are added later rarely
    change the division. A group becomes validation images if that brings their share closer to the requested one.
    DataError is raised for a single group, ConfigError if one side would be empty.
    """
    sizes = Counter(grouping.groups)
    if len(pairs) == 1:
        image, mask = shown(pairs[0].image), shown(pairs[0].mask)
        raise DataError(
            f"{image} is the only image with a mask: cut both into tiles, such as gdal_retile.py -ps 512 512 "
            f"-targetDir tiles/images {image} and gdal_retile.py -ps 512 512 -targetDir tiles/masks {mask}, then run "
            "segapp init tiles"
        )
    if len(sizes) < 2:
        raise DataError(
            f"{len(pairs)} images in one group ({grouping.kind}) cannot be divided into training and validation "
            "images: add images, or name smaller groups with --group REGEX"
        )
    wanted, taken = share * len(pairs), 0
    val: set[str] = set()
    for group in sorted(sizes, key=lambda group: _rank(group, seed)):
        if abs(taken + sizes[group] - wanted) < abs(taken - wanted) and len(val) < len(sizes) - 1:
            val.add(group)
            taken += sizes[group]
    if not val and share * len(pairs) >= 0.5:
        val.add(min(sizes, key=lambda group: (sizes[group], _rank(group, seed))))
    if not val:
        raise ConfigError(
            f"--val-share {share:g} of {len(pairs)} images in {len(sizes)} groups ({grouping.kind}) leaves one split "
            "empty: choose another share, or other groups with --group REGEX"
        )
    return ["val" if group in val else "train" for group in grouping.groups]


def divide_into_folds(grouping: Grouping, num_folds: int, seed: int) -> list[int]:
    """Return the fold, from 0, of each pair: large groups first, each in the fold with the fewest images.

    Groups of equal size are ordered by a hash. ConfigError is raised if there are fewer groups than folds.
    """
    if grouping.num_groups < num_folds:
        raise ConfigError(
            f"--folds {num_folds}: there are only {grouping.num_groups} groups ({grouping.kind}): fewer folds, or "
            "smaller groups with --group REGEX"
        )
    sizes = Counter(grouping.groups)
    filled = [0] * num_folds
    fold_of: dict[str, int] = {}
    for group in sorted(sizes, key=lambda group: (-sizes[group], _rank(group, seed))):
        fold_of[group] = filled.index(min(filled))
        filled[fold_of[group]] += sizes[group]
    return [fold_of[group] for group in grouping.groups]


def split_word_of(pairs: Sequence[Pair], split: str) -> str:
    """Return the name of a split on disk; the split itself if pairs have different names or none."""
    words = {pair.split_word for pair in pairs if pair.split == split}
    only = words.pop() if len(words) == 1 else None
    return only if only is not None and only.lower() in SPLIT_WORDS else split


def _rank(group: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{group}".encode("utf-8", "surrogateescape")).digest()
