"""Annotations that become masks: the findings of a converter, drawing its objects, and writing the masks.

A mask has a digest of its annotation in a PNG text chunk. An existing file with that digest and its end marker is kept;
any other file is written under a temporary name and renamed, so that writing can be resumed.

A pixel belongs to a polygon of COCO, CVAT or Label Studio if its center is inside, as in pycocotools. It
belongs to a polygon of another format as cv2.fillPoly fills it: corners rounded to the nearest pixel center, outline
included. An outline and its holes are filled together by the even-odd rule. A pixel belongs to an ellipse if its center
is inside. Shapes are clipped to the image before they are drawn. Later objects are drawn on top.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import stat
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from segapp.datasets.files import read_header, shown
from segapp.datasets.images.raster import read_description
from segapp.errors import ConfigError, DataError, install_command, storage_errors
from segapp.onboarding.layout import Drawing, Layout, Mask, Pair, WideMask
from segapp.onboarding.survey.hypotheses import parse_file
from segapp.onboarding.survey.tree import Tree
from segapp.run.files import remove_dead_temporaries, remove_quietly, write_atomic
from segapp.run.words import first_line

IGNORED = 255
MAX_CLASSES = 255
_DIGEST_KEY = "segapp-annotation"
_RULES = "3"  # version of the drawing rules: masks with another version are drawn again
_MAX_NAMED = 5

BAD_ENTRY: tuple[type[Exception], ...] = (
    ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, zlib.error, cv2.error,
)  # fmt: skip
"""Errors of reading an entry whose types, numbers or keys do not follow its format."""
UNUSABLE: tuple[type[Exception], ...] = (DataError, OSError, SyntaxError, *BAD_ENTRY)  # errors of drawing an entry

ON_TOP = (
    "each pixel has one class: where objects of two classes overlap, the one drawn last covers the other; if both "
    "should count, write a mask for each class and set data.multilabel: files"
)
"""Note of converters that draw overlapping objects."""
_MAX_SIDE_PX = 65_536
_MAX_CORNER = 2.0**40  # farther away, float64 places a border less exactly than a thousandth of a pixel
_MAX_LINE_END = 2**24  # lines are cut here before OpenCV, which computes with integers, gets their ends
_CROSSINGS_AT_ONCE = 2**20


@dataclass(frozen=True)
class Annotated:
    """An image with its objects, as listed in the file `path`; `origin` is the file and the entry, for messages."""

    path: str
    origin: str
    image: str
    objects: Sequence[Any]


@dataclass
class Annotations:
    """The annotated images that a converter finds in a folder, and the number of all entries.

    `name` is the layout's name, `title` the format's, `noun` an object's.
    """

    name: str
    title: str
    noun: str
    images: Images
    found: list[Annotated] = field(default_factory=list)
    total: int = 0

    def layout(
        self,
        draw: Callable[[Mask, Any], None],
        evidence: Sequence[str],
        classes: tuple[str, ...],
        reason: str,
        sources: Sequence[str],
        area: Callable[[Any], float] | None = None,
    ) -> Layout:
        """Return the conversion to masks of the classes; `draw` draws an object in place, see `painter`."""
        pairs = []
        for one in self.found:
            paint = painter(self.images, one.image, one.objects, draw, self.noun, area)
            pairs.append(drawn_pair(one.image, one.origin, one.objects, paint, near=one.path))
        return Layout(
            self.name,
            pairs,
            0.97 * len(pairs) / self.total,
            tuple(evidence),
            tuple(sources),
            title=self.title,
            classes=classes,
            classes_reason=reason,
            notes=(ON_TOP,),
        )


def drawn_pair(image: str, origin: str, content: Any, paint: Callable[[], WideMask], near: str = "") -> Pair:
    """Return an image of the data set with a mask at its path that is painted; see `Drawing`.

    The folders or the name of the file `near` give the split if the image's do not.
    """
    split = split_said(image) or split_said(near)
    return Pair(image, f"{mask_target(image)}.png", split, drawing=Drawing(origin, content, paint))


def check_classes(classes: Sequence[Any], source: str) -> tuple[Any, ...]:
    """Return the names, or the numbers, of classes; raise DataError if there are too many for uint8 masks."""
    if len(classes) > MAX_CLASSES:
        raise DataError(
            f"{shown(source)}: {len(classes)} classes, but 8-bit masks hold {MAX_CLASSES}: keep fewer classes in it",
            path=source,
        )
    return tuple(classes)


def write_files(layout: Layout, folder: Path) -> tuple[list[Pair], list[str], int]:
    """Write the masks and images of a layout that are drawn and do not exist yet.

    Return the written pairs, sentences about the bad entries, and the number of pairs whose files already existed.
    DataError is raised if every entry is bad.
    """
    refuse_foreign(folder, _is_written)
    pairs, problems, num_kept = [], [], 0
    made: set[Path] = set()
    masks: set[str] = set()
    for pair in tqdm(layout.pairs, "writing", unit="image", disable=None, leave=False):
        assert pair.drawing is not None
        origin = pair.drawing.origin
        if pair.mask in masks:
            problems.append(f"{origin}: its image {shown(pair.image)} has been annotated before: entry left out")
            continue
        masks.add(pair.mask)
        wanted = _wanted(pair, pair.drawing, layout.classes, folder)
        for place in {path.parent for path in wanted} - made:
            with storage_errors(place):
                place.mkdir(parents=True, exist_ok=True)
                remove_dead_temporaries(place)
            made.add(place)
        try:
            missing = [path for path, (is_there, _) in wanted.items() if not is_there(path)]
            for path in missing:
                data = wanted[path][1]()
                with storage_errors(path):
                    write_atomic(path, data)
        except UNUSABLE as error:
            for path in wanted:
                remove_quietly(path)
            reason = f"the entry cannot be read ({problem_of(error)}): correct or remove it"
            problems.append(f"{origin}: {error if isinstance(error, DataError) else reason}")
            continue
        num_kept += not missing
        pairs.append(pair)
    if not pairs:
        named = "; ".join(problems[:_MAX_NAMED])
        raise DataError(f"no entry of {layout.title} can be converted: {named}: correct the annotations")
    if (more := len(problems) - _MAX_NAMED) > 0:
        problems[_MAX_NAMED:] = [f"and {more} more"]
    return pairs, problems, num_kept


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
        raise ConfigError(f"{shown(path)} {problem}: remove {shown(folder)}, or choose another --out", path=path)


def _is_written(path: Path) -> bool:
    """Return True for a PNG or a TIFF that segapp wrote, even if its end is missing."""
    with path.open("rb") as file:
        is_mask = _DIGEST_KEY.encode() in file.read(256)
    return is_mask or (path.suffix == ".tif" and re.fullmatch("[0-9a-f]{32}", read_description(path) or "") is not None)


def _wanted(
    pair: Pair, drawing: Drawing, classes: Sequence[str], folder: Path
) -> dict[Path, tuple[Callable[[Path], bool], Callable[[], bytes]]]:
    """Return the files of a pair to write: whether a complete one exists, and its content."""
    wanted: dict[Path, tuple[Callable[[Path], bool], Callable[[], bytes]]] = {}
    if drawing.image_bytes is not None:
        digest = digest_of(drawing.content)
        wanted[folder / pair.image] = (partial(_is_file_of, digest=digest), partial(drawing.image_bytes, digest))
    if not drawing.is_mask_there:
        digest = digest_of((classes, drawing.content))
        wanted[folder / pair.mask] = (partial(_is_file_of, digest=digest), lambda: encode_png(drawing.paint(), digest))
    return wanted


def digest_of(content: Any) -> str:
    """Return 32 hexadecimal digits for a value that consists of plain values and bytes."""
    data = repr((_RULES, content)).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def problem_of(error: Exception) -> str:
    """Return the problem of an entry from one of the errors in BAD_ENTRY."""
    return f"{error} is missing" if isinstance(error, KeyError) else first_line(error)


def _is_file_of(path: Path, digest: str) -> bool:
    """Return True for a complete PNG or TIFF with this content; read only the header and the end of the file."""
    if not path.is_file():
        return False
    if path.suffix != ".png":
        return read_description(path) == digest
    try:
        read_header(path)
        with Image.open(path) as image:
            return image.format == "PNG" and image.info.get(_DIGEST_KEY) == digest
    except (DataError, OSError, SyntaxError, ValueError):
        return False


def file_state(path: Path) -> tuple[int, int]:
    """Return a value that changes if a file is written again: its size in bytes and its time in nanoseconds."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def as_ids(values: NDArray[Any], largest: int) -> WideMask:
    """Return values of any dtype as 8-bit ids, or 16-bit ids if some are above 255; ValueError if they are no ids."""
    if values.dtype == np.uint8:
        return values
    low, high = values.min(initial=0), values.max(initial=0)
    if not (low >= 0 and high <= largest):
        raise ValueError(f"values from {low} to {high}, which are not ids of 0 to {largest}")
    ids: WideMask = values.astype(np.uint8) if high <= 255 else values.astype(np.uint16)
    if not (ids == values).all():
        raise ValueError("numbers with fractions, which are not ids")
    return ids


def encode_png(pixels: NDArray[np.uint8] | NDArray[np.uint16], digest: str) -> bytes:
    """Return a PNG of ids or gray values (H, W), or RGB (H, W, 3), with the digest of its content."""
    info = PngImagePlugin.PngInfo()
    info.add_text(_DIGEST_KEY, digest)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", pnginfo=info, compress_level=4)
    return buffer.getvalue()


def json_files(tree: Tree, kind: type, *, folder: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and content of JSON files with an object (`dict`) or a `list`, in folders with this ending."""
    first = b"{" if kind is dict else b"["
    for path in tree.others_named(".json"):
        if path.rpartition("/")[0].endswith(folder) and first in tree.read(path, 64):
            content = tree.read_json(path)
            if isinstance(content, kind):
                yield path, content


class Images:
    """The images of a folder, found by the path, the end of a path, or the name in an annotation."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._paths = set(tree.images)
        self._by_name: dict[str, list[str]] = defaultdict(list)
        self._by_stem: dict[str, list[str]] = defaultdict(list)
        for path in tree.images:
            name = PurePosixPath(path)
            self._by_name[name.name.casefold()].append(path)
            self._by_stem[name.stem.casefold()].append(path)

    def find(self, said: str, near: str = "") -> str | None:
        """Return the image for a path, a name or a URL; None if there is none, or if several fit equally well.

        If several images fit, the one that shares the most folders with the annotation file `near` is used.
        """
        clean = unquote(said).replace("\\", "/").split("?")[0]
        folder = near.rpartition("/")[0]
        for place in (clean, os.path.normpath(f"{folder}/{clean}")):
            if place in self._paths:
                return place
        name = clean.rpartition("/")[2].casefold()
        found = self._by_name.get(name) or self._by_stem.get(name) or []
        if not found and "-" in name:  # Label Studio writes its own id in front of an uploaded name
            found = self._by_name.get(name.partition("-")[2], [])
        ends = [path for path in found if clean.casefold().endswith(path.casefold())]
        if len(found) < 2 or len(ends) == 1:
            return next(iter(ends or found), None)
        said_split = split_said(near)
        scored = Counter(
            {
                path: len(os.path.commonpath([f"/{folder}", f"/{path}"]))
                + 1000 * (parse_file(path).split == said_split)
                for path in found
            }
        )
        best = scored.most_common(2)
        return best[0][0] if best[0][1] > best[1][1] else None

    def size_of(self, path: str) -> tuple[int, int]:
        """Return the upright height and width of an image; raise DataError if it cannot be read."""
        header = read_header(self._tree.root / path)
        return header.height_px, header.width_px


def painter(
    images: Images,
    image: str,
    objects: Sequence[Any],
    draw: Callable[[Mask, Any], None],
    noun: str,
    area: Callable[[Any], float] | None = None,
) -> Callable[[], Mask]:
    """Return a function that paints the mask of an image: its objects one after the other, later ones on top.

    `draw` draws an object in place. The function raises ValueError with the noun and the number of an object for an
    error in BAD_ENTRY. With `area`, larger objects are drawn first.
    """

    def paint() -> Mask:
        mask = blank_mask(*images.size_of(image))
        numbered = list(enumerate(objects))
        if area is not None:
            numbered.sort(key=lambda one: -area(one[1]))
        for number, one in numbered:
            try:
                draw(mask, one)
            except BAD_ENTRY as error:
                raise ValueError(f"{noun} {number}: {problem_of(error)}") from error
        return mask

    return paint


def split_said(path: str) -> str | None:
    """Return the split in the folders or the name of a file: train for annotations/instances_train2017.json."""
    return parse_file(path).split or parse_file(f"{PurePosixPath(path).stem}/x").split


def mask_target(image: str) -> str:
    """Return the path of an image's mask in the folder of masks: the same path without extension."""
    return os.path.splitext(image)[0]


def coverage_words(found: int, total: int, what: str) -> str:
    """Return how many entries have an image, as a sentence."""
    return f"{found} of {total} {what} name an image that is there"


def missing_extra(package: str, what: str, extra: str = "import") -> DataError:
    """Return the error for a reader that is not installed."""
    return DataError(f"{what} need {package}, which is not installed: {install_command(extra)}")


def blank_mask(height_px: int, width_px: int, value: int = 0) -> Mask:
    """Return a mask of one value; raise ValueError if it would be too large."""
    if not (0 < height_px <= _MAX_SIDE_PX and 0 < width_px <= _MAX_SIDE_PX and height_px * width_px <= 2**28):
        raise ValueError(f"a size of {width_px} x {height_px} pixels")
    return np.full((height_px, width_px), value, np.uint8)


def fill_polygon(mask: Mask, rings: Sequence[Sequence[Sequence[float]]], value: int) -> None:
    """Fill an outline in place, except the holes that follow it.

    Rings are lists of (x, y) in pixels; (0, 0) is the center of the first pixel. ValueError is raised if a ring has
    fewer than three corners, or a corner is not finite.
    """
    points = [np.rint(ring) for ring in _checked(rings)]
    _fill_inside(mask, [ring + 0.5 for ring in points], value)
    for ring in points:
        draw_lines(mask, np.concatenate([ring, ring[:1]]), value)


def fill_area(mask: Mask, rings: Sequence[Sequence[Sequence[float]]], value: int) -> None:
    """Set the pixels whose centers lie inside rings by the even-odd rule, in place; see `fill_polygon` for errors.

    (0, 0) is the top left corner of the first pixel. A center on a border belongs to the polygon to the right of or
    below the border, so that neighbors neither overlap nor leave a gap. A polygon that contains no pixel center gets
    the pixels of its outline, so that no object vanishes.
    """
    points = _checked(rings)
    if not _fill_inside(mask, points, value):
        fill_polygon(mask, [(ring - 0.5).tolist() for ring in points], value)


def _fill_inside(mask: Mask, points: Sequence[NDArray[np.float64]], value: int) -> bool:
    """Set the pixels whose centers lie inside rings (V, 2), in place; return False if there are none.

    Only the rows and columns of the image are computed, some edges at a time.
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
    paste(mask, is_inside, left, top, value)
    return bool(is_inside.any())


def draw_lines(mask: Mask, points: NDArray[np.float64], value: int) -> None:
    """Draw the lines from each point (V, 2) to the next, one pixel wide, in place; see `fill_polygon`.

    A long line is cut around the image first (Liang and Barsky, 1984), because OpenCV computes with integers.
    """
    start, way = points[:-1], np.diff(points, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        near, far = (-_MAX_LINE_END - start) / way, (_MAX_LINE_END - start) / way
    enter, leave = np.maximum(0, np.fmin(near, far).max(axis=1)), np.minimum(1, np.fmax(near, far).min(axis=1))
    own = np.flatnonzero(enter <= leave)
    ends = start[own, None] + np.stack([enter, leave], axis=1)[own, :, None] * way[own, None]
    cv2.polylines(mask, list(np.rint(ends).astype(np.int32)), False, value)


def fill_ellipse(
    mask: Mask, center: tuple[float, float], radii: tuple[float, float], value: int, rotation_deg: float = 0.0
) -> None:
    """Set the pixels whose centers lie in an ellipse, in place, row by row.

    (0, 0) is the center of the first pixel. ValueError is raised for numbers that are not finite.
    """
    (x, y), (rx, ry) = center, (max(radius, 1e-3) for radius in radii)
    if not all(abs(number) <= _MAX_CORNER for number in (*center, *radii, rotation_deg)):
        raise ValueError(f"an ellipse around ({x:g}, {y:g}) with the radii {rx:g} and {ry:g}")
    cos, sin = math.cos(math.radians(rotation_deg)), math.sin(math.radians(rotation_deg))
    a, b, c = (cos / rx) ** 2 + (sin / ry) ** 2, cos * sin * (rx**-2 - ry**-2), (sin / rx) ** 2 + (cos / ry) ** 2
    half = math.hypot(rx * sin, ry * cos)
    rows = np.arange(max(0, math.ceil(y - half)), min(mask.shape[0], math.floor(y + half) + 1))
    dy = rows - y  # a dx^2 + 2 b dx dy + c dy^2 <= 1
    middle, reach = x - b * dy / a, np.sqrt(np.maximum(0, (b * dy) ** 2 - a * (c * dy**2 - 1))) / a
    first = np.clip(np.ceil(middle - reach - 1e-9), 0, mask.shape[1]).astype(int)
    last = np.clip(np.floor(middle + reach + 1e-9) + 1, 0, mask.shape[1]).astype(int)
    for row, left, right in zip(rows, first, last, strict=True):
        mask[row, left:right] = value


def _checked(rings: Sequence[Sequence[Sequence[float]]]) -> list[NDArray[np.float64]]:
    """Return rings as arrays (V, 2); raise ValueError for a ring without area or with corners that are not finite."""
    checked = []
    for ring in rings:
        points = np.asarray(ring, np.float64)
        if points.ndim != 2 or points.shape[1] < 2 or len(points) < 3:
            raise ValueError(f"a polygon of {len(points)} corners")
        checked.append(checked_points(points))
    return checked


def checked_points(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return x and y of points (V, 2); raise ValueError if one is not finite, or too far away to be drawn exactly."""
    if not (np.abs(points) <= _MAX_CORNER).all():
        raise ValueError("a corner is not a number")
    return points[:, :2]


def fill_box(mask: Mask, first: Sequence[float], last: Sequence[float], value: int) -> None:
    """Fill a rectangle, in place, between two opposite corners (x, y); see `fill_polygon`."""
    (x0, y0), (x1, y1) = first, last
    fill_polygon(mask, [[(x0, y0), (x1, y0), (x1, y1), (x0, y1)]], value)


def area_of(ring: Sequence[Sequence[float]]) -> float:
    """Return the area of a polygon, in square pixels."""
    points = np.asarray(ring, np.float64)
    x, y = points[:, 0], points[:, 1]
    with np.errstate(invalid="ignore", over="ignore"):  # of corners that are refused when they are drawn
        return float(abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2)


def paste(mask: Mask, piece: NDArray[np.bool_], left: int, top: int, value: int) -> None:
    """Set the pixels of a piece, in place; parts outside the mask are cut off."""
    x0, y0 = max(left, 0), max(top, 0)
    x1, y1 = min(left + piece.shape[1], mask.shape[1]), min(top + piece.shape[0], mask.shape[0])
    if x0 < x1 and y0 < y1:
        mask[y0:y1, x0:x1][piece[y0 - top : y1 - top, x0 - left : x1 - left]] = value


def decode_runs(
    counts: Sequence[int], height_px: int, width_px: int, order: str = "C", *, num_px: int = 0
) -> NDArray[np.bool_]:
    """Return the pixels (H, W) of alternating run lengths of background and object, beginning with background.

    They run along the rows ("C": CVAT) or down the columns ("F": COCO). ValueError is raised if they do not fill the
    size, or the size is too large for an image of `num_px` pixels.
    """
    size = height_px * width_px
    check_memory(size, f"a mask of {width_px} x {height_px} pixels", num_px=num_px)
    lengths = np.asarray(counts, np.int64)
    if (lengths < 0).any() or (lengths > size).any() or lengths.sum() != size:  # a sum of larger ones may overflow
        raise ValueError(f"run lengths of {sum(map(int, counts))} pixels for {width_px} x {height_px}")
    values = np.arange(len(lengths)) % 2 == 1
    return np.repeat(values, lengths).reshape((height_px, width_px), order=order)  # type: ignore[call-overload, no-any-return]
