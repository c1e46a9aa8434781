"""Counts of the masks of a split, weights of classes, errors for masks without classes, and notes for the user.

`read_targets` counts masks before a training, `datasets.inspection` counts them for `segapp check`; both use this
module.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import ImagePair, declared_nodata, shown, turn_of_mask
from segapp.datasets.images.pixel_format import RGB8, PixelFormat, in_all_bands
from segapp.datasets.images.raster import check_same_place
from segapp.datasets.images.windows import Windows, load_ignored, load_missing, mask_blocks
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.masks import Ids, UnknownIdsError, all_unknown, read_masks, without_nodata
from segapp.datasets.orientation import upright
from segapp.datasets.own_data import OwnPair
from segapp.datasets.resources import MASK_READERS, READERS, side_by_side
from segapp.errors import DataError, some_names
from segapp.places import own_folder
from segapp.run.files import write_atomic

IGNORED_SHARE = 0.01
"""Share of ignored pixels from which their cause is reported."""

CHEAP_PX = 2**26
"""Pixels of the masks that are read before a training: all of CamVid, 32 masks of Cityscapes, in half a second."""
_OWN_COST = 8
"""Time to read an image of a custom data set with its mask, relative to a mask file."""
SEARCHED_PX = 2**28
"""Pixels of the masks that are searched for missing classes before a training: two seconds if a class is missing."""

_MAX_NAMED = 8


@dataclass(frozen=True)
class ClassFrequencies:
    """Counts over all masks of a data set, before any augmentation."""

    pixels: tuple[int, ...]  # pixels of each class
    images: tuple[int, ...]  # images with each class
    # For each class, the valid pixels of the images with it. `pixels` divided by these is the frequency of
    # median-frequency balancing (Eigen & Fergus 2015, section 6.3.2).
    pixels_where_present: tuple[int, ...]
    ignored_px: int
    num_images: int
    classes_of_masks: tuple[tuple[int, ...], ...]  # in each mask, in the order of the images that have one
    nodata_px: int = 0  # ignored pixels at which no band of the image has data
    outside_px: int = 0  # ignored pixels outside the valid areas


@dataclass(frozen=True, slots=True)
class MaskCounts:
    """Counts of one mask."""

    pixels: NDArray[np.int64]  # pixels of each class, (C,)
    ignored_px: int
    nodata_px: int  # ignored pixels at which no band of the image has data
    outside_px: int  # ignored pixels outside the valid area
    size: tuple[int, int]  # height and width
    mask_nodata: float | None = None  # value of pixels without data that a file of the mask declares

    @property
    def valid_px(self) -> int:
        return self.size[0] * self.size[1] - self.ignored_px


def count_files(pair: ImagePair, scheme: ClassScheme, missing: NDArray[np.bool_] | Windows | None) -> MaskCounts:
    """Return the counts of the mask files of a pair; `missing` is the mask of nodata of the image."""
    has_ignored = missing is not None or pair.valid_area is not None
    turn = turn_of_mask(pair, scheme.mask_orientation) if has_ignored else 1  # both lie as the upright image
    blocks = mask_blocks(pair.masks, scheme) if turn == 1 else [upright(read_masks(pair.masks, scheme), turn)]
    counts = count_mask(blocks, scheme, missing, load_ignored(pair, None))
    if pair.valid_area is not None and counts.outside_px == math.prod(counts.size):
        problem = "the valid area is empty, every pixel is 0: correct the file, or leave its image out"
        raise DataError(f"{shown(pair.valid_area)}: {problem}", key="data.valid_area", path=pair.valid_area)
    return replace(counts, mask_nodata=declared_nodata(pair.masks[0]))


def count_mask(blocks: Iterable[Ids], scheme: ClassScheme, *ignored: NDArray[np.bool_] | Windows | None) -> MaskCounts:
    """Return the counts of a mask of train ids in blocks of rows; `ignored`: masks of nodata, and of the outside."""
    counts, ignored_px, hidden_px, height, width = np.zeros(scheme.num_classes, np.int64), 0, [0, 0], 0, 0
    for block in blocks:
        for number, where in enumerate(ignored):
            if where is not None and (part := where[height : height + len(block)]).shape[:2] == block.shape:
                block = without_nodata(block, part, scheme)
                hidden_px[number] += int(np.count_nonzero(in_all_bands(part)))
        of_block, ignored_in_block = scheme.count(block)
        counts += of_block
        ignored_px += ignored_in_block
        height, width = height + block.shape[0], block.shape[1]
    return MaskCounts(counts, ignored_px, hidden_px[0], hidden_px[1], (height, width))


def class_frequencies(counted: Sequence[MaskCounts], num_classes: int, *, num_images: int) -> ClassFrequencies:
    """Return the sums of the counts of some masks; `num_images` includes the images without a mask."""
    table = np.stack([each.pixels for each in counted]) if counted else np.zeros((0, num_classes), np.int64)
    where_present = np.where(table > 0, table.sum(1, keepdims=True), 0)
    return ClassFrequencies(
        pixels=tuple(table.sum(0).tolist()),
        images=tuple((table > 0).sum(0).tolist()),
        pixels_where_present=tuple(where_present.sum(0).tolist()),
        ignored_px=sum(each.ignored_px for each in counted),
        num_images=num_images,
        classes_of_masks=tuple(tuple(np.flatnonzero(row).tolist()) for row in table),
        nodata_px=sum(each.nodata_px for each in counted),
        outside_px=sum(each.outside_px for each in counted),
    )


@dataclass(frozen=True)
class Targets:
    """Counts of the masks of a split that were read."""

    split: str  # name of the split
    frequencies: ClassFrequencies  # counts over the masks that were read
    valid_px: int  # pixels of these masks that are not ignored
    num_read: int  # masks that were read
    num_masks: int  # masks of the split
    mask_nodata: tuple[float, ...] = ()  # values that files of masks declare as nodata

    @classmethod
    def of(
        cls, split: str, counted: Sequence[MaskCounts], num_classes: int, *, num_masks: int, num_images: int
    ) -> Targets:
        """Return the sums of the counts of the masks that were read, in the order of the images."""
        frequencies = class_frequencies(counted, num_classes, num_images=num_images)
        declared = {each.mask_nodata for each in counted if each.mask_nodata is not None}
        nodata = tuple(sorted(value for value in declared if not math.isnan(value)))
        return cls(split, frequencies, sum(each.valid_px for each in counted), len(counted), num_masks, nodata)

    @property
    def is_complete(self) -> bool:
        return self.num_read == self.num_masks

    @property
    def ignored_share(self) -> float:
        return self.frequencies.ignored_px / max(1, self.frequencies.ignored_px + self.valid_px)

    @property
    def ignored_by_masks_px(self) -> int:
        """Least number of pixels that are ignored because of their value in a mask."""
        return max(0, self.frequencies.ignored_px - self.frequencies.nodata_px - self.frequencies.outside_px)

    @property
    def where(self) -> str:
        if self.is_complete:
            return f"the {self.num_masks:,} mask{'s' * (self.num_masks != 1)} of split {self.split}"
        return f"the {self.num_read:,} of {self.num_masks:,} masks of split {self.split} that were read"


def read_targets(
    pairs: Sequence[ImagePair],
    split: str,
    scheme: ClassScheme,
    *,
    total_px: float,
    is_training: bool,
    pixels: PixelFormat = RGB8,
) -> Targets:
    """Read and count the masks of a split before a training.

    A small split is read completely. Of a large one, evenly spread masks are read, and then more while a class is
    missing, up to `SEARCHED_PX`. If there is nothing to learn yet, reading continues, because a split is refused only
    if every mask was read. A custom data set, whose masks come with their images, gets an eighth of these limits and is
    not searched further.

    Args:
        pairs: the split; pairs without a mask are left out.
        split: its name, for messages.
        scheme: meaning of the ids.
        total_px: pixels of all masks of the split, which may be an estimate.
        is_training: the split is for training, not for validation.
        pixels: bands and dtype of the images of a custom data set.

    Raises:
        DataError: a mask is not valid, or nothing can be learned from the masks (`nothing_to_learn`).
    """
    masked = [pair for pair in pairs if pair.mask is not None]
    cost = _OWN_COST if isinstance(next(iter(masked), None), OwnPair) else 1
    step = max(1.0, cost * total_px / CHEAP_PX)
    chosen = [int(i * step) for i in range(int((len(masked) - 1) // step) + 1)] if masked else []
    others = sorted(set(range(len(masked))).difference(chosen))
    # Masks next to each other in a list are alike; with a fixed seed, every start and every rank reads the same ones.
    random.Random(0).shuffle(others)
    found: dict[int, MaskCounts] = {}
    while True:
        found |= zip(chosen, count_masks([masked[index] for index in chosen], scheme, pixels), strict=True)
        counted = [found[index] for index in sorted(found)]
        targets = Targets.of(split, counted, scheme.num_classes, num_masks=len(masked), num_images=len(found))
        problem = nothing_to_learn(targets, scheme, is_training=is_training)
        is_long = cost * (targets.valid_px + targets.frequencies.ignored_px) > SEARCHED_PX
        is_searched = not is_training or is_long or not classes_absent(targets, scheme)
        if not others or (problem is None and is_searched) or (is_long and cost > 1):
            break
        # The parts grow, because all counts are summed again after each.
        more = max(8, len(found) // 4)
        chosen, others = others[:more], others[more:]
    if problem is not None and not others:
        raise problem
    return targets


def count_masks(pairs: Sequence[ImagePair], scheme: ClassScheme, pixels: PixelFormat) -> list[MaskCounts]:
    """Return the counts of the masks of some pairs; raise DataError if one is not valid."""

    def counts(pair: ImagePair) -> MaskCounts | UnknownIdsError:
        try:
            check_same_place(pair)
            if isinstance(pair, OwnPair):
                return count_mask([pair.read(scheme, pixels)[1]], scheme)
            return count_files(pair, scheme, load_missing(pair.image, pixels))
        except UnknownIdsError as error:
            return error

    is_own = isinstance(next(iter(pairs), None), OwnPair)  # whose code may not be safe in threads
    results = list(map(counts, pairs) if is_own else side_by_side(counts, pairs, MASK_READERS, 4))
    found = [each for each in results if isinstance(each, MaskCounts)]
    unknown = [each for each in results if isinstance(each, UnknownIdsError)]
    together = all_unknown(unknown, scheme)
    if together is not None:
        more = "" if len(unknown) == 1 else f"\n  so do {len(unknown) - 1} more of the {len(pairs)} masks read"
        raise DataError(f"{unknown[0]}{more}" + (f": {together.cause}" if more else ""), path=unknown[0].path)
    return found


def nothing_to_learn(targets: Targets, scheme: ClassScheme, *, is_training: bool) -> DataError | None:
    """Return the error if no network can be trained, or evaluated, with these masks; None if one can.

    A validation split needs one valid pixel. A training split needs pixels of two classes; if a pixel may have
    several classes, one class that some valid pixels have and others do not is enough.
    """
    present = classes_present(targets, scheme)
    if not targets.num_read:
        return None
    if not targets.valid_px:
        return DataError(
            f"in {targets.where} every pixel is ignored: {ignored_values(targets, scheme)}; "
            "check data.label_map and data.ignore_index",
            key="data.label_map",
        )
    if not is_training:
        return None
    if scheme.multilabel is not None:
        return _one_set(targets, scheme, present)
    if len(present) > 1:
        return None
    only = f"in {targets.where} only one class has pixels, {present[0]}"
    if not targets.ignored_by_masks_px:
        value = scheme.file_ids[scheme.names.index(present[0])]
        what = "one color" if scheme.rgb else f"value {value}"
        return DataError(
            f"{only} ({what}), and a model learns nothing from one class: "
            "check data.mask_dir and data.label_map, or add images with the other classes",
            key="data.mask_dir",
        )
    return DataError(
        f"{only}; {targets.ignored_share:.1%} of all pixels are ignored: {ignored_values(targets, scheme)}; "
        f"{_mapped(scheme, present[0])}",
        key="data.label_map",
    )


def _one_set(targets: Targets, scheme: ClassScheme, present: Sequence[str]) -> DataError | None:
    """Return the error for masks of several classes per pixel if all valid pixels are equal."""
    if not present:
        ignored = ""
        if targets.frequencies.ignored_px:
            ignored = f"; {targets.ignored_share:.1%} of all pixels are ignored: {ignored_values(targets, scheme)}"
        return DataError(
            f"in {targets.where} no class has a pixel{ignored}; check data.multilabel, data.mask_dir and "
            "data.ignore_index",
            key="data.multilabel",
        )
    if scheme.num_classes == 1 and targets.frequencies.pixels[0] == targets.valid_px:
        return DataError(
            f"in {targets.where} every valid pixel is {present[0]}: check data.mask_dir and data.ignore_index",
            key="data.mask_dir",
        )
    return None


def _mapped(scheme: ClassScheme, present: str) -> str:
    """Return how to turn ignored pixels into a class."""
    values = _ignored_ids(scheme)
    others = [number for number, name in enumerate(scheme.names) if name != present]
    if scheme.rgb or len(values) != 1:
        return "map the values that are a class to it in data.label_map"
    if len(others) > 1:
        return (
            f"if that value is a class, map it in data.label_map, such as {{{values[0]}: {others[0]}}} for "
            f"{scheme.names[others[0]]}, and set data.ignore_index: -1"
        )
    return (
        f"if these are {scheme.names[others[0]]}, set data.label_map: {{{values[0]}: {others[0]}}} and "
        "data.ignore_index: -1"
    )


def classes_present(targets: Targets, scheme: ClassScheme) -> list[str]:
    return [name for name, count in zip(scheme.names, targets.frequencies.pixels, strict=True) if count]


def classes_absent(targets: Targets, scheme: ClassScheme) -> list[str]:
    return [name for name, count in zip(scheme.names, targets.frequencies.pixels, strict=True) if not count]


def absent_note(targets: Targets, scheme: ClassScheme) -> str | None:
    """Return a sentence with the classes without a pixel; None if every class has one, or no mask was read."""
    absent = classes_absent(targets, scheme)
    if not absent or not targets.num_read:
        return None
    plural = "classes" if len(absent) > 1 else "class"
    return f"{plural} without a pixel in {targets.where}: {', '.join(absent)}"


def ignored_note(targets: Targets, scheme: ClassScheme) -> str | None:
    """Return the share of ignored pixels with its cause, and nodata that is a class; None for a small share of none."""
    kept = [(value, name) for value in targets.mask_nodata if (name := class_of_nodata(value, scheme)) is not None]
    said = "; ".join(
        f"value {value:g}, nodata of the masks of split {targets.split}, stays class {name}" for value, name in kept
    )
    if targets.ignored_share <= IGNORED_SHARE and targets.ignored_by_masks_px == targets.frequencies.ignored_px:
        return said or None
    advice = f"; {said}" if said else ""
    if has_shades(targets, scheme):
        advice += "; if these are shades at the edges of objects, export the masks without smoothing"
    share = f"{targets.ignored_share:.1%} of the pixels of {targets.where}"
    return f"{share} are ignored: {ignored_values(targets, scheme)}{advice}"


def has_shades(targets: Targets, scheme: ClassScheme) -> bool:
    """Return True if many values of masks with two classes are ignored: probably smoothed edges."""
    has_many_values = not scheme.rgb and len(_ignored_ids(scheme)) > _MAX_NAMED
    share = targets.ignored_by_masks_px / max(1, targets.valid_px + targets.frequencies.ignored_px)
    return scheme.num_classes == 2 and has_many_values and share > IGNORED_SHARE


def ignored_values(targets: Targets, scheme: ClassScheme) -> str:
    """Return which pixels are ignored: those without data, and values in mask files with the key that ignores them."""
    found, counts = [], targets.frequencies
    num_px = targets.valid_px + counts.ignored_px
    if counts.nodata_px:
        share = counts.nodata_px / num_px
        found.append(f"nodata of the images ({share:.1%}; gdal_edit.py -unsetnodata FILE makes it data)")
    if counts.outside_px:
        found.append(f"outside data.valid_area ({counts.outside_px / num_px:.1%})")
    if nodata := [value for value in targets.mask_nodata if class_of_nodata(value, scheme) is None]:
        found.append(f"nodata of the masks ({', '.join(f'{value:.7g}' for value in nodata)})")
    values = [value for value in _ignored_ids(scheme) if value not in nodata]
    named = f"value{'s' * (len(values) > 1)} {some_names([*map(str, values)], _MAX_NAMED)}"
    # Nodata and the outside explain every ignored pixel, so no value in the masks is named.
    if counts.ignored_px and not targets.ignored_by_masks_px:
        pass
    elif scheme.rgb:
        found.append("the colors of data.palette without a class")
    elif values and (scheme.multilabel is not None or values == [scheme.ignore_index]):
        found.append(f"{named} (data.ignore_index)")
    elif values:
        found.append(f"{named} (mapped to data.ignore_index = {scheme.ignore_index})")
    return ", ".join(found) or "no value"


def class_of_nodata(value: float, scheme: ClassScheme) -> str | None:
    """Return the name of the class that a scheme gives to the nodata value of masks; None if it is ignored."""
    if scheme.multilabel is not None or not 0 <= value <= 65_535:
        return None
    gray = (int(value),) * 3
    number = scheme.color_table.get(gray, -1) if scheme.rgb else int(scheme.table[int(value)])
    return scheme.names[number] if 0 <= number < scheme.num_classes and number != scheme.ignore_index else None


def _ignored_ids(scheme: ClassScheme) -> list[int]:
    if scheme.multilabel is not None:
        return [] if scheme.ignored_value is None else [scheme.ignored_value]
    ids = {file_id for file_id, to in (scheme.label_map or {}).items() if to == scheme.ignore_index}
    if scheme.ignore_index >= 0 and scheme.ignore_index not in (scheme.label_map or {}):
        ids.add(scheme.ignore_index)
    return sorted(ids)


RULES = ("inverse", "enet", "median-frequency")


def class_weights(rule: str, frequencies: ClassFrequencies) -> list[float]:
    """Return one weight per class; 0 for a class that never occurs.

    The rules: `inverse`: 1 / share of pixels, scaled to mean 1 over the present classes; `enet`: 1 / ln(1.02 + share)
    (Paszke et al., ENet, 2016); `median-frequency`: median frequency / frequency, where the frequency of a class is its
    share of the pixels of the images that contain it (Eigen & Fergus, 2015).

    Raises:
        ValueError: there is no valid pixel.
    """
    total = sum(frequencies.pixels)
    if total == 0:
        raise ValueError("the training masks have no valid pixel: check data.label_map and data.ignore_index")
    present = [i for i, count in enumerate(frequencies.pixels) if count]
    share = {i: frequencies.pixels[i] / total for i in present}
    if rule == "inverse":
        mean = statistics.fmean(1 / share[i] for i in present)
        weights = {i: 1 / share[i] / mean for i in present}
    elif rule == "enet":
        weights = {i: 1 / math.log(1.02 + share[i]) for i in present}
    else:  # median-frequency
        frequency = {i: frequencies.pixels[i] / frequencies.pixels_where_present[i] for i in present}
        median = statistics.median(frequency.values())
        weights = {i: median / frequency[i] for i in present}
    return [weights.get(i, 0.0) for i in range(len(frequencies.pixels))]


def cached_frequencies(files: Sequence[Path], key: str, count: Callable[[], ClassFrequencies]) -> ClassFrequencies:
    """Return the frequencies of the masks of some images, counted once and then read from the user's cache.

    They are counted again if the name, size or modification time of a file changes, or the key, which holds everything
    else that the count depends on (label map, number of classes).
    """
    digest = hashlib.sha256(key.encode())
    for path, stat in zip(files, side_by_side(os.stat, files, READERS), strict=True):
        digest.update(f"{os.fspath(path.resolve())!r} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    name = f"frequencies-{digest.hexdigest()[:24]}.json"
    try:
        kept: Any = json.loads((own_folder("XDG_CACHE_HOME") / name).read_text())
        return ClassFrequencies(**{key: _as_tuples(value) for key, value in kept.items()})
    except (OSError, ValueError, AttributeError, TypeError):
        pass  # no cache file, an invalid one, or an older one: count
    frequencies = count()
    with contextlib.suppress(OSError):  # without a cache the next run counts again
        write_atomic(own_folder("XDG_CACHE_HOME") / name, json.dumps(asdict(frequencies)), is_derived=True)
    return frequencies


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(each) for each in value) if isinstance(value, list) else value
