"""The pixels of a data set: what is read of a file, and how it becomes the input of a model.

Commands that only look at files use this module, so torch is imported only for a torch dtype.

Shapes: H, W height and width in pixels; B bands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Pixels = NDArray[Any]
Range = tuple[float, float]

DTYPES = ("uint8", "uint16", "int16", "float32")
"""Dtypes that are read as they are stored."""


@dataclass(frozen=True)
class StoredPixels:
    """The pixels of a file."""

    bands: int  # values per pixel
    dtype: str  # dtype of a value, as numpy names it
    # Can be converted to 8-bit RGB without loss: gray, palette, RGB or CMYK of at most 8 bits, with or without alpha
    is_picture: bool
    pages: str = ""  # description of a TIFF's pages that are not bands; "" if there are none

    def __str__(self) -> str:
        return f"{self.dtype} with {self.bands} band{'s' if self.bands > 1 else ''}"


@dataclass(frozen=True)
class PixelFormat:
    """What happens to every image of a data set: files are read by it, and `Preprocessing` prepares them."""

    # Bands of a file that are read, in this order, counted from 1; None: any 8-bit image, converted to RGB
    bands: tuple[int, ...] | None = None
    dtype: str = "uint8"  # dtype of the values: uint8, uint16, int16 or float32
    # For each band, the values that normalization maps to 0 and 1; None: 0 and 255
    value_range: tuple[Range, ...] | None = None
    # Mean of each band in 0..1, which padding and pixels without data get, and standard deviation; None: 0.5 and 1
    mean: tuple[float, ...] | None = field(default=None, compare=False)
    std: tuple[float, ...] | None = field(default=None, compare=False)
    # Height and width at which the model sees a whole image; None: the image's own
    resize_px: tuple[int, int] | None = field(default=None, compare=False)
    is_trained: bool = field(default=False, compare=False)  # of a finished training, whose keys cannot be changed

    @property
    def num_bands(self) -> int:
        return 3 if self.bands is None else len(self.bands)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def ranges(self) -> tuple[Range, ...]:
        return self.value_range or ((0.0, 255.0),) * self.num_bands

    @property
    def is_rgb8(self) -> bool:
        return self.num_bands == 3 and self.dtype == "uint8" and self.value_range is None

    @property
    def layout(self) -> str:
        """Number, type and meaning of the bands in words: "uint8 RGB", or "uint16 of 4 bands"."""
        if self.bands is None:
            return "uint8 RGB"
        return f"{self.dtype} of {self.num_bands} band{'s' if self.num_bands > 1 else ''}"

    def problem(self, stored: StoredPixels) -> str | None:
        """Return why a file with these pixels cannot be read in this format, and what to do; None if it can."""
        if stored.pages:
            return (
                f"it holds {stored.pages}, and an image would be only the first of them: save each image as a file of "
                "its own, or channels as the bands of one page"
            )
        is_read = stored.is_picture
        if self.bands is not None:
            is_read = stored.dtype == self.dtype and max(self.bands) <= stored.bands
        if is_read:
            return None
        # No key of a config makes a trained model take other pixels.
        if self.is_trained:
            return f"its pixels are {stored}, but the model was {self.training}: convert it as the training images were"
        if self.bands is None:
            if stored.dtype not in DTYPES:
                return f"its pixels are {stored}, which is not read: convert it to {', '.join(DTYPES[:-1])} or float32"
            return (
                f"its pixels are {stored}, and 8-bit RGB would lose some of that: set data.dtype: {stored.dtype}, "
                f"data.bands: {list(range(1, stored.bands + 1))} and data.value_range, which segapp check measures"
            )
        if stored.dtype != self.dtype:
            return f"its pixels are {stored}, data.dtype is {self.dtype}: convert it, or change data.dtype"
        return f"it has no band {max(self.bands)} of data.bands {list(self.bands)} (its pixels are {stored})"

    @property
    def training(self) -> str:
        """The images of a training in words, with the keys that describe them."""
        keys = f" (data.bands {list(self.bands)}, data.value_range {[*map(list, self.ranges)]})" if self.bands else ""
        return f"trained on {self.layout}{keys}"

    def unused_bands(self, stored: StoredPixels | None) -> str:
        """Return a sentence about bands of a readable image that the model does not use; "" if there are none."""
        if self.bands is None or stored is None or stored.bands <= len({*self.bands}):
            return ""
        found = f"only bands {list(self.bands)} of {stored.bands} are used, as the model was {self.training}"
        return f"{found}: if the training images had other bands, convert the image"

    def as_rgb(self, pixels: NDArray[Any]) -> NDArray[np.uint8]:
        """Return an RGB image (H, W, 3) of pixels (H, W, B): the first three bands, or the first one as gray.

        The ends of a band's range become 0 and 255; values outside are clipped.
        """
        if self.is_rgb8 and pixels.dtype == np.uint8:
            return pixels
        shown = [0, 1, 2] if self.num_bands >= 3 else [0, 0, 0]
        low, high = np.array(self.ranges, np.float32)[shown].T
        scaled = (pixels[..., shown].astype(np.float32) - low) * (255 / (high - low))
        return np.asarray(np.rint(np.nan_to_num(scaled, nan=0.0).clip(0, 255)), np.uint8)

    @property
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each band in 0..1."""
        return self.mean or (0.5,) * self.num_bands, self.std or (1.0,) * self.num_bands

    @property
    def fill(self) -> tuple[float, ...]:
        """The mean of each band as stored in files: the value of padding and of pixels without data."""
        mean, _ = self.statistics
        values = [low + m * (high - low) for (low, high), m in zip(self.ranges, mean, strict=True)]
        return tuple(values if self.dtype == "float32" else map(round, values))

    def fill_nodata(self, stored: Pixels, nodata: float | None) -> tuple[Pixels, NDArray[np.bool_] | None]:
        """Return pixels (H, W, B) with `fill` instead of nodata, and a mask of these values, (H, W, B), or None.

        A value of uint8 that one band has may be a color, such as the 0 of a red pixel: it counts if all bands have it.
        """
        if nodata is None:
            return stored, None
        missing = np.isnan(stored) if math.isnan(nodata) else stored == stored.dtype.type(nodata)
        if self.dtype == "uint8":
            missing = np.broadcast_to(in_all_bands(missing)[..., None], missing.shape)
        filled = stored.copy()
        for band, value in enumerate(np.array(self.fill).astype(stored.dtype)):
            filled[..., band][missing[..., band]] = value
        return filled, missing


def in_all_bands(missing: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the pixels that are nodata in all bands, (H, W), of (H, W, B); numpy's `all` takes 20 times as long."""
    return np.asarray(np.logical_and.reduce([missing[..., band] for band in range(missing.shape[-1])]))


RGB8 = PixelFormat()
"""8-bit RGB, to which all 8-bit images are converted."""


def per_band(values: tuple[float, ...], num_bands: int) -> tuple[float, ...]:
    """Return one value per band: the given values, or for another number of bands RGB's three and then their mean.

    Fewer than three bands all get the mean.

    >>> per_band((0.0, 0.3, 0.6), 4)
    (0.0, 0.3, 0.6, 0.3)
    """
    if len(values) == num_bands:
        return values
    mean = round(sum(values) / len(values), 6)
    return (*values, *(mean,) * (num_bands - 3)) if num_bands > 3 else (mean,) * num_bands
