"""Annotations that become masks: collecting their images, painting their objects, and writing the masks.

Each file has a mark in a PNG text chunk or a TIFF description, is written under a temporary name, and then renamed.
Files without the mark are never overwritten.

There are two kinds of polygons. If (0, 0) is the corner of the first pixel (COCO, CVAT, Label Studio), a pixel belongs
to a polygon if its center is inside, as in pycocotools. If (0, 0) is its center (labelme, YOLO, Supervisely), corners
are rounded and the outline is included, as cv2.fillPoly does. An outline and its holes follow the even-odd rule.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin
from tqdm import tqdm

from segapp.bounds import check_memory
from segapp.datasets.files import MAX_PIXELS, read_header, shown
from segapp.datasets.images.raster import read_description
from segapp.datasets.orientation import Size, Turns, fit_of, upright
from segapp.datasets.walk import composed
from segapp.errors import ConfigError, DataError, storage_errors
from segapp.onboarding.class_files import is_void
from segapp.onboarding.content import IGNORED
from segapp.onboarding.fields import Corners, Field
from segapp.onboarding.layout import Drawing, DrawnMask, Layout, Mask, Pair
from segapp.onboarding.tree import Tree, parse_file, split_said
from segapp.run.files import remove_dead_temporaries, write_atomic
from segapp.run.words import first_line
from segapp.scores import is_background

# Masks are uint8, and 255 is ignored.
MAX_CLASSES = 255
MARK = "segapp-annotation"
_MAX_NAMED = 5
_MAX_REACH = 1.1  # share of a side up to which an object may leave its image, as hasty outlines do

UNUSABLE: tuple[type[Exception], ...] = (DataError, OSError, ValueError)  # errors of reading or drawing an entry

_ON_TOP = (
    "each pixel has one class: where objects of two classes overlap, the one drawn last covers the other; if both "
    "should count, write a mask for each class and set data.multilabel: files"
)
_CROSSINGS_AT_ONCE = 2**20

Rings = Sequence[Corners]
"""An outline and its holes."""

Find = Callable[[str, str], str | None]
"""Function that returns the image for a name, close to a file, given the name and the file."""


class Images:
    """The images of a folder, found by the path, the end of a path, or the name in an annotation."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.said_px: dict[str, Size] = {}  # height and width of an image in a table of annotations

    @functools.cached_property
    def _paths(self) -> dict[str, str]:
        return {composed(path): path for path in self._tree.images}

    @functools.cached_property
    def _by_name(self) -> dict[str, list[str]]:
        """The images by their names and by their stems; only made for a format with a name to look for."""
        found: dict[str, list[str]] = defaultdict(list)
        for path in self._tree.images:
            place = PurePosixPath(composed(path).casefold())
            for word in {place.name, place.stem}:
                found[word].append(path)
        return found

    def find(self, said: str, near: str = "") -> str | None:
        """Return the image for a path, a name or a URL; None if there is none, or if several fit equally well.

        If several images fit, the one that shares the most folders with the annotation file `near` is used.
        """
        clean = composed(unquote(said)).replace("\\", "/").split("?")[0]
        folder = composed(near).rpartition("/")[0]
        for place in (clean, os.path.normpath(f"{folder}/{clean}")):
            if place in self._paths:
                return self._paths[place]
        name = clean.rpartition("/")[2].casefold()
        found = self._by_name.get(name, [])
        if not found and "-" in name:  # Label Studio writes its own id in front of an uploaded name
            found = self._by_name.get(name.partition("-")[2], [])
        folded = {path: composed(path).casefold() for path in found}
        end = clean.casefold()
        ends = [path for path in found if folded[path].endswith(end) or end.endswith(folded[path])]
        if len(found) < 2 or len(ends) == 1:
            return next(iter(ends or found), None)
        scores = Counter({path: len(os.path.commonpath([f"/{folder}", f"/{composed(path)}"])) for path in found})
        scores.update({path: 1000 for path in found if parse_file(path).split == split_said(near)})
        best = scores.most_common(2)
        return best[0][0] if best[0][1] > best[1][1] else None

    def size_of(self, path: str) -> tuple[int, int]:
        """Return the height and width of an image in a table, or upright; raise DataError if it cannot be read."""
        return self.said_px.get(path) or read_header(self._tree.root / path).size_px


@dataclass
class Annotations:
    """The annotated images of a folder in one format: the common part of its readers."""

    tree: Tree
    name: str
    title: str
    draw: Callable[[DrawnMask, Field, int], None]  # draws an object in place, with a value
    label: Callable[[Field], Any]  # returns the name or number of the class of an object
    rank: Callable[[Field], float] = lambda _: 0.0  # objects of a lower rank are drawn first
    unit: str = "pixels"  # of coordinates: pixels, or percent or shares of the sides
    pairs: list[Pair] = field(default_factory=list)  # the images that were added, with masks that are drawn later
    total: int = 0  # number of entries, also of those without an image
    labels: set[Any] = field(default_factory=set)  # of all objects; `by_label` gives them values
    values: dict[Any, int] = field(default_factory=dict)  # label -> value in the mask
    notes: list[str] = field(default_factory=list)  # sentences about contradictions in the annotations
    _files: dict[str, None] = field(default_factory=dict)
    # image -> its objects, each with its place and the size of the image in its entry
    _objects: dict[str, list[tuple[str, Size | None, Field]]] = field(default_factory=dict)
    _several: set[str] = field(default_factory=set)  # images of several entries

    @functools.cached_property
    def images(self) -> Images:
        return Images(self.tree)

    def add(self, path: str, said: str, objects: Field, sides: tuple[Any, Any]) -> None:
        """Add an entry of the file `path` with the name, height and width of its image, unless it is not there.

        Its objects are a list; ValueError is raised for another value. The mask of an image has the objects of all its
        entries, because an object of only one of them would be background in the others.
        """
        self.total += 1
        own = [Field(one.value) for one in objects.items()]
        image = self.images.find(said, path)
        if image is None:
            return
        self._files[path] = None
        for one in own:
            with contextlib.suppress(ValueError):  # reported when it is drawn
                self.labels.add(self.label(one))
        origin, place, size = f"{shown(path)}: image {shown(said)}", "", size_said(*sides)
        if image in self._objects:
            self._several.add(image)
            place = f" of {origin}"
        else:
            self._objects[image] = []
            self.pairs.append(drawn_pair(image, origin, partial(self._paint, self._objects[image]), path, sides))
        self._objects[image] += [(f"object {number}{place}", size, one) for number, one in enumerate(own)]

    def _paint(self, objects: Sequence[tuple[str, Size | None, Field]], canvas: DrawnMask) -> Mask:
        """Return the mask of an image: its objects one after the other, later ones on top.

        ValueError with the number of an object is raised if the object cannot be read.
        """
        ranks, place = [], ""
        try:
            for number, entry in enumerate(objects):
                place, size, one = entry
                check_size(size, canvas)
                ranks.append((self.rank(one), number))
            for _, number in sorted(ranks):
                place, _, one = objects[number]
                if (label := self.label(one)) not in self.values:
                    raise ValueError(f"class {label} is not in the list of classes")
                self.draw(canvas, one, self.values[label])
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        far = canvas.far_px * (100 / np.array(canvas.drawn_px[::-1]) if self.unit == "percent" else 1)
        if far.any() and (far < 1.001).all() and min(canvas.drawn_px) > 2 and self.unit != "shares":
            raise ValueError(f"coordinates look like shares of the sides, not {self.unit}: convert them")
        return canvas.mask

    def by_label(self, entries: str) -> Layout | None:
        """Return the conversion to masks of the labels; None if there are no images.

        Labels that mean unlabeled pixels are ignored, and background is the first class. ValueError is raised if no
        image has an object.
        """
        if not self.pairs:
            return None
        if not any(self._objects.values()):
            raise ValueError(
                f"there are no objects in its {len(self.pairs)} images; annotate some and export them again"
            )
        names = sorted({composed(label) for label in self.labels})
        classes, values = values_of(dict(zip(names, names, strict=True)), next(iter(self._files)))
        self.values = {label: values[composed(label)] for label in self.labels}
        return self.layout(classes, "the labels, by name", [*self._files], entries)

    def layout(
        self, classes: tuple[str, ...], reason: str, sources: Sequence[str], entries: str = "entries"
    ) -> Layout | None:
        """Return the conversion to masks of the classes; None if there are no images."""
        if not self.pairs:
            return None
        there = f"{len(self.pairs)} of {self.total} {entries} of {self.title} name an image that is there"
        if self._several:
            said = f"{len(self._several)} images are in several {entries}, such as {shown(min(self._several))}"
            self.notes.append(f"{said}: the objects of all are drawn")
        return Layout(
            self.name,
            self.pairs,
            0.97 * len(self.pairs) / self.total,
            (there,),
            tuple(sources),
            title=self.title,
            classes=classes,
            classes_reason=reason,
            notes=(_ON_TOP, *self.notes),
        )


def drawn_pair(
    image: str, origin: str, paint: Callable[[DrawnMask], Mask], near: str, sides: tuple[Any, Any] = (None, None)
) -> Pair:
    """Return an image of the data set with a mask at its path that is painted; see `Drawing`.

    The folders or the name of the file `near` give the split if the image's do not.
    """
    split = split_said(image) or split_said(near)
    return Pair(image, f"{os.path.splitext(image)[0]}.png", split, drawing=Drawing(origin, paint, sides=sides))


def size_said(height: Any, width: Any) -> Size | None:
    """Return a height and a width in an annotation, which may be text; None if they say no size."""
    try:
        size = round(float(height)), round(float(width))
    except (TypeError, ValueError, OverflowError):
        return None
    return size if min(size) > 0 else None


def check_size(size: Size | None, canvas: DrawnMask) -> None:
    if size not in (None, canvas.drawn_px):
        raise ValueError(f"it was drawn on {by(size)} pixels, and others of its image on {by(canvas.drawn_px)}")


def values_of(named: Mapping[Any, str], source: str) -> tuple[tuple[str, ...], dict[Any, int]]:
    """Return the names of the classes in masks, background first, and the value of each label, given their names.

    Labels whose name means unlabeled pixels are ignored. DataError is raised if two classes have one name.
    """
    void = [label for label, name in named.items() if is_void(name)]
    ground = [label for label, name in named.items() if is_background(name)]
    others = [label for label in named if label not in {*void, *ground}]
    classes = check_classes([named[ground[0]] if ground else "background", *(named[one] for one in others)], source)
    values = {label: number for number, label in enumerate(others, start=1)}
    return classes, values | dict.fromkeys(ground, 0) | dict.fromkeys(void, IGNORED)


def check_classes(classes: Sequence[Any], source: str) -> tuple[Any, ...]:
    """Return the names, or the numbers, of classes; raise DataError for too many for uint8 masks, or a repeated one."""
    if len(classes) > MAX_CLASSES:
        raise DataError(
            f"{shown(source)}: {len(classes)} classes, but 8-bit masks hold {MAX_CLASSES}: keep fewer classes in it",
            path=source,
        )
    if twice := [name for name, count in Counter(classes).items() if count > 1]:
        raise DataError(f"{shown(source)}: two classes are named {shown(twice[0])}: rename one of them", path=source)
    return tuple(classes)


def json_files(tree: Tree, kind: type) -> Iterator[tuple[str, Field]]:
    """Yield path and content of JSON files with an object (`dict`) or a `list`; raise ValueError for damaged files."""
    for path in tree.others_named(".json"):
        if not tree.read(path, 64).lstrip().startswith(b"[" if kind is dict else b"{"):
            content = tree.read_json(path)
            if isinstance(content, kind):
                yield path, Field(content, f"{shown(path)}: ")


def write_files(
    layout: Layout, folder: Path, root: Path, mask_orientation: str | None = None
) -> tuple[Layout, list[str]]:
    """Write the masks and images of a layout that are drawn; `root` is the folder of its images.

    Return the layout of the written pairs, with notes on the sizes in the annotations, and sentences about the bad
    entries. DataError is raised if every entry is bad, or all but one.
    """
    refuse_foreign(folder, is_written)
    pairs, problems = [], []
    made: set[Path] = set()
    masks: set[str] = set()
    turns = Turns(mask_orientation)
    for pair in tqdm(layout.pairs, "writing", unit="image", disable=None, leave=False):
        assert pair.drawing is not None
        origin = pair.drawing.origin
        # a.jpg and a.png would share a mask file.
        if pair.mask in masks:
            problems.append(f"{origin}: another image has the mask {shown(pair.mask)}: rename the image")
            continue
        masks.add(pair.mask)
        try:
            contents = {} if pair.drawing.image_bytes is None else {pair.image: pair.drawing.image_bytes()}
            if pair.drawing.paint is not None:
                contents[pair.mask] = encode_png(_painted(pair, pair.drawing.paint, root, turns))
        except UNUSABLE as error:
            reason = f"the entry cannot be read ({first_line(error)}): correct or remove it"
            problems.append(f"{origin}: {error if isinstance(error, DataError) else reason}")
            continue
        for name, data in contents.items():
            path = folder / name
            with storage_errors(path):
                if path.parent not in made:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    # An earlier call may have been killed while it wrote here.
                    remove_dead_temporaries(path.parent)
                    made.add(path.parent)
                write_atomic(path, data)
        pairs.append(pair)
    if (more := len(problems) - _MAX_NAMED) > 0:
        problems[_MAX_NAMED:] = [f"and {more} more"]
    if len(pairs) < 2 and problems:
        named = f"{'only one' if pairs else 'no'} entry of {layout.title} can be converted: {'; '.join(problems)}"
        raise DataError(f"{named}: correct the annotations")
    said = (line for _, line in turns.lines("add --mask-orientation raw"))
    return replace(layout, pairs=pairs, notes=(*layout.notes, *said)), problems


def _painted(pair: Pair, paint: Callable[[DrawnMask], Mask], root: Path, turns: Turns) -> Mask:
    """Return the upright mask of a pair, drawn on the image that was annotated, and count what the sizes say."""
    assert pair.drawing is not None
    if pair.drawing.image_bytes is not None:
        return paint(DrawnMask(np.zeros((0, 0), np.uint8), (0, 0)))
    image, drawn_px, name = read_header(root / pair.image), size_said(*pair.drawing.sides), shown(pair.image)
    fit = fit_of(image, drawn_px, may_scale=True)
    if fit == "neither" and drawn_px is not None:
        raise DataError(
            f"{name} has {by(image.size_px)} pixels, but was annotated at {by(drawn_px)}, another ratio of sides: "
            "take the image that was annotated"
        )
    turn = turns.turn(image, fit, name)
    shape = image.size_px if turn == 1 else image.raw_px
    canvas = DrawnMask(np.zeros(shape, np.uint8), drawn_px or shape)
    if max(math.prod(shape), canvas.num_px) > MAX_PIXELS:  # of a TIFF that is read in windows
        raise ValueError(f"a size of {by(max(shape, canvas.drawn_px))} pixels")
    mask = upright(paint(canvas), turn)
    if canvas.drawn_px != shape:
        turns.names["scaled"].append(f"{name} ({by(canvas.drawn_px)}, now {by(shape)} pixels)")
    if drawn_px is None:
        turns.names["unsized"].append(name)
    if canvas.reach > _MAX_REACH:
        turns.names["beyond"].append(f"{name} (up to {canvas.reach:.1f} times its side)")
    return mask


def by(size_px: Size) -> str:
    return f"{size_px[1]} x {size_px[0]}"


def refuse_foreign(folder: Path, is_own: Callable[[Path], bool]) -> None:
    """Raise ConfigError if a folder that segapp named has a link, another owner, or a file that segapp did not write.

    `is_own` returns True for a file that segapp wrote; empty and hidden files count as written.
    """
    for path in [folder, *folder.rglob("*")] if os.path.lexists(folder) else []:
        status = path.lstat()
        is_file = stat.S_ISREG(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            problem = "is a link, and segapp does not write through links"
        elif status.st_uid != os.geteuid():
            problem = "belongs to another user"
        elif path.is_dir() or (is_file and (path.name[0] == "." or not status.st_size or is_own(path))):
            continue
        else:
            problem = "was not written by segapp"
        raise ConfigError(f"{shown(path)} {problem}: remove {shown(folder)}, or choose another folder", path=path)


def is_written(path: Path) -> bool:
    """Return True for a PNG or a TIFF that segapp wrote, even if its end is missing."""
    with path.open("rb") as file:
        is_mask = MARK.encode() in file.read(256)
    return is_mask or (path.suffix == ".tif" and read_description(path) == MARK)


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Return a PNG of ids or gray values (H, W), or RGB (H, W, 3), with the mark of segapp."""
    info = PngImagePlugin.PngInfo()
    info.add_text(MARK, "1")
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", pnginfo=info, compress_level=4)
    return buffer.getvalue()


def fill_polygon(canvas: DrawnMask, rings: Rings, value: int) -> None:
    """Fill an outline, except the holes that follow it, in pixels; (0, 0) is the center of the first pixel."""
    _fill_rounded(canvas.mask, [canvas.scaled(ring, 0.5) for ring in rings], value)


def fill_area(canvas: DrawnMask, rings: Rings, value: int) -> None:
    """Set the pixels whose centers lie inside rings by the even-odd rule.

    (0, 0) is the top left corner of the first pixel. A center on a border belongs to the polygon to the right of or
    below the border, so that neighbors neither overlap nor leave a gap. A polygon that contains no pixel center gets
    the pixels of its outline, so that no object vanishes.
    """
    points = [canvas.scaled(ring) for ring in rings]
    if not _fill_inside(canvas.mask, points, value):
        _fill_rounded(canvas.mask, [ring - 0.5 for ring in points], value)


def box_of(ends: Corners, *, are_pixels: bool = False) -> Corners:
    """Return the four corners of a rectangle from two opposite ones; raise ValueError if they are on one line.

    Ends that are pixels, which belong to the rectangle, may be on one line, or one pixel.
    """
    (x0, y0), (x1, y1) = ends
    if not are_pixels and (x0 == x1 or y0 == y1):
        raise ValueError("the box has no area")
    return np.array([(x0, y0), (x1, y0), (x1, y1), (x0, y1)])


def _fill_rounded(mask: Mask, rings: Sequence[NDArray[np.float64]], value: int) -> None:
    """Fill rings and their outlines, in place, after rounding them to centers of pixels."""
    points = [np.rint(ring) for ring in rings]
    _fill_inside(mask, [ring + 0.5 for ring in points], value)
    cv2.polylines(mask, [ring.astype(np.int32) for ring in points], True, value)


def _fill_inside(mask: Mask, points: Sequence[NDArray[np.float64]], value: int) -> bool:
    """Set the pixels whose centers lie inside rings (V, 2), in place; return False if there are none.

    Only the rows and columns of the image are computed, some edges at a time: cv2.fillPoly takes minutes for ten
    thousand lines that cross each other.
    """
    start = np.concatenate(points)
    end = np.concatenate([np.roll(ring, -1, axis=0) for ring in points])
    height, width = mask.shape
    is_down = (start[:, 1] <= end[:, 1])[:, None]  # always from the upper end, so a line traversed twice rounds equally
    (x0, y0), (x1, y1) = np.where(is_down, start, end).T, np.where(is_down, end, start).T
    first, last = (np.clip(np.ceil(y - 0.5), 0, height).astype(np.int64) for y in (y0, y1))
    count = last - first
    check_memory(8 * int(count.sum()), f"a polygon of {len(start)} corners that crosses itself", num_px=mask.size)
    left, right = (int(np.clip(np.ceil(x - 0.5), 0, width)) for x in (start[:, 0].min(), start[:, 0].max()))
    top, bottom = int(first.min()), int(last.max())
    crossings = np.zeros((bottom - top, right + 1 - left), bool)
    part = np.cumsum(count) // _CROSSINGS_AT_ONCE
    for own in np.split(np.arange(len(count)), np.flatnonzero(np.diff(part)) + 1):
        edge = np.repeat(own, count[own])
        row = np.arange(len(edge)) - np.repeat(np.cumsum(count[own]) - count[own], count[own]) + first[edge]
        x = x0[edge] + (row + 0.5 - y0[edge]) * (x1[edge] - x0[edge]) / (y1[edge] - y0[edge])
        column = np.clip(np.ceil(x - 0.5), left, right).astype(np.int64)
        np.logical_xor.at(crossings, (row - top, column - left), True)
    is_inside = np.logical_xor.accumulate(crossings, axis=1)
    mask[top:bottom, left:right][is_inside[:, : right - left]] = value  # no object reaches the last column
    return bool(is_inside.any())


def area_of(ring: Corners) -> float:
    x, y = ring.T
    return float(abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2)


def decode_runs(
    lengths: NDArray[np.int64], height_px: int, width_px: int, order: str = "C", *, num_px: int = 0
) -> NDArray[np.bool_]:
    """Return the pixels (H, W) of alternating run lengths of background and object, beginning with background.

    They run along the rows ("C": CVAT) or down the columns ("F": COCO). ValueError is raised if they do not fill the
    size, or the size is too large for an image of `num_px` pixels.
    """
    size = height_px * width_px
    check_memory(size, f"a mask of {width_px} x {height_px} pixels", num_px=num_px)
    is_odd = (lengths < 0) | (lengths > size)
    if min(height_px, width_px) < 1 or is_odd.any() or lengths.sum() != size:  # a sum of longer ones may overflow
        raise ValueError(f"run lengths of {sum(map(int, lengths))} pixels for {width_px} x {height_px}")
    values = np.arange(len(lengths)) % 2 == 1
    return np.repeat(values, lengths).reshape((height_px, width_px), order=order)  # type: ignore[call-overload, no-any-return]
