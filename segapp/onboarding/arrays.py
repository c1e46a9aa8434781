"""Arrays of images and masks (.npy): one array with all images, or one file per image, whose mask may be an image file.

Words in the names (images, masks, x, y, label) tell the role of an array, and the other words tell which arrays belong
together. Images of 8 bits are written as PNG, others as TIFF. Files with pickled objects are not opened.

Shapes: images (N, H, W) or (N, H, W, C) with masks (N, H, W) or (N, H, W, 1); (H, W) or (H, W, C) with masks (H, W).
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.bounds import check_memory
from segapp.datasets.files import shown
from segapp.datasets.images.raster import encode_bands
from segapp.datasets.masks import whole_ids
from segapp.onboarding.content import IGNORED
from segapp.onboarding.conversion import MARK, encode_png
from segapp.onboarding.layout import Drawing, DrawnMask, Layout, Mask, Pair
from segapp.onboarding.tree import IMAGE_WORDS, MASK_WORDS, Tree, split_said, tokens
from segapp.run.words import first_line

_IMAGE_WORDS = IMAGE_WORDS | {"x", "ct", "mr"}
_MASK_WORDS = MASK_WORDS | {"y"}
_MAX_CHANNELS = 16
_PAIR_BYTES = 2048  # memory of a pair of the layout


@dataclass(frozen=True)
class _Side:
    """An array, or an image file without a dtype."""

    path: str
    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] | None = None

    @property
    def words(self) -> list[list[str]]:
        """Words in its names, the most informative name first."""
        place = PurePosixPath(self.path)
        return [[token.word for token in tokens(name)] for name in (place.stem, *reversed(place.parent.parts))]

    @property
    def role(self) -> str:
        """Return "image" or "mask" from the names; "neither" if they do not tell."""
        for words in self.words:
            for role, known in (("mask", _MASK_WORDS), ("image", _IMAGE_WORDS)):
                if known & set(words):
                    return role
        return "neither"

    @property
    def match(self) -> tuple[tuple[str, ...], ...]:
        """Words in the names without role words: equal for an image and its mask."""
        roles = _IMAGE_WORDS | _MASK_WORDS
        return tuple(own for words in self.words if (own := tuple(word for word in words if word not in roles)))

    def __str__(self) -> str:
        return shown(self.path) + ("" if self.dtype is None else f" {self.shape}")


def find_arrays(tree: Tree) -> Layout | None:
    """Return the conversion of arrays; raise ValueError if the shapes of a pair do not agree, or no array is plain."""
    sides: list[_Side] = []
    problems: list[str] = []
    for path in tree.others_named(".npy"):
        try:
            sides.append(_side(tree, path))
        except (OSError, ValueError) as error:
            problems.append(f"{shown(path)}: {first_line(error)}: save plain arrays")
    pairs = _pairs([*sides, *map(_Side, tree.images)]) if sides else []
    if not pairs:
        if problems:
            raise ValueError(problems[0])
        return None
    for image, mask in pairs:
        if not _agree(image, mask):
            raise ValueError(
                f"the shapes of {image} and {mask} do not agree; save masks as ids (N, H, W), or (H, W) each, and the "
                "channels of images last, such as np.moveaxis(images, 1, -1)"
            )
    used = {side.path for pair in pairs for side in pair}
    made = [own for image, mask in pairs for own in _pairs_of(tree, image, mask, several=len(pairs) > 1)]
    files = tuple(side.path for side in sides if side.path in used)
    evidence = f"{len(made)} images in {len(files)} files, such as {pairs[0][0]} with {pairs[0][1]}"
    return Layout("arrays", made, 0.95, (evidence,), files, title="arrays", notes=tuple(problems))


def _side(tree: Tree, path: str) -> _Side:
    """Return the array of a file without its values; raise ValueError if it is none of pixels."""
    file = tree.root / path
    array = _array(file)
    said = f"an array of shape {array.shape}"
    check_memory(_PAIR_BYTES * max(array.shape, default=0), said, file_bytes=file.stat().st_size)
    if array.ndim not in (2, 3, 4) or array.dtype.kind not in "buif" or not array.size:
        raise ValueError(f"{said} of {array.dtype} has no pixels")
    return _Side(path, array.shape, array.dtype)


def _pairs(sides: Sequence[_Side]) -> list[tuple[_Side, _Side]]:
    """Return arrays of images with their masks, whose names are equal except for role words.

    ValueError is raised for an image file whose mask is an array.
    """
    by_match: dict[object, dict[str, list[_Side]]] = defaultdict(lambda: defaultdict(list))
    for side in sides:
        by_match[side.match][side.role].append(side)
    pairs = []
    for own in by_match.values():
        images, masks = own["image"] or own["neither"], own["mask"] or own["neither"]
        if len(images) != 1 or len(masks) != 1 or images == masks:
            continue
        (image,), (mask,) = images, masks
        if image.dtype is not None:
            pairs.append((image, mask))
        elif mask.dtype is not None:
            png = shown(f"{os.path.splitext(mask.path)[0]}.png")
            raise ValueError(
                f"{mask} is the mask of {image}; save it with PIL.Image.fromarray("
                f'numpy.nan_to_num(mask, nan=255).astype("uint8")).save("{png}")'
            )
    return sorted(pairs, key=lambda pair: pair[0].path)


def _agree(image: _Side, mask: _Side) -> bool:
    """Return True if the image and the mask have the same number of images, height and width, and few channels."""
    num_axes = max(2, len(mask.shape[:3]))  # an image file has no shape, and is one mask
    sides, channels = image.shape[:num_axes], image.shape[num_axes:]
    return (
        (mask.dtype is None or mask.shape in (sides, (*sides, 1)))
        and len(sides) == num_axes
        and len(channels) < 2
        and all(count <= min(_MAX_CHANNELS, *sides[-2:]) for count in channels)
    )


def _array(file: Path) -> NDArray[Any]:
    """Return an array, mapped into memory; raise ValueError if it is cut off, has Python objects, or a large header."""
    with file.open("rb") as content:
        if content.read(8)[6:] not in (b"", b"\1\0"):
            raise ValueError("its header is too large")  # later versions are for headers of 64 KiB and more
    try:
        return np.lib.format.open_memmap(file, mode="r")
    except Exception as error:  # a damaged header is reported by NumPy as any of several exception types
        raise ValueError("it is damaged, cut off, or holds Python objects") from error


def _pixels_of(file: Path, number: int | None) -> NDArray[Any]:
    """Return an image (H, W, C) of an array; without a number, the whole array is one image."""
    pixels = _array(file) if number is None else _array(file)[number]
    return pixels if pixels.ndim == 3 else pixels[..., None]


def _pairs_of(tree: Tree, image: _Side, mask: _Side, *, several: bool) -> Iterator[Pair]:
    """Yield the images of two arrays with their masks; if there are several arrays, each is a scene."""
    stem, is_stack = os.path.splitext(image.path)[0], len(mask.shape) > 2
    ending = "png" if _is_png(image, image.shape[3 if is_stack else 2 :]) else "tif"
    for number in range(image.shape[0]) if is_stack else (None,):
        name = stem if number is None else f"{stem}/{number:05}"
        drawing = Drawing(
            str(image) if number is None else f"{image}: image {number}",
            None if mask.dtype is None else partial(_mask_of, tree.root / mask.path, number),
            partial(_image_bytes, tree.root / image.path, image, number),
        )
        yield Pair(
            f"images/{name}.{ending}",
            mask.path if mask.dtype is None else f"masks/{name}.png",
            split_said(image.path),
            # The slices of a volume are alike, and must not be divided between training and validation.
            scene=(stem,) if is_stack and several else (),
            drawing=drawing,
        )


def _is_png(image: _Side, channels: Sequence[int]) -> bool:
    return image.dtype is not None and image.dtype.name in ("uint8", "bool") and tuple(channels) in ((), (1,), (3,))


def _image_bytes(file: Path, side: _Side, number: int | None) -> bytes:
    pixels = _pixels_of(file, number)
    if pixels.dtype == np.bool_:
        pixels = pixels * np.uint8(255)
    if _is_png(side, pixels.shape[2:]):
        return encode_png(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))
    if pixels.dtype.name not in ("uint8", "uint16", "int16"):
        pixels = pixels.astype(np.float32)
    return encode_bands(pixels, [f"channel {band}" for band in range(pixels.shape[2])], MARK)


def _mask_of(file: Path, number: int | None, _: DrawnMask) -> Mask:
    """Return a mask (H, W) of 8-bit ids; raise ValueError for other values, and DataError for fractions."""
    ids, is_nan = whole_ids(_pixels_of(file, number)[..., 0], file)
    low, high = ids.min(initial=0), ids.max(initial=0)
    if not (low >= 0 and high <= 255):
        raise ValueError(f"values from {low} to {high}, which are not ids of 0 to 255")
    return np.where(is_nan, IGNORED, ids).astype(np.uint8)
