"""Build class schemes, file pairs and data sets from the `data` section of the config."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from segapp.build.own_parts import own_data
from segapp.build.sampling import build_mix
from segapp.config import DataConfig
from segapp.datasets.augment import BandValues, EvalTransform, TrainTransform
from segapp.datasets.augment.probe import check_transform
from segapp.datasets.cache.pixel_cache import PixelCache
from segapp.datasets.cache.places import CacheFiles, cache_digest, default_folder, disk_files, memory_files
from segapp.datasets.dataset import SegmentationDataset, image_sizes
from segapp.datasets.doctor import check_masks
from segapp.datasets.files import ImagePair, check_pairs, shared_images, shown
from segapp.datasets.images.pixel_format import PixelFormat, per_band
from segapp.datasets.layouts.formats import ClassScheme, DataLocation, class_scheme, find_pairs
from segapp.datasets.layouts.published_classes import CITYSCAPES_CATEGORIES, CITYSCAPES_NAMES
from segapp.datasets.loader import LoadOptions
from segapp.datasets.own_data import OwnDataset
from segapp.datasets.resources import cores_of_rank, shared_bytes_of_rank
from segapp.datasets.workers import most_workers, plan_workers, sample_seconds
from segapp.errors import ConfigError, DataError
from segapp.parallel.ranks import Ranks
from segapp.parts import is_part

Item = TypeVar("Item")

NUM_TRIED = 4
"""Images of own data that are read before a training: to check them, and for their sizes."""


def build_scheme(data: DataConfig) -> ClassScheme:
    """Return classes, colours and label map of a data section."""
    return class_scheme(
        "list" if is_part(data.format) else data.format,  # the config names the classes
        classes=data.classes,
        palette=data.palette,
        label_map=data.label_map,
        ignore_index=data.ignore_index,
        rgb=data.rgb_masks,
        multilabel=data.multilabel,
    )


def build_pixels(data: DataConfig) -> PixelFormat:
    """Return bands, type and range of the images of a data section.

    Raises:
        ConfigError: the range of another type than uint8 is missing.
    """
    if data.dtype != "uint8" and data.value_range is None:
        raise ConfigError(
            f"data.value_range is missing: data.dtype = {data.dtype} has no usual range; segapp check --config FILE "
            "measures it and prints the line"
        )
    num_bands = 3 if data.bands is None else len(data.bands)
    ranges = data.value_range
    return PixelFormat(data.bands, data.dtype, ranges * num_bands if ranges and len(ranges) == 1 else ranges)


def band_statistics(data: DataConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return `data.mean` and `data.std` for each band."""
    num_bands = 3 if data.bands is None else len(data.bands)
    return per_band(data.mean, num_bands), per_band(data.std, num_bands)


def build_location(data: DataConfig) -> DataLocation:
    """Return where the files of a data section are."""
    return DataLocation(
        data.format,
        data.root,
        image_dir=data.image_dir,
        mask_dir=data.mask_dir,
        image_suffix=data.image_suffix,
        mask_suffix=data.mask_suffix,
        list_dir=data.list_dir,
        mask_root=data.mask_root,
        allow_outside_root=data.allow_outside_root,
        mask_classes=tuple(data.classes or ()) if data.multilabel == "files" else (),
    )


def build_pairs(data: DataConfig, split: str) -> tuple[ImagePair, ...]:
    """Return the image and mask files of one split."""
    return find_pairs(build_location(data), split)


def build_groups(data: DataConfig, scheme: ClassScheme) -> dict[str, tuple[int, ...]]:
    """Return name -> class ids of the groups to be scored: the config's, or else the format's.

    Raises:
        ConfigError: a group names an unknown class.
    """
    groups: Mapping[str, Sequence[str]] = data.groups or {}
    if data.groups is None and data.format == "cityscapes" and scheme.names == CITYSCAPES_NAMES:
        groups = CITYSCAPES_CATEGORIES
    ids = {name: number for number, name in enumerate(scheme.names)}
    for group, names in groups.items():
        unknown = [name for name in names if name not in ids]
        if unknown:
            raise ConfigError(f"data.groups: {group} names {unknown[0]!r}, which is no class: use {', '.join(ids)}")
    return {group: tuple(ids[name] for name in names) for group, names in groups.items()}


def build_transform(
    data: DataConfig, scheme: ClassScheme, sizes_px: Iterable[tuple[int, int]], pixels: PixelFormat
) -> TrainTransform:
    """Return the transform of training images, tried before the training if the config lists its own.

    Args:
        data: the section of the config.
        scheme: of the classes.
        sizes_px: height and width of the images.
        pixels: bands and type of the images.

    Raises:
        ConfigError: `data.augment` cannot be used.
    """
    bands = None if pixels.is_rgb8 else BandValues(pixels.ranges, pixels.fill_values(band_statistics(data)[0]))
    transform = TrainTransform(
        data.crop_px, data.transforms, ignore_index=scheme.ignore_index, resize_px=data.resize_px, bands=bands
    )
    if data.augment is not None:
        check_transform(transform, sizes_px, (pixels.num_bands, pixels.numpy_dtype), scheme.dtype)
    return transform


def build_dataset(
    data: DataConfig,
    scheme: ClassScheme,
    split: str,
    *,
    is_training: bool,
    seed: int,
    most: int | None = None,
    ranks: Ranks | None = None,
) -> SegmentationDataset:
    """Return the data set of a split, its headers checked, with the training or the evaluation transform.

    Args:
        data: the section of the config.
        scheme: of the classes.
        split: name of the split.
        is_training: use the training transform.
        seed: of the augmentation.
        most: use only so many images; None: all.
        ranks: of a training, which share `data.cache`; all must call. None: images are read once, and so decoded.

    Raises:
        ConfigError: `data.cache_dir` lies in the data set.
        DataError: a file is missing or cannot be used.
    """
    pixels = build_pixels(data)
    mix = build_mix(data, scheme.ignore_index) if is_training else None
    if is_part(data.format):
        source = own_data(data, split)
        own = OwnDataset(source, scheme, pixels, seed=seed, indices=_chosen(range(len(source)), most))
        first_sizes = own.sizes(range(min(len(own), NUM_TRIED)))  # each is read for that
        own.transform, own.mix = _transform(data, scheme, first_sizes, pixels, is_training=is_training), mix
        return own
    pairs = _chosen(build_pairs(data, split), most)
    sizes = check_pairs(pairs, pixels)
    check_masks(pairs, sizes, scheme)
    transform = _transform(data, scheme, sizes, pixels, is_training=is_training)
    cache: PixelCache | None = None
    notes: list[str] = []
    if data.cache != "none" and ranks is not None:
        try:
            files = _cache_files(data, split, scheme, ranks)
            cache = PixelCache(files, pairs, sizes, scheme.dtype, pixels)
        except OSError as error:
            notes.append(
                f"data.cache = {data.cache} cannot be used for {split} ({error}): every image is decoded each time it "
                "is read; name another folder in data.cache_dir, or set data.cache to none"
            )
    dataset = SegmentationDataset(pairs, scheme, transform, pixels=pixels, seed=seed, cache=cache, notes=notes)
    dataset.mix = mix
    return dataset


def _transform(
    data: DataConfig,
    scheme: ClassScheme,
    sizes_px: Iterable[tuple[int, int]],
    pixels: PixelFormat,
    *,
    is_training: bool,
) -> TrainTransform | EvalTransform | None:
    if is_training:
        return build_transform(data, scheme, sizes_px, pixels)
    return None if data.resize_px is None else EvalTransform(data.resize_px)


def _chosen(items: Sequence[Item], most: int | None) -> Sequence[Item]:
    """Return at most so many items, evenly spread."""
    return items if most is None else items[:: max(1, len(items) // max(most, 1))][:most]


def count_images(data: DataConfig, split: str) -> int:
    """Return the number of images of a split."""
    return len(own_data(data, split)) if is_part(data.format) else len(build_pairs(data, split))


def image_sizes_of(data: DataConfig, split: str, most: int) -> list[tuple[int, int]]:
    """Return height and width of the first images of a split; of own data at most 8, because each is read for that."""
    if is_part(data.format):
        dataset = build_dataset(data, build_scheme(data), split, is_training=False, seed=0)
        return dataset.sizes(range(min(len(dataset), most, 8)))
    return image_sizes(build_pairs(data, split)[:most])


def _cache_files(data: DataConfig, split: str, scheme: ClassScheme, ranks: Ranks) -> CacheFiles:
    """Return the files of a split's cache; those in memory are made by one rank of each machine for all of them.

    Raises:
        ConfigError: `data.cache_dir` lies in the data set.
        OSError: they cannot be made.
    """
    pixels = build_pixels(data)
    digest = cache_digest(data.root, split, scheme, pixels)
    if data.cache == "disk":
        folder = Path(data.cache_dir).expanduser() if data.cache_dir is not None else default_folder()
        root = Path(os.path.realpath(data.root))
        if Path(os.path.realpath(folder)).is_relative_to(root):
            raise ConfigError(f"data.cache_dir = {folder} lies in data.root = {data.root}: name a folder outside it")
        return disk_files(folder, split, digest, scheme.dtype, pixels)
    hosts = ranks.gather(socket.gethostname())
    first_here = hosts.index(hosts[ranks.rank])
    own: CacheFiles | OSError | None = None
    if ranks.rank == first_here:
        try:
            own = memory_files(digest)
        except OSError as error:
            own = error
    found = ranks.gather(own)[first_here]
    if isinstance(found, OSError):
        raise found
    files: CacheFiles = own if isinstance(own, CacheFiles) else found
    return files


def build_load_options(
    data: DataConfig, dataset: SegmentationDataset, device: torch.device, batch_size: int
) -> LoadOptions:
    """Return how batches are loaded for a device: `data.workers: auto` becomes a number.

    Args:
        data: the section of the config.
        dataset: whose samples are measured.
        device: that the batches go to; for a GPU they are page-locked.
        batch_size: images in a batch of this rank.
    """
    workers = data.workers
    if workers == "auto":
        px_bytes = dataset.pixels.num_bands * dataset.pixels.numpy_dtype.itemsize + dataset.scheme.dtype.itemsize
        batch_bytes = batch_size * data.crop_px[0] * data.crop_px[1] * px_bytes
        most = most_workers(cores_of_rank(), batch_bytes, shared_bytes_of_rank())
        workers = plan_workers(sample_seconds(dataset), data.crop_px, most, device.type)
    return LoadOptions(workers, data.timeout_s, pin_memory=device.type == "cuda")


def split_names(data: DataConfig) -> tuple[str, str]:
    """Return the names of the training and the validation split."""
    return data.train_split or "train", data.val_split or "val"


def check_splits_apart(data: DataConfig, train: Sequence[ImagePair], val: Sequence[ImagePair]) -> None:
    """Check that no image is used for training and for validation.

    Raises:
        DataError: some are, and `data.allow_overlap` is false.
    """
    problem = None if data.allow_overlap else overlap_problem(data, train, val)
    if problem is not None:
        raise DataError(problem)


def overlap_problem(data: DataConfig, train: Sequence[ImagePair], val: Sequence[ImagePair]) -> str | None:
    """Return which images both splits have, and what to do; None if they have none in common."""
    both = shared_images(train, val)
    if not both:
        return None
    names = ", ".join(shown(path) for path in both[:3]) + (f" and {len(both) - 3} more" if len(both) > 3 else "")
    train_split, val_split = split_names(data)
    return (
        f"{len(both)} of the {len(val)} validation images are training images too ({names}), so scores say nothing "
        f"about new images: give {train_split} and {val_split} (data.train_split, data.val_split) images of their own, "
        "or set data.allow_overlap: true to overfit on purpose"
    )
