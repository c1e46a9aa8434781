"""Decoding images and masks, and turning the ids of a mask file into train ids.

Images are decoded by OpenCV from bytes we read ourselves (its own file reading crashes on names that are not UTF-8),
masks by Pillow, which keeps palette indices and 16-bit ids as they are. PNGs are verified first: a damaged one may
decode without complaint. Legend: H, W the upright height and width in pixels.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from segapp.datasets.files import MAX_PIXELS, check_mask_format, damaged, is_complete, open_bytes, read_bytes, shown
from segapp.datasets.layouts.published_classes import Color
from segapp.datasets.layouts.schemes import UNKNOWN_ID, ClassScheme
from segapp.errors import DataError

Ids = NDArray[np.uint8] | NDArray[np.int16]

# What OpenCV says about a damaged file would stand between our lines; it ends in an error of ours.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

_PLAIN_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}
_FLOAT_MODES = {"F", "I"}
ID_MODES = {"L", "P", "1", "I", "I;16", "I;16L", "I;16B", "I;16N"}
_MAX_NAMED = 8


class UnknownIdsError(DataError):
    """A mask holds ids that are no class.

    Attributes:
        present: every id in the mask -> its pixels.
        unknown: those of them that the scheme does not know.
    """

    present: Mapping[int, int] = MappingProxyType({})
    unknown: Mapping[int, int] = MappingProxyType({})


def read_image(path: Path, *, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """An image as RGB, shape (H, W, 3), uint8, upright by its EXIF orientation.

    Grey becomes RGB, 16 bits become 8 (the upper ones), alpha is dropped, palettes and CMYK are converted; of an
    animation the first frame is taken.

    Args:
        path: The file.
        max_pixels: More are refused.

    Raises:
        DataError: The file cannot be read, is damaged, truncated or too large, or holds numbers that are no colours.
    """
    data = read_bytes(path)
    image = open_bytes(data, path, max_pixels)
    _check_complete(data, image, path)
    if image.format != "PNG" and image.mode in _FLOAT_MODES:
        raise DataError(
            f"{shown(path)}: pixels of 32 bits (mode {image.mode}) have no fixed range: convert it to 8 or 16 bits"
        )
    pixels = _decode(data, cv2.IMREAD_COLOR)  # applies the orientation
    if pixels is None:
        return _decode_rgb_with_pillow(data, path, max_pixels)
    return np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=pixels))


def _decode(data: bytes, flags: int) -> NDArray[Any] | None:
    """OpenCV's decoding, as it is in memory; None where it cannot."""
    try:
        return cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:
        return None


def _decode_rgb_with_pillow(data: bytes, path: Path, max_pixels: int) -> NDArray[np.uint8]:
    """Pillow's decoding: for formats OpenCV does not know, and for the reason why a file cannot be decoded."""
    image = open_bytes(data, path, max_pixels)
    if image.mode not in _PLAIN_MODES:
        raise damaged(path, f"no decoder for {image.format} of mode {image.mode}")
    try:
        return np.array(ImageOps.exif_transpose(image).convert("RGB"), dtype=np.uint8)
    except Exception as error:  # damaged pixel data is reported by Pillow as any of a dozen exception types
        raise damaged(path, error) from error


def _check_complete(data: bytes, image: Image.Image, path: Path) -> None:
    """Refuse a file without its end, and a PNG whose checksums do not fit; such an image cannot be used afterwards."""
    if not is_complete(data, str(image.format)):
        raise damaged(path, f"truncated {image.format}: its end is missing")
    if image.format == "PNG":
        try:
            image.verify()
        except Exception as error:  # as above
            raise damaged(path, error) from error


def read_mask(path: Path, scheme: ClassScheme) -> Ids:
    """A mask as train ids, shape (H, W), of `scheme.dtype`; ignored pixels hold `scheme.ignore_index`.

    Read are grey (1 to 16 bits, the value is the id), palette (the index is the id), and with `scheme.rgb` any picture
    whose colours stand in the palette.

    Raises:
        DataError: The file cannot be read or is damaged; its format changes ids; or it holds ids or colours that the
            scheme does not know: the message names them, how many pixels hold them, and the likely cause.
    """
    data = read_bytes(path)
    image = open_bytes(data, path)
    check_mask_format(path, str(image.format))
    _check_one_frame(image, path)
    _check_complete(data, image, path)
    if not scheme.rgb:
        _check_holds_ids(image, path)
    if _is_plain_grey(image, data) and not scheme.rgb:
        pixels = _decode(data, cv2.IMREAD_UNCHANGED)
        if pixels is not None and pixels.ndim == 2 and pixels.dtype == np.uint8:
            return _train_ids(pixels, path, scheme)
    try:
        image = open_bytes(data, path)
        ImageOps.exif_transpose(image, in_place=True)
        ids = np.array(image.convert("RGB") if scheme.rgb else image, np.uint8 if image.mode == "1" else None)
    except Exception as error:  # as above
        raise damaged(path, error) from error
    if scheme.rgb:
        return _ids_of_colors(ids, path, scheme)
    return _train_ids(_unscaled(ids, image, data), path, scheme)


def _check_one_frame(image: Image.Image, path: Path) -> None:
    """Refuse animations and pages. Only the second frame is looked for: counting a million takes a minute."""
    try:
        has_more = bool(getattr(image, "is_animated", False))
    except Exception as error:  # a damaged directory of frames, as above
        raise damaged(path, error) from error
    if has_more:
        raise DataError(f"{shown(path)}: a mask of several frames: save one frame a file")


def _is_plain_grey(image: Image.Image, data: bytes) -> bool:
    """Whether it is a grey PNG of 8 bits without rotation, which OpenCV decodes a third faster and just as exactly."""
    return image.format == "PNG" and image.mode == "L" and data[24] == 8 and b"eXIf" not in data


def _check_holds_ids(image: Image.Image, path: Path) -> None:
    """Refuse pictures where ids are expected."""
    if image.mode in ID_MODES:
        return
    what = "numbers with fractions" if image.mode == "F" else f"a {image.mode} picture, not one of class ids"
    raise DataError(
        f"{shown(path)}: the mask holds {what}: set data.rgb_masks and data.palette if its colours are the classes, "
        "or export grey or palette PNGs"
    )


def _unscaled(ids: NDArray[Any], image: Image.Image, data: bytes) -> NDArray[Any]:
    """The ids as stored: Pillow spreads grey values of 2 and 4 bits over 0..255."""
    if image.format == "PNG" and image.mode == "L" and data[24] in {2, 4}:  # bit depth in IHDR
        return ids // (85 if data[24] == 2 else 17)
    return ids


def _train_ids(ids: NDArray[Any], path: Path, scheme: ClassScheme) -> Ids:
    """Ids of a file -> train ids, every one of them checked."""
    is_mapped = scheme.train_id_suffix is None or not path.name.endswith(scheme.train_id_suffix)
    table = scheme.table if is_mapped else scheme.train_id_table
    if ids.dtype == np.uint8:
        table = table[:256]
    else:
        ids = _as_uint16(ids, path, scheme)
    unused = scheme.unused_id
    usable = np.where(table == UNKNOWN_ID, unused, table).astype(scheme.dtype)
    mapped = np.asarray(cv2.LUT(ids, usable) if ids.dtype == np.uint8 else usable[ids])
    if (mapped == unused).any():
        present, counts = np.unique(ids, return_counts=True)
        is_unknown = table[present] == UNKNOWN_ID
        raise _unknown_ids(path, scheme, present, counts, is_unknown)
    return mapped


def _as_uint16(ids: NDArray[Any], path: Path, scheme: ClassScheme) -> NDArray[np.uint16]:
    """Wider ids narrowed; values beyond 16 bits are no class."""
    outside = (ids < 0) | (ids > 65_535)
    if outside.any():
        values, counts = np.unique(ids[outside], return_counts=True)
        raise _unknown_ids(path, scheme, values, counts, np.ones(len(values), bool))
    return ids.astype(np.uint16)


def _unknown_ids(
    path: Path, scheme: ClassScheme, values: NDArray[Any], counts: NDArray[Any], is_unknown: NDArray[Any]
) -> UnknownIdsError:
    present = {int(value): int(count) for value, count in zip(values, counts, strict=True)}
    unknown = {int(value): present[int(value)] for value in values[is_unknown]}
    error = UnknownIdsError(
        f"{shown(path)}: the mask holds ids outside the {scheme.num_classes} classes: {name_ids(unknown)}. "
        f"{likely_cause(scheme, set(present), set(unknown))}"
    )
    error.present, error.unknown = present, unknown
    return error


def name_ids(pixels: Mapping[int, int]) -> str:
    """Ids with their pixels, as a person reads them: "254 (12 px), 255 (3 px)"; the first few of many."""
    named = ", ".join(f"{value} ({count} px)" for value, count in list(pixels.items())[:_MAX_NAMED])
    return named + (f" and {len(pixels) - _MAX_NAMED} more" if len(pixels) > _MAX_NAMED else "")


def likely_cause(scheme: ClassScheme, present: set[int], unknown: set[int]) -> str:
    """What ids outside the classes usually mean, and the next move.

    Args:
        scheme: the classes.
        present: all ids of the masks; the more masks, the surer.
        unknown: those that are none of the classes.
    """
    last = scheme.num_classes - 1
    if scheme.label_map is not None:
        return f"Add them to data.label_map, mapped to a class or to ignore_index={scheme.ignore_index}"
    if present <= {0, 255}:
        return "A black and white mask: set data.label_map to {255: 1}"
    if all(value % 257 == 0 for value in present):
        return "8-bit ids were spread over 16 bits when saved: export the masks as 8-bit PNG"
    if unknown == {last + 1} and 0 not in present:
        return "The ids seem to start at 1: set data.label_map to shift them ({1: 0, 2: 1, ...})"
    if unknown == {last + 1}:
        return f"One class more than data.classes names: add it, or map {last + 1} to ignore_index in data.label_map"
    if unknown == {255}:
        return "255 usually marks ignored pixels: set data.ignore_index to 255, or map it in data.label_map"
    if max(present) <= 33 and scheme.num_classes == 19:
        return "These look like Cityscapes label ids: use format cityscapes, or map them in data.label_map"
    if max(present) <= 255 and min(unknown) > last and len(present) <= 2 * scheme.num_classes:
        return (
            "Perhaps grey levels of colours, not ids: export the masks as palette or index PNG, or set data.label_map"
        )
    return "Check data.classes, or map the ids in data.label_map"


def _ids_of_colors(pixels: NDArray[np.uint8], path: Path, scheme: ClassScheme) -> Ids:
    """Colours -> train ids by a table of all 2^24 of them, whose untouched pages take no memory."""
    codes = _color_codes(pixels)
    offset = 1 - min(0, scheme.ignore_index)
    found = _code_table(tuple(scheme.color_table.items()), offset)[codes]
    if not found.all():
        raise _unknown_colors(path, scheme, codes[found == 0])
    return np.asarray((found.astype(np.int32) - offset).astype(scheme.dtype))


def _color_codes(pixels: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Red, green and blue of each pixel as one number."""
    wide = pixels.astype(np.int32)
    codes: NDArray[np.int32] = wide[..., 0] << 16 | wide[..., 1] << 8 | wide[..., 2]
    return codes


@lru_cache(maxsize=4)
def _code_table(color_ids: tuple[tuple[Color, int], ...], offset: int) -> NDArray[np.uint16]:
    """Colour code -> train id + offset (which makes it positive); 0 for colours that mean nothing."""
    table = np.zeros(1 << 24, np.uint16)
    for (red, green, blue), train_id in color_ids:
        table[red << 16 | green << 8 | blue] = train_id + offset
    return table


def _unknown_colors(path: Path, scheme: ClassScheme, codes: NDArray[np.int32]) -> DataError:
    values, counts = np.unique(codes, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:_MAX_NAMED]
    named = ", ".join(f"[{values[i] >> 16}, {values[i] >> 8 & 255}, {values[i] & 255}] ({counts[i]} px)" for i in order)
    more = f" and {len(values) - len(order)} more" if len(values) > len(order) else ""
    cause = (
        "The mask seems to be smoothed or compressed with loss: export it again without"
        if len(values) > 4 * len(scheme.color_table)
        else "Add them to data.palette (after the classes: ignored)"
    )
    return DataError(f"{shown(path)}: the mask holds colours that are not in the palette: {named}{more}. {cause}")
