"""Build class schemes, pixel formats and file pairs from the `data` section of the config. No torch here."""

import re
from collections.abc import Sequence
from dataclasses import replace

from segapp.config import DataConfig, RunConfig
from segapp.config.sections import IMAGENET
from segapp.custom.loading import DataSource, build_part
from segapp.custom.names import is_component
from segapp.datasets.files import ImagePair, shared_images, shown
from segapp.datasets.images.pixel_format import PixelFormat, per_band
from segapp.datasets.layouts.formats import DataLocation, class_scheme, find_pairs
from segapp.datasets.layouts.schemes import PUBLISHED, ClassScheme
from segapp.datasets.own_data import OwnData
from segapp.errors import ConfigError, DataError, closest_words, some_names
from segapp.scores import FOREGROUND, SCORES


def build_scheme(data: DataConfig) -> ClassScheme:
    scheme = class_scheme(
        "list" if is_component(data.format) else data.format,  # the config names the classes
        classes=data.classes,
        palette=data.palette,
        label_map=data.label_map,
        ignore_index=data.ignore_index,
        rgb=data.rgb_masks,
        multilabel=data.multilabel,
    )
    return replace(scheme, mask_orientation=data.mask_orientation)


def check_monitor(config: RunConfig) -> None:
    """Raise ConfigError if the data have no such score as `checkpoint.monitor` names."""
    scheme, name = build_scheme(config.data), config.checkpoint.monitor
    kind, _, class_name = name.partition(":")
    if name in FOREGROUND and not scheme.foreground:
        why = f"class 0 is {scheme.names[0]!r}, which is no name of a background"
        if scheme.multilabel is not None:
            why = "with several classes per pixel, none is the background"
        problem = f"{why}: use {name.removesuffix('_foreground')}, or dice:NAME for the class that matters"
    elif name in SCORES or class_name in scheme.names:
        return
    else:
        nearest = [f"{kind}:{own}" for own in closest_words(class_name, scheme.names) or scheme.names]
        problem = f"no class has the name {class_name!r}: use {' or '.join(map(repr, nearest[:8]))}"
    raise ConfigError(f"checkpoint.monitor = {name}: {problem}", key="checkpoint.monitor", value=name)


def build_pixels(data: DataConfig) -> PixelFormat:
    """Return how the images of a data section are read and prepared; ConfigError if a needed range is missing.

    Mean and standard deviation are ImageNet's by default.
    """
    if data.dtype != "uint8" and data.value_range is None:
        raise ConfigError(
            f"data.value_range is missing: data.dtype = {data.dtype} has no usual range; segapp check --config FILE "
            "measures it and prints the line",
            key="data.value_range",
        )
    num_bands = 3 if data.bands is None else len(data.bands)
    ranges = data.value_range
    ranges = ranges * num_bands if ranges and len(ranges) == 1 else ranges
    mean, std = (
        per_band(named or usual, num_bands) for named, usual in zip((data.mean, data.std), IMAGENET, strict=True)
    )
    return PixelFormat(data.bands, data.dtype, ranges, mean, std, data.resize_px)


def px_bytes(pixels: PixelFormat, scheme: ClassScheme) -> int:
    return pixels.num_bands * pixels.numpy_dtype.itemsize + scheme.dtype.itemsize


def build_location(data: DataConfig) -> DataLocation:
    return DataLocation(
        data.format,
        data.root,
        image_dir=data.image_dir,
        mask_dir=data.mask_dir,
        image_suffix=data.image_suffix,
        mask_suffix=data.mask_suffix,
        list_dir=data.list_dir,
        valid_area=data.valid_area,
        allow_outside_root=data.allow_outside_root,
        mask_classes=tuple(data.classes or ()) if data.multilabel == "files" else (),
    )


def build_pairs(data: DataConfig, split: str) -> tuple[ImagePair, ...]:
    """Return the images and masks of a data split, which are files unless the data set is a custom one."""
    if is_component(data.format):
        return tuple(own_data(data, split).pairs())
    pairs = find_pairs(build_location(data), split)
    for area in dict.fromkeys(pair.valid_area for pair in pairs):
        if area is not None and not area.exists():
            problem = f"{shown(area)} does not exist: restore the file, or correct data.valid_area"
            raise DataError(problem, key="data.valid_area", path=area)
    return pairs


def own_data(data: DataConfig, split: str) -> OwnData:
    """Return the custom data set of a split, checked; ConfigError if it cannot be made or is no data set."""
    source: DataSource = build_part(
        data.format, "data.format", data.options, offered={"root": data.root, "split": split}
    )
    return OwnData(source, data.format, split)


def count_images(data: DataConfig, split: str) -> int:
    return len(own_data(data, split)) if is_component(data.format) else len(build_pairs(data, split))


def build_groups(data: DataConfig, scheme: ClassScheme) -> dict[str, tuple[int, ...]]:
    """Return name -> class ids of the groups of the format; none if its classes are not the format's own."""
    known = PUBLISHED.get(data.format)
    if known is None or scheme.names != known.names:
        return {}
    ids = {name: number for number, name in enumerate(scheme.names)}
    return {group: tuple(ids[name] for name in names) for group, names in known.groups.items()}


def split_names(data: DataConfig) -> tuple[str, str]:
    return data.train_split or "train", data.val_split or "val"


def split_note(data: DataConfig) -> str | None:
    """Return a sentence about a validation split that is named test; None for another."""
    name = split_names(data)[1]
    if "test" not in re.split(r"[^a-z]+", name.lower()):
        return None
    return (
        f"data.val_split = {name}: the best checkpoint is chosen on this split, so its scores say nothing about new "
        f"images: keep some training images for validation instead (segapp init FOLDER --val-share 0.2), and score "
        f"{name} once, at the end, with segapp eval --split {name}"
    )


def check_splits_apart(data: DataConfig, train: Sequence[ImagePair], val: Sequence[ImagePair]) -> None:
    """Raise DataError if images are used for training and for validation; it lists them and says what to do."""
    both = shared_images(train, val)
    if not both:
        return
    names = some_names([*map(shown, both)], 3)
    train_split, val_split = split_names(data)
    raise DataError(
        f"{len(both)} of the {len(val)} validation images are training images too ({names}), so scores say nothing "
        f"about new images: give {train_split} and {val_split} (data.train_split, data.val_split) images of their own",
        key="data.val_split",
    )
