"""Random crops of the randomly scaled image, and the padding of images smaller than the crop.

Shapes: H, W height and width in pixels; images (H, W, B) of B bands, masks (H, W) of train ids.
"""

from random import Random
from typing import Annotated, Any

import albumentations as A
import cv2
import numpy as np
from pydantic import BaseModel, Field, field_validator

from segapp.datasets.images.pixel_format import Pixels
from segapp.datasets.images.windows import places_of

Side = Annotated[int, Field(ge=1)]
Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]

# As in mmsegmentation's `RandomCrop`.
_MAX_TRIES = 10


def resize(pixels: Pixels, size_px: tuple[int, int], interpolation: int) -> Pixels:
    """Return the pixels resized to (height, width); always a copy."""
    if pixels.shape[:2] == size_px:
        return pixels.copy()
    resized = cv2.resize(pixels, (size_px[1], size_px[0]), interpolation=interpolation)
    return np.asarray(resized).reshape(*size_px, *pixels.shape[2:])  # OpenCV drops the axis of a single band


class AxisPlan:
    """Numbers of source pixels, crop pixels and padding along one axis."""

    def __init__(self, source_px: int, zoom: float, crop_px: int) -> None:
        self.shown_px = min(crop_px, max(1, round(source_px * zoom)))
        self.window_px = min(source_px, max(1, round(self.shown_px / zoom)))
        self.pad_px = crop_px - self.shown_px
        self.free_px = source_px - self.window_px

    def draw(self, rng: Random, inside_px: int | None = None) -> slice:
        """Return a random position of the window in the source, which contains `inside_px` if it is given."""
        first, last = 0, self.free_px
        if inside_px is not None:
            first, last = max(first, inside_px - self.window_px + 1), min(last, inside_px)
        start = rng.randint(first, last)
        return slice(start, start + self.window_px)


class ScaledCrop(A.DualTransform):  # type: ignore[misc]  # albumentations has no types
    """A crop of the randomly scaled image; only the crop is computed.

    The window is chosen in whole source pixels, so its scale differs from the drawn one by less than one pixel. Crops
    dominated by one class are drawn again as in mmsegmentation's `RandomCrop`, but counting valid pixels only. Images
    smaller than the crop are padded at random sides, with `fill` and `ignore_index`.

    Args:
        crop_px: Height and width of the crop.
        scale: Range of the random scale, uniform.
        cat_max_ratio: Largest allowed share of one class among the valid pixels, for up to ten tries; 1: the first crop
            is used.
        ignore_index: Mask value of padding.
        resize_px: Height and width to which every image is resized before the random scale; None: not resized.
        fill: Padding value of each band, by default ImageNet's mean color.

    Raises:
        ValueError: A size is not positive, or a range or a share is impossible.
    """

    class InitSchema(BaseModel):
        """The arguments, which albumentations validates."""

        crop_px: tuple[Side, Side]
        scale: tuple[Factor, Factor]
        cat_max_ratio: Annotated[float, Field(gt=0, le=1)]
        ignore_index: int
        resize_px: tuple[Side, Side] | None
        fill: tuple[float, ...]
        strict: bool

        @field_validator("scale")
        @classmethod
        def _ordered(cls, scale: tuple[float, float]) -> tuple[float, float]:
            if scale[0] > scale[1]:
                raise ValueError("write the smallest factor first")
            return scale

    def __init__(
        self,
        crop_px: tuple[int, int],
        scale: tuple[float, float] = (0.5, 2.0),
        cat_max_ratio: float = 0.75,
        ignore_index: int = 255,
        resize_px: tuple[int, int] | None = None,
        fill: tuple[float, ...] = (124, 116, 104),
    ) -> None:
        super().__init__(p=1.0)
        self.crop_px = crop_px
        self.scale = scale
        self.cat_max_ratio = cat_max_ratio
        self.ignore_index = ignore_index
        self.resize_px = resize_px
        self.fill = fill

    def get_params_dependent_on_data(self, params: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        """Return the window in the source, the size to which it is resized, and the padding."""
        mask: Pixels = data["mask"]
        height, width = mask.shape[:2]
        base_height, base_width = self.resize_px or (height, width)
        scale = self.py_random.uniform(*self.scale)
        rows = AxisPlan(height, scale * base_height / height, self.crop_px[0])
        columns = AxisPlan(width, scale * base_width / width, self.crop_px[1])
        before = self.py_random.randint(0, rows.pad_px), self.py_random.randint(0, columns.pad_px)
        return {
            "window": self._draw_window(mask, rows, columns, data.get("aim")),
            "shown_px": (rows.shown_px, columns.shown_px),
            "padding": (before[0], rows.pad_px - before[0], before[1], columns.pad_px - before[1]),
        }

    def _draw_window(self, mask: Pixels, rows: AxisPlan, columns: AxisPlan, aim: int | None) -> tuple[slice, slice]:
        """Return the first of up to ten windows in which no class exceeds `cat_max_ratio`; else the last.

        All of them contain a pixel of the class `aim`; each time it is drawn from all pixels of the class.
        """
        places = places_of(mask, aim) if aim is not None else ()

        def draw() -> tuple[slice, slice]:
            if len(places) == 0:
                return rows.draw(self.py_random), columns.draw(self.py_random)
            y, x = divmod(int(places[self.py_random.randrange(len(places))]), mask.shape[1])
            return rows.draw(self.py_random, y), columns.draw(self.py_random, x)

        window = draw()
        # Any window is accepted, or there is only one.
        if self.cat_max_ratio >= 1 or (rows.free_px == 0 and columns.free_px == 0):
            return window
        for _ in range(_MAX_TRIES - 1):
            if largest_share(mask[window], self.ignore_index) < self.cat_max_ratio:
                break
            window = draw()
        return window

    def apply(self, img: Pixels, **params: Any) -> Pixels:
        crop = resize(img[params["window"]], params["shown_px"], cv2.INTER_LINEAR)
        return _pad(crop, params["padding"], self.fill)

    def apply_to_mask(self, mask: Pixels, **params: Any) -> Pixels:
        crop = resize(mask[params["window"]], params["shown_px"], cv2.INTER_NEAREST_EXACT)
        return _pad(crop, params["padding"], self.ignore_index)


def _pad(pixels: Pixels, padding: tuple[int, int, int, int], value: int | tuple[float, ...]) -> Pixels:
    if not any(padding):
        return pixels
    above, below, left, right = padding
    # OpenCV's constants have four numbers, and it has no 64-bit integers here.
    if (pixels.ndim == 2 or pixels.shape[2] <= 4) and pixels.dtype.itemsize <= 4:
        fill = np.asarray(value).astype(pixels.dtype).tolist()  # cut off, as an assignment does; OpenCV would round
        padded = cv2.copyMakeBorder(pixels, above, below, left, right, cv2.BORDER_CONSTANT, value=fill)
        return np.asarray(padded).reshape(*padded.shape[:2], *pixels.shape[2:])
    height, width = pixels.shape[:2]
    padded = np.empty((above + height + below, left + width + right, *pixels.shape[2:]), pixels.dtype)
    padded[:] = value
    padded[above : above + height, left : left + width] = pixels
    return padded


def largest_share(ids: Pixels, ignore_index: int) -> float:
    """Return the most frequent class's share of the valid pixels, 0 to 1; 1.0 if no pixel is valid."""
    if ids.dtype == np.int32:  # sets of classes: a pixel may have several
        return 0.0
    if ids.dtype == np.uint8:
        counts = cv2.calcHist([ids], [0], None, [256], [0, 256]).ravel()
    else:
        counts = np.bincount(ids.ravel().view(np.uint16), minlength=1)
    ignored = ignore_index % 65_536
    if ignored < len(counts):
        counts[ignored] = 0
    num_valid_px = counts.sum()
    return float(counts.max() / num_valid_px) if num_valid_px else 1.0
