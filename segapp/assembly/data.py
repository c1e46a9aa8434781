"""Build data sets, their order, transforms and caches, and how batches are loaded, from the section `data`."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from segapp.accelerator import accelerator_of
from segapp.assembly.pairs import build_pairs, build_pixels, build_scheme, own_data, px_bytes
from segapp.config import DataConfig, RunConfig, TrainConfig
from segapp.custom.names import is_component
from segapp.datasets.cache import CacheFiles, PixelCache, choose_cache, disk_files, memory_files
from segapp.datasets.dataset import PairMix, SegmentationDataset, image_sizes
from segapp.datasets.files import ImagePair, check_pairs, refuse_in_data
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.images.tiff_tags import TIFF_SUFFIXES
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.loader import most_workers, plan_workers, sample_seconds
from segapp.datasets.orientation import Turns
from segapp.datasets.pool import LoadOptions
from segapp.datasets.resources import cores_of_rank, evenly_spread, shared_bytes_of_rank
from segapp.datasets.sampling import Order, aimed_order
from segapp.datasets.targets import ClassFrequencies, Targets, read_targets
from segapp.errors import ConfigError
from segapp.parallel.distributed import Ranks
from segapp.places import own_folder, place_of
from segapp.run.files import machine_id

if TYPE_CHECKING:
    from segapp.datasets.augment import TrainTransform

NUM_TRIED = 4
"""Number of custom data set images that are read before a training to check them and to get their sizes."""


def build_dataset(
    data: DataConfig,
    scheme: ClassScheme,
    split: str,
    *,
    is_training: bool,
    seed: int,
    most: int | None = None,
    ranks: Ranks | None = None,
    promised_bytes: int = 0,
) -> SegmentationDataset:
    """Return the data set of a split with checked headers and with the training or the evaluation transform.

    At most `most` images are used, evenly spread. `ranks` are the ranks of a training, which share `data.cache`; all
    must call. Without them, images are read once and nothing is cached. `promised_bytes` of memory will be taken by the
    caches of other splits.

    Raises:
        ConfigError: the folder of `data.cache: disk` lies in the data set.
        DataError: a file is missing or cannot be used.
    """
    pixels = build_pixels(data)
    mix = build_mix(data, scheme.ignore_index) if is_training else None

    def read(every_pair: Sequence[ImagePair], sizes: Sequence[tuple[int, int]]) -> Targets:
        total_px = len(every_pair) * fmean(height * width for height, width in sizes)
        return read_targets(every_pair, split, scheme, total_px=total_px, is_training=is_training, pixels=pixels)

    if is_component(data.format):
        source = own_data(data, split)
        chosen = evenly_spread(range(len(source)), most)
        own = SegmentationDataset(source.pairs(chosen), scheme, pixels=pixels, seed=seed)
        first_sizes = own.sizes(range(min(len(own), NUM_TRIED)))  # each is read for that
        own.transform, own.mix = build_transform(data, scheme, first_sizes) if is_training else None, mix
        own.targets, own.largest_px = read(source.pairs(), first_sizes), _largest(first_sizes)
        return own
    every_pair = build_pairs(data, split)
    pairs = evenly_spread(every_pair, most)
    turns = Turns(scheme.mask_orientation)
    sizes = check_pairs(pairs, pixels, turns=turns)
    targets = read(every_pair, sizes)
    transform = build_transform(data, scheme, sizes) if is_training else None
    cache: PixelCache | None = None
    notes = [f"{split}: {line}" for _, line in turns.lines("set data.mask_orientation=raw")]
    choice: str = data.cache
    cache_note: str | None = None
    if choice != "none" and ranks is not None:
        if choice == "auto":
            num_bytes = sum(height * width for height, width in sizes) * px_bytes(pixels, scheme)
            choice, cache_note = choose_cache("training" if is_training else "validation", num_bytes, promised_bytes)
        try:
            # Only a TIFF declares nodata: of other images, the records do not depend on the mean.
            has_tiffs = any(pair.image.suffix.lower() in TIFF_SUFFIXES for pair in pairs)
            stored = pixels if has_tiffs else replace(pixels, mean=None)
            files = _cache_files(data, choice, split, scheme, stored, ranks)
            cache = PixelCache(files, pairs, sizes, scheme.dtype, pixels) if files is not None else None
        except OSError as error:
            notes.append(
                f"data.cache = {data.cache} cannot be used for {split} ({error}): every image is decoded each time it "
                "is read; name another folder in XDG_CACHE_HOME, or set data.cache to none"
            )
    return SegmentationDataset(
        pairs,
        scheme,
        transform,
        pixels=pixels,
        seed=seed,
        cache=cache,
        notes=notes,
        cache_note=cache_note,
        mix=mix,
        targets=targets,
        largest_px=_largest(sizes),
    )


def _largest(sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return max(height for height, _ in sizes), max(width for _, width in sizes)


def build_transform(data: DataConfig, scheme: ClassScheme, sizes_px: Iterable[tuple[int, int]]) -> TrainTransform:
    """Return the transform of training images of these sizes; ConfigError if a custom `data.augment` fails.

    An evaluation has none: what happens to every image is in `segapp.datasets.preprocessing`.
    """
    from segapp.datasets.augment import BandValues, TrainTransform  # albumentations, which only a training needs
    from segapp.datasets.augment.pipeline import check_transform

    pixels = build_pixels(data)
    bands = BandValues(None if pixels.is_rgb8 else pixels.ranges, pixels.fill)
    with warnings.catch_warnings():  # albumentations only warns about an argument that a transform does not have
        warnings.filterwarnings("error", r"Argument\(s\) .* not valid", UserWarning)
        transform = TrainTransform(
            data.crop_px, data.transforms, ignore_index=scheme.ignore_index, resize_px=data.resize_px, bands=bands
        )
    if data.augment is not None:
        check_transform(transform, sizes_px, (pixels.num_bands, pixels.numpy_dtype), scheme.dtype)
    return transform


def image_sizes_of(data: DataConfig, split: str, most: int | None = None) -> list[tuple[int, int]]:
    """Return height and width of the first images of a split, or of all; of a custom data set it reads at most 8."""
    if is_component(data.format):
        dataset = build_dataset(data, build_scheme(data), split, is_training=False, seed=0)
        return dataset.sizes(range(len(dataset))[:most][:8])
    return image_sizes(build_pairs(data, split)[:most])


def _cache_files(
    data: DataConfig, choice: str, split: str, scheme: ClassScheme, pixels: PixelFormat, ranks: Ranks
) -> CacheFiles | None:
    """Return the files of a split's cache; in memory, one rank of each machine makes them for its other ranks.

    The choice of that rank counts, because the others may have found another amount of memory. None: no cache.

    Raises:
        ConfigError: the folder of `data.cache: disk` lies in the data set.
        OSError: they cannot be made.
    """
    if choice == "disk":
        folder = place_of("XDG_CACHE_HOME", "pixels")
        what, advice = f"data.cache = disk: {folder}", "set XDG_CACHE_HOME to another folder"
        refuse_in_data(folder, data.root, what, advice, key="data.cache")
        return disk_files(own_folder("XDG_CACHE_HOME", "pixels"), data.root, split, scheme, pixels)
    machines = ranks.gather(machine_id())
    first_here = machines.index(machines[ranks.rank])
    own: CacheFiles | str | None = None
    if ranks.rank == first_here and choice == "ram":
        try:
            own = memory_files()
        except OSError as error:
            own = str(error)
    # An error is exchanged like files, so that no rank waits for files that were not made.
    found = ranks.gather(own)[first_here]
    if isinstance(found, str):
        raise OSError(found)
    files: CacheFiles | None = own if isinstance(own, CacheFiles) else found
    return files


def data_timeout_s(section: TrainConfig) -> float:
    """Return the longest wait for a data worker; 0: no limit.

    It is shorter than `train.hang_timeout_s`, so that the error names the worker and its file.
    """
    return section.hang_timeout_s / 5


def build_load_options(
    config: RunConfig, dataset: SegmentationDataset, device: torch.device, batch_size: int, *, further_px: int = 0
) -> LoadOptions:
    """Return the load options of a rank's batches for a device; `data.workers: auto` is resolved by timing samples.

    `further_px` are the pixels of a batch of another loader, which has as many workers and loads ahead, too.

    Raises:
        ConfigError: a daemonic process, which may not start others, was asked for data workers.
    """
    data = config.data
    workers = data.workers
    if multiprocessing.current_process().daemon:  # it may not start processes
        if workers not in ("auto", 0):
            raise ConfigError(
                f"data.workers = {workers}: this process was started with daemon=True and may not start data workers: "
                "set data.workers to 0, or start the process without it",
                key="data.workers",
            )
        workers = 0
    if workers == "auto":
        batch_px = batch_size * data.crop_px[0] * data.crop_px[1] + further_px
        batch_bytes = batch_px * px_bytes(dataset.pixels, dataset.scheme)
        most = most_workers(cores_of_rank(), batch_bytes, shared_bytes_of_rank())
        workers = plan_workers(sample_seconds(dataset), data.crop_px, most, device.type)
    return LoadOptions(workers, data_timeout_s(config.train), pin_memory=accelerator_of(device).can_pin)


def build_order(data: DataConfig, dataset: SegmentationDataset, frequencies: ClassFrequencies, seed: int) -> Order:
    """Return the order of `data.sampling: class-balanced` or `foreground`; ConfigError without a class to sample."""
    names = dataset.scheme.names
    wanted = set(range(data.sampling == "foreground", len(names)))
    masked = [index for index, pair in enumerate(dataset.pairs) if pair.mask is not None]
    images_with: dict[int, list[int]] = {}
    for index, classes in zip(masked, frequencies.classes_of_masks, strict=True):
        for each in wanted.intersection(classes):
            images_with.setdefault(each, []).append(index)
    if not images_with:
        raise ConfigError(
            f"data.sampling = {data.sampling}: no training mask contains {', '.join(names[each] for each in wanted)}: "
            "set data.sampling to uniform",
            key="data.sampling",
            value=data.sampling,
        )
    share = data.foreground_share if data.sampling == "foreground" else 1.0
    return aimed_order(len(dataset), images_with, share, seed)


def build_mix(data: DataConfig, ignore_index: int) -> PairMix | None:
    is_mixed = data.cutmix + data.classmix > 0
    return PairMix(data.cutmix, data.classmix, ignore_index) if is_mixed else None
