"""Losses for semantic segmentation: criteria as additive statistics, exact for any batch split.

The page `own-loop` explains the names. They need only torch and the standard library.
"""

from segapp.losses.additive import (
    AdditiveCriterion,
    CriterionSum,
    LossStatistics,
    ModelOutputs,
    PlainCriterion,
    heads_of,
    surrogate,
)
from segapp.losses.confusion import ConfusionSums, upsample_argmax, upsample_confusion, upsample_probabilities
from segapp.losses.cross_entropy import CriterionCE, upsample_cross_entropy
from segapp.losses.distillation import CriterionDistilled, node_features, pair_wise_difference, pixel_wise_divergence
from segapp.losses.fused.block_sizes import KernelError
from segapp.losses.mask_classification import CriterionMaskClassification
from segapp.losses.overlap import CriterionDice, CriterionLovasz, CriterionTversky
from segapp.losses.pixel_losses import CriterionBCE, CriterionFocal, CriterionOHEM

__all__ = [
    "AdditiveCriterion",
    "ConfusionSums",
    "CriterionBCE",
    "CriterionCE",
    "CriterionDice",
    "CriterionDistilled",
    "CriterionFocal",
    "CriterionLovasz",
    "CriterionMaskClassification",
    "CriterionOHEM",
    "CriterionSum",
    "CriterionTversky",
    "KernelError",
    "LossStatistics",
    "ModelOutputs",
    "PlainCriterion",
    "heads_of",
    "node_features",
    "pair_wise_difference",
    "pixel_wise_divergence",
    "surrogate",
    "upsample_argmax",
    "upsample_confusion",
    "upsample_cross_entropy",
    "upsample_probabilities",
]


def __dir__() -> list[str]:
    return __all__
