"""Build the criterion from the `loss` section of the config."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from segapp.assembly.own_parts import own_criterion
from segapp.config import LossConfig, LossTerm, RunConfig
from segapp.config.options import LOSSES
from segapp.custom.loading import build_part
from segapp.custom.names import is_component
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.errors import ConfigError
from segapp.losses import AdditiveCriterion, CriterionSum
from segapp.models.eomt import NUM_QUERIES


def criterion_of(config: RunConfig, scheme: ClassScheme, weights_of: Callable[[str], list[float]]) -> AdditiveCriterion:
    queries = int(config.model.options.get("num_queries", NUM_QUERIES))
    is_multilabel = scheme.multilabel is not None
    sizes = scheme.num_classes, scheme.ignore_index
    return build_criterion(config.loss, *sizes, weights_of, queries, multilabel=is_multilabel)


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
        "align_corners": section.is_aligned,
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
    total = criteria[0][1] if len(criteria) == 1 and criteria[0][0] == 1.0 else CriterionSum(criteria)
    for part in total.modules():
        if isinstance(part, AdditiveCriterion):
            part.takes_any_aspect = True  # an evaluation squashes images by data.resize_px, but not their masks
    return total


def _build_term(term: LossTerm, given: Mapping[str, Any]) -> AdditiveCriterion:
    if is_component(term.name):
        return own_criterion(
            term,
            given["num_classes"],
            given["ignore_index"],
            given.get("weight"),
            align_corners=given["align_corners"],
            aux_weight=given["aux_weight"],
        )
    criterion: AdditiveCriterion = build_part(
        LOSSES[term.name].factory, "loss.name", term.options, offered=given, is_built_in=True
    )
    return criterion
