"""Images that look alike: copies, and images of a split that show the same view as an image of another split.

Two methods are combined. A difference hash of the whole image finds copies with another size, compression or
brightness. Local features (ORB, Rublee et al. 2011) that agree at one offset find overlapping tiles and frames of the
same video. Neither finds another view of the same patient or scene.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

_HASH_PX = 16
"""A difference hash is computed from a reduced image of (N + 1) x N pixels."""
_MAX_BITS_APART = 5
"""Maximum distance of copies, of 256 bits. CamVid frames saved as JPEG at another size differ in up to 7 bits and
distinct frames in 6 or more. So most copies are found, and no neighboring frame is mistaken for a copy."""
_LEAST_SHARED = 0.75
"""Minimum number of common set bits of two look-alikes, as a share of the bits set in either. Frames of different
CamVid sequences reach 0.6, frames with 1.3 times the brightness at least 0.78."""
_LEAST_BITS = 16
"""Images whose hashes have fewer set bits are too plain to compare."""

_FEATURES = 64
_FEATURE_SIDE_PX = 640
"""Longest side of the image in which features are searched; larger images are reduced by an integer factor."""
_MAX_FEATURE_BITS = 32
"""Maximum distance, of 256 bits, of descriptors that agree."""
_LEAST_AGREEING = 6
"""Minimum number of features that agree at one offset. Frames of different CamVid sequences have at most 1."""
_LEAST_SPREAD = 0.1
"""Minimum share of both sides that these features cover, so that a logo or a line of text is no look-alike."""
_OFFSET_PX = 8
_MAX_SAME = 32
"""Features that occur more often are not distinctive, such as the hood of a car or a logo."""
_BLOCK = 256


@dataclass(frozen=True)
class Look:
    """The appearance of an image in about 2 KiB."""

    hash: bytes | None  # difference hash, 32 bytes; None for a flat image
    points: NDArray[np.int16]  # positions of local features, (n, 2), px
    descriptors: NDArray[np.uint8]  # their descriptors, (n, 32) bytes
    side_px: int  # shorter side of the image in which the features were searched

    @property
    def is_plain(self) -> bool:
        """The image has too little structure to be compared."""
        bits = 0 if self.hash is None else int.from_bytes(self.hash, "big").bit_count()
        return bits < _LEAST_BITS and len(self.points) < _LEAST_AGREEING


@dataclass(frozen=True)
class Lookalike:
    """The indices of an image and of the image that it looks like, and their common features."""

    number: int
    other: int
    likeness: str


def look_of(grey: NDArray[np.uint8]) -> Look:
    """Return the appearance of a gray image."""
    factor = -(-max(grey.shape) // _FEATURE_SIDE_PX)
    height, width = (side // factor * factor for side in grey.shape)
    small = grey
    if factor > 1 and min(height, width) > 0:
        size = (width // factor, height // factor)
        small = np.asarray(cv2.resize(grey[:height, :width], size, interpolation=cv2.INTER_AREA), np.uint8)
    orb = cv2.ORB_create(nfeatures=_FEATURES, nlevels=1, edgeThreshold=16, fastThreshold=12)  # type: ignore[attr-defined]
    keypoints, descriptors = orb.detectAndCompute(small, None)
    if descriptors is None:
        descriptors = np.zeros((0, 32), np.uint8)
    points = np.array([each.pt for each in keypoints], np.float32).reshape(-1, 2).round().astype(np.int16)
    return Look(difference_hash(small), points, descriptors, min(small.shape))


def difference_hash(grey: NDArray[np.uint8]) -> bytes | None:
    """Return the difference hash: which pixels of a tiny gray copy are brighter than the left one; None if flat."""
    tiny = cv2.resize(grey, (_HASH_PX + 1, _HASH_PX), interpolation=cv2.INTER_AREA).astype(np.int16)
    if int(tiny.max()) - int(tiny.min()) < 8:
        return None
    # JPEG compression changes differences by one or two gray levels.
    return np.packbits(np.diff(tiny, axis=1) > 2).tobytes()


def find_copies(hashes: Sequence[bytes | None]) -> Iterator[tuple[int, int]]:
    """Yield indices (earlier, later) of images with nearly equal difference hashes; each later one once."""
    known = [i for i, each in enumerate(hashes) if each is not None]
    if not known:
        return
    signs = _bits([hashes[i] for i in known]) * 2 - 1  # the product of two rows is (bits equal) - (bits different)
    least = signs.shape[1] - 2 * _MAX_BITS_APART
    for start in range(0, len(known), 1024):
        products = signs[start : start + 1024] @ signs[: start + 1024].T
        for row, product in enumerate(products, start=start):
            earlier = np.flatnonzero(product[:row] >= least)
            if len(earlier):
                yield known[int(earlier[0])], known[row]


def find_lookalikes(looks: Sequence[Look], others: Sequence[Look]) -> list[Lookalike]:
    """Return the images that look like one of the others, each once, with the most similar one.

    Only the comparison of the hashes grows with the product of the numbers: 5 000 images against 20 000 take seconds.
    """
    found = {each.number: each for each in _by_features(looks, others)}
    found |= {each.number: each for each in _by_hash(looks, others)}
    return [found[number] for number in sorted(found)]


def _bits(hashes: Sequence[bytes | None]) -> NDArray[np.float32]:
    stacked = np.stack([np.frombuffer(each or bytes(_HASH_PX**2 // 8), np.uint8) for each in hashes])
    return np.unpackbits(stacked, axis=1).astype(np.float32)


def _by_hash(looks: Sequence[Look], others: Sequence[Look]) -> Iterator[Lookalike]:
    if not looks or not others:
        return
    bits, bits_of_others = _bits([each.hash for each in looks]), _bits([each.hash for each in others])
    set_in_others = bits_of_others.sum(1)
    for start in range(0, len(looks), _BLOCK):
        block = bits[start : start + _BLOCK]
        common = block @ bits_of_others.T
        either = block.sum(1)[:, None] + set_in_others - common
        share = np.where(common >= _LEAST_BITS, common / np.maximum(either, 1), 0)
        for row, best in enumerate(share.argmax(1)):
            if share[row, best] >= _LEAST_SHARED:
                yield Lookalike(start + row, int(best), f"{share[row, best]:.0%} of their edges agree")


def _by_features(looks: Sequence[Look], others: Sequence[Look]) -> Iterator[Lookalike]:
    """Yield the images that share several features with another image at one offset."""
    if not any(len(each.points) for each in looks) or not any(len(each.points) for each in others):
        return
    image_of_other = np.repeat(np.arange(len(others)), [len(each.points) for each in others])
    points_of_others = np.concatenate([each.points for each in others]).astype(np.int32)
    descriptors_of_others = np.concatenate([each.descriptors for each in others])
    words_of_others = descriptors_of_others.view(np.uint32)
    orders = [np.argsort(words_of_others[:, column], kind="stable") for column in range(8)]
    sorted_words = [words_of_others[order, column] for column, order in enumerate(orders)]
    for start in range(0, len(looks), _BLOCK):
        block = looks[start : start + _BLOCK]
        image = np.repeat(np.arange(len(block)), [len(each.points) for each in block])
        points = np.concatenate([each.points for each in block]).astype(np.int32)
        descriptors = np.concatenate([each.descriptors for each in block])
        if not len(points):
            continue
        matches = _equal_words(descriptors.view(np.uint32), orders, sorted_words)
        different = np.unpackbits(descriptors[matches[:, 0]] ^ descriptors_of_others[matches[:, 1]], axis=1).sum(1)
        own, other = matches[different <= _MAX_FEATURE_BITS].T
        moved = points_of_others[other] - points[own]
        best: dict[int, tuple[int, int]] = {}
        for shift in (0, _OFFSET_PX // 2):  # two grids of offsets, so that no offset is at the edge of both
            cell = (moved + shift) // _OFFSET_PX
            keys = np.stack([image[own], image_of_other[other], cell[:, 0], cell[:, 1], own], axis=1)
            keys = np.unique(keys, axis=0)
            votes, first, count = np.unique(keys[:, :4], axis=0, return_index=True, return_counts=True)
            for row in np.flatnonzero(count >= _LEAST_AGREEING):
                agreeing = points[keys[first[row] : first[row] + count[row], 4]]
                side_px = block[votes[row, 0]].side_px
                if np.ptp(agreeing, axis=0).min() >= _LEAST_SPREAD * side_px:
                    number, known = int(votes[row, 0]), best.get(int(votes[row, 0]), (0, 0))
                    best[number] = max(known, (int(count[row]), int(votes[row, 1])))
        for number, (agreeing_count, match) in best.items():
            total = len(block[number].points)
            yield Lookalike(start + number, match, f"{agreeing_count} of {total} features agree")


def _equal_words(
    words: NDArray[np.uint32], orders: Sequence[NDArray[Any]], sorted_words: Sequence[NDArray[Any]]
) -> NDArray[np.int64]:
    """Return rows (own, other) of descriptors with an equal word (one of eight), unless the word is frequent."""
    found = []
    for column, (order, known) in enumerate(zip(orders, sorted_words, strict=True)):
        low = np.searchsorted(known, words[:, column], "left")
        count = np.searchsorted(known, words[:, column], "right") - low
        count[count > _MAX_SAME] = 0
        own = np.repeat(np.arange(len(words)), count)
        within = np.arange(len(own)) - np.repeat(np.cumsum(count) - count, count)
        found.append(np.stack([own, order[np.repeat(low, count) + within]], axis=1))
    return np.unique(np.concatenate(found), axis=0)
