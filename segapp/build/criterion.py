"""Build the criterion from the `loss` section of the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from segapp.build.own_parts import own_criterion
from segapp.config import LossConfig, LossTerm
from segapp.custom import is_part
from segapp.errors import ConfigError
from segapp.losses import LOSSES, AdditiveCriterion, CriterionMaskClassification, CriterionSum, MaskLossFactors

OPTIONS: dict[str, Callable[[LossTerm, Tensor | None], dict[str, Any]]] = {
    "ce": lambda term, weight: {
        "weight": weight,
        "label_smoothing": term.label_smoothing,
        "implementation": term.implementation,
    },
    "bce": lambda term, weight: {
        "weight": weight,
        "label_smoothing": term.label_smoothing,
        "pos_weight": term.bce_pos_weight,
    },
    "ohem": lambda term, weight: {"threshold": term.ohem_threshold, "min_kept": term.ohem_min_kept, "weight": weight},
    "dice": lambda term, _: {"smooth": term.dice_smooth},
    "tversky": lambda term, _: {
        "weights": (term.tversky_alpha, term.tversky_beta),
        "gamma": term.tversky_gamma,
        "smooth": term.dice_smooth,
    },
    "focal": lambda term, weight: {"gamma": term.focal_gamma, "alpha": weight},
    "lovasz": lambda *_: {},
    "boundary": lambda *_: {},
}
"""The arguments of each criterion of `LOSSES`, besides those that all have; from its term and the class weights."""


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

    Args:
        section: the first term; `plus` holds the others.
        num_classes: C.
        ignore_index: target id that counts nowhere.
        weights_of: returns the class weights of a rule by its name.
        num_queries: of the network, for mask classification.
        multilabel: targets are sets of classes.

    Raises:
        ConfigError: the number of class weights is not the number of classes.
    """
    terms = [section, *section.plus]
    if section.name == "mask_classification":
        return _mask_classification(section, num_classes, ignore_index, num_queries)
    common = {"ignore_index": ignore_index} | ({"multilabel": True} if multilabel else {})
    criteria = [(term.weight, _build_term(term, num_classes, weights_of, common)) for term in terms]
    return criteria[0][1] if len(criteria) == 1 and criteria[0][0] == 1.0 else CriterionSum(criteria)


def needs_distances(section: LossConfig) -> bool:
    """Return True if a term needs targets with distance maps."""
    return any(LOSSES.get(term.name, AdditiveCriterion).needs_distances for term in [section, *section.plus])


def _mask_classification(
    term: LossTerm, num_classes: int, ignore_index: int, num_queries: int
) -> CriterionMaskClassification:
    weight = term.weight
    return CriterionMaskClassification(
        num_queries,
        num_classes,
        factors=MaskLossFactors(
            weight * term.mask_class_factor,
            weight * term.mask_bce_factor,
            weight * term.mask_dice_factor,
            term.mask_no_object,
        ),
        ignore_index=ignore_index,
        align_corners=term.align_corners,
        aux_weight=term.aux_weight,
    )


def _build_term(
    term: LossTerm, num_classes: int, weights_of: Callable[[str], list[float]], common: Mapping[str, Any]
) -> AdditiveCriterion:
    weights = term.class_weights
    if isinstance(weights, str):
        weights = weights_of(weights)
    if weights is not None and len(weights) != num_classes:
        raise ConfigError(f"loss.class_weights has {len(weights)} values for {num_classes} classes: give one a class")
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float32)
    if is_part(term.name):
        return own_criterion(term, num_classes, common["ignore_index"], weight)
    return LOSSES[term.name](
        **OPTIONS[term.name](term, weight),
        **common,
        align_corners=term.align_corners,
        aux_weight=term.aux_weight,
    )
