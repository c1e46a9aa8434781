"""Photometric changes: brightness, contrast, saturation and hue of RGB; brightness and contrast of other bands."""

import math
from typing import Annotated, Any

import albumentations as A
import cv2
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from segapp.datasets.images.pixel_format import Pixels

_MAX_BRIGHTNESS = 32.0
_MAX_FACTOR = 0.5
_MAX_HUE_DEG = 18.0

# Luminance weights of the Filter Effects Module (W3C), which defines saturation and hue rotation as matrices.
_LUMA = np.array([0.213, 0.715, 0.072])
_HUE_COS = np.array([[0.787, -0.715, -0.072], [-0.213, 0.285, -0.072], [-0.213, -0.715, 0.928]])
_HUE_SIN = np.array([[-0.213, -0.715, 0.928], [0.143, 0.140, -0.283], [-0.787, 0.715, 0.072]])


class PhotometricChange(A.ImageOnlyTransform):  # type: ignore[misc]  # albumentations has no types
    """Brightness, contrast, saturation and hue, each with probability 0.5 (ranges of SSD, Liu et al. 2016).

    All four are affine in the color, so one matrix applies them all and values are clipped once. Contrast, saturation
    and hue follow the W3C Filter Effects Module (contrast around middle gray, hue as a rotation that keeps the
    luminance). Images that are not 8-bit RGB get the same brightness and contrast in every band, relative to its range.

    Args:
        strength: Factor of the ranges: brightness +-32 of 255, contrast and saturation 0.5 to 1.5, hue +-18 degrees.
        ranges: Lowest and highest usual value of each band; None: 8-bit RGB.

    Raises:
        ValueError: The strength is negative.
    """

    class InitSchema(BaseModel):
        """The argument, which albumentations validates."""

        strength: Annotated[float, Field(ge=0, allow_inf_nan=False)]
        ranges: tuple[tuple[float, float], ...] | None
        strict: bool

    def __init__(self, strength: float = 1.0, ranges: tuple[tuple[float, float], ...] | None = None) -> None:
        super().__init__(p=1.0)
        self.strength = strength
        self.ranges = ranges

    def get_params(self) -> dict[str, Any]:
        """Return the color matrix for one image, or its brightness and contrast."""
        brightness = self._draw(_MAX_BRIGHTNESS)
        contrast = 1 + self._draw(_MAX_FACTOR)
        if self.ranges is not None:
            return {"brightness": brightness / 255, "contrast": max(0.0, contrast)}
        saturation = 1 + self._draw(_MAX_FACTOR)
        hue_deg = self._draw(_MAX_HUE_DEG)
        return {"matrix": color_matrix(brightness, max(0.0, contrast), max(0.0, saturation), hue_deg)}

    def _draw(self, limit: float) -> float:
        """Return a uniform random number in +-limit, scaled by the strength, or 0 with probability 0.5."""
        value = self.py_random.uniform(-limit, limit) * self.strength
        return float(value) if self.py_random.random() < 0.5 else 0.0

    def apply(self, img: Pixels, **params: Any) -> Pixels:
        """Return the image with changed colors or bands, with the same dtype."""
        if self.ranges is None:
            return np.asarray(cv2.transform(img, params["matrix"]))
        brightness, contrast = params["brightness"], params["contrast"]
        if brightness == 0 and contrast == 1:
            return img
        low, high = np.array(self.ranges, np.float32).T
        middle = (low + high) / 2
        changed = (img.astype(np.float32) - middle) * contrast + (middle + brightness * (high - low))
        if img.dtype.kind == "f":
            return np.asarray(changed, img.dtype)
        limits = np.iinfo(img.dtype)
        return np.asarray(np.rint(changed).clip(limits.min, limits.max), img.dtype)


def color_matrix(
    brightness: float = 0.0, contrast: float = 1.0, saturation: float = 1.0, hue_deg: float = 0.0
) -> NDArray[np.float32]:
    """Return the affine map of RGB colors in 0..255, shape (3, 4): hue, saturation, contrast, then brightness.

    Args:
        brightness: Added to every channel.
        contrast: Factor around 127.5.
        saturation: 0: gray of the same luminance; 1: unchanged.
        hue_deg: Rotation in degrees.
    """
    angle = math.radians(hue_deg)
    hue = np.tile(_LUMA, (3, 1)) + math.cos(angle) * _HUE_COS + math.sin(angle) * _HUE_SIN
    saturate = (1 - saturation) * np.tile(_LUMA, (3, 1)) + saturation * np.eye(3)
    linear = contrast * saturate @ hue
    offset = np.full((3, 1), brightness + 127.5 * (1 - contrast))
    return np.hstack([linear, offset]).astype(np.float32)
