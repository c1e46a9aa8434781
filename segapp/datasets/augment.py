"""What happens to an image and its mask before the model: random crops at random scales, flips, photometric changes.

The only file that imports albumentations. Nothing here keeps a random generator between samples: a transform is a
function of the image, the mask and a seed. Legend: H, W height and width in pixels; images are RGB uint8 (H, W, 3),
masks (H, W) of train ids.
"""

import math
import os
from random import Random
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # otherwise the import asks the network for a newer version

import albumentations as A

from segapp.datasets.sampling import mix_seed

Pixels = NDArray[Any]

MEAN_COLOR = (124, 116, 104)
"""ImageNet's mean colour: padding of this colour is about zero once normalised."""

_MAX_TRIES = 10
_MAX_BRIGHTNESS = 32.0
_MAX_FACTOR = 0.5
_MAX_HUE_DEG = 18.0

# Luminance weights of the Filter Effects Module (W3C), in which saturation and hue rotation are matrices.
_LUMA = np.array([0.213, 0.715, 0.072])
_HUE_COS = np.array([[0.787, -0.715, -0.072], [-0.213, 0.285, -0.072], [-0.213, -0.715, 0.928]])
_HUE_SIN = np.array([[-0.213, -0.715, 0.928], [0.143, 0.140, -0.283], [-0.787, 0.715, 0.072]])


class TrainTransform:
    """Random scale, crop, flip and photometric changes, all decided by the seed.

    Only the part of the image that the crop shows is resized. Crops that one class fills beyond `cat_max_ratio` of
    their valid pixels are drawn again. Images smaller than the crop are padded at random sides, with `MEAN_COLOR` and
    `ignore_index`.

    Args:
        crop_px: Height and width of what comes out.
        scale: Range of the random scale, uniform.
        hflip: Probability of a horizontal flip.
        cat_max_ratio: Largest share of the valid pixels that one class should fill, tried for up to ten crops; 1 takes
            the first crop.
        photometric: True, False, or the strength of the photometric changes in multiples of the usual ones
            (brightness +-32 of 255, contrast and saturation 0.5 to 1.5, hue +-18 degrees, each with probability 0.5).
        ignore_index: Mask value of padding.
        resize_px: Height and width every image is brought to before the random scale; None: as it is.

    Raises:
        ValueError: A size is not positive, or a range or a probability is impossible.
    """

    def __init__(
        self,
        crop_px: tuple[int, int],
        *,
        scale: tuple[float, float] = (0.5, 2.0),
        hflip: float = 0.5,
        cat_max_ratio: float = 0.75,
        photometric: bool | float = True,
        ignore_index: int = 255,
        resize_px: tuple[int, int] | None = None,
    ) -> None:
        self.crop_px = _check_size("crop_px", crop_px)
        self.resize_px = _check_size("resize_px", resize_px) if resize_px is not None else None
        strength = float(photometric)
        if not 0 < scale[0] <= scale[1] < math.inf:
            raise ValueError(f"scale={scale}: a range of positive factors is needed, such as (0.5, 2.0)")
        if not 0 <= hflip <= 1 or not 0 < cat_max_ratio <= 1 or not 0 <= strength < math.inf:
            raise ValueError(
                f"hflip={hflip}, cat_max_ratio={cat_max_ratio}, photometric={photometric}: "
                "probabilities and shares are 0..1, the strength is not negative"
            )
        crop = ScaledCrop(self.crop_px, scale, cat_max_ratio, ignore_index, self.resize_px)
        steps = [crop, A.HorizontalFlip(p=hflip)] + ([PhotometricChange(strength)] if strength > 0 else [])
        self._steps = A.Compose(steps, is_check_shapes=False)

    def __call__(self, image: Pixels, mask: Pixels, seed: int) -> tuple[Pixels, Pixels]:
        """A new image (crop height, crop width, 3) and mask (crop height, crop width).

        Each step has a seed of its own: `Compose.set_random_seed` would give all steps the same stream, so that, for
        example, the scale decided the brightness too.
        """
        for position, step in enumerate(self._steps.transforms):
            step.set_random_seed(mix_seed(seed, position))
        result = self._steps(image=image, mask=mask)
        return result["image"], result["mask"]


class EvalTransform:
    """Brings image and mask to a fixed size, or leaves both as they are.

    Args:
        resize_px: Height and width of what comes out; None: as on disk.
    """

    def __init__(self, resize_px: tuple[int, int] | None = None) -> None:
        self.resize_px = _check_size("resize_px", resize_px) if resize_px is not None else None

    def __call__(self, image: Pixels, mask: Pixels, seed: int) -> tuple[Pixels, Pixels]:
        """The image and mask at that size; the seed plays no part."""
        if self.resize_px is None or self.resize_px == image.shape[:2]:
            return image, mask
        return _resize(image, self.resize_px, cv2.INTER_LINEAR), _resize(mask, self.resize_px, cv2.INTER_NEAREST_EXACT)


def _check_size(name: str, size_px: tuple[int, int]) -> tuple[int, int]:
    height, width = (int(side) for side in size_px)
    if height < 1 or width < 1:
        raise ValueError(f"{name}={size_px}: height and width must be positive")
    return height, width


def _resize(pixels: Pixels, size_px: tuple[int, int], interpolation: int) -> Pixels:
    """The pixels at (height, width); a copy even where the size is right already."""
    if pixels.shape[:2] == size_px:
        return pixels.copy()
    return np.asarray(cv2.resize(pixels, (size_px[1], size_px[0]), interpolation=interpolation))


class AxisPlan:
    """Along one axis: how many source pixels become how many crop pixels, and how many are padding.

    Args:
        source_px: Length of the source.
        zoom: Crop pixels per source pixel.
        crop_px: Length of the crop.
    """

    def __init__(self, source_px: int, zoom: float, crop_px: int) -> None:
        self.shown_px = min(crop_px, max(1, round(source_px * zoom)))
        self.window_px = min(source_px, max(1, round(self.shown_px / zoom)))
        self.pad_px = crop_px - self.shown_px
        self.free_px = source_px - self.window_px

    def draw(self, rng: Random) -> slice:
        """A random place of the window in the source."""
        start = rng.randint(0, self.free_px)
        return slice(start, start + self.window_px)


class ScaledCrop(A.DualTransform):  # type: ignore[misc]  # albumentations has no types
    """A crop of the randomly scaled image, of which only the crop is ever computed.

    The window is chosen in the source's own pixels, so its scale deviates from the drawn one by less than a pixel of
    the window. Cropping away from single classes follows the field (mmsegmentation's `RandomCrop`), over valid pixels.
    """

    def __init__(
        self,
        crop_px: tuple[int, int],
        scale: tuple[float, float],
        cat_max_ratio: float,
        ignore_index: int,
        resize_px: tuple[int, int] | None,
    ) -> None:
        super().__init__(p=1.0)
        self.crop_px = crop_px
        self.scale = scale
        self.cat_max_ratio = cat_max_ratio
        self.ignore_index = ignore_index
        self.resize_px = resize_px

    def get_params_dependent_on_data(self, params: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        """The window in the source, its size in the crop and the padding before it."""
        mask: Pixels = data["mask"]
        height, width = mask.shape[:2]
        base_height, base_width = self.resize_px or (height, width)
        scale = self.py_random.uniform(*self.scale)
        rows = AxisPlan(height, scale * base_height / height, self.crop_px[0])
        columns = AxisPlan(width, scale * base_width / width, self.crop_px[1])
        before = self.py_random.randint(0, rows.pad_px), self.py_random.randint(0, columns.pad_px)
        return {
            "window": self._draw_window(mask, rows, columns),
            "shown_px": (rows.shown_px, columns.shown_px),
            "padding": (before[0], rows.pad_px - before[0], before[1], columns.pad_px - before[1]),
        }

    def _draw_window(self, mask: Pixels, rows: AxisPlan, columns: AxisPlan) -> tuple[slice, slice]:
        """The first of up to ten windows in which no class fills too much."""
        window = rows.draw(self.py_random), columns.draw(self.py_random)
        if self.cat_max_ratio >= 1 or (rows.free_px == 0 and columns.free_px == 0):
            return window
        for _ in range(_MAX_TRIES - 1):
            if largest_share(mask[window], self.ignore_index) < self.cat_max_ratio:
                break
            window = rows.draw(self.py_random), columns.draw(self.py_random)
        return window

    def apply(
        self,
        img: Pixels,
        window: tuple[slice, slice],
        shown_px: tuple[int, int],
        padding: tuple[int, int, int, int],
        **params: Any,
    ) -> Pixels:
        """The crop of the image."""
        return _pad(_resize(img[window], shown_px, cv2.INTER_LINEAR), padding, MEAN_COLOR)

    def apply_to_mask(
        self,
        mask: Pixels,
        window: tuple[slice, slice],
        shown_px: tuple[int, int],
        padding: tuple[int, int, int, int],
        **params: Any,
    ) -> Pixels:
        """The crop of the mask; every pixel keeps the id of the nearest one."""
        return _pad(_resize(mask[window], shown_px, cv2.INTER_NEAREST_EXACT), padding, self.ignore_index)


def _pad(pixels: Pixels, padding: tuple[int, int, int, int], value: int | tuple[int, int, int]) -> Pixels:
    """Padding above, below, left and right."""
    if not any(padding):
        return pixels
    return np.asarray(cv2.copyMakeBorder(pixels, *padding, borderType=cv2.BORDER_CONSTANT, value=value))


def largest_share(ids: Pixels, ignore_index: int) -> float:
    """The share of the valid pixels that the most frequent class fills; 1.0 where no pixel is valid.

    Args:
        ids: Train ids, any shape.
        ignore_index: Id of pixels that are not valid.
    """
    if ids.dtype == np.uint8:
        counts = cv2.calcHist([ids], [0], None, [256], [0, 256]).ravel()
    else:
        counts = np.bincount(ids.ravel().view(np.uint16), minlength=1)
    ignored = ignore_index % 65_536
    if ignored < len(counts):
        counts[ignored] = 0
    num_valid_px = counts.sum()
    return float(counts.max() / num_valid_px) if num_valid_px else 1.0


class PhotometricChange(A.ImageOnlyTransform):  # type: ignore[misc]  # albumentations has no types
    """Brightness, contrast, saturation and hue, each with probability 0.5 (ranges of SSD, Liu et al. 2016).

    All four are affine in the colour, so one matrix does them all and clips once; contrast, saturation and hue are
    those of the W3C Filter Effects Module (contrast around middle grey, hue as a rotation that keeps the luminance).

    Args:
        strength: Factor on all ranges; 1 is usual.
    """

    def __init__(self, strength: float) -> None:
        super().__init__(p=1.0)
        self.strength = strength

    def get_params(self) -> dict[str, Any]:
        """The matrix for one image."""
        brightness = self._draw(_MAX_BRIGHTNESS)
        contrast = 1 + self._draw(_MAX_FACTOR)
        saturation = 1 + self._draw(_MAX_FACTOR)
        hue_deg = self._draw(_MAX_HUE_DEG)
        return {"matrix": color_matrix(brightness, max(0.0, contrast), max(0.0, saturation), hue_deg)}

    def _draw(self, limit: float) -> float:
        """A number of either sign within the limit, or zero."""
        value = self.py_random.uniform(-limit, limit) * self.strength
        return float(value) if self.py_random.random() < 0.5 else 0.0

    def apply(self, img: Pixels, matrix: NDArray[np.float32], **params: Any) -> Pixels:
        """The image in its new colours."""
        return np.asarray(cv2.transform(img, matrix))


def color_matrix(
    brightness: float = 0.0, contrast: float = 1.0, saturation: float = 1.0, hue_deg: float = 0.0
) -> NDArray[np.float32]:
    """The affine map of RGB colours in 0..255, shape (3, 4): rotate the hue, saturate, contrast, then brighten.

    Args:
        brightness: Added to every channel.
        contrast: Factor around 127.5.
        saturation: 0 makes grey of the same luminance, 1 changes nothing.
        hue_deg: Rotation in degrees.
    """
    angle = math.radians(hue_deg)
    hue = np.tile(_LUMA, (3, 1)) + math.cos(angle) * _HUE_COS + math.sin(angle) * _HUE_SIN
    saturate = (1 - saturation) * np.tile(_LUMA, (3, 1)) + saturation * np.eye(3)
    linear = contrast * saturate @ hue
    offset = np.full((3, 1), brightness + 127.5 * (1 - contrast))
    return np.hstack([linear, offset]).astype(np.float32)
