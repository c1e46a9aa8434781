"""Decode 8-bit PNG files in half of OpenCV's time, with the optional package kornia-rs (extra `png`)."""

import threading

import numpy as np
from numpy.typing import NDArray
from PIL import Image

try:
    from kornia_rs.io import decode_image_png_u8
except ImportError:  # not installed, or not for this system
    decode_image_png_u8 = None


def decode_png(data: bytes, image: Image.Image) -> NDArray[np.uint8] | None:
    """Return the pixels of an 8-bit gray PNG, (H, W), or an RGB PNG, (H, W, 3); None for any other file.

    None also if kornia-rs refuses it: OpenCV and Pillow decode it, or say why they cannot. Pillow has opened and
    verified the `image` before.
    """
    mode = {"L": "mono", "RGB": "rgb"}.get(image.mode) if image.format == "PNG" else None
    # Of an animation, OpenCV returns the first frame, which need not be the pixels here.
    if mode is None or b"eXIf" in data or b"acTL" in data:
        return None
    # kornia-rs holds the interpreter's lock while it decodes: in reader threads, OpenCV is faster.
    if decode_image_png_u8 is None or threading.current_thread() is not threading.main_thread():
        return None
    try:
        pixels: NDArray[np.uint8] = decode_image_png_u8(data, (image.height, image.width), mode)
    except BaseException as error:  # a panic in Rust, as from too little memory, is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return None
    return pixels[..., 0] if mode == "mono" else pixels
