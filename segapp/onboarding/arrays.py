"""Arrays of images and masks (.npy, .npz): one array with all images, or one file per image.

Words in the names (images, masks, x, y, label) tell the role of an array, and the other words tell which arrays belong
together. Shapes determine the axes. Images of 8 bits are written as PNG, others as TIFF. Files with pickled objects are
not opened.

Shapes: N images, H, W height and width in pixels, C channels.
"""

import contextlib
import io
import itertools
import math
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segapp.bounds import check_memory
from segapp.datasets.files import read_header, shown
from segapp.datasets.images.raster import encode_bands
from segapp.errors import DataError
from segapp.onboarding.content import stored_pixels
from segapp.onboarding.conversion import as_ids, encode_png, file_state, mask_target
from segapp.onboarding.layout import Drawing, Layout, Pair, WideMask
from segapp.onboarding.tree import IMAGE_WORDS, MASK_WORDS, SPLIT_WORDS, Tree, tokens
from segapp.run.words import first_line

_IMAGE_WORDS = IMAGE_WORDS | {"x", "ct", "mr"}
_MASK_WORDS = MASK_WORDS | {"y"}
_MAX_CHANNELS, _MAX_CLASSES = 16, 64
_AXES = {2: ("HW",), 3: ("NHW", "HWC", "CHW"), 4: ("NHWC", "NCHW")}
_NUM_LOOKED = 8
_PAIR_BYTES = 2048  # memory of a pair of the layout
_MAX_HEAD_BYTES = 2**14


@dataclass(frozen=True)
class _Side:
    """An array, or an image file without a dtype; `key` is the name of an array in an .npz."""

    path: str
    key: str = ""
    shape: tuple[int, ...] = (0, 0)
    dtype: np.dtype[Any] | None = None

    @property
    def words(self) -> list[list[str]]:
        """Words in its names, the most informative name first."""
        place = PurePosixPath(self.path)
        names = [self.key, place.stem, *reversed(place.parent.parts)]
        return [[token.word for token in tokens(name)] for name in names if name]

    @property
    def role(self) -> str | None:
        """Return "image" or "mask" from the names; None if they do not tell."""
        for words in self.words:
            for role, known in (("mask", _MASK_WORDS), ("image", _IMAGE_WORDS)):
                if known & set(words):
                    return role
        return None

    @property
    def match(self) -> tuple[tuple[str, ...], ...]:
        """Words in the names without role words: equal for an image and its mask."""
        roles = _IMAGE_WORDS | _MASK_WORDS
        return tuple(own for words in self.words if (own := tuple(word for word in words if word not in roles)))

    @property
    def split(self) -> str | None:
        """The split that the names tell."""
        said = {split for words in self.words for word in words if (split := SPLIT_WORDS.get(word)) is not None}
        return said.pop() if len(said) == 1 else None

    def length(self, axes: str, axis: str) -> int:
        """Return the length of one of its axes; 1 if it does not have the axis."""
        return self.shape[axes.index(axis)] if axis in axes else 1

    def __str__(self) -> str:
        key = f"[{shown(self.key)}]" if self.key else ""
        return f"{shown(self.path)}{key}" + ("" if self.dtype is None else f" {self.shape}")


class _Axes(NamedTuple):
    """The axes of the images and the masks: letters of NHWC; C in masks means one channel per class."""

    image: str
    mask: str


def find_arrays(tree: Tree) -> list[Layout]:
    """Return the conversions of arrays: one per possible interpretation of their axes.

    ValueError is raised if there are pairs whose axes do not agree, channels of masks that overlap, or only objects.
    """
    paths = tree.others_named(".npy", ".npz")
    if not paths:
        return []
    problems: list[str] = []
    sides = [side for path in paths for side in _sides(tree, path, problems)]
    pairs = [
        (_with_size(tree, image), _with_size(tree, mask)) for image, mask in _pairs([*sides, *map(_Side, tree.images)])
    ]
    if not pairs:
        if problems:
            raise ValueError(problems[0])
        return []
    pairs = [pair for pair in pairs if _kind(pair) == _kind(pairs[0])]
    found = [axes for axes in _possible(tree, pairs[0]) if all(_agree(pair, axes) for pair in pairs)]
    if not found:
        image, mask = pairs[0]
        raise ValueError(f"the axes of {image} and {mask} do not agree, or its channels overlap")
    used = {side for pair in pairs for side in pair}
    unused = [side for side in sides if side not in used]
    notes = (f"{len(unused)} arrays without a counterpart are not used, such as {unused[0]}",) if unused else ()
    return [_conversion(tree, pairs, axes, len(found), notes) for axes in found]


def _sides(tree: Tree, path: str, problems: list[str]) -> Iterator[_Side]:
    """Yield the arrays of a file; if it has none, add the reason to the problems."""
    try:
        heads = _heads(tree.root / path)
        for shape, dtype in heads.values():  # an .npy is mapped into memory
            num_bytes = 0 if path.lower().endswith(".npy") else math.prod(shape) * dtype.itemsize
            num_bytes += _PAIR_BYTES * max(shape, default=0)
            check_memory(num_bytes, f"an array of shape {shape}", file_bytes=(tree.root / path).stat().st_size)
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, KeyError, TokenError) as error:
        problems.append(f"{shown(path)}: {first_line(error)}")
        return
    for key, (shape, dtype) in heads.items():
        if dtype.hasobject:
            problems.append(f"{shown(path)}: it holds Python objects, which are not loaded: save plain arrays")
        elif len(shape) in _AXES and dtype.kind in "buif":
            yield _Side(path, key, shape, dtype)


def _heads(file: Path) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shape and dtype of the arrays in a file by their names, without their values."""
    if file.suffix.lower() == ".npy":
        with open(file, "rb") as content:
            return {"": _head(content)}
    heads = {}
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            if name.endswith(".npy"):
                with archive.open(name) as content:
                    heads[name.removesuffix(".npy")] = _head(content)
    return heads


def _head(content: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    content = io.BytesIO(content.read(_MAX_HEAD_BYTES))  # a packed header may say that it has gigabytes
    version = np.lib.format.read_magic(content)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(content)
    return tuple(shape), dtype


def _pairs(sides: Sequence[_Side]) -> list[tuple[_Side, _Side]]:
    """Return images with their masks: names that are equal except for role words; at least one is an array."""
    by_match: dict[object, dict[str, list[_Side]]] = defaultdict(lambda: defaultdict(list))
    for side in sides:
        by_match[side.match][side.role or "neither"].append(side)
    pairs = []
    for own in by_match.values():
        images, masks, rest = own["image"], own["mask"], own["neither"]
        if not images and not masks and len(rest) == 2:  # a.png and a.npy
            images = [side for side in rest if side.dtype is None]
            masks = [side for side in rest if side.dtype is not None and side.dtype.kind in "bui"]
        elif images and not masks:
            masks = rest
        elif masks and not images:
            images = rest
        if len(images) == len(masks) == 1 and not (images[0].dtype is None and masks[0].dtype is None):
            pairs.append((images[0], masks[0]))
    return sorted(pairs, key=lambda pair: (pair[0].path, pair[0].key))


def _with_size(tree: Tree, side: _Side) -> _Side:
    """Return a side with height and width; unchanged if the file cannot be read."""
    if side.dtype is not None:
        return side
    with contextlib.suppress(DataError):
        header = read_header(tree.root / side.path)
        return replace(side, shape=(header.height_px, header.width_px))
    return side


def _kind(pair: tuple[_Side, _Side]) -> tuple[object, ...]:
    return tuple((side.dtype is None, len(side.shape)) for side in pair)


def _possible(tree: Tree, pair: tuple[_Side, _Side]) -> list[_Axes]:
    """Return the possible axes of a pair; masks have one channel per class only if the values are 0 and 1."""
    mask = pair[1]
    possible = itertools.starmap(_Axes, itertools.product(*(_AXES[len(side.shape)] for side in pair)))
    fitting = [axes for axes in possible if _agree(pair, axes)]
    fitting = [axes for axes in fitting if mask.length(axes.mask, "C") < 2 or _is_one_hot(tree, mask, axes.mask)]
    one_hot = [axes for axes in fitting if mask.length(axes.mask, "C") > 1]
    return one_hot or fitting


def _agree(pair: tuple[_Side, _Side], axes: _Axes) -> bool:
    """Return True if the image and the mask have the same number of images, height and width, and few channels."""
    image, mask = pair
    if any(len(own) != len(side.shape) for own, side in zip(axes, pair, strict=True)):
        return False
    if ("N" in axes.image) != ("N" in axes.mask):
        return False
    least = min(mask.length(axes.mask, "H"), mask.length(axes.mask, "W"))
    return (
        all(image.length(axes.image, axis) == mask.length(axes.mask, axis) for axis in "NHW")
        and image.length(axes.image, "C") <= min(_MAX_CHANNELS, least)
        and mask.length(axes.mask, "C") <= min(_MAX_CLASSES, least)
    )


def _is_one_hot(tree: Tree, mask: _Side, axes: str) -> bool:
    """Return True if each pixel of the first images of a mask with one channel per class has a value in one channel."""
    looked = range(min(mask.length(axes, "N"), _NUM_LOOKED))
    planes = (_image_of(tree.root / mask.path, mask, axes, number) for number in looked)
    return all(((own > 0).sum(axis=2) == 1).all() for own in planes)


@lru_cache(maxsize=2)
def _array(file: Path, key: str) -> NDArray[Any]:
    """Return an array, mapped into memory if the format allows it."""
    if file.suffix.lower() == ".npy":
        return np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    with np.load(file, allow_pickle=False) as archive:
        return np.asarray(archive[key])


def _image_of(file: Path, side: _Side, axes: str, number: int) -> NDArray[Any]:
    """Return an image (H, W, C) of an array."""
    array = _array(file, side.key)
    if array.shape != side.shape:
        raise ValueError(f"its shape is {array.shape} now, not {side.shape}")
    if "N" in axes:
        array = np.take(array, number, axis=axes.index("N"))
        axes = axes.replace("N", "")
    if axes == "CHW":
        return np.moveaxis(array, 0, -1)
    return array if axes == "HWC" else array[..., None]


def _conversion(
    tree: Tree, pairs: Sequence[tuple[_Side, _Side]], axes: _Axes, num_ways: int, notes: tuple[str, ...]
) -> Layout:
    image, mask = pairs[0]
    num_classes = mask.length(axes.mask, "C")
    way = "-".join("file" if side.dtype is None else own for side, own in zip(pairs[0], axes, strict=True))
    made = [own for pair in pairs for own in _pairs_of(tree, pair, axes, several=len(pairs) > 1)]
    files = tuple({side.path: None for pair in pairs for side in pair if side.dtype is not None})
    evidence = [
        f"{len(made)} images in {len(files)} files",
        _side_words(image, axes.image, "images"),
        _side_words(mask, axes.mask, "masks"),
    ]
    if num_classes > 1:
        evidence.append(f"{num_classes} channels are the classes")
    return Layout(
        "arrays" if num_ways == 1 else f"arrays-{way}".lower(),
        made,
        0.95,
        tuple(evidence),
        files,
        title="arrays",
        notes=notes,
    )


def _side_words(side: _Side, axes: str, what: str) -> str:
    """Return an example of the images or masks, with its axes in words."""
    words = {"N": "images", "H": "height", "W": "width", "C": "channels"}
    said = f": {' x '.join(words[axis] for axis in axes)}" if side.dtype is not None else ""
    return f"{what} such as {side}{said}"


def _pairs_of(tree: Tree, pair: tuple[_Side, _Side], axes: _Axes, *, several: bool) -> Iterator[Pair]:
    """Yield the images of two arrays with their masks; if there are several arrays, each is a scene."""
    image, mask = pair
    files = [tree.root / side.path for side in pair]
    states = [(side.path, side.key, *file_state(file)) for side, file in zip(pair, files, strict=True)]
    known, own = (image, axes.image) if image.dtype is not None else (mask, axes.mask)
    has_many = "N" in own
    for number in range(known.length(own, "N")):
        stem = mask_target(image.path) + (f"-{image.key}" if has_many and image.key else "")
        name = f"{stem}/{number:05}" if has_many else stem
        image_path, mask_path = image.path, f"{mask_target(image.path)}.png"
        image_bytes = None
        if image.dtype is not None:
            image_path = f"images/{name}.{'png' if _is_png(image, axes.image) else 'tif'}"
            mask_path = f"masks/{name}.png" if mask.dtype is not None else mask.path
            image_bytes = partial(_image_bytes, files[0], image, axes.image, number)
        drawing = Drawing(
            str(known) + (f": image {number}" if has_many else ""),
            (states, number, axes.image, axes.mask),
            partial(_mask_of, files[1], mask, axes.mask, number),
            is_mask_there=mask.dtype is None,
            image_bytes=image_bytes,
        )
        scene = (stem,) if has_many and several else ()
        yield Pair(image_path, mask_path, image.split or mask.split, scene=scene, drawing=drawing)


def _is_png(image: _Side, axes: str) -> bool:
    """Return True for images of 8 bits with one or three channels."""
    return image.dtype is not None and image.dtype.name in ("uint8", "bool") and image.length(axes, "C") in (1, 3)


def _image_bytes(file: Path, side: _Side, axes: str, number: int, digest: str) -> bytes:
    pixels = _image_of(file, side, axes, number)
    if pixels.dtype == np.bool_:
        pixels = pixels * np.uint8(255)
    if _is_png(side, axes):
        return encode_png(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels), digest)
    if pixels.dtype.name not in ("uint8", "uint16", "int16"):
        pixels = pixels.astype(np.float32)
    return encode_bands(pixels, [f"channel {band}" for band in range(pixels.shape[2])], digest)


def _mask_of(file: Path, side: _Side, axes: str, number: int) -> WideMask:
    """Return a mask; raise ValueError if its values are no 8-bit ids."""
    if side.dtype is None:
        return np.asarray(stored_pixels(file, as_rgb=False)[0], np.uint8)
    planes = _image_of(file, side, axes, number)
    if planes.shape[2] == 1:
        return as_ids(planes[..., 0], 255)
    return np.asarray((planes > 0).argmax(axis=2), np.uint8)
