"""Annotations that become masks: what a converter finds, the drawing of its objects, and the writing of the masks.

A mask carries a digest of its annotation in a PNG text chunk. A file that is there already, with that digest and its
end marker, is kept; any other is written under a temporary name and renamed, so that writing can be resumed.

A pixel belongs to a polygon if cv2.fillPoly fills it: corners rounded to the nearest pixel centre, outline included. An
outline and its holes are filled together by the even-odd rule. What is drawn later lies on top.
"""

from __future__ import annotations

import hashlib
import io
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from segapp.datasets.files import read_header, shown
from segapp.datasets.images.raster import read_description
from segapp.errors import DataError, storage_errors
from segapp.onboarding.layout import Drawing, Layout, Mask, Pair, WideMask
from segapp.onboarding.survey.class_files import is_background, is_void
from segapp.onboarding.survey.hypotheses import parse_file
from segapp.onboarding.survey.tree import Tree
from segapp.run.files import remove_dead_temporaries, remove_quietly, write_atomic

IGNORED = 255
MAX_CLASSES = 255
_DIGEST_KEY = "segapp-annotation"
_RULES = "1"
"""Version of the drawing rules: masks of another one are drawn again."""
_MAX_NAMED = 5

BAD_ENTRY: tuple[type[Exception], ...] = (
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    OverflowError,
    zlib.error,
    cv2.error,
)
"""What reading an entry raises that has other types, numbers or keys than its format says."""

ON_TOP = (
    "each pixel has one class: where objects of two classes overlap, the one drawn last covers the other; if both "
    "should count, write a mask for each class and set data.multilabel: files"
)
"""Note of converters that draw objects over each other."""
_MAX_SIDE_PX = 65_536
_MAX_CORNER = 2**24


def drawn_pair(image: str, origin: str, content: Any, paint: Callable[[], WideMask], near: str = "") -> Pair:
    """Return an image of the data with a mask of its path that is painted; see `Drawing`.

    Args:
        image: whose folders or name may say the split.
        origin: file and entry of the annotation.
        content: what the mask depends on.
        paint: returns the mask.
        near: file whose folders or name say the split if those of the image do not.
    """
    split = split_said(image) or split_said(near)
    return Pair(image, f"{mask_target(image)}.png", split, drawing=Drawing(origin, content, paint))


def check_classes(names: Sequence[str], source: str) -> tuple[str, ...]:
    """Return the names.

    Raises:
        DataError: there are more than fit into uint8 masks.
    """
    if len(names) > MAX_CLASSES:
        raise DataError(
            f"{shown(source)}: {len(names)} classes, but masks of 8 bits hold {MAX_CLASSES}: keep fewer classes in it",
            path=source,
        )
    return tuple(names)


def write_files(
    layout: Layout, folder: Path, progress: Callable[[Iterable[Pair], int], Iterable[Pair]]
) -> tuple[list[Pair], list[str], int]:
    """Write the masks and images of a layout that are drawn and not there yet.

    Args:
        layout: what to write.
        folder: where they are written, made if needed.
        progress: shows how far the pairs are; gets them and their number.

    Returns:
        The pairs that were written; a sentence for each bad entry; the number of pairs of which everything was there
        already.

    Raises:
        DataError: every entry is bad.
        StorageError: a file cannot be written.
    """
    pairs, problems, num_kept = [], [], 0
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    made: set[Path] = set()
    masks: set[str] = set()
    for pair in progress(layout.pairs, len(layout.pairs)):
        assert pair.drawing is not None
        origin = pair.drawing.origin
        if pair.mask in masks:
            problems.append(f"{origin}: its image {shown(pair.image)} has been annotated before: entry left out")
            continue
        masks.add(pair.mask)
        wanted = _wanted(pair, pair.drawing, layout.classes, folder)
        for path in wanted:
            if path.parent not in made:
                with storage_errors(path.parent):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    remove_dead_temporaries(path.parent)
                made.add(path.parent)
        try:
            missing = [path for path, (is_there, _) in wanted.items() if not is_there(path)]
            for path in missing:
                _write(path, wanted[path][1]())
        except (DataError,) + BAD_ENTRY as error:  # noqa: RUF005 - mypy does not see through the star
            for path in wanted:
                remove_quietly(path)
            problems.append(f"{origin}: {_reason(error)}")
            continue
        num_kept += not missing
        pairs.append(pair)
    if not pairs:
        named = "; ".join(problems[:_MAX_NAMED])
        raise DataError(f"no entry of {layout.title} can be converted: {named}: correct the annotations")
    return pairs, problems, num_kept


def _wanted(
    pair: Pair, drawing: Drawing, classes: Sequence[str], folder: Path
) -> dict[Path, tuple[Callable[[Path], bool], Callable[[], bytes]]]:
    """Return the files of a pair that are written: whether one is there and complete, and its content."""
    wanted: dict[Path, tuple[Callable[[Path], bool], Callable[[], bytes]]] = {}
    if drawing.image_bytes is not None:
        wanted[folder / pair.image] = (drawing.has_image, drawing.image_bytes)
    if not drawing.is_mask_there:
        digest = digest_of((classes, drawing.content))
        wanted[folder / pair.mask] = (partial(is_png_of, digest=digest), lambda: encode_png(drawing.paint(), digest))
    return wanted


def some_problems(problems: Sequence[str]) -> Iterator[str]:
    """Yield the first few problems, and the number of the others."""
    yield from problems[:_MAX_NAMED]
    if len(problems) > _MAX_NAMED:
        yield f"and {len(problems) - _MAX_NAMED} more"


def digest_of(content: Any) -> str:
    """Return 32 hexadecimal digits of a value made of plain values and bytes."""
    data = repr((_RULES, content)).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _reason(error: Exception) -> str:
    if isinstance(error, DataError):
        return str(error)
    return f"the entry cannot be read ({problem_of(error)}): correct or remove it"


def problem_of(error: Exception) -> str:
    """Return what is wrong with an entry, of one of the errors of BAD_ENTRY."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error).strip().partition("\n")[0] or "no reason given"


def is_png_of(path: Path, digest: str) -> bool:
    """Return True for a complete PNG of this content; reads the header and the end of the file."""
    if not path.is_file():
        return False
    try:
        read_header(path)
        with Image.open(path) as image:
            return image.format == "PNG" and image.info.get(_DIGEST_KEY) == digest
    except (DataError, OSError, SyntaxError, ValueError):
        return False


def is_image_of(path: Path, digest: str) -> bool:
    """Return True for a complete PNG or TIFF of this content."""
    if path.suffix == ".png":
        return is_png_of(path, digest)
    return path.is_file() and read_description(path) == digest


def file_state(path: Path) -> tuple[int, int]:
    """Return what changes if a file is written again: its size in bytes, and the time in nanoseconds."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def as_ids(values: NDArray[Any], largest: int) -> WideMask:
    """Return values as ids of 8 bits, or of 16 if there are some beyond 255.

    Args:
        values: of a mask, of any type.
        largest: id that is allowed.

    Raises:
        ValueError: a value is larger, negative, or has a fraction.
    """
    if values.dtype == np.uint8:
        return values
    low, high = values.min(initial=0), values.max(initial=0)
    if not (low >= 0 and high <= largest):
        raise ValueError(f"values from {low} to {high}, which are no ids of 0 to {largest}")
    ids: WideMask = values.astype(np.uint8) if high <= 255 else values.astype(np.uint16)
    if not (ids == values).all():
        raise ValueError("numbers with fractions, which are no ids")
    return ids


def encode_png(pixels: NDArray[np.uint8] | NDArray[np.uint16], digest: str) -> bytes:
    """Return a PNG of ids or grey values (H, W), or RGB (H, W, 3), with the digest of its content."""
    info = PngImagePlugin.PngInfo()
    info.add_text(_DIGEST_KEY, digest)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", pnginfo=info, compress_level=4)
    return buffer.getvalue()


def _write(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, after a power cut too."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)


def json_files(tree: Tree, kind: type, *, folder: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and content of the JSON files that hold an object (`dict`) or a `list`, in folders that end so."""
    first = b"{" if kind is dict else b"["
    for path in tree.others_named(".json"):
        if path.rpartition("/")[0].endswith(folder) and first in tree.read(path, 64):
            content = tree.read_json(path)
            if isinstance(content, kind):
                yield path, content


class Images:
    """The images of a folder, found by the path, the end of a path, or the name that an annotation says."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._paths = set(tree.images)
        self._by_name: dict[str, list[str]] = {}
        self._by_stem: dict[str, list[str]] = {}
        for path in tree.images:
            name = PurePosixPath(path)
            self._by_name.setdefault(name.name.casefold(), []).append(path)
            self._by_stem.setdefault(name.stem.casefold(), []).append(path)

    def find(self, said: str, near: str = "") -> str | None:
        """Return the image that an annotation names; None if there is none, or several that suit equally.

        Args:
            said: a path or a name, perhaps a URL, with either kind of slash.
            near: the annotation file: of several images of the name, the one with most of its folders is taken.
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
        if len(found) < 2:
            return found[0] if found else None
        ends = [path for path in found if clean.casefold().endswith(path.casefold())]
        if len(ends) == 1:
            return ends[0]
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
        """Return the upright height and width of an image.

        Raises:
            DataError: it cannot be read.
        """
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

    Args:
        images: of the folder.
        image: whose mask is painted.
        objects: as the annotation holds them.
        draw: draws an object in place.
        noun: of an object; the function raises ValueError with it and the object's number for an error of BAD_ENTRY.
        area: of an object; the larger ones are drawn first. None: all are drawn in their order.
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
    """Return the split that the folders or the name of a file say: train of annotations/instances_train2017.json."""
    return parse_file(path).split or parse_file(f"{PurePosixPath(path).stem}/x").split


def mask_target(image: str) -> str:
    """Return the mask of an image relative to the folder of the masks: the same path without extension."""
    return os.path.splitext(image)[0]


def coverage_words(found: int, total: int, what: str) -> str:
    """Return how many entries have an image, as a sentence."""
    return f"{found} of {total} {what} name an image that is there"


def check_objects(objects: Iterable[Sequence[Any]]) -> None:
    """Check that some image has an object.

    Args:
        objects: of each image.

    Raises:
        ValueError: no image has one.
    """
    listed = list(objects)
    if not any(listed):
        raise ValueError(f"there are no objects in its {len(listed)} images; annotate some and export them again")


def class_values(labels: Iterable[str], origin: str) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the class names in order, and the value in the mask of every label; ignored labels are no classes.

    Raises:
        DataError: there are more classes than fit into uint8 masks.
    """
    known = list(labels)
    names = check_classes(ordered_names(name for name in known if not is_void(name)), origin)
    return names, {name: i for i, name in enumerate(names)} | {name: IGNORED for name in known if is_void(name)}


def ordered_names(names: Iterable[str]) -> list[str]:
    """Return the class names in alphabetical order, background first; it is added where it is missing.

    >>> ordered_names(["road", "_background_", "car"])
    ['_background_', 'car', 'road']
    """
    known = set(names)
    first = sorted(name for name in known if is_background(name))
    return [*first, *sorted(known - set(first))] if first else ["background", *sorted(known)]


def missing_extra(package: str, what: str, extra: str = "import") -> DataError:
    """Return the error for a reader that is not installed."""
    return DataError(f"{what} need {package}, which is not installed: python3 -m pip install 'segapp[{extra}]'")


def blank_mask(height_px: int, width_px: int, value: int = 0) -> NDArray[np.uint8]:
    """Return a mask of one value.

    Raises:
        ValueError: it would be too large.
    """
    if not (0 < height_px <= _MAX_SIDE_PX and 0 < width_px <= _MAX_SIDE_PX and height_px * width_px <= 2**28):
        raise ValueError(f"a size of {width_px} x {height_px} pixels")
    return np.full((height_px, width_px), value, np.uint8)


def fill_polygon(mask: NDArray[np.uint8], rings: Sequence[Sequence[Sequence[float]]], value: int) -> None:
    """Fill an outline, without the holes that follow it, in place.

    Args:
        mask: (H, W).
        rings: the outline and its holes, each a list of (x, y) in pixels; (0, 0) is the centre of the first pixel.
        value: of the filled pixels.

    Raises:
        ValueError: a ring has fewer than three corners, or a corner is not finite.
    """
    corners = []
    for ring in rings:
        points = np.asarray(ring, np.float64)
        if points.ndim != 2 or points.shape[1] < 2 or len(points) < 3:
            raise ValueError(f"a polygon of {len(points)} corners")
        if not np.isfinite(points).all() or np.abs(points).max() > _MAX_CORNER:
            raise ValueError("a corner that is no number")
        corners.append(np.rint(points[:, :2]).astype(np.int32))
    cv2.fillPoly(mask, corners, value)


def fill_box(mask: Mask, first: Sequence[float], last: Sequence[float], value: int) -> None:
    """Fill a rectangle, in place, between two opposite corners (x, y); see `fill_polygon`."""
    (x0, y0), (x1, y1) = first, last
    fill_polygon(mask, [[(x0, y0), (x1, y0), (x1, y1), (x0, y1)]], value)


def area_of(ring: Sequence[Sequence[float]]) -> float:
    """Return the area of a polygon, in square pixels."""
    points = np.asarray(ring, np.float64)
    x, y = points[:, 0], points[:, 1]
    return float(abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2)


def paste(mask: NDArray[np.uint8], piece: NDArray[np.bool_], left: int, top: int, value: int) -> None:
    """Set the pixels of a piece, in place; parts outside the mask are cut off."""
    x0, y0 = max(left, 0), max(top, 0)
    x1, y1 = min(left + piece.shape[1], mask.shape[1]), min(top + piece.shape[0], mask.shape[0])
    if x0 < x1 and y0 < y1:
        mask[y0:y1, x0:x1][piece[y0 - top : y1 - top, x0 - left : x1 - left]] = value


def decode_runs(counts: Sequence[int], height_px: int, width_px: int, order: str = "C") -> NDArray[np.bool_]:
    """Return the pixels of run lengths that begin with a run of background.

    Args:
        counts: lengths of background and object in turn.
        height_px: of the result.
        width_px: of the result.
        order: "C": rows one after the other (CVAT); "F": columns (COCO).

    Raises:
        ValueError: the runs do not fill the size.
    """
    lengths = np.asarray(counts, np.int64)
    if (lengths < 0).any() or lengths.sum() != height_px * width_px:
        raise ValueError(f"run lengths of {lengths.sum()} pixels for {width_px} x {height_px}")
    values = np.arange(len(lengths)) % 2 == 1
    return np.repeat(values, lengths).reshape((height_px, width_px), order=order)  # type: ignore[call-overload, no-any-return]


def decode_starts(runs: str, height_px: int, width_px: int, first: int = 1, order: str = "F") -> NDArray[np.bool_]:
    """Return the pixels of runs "start length start length ...", as in Kaggle's tables; no runs are no pixels.

    >>> decode_starts("1 2 4 1", 2, 2).astype(int).tolist()
    [[1, 0], [1, 1]]

    Args:
        runs: the start and the length of each run, with spaces between them.
        height_px: of the result.
        width_px: of the result.
        first: number of the first pixel, 0 or 1.
        order: "F": pixels are numbered down the columns; "C": along the rows.

    Raises:
        ValueError: a number is missing or none, or a run leaves the image.
    """
    numbers = np.array(runs.split(), np.int64)
    if len(numbers) % 2:
        raise ValueError(f"{len(numbers)} numbers, which are no pairs of a start and a length")
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
