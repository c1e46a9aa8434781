"""Decode masks, and map the ids in them to train ids.

Masks are decoded by Pillow, which keeps palette indices and 16-bit ids. A mask that cannot be used raises DataError.

Shapes: H, W the upright height and width in pixels.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, ImageSequence
from PIL.TiffImagePlugin import BITSPERSAMPLE

from segapp.datasets.files import check_mask_format, damaged, open_bytes, read_bytes, shown, tiff_tags
from segapp.datasets.images.pixel_format import Pixels, in_all_bands
from segapp.datasets.images.png import decode_png
from segapp.datasets.images.raster import Window, read_bands
from segapp.datasets.images.reading import check_complete, decode
from segapp.datasets.images.tiff_tags import NODATA_TAG, TIFF_SUFFIXES, TiffTags, parse_nodata
from segapp.datasets.layouts.schemes import UNKNOWN_ID, ClassScheme, Color, palette_of, without_id
from segapp.errors import DataError, some_names

Ids = NDArray[np.uint8] | NDArray[np.int16] | NDArray[np.int32]

ID_MODES = {"L", "P", "1", "I", "I;16", "I;16L", "I;16B", "I;16N", "F"}
_MAX_NAMED = 8


class UnknownIdsError(DataError):
    """A mask holds ids that are no class."""

    present: Mapping[int, int] = MappingProxyType({})  # every id in the mask -> its pixels
    unknown: Mapping[int, int] = MappingProxyType({})  # the ids among them that the scheme does not know


@dataclass(frozen=True)
class UnknownIds:
    """Ids outside the classes, over all masks of a split."""

    pixels: Mapping[int, int]
    masks: Mapping[int, int]
    num_masks: int
    cause: str


def read_mask(path: Path, scheme: ClassScheme) -> Ids:
    """Return a mask as train ids, shape (H, W), of `scheme.dtype`; ignored pixels are `scheme.ignore_index`.

    Accepts gray masks (1 to 16 bits, the value is the id; in floats, NaN is ignored), palette masks (the index is the
    id), and with `scheme.rgb` any image whose colors are in the palette. The nodata value of a GeoTIFF is ignored,
    unless the scheme has a class for it.

    Raises:
        DataError: The file cannot be read or is damaged, its format changes ids, or it holds ids or colors that the
            scheme does not have. The message lists these with their number of pixels and the likely cause.
    """
    if scheme.multilabel is not None:
        return _label_sets(path, scheme)
    if (tags := windowed_tags(path, rgb=scheme.rgb)) is not None:
        return train_ids(stored_ids(path, tags), path, scheme, tags.nodata)
    data = read_bytes(path)
    image = open_bytes(data, path)
    check_mask_format(path, str(image.format))
    check_one_frame(image, path)
    check_complete(data, image, path)
    if not scheme.rgb and image.mode not in ID_MODES:
        raise DataError(
            f"{shown(path)}: the mask holds {image.mode} colors, not class ids: set data.rgb_masks and data.palette if "
            "its colors are the classes, or export gray or palette PNGs",
            path=path,
        )
    is_plain_grey = image.format == "PNG" and image.mode == "L" and data[24] == 8 and b"eXIf" not in data
    if is_plain_grey and not scheme.rgb:  # OpenCV decodes it in a third less time to the same ids
        pixels = decode_png(data, image)
        pixels = decode(data, cv2.IMREAD_UNCHANGED) if pixels is None else pixels
        if pixels is not None and pixels.ndim == 2 and pixels.dtype == np.uint8:
            return train_ids(pixels, path, scheme)
    try:
        image = open_bytes(data, path)
        ImageOps.exif_transpose(image, in_place=True)
        ids = np.array(image.convert("RGB") if scheme.rgb else image, np.uint8 if image.mode == "1" else None)
    except Exception as error:  # as above
        raise damaged(path, error) from error
    if scheme.palettes is not None and (problem := scheme.palettes.add(path, palette_of(image))):
        move = "set data.rgb_masks to true, and data.palette, to read colors, or to false to read ids"
        raise DataError(f"{problem}: {move}", key="data.rgb_masks", path=path)
    nodata = nodata_of(image)
    return train_ids(ids if scheme.rgb else unscaled(ids, image, data), path, scheme, nodata)


def windowed_tags(path: Path, *, rgb: bool) -> TiffTags | None:
    """Return the tags of a large mask of ids or colors of which any part is read like the whole; None for others."""
    tags = tiff_tags(path) if path.suffix.lower() in TIFF_SUFFIXES else None
    if tags is None or not tags.is_read_by_rasterio or tags.dtype == "float32" or tags.axes:
        return None
    return tags if tags.bands == (3 if rgb else 1) else None


def stored_ids(path: Path, tags: TiffTags, window: Window | None = None) -> Pixels:
    """Return the ids (H, W) or the colors (H, W, 3) of a mask with `windowed_tags`, or of a window of it."""
    values = read_bands(path, range(1, tags.bands + 1), window)
    return values if tags.bands == 3 else values[..., 0]


def without_nodata(ids: Ids, missing: NDArray[np.bool_] | None, scheme: ClassScheme) -> Ids:
    """Return train ids (H, W) with `ignore_index` at the nodata of an image, with its mask (H, W, B)."""
    return ids if missing is None else np.where(in_all_bands(missing), ids.dtype.type(scheme.ignore_index), ids)


def read_masks(paths: Sequence[Path], scheme: ClassScheme) -> Ids:
    """Return the mask (H, W) of train ids of an image; with `multilabel: files` from one mask per class."""
    if scheme.multilabel != "files":
        return read_mask(paths[0], scheme)
    one = replace(scheme, names=("one",), multilabel="channels")
    sets: NDArray[np.int32] | None = None
    ignored: NDArray[np.bool_] | bool = False
    for number, path in enumerate(paths):
        own = _label_sets(path, one)
        if sets is not None and own.shape != sets.shape:
            raise DataError(
                f"{shown(path)}: the mask has {own.shape[1]}x{own.shape[0]} pixels, the mask of the first class "
                f"{sets.shape[1]}x{sets.shape[0]}: make all the same size",
                path=path,
            )
        present = np.where(own > 0, np.int32(1 << number), np.int32(0))
        sets = present if sets is None else sets | present
        ignored = ignored | (own < 0)
    return np.where(ignored, np.int32(scheme.ignore_index), np.int32(0) if sets is None else sets)


def _label_sets(path: Path, scheme: ClassScheme) -> NDArray[np.int32]:
    """Return the set of classes of each pixel, (H, W): bit c for class c, `ignore_index` for ignored pixels."""
    data = read_bytes(path)
    image = open_bytes(data, path)
    check_mask_format(path, str(image.format))
    check_complete(data, image, path)
    try:
        tags = tiff_tags(path) if image.format == "TIFF" else None
        frames = enumerate(ImageSequence.Iterator(open_bytes(data, path)), start=1)
        full = [
            unscaled(np.asarray(ImageOps.exif_transpose(frame)), frame, data)
            for number, frame in frames
            if tags is None or number in tags.pages
        ]
        planes = np.dstack(full)
        nodata = nodata_of(image) or None  # but 0 is a pixel without a class
    except Exception as error:  # as above
        raise damaged(path, error) from error
    planes, is_missing = whole_ids(planes, path, nodata)
    ignored = (is_missing | (planes == scheme.ignored_value)).any(2)  # == None is false everywhere
    planes = np.where(ignored[..., None], 0, planes).astype(np.int64)
    read = _sets_of_bits if scheme.multilabel == "bits" else _sets_of_channels
    return np.where(ignored, scheme.ignore_index, read(planes, path, scheme)).astype(np.int32)


def _sets_of_channels(planes: NDArray[np.int64], path: Path, scheme: ClassScheme) -> NDArray[np.int64]:
    """Return the sets of classes of (H, W, C) values; a nonzero value means that the pixel has the class."""
    if scheme.num_classes == 1 and planes.shape[2] == 3 and (planes == planes[..., :1]).all():
        planes = planes[..., :1]  # black and white, saved as RGB
    if planes.shape[2] != scheme.num_classes:
        raise DataError(
            f"{shown(path)}: the mask has {planes.shape[2]} channels for {scheme.num_classes} classes: "
            "save one channel (or page of a TIFF) for each of data.classes",
            path=path,
        )
    return np.asarray(((planes != 0) << np.arange(scheme.num_classes)).sum(2))


def _sets_of_bits(planes: NDArray[np.int64], path: Path, scheme: ClassScheme) -> NDArray[np.int64]:
    """Return (H, W, 1) values after checking that they are sets of classes."""
    if planes.shape[2] != 1:
        raise DataError(
            f"{shown(path)}: the mask has {planes.shape[2]} channels: set data.multilabel: channels", path=path
        )
    sets = planes[..., 0]
    outside = np.unique(sets[(sets < 0) | (sets >= 1 << scheme.num_classes)])[:_MAX_NAMED].tolist()
    if outside:
        raise DataError(
            f"{shown(path)}: the values {', '.join(map(str, outside))} have bits beyond the {scheme.num_classes} "
            "classes: add classes, or set data.ignore_index to the value of ignored pixels",
            path=path,
        )
    return sets


def check_one_frame(image: Image.Image, path: Path) -> None:
    """Check that there is only one frame; frames are not counted, because that takes a minute for a million.

    Smaller copies of a TIFF's image, and a mask of it, are pages but no frames, as they are no pages of an image.
    """
    try:
        tags = tiff_tags(path) if image.format == "TIFF" else None
        has_more = bool(getattr(image, "is_animated", False) if tags is None else tags.axes)
    except Exception as error:  # a damaged directory of frames, as above
        raise damaged(path, error) from error
    if has_more:
        raise DataError(f"{shown(path)}: the mask has several frames: save one frame per file", path=path)


def nodata_of(image: Image.Image) -> float | None:
    """Return the value that a mask declares for pixels without data; None if it declares none."""
    return parse_nodata(getattr(image, "tag_v2", {}).get(NODATA_TAG), "float64")


def whole_ids(values: NDArray[Any], path: Path, nodata: float | None = None) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return a mask's values as integers, and where they are NaN or nodata, which is ignored; DataError for others."""
    is_missing = np.isnan(values) | (values == nodata)  # == None is false everywhere
    largest = 2.0**53 if values.dtype.kind == "f" else np.inf  # of the floats that are exact as integers
    wrong = values[~is_missing & ~((np.abs(values) <= largest) & (np.trunc(values) == values))]
    if wrong.size:
        raise DataError(
            f"{shown(path)}: the mask holds {wrong[0]:g}, and class ids are whole numbers: save ids, or NaN", path=path
        )
    return np.where(is_missing, 0, values).astype(np.int64) if values.dtype.kind == "f" else values, is_missing


def unscaled(ids: NDArray[Any], image: Image.Image, data: bytes) -> NDArray[Any]:
    """Return the ids as stored: Pillow scales gray values of 2 and 4 bits to 0..255."""
    bits = data[24] if image.format == "PNG" else getattr(image, "tag_v2", {}).get(BITSPERSAMPLE, (8,))[0]  # in IHDR
    return ids // (85 if bits == 2 else 17) if image.mode == "L" and bits in {2, 4} else ids


def train_ids(ids: NDArray[Any], path: Path, scheme: ClassScheme, nodata: float | None = None) -> Ids:
    """Return the train ids (H, W) of the ids (H, W) or the colors (H, W, 3) of a mask.

    Pixels of the value `nodata`, in all three colors, are ignored, unless the scheme says what it means.
    """
    if ids.ndim == 3:
        return _ids_of_colors(ids, path, scheme, nodata)
    table = _table(path, scheme)
    stored = ids
    ids, ignored = _with_ignored(stored, path, scheme, nodata)
    if ignored is None:
        # `cv2.LUT` takes exactly 256 entries.
        table = table[:256]
    else:
        if (~ignored & ((ids < 0) | (ids > 65_535))).any():
            raise unknown_ids_error(path, scheme, count_ids(stored, path, scheme, nodata))
        # Ignored values may be outside the table.
        ids = np.where(ignored, 0, ids).astype(np.uint16)
    unused = scheme.unused_id
    # Unknown ids become a value that no class has, so that one comparison finds them.
    usable = np.where(table == UNKNOWN_ID, unused, table).astype(scheme.dtype)
    mapped = np.asarray(cv2.LUT(ids, usable) if ids.dtype == np.uint8 else usable[ids])
    if ignored is not None:
        mapped[ignored] = scheme.ignore_index
    if (mapped == unused).any():
        raise unknown_ids_error(path, scheme, count_ids(stored, path, scheme, nodata))
    return mapped


def _with_ignored(
    ids: NDArray[Any], path: Path, scheme: ClassScheme, nodata: float | None
) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """Return the ids (H, W) of a mask as integers, and which are ignored whatever the table says; None for none."""
    if nodata is not None and 0 <= nodata <= 65_535 and _table(path, scheme)[int(nodata)] != UNKNOWN_ID:
        nodata = None
    # The usual mask needs no further pass over its pixels.
    if ids.dtype == np.uint8 and nodata is None:
        return ids, None
    ids, is_missing = whole_ids(ids, path, nodata)
    return ids, is_missing | (ids == scheme.ignore_index) if scheme.ignore_index < 0 else is_missing


def count_ids(ids: NDArray[Any], path: Path, scheme: ClassScheme, nodata: float | None = None) -> dict[int, int]:
    """Return id -> number of pixels of the ids (H, W) of a mask, as `train_ids` reads them: without ignored pixels."""
    ids, ignored = _with_ignored(ids, path, scheme, nodata)
    return count_values(ids if ignored is None else ids[~ignored])


def _table(path: Path, scheme: ClassScheme) -> NDArray[np.int16]:
    has_train_ids = scheme.train_id_suffix is not None and path.name.endswith(scheme.train_id_suffix)
    return scheme.train_id_table if has_train_ids else scheme.table


def count_values(values: NDArray[Any]) -> dict[int, int]:
    if values.dtype == np.uint8:  # without sorting all of them
        counts = np.bincount(values.ravel())
        found = np.flatnonzero(counts)
        counts = counts[found]
    else:
        found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def unknown_ids_error(path: Path, scheme: ClassScheme, present: Mapping[int, int]) -> UnknownIdsError:
    """Return the error for a mask with ids that are no class; `present` has the number of pixels of each id."""
    table = _table(path, scheme)
    is_known = {value: 0 <= value <= 65_535 and table[value] != UNKNOWN_ID for value in present}
    unknown = {value: present[value] for value in sorted(present) if not is_known[value]}
    error = UnknownIdsError(
        f"{shown(path)}: the mask holds ids outside the {scheme.num_classes} classes: {name_ids(unknown)}. "
        f"{likely_cause(scheme, set(present), set(unknown))}",
        key="data.label_map",
        path=path,
    )
    error.present, error.unknown = present, unknown
    return error


def name_ids(pixels: Mapping[int, int]) -> str:
    """Return ids with their pixels as text: "254 (12 px), 255 (3 px)"; only the first few if there are many."""
    return some_names([f"{value} ({count} px)" for value, count in pixels.items()], _MAX_NAMED)


def all_unknown(errors: Sequence[UnknownIdsError], scheme: ClassScheme) -> UnknownIds | None:
    """Return the unknown ids of several masks; the likely cause is derived from all of them together."""
    if not errors:
        return None
    pixels: Counter[int] = Counter()
    masks: Counter[int] = Counter()
    present: set[int] = set()
    for error in errors:
        pixels.update(error.unknown)
        masks.update(error.unknown.keys())
        present.update(error.present)
    return UnknownIds(
        pixels=dict(sorted(pixels.items())),
        masks=dict(sorted(masks.items())),
        num_masks=len(errors),
        cause=likely_cause(scheme, present, set(pixels)),
    )


def summary_of_ids(unknown: UnknownIds) -> str:
    plural = "masks hold" if unknown.num_masks > 1 else "mask holds"
    return f"{unknown.num_masks} {plural} ids outside the classes: {name_ids(unknown.pixels)}. {unknown.cause}"


def likely_cause(scheme: ClassScheme, present: set[int], unknown: set[int]) -> str:
    """Return the likely cause of ids outside the classes, and the fix; `present` has all ids of the masks."""
    last = scheme.num_classes - 1
    # With a map, the ids of the files are known, and a guess at their origin would mislead.
    if scheme.label_map is not None:
        return f"Add them to data.label_map, mapped to a class or to ignore_index={scheme.ignore_index}"
    if present <= {0, 255}:
        return "A black and white mask: set data.label_map to {255: 1}"
    # 257 is 65535 / 255, the factor with which programs widen 8 bits to 16.
    if all(value % 257 == 0 for value in present):
        return "8-bit ids were scaled to 16 bits when saved: export the masks as 8-bit PNG"
    if unknown == {last + 1} and 0 not in present:
        return f"The ids seem to start at 1: set data.label_map: { {value + 1: value for value in range(last + 1)} }"
    if unknown == {last + 1}:
        ignored, ids = scheme.ignore_index, without_id(0, scheme.ignore_index, range(last + 2))
        return (
            f"One class more than in data.classes: if 0 is unlabeled, set data.label_map: {ids}; if {last + 1} is a "
            f"class, add its name to data.classes; to ignore it, set data.label_map: {{{last + 1}: {ignored}}}"
        )
    if unknown == {255}:
        return "255 usually marks ignored pixels: set data.ignore_index to 255, or map it in data.label_map"
    # Cityscapes has the label ids 0 to 33 for 19 classes that are evaluated.
    if max(present) <= 33 and scheme.num_classes == 19:
        return "These look like Cityscapes label ids: use format cityscapes, or map them in data.label_map"
    if max(present) <= 255 and min(unknown) > last and len(present) <= 2 * scheme.num_classes:
        return (
            "Possibly gray levels of colors, not ids: export the masks as palette or index PNG, or set data.label_map"
        )
    return "Check data.classes, or map the ids in data.label_map"


def _ids_of_colors(pixels: NDArray[np.uint8], path: Path, scheme: ClassScheme, nodata: float | None) -> Ids:
    """Return the train ids (H, W) of colors (H, W, 3), with a table of all 2^24 colors; unused pages take no memory."""
    codes = color_codes(pixels)
    offset = 1 - min(0, scheme.ignore_index)
    found = _code_table(tuple(scheme.color_table.items()), offset)[codes]
    if nodata is not None:
        found[(found == 0) & (codes == nodata * 0x010101)] = scheme.ignore_index + offset
    if not found.all():
        raise _unknown_colors(path, scheme, codes[found == 0])
    return np.asarray((found.astype(np.int32) - offset).astype(scheme.dtype))


def color_codes(pixels: NDArray[Any]) -> NDArray[np.int32]:
    """Return each pixel's color as the number 0xRRGGBB, (H, W)."""
    wide = pixels.astype(np.int32)
    codes: NDArray[np.int32] = wide[..., 0] << 16 | wide[..., 1] << 8 | wide[..., 2]
    return codes


@lru_cache(maxsize=4)
def _code_table(color_ids: tuple[tuple[Color, int], ...], offset: int) -> NDArray[np.uint16]:
    """Return the table color code -> train id + offset, which is positive; 0 for unknown colors."""
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
        "The mask seems to be smoothed or compressed with loss: export it without either"
        if len(values) > 4 * len(scheme.color_table)
        else "Add them to data.palette (after the classes: ignored)"
    )
    return DataError(
        f"{shown(path)}: the mask holds colors that are not in the palette: {named}{more}. {cause}", path=path
    )
