"""Read files of a data set: bytes, headers, and a cheap check of every pair before training.

Every failure is a DataError with the file, the problem and the fix. Headers are read with Pillow, which does not decode
pixels to read them; a file of 1 MB takes tens of microseconds.
"""

import errno
import importlib.util
import io
import itertools
import logging
import os
import re
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from segapp.bounds import check_memory
from segapp.datasets.images.pixel_format import RGB8, PixelFormat, StoredPixels
from segapp.datasets.images.tiff_tags import TIFF_SUFFIXES, TiffTags, is_tiff, read_tiff_tags
from segapp.datasets.orientation import Fit, Header, Turns, fit_of_mask, has_same_ratio
from segapp.datasets.resources import READERS, side_by_side
from segapp.errors import ConfigError, DataError

Read = TypeVar("Read")

MAX_PIXELS = 178_956_970
"""Maximum number of pixels: a larger file is refused as a decompression bomb (Pillow's limit: 512 MiB as RGB)."""

MAX_WINDOWED_PX = 2**30
"""Number of pixels that a TIFF read in windows may have in any case."""

_MAX_PX_PER_BYTE = 256  # of larger TIFFs; deflate packs a class map of a country into a hundredth

MAX_FILE_BYTES = 2**30
"""Largest file that is read in one piece; `MAX_PIXELS` of 24 bits, uncompressed, take half of it."""

# Pillow warns about problems that are checked here or raised as DataError.
warnings.filterwarnings("ignore", module=r"PIL\.")
logging.getLogger("PIL").addHandler(logging.NullHandler())  # unreadable data is reported as an error

IMAGE_FORMATS: tuple[str, ...] = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "PPM", "GIF")
"""The formats that Pillow may read, by its names; a reader of others, EPS, starts Ghostscript."""

HEIF_SUFFIXES: tuple[str, ...] = ()
"""Extensions of photos of phones, which are images if pillow-heif is installed; it turns them upright."""
if importlib.util.find_spec("pillow_heif") is not None:
    importlib.import_module("pillow_heif").register_heif_opener()
    HEIF_SUFFIXES = (".heic", ".heif")
    IMAGE_FORMATS += ("HEIF",)

MAX_SCANS = 100
"""Maximum number of scans of a JPEG (libtiff's limit): a photo has about 10, and each scan passes over all pixels."""

_TRANSIENT = {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR}
_TAIL_BYTES = 4096
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")  # of a JPEG, with a length; libjpeg passes over the others
_SCAN = b"\xff\xda"
_PNG_END = b"IEND\xaeB`\x82"  # the name of the last chunk and its checksum


class PointerError(DataError):
    """A file is a pointer of Git LFS instead of its contents."""


@dataclass(frozen=True, slots=True)
class ImagePair:
    """One image of a data set and its mask."""

    image: Path
    mask: Path | None  # None if the split has no masks
    name: str  # the image's path below the image folder without its extension; outputs are named after it
    others: tuple[Path, ...] = ()  # with one mask file per class, the masks of the classes after the first
    valid_area: Path | None = None  # image that is 0 where the masks are ignored; None: they are valid everywhere

    @property
    def masks(self) -> tuple[Path, ...]:
        return () if self.mask is None else (self.mask, *self.others)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.image, *self.masks, *filter(None, [self.valid_area]))


def shared_images(first: Sequence[ImagePair], second: Sequence[ImagePair]) -> list[Path]:
    """Return the images of `second` that are also files of `first`, even under another name."""

    def identity(pair: ImagePair) -> tuple[int, int] | str:
        try:
            status = os.stat(pair.image)
        except OSError:
            return str(pair.image)
        return status.st_dev, status.st_ino

    known = set(side_by_side(identity, first, READERS))
    found = zip(second, side_by_side(identity, second, READERS), strict=True)
    return [pair.image for pair, identified in found if identified in known]


def refuse_in_data(place: Path, root: str | Path, what: str, advice: str, key: str | None = None) -> None:
    """Raise ConfigError if a folder to write to is the data folder or lies in it, also by links; `what` names it."""
    if Path(os.path.realpath(place)).is_relative_to(os.path.realpath(root)):
        message = f"{what} lies in the data folder {shown(root)}, and segapp writes nothing there: {advice}"
        raise ConfigError(message, key=key, path=place)


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path as printable text: undecodable bytes and control characters are escaped.

    >>> shown("a" + chr(10) + "b.png") == "a" + chr(92) + "nb.png"
    True
    """
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def read_bytes(path: Path) -> bytes:
    """Return the contents of a regular file of at most `MAX_FILE_BYTES`; retry transient errors of the storage."""

    def read() -> bytes:
        with open_regular(path) as file:
            return file.read()

    return _retried(read, path)


def _retried(read: Callable[[], Read], path: Path, attempt: int = 1) -> Read:
    """Return the result of `read`; retry transient errors of the storage, and raise DataError for others."""
    try:
        return read()
    except OSError as error:
        if error.errno not in _TRANSIENT or attempt == 3:
            raise DataError(f"{shown(path)}: {_os_reason(path, error)}", path=path) from error
    time.sleep(0.05 * attempt)
    return _retried(read, path, attempt + 1)


def open_regular(path: Path, max_bytes: int | None = MAX_FILE_BYTES) -> BinaryIO:
    """Return a regular, non-empty file of acceptable size, open for reading.

    Raises:
        PointerError: It is a pointer of Git LFS.
        DataError: It is a pipe, a device or a folder, empty, or larger than `max_bytes`.
        OSError: It cannot be opened.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{shown(path)}: not a regular file: replace it with an image file", path=path)
    if status.st_size == 0:
        raise DataError(f"{shown(path)}: the file is empty (0 bytes): copy or download it again", path=path)
    if max_bytes is not None:
        _check_bytes(path, status.st_size, max_bytes)
    file = open(path, "rb")  # noqa: SIM115  # the caller closes it
    if status.st_size < 1024 and file.peek(len(_LFS_POINTER)).startswith(_LFS_POINTER):
        file.close()
        raise PointerError(
            f"{shown(path)}: a pointer of Git LFS, not the file itself ({status.st_size} bytes): run git lfs pull in "
            "its repository",
            path=path,
        )
    return file


def _check_bytes(path: Path, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise DataError(
            f"{shown(path)}: too large ({num_bytes} bytes, at most {max_bytes} are read): "
            "cut it into tiles, or save it compressed",
            path=path,
        )


def _os_reason(path: Path, error: OSError) -> str:
    """Return why a file could not be read, and what to do."""
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        target = os.readlink(path)
        # git-annex keeps a link to each file that was not fetched yet.
        cure = "run git annex get" if ".git/annex" in target else "restore that file, or remove the link"
        return f"a broken link to {shown(target)}, which does not exist: {cure}"
    if isinstance(error, FileNotFoundError):
        return "the file does not exist: restore it, or take it out of the split"
    if isinstance(error, PermissionError):
        return "no permission to read the file: give this user read permission (chmod +r)"
    return f"the file cannot be read ({error.strerror or error}): check the disk, or copy the file again"


def open_bytes(data: bytes, path: Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return `open_image` of bytes in memory; DataError for a JPEG with more than `MAX_SCANS` scans."""
    if data.startswith(b"\xff\xd8"):
        # NumPy finds the marker in 1 % of the time of decoding, also in previews: few files need a walk.
        pairs = (np.frombuffer(data, np.uint16, (len(data) - first) // 2, first) for first in (0, 1))
        most = sum(int(np.count_nonzero(each == np.frombuffer(_SCAN, np.uint16))) for each in pairs)
        if most > MAX_SCANS and any(itertools.islice(_scans(data), MAX_SCANS, None)):
            raise DataError(
                f"{shown(path)}: a JPEG with more than {MAX_SCANS} scans, whose decoding may take minutes: save the "
                "image again, for example as PNG, or leave it out",
                path=path,
            )
    return open_image(io.BytesIO(data), path, max_pixels)


def open_image(file: BinaryIO, path: Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return a Pillow image whose pixels are not decoded yet, of one of `IMAGE_FORMATS`, of at most `max_pixels`."""
    try:
        image = Image.open(file, formats=IMAGE_FORMATS)
    except Image.DecompressionBombError as error:
        num_px = re.search(r"\d+", str(error))  # Pillow's sentence has the product of the sides only
        raise _too_large(path, f"{num_px[0] if num_px else 'too many'} pixels", max_pixels) from error
    except Exception as error:  # a damaged header is reported by Pillow as any of a dozen exception types
        reason = "" if isinstance(error, UnidentifiedImageError) else f" ({_first_line(error)})"
        raise DataError(
            f"{shown(path)}: no readable image{reason}: the file is damaged, or of a format that is not read; replace "
            "it, or leave it out (HEIC: convert it, or install pillow-heif; video: ffmpeg -i VIDEO frames/%06d.png)",
            path=path,
        ) from error
    if image.width * image.height > max_pixels:
        raise _too_large(path, f"{image.width}x{image.height} pixels", max_pixels)
    return image


def _too_large(path: Path, what: str, max_pixels: int) -> DataError:
    return DataError(
        f"{shown(path)}: too large ({what}; at most {max_pixels} pixels are read): cut it into tiles, or save "
        "it as an upright TIFF, which is read in windows",
        path=path,
    )


def _first_line(error: BaseException) -> str:
    """Return type and first line of an exception, without memory addresses of file objects."""
    text = str(error).splitlines()[0] if str(error) else ""
    return type(error).__name__ if not text or "<_io." in text else f"{type(error).__name__}: {text}"


def damaged(path: Path, error: BaseException | str) -> DataError:
    reason = error if isinstance(error, str) else _first_line(error)
    return DataError(
        f"{shown(path)}: cannot be decoded ({reason}): the file is damaged; copy or download it again", path=path
    )


def jpeg_damage(data: bytes) -> str | None:
    """Return libjpeg's message about damaged image data that it decodes nevertheless; None for intact or other data.

    Wrong bytes in the image data give wrong pixels from there on, without an error. libjpeg notices about nine of ten
    damaged places; it decodes the others as if they were correct.
    """
    import simplejpeg

    if not data.startswith(b"\xff\xd8"):
        return None
    try:
        simplejpeg.decode_jpeg(data, "GRAY", fastdct=True, min_height=1, min_width=1, min_factor=8)
    except ValueError as error:
        said = str(error)
        return said if said.startswith(("Corrupt JPEG data", "Premature end")) else None  # not: CMYK, unusual headers
    return None


def _scans(data: bytes) -> Iterator[int]:
    """Yield the offset of each start-of-scan marker of an image (ITU T.81, B.1.1), found as libjpeg finds it.

    Segments, which may contain a preview, are skipped by their lengths. The search stops at the end of the image.
    """
    offset = 2
    while (found := _MARKER.search(data, offset)) and found[0] != b"\xff\xd9":
        if found[0] == _SCAN:
            yield found.start()
        offset = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")


def read_header(path: Path, *, max_pixels: int = MAX_PIXELS) -> Header:
    """Return a file's format, pixels and upright size, and check its end marker; reads a few kilobytes.

    A TIFF that can be read in windows may be larger, in proportion to its file: a sparse one may say any size.
    """

    def read() -> Header:
        with open_regular(path, max_bytes=None) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            tags = _tags_of(file)
            if tags is not None:
                return _header_of_tiff(path, tags, num_bytes, max_pixels)
            _check_bytes(path, num_bytes, MAX_FILE_BYTES)
            image = open_image(file, path, max_pixels)
            header = Header(str(image.format), *_upright_size(image), _stored_in_png(file))
            if not _has_end_marker(file, header.format):
                raise damaged(path, f"truncated {header.format}: its end is missing")
            return header

    return _retried(read, path)


def _header_of_tiff(path: Path, tags: TiffTags, num_bytes: int, max_pixels: int) -> Header:
    height_px, width_px = (tags.height_px, tags.width_px)[:: -1 if tags.orientation >= 5 else 1]
    num_px = height_px * width_px
    if tags.can_be_read_in_windows:
        max_pixels = max(max_pixels, MAX_WINDOWED_PX, _MAX_PX_PER_BYTE * num_bytes)
    if num_px > max_pixels:
        raise _too_large(path, f"{width_px}x{height_px} pixels in {num_bytes} bytes", max_pixels)
    try:
        check_memory(4 * num_px * tags.bands, f"{tags.bands} bands", file_bytes=num_bytes, num_px=num_px)
    except ValueError as error:
        raise damaged(path, error) from error
    return Header("TIFF", height_px, width_px, tags.orientation, tags.stored)


def tiff_tags(path: Path) -> TiffTags | None:
    """Return the tags of a TIFF of any size; None for other formats, and for a TIFF that only Pillow may read."""

    def read() -> TiffTags | None:
        with open_regular(path, max_bytes=None) as file:
            return _tags_of(file)

    return _retried(read, path)


def declared_nodata(path: Path) -> float | None:
    """Return the value of pixels without data that a TIFF declares; None for other files, which are not opened."""
    tags = tiff_tags(path) if path.suffix.lower() in TIFF_SUFFIXES else None
    return None if tags is None else tags.nodata


def _tags_of(file: BinaryIO) -> TiffTags | None:
    """Return the tags of an open file, which is read from its start afterwards; None as for `tiff_tags`."""
    try:
        return read_tiff_tags(file) if is_tiff(file.read(4)) else None
    except ValueError:
        return None
    finally:
        file.seek(0)


# Color type in the chunk IHDR -> bands; a palette (3) counts as its colors.
_PNG_BANDS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}


def _stored_in_png(file: BinaryIO) -> StoredPixels | None:
    """Return the pixels of an open PNG from its first chunk; a palette counts as its three colors."""
    file.seek(0)
    start = file.read(26)
    if start[:8] != b"\x89PNG\r\n\x1a\n" or len(start) < 26:
        return None
    bits, kind = start[24], start[25]
    return StoredPixels(_PNG_BANDS.get(kind, 3), "uint16" if bits == 16 else "uint8", bits <= 8)


def _upright_size(image: Image.Image) -> tuple[int, int, int]:
    """Return height and width with the EXIF orientation applied, and the orientation."""
    height_px, width_px = image.height, image.width
    if image.format in {"PNG", "WEBP"} and "exif" not in image.info:
        return height_px, width_px, 1  # Pillow would decode the pixels to find a late block
    if image.format == "TIFF":  # some versions of Pillow have already swapped these sides
        tags = getattr(image, "tag_v2", {})
        height_px, width_px = int(tags.get(257, height_px)), int(tags.get(256, width_px))
    orientation = exif_orientation(image)
    return (width_px, height_px, orientation) if orientation >= 5 else (height_px, width_px, orientation)


def exif_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an image, 1 to 8; 1 (upright) for a damaged EXIF block."""
    try:
        found = int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:
        return 1
    return found if 1 <= found <= 8 else 1


def is_complete(data: bytes, image_format: str) -> bool:
    """Return True if a PNG or JPEG, which decodes without it, has its end marker; other formats count as complete."""
    if image_format == "PNG":
        return data.rfind(_PNG_END) >= 0  # from the end, where it usually is
    # A preview in a JPEG has an end marker of its own, so the search starts at the image data.
    return image_format not in {"JPEG", "MPO"} or data.rfind(b"\xff\xd9", next(_scans(data), len(data))) >= 0


def _has_end_marker(file: BinaryIO, image_format: str) -> bool:
    """Return `is_complete` of an open file; read only its end if that is enough."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL_BYTES))
    if {"PNG": _PNG_END, "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9"}.get(image_format, b"") in file.read():
        return True
    file.seek(0)
    return is_complete(file.read(), image_format)  # some cameras append data after the image


def check_pairs(
    pairs: Sequence[ImagePair], pixels: PixelFormat = RGB8, *, max_named: int = 5, turns: Turns | None = None
) -> tuple[tuple[int, int], ...]:
    """Check the headers of all pairs, and return every image's upright (height, width) in pixels.

    This finds missing and empty files, unreadable headers, truncated files, JPEG masks, masks whose size differs from
    their image's, and images with another pixel format. Damage inside a file is found only when it is decoded. `turns`
    counts the masks by what their sizes say about the EXIF orientation.

    Raises:
        DataError: Some pairs cannot be used. The message lists `max_named` problems and counts the others.
    """

    def checked(pair: ImagePair) -> tuple[Header, Fit] | DataError:
        try:
            return check_pair(pair, pixels)
        except DataError as error:
            return error

    results = list(side_by_side(checked, pairs, READERS))
    problems = [each for each in results if isinstance(each, DataError)]
    found = [(pair, *each) for pair, each in zip(pairs, results, strict=True) if not isinstance(each, DataError)]
    turns = turns or Turns()
    for pair, image, fit in found:
        turns.turn(image, fit, shown(pair.image))
    if not problems:
        return tuple(image.size_px for _, image, _ in found)
    share = f"{len(problems)} of {len(pairs)} image and mask pairs"
    heading = f"{share} cannot be used: repair them or take them out of the split"
    raise DataError.together(problems[:max_named], heading, len(problems) - max_named)


def check_pair(pair: ImagePair, pixels: PixelFormat) -> tuple[Header, Fit]:
    """Check the headers of a pair; return the image's, and which image the mask fits, "neither" without one."""
    image = read_header(pair.image)
    fit: Fit = "neither"
    check_pixels(pair.image, image.stored, pixels)
    for path in filter(None, (pair.valid_area, *pair.masks)):
        mask = read_header(path)
        check_mask_format(path, mask.format)
        fit = fit_of_mask(image, mask)
        if fit == "neither" or path == pair.valid_area:
            check_same_size(replace(pair, mask=path), image.size_px, mask.size_px)
    return image, fit


def turn_of_mask(pair: ImagePair, choice: str | None) -> int:
    """Return the EXIF orientation that makes the masks of a pair upright; `choice`: `data.mask_orientation`."""
    image = read_header(pair.image)
    return Turns(choice).turn(image, fit_of_mask(image, read_header(pair.masks[0])), pair.name)


def check_pixels(path: Path, stored: StoredPixels | None, pixels: PixelFormat) -> None:
    """Raise DataError for an image that cannot be read in a format without loss."""
    problem = None if stored is None else pixels.problem(stored)
    if problem is not None:
        raise DataError(f"{shown(path)}: {problem}", path=path)


def check_mask_format(path: Path, image_format: str) -> None:
    """Raise DataError for a mask saved as JPEG, which changes ids."""
    if image_format in {"JPEG", "MPO"}:
        raise DataError(
            f"{shown(path)}: the mask is a JPEG, and lossy compression changes class ids: export the masks as PNG",
            path=path,
        )


def check_same_size(pair: ImagePair, image_px: tuple[int, ...], mask_px: tuple[int, ...], said: str = "") -> None:
    """Raise DataError, whose message begins with `said`, for a mask whose size differs from its image's."""
    if image_px == mask_px or pair.mask is None:
        return
    hint = "another ratio of sides: wrong pair, or one was cropped): give each image the mask that was drawn on it"
    if image_px == mask_px[::-1]:
        hint = "the EXIF orientation of one is lost): turn one of them"
    elif has_same_ratio(image_px, mask_px):
        hint = "the same ratio of sides: one was resized): resize the masks without smoothing, or take the other images"
    raise DataError(
        f"{said}{shown(pair.mask)}: the mask has {mask_px[1]}x{mask_px[0]} pixels, its image {shown(pair.image)} has "
        f"{image_px[1]}x{image_px[0]} ({hint}",
        path=pair.mask,
    )
