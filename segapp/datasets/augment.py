"""Augmentation of an image and its mask: random crops at random scales, flips, photometric changes.

The only module that imports albumentations. No random generator is kept between samples: a transform is a function of
the image, the mask and a seed.

Shapes: H, W height and width in pixels; images are RGB uint8 (H, W, 3), masks (H, W) of train ids.
"""

import math
import os
from random import Random
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # otherwise the import looks up newer versions online

import albumentations as A

from segapp.datasets.sampling import mix_seed

Pixels = NDArray[Any]

MEAN_COLOR = (124, 116, 104)
"""ImageNet's mean colour: padding of this colour is about zero after normalisation."""

_MAX_TRIES = 10
_MAX_BRIGHTNESS = 32.0
_MAX_FACTOR = 0.5
_MAX_HUE_DEG = 18.0

# Luminance weights of the Filter Effects Module (W3C), in which saturation and hue rotation are matrices.
_LUMA = np.array([0.213, 0.715, 0.072])
_HUE_COS = np.array([[0.787, -0.715, -0.072], [-0.213, 0.285, -0.072], [-0.213, -0.715, 0.928]])
_HUE_SIN = np.array([[-0.213, -0.715, 0.928], [0.143, 0.140, -0.283], [-0.787, 0.715, 0.072]])


class TrainTransform:
    """Random scale, crop, flip and photometric changes, determined by the seed.

    Only the cropped part of the image is resized. A crop in which one class fills more than `cat_max_ratio` of the
    valid pixels is drawn again. Images smaller than the crop are padded at random sides, with `MEAN_COLOR` and
    `ignore_index`.

    Args:
        crop_px: Height and width of the crop.
        scale: Range of the random scale, uniform.
        hflip: Probability of a horizontal flip.
        cat_max_ratio: Largest share of the valid pixels of one class, tried for up to ten crops; 1: the first crop is
            taken.
        photometric: True, False, or the strength of the photometric changes in multiples of the usual ones
            (brightness +-32 of 255, contrast and saturation 0.5 to 1.5, hue +-18 degrees, each with probability 0.5).
        ignore_index: Mask value of padding.
        resize_px: Height and width to which every image is resized before the random scale; None: not resized.

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
        """Return the augmented image (H, W, 3) and mask (H, W) of the crop's size.

        Each step gets its own seed: `Compose.set_random_seed` would give all steps the same random stream, so that, for
        example, scale and brightness would be correlated.
        """
        for position, step in enumerate(self._steps.transforms):
            step.set_random_seed(mix_seed(seed, position))
        result = self._steps(image=image, mask=mask)
        return result["image"], result["mask"]


class EvalTransform:
    """Resize of image and mask to a fixed size.

    Args:
        resize_px: Height and width of the result; None: not resized.
    """

    def __init__(self, resize_px: tuple[int, int] | None = None) -> None:
        self.resize_px = _check_size("resize_px", resize_px) if resize_px is not None else None

    def __call__(self, image: Pixels, mask: Pixels, seed: int) -> tuple[Pixels, Pixels]:
        """Return the resized image (H, W, 3) and mask (H, W); the seed is not used."""
        if self.resize_px is None or self.resize_px == image.shape[:2]:
            return image, mask
        return _resize(image, self.resize_px, cv2.INTER_LINEAR), _resize(mask, self.resize_px, cv2.INTER_NEAREST_EXACT)


def _check_size(name: str, size_px: tuple[int, int]) -> tuple[int, int]:
    height, width = (int(side) for side in size_px)
    if height < 1 or width < 1:
        raise ValueError(f"{name}={size_px}: height and width must be positive")
    return height, width


def _resize(pixels: Pixels, size_px: tuple[int, int], interpolation: int) -> Pixels:
    """Return the pixels resized to (height, width); always a copy."""
    if pixels.shape[:2] == size_px:
        return pixels.copy()
    return np.asarray(cv2.resize(pixels, (size_px[1], size_px[0]), interpolation=interpolation))


class AxisPlan:
    """Numbers of source pixels, crop pixels and padding along one axis."""

    def __init__(self, source_px: int, zoom: float, crop_px: int) -> None:
        self.shown_px = min(crop_px, max(1, round(source_px * zoom)))
        self.window_px = min(source_px, max(1, round(self.shown_px / zoom)))
        self.pad_px = crop_px - self.shown_px
        self.free_px = source_px - self.window_px

    def draw(self, rng: Random) -> slice:
        """Return a random position of the window in the source."""
        start = rng.randint(0, self.free_px)
        return slice(start, start + self.window_px)


class ScaledCrop(A.DualTransform):  # type: ignore[misc]  # albumentations has no types
    """A crop of the randomly scaled image; only the crop is computed.

    The window is chosen in source pixels, so its scale differs from the drawn one by less than a pixel of the window.
    Crops dominated by one class are drawn again as in mmsegmentation's `RandomCrop`, over valid pixels.
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
        """Return the window in the source, its size in the crop and the padding."""
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
        """Return the first of up to ten windows in which no class exceeds `cat_max_ratio`; else the last."""
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
        """Return the crop of the image (H, W, 3)."""
        return _pad(_resize(img[window], shown_px, cv2.INTER_LINEAR), padding, MEAN_COLOR)

    def apply_to_mask(
        self,
        mask: Pixels,
        window: tuple[slice, slice],
        shown_px: tuple[int, int],
        padding: tuple[int, int, int, int],
        **params: Any,
    ) -> Pixels:
        """Return the crop of the mask (H, W), resized by nearest neighbour."""
        return _pad(_resize(mask[window], shown_px, cv2.INTER_NEAREST_EXACT), padding, self.ignore_index)


def _pad(pixels: Pixels, padding: tuple[int, int, int, int], value: int | tuple[int, int, int]) -> Pixels:
    """Return the pixels padded above, below, left and right."""
    if not any(padding):
        return pixels
    return np.asarray(cv2.copyMakeBorder(pixels, *padding, borderType=cv2.BORDER_CONSTANT, value=value))


def largest_share(ids: Pixels, ignore_index: int) -> float:
    """Return the most frequent class's share of the valid pixels, 0 to 1; 1.0 where no pixel is valid."""
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

    All four are affine in the colour, so one matrix applies them all and values are clipped once; contrast, saturation
    and hue are those of the W3C Filter Effects Module (contrast around middle grey, hue as a rotation that keeps the
    luminance).

    Args:
        strength: Factor of all ranges.
    """

    def __init__(self, strength: float) -> None:
        super().__init__(p=1.0)
        self.strength = strength

    def get_params(self) -> dict[str, Any]:
        """Return the colour matrix for one image."""
        brightness = self._draw(_MAX_BRIGHTNESS)
        contrast = 1 + self._draw(_MAX_FACTOR)
        saturation = 1 + self._draw(_MAX_FACTOR)
        hue_deg = self._draw(_MAX_HUE_DEG)
        return {"matrix": color_matrix(brightness, max(0.0, contrast), max(0.0, saturation), hue_deg)}

    def _draw(self, limit: float) -> float:
        """Return a uniform random number in +-limit, scaled by the strength, or 0 with probability 0.5."""
        value = self.py_random.uniform(-limit, limit) * self.strength
        return float(value) if self.py_random.random() < 0.5 else 0.0

    def apply(self, img: Pixels, matrix: NDArray[np.float32], **params: Any) -> Pixels:
        """Return the image with its colours changed."""
        return np.asarray(cv2.transform(img, matrix))


def color_matrix(
    brightness: float = 0.0, contrast: float = 1.0, saturation: float = 1.0, hue_deg: float = 0.0
) -> NDArray[np.float32]:
    """Return the affine map of RGB colours in 0..255, shape (3, 4): hue, saturation, contrast, then brightness.

    Args:
        brightness: Added to every channel.
        contrast: Factor around 127.5.
        saturation: 0: grey of the same luminance; 1: unchanged.
        hue_deg: Rotation in degrees.
    """
    angle = math.radians(hue_deg)
    hue = np.tile(_LUMA, (3, 1)) + math.cos(angle) * _HUE_COS + math.sin(angle) * _HUE_SIN
    saturate = (1 - saturation) * np.tile(_LUMA, (3, 1)) + saturation * np.eye(3)
    linear = contrast * saturate @ hue
    offset = np.full((3, 1), brightness + 127.5 * (1 - contrast))
    return np.hstack([linear, offset]).astype(np.float32)
