"""Custom data sets: images and masks from `image_and_mask(index)` instead of files. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from segapp.custom.loading import DataSource, shown_error
from segapp.datasets.files import ImagePair
from segapp.datasets.images.pixel_format import RGB8, PixelFormat, Pixels
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.masks import train_ids
from segapp.errors import ConfigError, DataError

_RENAME = "rename __getitem__, and return the image and the class ids as NumPy arrays, not augmented"


class OwnData:
    """A checked reader of a custom data set object; `part` is its name in the config.

    Raises:
        ConfigError: the object lacks a required method.
    """

    def __init__(self, source: DataSource, part: str, split: str) -> None:
        for method in ("__len__", "image_and_mask"):
            if not callable(getattr(source, method, None)):
                advice = _RENAME if method != "__len__" and hasattr(source, "__getitem__") else "add it"
                raise ConfigError(
                    f"data.format = {part}: {type(source).__name__} has no method {method}: {advice}",
                    key="data.format",
                    value=part,
                )
        self.source, self.part, self.split = source, part, split

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        return str(self.source.name(index)) if hasattr(self.source, "name") else f"{self.split}[{index}]"

    def pairs(self, indices: Sequence[int] | None = None) -> list[OwnPair]:
        named = ((index, self.name(index)) for index in (range(len(self)) if indices is None else indices))
        return [OwnPair(Path(name), Path(name), name, data=self, index=index) for index, name in named]

    def read(self, index: int, scheme: ClassScheme, pixels: PixelFormat = RGB8) -> tuple[Pixels, Pixels]:
        """Return the image (H, W, B) and the mask (H, W) of train ids; raise DataError for anything else."""
        what = f"{self.part} {self.name(index)}"

        def error(problem: str) -> DataError:
            message = f"{what}: {problem}"
            return DataError(message, key="data.format", value=self.part, path=self.name(index))

        try:
            image, mask = self.source.image_and_mask(index)
        except Exception as cause:
            raise error(
                f"image_and_mask({index}) of data.format = {self.part} fails with {shown_error(cause)}: "
                "correct it; segapp check-part --config FILE checks the component"
            ) from cause
        image, mask = np.asarray(image), np.asarray(mask)
        if image.dtype != pixels.numpy_dtype or image.ndim != 3 or image.shape[2] != pixels.num_bands:
            raise error(
                f"the image is {image.dtype} of shape {image.shape}: return {pixels.layout} of shape "
                f"(H, W, {pixels.num_bands}), or change data.dtype and data.bands"
            )
        if mask.dtype.kind not in "iu" or mask.shape != image.shape[:2]:
            raise error(
                f"the mask is {mask.dtype} of shape {mask.shape}: return class ids, integers of shape "
                f"{image.shape[:2]}, the image's"
            )
        return image, train_ids(mask, Path(what), scheme)


@dataclass(frozen=True, kw_only=True)
class OwnPair(ImagePair):
    """One image and mask of a custom data set; the paths are its name."""

    data: OwnData
    index: int

    def read(self, scheme: ClassScheme, pixels: PixelFormat = RGB8) -> tuple[Pixels, Pixels]:
        return self.data.read(self.index, scheme, pixels)
