"""Samples: an image and its target as tensors, depending only on (seed, epoch, index).

Images have the dtype of their files and are normalized on the device; with uint8 this transfers a quarter of the bytes.
Large TIFFs of an evaluation are indexed like tensors, and only the requested part is read. CutMix and ClassMix mix a
sample with the sample of another image.

Shapes: H, W height and width in pixels; B bands, 3 for RGB.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from types import EllipsisType
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segapp.custom.loading import shown_error
from segapp.datasets.cache import PixelCache
from segapp.datasets.files import MAX_PIXELS, ImagePair, check_same_size, read_header, shown, turn_of_mask
from segapp.datasets.images.pixel_format import RGB8, PixelFormat, Pixels
from segapp.datasets.images.reading import read_with_nodata
from segapp.datasets.images.windows import Windows, image_windows, load_ignored, mask_windows
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.masks import read_masks, without_nodata
from segapp.datasets.orientation import upright
from segapp.datasets.own_data import OwnPair
from segapp.datasets.resources import READERS, side_by_side
from segapp.datasets.sampling import SampleKey, mix_seed
from segapp.datasets.targets import ClassFrequencies, Targets, class_frequencies, count_masks
from segapp.errors import DataError

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


@dataclass(frozen=True)
class Sample:
    """One image and its target."""

    image: Tensor  # the bands, shape (B, H, W), with the dtype of the files, not normalized
    target: Tensor  # train ids and `ignore_index`, shape (H, W), uint8 or int16
    index: int  # in the data set


SampleTransform = Callable[[Pixels, Pixels, int, int | None], tuple[Pixels, Pixels]]
"""Transform of an image (H, W, B) and its mask (H, W), which depends only on these, the seed and the aim."""


@dataclass(frozen=True)
class TensorOnDisk:
    """An image (1, B, H, W) or a target (1, H, W) on disk; `large[..., rows, columns]` is a tensor."""

    pixels: Windows | Pixels  # the image (H, W, B) or the mask (H, W), which may be in memory already

    @property
    def shape(self) -> torch.Size:
        height, width, *bands = self.pixels.shape
        return torch.Size((1, *bands, height, width))

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: tuple[EllipsisType, slice, slice]) -> Tensor:
        part = torch.from_numpy(self.pixels[key[1:]])
        return (part if part.dim() == 2 else part.permute(2, 0, 1).contiguous())[None]


@dataclass(frozen=True)
class LargeBatch:
    """A batch of one large image: a `Batch` whose tensors are read when they are needed."""

    images: TensorOnDisk  # (1, B, H, W), not normalized
    target: TensorOnDisk  # (1, H, W) train ids
    indices: tuple[int, ...]


@dataclass(eq=False, repr=False)
class SegmentationDataset(torch.utils.data.Dataset[Sample]):
    """Image and mask pairs as samples; `dataset[(epoch, index)]` is the same in every process and call.

    Raises:
        DataError: No pairs.
    """

    pairs: Sequence[ImagePair]  # the target of a pair without a mask is all `scheme.ignore_index`
    scheme: ClassScheme
    transform: SampleTransform | None = None  # applied with a seed of (seed, epoch, index); None: full size
    _: KW_ONLY
    pixels: PixelFormat = RGB8
    seed: int = 0  # seed of the augmentation
    cache: PixelCache | None = None  # filled at the first read; None: every read decodes
    notes: Sequence[str] = ()  # sentences for the user about how the images are read
    cache_note: str | None = None  # what `data.cache: auto` means here; None if the config says it
    mix: PairMix | None = None  # mixes each sample with another image's sample
    targets: Targets | None = None  # counts of the masks that were read before the training
    # Largest height and largest width of the images whose sizes are known
    largest_px: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not self.pairs:
            raise DataError("the data set has no images: check data.root and the split", key="data.root")
        self._read_in_windows: dict[int, Windows | None] = {}
        self._cells: dict[int, dict[int, NDArray[np.int32]]] = {}  # `Windows.cells` of the masks by index

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, key: SampleKey | tuple[int, int]) -> Sample:
        """Return the sample of a key; (epoch, index) is enough. A DataError names the file."""
        epoch, index, draw, aim = SampleKey(*key)
        again = (draw,) if draw else ()
        image, mask = self._augmented(index, mix_seed("sample", self.seed, epoch, index, *again), aim)
        if self.mix is not None:
            seed = mix_seed("mix", self.seed, epoch, index, *again)
            partner = self.mix.partner(index, len(self), seed)
            if partner is not None:
                other = self._augmented(partner, mix_seed("partner", seed))
                image, mask = self.mix((image, mask), other, seed)
        target = mask if mask.flags.owndata and mask.flags.writeable else mask.copy()
        return Sample(to_planes(image), torch.from_numpy(np.ascontiguousarray(target)), index)

    def _augmented(self, index: int, seed: int, aim: int | None = None) -> tuple[Pixels, Pixels]:
        """Return the transformed image and mask of an index."""
        is_windowed = getattr(self.transform, "crops_first", False)  # else, it needs whole images
        image: Any
        mask: Any
        image, mask = (self._windows(index) if is_windowed else None) or self.read(index)
        if self.transform is None:
            return image, mask
        try:
            return self.transform(image, mask, seed, aim)
        except DataError:  # of a window
            raise
        except Exception as error:
            raise DataError(
                f"{shown(self.pairs[index].image)}: the augmentation failed with {shown_error(error)}: "
                "check data.augment, data.crop_px, data.scale and data.resize_px",
                path=self.pairs[index].image,
            ) from error

    def is_large(self, index: int) -> bool:
        """Return True for an image of an evaluation that can be read in windows (`large_batch`)."""
        return self.transform is None and self._image_windows(index) is not None

    def large_batch(self, index: int) -> LargeBatch:
        """Return an image for which `is_large` is true, and its mask, of which parts are read when they are needed."""
        found = self._windows(index)
        assert found is not None
        return LargeBatch(TensorOnDisk(found[0]), TensorOnDisk(found[1]), (index,))

    def _windows(self, index: int) -> tuple[Windows, Windows | Pixels] | None:
        """Return image and mask for reading in windows; None if they are read as a whole."""
        image = self._image_windows(index)
        if image is None:
            return None
        pair = self.pairs[index]
        windows = mask_windows(pair.mask, self.scheme) if pair.mask is not None else None
        mask = self.read_mask(index, image.shape[:2]) if windows is None else windows
        check_same_size(pair, image.shape[:2], mask.shape[:2])
        if (ignored := load_ignored(pair, image.missing)) is not None:
            labels = mask
            mask = Windows(labels.shape, labels.dtype, lambda at: without_nodata(labels[at], ignored[at], self.scheme))
        if isinstance(mask, Windows):
            mask = replace(mask, cells=self._cells.setdefault(index, {}))
        return image, mask

    def _image_windows(self, index: int) -> Windows | None:
        """Return an image for reading in windows; unless it is too large, a cache decodes it once instead."""
        pair = self.pairs[index]
        if isinstance(pair, OwnPair):
            return None
        if index not in self._read_in_windows:
            found = image_windows(pair.image, self.pixels)
            is_cached = found is not None and self.cache is not None and math.prod(found.shape[:2]) <= MAX_PIXELS
            self._read_in_windows[index] = None if is_cached else found
        return self._read_in_windows[index]

    def read(self, index: int) -> tuple[Pixels, Pixels]:
        """Return the decoded image (H, W, B) and mask (H, W) of train ids, before the transform; read-only."""
        pair = self.pairs[index]
        if isinstance(pair, OwnPair):
            return pair.read(self.scheme, self.pixels)
        cached = self.cache.get(index) if self.cache is not None else None
        if cached is not None:
            return cached
        image, missing = read_with_nodata(pair.image, self.pixels)
        mask = self._upright(pair, image.shape[:2], self.read_mask(index, image.shape[:2]))
        ignored = load_ignored(pair, missing)
        mask = without_nodata(mask, None if ignored is None else ignored[:], self.scheme)
        if self.cache is not None:
            self.cache.put(index, image, mask)
        return image, mask

    def _upright(self, pair: ImagePair, image_px: tuple[int, ...], mask: Pixels) -> Pixels:
        """Return a mask (H, W) as it lies on the upright image; raise DataError for another size."""
        choice = self.scheme.mask_orientation
        if pair.mask is not None and (mask.shape != image_px or choice == "raw"):
            mask = upright(mask, turn_of_mask(pair, choice))
        check_same_size(pair, image_px, mask.shape)
        return mask

    def sizes(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """Return the upright (height, width) of images in pixels from the headers; a custom data set is read."""
        if isinstance(self.pairs[0], OwnPair):
            shapes = (self.read(index)[0].shape for index in indices)
            return [(shape[0], shape[1]) for shape in shapes]
        return image_sizes([self.pairs[index] for index in indices])

    def read_mask(self, index: int, size_px: tuple[int, ...]) -> Pixels:
        """Return the mask (H, W) of train ids; without a file, all `ignore_index`, of size `size_px`."""
        pair = self.pairs[index]
        if not pair.masks:
            return np.full(size_px, self.scheme.ignore_index, self.scheme.dtype)
        return read_masks(pair.masks, self.scheme)


def to_planes(image: Pixels) -> Tensor:
    """Return a copy of an image (H, W, B) as a tensor (B, H, W)."""
    height, width, num_bands = image.shape
    planes = np.empty((num_bands, height, width), image.dtype)
    cv2.split(image, list(planes))  # four times as fast as mixChannels
    return torch.from_numpy(planes)


def image_sizes(pairs: Sequence[ImagePair]) -> list[tuple[int, int]]:
    """Return the upright (height, width) of every image in pixels, from the headers."""
    headers = side_by_side(lambda pair: read_header(pair.image), pairs, READERS)
    return [(header.height_px, header.width_px) for header in headers]


def compute_class_frequencies(dataset: SegmentationDataset) -> ClassFrequencies:
    """Return the counts over all masks of a data set; every mask is read, and thereby checked, once."""
    masked = [pair for pair in dataset.pairs if pair.mask is not None]
    counted = count_masks(masked, dataset.scheme, dataset.pixels)
    return class_frequencies(counted, dataset.scheme.num_classes, num_images=len(dataset))
