"""Losses for semantic segmentation: criteria as additive statistics, exact for any split of a step.

Needs torch and the standard library, nothing else of segapp.
"""

from segapp.losses.additive import AdditiveCriterion, CriterionSum, Outputs, Statistics, surrogate
from segapp.losses.cross_entropy import CriterionCE, plain_reason, upsample_cross_entropy
from segapp.losses.dice import CriterionDice
from segapp.losses.distillation import CriterionDistilled, node_features, pair_wise_difference, pixel_wise_divergence
from segapp.losses.focal import CriterionFocal
from segapp.losses.fused.views import Tile, View
from segapp.losses.inference import Scores, upsample_argmax, upsample_confusion, upsample_logits, upsample_probabilities
from segapp.losses.lovasz import CriterionLovasz
from segapp.losses.mask_classification import CriterionMaskClassification, MaskLossFactors
from segapp.losses.ohem import CriterionOHEM

LOSSES: dict[str, type[AdditiveCriterion]] = {
    "ce": CriterionCE,
    "ohem": CriterionOHEM,
    "dice": CriterionDice,
    "focal": CriterionFocal,
    "lovasz": CriterionLovasz,
}
"""The criteria of logits per pixel, by their names in a config."""

__all__ = [
    "LOSSES",
    "AdditiveCriterion",
    "CriterionCE",
    "CriterionDice",
    "CriterionDistilled",
    "CriterionFocal",
    "CriterionLovasz",
    "CriterionMaskClassification",
    "CriterionOHEM",
    "CriterionSum",
    "MaskLossFactors",
    "Outputs",
    "Scores",
    "Statistics",
    "Tile",
    "View",
    "node_features",
    "pair_wise_difference",
    "pixel_wise_divergence",
    "plain_reason",
    "surrogate",
    "upsample_argmax",
    "upsample_confusion",
    "upsample_cross_entropy",
    "upsample_logits",
    "upsample_probabilities",
]
