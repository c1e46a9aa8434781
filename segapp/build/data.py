"""Build class schemes, file pairs and data sets from the `data` section of the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from segapp.config import DataConfig
from segapp.datasets.augment import EvalTransform, TrainTransform
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.doctor import check_masks
from segapp.datasets.files import ImagePair, check_pairs
from segapp.datasets.layouts.formats import ClassScheme, DataLocation, class_scheme, find_pairs
from segapp.datasets.layouts.published_classes import CITYSCAPES_CATEGORIES, CITYSCAPES_NAMES
from segapp.errors import ConfigError


def build_scheme(data: DataConfig) -> ClassScheme:
    """Return classes, colours and label map of a data section."""
    return class_scheme(
        data.format,
        classes=data.classes,
        palette=data.palette,
        label_map=data.label_map,
        ignore_index=data.ignore_index,
        rgb=data.rgb_masks,
    )


def build_location(data: DataConfig) -> DataLocation:
    """Return where the files of a data section are."""
    return DataLocation(
        data.format,
        data.root,
        image_dir=data.image_dir,
        mask_dir=data.mask_dir,
        image_suffix=data.image_suffix,
        mask_suffix=data.mask_suffix,
        allow_outside_root=data.allow_outside_root,
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


def build_dataset(
    data: DataConfig, scheme: ClassScheme, split: str, *, is_training: bool, seed: int, most: int | None = None
) -> SegmentationDataset:
    """Return the data set of a split, its headers checked, with the training or the evaluation transform.

    Raises:
        DataError: a file is missing or cannot be used.
    """
    pairs = build_pairs(data, split)
    if most is not None:
        pairs = pairs[:: max(1, len(pairs) // max(most, 1))][:most]
    check_masks(pairs, check_pairs(pairs), scheme)
    transform: TrainTransform | EvalTransform | None = None
    if is_training:
        transform = TrainTransform(
            data.crop_px,
            scale=data.scale,
            hflip=data.hflip,
            cat_max_ratio=data.cat_max_ratio,
            photometric=data.photometric,
            ignore_index=scheme.ignore_index,
            resize_px=data.resize_px,
        )
    elif data.resize_px is not None:
        transform = EvalTransform(data.resize_px)
    return SegmentationDataset(pairs, scheme, transform, seed=seed, cache=data.cache)


def split_names(data: DataConfig) -> tuple[str, str]:
    """Return the names of the training and the validation split."""
    return data.train_split or "train", data.val_split or "val"
