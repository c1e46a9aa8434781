"""PNG files written row by row, without the whole picture in memory.

The format is that of the W3C recommendation "Portable Network Graphics (PNG), third edition".
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _RGB, _PALETTE = 0, 2, 3
_FILTER_NONE, _FILTER_SUB = 0, 1


class PngWriter:
    """Writer of a PNG from top to bottom.

    Ids compress best unfiltered, photographs as differences to the left neighbour.

    Args:
        file: open for writing bytes; the writer does not close it.
        size: height and width, pixels.
        dtype: uint8, or uint16 for grey.
        channels: 1 for grey or ids, 3 for RGB.
        palette: RGB colours of ids; None: no palette.
        is_photo: store differences to the left neighbour.
        profile: ICC profile, or None.
    """

    def __init__(
        self,
        file: IO[bytes],
        size: tuple[int, int],
        *,
        dtype: Any = np.uint8,
        channels: int = 1,
        palette: Sequence[tuple[int, int, int]] | None = None,
        is_photo: bool = False,
        profile: bytes | None = None,
    ) -> None:
        self._file, self._channels = file, channels
        self._dtype = np.dtype(dtype)
        self._is_photo = is_photo
        self._deflate = zlib.compressobj(1, strategy=zlib.Z_RLE if is_photo else zlib.Z_DEFAULT_STRATEGY)
        kind = _RGB if channels == 3 else _GREY if palette is None else _PALETTE
        file.write(_SIGNATURE)
        header = struct.pack(">IIBBBBB", size[1], size[0], 8 * self._dtype.itemsize, kind, 0, 0, 0)
        self._chunk(b"IHDR", header)
        if profile:
            self._chunk(b"iCCP", b"ICC profile\0\0" + zlib.compress(profile))
        if palette is not None:
            self._chunk(b"PLTE", bytes(value for color in palette for value in color))

    def write(self, rows: NDArray[Any]) -> None:
        """Append rows (R, W) or (R, W, 3)."""
        count = rows.shape[0]
        stored = np.ascontiguousarray(rows, self._dtype.newbyteorder(">")).reshape(count, -1)
        lines = np.empty((count, 1 + stored.shape[1] * self._dtype.itemsize), np.uint8)
        lines[:, 0] = _FILTER_SUB if self._is_photo else _FILTER_NONE
        lines[:, 1:] = stored.view(np.uint8)
        if self._is_photo:
            left = self._channels * self._dtype.itemsize
            values = stored.view(np.uint8)
            np.subtract(values[:, left:], values[:, :-left], out=lines[:, 1 + left :])
        self._data(self._deflate.compress(lines.data))

    def finish(self) -> None:
        """Write the end of the file; no rows may follow."""
        self._data(self._deflate.flush())
        self._chunk(b"IEND", b"")

    def _data(self, data: bytes) -> None:
        if data:
            self._chunk(b"IDAT", data)

    def _chunk(self, name: bytes, data: bytes) -> None:
        self._file.write(struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)))
