"""Checks of an own data set: types, class ids, the same result at every call, another split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np

from segapp.build.pairs import build_pixels, build_scheme, own_data, split_names
from segapp.commands.check_part.checks import Check, tried
from segapp.config import DataConfig, RunConfig
from segapp.custom.contracts import DataSource
from segapp.datasets.masks import train_ids
from segapp.datasets.own_data import OwnData, Pixels
from segapp.errors import ConfigError


def data_section(name: str, options: Mapping[str, Any], config: RunConfig | None) -> DataConfig:
    """Return the section of a config, with the part as its format.

    Raises:
        ConfigError: there is no config.
    """
    if config is None:
        raise ConfigError("data needs the root and the classes of a config: add --config FILE")
    return config.data.model_copy(update={"format": name, "options": dict(options)})


def _sample(source: DataSource, index: int) -> tuple[Any, Any]:
    image, mask = source.image_and_mask(index)
    return image, mask


def _same(one: Any, two: Any) -> bool:
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(one, two, strict=True))


def checks_of_data(data: OwnData, section: DataConfig) -> Iterator[Check]:
    """Yield the checks of the training split of a data set.

    Args:
        data: the split.
        section: names the part, the classes and the types.
    """
    indices = sorted({0, len(data) // 2, max(len(data) - 1, 0)})
    pixels, scheme = build_pixels(section), build_scheme(section)

    def typed() -> str | None:
        for index in indices:
            image, mask = _sample(data.source, index)
            problem = _type_problem(image, mask, np.dtype(pixels.numpy_dtype), pixels.num_bands)
            if problem:
                return f"image_and_mask({index}) gives {problem}"
        return None

    def known_ids() -> str | None:
        for index in indices:
            train_ids(np.asarray(_sample(data.source, index)[1]), Path(f"image_and_mask({index})"), scheme)
        return None

    def repeats(source: DataSource) -> str | None:
        for index in indices:
            if not _same(_sample(data.source, index), _sample(source, index)):
                return (
                    f"image {index} differs from the first call: draw no random numbers here, because evaluations and "
                    "resumed runs would not repeat; data.augment does"
                )
        return None

    def another_split() -> str | None:
        train, val = split_names(section)
        other = own_data(section, val)
        ends = sorted({0, len(data) - 1})
        is_equal = len(other) == len(data) and all(
            _same(_sample(data.source, i), _sample(other.source, i)) for i in ends
        )
        if train == val or section.allow_overlap or not is_equal:
            return None
        return f"{val} gives the images of {train}: use the argument `split` to choose the images"

    yield Check("it has images", "" if len(data) else "its length is 0: check data.root and the split")
    if not len(data):
        return
    types = tried("images and masks have the right types", typed)
    yield types
    if not types.problem:
        yield tried("masks hold the ids of the classes", known_ids)
    yield tried("it repeats its result", lambda: repeats(data.source))
    copied = ForkingPickler  # what hands objects to spawned data workers
    yield tried("it can be pickled for data workers", lambda: repeats(copied.loads(copied.dumps(data.source))))
    yield tried("validation has other images", another_split)


def _type_problem(image: Any, mask: Any, dtype: np.dtype[Any], num_bands: int) -> str | None:
    """Return what image and mask are, and how they become what they must be; None if they are right."""
    pixels: Pixels = np.asarray(image)
    ids: Pixels = np.asarray(mask)
    advice = []
    if not isinstance(image, np.ndarray) or not isinstance(mask, np.ndarray):
        advice.append("return NumPy arrays, segapp makes tensors")
    if pixels.ndim == 3 and pixels.shape[2] != num_bands and pixels.shape[0] == num_bands:
        advice.append("put the bands last: image.transpose(1, 2, 0)")
    elif pixels.ndim != 3 or pixels.shape[2] != num_bands:
        advice.append(f"return images (H, W, {num_bands}), or set data.bands")
    if pixels.dtype != dtype:
        advice.append(f"return {dtype.name} without normalization, or set data.dtype = {pixels.dtype.name}")
    if ids.dtype.kind not in "iu":
        advice.append("return class ids, integers: mask.astype(np.uint8)")
    if not advice and ids.shape != pixels.shape[:2]:
        advice.append("return a mask (H, W) of the size of its image")
    kinds = " and ".join(
        f"{type(each).__module__.partition('.')[0]} {array.dtype.name} {array.shape}"
        for each, array in ((image, pixels), (mask, ids))
    )
    return f"{kinds.replace('numpy ', '')}: {'; '.join(advice)}" if advice else None
