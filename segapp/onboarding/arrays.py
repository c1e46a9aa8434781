"""Arrays of images and masks (.npy): one array with all images, or one file per image.

Words in the names (images, masks, x, y, label) tell the role of an array, and the other words tell which arrays belong
together. Shapes determine the axes. Images of 8 bits are written as PNG, others as TIFF. Files with pickled objects are
not opened.

Shapes: N images, H, W height and width in pixels, C channels.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.bounds import check_memory
from segapp.datasets.files import read_header, shown
from segapp.datasets.images.raster import encode_bands
from segapp.errors import DataError
from segapp.onboarding.content import stored_pixels
from segapp.onboarding.conversion import MARK, as_ids, encode_png, mask_target
from segapp.onboarding.layout import Drawing, Layout, Pair, WideMask
from segapp.onboarding.tree import IMAGE_WORDS, MASK_WORDS, SPLIT_WORDS, Tree, tokens
from segapp.run.words import first_line

_IMAGE_WORDS = IMAGE_WORDS | {"x", "ct", "mr"}
_MASK_WORDS = MASK_WORDS | {"y"}
_MAX_CHANNELS = 16
_IMAGE_AXES = {2: ("HW",), 3: ("NHW", "HWC", "CHW"), 4: ("NHWC", "NCHW")}
_MASK_AXES = {2: "HW", 3: "NHW", 4: "NHWC"}
_MAX_HEADER_BYTES = 2**16
_PAIR_BYTES = 2048  # memory of a pair of the layout


@dataclass(frozen=True)
class _Side:
    """An array, or an image file without a dtype."""

    path: str
    shape: tuple[int, ...] = (0, 0)
    dtype: np.dtype[Any] | None = None

    @property
    def words(self) -> list[list[str]]:
        """Words in its names, the most informative name first."""
        place = PurePosixPath(self.path)
        return [[token.word for token in tokens(name)] for name in (place.stem, *reversed(place.parent.parts))]

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
        return shown(self.path) + ("" if self.dtype is None else f" {self.shape}")


def find_arrays(tree: Tree) -> Layout | None:
    """Return the conversion of arrays; raise ValueError if the axes of pairs do not agree, or if no array is plain."""
    problems: list[str] = []
    sides = [side for path in tree.others_named(".npy") if (side := _side(tree, path, problems)) is not None]
    if not sides and not problems:
        return None
    pairs = [
        (_with_size(tree, image), _with_size(tree, mask)) for image, mask in _pairs([*sides, *map(_Side, tree.images)])
    ]
    if not pairs:
        if problems:
            raise ValueError(problems[0])
        return None
    pairs = [pair for pair in pairs if _kind(pair) == _kind(pairs[0])]
    image, mask = pairs[0]
    possible = [(own, _MASK_AXES[len(mask.shape)]) for own in _IMAGE_AXES[len(image.shape)]]
    axes = next((axes for axes in possible if all(_agree(pair, axes) for pair in pairs)), None)
    if axes is None:
        raise ValueError(f"the axes of {image} and {mask} do not agree; save masks as ids (N, H, W), or (H, W) each")
    used = {side for pair in pairs for side in pair}
    unused = [side for side in sides if side not in used]
    if unused:
        problems.append(f"{len(unused)} arrays without a counterpart are not used, such as {unused[0]}")
    return _conversion(tree, pairs, axes, tuple(problems))


def _side(tree: Tree, path: str, problems: list[str]) -> _Side | None:
    """Return the array of a file without its values; if it has none, add the reason to the problems."""
    file = tree.root / path
    try:
        array = _array(file)
        check_memory(
            _PAIR_BYTES * max(array.shape, default=0),
            f"an array of shape {array.shape}",
            file_bytes=file.stat().st_size,
        )
    except (OSError, ValueError) as error:
        problems.append(f"{shown(path)}: {first_line(error)}: save plain arrays")
        return None
    is_usable = array.ndim in _IMAGE_AXES and array.dtype.kind in "buif"
    return _Side(path, array.shape, array.dtype) if is_usable else None


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
    return sorted(pairs, key=lambda pair: pair[0].path)


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


def _agree(pair: tuple[_Side, _Side], axes: tuple[str, str]) -> bool:
    """Return True if the image and the mask have the same number of images, height and width, and few channels."""
    (image, mask), (own, of_mask) = pair, axes
    if (len(own), len(of_mask)) != (len(image.shape), len(mask.shape)) or ("N" in own) != ("N" in of_mask):
        return False
    return (
        all(image.length(own, axis) == mask.length(of_mask, axis) for axis in "NHW")
        and image.length(own, "C") <= min(_MAX_CHANNELS, image.length(own, "H"), image.length(own, "W"))
        and mask.length(of_mask, "C") == 1
    )


@lru_cache(maxsize=2)
def _array(file: Path) -> NDArray[Any]:
    """Return an array, mapped into memory; raise ValueError if it is cut off, has Python objects, or a large header."""
    with file.open("rb") as content:
        head = content.read(12)
    if head[6:7] > b"\1" and int.from_bytes(head[8:], "little") > _MAX_HEADER_BYTES:
        raise ValueError("its header is too large")
    array = np.load(file, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError("not one array")
    return array


def _image_of(file: Path, side: _Side, axes: str, number: int) -> NDArray[Any]:
    """Return an image (H, W, C) of an array."""
    array = _array(file)
    if array.shape != side.shape:
        raise ValueError(f"its shape is {array.shape} now, not {side.shape}")
    if "N" in axes:
        array = np.take(array, number, axis=axes.index("N"))
        axes = axes.replace("N", "")
    if axes == "CHW":
        return np.moveaxis(array, 0, -1)
    return array if axes == "HWC" else array[..., None]


def _conversion(
    tree: Tree, pairs: Sequence[tuple[_Side, _Side]], axes: tuple[str, str], notes: tuple[str, ...]
) -> Layout:
    made = [own for pair in pairs for own in _pairs_of(tree, pair, axes, several=len(pairs) > 1)]
    files = tuple({side.path: None for pair in pairs for side in pair if side.dtype is not None})
    words = [_side_words(side, own, what) for side, own, what in zip(pairs[0], axes, ("images", "masks"), strict=True)]
    evidence = (f"{len(made)} images in {len(files)} files", *words)
    return Layout("arrays", made, 0.95, evidence, files, title="arrays", notes=notes)


def _side_words(side: _Side, axes: str, what: str) -> str:
    """Return an example of the images or masks, with its axes in words."""
    words = {"N": "images", "H": "height", "W": "width", "C": "channels"}
    said = f": {' x '.join(words[axis] for axis in axes)}" if side.dtype is not None else ""
    return f"{what} such as {side}{said}"


def _pairs_of(tree: Tree, pair: tuple[_Side, _Side], axes: tuple[str, str], *, several: bool) -> Iterator[Pair]:
    """Yield the images of two arrays with their masks; if there are several arrays, each is a scene."""
    (image, mask), (of_image, of_mask) = pair, axes
    files = [tree.root / side.path for side in pair]
    has_many, stem = "N" in of_image, mask_target(image.path)
    for number in range(image.length(of_image, "N")):
        name = f"{stem}/{number:05}" if has_many else stem
        image_path, mask_path = image.path, f"{stem}.png"
        image_bytes = None
        if image.dtype is not None:
            image_path = f"images/{name}.{'png' if _is_png(image, of_image) else 'tif'}"
            mask_path = f"masks/{name}.png" if mask.dtype is not None else mask.path
            image_bytes = partial(_image_bytes, files[0], image, of_image, number)
        drawing = Drawing(
            str(mask if image.dtype is None else image) + (f": image {number}" if has_many else ""),
            partial(_mask_of, files[1], mask, of_mask, number),
            is_mask_there=mask.dtype is None,
            image_bytes=image_bytes,
        )
        scene = (stem,) if has_many and several else ()
        yield Pair(image_path, mask_path, image.split or mask.split, scene=scene, drawing=drawing)


def _is_png(image: _Side, axes: str) -> bool:
    """Return True for images of 8 bits with one or three channels."""
    return image.dtype is not None and image.dtype.name in ("uint8", "bool") and image.length(axes, "C") in (1, 3)


def _image_bytes(file: Path, side: _Side, axes: str, number: int) -> bytes:
    pixels = _image_of(file, side, axes, number)
    if pixels.dtype == np.bool_:
        pixels = pixels * np.uint8(255)
    if _is_png(side, axes):
        return encode_png(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))
    if pixels.dtype.name not in ("uint8", "uint16", "int16"):
        pixels = pixels.astype(np.float32)
    return encode_bands(pixels, [f"channel {band}" for band in range(pixels.shape[2])], MARK)


def _mask_of(file: Path, side: _Side, axes: str, number: int) -> WideMask:
    """Return a mask; raise ValueError if its values are no 8-bit ids."""
    if side.dtype is None:
        return np.asarray(stored_pixels(file, as_rgb=False)[0], np.uint8)
    return as_ids(_image_of(file, side, axes, number)[..., 0], 255)
