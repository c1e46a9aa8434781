"""The participant that counts the updates of the weights for a network whose forward pass depends on them."""

from __future__ import annotations

from torch import Tensor

from segapp.models.eomt import QueryMasking
from segapp.training.step.participant import StepParticipant


class UpdateCount(StepParticipant):
    """Counts every update, also one that was skipped; the count is a buffer of the network and saved with it.

    Args:
        masking: of the network, whose masked attention fades with the count.
    """

    name = "update_count"

    def __init__(self, masking: QueryMasking) -> None:
        self._masking = masking

    def apply(self, is_step_bad: Tensor) -> None:
        """Count the update."""
        self._masking.count_update()
