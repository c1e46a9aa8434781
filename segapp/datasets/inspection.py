"""Inspection of a data set: unreadable files, unknown ids, copies, look-alikes, and rare or missing classes.

`examine` reads every file once, several at a time, and collects all findings. Images look alike if their perceptual
hashes (pHash) differ in few bits: copies, and frames of a still camera. Another part or view of the same
scene does not.
"""

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from segapp.datasets.files import ImagePair, check_pair, jpeg_damage, read_bytes, read_header, shown
from segapp.datasets.images.pixel_format import RGB8, PixelFormat, in_all_bands
from segapp.datasets.images.raster import check_same_place
from segapp.datasets.images.windows import Windows, compare_ranges, load_image
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.masks import UnknownIds, UnknownIdsError, all_unknown, summary_of_ids
from segapp.datasets.orientation import Fit, Header, Turns
from segapp.datasets.own_data import OwnPair
from segapp.datasets.resources import evenly_spread, side_by_side
from segapp.datasets.targets import (
    MaskCounts,
    Targets,
    absent_note,
    count_files,
    count_mask,
    has_shades,
    ignored_note,
    nothing_to_learn,
)
from segapp.errors import DataError

RARE_FRAC, IGNORABLE_FRAC = 1e-4, 1e-2
"""Classes with a smaller share of the training pixels are reported as rare; the larger limit is for a loss in which
pixels count alike, because a model that never predicts 1 % of the pixels is almost right by it."""

_SHRINK = 16
"""Factor by which blocks of large images are reduced before they are compared."""

_LARGE_PX, _LARGE_FILE_BYTES = 2**25, 2**17
_large = threading.Lock()
"""Held while decoding a larger image, so that memory does not grow with the number of threads."""

_HASH_SIDE = 16
"""A hash has the square of this number of bits."""
_HASH_BYTES = _HASH_SIDE**2 // 8
_ALIKE_BITS = 60
"""Maximum distance of look-alikes. CamVid frames saved as JPEG at another size differ in up to 4 bits, with 1.3 times
the brightness in up to 24, distinct frames of a sequence in 8 or more, and frames of different sequences in 88 or
more."""
_NEIGHBORS = 16
"""Hashes on each side of a hash in a sorted order with which it is compared."""
_FLAT_LEVELS = 8
"""Images with a smaller range of gray levels are not compared."""

KINDS = {
    "orientation": "images with an EXIF orientation",
    "pairs": "images without a mask",
    "pixels": "images of pixels that the config does not say",
    "ids": "masks with ids outside the classes",
    "unreadable": "images that cannot be read",
    "batch": "batches that cannot be drawn",
    "damaged": "images with damaged data",
    "mask": "masks that cannot be read",
    "size": "masks of another size than their image",
    "leak": "images that also occur in another split",
    "group": "groups in both splits",
    "lookalike": "images that look like a training image",
    "all_ignored": "masks with ignored pixels only",
    "duplicate": "images that occur twice in one split",
    "class": "classes",
    "split": "splits",
    "crop": "image sizes smaller than the crop",
    "link": "links",
}
"""Kinds of findings and their descriptions, in the order of the report."""


@dataclass(frozen=True)
class DataProblem:
    """An error or a warning about a data set."""

    severity: Literal["error", "warning"]  # an error makes the data unusable
    kind: str  # a key of `KINDS`
    split: str
    message: str  # a sentence with the file and the next move
    pair: ImagePair | None = None
    other: ImagePair | None = None  # the other pair of a `leak`, `duplicate` or `lookalike`
    num_px: int = 0  # number of wrong pixels, if counted


@dataclass(frozen=True)
class SplitReport:
    """Contents of a split."""

    split: str
    num_pairs: int
    num_masks: int  # pairs with a mask
    sizes: Mapping[tuple[int, int], int]  # number of readable images by (height, width), px
    targets: Targets  # counts over the readable masks
    findings: tuple[DataProblem, ...]  # in the order of the pairs
    unknown_ids: UnknownIds | None = None  # None if every id is known
    ignored: str | None = None  # the share of ignored pixels with its cause; None if it is small


FindingGroup = tuple[str, Sequence[DataProblem]]
"""A summary, and the findings of one kind in a split, starting with the most wrong pixels."""


@dataclass(slots=True)
class _Examined:
    """Result of reading one pair."""

    pair: ImagePair
    size: tuple[int, int] | None = None
    digest: bytes | None = None  # hash of the decoded pixels
    damage: str | None = None  # damage of a JPEG that can be decoded
    hash: bytes | None = None  # `perceptual_hash` of the image
    mask: MaskCounts | None = None
    turn: tuple[Header, Fit] | None = None  # what the sizes say about the EXIF orientation of a pair
    ids: UnknownIdsError | None = None
    problems: tuple[tuple[str, str, int], ...] = ()  # kind, message, pixels

    @contextlib.contextmanager
    def noting(self, kind: str) -> Iterator[None]:
        """Record a reading error as a problem of a kind, or as a problem of ids."""
        try:
            yield
        except UnknownIdsError as error:
            self.ids = error
            self.problems += (("ids", str(error), sum(error.unknown.values())),)
        except DataError as error:
            if all(str(error) != message for _, message, _ in self.problems):  # a photo is read for its mask too
                self.problems += ((kind, str(error), 0),)


def examine(
    splits: Mapping[str, Sequence[ImagePair]],
    scheme: ClassScheme,
    *,
    crop_px: tuple[int, int],
    resize_px: tuple[int, int] | None = None,
    pixels: PixelFormat = RGB8,
    counts_pixels: bool = False,
    threads: int = 2,
    progress: Callable[[], None] = lambda: None,
) -> list[SplitReport]:
    """Read every image and mask of some splits, and return a report for each.

    Args:
        splits: pairs by name of the split; the first one is for training.
        scheme: meaning of the ids in the masks.
        crop_px: height and width of a training crop.
        resize_px: height and width to which images are resized first; None: not resized.
        pixels: bands and type of the images.
        counts_pixels: every pixel counts alike in the loss, whatever its class.
        threads: number of files decoded at a time.
        progress: called once per pair.
    """

    def look_at(pair: ImagePair) -> _Examined:
        found = _examine_pair(pair, scheme, pixels)
        progress()
        return found

    examined = {name: list(side_by_side(look_at, pairs, threads, 4)) for name, pairs in splits.items()}
    twice = _seen_twice(examined)
    reports = []
    first_split = next(iter(examined), "")
    for name, pairs in examined.items():
        is_training = name == first_split
        counted = [each.mask for each in pairs if each.mask is not None]
        targets = Targets.of(name, counted, scheme.num_classes, num_masks=len(counted), num_images=len(pairs))
        findings = [*_of_turns(name, pairs, scheme), *_of_pairs(name, pairs), *twice[name]]
        if not is_training:
            findings += _lookalikes(name, pairs, first_split, examined[first_split], twice[name])
        rare_frac = IGNORABLE_FRAC if counts_pixels else RARE_FRAC
        findings += _of_targets(targets, scheme, rare_frac, is_training=is_training)
        if is_training:
            findings += _of_crop(name, pairs, crop_px, resize_px)
        sizes = Counter(pair.size for pair in pairs if pair.size is not None)
        reports.append(
            SplitReport(
                split=name,
                num_pairs=len(pairs),
                num_masks=sum(pair.pair.mask is not None for pair in pairs),
                sizes=dict(sizes),
                targets=targets,
                findings=tuple(findings),
                unknown_ids=all_unknown([each.ids for each in pairs if each.ids is not None], scheme),
                ignored=ignored_note(targets, scheme),
            )
        )
    return reports


def check_ranges(split: str, pairs: Sequence[ImagePair], scheme: ClassScheme, pixels: PixelFormat) -> list[DataProblem]:
    """Return the findings of `compare_ranges` in up to 16 images; of a large TIFF, only nine squares are read."""
    samples, most_values = list[NDArray[Any]](), 2**25  # decoding them takes half a second
    for pair in evenly_spread(pairs, 16):
        with contextlib.suppress(DataError):  # reported when it is used
            is_own = isinstance(pair, OwnPair)  # its images may take long
            image, missing = (
                (pair.read(scheme, pixels)[0], None) if isinstance(pair, OwnPair) else load_image(pair.image, pixels)
            )
            most_values -= 2**23 if is_own or isinstance(image, Windows) else image.size
            sample = _sampled(image)
            samples.append(sample if missing is None else np.where(_sampled(missing), np.nan, sample))
        if most_values <= 0:
            break
    move = "train with a data.value_range that fits, or scale the images"
    found = compare_ranges(samples, pixels)
    is_enough = len(samples) >= min(8, len(pairs))  # of large images, the budget reads a few, which may be empty
    return [
        DataProblem(severity if is_enough else "warning", "pixels", split, f"{split}: {bands}: {move}")
        for severity, bands in found
    ]


def _sampled(image: NDArray[Any] | Windows) -> NDArray[Any]:
    """Return some pixels (K, B) of an image (H, W, B), evenly spread; of one in windows, pixels of nine squares."""
    if isinstance(image, Windows):
        tops, lefts = (np.linspace(0, max(0, length - 64), 5, dtype=int)[1:4] for length in image.shape[:2])
        image = np.concatenate([image[y : y + 64, x : x + 64] for y in tops for x in lefts])
    return image.reshape(-1, image.shape[-1])[:: image.size // 2**17 | 1].copy()


def _examine_pair(pair: ImagePair, scheme: ClassScheme, pixels: PixelFormat) -> _Examined:
    found = _Examined(pair)
    if isinstance(pair, OwnPair):
        with found.noting("unreadable"):
            image, mask = pair.read(scheme, pixels)
            _note_image(found, image, None, pixels)
            found.mask = count_mask([mask], scheme)
        return found
    with _large if _is_large(pair.image) else contextlib.nullcontext():
        _examine_files(found, scheme, pixels)
    return found


def _is_large(path: Path) -> bool:
    """Return True for an image of more than `_LARGE_PX`; the header of a small file is not read for this."""
    with contextlib.suppress(DataError, OSError):  # reported when it is read
        if path.stat().st_size > _LARGE_FILE_BYTES:
            header = read_header(path)
            return header.height_px * header.width_px > _LARGE_PX
    return False


def _examine_files(found: _Examined, scheme: ClassScheme, pixels: PixelFormat) -> None:
    pair, missing = found.pair, None
    with found.noting("unreadable"):
        image, missing = load_image(pair.image, pixels)
        _note_image(found, image, missing, pixels)
        if pair.image.suffix.lower() in (".jpg", ".jpeg"):
            found.damage = jpeg_damage(read_bytes(pair.image))
    if pair.mask is None:
        return
    with found.noting("mask"):
        found.mask = count_files(pair, scheme, missing)
    if found.size is not None and found.mask is not None:
        with found.noting("size"):
            found.turn = check_pair(pair, pixels)
            check_same_place(pair)


def _note_image(
    found: _Examined, image: NDArray[Any] | Windows, missing: NDArray[np.bool_] | Windows | None, pixels: PixelFormat
) -> None:
    digest = hashlib.sha256(repr(image.shape).encode())
    small, empty = [], []
    for rows in image.row_blocks() if isinstance(image, Windows) else [slice(None)]:
        block = image[rows]
        digest.update(np.ascontiguousarray(block).data)
        grey = cv2.cvtColor(pixels.as_rgb(block), cv2.COLOR_RGB2GRAY)
        hidden = np.zeros(grey.shape, bool) if missing is None else in_all_bands(missing[rows])
        if isinstance(image, Windows):
            size = (-(-grey.shape[1] // _SHRINK), -(-grey.shape[0] // _SHRINK))
            grey = np.asarray(cv2.resize(grey, size, interpolation=cv2.INTER_AREA))
            hidden = cv2.resize(hidden.astype(np.float32), size, interpolation=cv2.INTER_AREA) > 0
        small.append(grey)
        empty.append(hidden)
    found.size = (image.shape[0], image.shape[1])
    gray, is_empty = np.concatenate(small), np.concatenate(empty)
    if not is_empty.all():  # of images without data, one is as good as another
        gray[is_empty] = gray[~is_empty].mean()  # the same area without data in two images is no likeness
        found.digest, found.hash = digest.digest(), perceptual_hash(gray)


def _of_pairs(split: str, pairs: Iterable[_Examined]) -> list[DataProblem]:
    findings = []
    for each in pairs:
        findings += [
            DataProblem("error", kind, split, message, each.pair, num_px=num_px)
            for kind, message, num_px in each.problems
        ]
        if each.damage is not None:
            message = f"{shown(each.pair.image)}: {each.damage}: a part of its pixels is wrong; replace it with a copy"
            findings.append(DataProblem("warning", "damaged", split, message, each.pair))
        if each.mask is not None and not each.mask.valid_px:
            has_data = each.mask.nodata_px < each.mask.ignored_px
            move = "check data.label_map and data.ignore_index, or" if has_data else "no pixel of its image has data:"
            name = shown(each.pair.mask or each.pair.image)
            message = f"{name}: every pixel is ignored; {move} remove it from the split"
            findings.append(DataProblem("warning", "all_ignored", split, message, each.pair))
    return findings


def _of_turns(split: str, pairs: Sequence[_Examined], scheme: ClassScheme) -> Iterator[DataProblem]:
    """Yield findings on EXIF orientations, by sizes that tell and by assumption, each with the first such pair."""
    turns, by_name = Turns(scheme.mask_orientation), {shown(each.pair.image): each.pair for each in pairs}
    for each in pairs:
        if each.turn is not None:
            turns.turn(*each.turn, shown(each.pair.image))
    for name, line in turns.lines("set data.mask_orientation: raw"):
        yield DataProblem("warning", "orientation", split, line, by_name[name])


def _seen_twice(examined: Mapping[str, Sequence[_Examined]]) -> dict[str, list[DataProblem]]:
    """Return leaks (images in two splits) and duplicates (images twice in a split) by split."""
    findings: dict[str, list[DataProblem]] = {name: [] for name in examined}
    everything = [(name, each) for name, pairs in examined.items() for each in pairs if each.digest is not None]
    first_of: dict[bytes | None, tuple[str, _Examined]] = {}
    for split, each in everything:
        first_split, first = first_of.setdefault(each.digest, (split, each))
        if first is not each:
            found = _twice(split, each, first_split, first)
            findings[split].append(found)
    return findings


def _lookalikes(
    split: str, pairs: Sequence[_Examined], first_split: str, firsts: Sequence[_Examined], copies: Iterable[DataProblem]
) -> list[DataProblem]:
    """Return the images of a split that look like one of the first split; exact copies are reported separately."""
    own = [(each.pair, each.hash) for each in pairs if each.hash is not None]
    others = [(each.pair, each.hash) for each in firsts if each.hash is not None]
    known = {id(finding.pair) for finding in copies if finding.kind == "leak"}
    findings = []
    for number, nearest, bits in nearest_hashes([each for _, each in own], [each for _, each in others]):
        pair, other = own[number][0], others[nearest][0]
        if id(pair) not in known:
            same = f"{1 - bits / _HASH_SIDE**2:.0%} of their structure agree"
            message = f"{shown(pair.image)} looks like {shown(other.image)} of {first_split}: {same}"
            findings.append(DataProblem("warning", "lookalike", split, message, pair, other))
    return findings


def perceptual_hash(grey: NDArray[np.uint8]) -> bytes | None:
    """Return the hash of a gray image (H, W), `_HASH_SIDE` squared bits; None if it is flat.

    The hash is pHash (Zauner 2010): the signs of the lowest frequencies of the cosine transform, against their median.
    """
    if int(grey.max()) - int(grey.min()) < _FLAT_LEVELS:
        return None
    small = Image.fromarray(grey).resize((4 * _HASH_SIDE, 4 * _HASH_SIDE), Image.Resampling.LANCZOS)
    lowest = cv2.dct(np.asarray(small, np.float64))[:_HASH_SIDE, :_HASH_SIDE]
    return np.packbits(lowest > np.median(lowest)).tobytes()


def nearest_hashes(hashes: Sequence[bytes], others: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
    """Yield (index, index of the nearest other one, bits apart) of each image that looks like one of the others."""
    found, bits = _nearest(_packed(hashes), _packed(others))
    for number in np.flatnonzero(bits <= _ALIKE_BITS):
        yield int(number), int(found[number]), int(bits[number])


def _packed(hashes: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, _HASH_BYTES)


def _nearest(hashes: NDArray[np.uint8], others: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each hash the index of the nearest other one and the bits in which they differ, both (n,).

    Each hash is compared only with its neighbors in 32 sorted orders, which begin with another byte each, because
    comparing all pairs is quadratic (Charikar 2002, section 3). Similar hashes agree from the start of some byte on:
    hashes that differ in 6 bits share at least 35 successive ones. Of pairs that differ in 40 bits 97 % are found
    among 80,000 images, and of those in 55 bits 85 %.
    """
    num, count = len(hashes), max(1, len(others))
    best = np.full(num, (8 * _HASH_BYTES + 1) * count)  # distance x count + index: the minimum has both
    words, other_words = hashes.view(np.uint64), others.view(np.uint64)
    for first in range(_HASH_BYTES if num and len(others) else 0):
        other_keys = _leading(others, first)
        order = np.argsort(other_keys, kind="stable")
        place = np.searchsorted(other_keys[order], _leading(hashes, first))
        for step in range(-_NEIGHBORS, _NEIGHBORS):
            index = order[np.clip(place + step, 0, count - 1)]
            bits = np.bitwise_count(words ^ other_words[index]).sum(1, dtype=np.int64)
            best = np.minimum(best, bits * count + index)
    return best % count, best // count


def _leading(hashes: NDArray[np.uint8], first: int) -> NDArray[np.uint64]:
    """Return the 64 bits from a byte on, continued at the start, as numbers (n,)."""
    around = np.roll(hashes, -first, axis=1)[:, :8]
    return np.ascontiguousarray(around).view(">u8")[:, 0].astype(np.uint64)


def _twice(split: str, each: _Examined, first_split: str, first: _Examined) -> DataProblem:
    is_leak = split != first_split
    what = f"{shown(each.pair.image)}: the same pixels as {shown(first.pair.image)}"
    if is_leak:
        move = f"of split {first_split}: scores on {split} would be too good; remove it from one of them"
    else:
        move = "of the same split: it counts twice; remove one"
    severity: Literal["error", "warning"] = "error" if is_leak else "warning"
    return DataProblem(severity, "leak" if is_leak else "duplicate", split, f"{what} {move}", each.pair, first.pair)


def _of_targets(targets: Targets, scheme: ClassScheme, rare_frac: float, *, is_training: bool) -> list[DataProblem]:
    """Return an error if nothing can be learned from the masks, else warnings about missing and rare classes."""
    split = targets.split
    problem = nothing_to_learn(targets, scheme, is_training=is_training)
    if problem is not None:
        return [DataProblem("error", "class", split, str(problem))]
    counts, total = targets.frequencies.pixels, targets.valid_px if is_training else 0
    messages = [absent_note(targets, scheme)]
    rare = [
        f"{name} has {100 * count / total:.2g} %"
        for name, count in zip(scheme.names, counts, strict=True)
        if 0 < count < rare_frac * total
    ]
    if rare:
        loss = "loss.class_weights=enet" if scheme.num_classes > 2 else "'loss.plus=[{name: dice}]'"
        cure = loss if rare_frac == IGNORABLE_FRAC else "data.sampling=class-balanced"
        messages.append(
            f"{split}: {', '.join(rare)} of the pixels: a model that never predicts so few is almost right: add {cure}"
        )
    if has_shades(targets, scheme):
        messages.append(ignored_note(targets, scheme))
    return [DataProblem("warning", "class", split, message) for message in messages if message is not None]


def _of_crop(
    split: str, pairs: Sequence[_Examined], crop_px: tuple[int, int], resize_px: tuple[int, int] | None
) -> list[DataProblem]:
    sizes = [resize_px or each.size for each in pairs if each.size is not None]
    small = [size for size in sizes if size[0] < crop_px[0] or size[1] < crop_px[1]]
    if len(small) <= len(sizes) // 5:  # `init` lets a tenth of the images be lower, and a tenth be narrower
        return []
    smallest = min(small, key=lambda size: size[0] * size[1])
    message = (
        f"{split}: {len(small)} of {len(pairs)} images are smaller than data.crop_px {list(crop_px)} (the smallest "
        f"{list(smallest)}{', by data.resize_px' if resize_px else ''}): their crops are padded with ignored pixels; "
        "use a crop of at most the images' size"
    )
    return [DataProblem("warning", "crop", split, message)]


def group_findings(reports: Sequence[SplitReport], before: Sequence[DataProblem]) -> list[FindingGroup]:
    """Group findings by kind and split: errors first, then in the order of `KINDS`."""
    found: dict[tuple[str, str, str], list[DataProblem]] = {}
    for finding in (*before, *(f for report in reports for f in report.findings)):
        found.setdefault((finding.severity, finding.kind, finding.split), []).append(finding)
    unknown = {report.split: report.unknown_ids for report in reports}
    sizes = {report.split: report.num_pairs for report in reports}
    order = list(KINDS)
    groups = list[FindingGroup]()
    for severity, kind, split in sorted(found, key=lambda key: (key[0], order.index(key[1]))):
        findings, ids = found[severity, kind, split], unknown.get(split)
        # One set of ids or one bad division concerns the whole split, so its findings have one summary.
        if kind == "ids" and ids is not None:
            summary = summary_of_ids(ids)
        elif kind == "lookalike":
            summary = (
                f"{len(findings)} of {sizes[split]} images ({len(findings) / sizes[split]:.0%}) look like a training "
                f"image: scores on {split} are too good; keep the images of a scene together with segapp init --group"
            )
        else:
            summary = findings[0].message if len(findings) == 1 else f"{len(findings)} {KINDS[kind]}"
        groups.append((summary, sorted(findings, key=lambda finding: -finding.num_px)))
    return groups
