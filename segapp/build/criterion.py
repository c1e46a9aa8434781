"""From the `loss` section to a criterion."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from segapp.config import LossConfig, LossTerm
from segapp.errors import ConfigError
from segapp.losses import (
    AdditiveCriterion,
    CriterionCE,
    CriterionDice,
    CriterionFocal,
    CriterionLovasz,
    CriterionOHEM,
    CriterionSum,
)

if TYPE_CHECKING:
    pass


def build_criterion(
    section: LossConfig, num_classes: int, ignore_index: int, weights_of: Callable[[str], list[float]]
) -> AdditiveCriterion:
    """The criterion of a loss section.

    Args:
        section: the first term and those added to it.
        num_classes: C.
        ignore_index: target value that counts nowhere.
        weights_of: gives class weights by a rule's name.
    """
    terms = [section, *section.plus]
    criteria = [(term.weight, _build_term(term, num_classes, ignore_index, weights_of)) for term in terms]
    return criteria[0][1] if len(criteria) == 1 and criteria[0][0] == 1.0 else CriterionSum(criteria)


def _build_term(
    term: LossTerm, num_classes: int, ignore_index: int, weights_of: Callable[[str], list[float]]
) -> AdditiveCriterion:
    weights = term.class_weights
    if isinstance(weights, str):
        weights = weights_of(weights)
    if weights is not None and len(weights) != num_classes:
        raise ConfigError(f"loss.class_weights has {len(weights)} values for {num_classes} classes: give one a class")
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float32)
    common: dict[str, Any] = {
        "ignore_index": ignore_index,
        "align_corners": term.align_corners,
        "aux_weight": term.aux_weight,
    }
    if term.name == "ohem":
        return CriterionOHEM(term.ohem_threshold, term.ohem_min_kept, weight=weight, **common)
    if term.name == "dice":
        return CriterionDice(term.dice_smooth, **common)
    if term.name == "focal":
        return CriterionFocal(term.focal_gamma, alpha=weight, **common)
    if term.name == "lovasz":
        return CriterionLovasz(**common)
    return CriterionCE(
        weight=weight, label_smoothing=term.label_smoothing, implementation=term.implementation, **common
    )
