"""The transforms of training and evaluation: functions of an image, its mask and a seed.

Shapes: H, W height and width in pixels; images (H, W, B) of B bands, masks (H, W) of train ids.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

import albumentations as A
import cv2
import numpy as np

from segapp.datasets.augment.crop import ScaledCrop, resize
from segapp.datasets.augment.entries import STANDARD, BandValues, Entry, TransformBuilder
from segapp.datasets.images.pixel_format import Pixels
from segapp.datasets.sampling import mix_seed


class TrainTransform:
    """A list of transforms whose random numbers depend only on the seed.

    Args:
        crop_px: Height and width of the result.
        entries: The transforms.
        ignore_index: Mask value outside the image.
        resize_px: Height and width to which every image is resized first; None: not resized. A `ScaledCrop` at the
            beginning of the list includes this, so the image is resampled only once.
        bands: Values of images that are not 8-bit RGB.

    Raises:
        ConfigError: Entries are wrong; the error lists all problems.
        ValueError: A size is not positive.
    """

    def __init__(
        self,
        crop_px: tuple[int, int],
        entries: Sequence[Entry] = STANDARD,
        *,
        ignore_index: int = 255,
        resize_px: tuple[int, int] | None = None,
        bands: BandValues | None = None,
    ) -> None:
        self.crop_px = _check_size("crop_px", crop_px)
        self.ignore_index = ignore_index
        self.steps = TransformBuilder(self.crop_px, ignore_index, bands).build_all(entries, resize_px)
        # If the first transform is a crop, image and mask may be objects that read windows of files.
        self.crops_first = bool(self.steps) and isinstance(self.steps[0], ScaledCrop)
        self.resize_px = None if self.crops_first else resize_px
        self._resize = EvalTransform(self.resize_px)

    def __call__(self, image: Pixels, mask: Pixels, seed: int, aim: int | None = None) -> tuple[Pixels, Pixels]:
        """Return the augmented image (H, W, B) and mask (H, W) of the crop's size.

        A `ScaledCrop` contains a pixel of the class `aim`, if the mask has one.

        Each transform gets its own seed: with one seed for all, all would draw the same random numbers, and scale and
        brightness, for example, would be correlated.
        """
        if not self.crops_first:
            image, mask = self._resize(image, mask, seed)
            image, mask = (each if each.flags.writeable else each.copy() for each in (image, mask))
        data: dict[str, Any] = {"image": image, "mask": mask, "aim": aim}
        for position, step in enumerate(self.steps):
            set_seed(step, mix_seed(seed, position))
            data = step(**data)
        return data["image"], data["mask"]


def set_seed(step: Any, seed: int) -> None:
    """Seed a transform, and each transform inside it with its own seed."""
    if not isinstance(step, A.BaseCompose):
        step.set_random_seed(seed)
        return
    step.random_generator, step.py_random = np.random.default_rng(seed), Random(seed)
    for position, child in enumerate(step.transforms):
        set_seed(child, mix_seed(seed, position))


class EvalTransform:
    """Resizes image and mask to a height and width; None: not resized."""

    def __init__(self, resize_px: tuple[int, int] | None = None) -> None:
        self.resize_px = _check_size("resize_px", resize_px) if resize_px is not None else None

    def __call__(self, image: Pixels, mask: Pixels, seed: int, aim: int | None = None) -> tuple[Pixels, Pixels]:
        """Return the resized image (H, W, B) and mask (H, W); seed and aim are not used."""
        if self.resize_px is None or self.resize_px == image.shape[:2]:
            return image, mask
        return resize(image, self.resize_px, cv2.INTER_LINEAR), resize(mask, self.resize_px, cv2.INTER_NEAREST_EXACT)


def _check_size(name: str, size_px: tuple[int, int]) -> tuple[int, int]:
    height, width = (int(side) for side in size_px)
    if height < 1 or width < 1:
        raise ValueError(f"{name}={size_px}: height and width must be positive")
    return height, width
