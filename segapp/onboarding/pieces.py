"""Several masks per image, one per class; also as run lengths in a table.

Classes are folders (masks/road/a.png) or endings of names (a_road.png). A class without a file is absent from the
image.

Masks of single classes become one mask of classes that exclude each other. This is decided by the share of the labeled
pixels that belong to several classes.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path, PurePosixPath
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import open_regular, shown
from segapp.errors import ConfigError, DataError
from segapp.onboarding.content import UNREADABLE, stored_pixels
from segapp.onboarding.conversion import (
    UNUSABLE,
    Images,
    check_classes,
    drawn_pair,
    split_said,
)
from segapp.onboarding.hypotheses import probe
from segapp.onboarding.layout import Layout, Mask, Pair, evenly
from segapp.onboarding.tree import (
    GLUE_WORDS,
    MASK_WORDS,
    ROLE_WORDS,
    SPLIT_WORDS,
    Tree,
    known_words,
    role_of,
    split_in,
    tokens,
    without_zeros,
)

Plane = NDArray[np.bool_]

_MOST_SHARED = 0.03
"""Share of the labeled pixels with several classes above which classes do not exclude each other; borders touch."""
_ALIKE = 0.5
"""Masks whose objects overlap more than this (intersection over union) are several opinions about one image."""
_NUM_LOOKED = 24
_MIN_MATCHED = 0.95

Files = dict[str, dict[str, str]]
"""Image -> name of a class or an object -> mask."""


def combine(planes: Mapping[int, Plane], shape: tuple[int, int]) -> Mask:
    """Return the mask (H, W) of class planes (H, W), which are counted from 0 without the background.

    Class c is c + 1, 0 is the background, and smaller areas are on top of larger ones. ValueError is raised if a plane
    has another shape.
    """
    for plane in planes.values():
        if plane.shape != shape:
            raise ValueError(
                f"a mask of {plane.shape[1]} x {plane.shape[0]} pixels for an image of {shape[1]} x {shape[0]}"
            )
    mask = np.zeros(shape, np.uint8)
    for number in sorted(planes, key=lambda number: (-int(planes[number].sum()), number)):
        mask[planes[number]] = number + 1
    return mask


def overlap_share(images: Iterable[Sequence[Plane]]) -> float:
    """Return the share of the labeled pixels that belong to several classes; 0 if no pixel is labeled.

    Planes whose shape differs from the first of their image are left out; the conversion reports them.
    """
    labelled = several = 0
    for planes in images:
        counts = sum(plane.astype(np.uint8) for plane in planes if plane.shape == planes[0].shape)
        labelled += int(np.count_nonzero(counts))
        several += int(np.count_nonzero(np.asarray(counts) > 1))
    return several / labelled if labelled else 0.0


def pairs_of_planes(
    images: Images,
    entries: Mapping[str, tuple[str, str]],
    planes_of: Callable[[str, tuple[int, int]], Mapping[int, Plane]],
) -> list[Pair]:
    """Return a pair per image, whose mask is combined from the planes of its classes, see `combine`.

    The entry of an image is its file and entry for messages, and a file whose path may contain its split; `planes_of`
    gets its path, its height and its width.
    """

    def paint(image: str) -> Mask:
        size = images.size_of(image)
        return combine(planes_of(image, size), size)

    return [drawn_pair(image, origin, partial(paint, image), near) for image, (origin, near) in sorted(entries.items())]


def reading_of_classes(share: float, names: Sequence[str], base: Layout, pairs: Sequence[Pair]) -> Layout:
    """Return the conversion to classes that exclude each other; ConfigError if they overlap.

    `share` is the share of the labeled pixels with several classes; the names exclude the background.
    """
    said = f"{share:.1%} of the labeled pixels belong to several classes"
    if share > _MOST_SHARED:
        raise ConfigError(
            f"{base.title}: {said}: list a mask for each class with data.multilabel: files (segapp docs multilabel)"
        )
    evidence = base.evidence if len(names) == 1 else (*base.evidence, said)
    return replace(base, classes=("background", *names), pairs=pairs, evidence=evidence)


def find_pieces(tree: Tree) -> Layout | None:
    """Return the conversion of a mask per class; None for one mask per image.

    ConfigError is raised if each image has a folder of masks, whose objects a layout of pairs would lose.
    """
    masks = [path for path in tree.images if _mask_folder(path) is not None]
    others = [path for path in tree.images if _mask_folder(path) is None]
    images = [path for path in others if any(role_of(part).is_image for part in path.split("/")[:-1])]
    beside = sorted(set(others) - set(images))
    images = images or others
    if beside and not masks:
        images, masks = _beside_each_other(beside)
    find = _finder(images)
    for place in (_in_folder_of_class, _named_after_class):
        by_image, unmatched = _gathered(masks, partial(place, find=find))
        total = sum(map(len, by_image.values()))
        if not by_image or total < _MIN_MATCHED * (total + unmatched) or max(map(len, by_image.values())) < 2:
            continue
        if (reading := _named_classes(tree, by_image, images)) is not None:
            return reading
    _refuse_folders_of_images(masks, find)
    return None


def _refuse_folders_of_images(masks: Sequence[str], find: _Find) -> None:
    """Raise ConfigError for masks/a/1.png or a/masks/1.png, if most images a have several masks."""
    by_image: dict[str, list[str]] = defaultdict(list)
    for path in masks:
        folders = reversed(path.split("/")[-3:-1])
        if (image := next((found for folder in folders if (found := find(path, folder))), None)) is not None:
            by_image[image].append(path)
    several = {image: own for image, own in by_image.items() if len(own) > 1}
    if len(several) > len(by_image) / 2:
        image, own = next(iter(several.items()))
        raise ConfigError(
            f"{shown(image)} has {len(own)} masks, such as {shown(own[0])}: move masks of classes to "
            "masks/CLASS/IMAGE.png, or unite masks of objects in one, such as np.any(masks, axis=0).astype(np.uint8)"
        )


def _mask_folder(path: str) -> int | None:
    """Return the position of the last folder with a word for masks, unless a later one has a word for images."""
    roles = [role_of(part) for part in path.split("/")[:-1]]
    positions = [i for i, role in enumerate(roles) if role.is_mask and not role.is_other]
    if not positions or any(role.is_image and not role.is_mask for role in roles[positions[-1] + 1 :]):
        return None
    return positions[-1]


_Find = Callable[[str, str], str | None]
"""Function that returns the image of a stem, given a mask and the stem."""


def _finder(images: Sequence[str]) -> _Find:
    """Return a function that finds images by stem, and by the split of the mask if both have splits.

    Numbers have no leading zeros. Of images/rgb/a.jpg and images/nir/a.jpg, the color images are found.
    """

    def normal(stem: str) -> str:
        return without_zeros(stem) or stem.casefold()

    keys = {path: (split_said(path), normal(PurePosixPath(path).stem)) for path in images}
    counts = Counter(keys.values())
    if max(counts.values(), default=0) > 1:
        colored = {path: key for path, key in keys.items() if "rgb" in path.lower().split("/")[:-1]}
        keys, counts = (colored, Counter(colored.values())) if colored else (keys, counts)
    by_key = {key: path for path, key in keys.items() if counts[key] == 1}
    has_splits = any(split for split, _ in keys.values())

    def find(mask: str, stem: str) -> str | None:
        split = split_said(mask) if has_splits else None
        return by_key.get((split, normal(stem))) or by_key.get((None, normal(stem)))

    return find


def _beside_each_other(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return images and masks in the same folder: names of masks begin with the name of an image."""
    stems = {(str(place.parent), place.stem) for place in map(PurePosixPath, paths)}
    images: list[str] = []
    masks: list[str] = []
    for path in paths:
        place = PurePosixPath(path)
        is_mask = any((str(place.parent), head) in stems for head, _ in _cuts(place.stem))
        (masks if is_mask else images).append(path)
    return images, masks


def _cuts(stem: str) -> Iterator[tuple[str, str]]:
    """Yield the ways to cut a name at a separator, longest beginning first."""
    for match in reversed(list(re.finditer(r"[_\-. ]+", stem))):
        if match.start() and match.end() < len(stem):
            yield stem[: match.start()], stem[match.end() :]


def _gathered(masks: Sequence[str], place: Callable[[str], tuple[str, str] | None]) -> tuple[Files, int]:
    """Return the masks by image, and the number of masks without an image in folders that have some images."""
    by_image: Files = defaultdict(dict)
    unmatched = Counter[tuple[str, ...]]()
    matched = set()
    for path in masks:
        found = place(path)
        if found is None or found[1] in by_image[found[0]]:
            unmatched[_folders_to_masks(path)] += 1
        else:
            by_image[found[0]][found[1]] = path
            matched.add(_folders_to_masks(path))
    return {image: own for image, own in by_image.items() if own}, sum(unmatched[folders] for folders in matched)


def _folders_to_masks(path: str) -> tuple[str, ...]:
    """Return the folders above a mask, with the same word for all splits."""
    parts = path.split("/")[:-1]
    last = _mask_folder(path)
    said = [(part, split_in(part)) for part in parts[: len(parts) if last is None else last + 1]]
    return tuple(part if split is None else split[1] for part, split in said)


def _in_folder_of_class(path: str, find: _Find) -> tuple[str, str] | None:
    """Return image and class of masks/road/a.png: the only folder with neither a word of masks nor a split."""
    parts, stem = path.split("/")[:-1], PurePosixPath(path).stem
    below = [part for part in parts[(_mask_folder(path) or 0) + 1 :] if split_in(part) is None]
    if len(below) != 1:
        return None
    for own in (stem, stem.removesuffix(f"_{below[0]}"), stem.removesuffix("_mask")):
        if (image := find(path, own)) is not None:
            return image, below[0]
    return None


def _named_after_class(path: str, find: _Find) -> tuple[str, str] | None:
    """Return image and class of a_road.png."""
    for head, end in _cuts(PurePosixPath(path).stem):
        if (image := find(path, head)) is not None and image != path:
            return image, end
    return None


def _plane(file: Path, shape: tuple[int, int] | None = None) -> Plane:
    """Return the nonzero pixels of a mask; enlarged if both sides of the image are the same multiple of it."""
    try:
        pixels, _ = stored_pixels(file, as_rgb=False)
    except UNREADABLE as error:
        raise ValueError(f"{shown(file)}: {error}") from error
    plane = (pixels > 0).any(axis=2) if pixels.ndim == 3 else pixels > 0
    if shape is not None and shape != plane.shape:
        factor = shape[0] // plane.shape[0]
        if factor > 1 and (plane.shape[0] * factor, plane.shape[1] * factor) == shape:
            plane = plane.repeat(factor, axis=0).repeat(factor, axis=1)
    return np.asarray(plane)


def _some(by_image: Files) -> Sequence[dict[str, str]]:
    """Return the masks of some images that have several masks, evenly spread."""
    return evenly([own for own in by_image.values() if len(own) > 1], _NUM_LOOKED)


def _are_binary(tree: Tree, by_image: Files) -> bool:
    """Return True if the masks of some images have at most two values."""
    probes = [probe(tree.root / path) for own in _some(by_image) for path in list(own.values())[:4]]
    return all(one is not None and (one.num_values or 0) <= 2 for one in probes)


def _planes_of(tree: Tree, by_image: Files) -> Iterator[list[Plane]]:
    for own in _some(by_image):
        try:
            yield [_plane(tree.root / path) for path in own.values()]
        except ValueError:
            continue


def _named_classes(tree: Tree, by_image: Files, images: Sequence[str]) -> Layout | None:
    """Return the conversion of masks whose folders or names are classes; None if they are not."""
    named = list(dict.fromkeys(name for own in by_image.values() for name in own))
    scenes = {part for path in images for part in path.split("/")[:-1]}
    if len(named) < 2 or scenes & set(named):
        return None
    classes = {name: _class_name(name) for name in named}
    if not all(classes.values()) or len(set(classes.values())) < len(classes) or len(named) > max(2, len(by_image) * 2):
        return None
    alike = [_intersection_over_union(planes) for planes in _planes_of(tree, by_image)]
    if not _are_binary(tree, by_image) or (alike and mean(alike) > _ALIKE):
        return None  # several opinions about one image, of which a layout reads one
    return _classes(tree, by_image, classes, images)


def _class_name(end: str) -> str:
    """Return the class in the ending of a name, without role words; empty if there is none.

    >>> _class_name("mask_road"), _class_name("u_lip"), _class_name("labelIds"), _class_name("3")
    ('road', 'u_lip', '', '')
    """
    words = tokens(end)
    kept = [word for word in words if word.word not in ROLE_WORDS | GLUE_WORDS]
    if not kept or all(word.word.isdigit() or word.word in SPLIT_WORDS for word in kept):
        return ""
    first = next(i for i, word in enumerate(words) if word.word not in MASK_WORDS - {"l", "ho"})
    return end[words[first].start :]


def _intersection_over_union(planes: Sequence[Plane]) -> float:
    """Return the mean over all pairs of masks with the same shape."""
    shares = [
        float((one & other).sum() / max(1, (one | other).sum()))
        for one, other in combinations(planes[:4], 2)
        if one.shape == other.shape and one.any() and other.any()
    ]
    return mean(shares) if shares else 0.0


def _classes(tree: Tree, by_image: Files, classes: Mapping[str, str], images: Sequence[str]) -> Layout:
    share = overlap_share(_planes_of(tree, by_image))
    counts = Counter(name for own in by_image.values() for name in own)
    absent = {name: len(by_image) - count for name, count in counts.items() if count < len(by_image)}
    notes = [
        f"{classes[name]} has no mask for {count} of {len(by_image)} images: it is absent there"
        for name, count in sorted(absent.items())[:4]
    ]
    if more := len(absent) - len(notes):
        notes.append(f"{more} more classes have no mask for some images")
    if without := [image for image in images if image not in by_image]:
        notes.append(f"{len(without)} images have no mask of any class and are not used, such as {shown(without[0])}")
    example = next(path for own in by_image.values() for path in own.values())
    base = Layout(
        "class-masks",
        (),
        0.97,
        (
            f"{len(by_image)} of {len(images)} images have masks of single classes, such as {shown(example)}",
            f"{len(classes)} classes",
        ),
        tuple(path for own in by_image.values() for path in own.values()),
        title="masks of single classes",
        classes_reason="from the names of the masks",
        notes=tuple(notes),
    )
    ordered = sorted(classes, key=lambda name: classes[name].casefold())
    number_of = {name: number for number, name in enumerate(ordered)}
    return reading_of_classes(share, [classes[name] for name in ordered], base, _pairs_of(tree, by_image, number_of))


def _pairs_of(tree: Tree, by_image: Files, number_of: Mapping[str, int]) -> list[Pair]:
    """Return a pair per image; `number_of` maps names to classes, without the background."""

    def planes(image: str, size: tuple[int, int]) -> dict[int, Plane]:
        return {number_of[name]: _plane(tree.root / path, size) for name, path in by_image[image].items()}

    entries = {image: (f"masks of {shown(image)}", "") for image in by_image}
    return pairs_of_planes(Images(tree), entries, planes)


_RUNS = re.compile(r"\s*\d+ +\d+( +\d+ +\d+)*\s*")
_EMPTY = {"", "nan", "none", "null", "-1", "-1.0"}
_RUN_NAMES, _CLASS_NAMES = known_words("columns", "run_lengths"), known_words("columns", "classes")
_NUM_LOOKED = 200
_NUM_DECODED = 24
_RAGGED = 1.2  # borders are this much longer in the wrong order
_MIN_FOUND = 0.3
_ORDERS = {"F": "columns", "C": "rows"}


_Rows = Sequence[tuple[str, str, str]]
"""Image, class and runs of each row of a table of run lengths."""


def find_rle(tree: Tree) -> list[Layout]:
    """Return the conversions of tables of run lengths: one, or one per possible interpretation."""
    images = Images(replace(tree, images=tuple(path for path in tree.images if not _is_in_folder_of_masks(path))))
    paths = [path for path in tree.others_named(".csv") if "submission" not in path.rpartition("/")[2].lower()]
    tables = {path: rows for path in paths if (rows := _read(tree, path, images)) is not None}
    if not tables:
        return []
    return _conversions(tree, images, tables)


def _is_in_folder_of_masks(path: str) -> bool:
    roles = [role_of(folder) for folder in path.split("/")[:-1]]
    return any(role.is_mask for role in roles) and not any(role.is_image for role in roles)


def _normal(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _read(tree: Tree, path: str, images: Images) -> _Rows | None:
    """Return a table; None for a file without runs of existing images."""
    limit = csv.field_size_limit(sys.maxsize)  # cells may hold megabytes
    try:
        with io.TextIOWrapper(open_regular(tree.root / path, None), "utf-8-sig", "replace", newline="") as file:
            return _parse(path, csv.reader(file), images)
    except (OSError, DataError, csv.Error):
        return None
    finally:
        csv.field_size_limit(limit)


def _parse(path: str, cells: Iterator[list[str]], images: Images) -> _Rows | None:
    head = next(cells, [])
    if not 2 <= len(head) <= 100:
        return None
    looked = [row for row, _ in zip(cells, range(_NUM_LOOKED), strict=False) if len(row) == len(head)]
    runs = _run_column(head, looked)
    if runs is None:
        return None
    values = [list(dict.fromkeys(row[i] for row in looked)) for i in range(len(head))]
    counts = {
        (i, is_joined): sum(images.find(_image_in(value, is_joined), path) is not None for value in values[i])
        / max(1, len(values[i]))
        for i in range(len(head))
        if i != runs
        for is_joined in (False, True)
    }
    (column, is_joined), share = max(counts.items(), key=lambda one: one[1])
    if share < _MIN_FOUND:
        return None
    classes = [i for i, name in enumerate(head) if _normal(name) in _CLASS_NAMES and i not in (column, runs)]
    label = None if is_joined or not classes else classes[0]
    rows = []
    for row in [*looked, *cells]:
        if len(row) != len(head):
            continue
        value = row[column]
        name = row[label] if label is not None else value.rpartition("_")[2] if is_joined else ""
        text = row[runs].strip()
        rows.append((_image_in(value, is_joined), name.strip(), "" if text.lower() in _EMPTY else text))
    return rows


def _image_in(value: str, is_joined: bool) -> str:
    return value.rpartition("_")[0] if is_joined else value


def _run_column(head: Sequence[str], rows: Sequence[Sequence[str]]) -> int | None:
    """Return the only column that is named like run lengths and holds some."""
    found = []
    for i, name in enumerate(head):
        cells = [row[i] for row in rows if row[i].strip().lower() not in _EMPTY]
        if _normal(name) in _RUN_NAMES and cells and all(_RUNS.fullmatch(cell) for cell in cells):
            found.append(i)
    return found[0] if len(found) == 1 else None


def _conversions(tree: Tree, images: Images, tables: Mapping[str, _Rows]) -> list[Layout]:
    by_image: dict[str, list[tuple[str, str]]] = defaultdict(list)
    table_of: dict[str, str] = {}
    total = 0
    for table, own in tables.items():
        places = {said: images.find(said, table) for said in dict.fromkeys(row[0] for row in own)}
        total += len(places)
        for said, name, runs in own:
            if (image := places[said]) is not None:
                by_image[image].append((name, runs))
                table_of.setdefault(image, table)
    if not any(runs for rows in by_image.values() for _, runs in rows):
        return []
    evidence = (
        f"{len(tables)} {'tables' if len(tables) > 1 else 'table'} of run lengths, such as {shown(next(iter(tables)))}",
        f"{len(by_image)} of {total} images that it names are there",
    )
    coverage = len(by_image) / total
    notes = _notes_on_empty(tree, tables, by_image)
    labels_said = {name for rows in by_image.values() for name, _ in rows}
    labels = sorted(labels_said, key=lambda name: (int(name), "") if name.isdigit() else (sys.maxsize, name))
    names = ["object"] if labels in ([], [""]) else [f"class_{name}" if name.isdigit() else name for name in labels]
    check_classes(["background", *names], next(iter(tables)))
    is_named = labels != [""] and not labels[0].isdigit()
    first = 0 if any(runs.split(" ", 1)[0] == "0" for own in tables.values() for _, _, runs in own) else 1
    orders = _orders(images, by_image, first)

    def planes(order: str, image: str, size: tuple[int, int]) -> dict[int, Plane]:
        united: dict[int, list[str]] = defaultdict(list)
        for name, runs in by_image[image]:
            if runs:
                united[labels.index(name)].append(runs)
        return {number: decode_starts(" ".join(runs), *size, first, order) for number, runs in united.items()}

    several = [image for image, rows in by_image.items() if len({name for name, runs in rows if runs}) > 1]
    samples = evenly(several, _NUM_DECODED) if len(names) > 1 else []
    share = overlap_share(list(planes("F", image, images.size_of(image)).values()) for image in samples)
    found = []
    for order, (confidence, reason) in orders.items():
        base = Layout(
            "rle" if len(orders) == 1 else f"rle-{_ORDERS[order]}",
            (),
            confidence * coverage,
            (*evidence, f"pixels are numbered by {_ORDERS[order]} from {first}: {reason}"),
            tuple(tables),
            title="tables of run lengths",
            classes_reason="from the table" if is_named else "replace with their names",
            notes=notes,
        )
        entries = {}
        for image in by_image:
            path = table_of.get(image, "")
            origin = f"{shown(path)}: image {shown(image)}" if path else f"{shown(image)} without a row"
            entries[image] = (origin, path)
        found.append(reading_of_classes(share, names, base, pairs_of_planes(images, entries, partial(planes, order))))
    return found


def _notes_on_empty(
    tree: Tree, tables: Mapping[str, _Rows], by_image: dict[str, list[tuple[str, str]]]
) -> tuple[str, ...]:
    """Return notes on images without objects; images without a row become background if no row is empty.

    A table with empty rows lists every image, so an image without a row was not annotated.
    """
    notes = []
    empty = [image for image, rows in by_image.items() if not any(runs for _, runs in rows)]
    folders = {image.rpartition("/")[0] for image in by_image}
    silent = [path for path in tree.images if path not in by_image and path.rpartition("/")[0] in folders]
    if silent and any(not runs for own in tables.values() for _, _, runs in own):
        notes.append(
            f"{len(silent)} images without a row are not used, such as {shown(silent[0])}: the table has empty rows "
            "for images without objects"
        )
    elif silent:
        by_image |= {image: [] for image in silent}
        notes.append(f"{len(silent)} images without a row are background, such as {shown(silent[0])}")
    if empty:
        notes.append(f"{len(empty)} images whose runs are empty are background, such as {shown(empty[0])}")
    return tuple(notes)


def _orders(images: Images, by_image: dict[str, list[tuple[str, str]]], first: int) -> dict[str, tuple[float, str]]:
    """Return the possible orders of the pixels, each with its confidence and the reason, the most likely first."""
    borders = Counter({"F": 0, "C": 0})  # number of neighbors that differ
    longest = sorted(
        ((image, runs) for image, rows in by_image.items() for _, runs in rows if runs), key=lambda one: -len(one[1])
    )
    for image, runs in evenly(longest, _NUM_DECODED):
        try:
            height, width = images.size_of(image)
            if height == width:
                continue
            for order in borders:
                mask = decode_starts(runs, height, width, first, order)
                borders[order] += int((mask[1:] != mask[:-1]).sum() + (mask[:, 1:] != mask[:, :-1]).sum())
        except UNUSABLE:
            continue
    (worst, most), (best, least) = borders.most_common()
    if most > _RAGGED * least:
        return {best: (0.97, f"by {_ORDERS[worst]} the shapes are {most / max(1, least):.1f} times as ragged")}
    why = "the shapes of square images do not tell"
    return {"F": (0.9, why), "C": (0.9, why)}


def decode_starts(runs: str, height_px: int, width_px: int, first: int = 1, order: str = "F") -> Plane:
    """Return the pixels (H, W) of runs "start length start length ..."; without runs there are no pixels.

    >>> decode_starts("1 2 4 1", 2, 2).astype(int).tolist()
    [[1, 0], [1, 1]]

    Pixels are numbered from `first` (0 or 1) down the columns ("F") or along the rows ("C"). ValueError is raised if a
    number is missing or invalid, or a run leaves the image.
    """
    numbers = np.array(runs.split(), np.int64)
    if len(numbers) % 2:
        raise ValueError(f"{len(numbers)} numbers, which are not pairs of a start and a length")
    starts, lengths = numbers[0::2] - first, numbers[1::2]
    size = height_px * width_px
    if (wrong := (starts < 0) | (lengths < 0) | (starts + lengths > size)).any():
        start, length = starts[wrong][0] + first, lengths[wrong][0]
        raise ValueError(f"the run {start} {length} leaves the image of {width_px} x {height_px} pixels")
    changes = np.zeros(size + 1, np.int32)
    np.add.at(changes, starts, 1)
    np.add.at(changes, starts + lengths, -1)
    covered = np.cumsum(changes[:-1]) > 0
    return covered.reshape((height_px, width_px), order=order)  # type: ignore[call-overload, no-any-return]
