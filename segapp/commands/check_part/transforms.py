"""Checks of an own transform, inside a list that crops as a training does."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from segapp.commands.check_part.checks import IGNORED, Check, tried
from segapp.config import RunConfig
from segapp.datasets.augment import TrainTransform
from segapp.datasets.augment.probe import check_transform


def make_transform(name: str, config: RunConfig | None) -> TrainTransform:
    """Return the list of a crop and the transform, with the options that a config gives it.

    Raises:
        UserWarning: a factory gives a transform an argument that it does not have, of which albumentations only warns.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", r"Argument\(s\) .* not valid", UserWarning)
        return TrainTransform((64, 64), _entries(name, config), ignore_index=IGNORED)


def _entries(name: str, config: RunConfig | None) -> list[dict[str, dict[str, Any]]]:
    entries = config.data.augment if config is not None else None
    own = [entry for entry in entries or () if name in entry]
    return [{"ScaledCrop": {}}, *(own[:1] or [{name: {}}])]


def checks_of_transform(transform: TrainTransform) -> Iterator[Check]:
    """Yield the checks of such a list."""
    sizes = list(itertools.product((80, 200), (96, 160)))
    what = "types, class ids, size, and one result for each seed"
    yield tried(what, lambda: check_transform(transform, sizes, (3, np.uint8), np.dtype(np.uint8)))

    def pickled() -> str | None:
        ForkingPickler.dumps(transform)
        return None

    yield tried("it can be pickled for data workers", pickled)
