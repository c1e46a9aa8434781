"""Build the criterion from the `loss` section of the config; class weights come from the training masks."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from segapp.build.own_parts import own_criterion
from segapp.config import LossConfig, LossTerm
from segapp.config.options import LOSSES
from segapp.custom.loading import build_part
from segapp.custom.names import is_part
from segapp.datasets.targets import ClassFrequencies
from segapp.errors import ConfigError, accepted_words
from segapp.losses import AdditiveCriterion, CriterionSum


def build_criterion(
    section: LossConfig,
    num_classes: int,
    ignore_index: int,
    weights_of: Callable[[str], list[float]],
    num_queries: int = 1,
    *,
    multilabel: bool = False,
) -> AdditiveCriterion:
    """Return the criterion of a `loss` section.

    `weights_of` returns the class weights of a named rule. `num_queries` is used by mask classification. With
    `multilabel`, targets are sets of classes.

    Raises:
        ConfigError: the number of class weights is not the number of classes.
    """
    given = {
        "num_classes": num_classes,
        "num_queries": num_queries,
        "ignore_index": ignore_index,
        "multilabel": multilabel,
        "align_corners": section.align_corners,
        "aux_weight": section.aux_weight,
    }
    weights = section.class_weights
    if isinstance(weights, str):
        weights = weights_of(weights)
    if weights is not None and len(weights) != num_classes:
        raise ConfigError(
            f"loss.class_weights has {len(weights)} values for {num_classes} classes: give one per class",
            key="loss.class_weights",
        )
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float32)
    first = {**given, "weight": weight, "label_smoothing": section.label_smoothing}
    criteria = [(section.weight, _build_term(section, first))]
    criteria += [(term.weight, _build_term(term, given)) for term in section.plus]
    return criteria[0][1] if len(criteria) == 1 and criteria[0][0] == 1.0 else CriterionSum(criteria)


def _build_term(term: LossTerm, given: Mapping[str, Any]) -> AdditiveCriterion:
    if is_part(term.name):
        return own_criterion(
            term,
            given["num_classes"],
            given["ignore_index"],
            given.get("weight"),
            align_corners=given["align_corners"],
            aux_weight=given["aux_weight"],
        )
    made: AdditiveCriterion = build_part(
        LOSSES[term.name].factory, "loss.name", term.options, offered=given, is_built_in=True
    )
    return made


RULES = ("inverse", "enet", "median-frequency")


def class_weights(rule: str, frequencies: ClassFrequencies) -> list[float]:
    """Return one weight per class; 0 for a class that never occurs.

    The rules: `inverse`: 1 / share of pixels, scaled to mean 1 over the present classes; `enet`: 1 / ln(1.02 + share)
    (Paszke et al., ENet, 2016); `median-frequency`: median frequency / frequency, where the frequency of a class is its
    share of the pixels of the images that contain it (Eigen & Fergus, 2015).

    Raises:
        ValueError: an unknown rule, or no valid pixel at all.
    """
    total = sum(frequencies.pixels)
    if total == 0:
        raise ValueError("the training masks have no valid pixel: check data.label_map and data.ignore_index")
    present = [i for i, count in enumerate(frequencies.pixels) if count]
    share = {i: frequencies.pixels[i] / total for i in present}
    if rule == "inverse":
        mean = statistics.fmean(1 / share[i] for i in present)
        weights = {i: 1 / share[i] / mean for i in present}
    elif rule == "enet":
        weights = {i: 1 / math.log(1.02 + share[i]) for i in present}
    elif rule == "median-frequency":
        frequency = {i: frequencies.pixels[i] / frequencies.pixels_where_present[i] for i in present}
        median = statistics.median(frequency.values())
        weights = {i: median / frequency[i] for i in present}
    else:
        raise ValueError(f"class_weights {rule!r} is not known: {accepted_words(rule, RULES)}")
    return [weights.get(i, 0.0) for i in range(len(frequencies.pixels))]


def cached_frequencies(
    masks: Sequence[Path], key: str, count: Callable[[], ClassFrequencies], folder: Path | None = None
) -> ClassFrequencies:
    """Return the frequencies of a set of masks, counted once and then read from the user's cache.

    They are counted again if the name, size or modification time of a mask changes, or the key, which holds everything
    else that the count depends on (label map, number of classes). The default folder is $XDG_CACHE_HOME/segapp.
    """
    if folder is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "segapp"
    digest = hashlib.sha256(key.encode())
    for mask in masks:
        stat = mask.stat()
        digest.update(f"{os.fspath(mask.resolve())!r} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    path = folder / f"frequencies-{digest.hexdigest()[:24]}.json"
    try:
        kept: Any = json.loads(path.read_text())
        return ClassFrequencies(**{key: _as_tuples(value) for key, value in kept.items()})
    except (OSError, ValueError, AttributeError, TypeError):
        pass  # no cache file, an invalid one, or an older one: count
    frequencies = count()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(frequencies)))
        temporary.replace(path)
    except OSError:
        pass  # without a cache the next run counts again
    return frequencies


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(each) for each in value) if isinstance(value, list) else value
