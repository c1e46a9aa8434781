"""Examines a data set: every file decoded, every id checked, images seen twice, classes that are rare or missing.

A training checks headers only; this reads every byte once, several files at a time, and never stops at the first
finding.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import ImagePair, check_same_size, shown
from segapp.datasets.frequencies import ClassFrequencies
from segapp.datasets.masks import read_image, read_mask
from segapp.datasets.schemes import ClassScheme
from segapp.errors import DataError

RARE_FRAC = 1e-4
"""A class with a smaller share of the training pixels is called rare."""

_LOOK_PX = 16
"""An image's look is compared at (this + 1) x this pixels."""
_MAX_BITS_APART = 5
"""Of the 256 bits of a look: CamVid's frames saved as JPEG at another size differ in up to 7, its distinct frames in 6
and more; so most copies are found and no neighbour in a video is taken for one."""


@dataclass(frozen=True)
class Finding:
    """Something wrong, or worth a look.

    Attributes:
        severity: an error makes the data unusable as they are.
        kind: a short word: `unreadable`, `mask`, `size`, `leak`, `duplicate`, `all_ignored`, `class`, `crop`.
        split: where.
        message: a sentence with the file and the next move.
        pair: the pair it is about, where it is about one.
    """

    severity: Literal["error", "warning"]
    kind: str
    split: str
    message: str
    pair: ImagePair | None = None


@dataclass(frozen=True)
class SplitReport:
    """What one split holds.

    Attributes:
        split: its name.
        num_pairs: pairs in it.
        num_masks: pairs with ground truth.
        sizes: (height, width) in pixels -> images of that size; those that could be read.
        frequencies: counts over the masks that could be read.
        findings: what is wrong, in the order of the pairs.
    """

    split: str
    num_pairs: int
    num_masks: int
    sizes: Mapping[tuple[int, int], int]
    frequencies: ClassFrequencies
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class _Examined:
    """One pair, read whole."""

    pair: ImagePair
    size: tuple[int, int] | None = None
    digest: str | None = None  # of the decoded pixels
    look: bytes | None = None  # alike for a resized or re-saved copy
    counts: NDArray[Any] | None = None
    ignored_px: int = 0
    problems: tuple[tuple[str, str], ...] = ()


def examine(
    splits: Mapping[str, Sequence[ImagePair]],
    scheme: ClassScheme,
    *,
    crop_px: tuple[int, int],
    threads: int = 2,
    progress: Callable[[], None] = lambda: None,
) -> list[SplitReport]:
    """Reads every image and every mask of some splits.

    Args:
        splits: name -> pairs; the first one is trained on.
        scheme: what the ids in the masks mean.
        crop_px: height and width of a training crop.
        threads: files decoded at a time.
        progress: called once a pair.
    """

    def look_at(pair: ImagePair) -> _Examined:
        found = _examine_pair(pair, scheme)
        progress()
        return found

    with ThreadPoolExecutor(max(1, threads)) as pool:
        examined = {name: list(pool.map(look_at, pairs)) for name, pairs in splits.items()}
    twice = _seen_twice(examined)
    reports = []
    for number, (name, pairs) in enumerate(examined.items()):
        is_training = number == 0
        frequencies = _frequencies(pairs, scheme.num_classes)
        findings = [*_of_pairs(name, pairs), *twice[name], *_of_classes(name, frequencies, scheme, is_training)]
        if is_training:
            findings += _of_crop(name, pairs, crop_px)
        sizes = Counter(pair.size for pair in pairs if pair.size is not None)
        num_masks = sum(pair.pair.mask is not None for pair in pairs)
        reports.append(SplitReport(name, len(pairs), num_masks, dict(sizes), frequencies, tuple(findings)))
    return reports


def _examine_pair(pair: ImagePair, scheme: ClassScheme) -> _Examined:
    problems = []
    size = digest = look = counts = None
    ignored_px = 0
    try:
        image = read_image(pair.image)
        size = (image.shape[0], image.shape[1])
        digest = hashlib.sha256(repr(image.shape).encode() + image.tobytes()).hexdigest()
        look = _look(image)
    except DataError as error:
        problems.append(("unreadable", str(error)))
    if pair.mask is not None:
        try:
            mask = read_mask(pair.mask, scheme)
            is_valid = mask != scheme.ignore_index
            counts = np.bincount(mask[is_valid], minlength=scheme.num_classes)
            ignored_px = int(mask.size - is_valid.sum())
            if size is not None:
                check_same_size(pair, size, mask.shape)
        except DataError as error:
            kind = "size" if counts is not None else "mask"
            problems.append((kind, str(error)))
    return _Examined(pair, size, digest, look, counts, ignored_px, tuple(problems))


def _look(image: NDArray[np.uint8]) -> bytes | None:
    """Which of neighbouring pixels of a tiny grey copy are brighter (difference hash); None for a flat image."""
    grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    tiny = cv2.resize(grey, (_LOOK_PX + 1, _LOOK_PX), interpolation=cv2.INTER_AREA).astype(np.int16)
    if int(tiny.max()) - int(tiny.min()) < 8:
        return None
    # A difference of a grey level or two is what saving as JPEG changes.
    return np.packbits(np.diff(tiny, axis=1) > 2).tobytes()


def _of_pairs(split: str, pairs: Iterable[_Examined]) -> list[Finding]:
    findings = []
    for each in pairs:
        findings += [Finding("error", kind, split, message, each.pair) for kind, message in each.problems]
        if each.counts is not None and not each.counts.any():
            findings.append(
                Finding(
                    "warning",
                    "all_ignored",
                    split,
                    f"{shown(each.pair.mask or each.pair.image)}: every pixel is ignored: it teaches nothing; check "
                    "data.label_map and data.ignore_index, or take it out of the split",
                    each.pair,
                )
            )
    return findings


def _seen_twice(examined: Mapping[str, Sequence[_Examined]]) -> dict[str, list[Finding]]:
    """Images that occur more than once: between splits they leak, within one they count double."""
    findings: dict[str, list[Finding]] = {name: [] for name in examined}
    everything = [(name, each) for name, pairs in examined.items() for each in pairs if each.digest is not None]
    first_of: dict[str | None, tuple[str, _Examined]] = {}
    for split, each in everything:
        first_split, first = first_of.setdefault(each.digest, (split, each))
        if first is not each:
            findings[split].append(_twice(split, each, first_split, first, is_exact=True))
    distinct = list(first_of.values())
    for one, other in _alike([each.look for _, each in distinct]):
        (first_split, first), (split, each) = distinct[one], distinct[other]
        findings[split].append(_twice(split, each, first_split, first, is_exact=False))
    return findings


def _alike(looks: Sequence[bytes | None]) -> Iterator[tuple[int, int]]:
    """Pairs (earlier, later) of images that hardly differ in their looks; each later one once."""
    known = [i for i, look in enumerate(looks) if look is not None]
    if not known:
        return
    bits = np.unpackbits(np.stack([np.frombuffer(looks[i] or b"", np.uint8) for i in known]), axis=1)
    signs = bits.astype(np.float32) * 2 - 1  # the product of two rows is (bits equal) - (bits different)
    least = signs.shape[1] - 2 * _MAX_BITS_APART
    for start in range(0, len(known), 1024):
        products = signs[start : start + 1024] @ signs[: start + 1024].T
        for row, product in enumerate(products, start=start):
            earlier = np.flatnonzero(product[:row] >= least)
            if len(earlier):
                yield known[int(earlier[0])], known[row]


def _twice(split: str, each: _Examined, first_split: str, first: _Examined, *, is_exact: bool) -> Finding:
    is_leak = split != first_split
    likeness = "the same pixels as" if is_exact else "looks like"
    what = f"{shown(each.pair.image)}: {likeness} {shown(first.pair.image)}"
    if is_leak:
        move = f"of split {first_split}: scores on {split} would be too good; take it out of one of them"
    else:
        move = "of the same split: it counts double; take one out"
    severity: Literal["error", "warning"] = "error" if is_leak and is_exact else "warning"
    return Finding(severity, "leak" if is_leak else "duplicate", split, f"{what} {move}", each.pair)


def _frequencies(pairs: Sequence[_Examined], num_classes: int) -> ClassFrequencies:
    counted = [each.counts for each in pairs if each.counts is not None]
    table = np.stack(counted) if counted else np.zeros((0, num_classes), np.int64)
    where_present = np.where(table > 0, table.sum(1, keepdims=True), 0)
    return ClassFrequencies(
        pixels=tuple(table.sum(0).tolist()),
        images=tuple((table > 0).sum(0).tolist()),
        pixels_where_present=tuple(where_present.sum(0).tolist()),
        ignored_px=sum(each.ignored_px for each in pairs),
        num_images=len(pairs),
    )


def _of_classes(split: str, frequencies: ClassFrequencies, scheme: ClassScheme, is_training: bool) -> list[Finding]:
    total = sum(frequencies.pixels)
    messages = frequencies.warnings(scheme.names)
    if is_training and total:
        rare = [
            f"{name} ({count / total:.1e})"
            for name, count in zip(scheme.names, frequencies.pixels, strict=True)
            if 0 < count < RARE_FRAC * total
        ]
        if rare:
            messages.append(f"rare classes, by share of the pixels: {', '.join(rare)}: consider loss.class_weights")
    return [Finding("warning", "class", split, f"{split}: {message}") for message in messages]


def _of_crop(split: str, pairs: Sequence[_Examined], crop_px: tuple[int, int]) -> list[Finding]:
    small = [each for each in pairs if each.size and (each.size[0] < crop_px[0] or each.size[1] < crop_px[1])]
    if not small:
        return []
    smallest = min((each.size for each in small if each.size), key=lambda size: size[0] * size[1])
    message = (
        f"{split}: {len(small)} of {len(pairs)} images are smaller than data.crop_px {list(crop_px)} (the smallest "
        f"{list(smallest)}): their crops are padded with ignored pixels; use a crop of at most the images' size"
    )
    return [Finding("warning", "crop", split, message)]
