"""Losses for semantic segmentation: criteria as additive statistics, exact for any split of a step.

Needs torch and the standard library, nothing else of segapp.
"""

from segapp.losses.additive import (
    AdditiveCriterion,
    CriterionSum,
    Outputs,
    PlainCriterion,
    PlainLossError,
    Statistics,
    labels_of,
    surrogate,
)
from segapp.losses.binary import CriterionBCE
from segapp.losses.boundary import CriterionBoundary
from segapp.losses.confusion import (
    Scores,
    upsample_argmax,
    upsample_confusion,
    upsample_label_counts,
    upsample_logits,
    upsample_probabilities,
    upsample_sets,
)
from segapp.losses.cross_entropy import CriterionCE, plain_reason, upsample_cross_entropy
from segapp.losses.distillation import CriterionDistilled, node_features, pair_wise_difference, pixel_wise_divergence
from segapp.losses.focal import CriterionFocal
from segapp.losses.fused.views import LogitsTile, View
from segapp.losses.lovasz import CriterionLovasz
from segapp.losses.mask_classification import CriterionMaskClassification
from segapp.losses.ohem import CriterionOHEM
from segapp.losses.overlap import CriterionDice, CriterionTversky

__all__ = [
    "AdditiveCriterion",
    "CriterionBCE",
    "CriterionBoundary",
    "CriterionCE",
    "CriterionDice",
    "CriterionDistilled",
    "CriterionFocal",
    "CriterionLovasz",
    "CriterionMaskClassification",
    "CriterionOHEM",
    "CriterionSum",
    "CriterionTversky",
    "LogitsTile",
    "Outputs",
    "PlainCriterion",
    "PlainLossError",
    "Scores",
    "Statistics",
    "View",
    "labels_of",
    "node_features",
    "pair_wise_difference",
    "pixel_wise_divergence",
    "plain_reason",
    "surrogate",
    "upsample_argmax",
    "upsample_confusion",
    "upsample_cross_entropy",
    "upsample_label_counts",
    "upsample_logits",
    "upsample_probabilities",
    "upsample_sets",
]
