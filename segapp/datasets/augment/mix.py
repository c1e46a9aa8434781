"""CutMix and ClassMix: a sample mixed with the sample of another image, determined by a seed.

Shapes: H, W height and width in pixels, B bands; all samples of a data set have one size.
"""

from dataclasses import dataclass

import numpy as np

from segapp.datasets.images.pixel_format import Pixels

Pair = tuple[Pixels, Pixels]
"""An image (H, W, B) and its mask (H, W)."""


@dataclass(frozen=True)
class PairMix:
    """Mixes a sample with another one, in at most one of two ways, each with its probability."""

    cutmix: float = 0.0
    classmix: float = 0.0
    ignore_index: int = 255

    def partner(self, index: int, num_images: int, seed: int) -> int | None:
        """Return the index of the image to mix with, any other one with equal probability; None: not mixed."""
        rng = np.random.default_rng(seed)
        if rng.random() >= self.cutmix + self.classmix:
            return None
        drawn = int(rng.integers(max(1, num_images - 1)))
        return min(drawn + (drawn >= index), num_images - 1)

    def __call__(self, own: Pair, other: Pair, seed: int) -> Pair:
        """Return the mixed image and mask."""
        rng = np.random.default_rng([seed, 1])
        is_cut = rng.random() * (self.cutmix + self.classmix) < self.cutmix
        return (self._cutmix if is_cut else self._classmix)(own, other, rng)

    def _cutmix(self, own: Pair, other: Pair, rng: np.random.Generator) -> Pair:
        """Replace a rectangle by the same rectangle of the other image and mask (CutMix, Yun et al. 2019)."""
        height, width = own[1].shape
        side = np.sqrt(1 - rng.beta(1, 1))
        rows, columns = (_interval(length, side * length, rng) for length in (height, width))
        mixed = own[0].copy(), own[1].copy()
        for target, source in zip(mixed, other, strict=True):
            target[rows, columns] = source[rows, columns]
        return mixed

    def _classmix(self, own: Pair, other: Pair, rng: np.random.Generator) -> Pair:
        """Paste all pixels of half of the other mask's classes (ClassMix, Olsson et al. 2021)."""
        classes = [int(value) for value in np.unique(other[1]) if value != self.ignore_index]
        chosen = rng.permutation(classes)[: (len(classes) + 1) // 2]
        is_pasted = np.isin(other[1], chosen)
        return np.where(is_pasted[..., None], other[0], own[0]), np.where(is_pasted, other[1], own[1])


def _interval(length: int, cut_length: float, rng: np.random.Generator) -> slice:
    """Return an interval of `cut_length` around a uniform center, cut off at the borders."""
    center = rng.integers(length)
    return slice(max(0, round(center - cut_length / 2)), min(length, round(center + cut_length / 2)))
