"""Build the order of training samples, and how they are mixed, from the `data` section of the config."""

from __future__ import annotations

from segapp.config import DataConfig
from segapp.datasets.augment.mix import PairMix
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.sampling import Order, aimed_order
from segapp.datasets.targets import ClassFrequencies
from segapp.errors import ConfigError, accepted_words


def build_order(data: DataConfig, dataset: SegmentationDataset, frequencies: ClassFrequencies, seed: int) -> Order:
    """Return the order of `data.sampling: class-balanced` or `foreground`.

    Args:
        data: the section of the config.
        dataset: the training images.
        frequencies: counts of their masks.
        seed: of the order.

    Raises:
        ConfigError: `data.foreground_classes` names an unknown class, or no image contains a class to aim at.
    """
    names = dataset.scheme.names
    wanted = set(range(len(names)))
    if data.sampling == "foreground":
        unknown = [name for name in data.foreground_classes or () if name not in names]
        if unknown:
            raise ConfigError(
                f"data.foreground_classes: {unknown[0]!r} is no class: {accepted_words(unknown[0], names)}"
            )
        chosen = data.foreground_classes
        wanted = wanted - {0} if chosen is None else {names.index(name) for name in chosen}
    masked = [index for index, pair in enumerate(dataset.pairs) if pair.mask is not None]
    images_with: dict[int, list[int]] = {}
    for index, classes in zip(masked, frequencies.classes_of_masks, strict=True):
        for each in wanted.intersection(classes):
            images_with.setdefault(each, []).append(index)
    if not images_with:
        raise ConfigError(
            f"data.sampling = {data.sampling}: no training mask contains {', '.join(names[each] for each in wanted)}: "
            "set data.foreground_classes, or data.sampling to uniform"
        )
    share = data.foreground_share if data.sampling == "foreground" else 1.0
    return aimed_order(len(dataset), images_with, share, seed)


def build_mix(data: DataConfig, ignore_index: int) -> PairMix | None:
    """Return how training samples are mixed; None: not at all."""
    mix = data.mix
    if not mix.cutmix + mix.mixup + mix.classmix:
        return None
    return PairMix(mix.cutmix, mix.mixup, mix.classmix, mix.cutmix_alpha, mix.mixup_alpha, ignore_index)
