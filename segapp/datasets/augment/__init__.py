"""Augmentation of images and their masks, determined by a seed; the only package that imports albumentations."""

import os

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # otherwise its import looks up newer versions online

from segapp.datasets.augment.entries import BandValues
from segapp.datasets.augment.pipeline import TrainTransform

__all__ = ["BandValues", "TrainTransform"]
