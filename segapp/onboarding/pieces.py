"""Several masks per image, one per class; also as run lengths in a table.

Classes are folders (masks/road/a.png) or endings of names (a_road.png). A class without a file is absent from the
image.

Masks of single classes become one mask of classes that exclude each other. This is decided by the share of the labeled
pixels that belong to several classes.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import open_regular, read_header, shown
from segapp.datasets.orientation import Size
from segapp.datasets.resources import evenly_spread
from segapp.errors import ConfigError, DataError
from segapp.onboarding.content import UNREADABLE, stored_pixels
from segapp.onboarding.conversion import (
    UNUSABLE,
    Find,
    Images,
    by,
    drawn_pair,
    size_said,
    values_of,
)
from segapp.onboarding.fields import NO_NAMES, Field
from segapp.onboarding.hypotheses import probe
from segapp.onboarding.layout import DrawnMask, Layout, Mask
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
"""Share of the labeled pixels in several masks above which the masks are opinions about one image, not classes."""
_NUM_DECODED = 24
_MIN_MATCHED = 0.95

Files = dict[str, dict[str, str]]
"""Image -> name of a class or an object -> mask."""


def combine(planes: Sequence[tuple[int, Plane]], canvas: DrawnMask) -> Mask:
    """Return the mask (H, W) of planes of the size `drawn_px`, each with its value.

    0 is the background, and smaller areas are on top of larger ones. ValueError is raised if a plane has another shape.
    """
    for _, plane in planes:
        if plane.shape != canvas.drawn_px:
            raise ValueError(
                f"a mask of {by((plane.shape[0], plane.shape[1]))} pixels next to one of {by(canvas.drawn_px)}: "
                "magick mogrify -filter point -resize WxH 'masks/*' gives masks of one size"
            )
    for value, plane in sorted(planes, key=lambda one: (-int(one[1].sum()), one[0])):
        canvas.paste(plane, 0, 0, value)
    return canvas.mask


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


def reading_of_classes(
    base: Layout,
    names: Sequence[str],
    share: float,
    origins: Mapping[str, tuple[str, str]],
    planes_of: Callable[[str, Size], Mapping[int, Plane]],
    sides: Mapping[str, Size],
) -> Layout:
    """Return the conversion to classes that exclude each other, by their names, see `combine` and `values_of`.

    `share` is the share of the labeled pixels with several classes; ConfigError is raised if they overlap. The origin
    of an image is its file and entry for messages, and a file whose path may contain its split. `planes_of` gets its
    path and the size of its planes, which `sides` has if they may have another size than the image.
    """
    said = f"{share:.1%} of the labeled pixels belong to several classes"
    if share > _MOST_SHARED:
        raise ConfigError(
            f"{base.title}: {said}: list a mask for each class with data.multilabel: files (segapp docs masks)"
        )

    def paint(image: str, canvas: DrawnMask) -> Mask:
        planes = planes_of(image, canvas.drawn_px)
        return combine([(values[number], plane) for number, plane in planes.items()], canvas)

    classes, values = values_of(dict(enumerate(names)), base.sources[0])
    pairs = [
        drawn_pair(image, origin, partial(paint, image), near, sides.get(image, (None, None)))
        for image, (origin, near) in sorted(origins.items())
    ]
    return replace(base, classes=classes, pairs=pairs, evidence=(*base.evidence, said))


def find_pieces(tree: Tree) -> Layout | None:
    """Return the conversion of a mask per class; None for one mask per image.

    ConfigError is raised if each image has a folder of masks, whose objects a layout of pairs would lose.
    """
    masks = [path for path in tree.images if _mask_folder(path) is not None]
    others = [path for path in tree.images if _mask_folder(path) is None]
    images = [path for path in others if any(role_of(part).is_image for part in path.split("/")[:-1])]
    beside = sorted({*others} - {*images})
    if beside and not masks:
        places = [PurePosixPath(path) for path in beside]
        stems = {place.with_suffix("") for place in places}  # names of masks begin with the name of an image
        masks = [str(place) for place in places if any(place.with_name(head) in stems for head, _ in _cuts(place.stem))]
        images = sorted({*beside} - {*masks})
    images = images or others
    find = _finder(tree, images)
    for place in (_in_folder_of_class, _named_after_class):
        by_image: Files = defaultdict(dict)
        matched = set()  # folders of masks that have some of images; others hold other pictures
        for path in masks:
            if (found := place(path, find)) is not None:
                by_image[found[0]].setdefault(found[1], path)
                matched.add(_folders_to_masks(path))
        expected = sum(_folders_to_masks(path) in matched for path in masks)
        if not by_image or sum(map(len, by_image.values())) < _MIN_MATCHED * expected:
            continue
        if (reading := _named_classes(tree, by_image, images)) is not None:
            return reading
    _refuse_folders_of_images(masks, find)
    return None


def _refuse_folders_of_images(masks: Sequence[str], find: Find) -> None:
    """Raise ConfigError for masks/a/1.png or a/masks/1.png, if most images a have several masks."""
    by_image: dict[str, list[str]] = defaultdict(list)
    for path in masks:
        folders = reversed(path.split("/")[-3:-1])
        if (image := next((found for folder in folders if (found := find(folder, path))), None)) is not None:
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


def _folders_to_masks(path: str) -> str:
    """Return the folders of a path, down to the folder of masks."""
    return "/".join(path.split("/")[: (_mask_folder(path) or 0) + 1])


def _finder(tree: Tree, images: Sequence[str]) -> Find:
    """Return a function that finds images by stem, also without leading zeros, close to the mask.

    Of images/rgb/a.jpg and images/nir/a.jpg, the color images are found.
    """
    colored = [path for path in images if "rgb" in path.lower().split("/")[:-1]]
    known = Images(replace(tree, images=tuple(colored or images)))
    return lambda stem, mask: known.find(stem, mask) or known.find(without_zeros(stem), mask)


def _cuts(stem: str) -> Iterator[tuple[str, str]]:
    """Yield the ways to cut a name at a separator, longest beginning first."""
    for match in reversed(list(re.finditer(r"[_\-. ]+", stem))):
        if match.start() and match.end() < len(stem):
            yield stem[: match.start()], stem[match.end() :]


def _in_folder_of_class(path: str, find: Find) -> tuple[str, str] | None:
    """Return image and class of masks/road/a.png: the only folder with neither a word of masks nor a split."""
    parts, stem = path.split("/")[:-1], PurePosixPath(path).stem
    below = [part for part in parts[(_mask_folder(path) or 0) + 1 :] if split_in(part) is None]
    if len(below) != 1:
        return None
    for own in (stem, stem.removesuffix(f"_{below[0]}"), stem.removesuffix("_mask")):
        if (image := find(own, path)) is not None:
            return image, below[0]
    return None


def _named_after_class(path: str, find: Find) -> tuple[str, str] | None:
    """Return image and class of a_road.png."""
    for head, end in _cuts(PurePosixPath(path).stem):
        if (image := find(head, path)) is not None and image != path:
            return image, end
    return None


def _plane(file: Path) -> Plane:
    """Return the nonzero pixels of a mask."""
    try:
        pixels, *_ = stored_pixels(file, as_rgb=False)
    except UNREADABLE as error:
        raise ValueError(f"{shown(file)}: {error}") from error
    return np.asarray((pixels > 0).any(axis=2) if pixels.ndim == 3 else pixels > 0)


def _named_classes(tree: Tree, by_image: Files, images: Sequence[str]) -> Layout | None:
    """Return the conversion of masks whose folders or names are classes; None if they are not."""
    classes = {name: _class_name(name) for own in by_image.values() for name in own}
    scenes = {part for path in images for part in path.split("/")[:-1]}
    if len(classes) < 2 or scenes & classes.keys() or not all(classes.values()):
        return None
    # So many names are numbers of objects.
    if len({*classes.values()}) < len(classes) or len(classes) > max(2, len(by_image) * 2):
        return None
    samples = evenly_spread([own for own in by_image.values() if len(own) > 1], _NUM_DECODED)
    probes = [probe(tree.root / path) for own in samples for path in list(own.values())[:4]]
    # The mask of one class has two values.
    if not probes or any(one is None or (one.num_values or 0) > 2 for one in probes):
        return None
    share = overlap_share([_plane(tree.root / path) for path in own.values()] for own in samples)
    return None if share > _ALIKE else _classes(tree, by_image, classes, len(images), share)


def _class_name(end: str) -> str:
    """Return the class in the ending of a name, without role words; empty if there is none.

    >>> _class_name("mask_road"), _class_name("u_lip"), _class_name("labelIds"), _class_name("3")
    ('road', 'u_lip', '', '')
    """
    words = tokens(end)
    kept = [word for word in words if word.word not in ROLE_WORDS | GLUE_WORDS]
    if not kept or all(word.word.isdecimal() or word.word in SPLIT_WORDS for word in kept):
        return ""
    first = next(i for i, word in enumerate(words) if word.word not in MASK_WORDS - {"l", "ho"})
    return end[words[first].start :]


def _classes(tree: Tree, by_image: Files, classes: Mapping[str, str], num_images: int, share: float) -> Layout:
    """Return the conversion of masks of classes, of whose labeled pixels a share belongs to several."""
    sources = tuple(path for own in by_image.values() for path in own.values())
    base = Layout(
        "class-masks",
        (),
        0.97,
        (f"{len(by_image)} of {num_images} images have masks of single classes, such as {shown(sources[0])}",),
        sources,
        title="masks of single classes",
        classes_reason="from the names of the masks",
    )
    names = sorted(classes, key=lambda name: classes[name].casefold())

    def planes(image: str, _: tuple[int, int]) -> dict[int, Plane]:
        return {names.index(name): _plane(tree.root / path) for name, path in by_image[image].items()}

    origins = {image: (f"masks of {shown(image)}", "") for image in by_image}
    sides = {image: read_header(tree.root / next(iter(own.values()))).size_px for image, own in by_image.items()}
    return reading_of_classes(base, [classes[name] for name in names], share, origins, planes, sides)


_RUNS = re.compile(r"\s*\d+ +\d+( +\d+ +\d+)*\s*")
_EMPTY = {*NO_NAMES, "none", "null", "-1", "-1.0"}
_RUN_NAMES, _CLASS_NAMES = known_words("columns", "run_lengths"), known_words("columns", "classes")
_NUM_ROWS = 200
_RAGGED = 1.2  # borders are this much longer in the wrong order
_MIN_FOUND = 0.3
_ORDERS = {"F": "columns", "C": "rows"}

_Rows = Sequence[tuple[str, str, str, Size | None]]
"""Image, class, runs and size of the image in each row of a table of run lengths."""


def find_rle(tree: Tree) -> list[Layout]:
    """Return the conversions of tables of run lengths: one, or one per possible order of the pixels."""
    images = Images(tree)
    # A sample of a submission, as Kaggle has it, holds runs without meaning.
    paths = [path for path in tree.others_named(".csv") if "submission" not in path.rpartition("/")[2].lower()]
    tables = {path: rows for path in paths if (rows := _read(tree, path, images)) is not None}
    by_image: dict[str, list[tuple[str, str]]] = defaultdict(list)
    missing = set()
    table_of: dict[str, str] = {}
    for table, own in tables.items():
        for said, name, runs, size in own:
            if (image := images.find(said, table)) is None:
                missing.add(said)
                continue
            by_image[image].append((name, runs))
            if size is not None and images.said_px.setdefault(image, size) != size:
                both = f"{by(images.said_px[image])} and {by(size)} pixels"
                raise ValueError(f"{shown(table)}: the rows of {shown(said)} say {both}: correct one of them")
            table_of.setdefault(image, table)
    if not any(runs for rows in by_image.values() for _, runs in rows):
        return []
    return _conversions(tree, images, by_image, table_of, len(missing))


def _read(tree: Tree, path: str, images: Images) -> _Rows | None:
    """Return a table; None for a file without runs of existing images."""
    try:
        with io.TextIOWrapper(open_regular(tree.root / path, None), "utf-8-sig", "replace", newline="") as file:
            return _parse(path, csv.reader(file), images)
    except (OSError, DataError, csv.Error):
        return None


def _parse(path: str, cells: Iterator[list[str]], images: Images) -> _Rows | None:
    head = next(cells, [])
    if not 2 <= len(head) <= 100:
        return None
    names = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in head]
    lines = [row for row in cells if row]
    looked = [row for row in lines[:_NUM_ROWS] if len(row) == len(head)]
    named = [i for i, name in enumerate(names) if name in _RUN_NAMES]
    runs = next((i for i in named if any(_RUNS.fullmatch(row[i]) for row in looked)), None)
    if runs is None:
        return None
    # Programs name the column of the images in many ways, but its cells are images of the folder.
    shares = {i: mean(images.find(row[i], path) is not None for row in looked) for i in range(len(head)) if i != runs}
    column = max(shares, key=lambda i: shares[i])
    if shares[column] < _MIN_FOUND:
        return None
    classes = [i for i, name in enumerate(names) if name in _CLASS_NAMES]
    rows = []
    for number, row in enumerate(lines, start=1):
        if len(row) != len(head) or not row[column].strip():
            problem = f"{len(row)} cells below {len(head)} names" if len(row) != len(head) else f"no {head[column]}"
            raise ValueError(f"{shown(path)}: row {number} has {problem}: complete or remove it")
        name, text = row[classes[0]] if classes else "", row[runs].strip()
        sides = (row[names.index(side)] if side in names else None for side in ("height", "width"))
        # pandas writes a column of whole numbers as floats if a cell is missing.
        name = "" if name.strip().lower() in NO_NAMES else re.sub(r"^(-?\d+)\.0+$", r"\1", name.strip())
        rows.append((row[column], name, "" if text.lower() in _EMPTY else text, size_said(*sides)))
    return rows


def _conversions(
    tree: Tree, images: Images, by_image: dict[str, list[tuple[str, str]]], table_of: Mapping[str, str], missing: int
) -> list[Layout]:
    """Return the conversions of the rows of the images; `missing` is the number of images that are not there."""
    sources = tuple(dict.fromkeys(table_of.values()))
    said = f"{len(by_image)} images in tables of run lengths, such as {shown(sources[0])}"
    coverage = len(by_image) / (len(by_image) + missing)
    notes = _notes_on_empty(tree, by_image)
    if missing:
        notes.append(f"{missing} images in tables of run lengths are not there")
    labels_said = {name for rows in by_image.values() for name, _ in rows if name} or {""}
    labels = sorted(labels_said, key=lambda name: (int(name), "") if name.isdecimal() else (sys.maxsize, name))
    names = ["object"] if labels == [""] else [f"class_{name}" if name.isdecimal() else name for name in labels]
    first = 0 if any(runs.split(" ", 1)[0] == "0" for rows in by_image.values() for _, runs in rows) else 1
    orders, reason = _orders(images, by_image, first)

    def planes(order: str, image: str, size: tuple[int, int]) -> dict[int, Plane]:
        united: dict[int, list[str]] = defaultdict(list)
        for name, runs in by_image[image]:
            if runs and name not in labels:
                raise ValueError("one of its rows has no class")
            if runs:
                united[labels.index(name)].append(runs)
        return {number: decode_starts(" ".join(runs), *size, first, order) for number, runs in united.items()}

    samples: list[Sequence[Plane]] = []
    several = [image for image, rows in by_image.items() if len({name for name, runs in rows if runs}) > 1]
    for image in evenly_spread(several, _NUM_DECODED):
        with contextlib.suppress(*UNUSABLE):  # reported when it is drawn
            samples.append([*planes("F", image, images.size_of(image)).values()])
    share = overlap_share(samples)
    origins = {
        image: (f"{table_of.get(image, '')}: image {shown(image)}", table_of.get(image, "")) for image in by_image
    }
    found = []
    for order in orders:
        base = Layout(
            "rle" if len(orders) == 1 else f"rle-{_ORDERS[order]}",
            (),
            0.97 * coverage,
            (said, f"pixels are numbered by {_ORDERS[order]} from {first}: {reason}"),
            sources,
            title="tables of run lengths",
            classes_reason="from the table" if labels[0][:1].isalpha() else "replace with their names",
            notes=tuple(notes),
        )
        found.append(reading_of_classes(base, names, share, origins, partial(planes, order), images.said_px))
    return found


def _notes_on_empty(tree: Tree, by_image: dict[str, list[tuple[str, str]]]) -> list[str]:
    """Return notes on images without objects; images without a row become background if no row is empty.

    A table with empty rows lists every image, so an image without a row was not annotated.
    """
    has_empty = any(not runs for rows in by_image.values() for _, runs in rows)
    folders = {image.rpartition("/")[0] for image in by_image}
    silent = [path for path in tree.images if path not in by_image and path.rpartition("/")[0] in folders]
    if not silent:
        return []
    said = f"{len(silent)} images without a row, such as {shown(silent[0])},"
    if has_empty:
        return [f"{said} are not used: the table has empty rows for images without objects"]
    by_image |= {image: [] for image in silent}
    return [f"{said} are background"]


def _orders(images: Images, by_image: Mapping[str, Sequence[tuple[str, str]]], first: int) -> tuple[str, str]:
    """Return the possible orders of the pixels, "F" by columns or "C" by rows, and the reason."""
    borders = {"F": 0, "C": 0}  # number of neighbors that differ, which is larger in the wrong order
    longest = sorted(
        ((image, runs) for image, rows in by_image.items() for _, runs in rows if runs), key=lambda one: -len(one[1])
    )
    for image, runs in evenly_spread(longest, _NUM_DECODED):
        with contextlib.suppress(*UNUSABLE):
            height, width = images.size_of(image)
            for order in borders if height != width else "":
                mask = decode_starts(runs, height, width, first, order)
                borders[order] += int((mask[1:] != mask[:-1]).sum() + (mask[:, 1:] != mask[:, :-1]).sum())
    best, worst = sorted(borders, key=lambda order: borders[order])
    if borders[worst] > _RAGGED * borders[best]:
        return best, f"by {_ORDERS[worst]} the shapes are {borders[worst] / max(1, borders[best]):.1f} times as ragged"
    return "FC", "the shapes of square images do not tell"


def decode_starts(runs: str, height_px: int, width_px: int, first: int = 1, order: str = "F") -> Plane:
    """Return the pixels (H, W) of runs "start length start length ..."; without runs there are no pixels.

    >>> decode_starts("1 2 4 1", 2, 2).astype(int).tolist()
    [[1, 0], [1, 1]]

    Pixels are numbered from `first` (0 or 1) down the columns ("F") or along the rows ("C"). ValueError is raised if a
    number is missing or invalid, or a run has no pixel or leaves the image.
    """
    numbers = Field(runs.split(), "run lengths").wholes()
    if len(numbers) % 2:
        raise ValueError(f"run lengths of {len(numbers)} numbers, which are not pairs of a start and a length")
    starts, lengths = numbers[0::2] - first, numbers[1::2]
    size = height_px * width_px
    if (wrong := (starts < 0) | (lengths < 1) | (starts + lengths > size)).any():
        start, length = starts[wrong][0] + first, lengths[wrong][0]
        problem = f"leaves the image of {width_px} x {height_px} pixels" if length > 0 else "has no pixel of the object"
        raise ValueError(f"the run {start} {length} {problem}")
    changes = np.zeros(size + 1, np.int32)
    np.add.at(changes, starts, 1)
    np.add.at(changes, starts + lengths, -1)
    covered = np.cumsum(changes[:-1]) > 0
    return covered.reshape((height_px, width_px), order=order)  # type: ignore[call-overload, no-any-return]
