"""Examines a data set: every file decoded, every id checked, images seen twice, classes that are rare or missing.

This reads every byte once, several files at a time, and never stops at the first finding. A training reads all headers
and, with `check_masks`, as many masks as take about a second.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import ImagePair, check_same_size, read_header, shown
from segapp.datasets.frequencies import ClassFrequencies
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.masks import UnknownIdsError, likely_cause, name_ids, read_image, read_mask
from segapp.errors import DataError

RARE_FRAC = 1e-4
"""A class with a smaller share of the training pixels is called rare."""

CHEAP_PX = 2**26
"""As many pixels of masks are read before a training: all of CamVid's, 32 of Cityscapes'; half a second."""

_LOOK_PX = 16
"""An image's look is compared at (this + 1) x this pixels."""
_MAX_BITS_APART = 5
"""Of the 256 bits of a look: CamVid's frames saved as JPEG at another size differ in up to 7, its distinct frames in 6
and more; so most copies are found and no neighbour in a video is taken for one."""

_LARGE_PX = 2**25
_large = threading.Lock()
"""Larger images are decoded one at a time: the memory needed does not grow with the number of threads."""


@dataclass(frozen=True)
class Finding:
    """Something wrong, or worth a look.

    Attributes:
        severity: an error makes the data unusable as they are.
        kind: a short word: `pairs`, `unreadable`, `mask`, `ids`, `size`, `leak`, `duplicate`, `all_ignored`, `class`,
            `crop`, `link`, `file`.
        split: where.
        message: a sentence with the file and the next move.
        pair: the pair it is about, where it is about one.
        other: the pair it is like, for `leak` and `duplicate`.
        num_px: pixels that are wrong, where that is counted: the worst come first.
    """

    severity: Literal["error", "warning"]
    kind: str
    split: str
    message: str
    pair: ImagePair | None = None
    other: ImagePair | None = None
    num_px: int = 0


@dataclass(frozen=True)
class UnknownIds:
    """Ids outside the classes, over all masks of a split.

    Attributes:
        pixels: id -> pixels.
        masks: id -> masks that hold it.
        num_masks: masks with any.
        cause: what they probably are, and the next move.
    """

    pixels: Mapping[int, int]
    masks: Mapping[int, int]
    num_masks: int
    cause: str


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
        unknown_ids: None where every id is known.
    """

    split: str
    num_pairs: int
    num_masks: int
    sizes: Mapping[tuple[int, int], int]
    frequencies: ClassFrequencies
    findings: tuple[Finding, ...]
    unknown_ids: UnknownIds | None = None


@dataclass
class _Examined:
    """One pair, read whole."""

    pair: ImagePair
    size: tuple[int, int] | None = None
    digest: str | None = None  # of the decoded pixels
    look: bytes | None = None  # alike for a resized or re-saved copy
    counts: NDArray[Any] | None = None
    ignored_px: int = 0
    ids: UnknownIdsError | None = None
    problems: list[tuple[str, str, int]] = field(default_factory=list)  # kind, message, pixels


def examine(
    splits: Mapping[str, Sequence[ImagePair]],
    scheme: ClassScheme,
    *,
    crop_px: tuple[int, int],
    resize_px: tuple[int, int] | None = None,
    threads: int = 2,
    progress: Callable[[], None] = lambda: None,
) -> list[SplitReport]:
    """Reads every image and every mask of some splits.

    Args:
        splits: name -> pairs; the first one is trained on.
        scheme: what the ids in the masks mean.
        crop_px: height and width of a training crop.
        resize_px: height and width to which images are brought before; None: they stay as they are.
        threads: files decoded at a time.
        progress: called once a pair.
    """

    def look_at(pair: ImagePair) -> _Examined:
        found = _examine_pair(pair, scheme)
        progress()
        return found

    with ThreadPoolExecutor(max(1, threads)) as pool:
        try:
            examined = {name: list(pool.map(look_at, pairs)) for name, pairs in splits.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for ten thousand files
            raise
    twice = _seen_twice(examined)
    reports = []
    for number, (name, pairs) in enumerate(examined.items()):
        is_training = number == 0
        frequencies = _frequencies(pairs, scheme.num_classes)
        findings = [*_of_pairs(name, pairs), *twice[name], *_of_classes(name, frequencies, scheme, is_training)]
        if is_training:
            findings += _of_crop(name, pairs, crop_px, resize_px)
        sizes = Counter(pair.size for pair in pairs if pair.size is not None)
        num_masks = sum(pair.pair.mask is not None for pair in pairs)
        unknown = _all_unknown([each.ids for each in pairs if each.ids is not None], scheme)
        reports.append(
            SplitReport(name, len(pairs), num_masks, dict(sizes), frequencies, tuple(findings), unknown_ids=unknown)
        )
    return reports


def check_masks(pairs: Sequence[ImagePair], sizes: Sequence[tuple[int, int]], scheme: ClassScheme) -> None:
    """Reads some masks of a split before anything is computed: all of a small one, evenly spread ones of a large one.

    Args:
        pairs: the split, its headers checked.
        sizes: (height, width) of each, as `check_pairs` gives them.
        scheme: what the ids mean.

    Raises:
        DataError: a mask cannot be used, or none of them has a pixel that counts.
    """
    total_px = sum(height * width for height, width in sizes)
    step = max(1.0, total_px / CHEAP_PX)
    chosen = [pairs[int(i * step)] for i in range(int((len(pairs) - 1) // step) + 1)] if pairs else []
    unknown: list[UnknownIdsError] = []
    has_valid_pixels = False
    for pair in chosen:
        if pair.mask is None:
            return
        try:
            mask = read_mask(pair.mask, scheme)
        except UnknownIdsError as error:
            unknown.append(error)
        else:
            has_valid_pixels = has_valid_pixels or bool((mask != scheme.ignore_index).any())
    together = _all_unknown(unknown, scheme)
    if together is not None:
        more = "" if len(unknown) == 1 else f"\n  so do {len(unknown) - 1} more of the {len(chosen)} masks looked at"
        raise DataError(f"{unknown[0]}{more}" + (f": {together.cause}" if more else ""))
    if not has_valid_pixels and len(chosen) == len(pairs):
        raise DataError(
            f"{shown(pairs[0].mask or pairs[0].image)} and all other masks hold nothing but ignored pixels: "
            "check data.label_map and data.ignore_index"
        )


def _examine_pair(pair: ImagePair, scheme: ClassScheme) -> _Examined:
    found = _Examined(pair)
    try:
        header = read_header(pair.image)
        is_large = header.height_px * header.width_px > _LARGE_PX
    except DataError:
        is_large = False  # what is wrong with it is found below
    if is_large:
        with _large:
            _examine_files(found, scheme)
    else:
        _examine_files(found, scheme)
    return found


def _examine_files(found: _Examined, scheme: ClassScheme) -> None:
    pair = found.pair
    try:
        image = read_image(pair.image)
        found.size = (image.shape[0], image.shape[1])
        found.digest = hashlib.sha256(repr(image.shape).encode() + image.tobytes()).hexdigest()
        found.look = _difference_hash(image)
    except DataError as error:
        found.problems.append(("unreadable", str(error), 0))
    if pair.mask is None:
        return
    try:
        mask = read_mask(pair.mask, scheme)
        is_valid = mask != scheme.ignore_index
        found.counts = np.bincount(mask[is_valid], minlength=scheme.num_classes)
        found.ignored_px = int(mask.size - is_valid.sum())
        if found.size is not None:
            check_same_size(pair, found.size, mask.shape)
    except UnknownIdsError as error:
        found.ids = error
        found.problems.append(("ids", str(error), sum(error.unknown.values())))
    except DataError as error:
        found.problems.append(("size" if found.counts is not None else "mask", str(error), 0))


def _all_unknown(errors: Sequence[UnknownIdsError], scheme: ClassScheme) -> UnknownIds | None:
    """What is wrong with the ids of several masks; their likely cause shows in all of them together."""
    if not errors:
        return None
    pixels: Counter[int] = Counter()
    masks: Counter[int] = Counter()
    present: set[int] = set()
    for error in errors:
        pixels.update(error.unknown)
        masks.update(error.unknown.keys())
        present.update(error.present)
    return UnknownIds(
        pixels=dict(sorted(pixels.items())),
        masks=dict(sorted(masks.items())),
        num_masks=len(errors),
        cause=likely_cause(scheme, present, set(pixels)),
    )


def summary_of_ids(unknown: UnknownIds) -> str:
    """One sentence: which ids, in how many masks, and why."""
    plural = "masks hold" if unknown.num_masks > 1 else "mask holds"
    return f"{unknown.num_masks} {plural} ids outside the classes: {name_ids(unknown.pixels)}. {unknown.cause}"


def _difference_hash(image: NDArray[np.uint8]) -> bytes | None:
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
        findings += [
            Finding("error", kind, split, message, each.pair, num_px=num_px) for kind, message, num_px in each.problems
        ]
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
    return Finding(severity, "leak" if is_leak else "duplicate", split, f"{what} {move}", each.pair, first.pair)


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


def _of_crop(
    split: str, pairs: Sequence[_Examined], crop_px: tuple[int, int], resize_px: tuple[int, int] | None
) -> list[Finding]:
    sizes = [resize_px or each.size for each in pairs if each.size is not None]
    small = [size for size in sizes if size[0] < crop_px[0] or size[1] < crop_px[1]]
    if not small:
        return []
    smallest = min(small, key=lambda size: size[0] * size[1])
    message = (
        f"{split}: {len(small)} of {len(pairs)} images are smaller than data.crop_px {list(crop_px)} (the smallest "
        f"{list(smallest)}{', by data.resize_px' if resize_px else ''}): their crops are padded with ignored pixels; "
        "use a crop of at most the images' size"
    )
    return [Finding("warning", "crop", split, message)]
