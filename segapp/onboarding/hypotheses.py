"""Hypotheses about which files are images and which are their masks, ranked by the evidence for them.

Files whose folders and names follow one pattern are a family, such as all of `<split>/masks/*_mask`. Every pair of
families is a hypothesis. Names determine which mask belongs to which image; the words of folders and names, the share
of the images with a mask, and the pixels of a few pairs determine how likely the hypothesis is.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import mean
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import open_bytes, read_bytes, read_header
from segapp.datasets.images.raster import read_bands
from segapp.datasets.images.tiff_tags import TIFF_SUFFIXES
from segapp.datasets.orientation import Header, fit_of_mask
from segapp.datasets.resources import evenly_spread
from segapp.errors import DataError
from segapp.onboarding.layout import Layout, Pair, by_image
from segapp.onboarding.tree import (
    SPLITS,
    SurveyedImage,
    Tree,
    affix_pattern,
    affixes,
    parse_file,
    role_of,
)

Group = TypeVar("Group")

_MAX_PROBED_PX = 40_000_000
_FEW_VALUES = 64
_THUMBNAIL_PX = 48
_MAX_SHIFT_PX = 16  # of thumbnails, by which fields of view lie elsewhere than in the first image
_MAX_FAMILIES = 40
MIN_COVERAGE = 0.5  # share of the images that must have a mask
CLOSE = 0.9  # if the second hypothesis has at least this share of the first's confidence, the user must choose
ODD_SIZES = 0.02  # factor of the confidence if no mask has the size of its image
_NUM_PROBED = 5
_MAX_VERSIONS = 8  # maximum number of folders of annotators or versions; more are scenes
_MIN_SPARSE = 3  # minimum number of masks of a video whose other frames have none
_SPARSE_USED = 0.6  # minimum share of such masks that must have a frame


@dataclass(frozen=True)
class Probe:
    """Contents of a file: its header and, unless it is too large, statistics of its pixels.

    The likeness of a mask is 1 for few values, less for flat areas with many values, near 0 for a photograph. The
    thumbnail has 48 x 48 pixels, as numbers.
    """

    header: Header
    num_values: int | None = None
    mask_likeness: float = 1.0
    thumbnail: NDArray[np.int32] | None = None
    is_field: bool = (
        False  # one value besides 0, in one piece of a quarter of the image or more, but not in its corners
    )


@lru_cache(maxsize=4096)
def probe(path: Path) -> Probe | None:
    """Return the contents of a file; None if it cannot be read."""
    try:
        header = read_header(path)
        if header.height_px * header.width_px > _MAX_PROBED_PX:
            return Probe(header)
        if header.stored is not None and not header.stored.is_picture and path.suffix.lower() in TIFF_SUFFIXES:
            pixels = read_bands(path, (1,))[..., 0]  # Pillow does not decode most dtypes
        else:
            image = open_bytes(read_bytes(path), path)
            pixels = np.asarray(image if image.mode in ("L", "P", "1", "I", "I;16", "F") else image.convert("RGB"))
    except (DataError, OSError, ValueError, SyntaxError):
        return None
    if pixels.dtype.kind == "f":
        pixels = np.ascontiguousarray(pixels, np.float32).view(np.int32)  # different values stay different
    numbers = pixels.astype(np.int32)
    if numbers.ndim == 3:
        numbers = numbers @ np.array([65536, 256, 1], np.int32)
    rows = np.linspace(0, numbers.shape[0] - 1, _THUMBNAIL_PX).astype(int)
    columns = np.linspace(0, numbers.shape[1] - 1, _THUMBNAIL_PX).astype(int)
    num_values = len(np.unique(numbers))
    is_flat = numbers.shape[1] < 2 or np.mean(numbers[:, 1:] == numbers[:, :-1]) >= 0.5
    mask_likeness = 1.0 if num_values <= _FEW_VALUES else 0.7 if is_flat else 0.15
    small = numbers[np.ix_(rows, columns)]
    has_black_corners = not small[:: len(small) - 1, :: len(small) - 1].any()
    inside = np.pad(small > 0, 1)
    is_one_piece = all(np.diff(inside, axis=axis).sum(axis).max() <= 2 for axis in (0, 1))  # in each row and column
    is_field = num_values == 2 and has_black_corners and is_one_piece and bool(inside.mean() > 0.25)
    return Probe(header, num_values, mask_likeness, small, is_field)


def are_all_alike(probes: list[Probe]) -> bool:
    """Return True for three or more nearly equal masks with at least two values: fields of view, also shifted ones."""
    first, *others = [found.thumbnail for found in probes if found.thumbnail is not None]
    if len(others) < 2:
        return False
    shifts = range(-_MAX_SHIFT_PX, _MAX_SHIFT_PX + 1) if all(found.is_field for found in probes) else (0,)
    _, counts = np.unique(first, return_counts=True)
    minority = 1 - counts.max() / first.size
    return minority > 0.04 and all(
        any(_agreement(first, other, shift) > 0.96 for shift in product(shifts, repeat=2)) for other in others
    )


def _agreement(one: NDArray[np.int32], other: NDArray[np.int32], shift_px: tuple[int, ...]) -> float:
    """Return the share of equal pixels where a thumbnail lies on another one that is moved down and to the right."""
    on_one, on_other = (
        tuple(slice(max(0, sign * px), len(one) + min(0, sign * px)) for px in shift_px) for sign in (1, -1)
    )
    return float(np.mean(one[on_one] == other[on_other]))


@dataclass(frozen=True)
class Family:
    """Files whose folders follow one pattern, and possibly their names too: an ending is `img_*`, `*_mask`, `*.png`."""

    pattern: tuple[str, ...]
    ending: str
    files: tuple[SurveyedImage, ...]

    @cached_property
    def varying(self) -> tuple[int, ...]:
        """Positions in `SurveyedImage.scenes` that differ between files."""
        first = self.files[0].scenes
        return tuple(i for i in range(len(first)) if any(file.scenes[i] != first[i] for file in self.files))

    def divided_at(self, position: int) -> list[Family]:
        """Return one family per folder at a position of `SurveyedImage.scenes`, with its name; none for many."""
        place = [i for i, part in enumerate(self.pattern) if part == "*"][position]
        by_folder = _by(self.files, lambda file: file.scenes[position])
        if len(by_folder) > _MAX_VERSIONS:
            return []
        return [
            Family((*self.pattern[:place], name, *self.pattern[place + 1 :]), self.ending, tuple(files))
            for name, files in by_folder.items()
        ]

    @cached_property
    def label(self) -> str:
        """A short name: the folders that all files share, and the ending."""
        columns = zip(*(file.path.split("/") for file in self.files), strict=True)
        folders = [
            column[0] if part == "*" and len({*column}) == 1 else part
            for part, column in zip(self.pattern, columns, strict=False)
        ]
        words = [folder.replace("{split}", "").strip("_-. *") for folder in folders]
        return "/".join(word for word in (*words, self.ending) if word) or "."


def find_families(paths: Iterable[str]) -> list[Family]:
    """Return the families of image files: by folders, also with ending or extension; largest first."""
    listed = list(paths)
    least = max(1, len(listed) // 200)
    families: list[Family] = []
    for pattern, files in _by(map(parse_file, listed), lambda file: file.pattern).items():
        families.append(Family(pattern, "", tuple(files)))
        for groups in (_by(files, affix_pattern), _by(files, lambda file: f"*{file.suffix}")):
            if len(groups) > 1:
                families += [Family(pattern, key, tuple(own)) for key, own in groups.items() if len(own) >= least]
    return sorted(families, key=lambda family: -len(family.files))[:_MAX_FAMILIES]


def _by(files: Iterable[SurveyedImage], key: Callable[[SurveyedImage], Group]) -> dict[Group, list[SurveyedImage]]:
    groups: dict[Group, list[SurveyedImage]] = defaultdict(list)
    for file in files:
        groups[key(file)].append(file)
    return groups


def common_affixes(stems: Iterable[str]) -> tuple[str, str]:
    """Return the prefix and ending that all stems share, without digits at their inner ends.

    >>> common_affixes(["img_001_x1", "img_002_x1"])
    ('img_', '_x1')
    """
    listed = list(stems)
    if len(listed) < 2:
        return "", ""
    both_ways = (listed, [stem[::-1] for stem in listed])
    beginning, reversed_ending = (os.path.commonprefix(own) for own in both_ways)  # noqa: RUF071  # stems are no paths
    return beginning.rstrip("0123456789"), reversed_ending[::-1].lstrip("0123456789")


def frequent_endings(image_stems: set[str], mask_stems: list[str]) -> list[tuple[str, str]]:
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
    return [affix for affix, count in votes.most_common(3) if count >= enough]


_Key = Callable[[SurveyedImage], str | None]


@dataclass(frozen=True)
class _Naming:
    """A rule from image names to mask names: its description, its weight, and the keys that must be equal."""

    words: str
    weight: float
    image_key: _Key
    mask_key: _Key
    shape: str = ""


def find_layouts(tree: Tree) -> list[Layout]:
    """Return the hypotheses, most likely first, except those whose pairs a more likely one also has."""
    families = find_families(tree.images)
    found = [layout for images in families for masks in families for layout in _readings(tree.root, images, masks)]
    ranked: list[Layout] = []
    for layout in sorted(found, key=lambda one: (-one.confidence, -len(one.pairs), len(one.name))):
        if not any(_repeats(layout, better) for better in ranked):
            ranked.append(layout)
    return _named_apart(ranked)


def _repeats(layout: Layout, better: Layout) -> bool:
    """Return True if a better hypothesis has most of the pairs, or most of the images as masks."""
    masks = {pair.mask for pair in better.pairs}
    half = 0.5 * len(layout.pairs)
    return len(layout.files & better.files) >= half or sum(pair.image in masks for pair in layout.pairs) >= half


def _named_apart(ranked: list[Layout]) -> list[Layout]:
    """Return the layouts with different names; of layouts that cannot be distinguished, the most likely is kept."""
    counts = Counter(one.name for one in ranked)
    apart: dict[str, Layout] = {}
    for one in ranked:
        name = one.name
        if counts[name] > 1:
            namings = {other.naming for other in ranked if other.name == name}
            is_enough = len(namings) == counts[name]
            name = one.naming or name if is_enough else f"{one.image_name} -> {name} {one.naming}".rstrip()
        apart.setdefault(name, replace(one, name=name))
    return list(apart.values())


def _readings(root: Path, images: Family, masks: Family) -> Iterator[Layout]:
    """Yield the interpretations of two families as images and masks.

    There are several if each image has several masks, from annotators or versions in separate folders
    (`masks/annotator1`, `v1.2/labels`) or with separate endings (`*_1stHO`, `*_2ndHO`), or if a mask has several images
    (`A`, `B`, `label`).
    """
    suffixes, copies = {file.suffix for file in images.files}, Counter(file.stem for file in images.files)
    if len(suffixes) > 1 and {*copies.values()} == {len(suffixes)}:
        return  # each image is there in several formats, which are families too
    found = _by_naming(root, images, masks)
    yield from found
    if found and not found[0].unpaired:
        return
    if len(masks.varying) > len(images.varying):
        parts = [(images, own) for position in masks.varying for own in masks.divided_at(position)]
    elif len(images.varying) > len(masks.varying) and images is not masks:
        parts = [(own, masks) for position in images.varying for own in images.divided_at(position)]
    else:
        return
    for one, other in parts:
        yield from _by_naming(root, one, other)


def _by_naming(root: Path, images: Family, masks: Family) -> list[Layout]:
    """Return the best naming rule, and the rules that find other masks for as many images."""
    found = [layout for naming in _namings(images, masks) if (layout := _matched(root, images, masks, naming))]
    best: list[Layout] = []
    for layout in sorted(found, key=lambda one: -one.confidence):
        known = {pair.mask for other in best for pair in other.pairs}
        if not best or (
            len(layout.pairs) >= 0.9 * len(best[0].pairs) and not any(pair.mask in known for pair in layout.pairs)
        ):
            best.append(layout)
    return best


def _namings(images: Family, masks: Family) -> Iterator[_Naming]:
    """Yield the possible rules from image names to mask names, simplest first."""
    stem: _Key = attrgetter("stem")
    if images is not masks:
        yield _Naming("their masks have the stem of their image", 1.0, stem, stem)
        yield _Naming("their masks differ from their image's name by words such as mask", 0.99, _core, _core)
    for prefix, ending in frequent_endings({file.stem for file in images.files}, [file.stem for file in masks.files]):
        shape = f"{prefix}*{ending}"
        yield _Naming(f"their masks are named {shape} after their image", 0.98, stem, _stripper(prefix, ending), shape)
    if images is not masks:
        words = "their masks differ from their image's name by a fixed beginning or ending"
        yield _Naming(words, 0.95, _learned(images), _learned(masks))


def _core(file: SurveyedImage) -> str:
    return affixes(file.stem)[1]


def _stripper(prefix: str, ending: str) -> _Key:
    """Return a function that gives a stem without a prefix and an ending, or None if it lacks them."""
    shape = re.compile(f"{re.escape(prefix)}(.+){re.escape(ending)}", re.DOTALL)
    return lambda file: match[1] if (match := shape.fullmatch(file.stem)) else None


def _learned(family: Family) -> _Key:
    """Return a function that gives a stem without what all stems of its split begin and end with."""
    stems = {split: [file.stem for file in family.files if file.split == split] for split in (None, *SPLITS)}
    cores = {split: _stripper(*common_affixes(own)) for split, own in stems.items()}
    return lambda file: cores[file.split](file)


def _matched(root: Path, images: Family, masks: Family, naming: _Naming) -> Layout | None:
    """Return the pairs of two families by one naming rule; None if too few images have a mask."""
    has_splits = any(file.split for file in images.files) and any(file.split for file in masks.files)
    has_scenes = len(images.varying) == len(masks.varying)

    def place(file: SurveyedImage, family: Family) -> tuple[object, ...]:
        scenes = tuple(file.scenes[i] for i in family.varying) if has_scenes else ()
        return (file.split if has_splits else None, scenes)

    by_key: dict[tuple[object, ...], list[SurveyedImage]] = {}
    for file in masks.files:
        if (key := naming.mask_key(file)) is not None:
            by_key.setdefault((*place(file, masks), key.casefold()), []).append(file)
    pairs, unpaired, used = [], [], set()
    labelled = {file.split for file in masks.files} if has_splits else None
    for file in images.files:
        # Test images are often published without masks, which does not count against a hypothesis.
        if labelled is not None and file.split not in labelled:
            continue
        key = naming.image_key(file)
        matches = by_key.get((*place(file, images), (key or "").casefold()), [])
        if len(matches) == 1 and matches[0].path not in used and matches[0].path != file.path:
            used.add(matches[0].path)
            split_file = file if file.split else matches[0]
            scene = tuple(file.scenes[i] for i in images.varying)
            pairs.append(Pair(file.path, matches[0].path, split_file.split, scene))
        else:
            unpaired.append(file.path)
    # A file that is the mask of another one is no image.
    unpaired = [path for path in unpaired if path not in used]
    pairs = [pair for pair in pairs if pair.image not in used]
    coverage = len(pairs) / max(1, len(pairs) + len(unpaired))
    # Of a video few frames have a mask, but nearly every mask has a frame.
    is_sparse = coverage < 0.9 and len(pairs) >= _MIN_SPARSE and len(used) >= _SPARSE_USED * len(masks.files)
    if not pairs or (coverage < MIN_COVERAGE and not is_sparse):
        return None
    return _weighed(root, images, masks, pairs, unpaired, naming, is_sparse=is_sparse)


def _weighed(
    root: Path,
    images: Family,
    masks: Family,
    pairs: list[Pair],
    unpaired: list[str],
    naming: _Naming,
    *,
    is_sparse: bool,
) -> Layout:
    coverage = len(pairs) / (len(pairs) + len(unpaired))
    evidence = [f"{len(pairs)} of {len(pairs) + len(unpaired)} images have a mask; {naming.words}"]
    if is_sparse:
        evidence.append(f"the other {len(unpaired)} images are not used")
    confidence = naming.weight * (max(0.8, coverage**2) if is_sparse else coverage**2)
    confidence *= _name_weight(images, is_mask=False) * _name_weight(masks, is_mask=True)
    probed = [(probe(root / pair.image), probe(root / pair.mask)) for pair in evenly_spread(pairs, _NUM_PROBED)]
    seen = [(image, mask) for image, mask in probed if image is not None and mask is not None]
    if not seen:
        confidence *= 0.3
        evidence.append("no pair could be read")
    else:
        # A few pairs of odd sizes lower the confidence, and do not end it.
        same = mean(float(fit_of_mask(image.header, mask.header) != "neither") for image, mask in seen)
        evidence.append(f"sizes agree in {round(same * len(seen))} of {len(seen)} pairs that were compared")
        confidence *= max(ODD_SIZES, same) * mean(mask.mask_likeness for _, mask in seen)
        if are_all_alike([mask for _, mask in seen]):
            confidence *= 0.65
            evidence.append("these masks are all alike: fields of view (data.valid_area) rather than objects?")
    name = masks.label if masks.label != "." else naming.shape or "masks"
    return Layout(
        name,
        by_image(pairs),
        min(confidence, 0.99),
        tuple(evidence),
        unpaired=tuple(unpaired),
        image_name=images.label,
        naming=naming.shape,
    )


def with_valid_areas(root: Path, chosen: Layout, found: Sequence[Layout]) -> Layout:
    """Return a layout of mask files with the field of view of each image, if the masks of another layout are these."""
    for other in () if chosen.is_drawn else found:
        areas = {pair.image: pair.mask for pair in other.pairs if other is not chosen}
        masks = [probe(root / pair.mask) for pair in evenly_spread(other.pairs, _NUM_PROBED)]
        fields = [mask for mask in masks if mask is not None and mask.is_field]
        # Two masks may be alike by chance.
        if len(fields) < max(3, len(masks)):
            continue
        if not are_all_alike(fields):
            note = f"if the masks in {other.name} are fields of view, name them as data.valid_area: it ignores the rest"
            return replace(chosen, notes=(*chosen.notes, note))
        if all(pair.image in areas for pair in chosen.pairs):
            pairs = tuple(replace(pair, valid_area=areas[pair.image]) for pair in chosen.pairs)
            note = f"pixels outside the fields of view in {other.name} are ignored (data.valid_area)"
            return replace(chosen, pairs=pairs, notes=(*chosen.notes, note))
    return chosen


def _name_weight(family: Family, *, is_mask: bool) -> float:
    """Return how well the words of folders and names fit the role: the first rule that applies decides.

    Files made from masks, such as instances, are hardly masks. The ending decides, or else the nearest folder with a
    word; names without such words may be both.
    """
    roles = [role for word in (family.ending, *reversed(family.pattern)) if (role := role_of(word))]
    if is_mask and any(role.is_other for role in roles):
        return 0.5
    fits = [role.is_mask if is_mask else role.is_image for role in roles]
    if not fits:
        return 0.85 if is_mask else 1.0
    # For a mask, a word above counts too: masks/train/images has two.
    return 1.0 if fits[0] else 0.7 if is_mask and any(fits) else 0.3
