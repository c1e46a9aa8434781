"""The transforms of training and evaluation: functions of an image, its mask and a seed.

Shapes: H, W height and width in pixels; images are RGB uint8 (H, W, 3), masks (H, W) of train ids.
"""

import math
from typing import Any

import albumentations as A
import cv2
from numpy.typing import NDArray

from segapp.datasets.augment.color import PhotometricChange
from segapp.datasets.augment.crop import ScaledCrop, resize
from segapp.datasets.sampling import mix_seed

Pixels = NDArray[Any]


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
        return resize(image, self.resize_px, cv2.INTER_LINEAR), resize(mask, self.resize_px, cv2.INTER_NEAREST_EXACT)


def _check_size(name: str, size_px: tuple[int, int]) -> tuple[int, int]:
    height, width = (int(side) for side in size_px)
    if height < 1 or width < 1:
        raise ValueError(f"{name}={size_px}: height and width must be positive")
    return height, width
