"""Losses for semantic segmentation: criteria as additive statistics, exact for any batch split.

They need only torch and the standard library.
"""

# isort: skip_file
# `as` marks a public name for linters and type checkers; this is the only list of public names.

from segapp.losses.additive import (
    AdditiveCriterion as AdditiveCriterion,
    CriterionSum as CriterionSum,
    Outputs as Outputs,
    PlainCriterion as PlainCriterion,
    PlainLossError as PlainLossError,
    Statistics as Statistics,
    surrogate as surrogate,
)
from segapp.losses.pixel_losses import CriterionBCE as CriterionBCE
from segapp.losses.confusion import (
    Scores as Scores,
    upsample_argmax as upsample_argmax,
    upsample_confusion as upsample_confusion,
    upsample_label_counts as upsample_label_counts,
    upsample_logits as upsample_logits,
    upsample_probabilities as upsample_probabilities,
    upsample_sets as upsample_sets,
)
from segapp.losses.cross_entropy import (
    CriterionCE as CriterionCE,
    plain_reason as plain_reason,
    upsample_cross_entropy as upsample_cross_entropy,
)
from segapp.losses.distillation import (
    CriterionDistilled as CriterionDistilled,
    node_features as node_features,
    pair_wise_difference as pair_wise_difference,
    pixel_wise_divergence as pixel_wise_divergence,
)
from segapp.losses.pixel_losses import CriterionFocal as CriterionFocal
from segapp.losses.confusion import LogitsTile as LogitsTile, View as View
from segapp.losses.overlap import CriterionLovasz as CriterionLovasz
from segapp.losses.mask_classification import CriterionMaskClassification as CriterionMaskClassification
from segapp.losses.pixel_losses import CriterionOHEM as CriterionOHEM
from segapp.losses.overlap import CriterionDice as CriterionDice, CriterionTversky as CriterionTversky
