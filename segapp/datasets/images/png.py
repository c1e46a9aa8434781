"""Decode plain PNG files in half of OpenCV's time, with the optional package kornia-rs (extra `png`).

Every other file, and every damaged one, is left to the decoders of all formats, which give the same pixels and say what
is wrong.
"""

import threading
import zlib

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import MAX_PIXELS

try:
    from kornia_rs.io import decode_image_png_u8
except ImportError:  # not installed, or not for this system
    decode_image_png_u8 = None

_START = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
_MODES = {(8, 0, 0, 0, 0): "mono", (8, 2, 0, 0, 0): "rgb"}  # bits, color type, and no interlacing
_LENGTHS = {b"IHDR": 13, b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9, b"tIME": 7, b"IEND": 0}
_NAMES = {b"IDAT", b"tEXt", *_LENGTHS}  # the other chunks may change what OpenCV or Pillow return


def decode_plain_png(data: bytes, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8] | None:
    """Return the pixels of an intact 8-bit gray PNG, (H, W), or RGB PNG, (H, W, 3); None for any other file.

    The checksums of all chunks are compared. The one inside of the compressed pixels is not, which only OpenCV compares.
    """
    # kornia-rs holds the interpreter's lock while it decodes: in reader threads, OpenCV is faster.
    if decode_image_png_u8 is None or threading.current_thread() is not threading.main_thread():
        return None
    mode = _MODES.get(tuple(data[24:29])) if data.startswith(_START) else None
    width_px, height_px = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    if mode is None or not 0 < width_px * height_px <= max_pixels or not _is_intact(data):
        return None
    try:
        pixels: NDArray[np.uint8] = decode_image_png_u8(data, (height_px, width_px), mode)
    except BaseException as error:  # a panic in Rust, as from too little memory, is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return None
    return pixels[..., 0] if mode == "mono" else pixels


def _is_intact(data: bytes) -> bool:
    """Return True if the chunks are known, have correct checksums, and end with the file."""
    view, at = memoryview(data), 8
    while at + 12 <= len(data):
        length, name = int.from_bytes(view[at : at + 4]), bytes(view[at + 4 : at + 8])
        end = at + 12 + length
        if name not in _NAMES or _LENGTHS.get(name, length) != length:
            return False
        if zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end]):
            return False
        if name == b"IEND":
            return end == len(data)
        at = end
    return False
