"""The memory that the content of a file may ask for, from the sizes of the file and of its image; texts in UTF-8.

A few bytes can describe gigabytes: run lengths, a compressed bitmap, a class id, a list that is repeated. The readers
of such content call `check_memory` or `check_values` before they allocate, so a file takes memory in proportion to its
size.
"""

import codecs
from collections.abc import Mapping
from itertools import chain
from typing import Any

_BASE_BYTES = 2**28
_BYTES_PER_FILE_BYTE = 32
"""Python needs up to 25 bytes for a byte of JSON or XML; PNG and JPEG in a table are stored as they are."""
_BYTES_PER_PX = 16

MAX_DEPTH = 32
"""Maximum nesting of plain values; configs have five levels."""


def allowed_bytes(*, file_bytes: int = 0, num_px: int = 0) -> int:
    """Return the memory that a part of a file may ask for, given the size of the file, or the pixels of its image.

    >>> allowed_bytes() >> 20, allowed_bytes(file_bytes=2**20) >> 20, allowed_bytes(num_px=2**20) >> 20
    (256, 288, 272)
    """
    return _BASE_BYTES + _BYTES_PER_FILE_BYTE * file_bytes + _BYTES_PER_PX * num_px


def check_memory(asked_bytes: int, what: str, *, file_bytes: int = 0, num_px: int = 0) -> None:
    """Raise ValueError if `what` needs more memory than `allowed_bytes`."""
    allowed = allowed_bytes(file_bytes=file_bytes, num_px=num_px)
    if asked_bytes > allowed:
        measure = f"an image of {num_px} pixels" if num_px else f"a file of {file_bytes} bytes"
        raise ValueError(
            f"{what} would take {asked_bytes / 2**20:.0f} MiB of memory; {allowed / 2**20:.0f} MiB are allowed for "
            f"{measure}"
        )


def check_values(content: Any, most: int, most_chars: int | None = None) -> None:
    """Raise ValueError for plain values with more than `most` values or characters, or nested too deeply.

    A value that is referred to several times counts every time, because a copy or a text of it repeats it.
    """
    level, num_values, num_chars = [content], 0, 0
    # By levels, because recursion ends at Python's own limit.
    for _ in range(MAX_DEPTH + 1):
        num_values += len(level)
        num_chars += sum(len(one) for one in level if isinstance(one, str | bytes))
        parts = [one for one in level if isinstance(one, Mapping | list | tuple | set)]
        # Before the next level is made, which repeated values could make too large.
        if num_values + sum(map(len, parts)) > most or (most_chars is not None and num_chars > most_chars):
            break
        if not parts:
            return
        level = [*chain.from_iterable([*one, *one.values()] if isinstance(one, Mapping) else one for one in parts)]
    raise ValueError("its values are repeated or nested too often: write every value once")


def decoded(data: bytes) -> str:
    """Return the text of a file in UTF-8, with or without a byte order mark; ValueError names the line of a problem."""
    try:
        text, at, wrong = data.decode("utf-8-sig"), data.find(0), "has a NUL byte"
    except UnicodeDecodeError as error:
        text, at, wrong = "", error.start, f"is not in UTF-8 (byte 0x{data[error.start]:02x})"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        at, wrong = 0, "is in UTF-16"
    if at >= 0:
        raise ValueError(f"line {len((data[:at] + b'.').splitlines())} {wrong}: save the file as UTF-8")
    return text
