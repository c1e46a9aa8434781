"""Reading what a user's data folder holds: bytes, headers and a cheap check of every pair before training.

Every failure becomes one DataError that names the file, what is wrong with it and the next move. Headers are read with
Pillow, which does not decode pixels for that; a file of 1 MB costs tens of microseconds.
"""

import errno
import io
import os
import stat
import struct
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from segapp.errors import DataError

MAX_PIXELS = 178_956_970
"""More pixels than this are taken for a decompression bomb (Pillow's own limit: 512 MiB as RGB)."""

MAX_FILE_BYTES = 2**30
"""A larger file is not read; `MAX_PIXELS` of 24 bits, not compressed at all, take half of that."""

# Pillow warns of what is checked here, or of damage that ends in an error of ours.
warnings.filterwarnings("ignore", module=r"PIL\.")

_ORIENTATION_TAG = 0x0112
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR}
_TAIL_BYTES = 4096
_PNG_END = b"IEND\xaeB`\x82"  # the name of the last chunk and its checksum


@dataclass(frozen=True)
class ImagePair:
    """One image of a data set and its mask.

    Attributes:
        image: The image file.
        mask: The mask file; None where the split has no ground truth.
        name: The image's path below the image folder without its extension; outputs are named after it.
    """

    image: Path
    mask: Path | None
    name: str


@dataclass(frozen=True)
class Header:
    """What a file says about its pixels before they are decoded.

    Attributes:
        format: Pillow's name of the file format, such as "PNG".
        mode: Pillow's pixel mode, such as "RGB" or "P".
        height_px: Height once the EXIF orientation is applied.
        width_px: Width once the EXIF orientation is applied.
    """

    format: str
    mode: str
    height_px: int
    width_px: int


def shown(path: str | os.PathLike[str]) -> str:
    """A path as text that is safe to print: undecodable bytes and control characters escaped.

    >>> shown("a" + chr(10) + "b.png") == "a" + chr(92) + "nb.png"
    True
    """
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def read_bytes(path: Path, *, tries: int = 3) -> bytes:
    """The whole of a regular file; a transient error of the storage is tried again.

    Args:
        path: The file, its name of any bytes.
        tries: How often a transient error (EIO, ESTALE) is tried in all.

    Raises:
        DataError: The file is missing, empty, larger than `MAX_FILE_BYTES`, not a regular file or not readable.
    """
    for attempt in range(1, tries + 1):
        try:
            with open_regular(path) as file:
                return file.read()
        except OSError as error:
            if error.errno not in _TRANSIENT or attempt == tries:
                raise DataError(f"{shown(path)}: {_os_reason(error)}") from error
            time.sleep(0.05 * attempt)
    raise AssertionError("unreachable: the last try returns or raises")


def open_regular(path: Path) -> BinaryIO:
    """A regular file that holds something and fits into memory, open for reading; a pipe is never waited for.

    Raises:
        DataError: It is a pipe, a device or a folder, empty, or larger than `MAX_FILE_BYTES`.
        OSError: It cannot be opened.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise DataError(f"{shown(path)}: not a regular file: replace it by the file it should be")
    file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115 - the caller's
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):  # became one in between
            raise DataError(f"{shown(path)}: not a regular file: replace it by the file it should be")
        if status.st_size == 0:
            raise DataError(f"{shown(path)}: the file is empty (0 bytes): copy or download it again")
        if status.st_size > MAX_FILE_BYTES:
            raise DataError(
                f"{shown(path)}: too large ({status.st_size} bytes, at most {MAX_FILE_BYTES} are read): "
                "cut it into tiles, or save it compressed"
            )
    except BaseException:
        file.close()
        raise
    return file


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _os_reason(error: OSError) -> str:
    """Why the system refused a file, with the next move."""
    if isinstance(error, FileNotFoundError):
        return "the file does not exist: restore it, or take it out of the split"
    if isinstance(error, PermissionError):
        return "the file may not be read: give this user read permission (chmod +r)"
    return f"the file cannot be read ({error.strerror or error}): check the disk, or copy the file again"


def open_image(file: BinaryIO, path: Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """A Pillow image whose pixels are not decoded yet, small enough to decode.

    Args:
        file: The file's bytes, at their beginning.
        path: Named in errors.
        max_pixels: More are refused.

    Raises:
        DataError: No known image format, a damaged header, or more than `max_pixels`.
    """
    try:
        image = Image.open(file)
    except Image.DecompressionBombError as error:
        raise _too_large(path, str(error), max_pixels) from error
    except Exception as error:  # a damaged header is reported by Pillow as any of a dozen exception types
        raise DataError(
            f"{shown(path)}: no readable image ({_first_line(error)}): the file is damaged or of an unknown format; "
            "replace it, or take it out of the split"
        ) from error
    if image.width * image.height > max_pixels:
        raise _too_large(path, f"{image.width}x{image.height} pixels", max_pixels)
    return image


def _too_large(path: Path, what: str, max_pixels: int) -> DataError:
    return DataError(f"{shown(path)}: too large ({what}; at most {max_pixels} pixels are read): cut it into tiles")


def _first_line(error: BaseException) -> str:
    """The kind and the first line of an exception, without memory addresses of the file objects it names."""
    text = str(error).splitlines()[0] if str(error) else ""
    return type(error).__name__ if not text or "<_io." in text else f"{type(error).__name__}: {text}"


def damaged(path: Path, error: BaseException | str) -> DataError:
    """The error for a file whose pixels cannot be decoded."""
    reason = error if isinstance(error, str) else _first_line(error)
    return DataError(f"{shown(path)}: cannot be decoded ({reason}): the file is damaged; copy or download it again")


def is_complete_jpeg(data: bytes) -> bool:
    """Whether a JPEG's image data is followed by its end marker; a cut file has none, and decodes without complaint.

    An embedded preview has an end marker of its own, so the search begins at the picture itself (ITU T.81, B.1.1).

    Args:
        data: The whole file.
    """
    start = _start_of_scan(data)
    return start is not None and data.rfind(b"\xff\xd9", start) >= 0


def _start_of_scan(data: bytes) -> int | None:
    """The offset of the first start-of-scan marker, walking the segments before it; None when there is none."""
    offset = 2
    while offset + 4 <= len(data) and data[offset] == 0xFF:
        marker = data[offset + 1]
        if marker == 0xDA:
            return offset
        if marker == 0xFF:  # fill byte
            offset += 1
        elif marker == 0x01 or 0xD0 <= marker <= 0xD8:  # markers without a length
            offset += 2
        else:
            offset += 2 + int(struct.unpack_from(">H", data, offset + 2)[0])
    return None


def read_header(path: Path, *, max_pixels: int = MAX_PIXELS) -> Header:
    """A file's format, mode and upright size, and whether its end is there, at the price of a few kilobytes.

    Args:
        path: The file.
        max_pixels: More are refused.

    Raises:
        DataError: The file is missing, empty, of no known format, too large, or ends before its last marker.
    """
    try:
        with open_regular(path) as file:
            image = open_image(file, path, max_pixels)
            height_px, width_px = _upright_size(image)
            header = Header(str(image.format), image.mode, height_px, width_px)
            if not _ends_as_it_should(file, header.format):
                raise damaged(path, f"truncated {header.format}: its end is missing")
            return header
    except OSError as error:
        raise DataError(f"{shown(path)}: {_os_reason(error)}") from error


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """Height and width with the EXIF orientation applied. A damaged EXIF block counts as none."""
    height_px, width_px = image.height, image.width
    if image.format in {"PNG", "WEBP"} and "exif" not in image.info:
        return height_px, width_px  # Pillow would decode the pixels to look for a late block
    try:
        turns_sideways = image.getexif().get(_ORIENTATION_TAG, 1) in {5, 6, 7, 8}
    except Exception:
        return height_px, width_px
    if image.format == "TIFF":  # some versions of Pillow have swapped the sides of these already
        tags = getattr(image, "tag_v2", {})
        height_px, width_px = int(tags.get(257, height_px)), int(tags.get(256, width_px))
    return (width_px, height_px) if turns_sideways else (height_px, width_px)


def is_complete(data: bytes, image_format: str) -> bool:
    """Whether a PNG or a JPEG has its end marker; other formats are taken as complete.

    Args:
        data: The whole file.
        image_format: Pillow's name of the format.
    """
    if image_format == "PNG":
        return _PNG_END in data
    return is_complete_jpeg(data) if image_format in {"JPEG", "MPO"} else True


def _ends_as_it_should(file: BinaryIO, image_format: str) -> bool:
    """`is_complete`, reading as little of the file as shows it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL_BYTES))
    if {"PNG": _PNG_END, "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9"}.get(image_format, b"") in file.read():
        return True
    file.seek(0)
    return is_complete(file.read(), image_format)  # some cameras append data of their own behind the picture


def check_pairs(pairs: Sequence[ImagePair], *, max_named: int = 5) -> tuple[tuple[int, int], ...]:
    """Every image's upright (height, width) in pixels, once all headers have been read and all pairs fit.

    Finds what is cheap to find before a training starts: missing and empty files, unreadable headers, missing ends,
    JPEG masks, and masks of another size than their image. Damage inside a file shows only when it is decoded.

    Args:
        pairs: The pairs of a split.
        max_named: How many problems are spelled out; the rest is counted.

    Raises:
        DataError: One or more pairs cannot be used; all problems in one error.
    """
    sizes: list[tuple[int, int]] = []
    problems: list[str] = []
    for pair in pairs:
        try:
            sizes.append(_check_pair(pair))
        except DataError as error:
            problems.append(str(error))
    if not problems:
        return tuple(sizes)
    if len(problems) == 1:
        raise DataError(problems[0])
    named = "".join(f"\n  {problem}" for problem in problems[:max_named])
    rest = len(problems) - max_named
    raise DataError(
        f"{len(problems)} of {len(pairs)} image and mask pairs cannot be used: repair them or take them out of the "
        f"split{named}" + (f"\n  and {rest} more" if rest > 0 else "")
    )


def _check_pair(pair: ImagePair) -> tuple[int, int]:
    """One pair's (height, width) from its headers."""
    image = read_header(pair.image)
    size = (image.height_px, image.width_px)
    if pair.mask is not None:
        mask = read_header(pair.mask)
        check_mask_format(pair.mask, mask.format)
        check_same_size(pair, size, (mask.height_px, mask.width_px))
    return size


def check_mask_format(path: Path, image_format: str) -> None:
    """Refuse formats that change the ids they store.

    Raises:
        DataError: The mask is a JPEG.
    """
    if image_format in {"JPEG", "MPO"}:
        raise DataError(f"{shown(path)}: a mask saved as JPEG has lost its ids: export the masks as PNG")


def check_same_size(pair: ImagePair, image_px: tuple[int, ...], mask_px: tuple[int, ...]) -> None:
    """Refuse a mask that does not lie on its image.

    Args:
        pair: The files, for the message.
        image_px: The image's (height, width).
        mask_px: The mask's (height, width).

    Raises:
        DataError: The sizes differ.
    """
    if image_px == mask_px or pair.mask is None:
        return
    hint = (
        "the EXIF rotation of the image was not applied to it" if image_px == mask_px[::-1] else "wrong pair or resized"
    )
    raise DataError(
        f"{shown(pair.mask)}: the mask has {mask_px[1]}x{mask_px[0]} pixels, its image {shown(pair.image)} has "
        f"{image_px[1]}x{image_px[0]} ({hint}): make both the same size"
    )


def open_bytes(data: bytes, path: Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """`open_image` over bytes in memory."""
    return open_image(io.BytesIO(data), path, max_pixels)
