"""The interface of a participant, an object that takes part in every step in addition to the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from segapp.datasets.pool import Batch


class StepParticipant:
    """A participant that does nothing; subclasses override what they need.

    The engine calls the methods of one step in this order: `begin`, `take` after the forward pass of every micro-batch,
    `backward`, `finish_gradients`, `apply`; or `rollback` if the step is left before `apply`.
    """

    name = "participant"
    """Key of its state in a checkpoint; participants with the same name share a dict."""

    def begin(self) -> None:
        """Store the state for `rollback`."""

    def take(self, outputs: Any) -> None:
        """Receive the network's outputs for a micro-batch."""

    def backward(self, batches: Sequence[Batch]) -> None:
        """Compute its gradients, summed over the micro-batches of the step and over all ranks."""

    def finish_gradients(self) -> None:
        """Unscale its gradients and check that they are finite, without waiting for the device."""

    def apply(self, is_step_bad: Tensor) -> None:
        """Update its own parameters in place, unless its gradients or the step's are not finite."""

    def rollback(self) -> None:
        """Restore the state at `begin`, and discard gradients and outputs."""

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next steps; `lr` is the model's."""

    def terms(self) -> dict[str, Tensor]:
        """Return the values of the last step to show next to the loss, by name."""
        return {}

    def divergence(self) -> str | None:
        """Return why no further step can be made; None if one can."""
        return None

    def optimizers(self) -> list[Any]:
        """Return its optimizers, for code that counts their state."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return its state for a checkpoint, as tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the result of `state_dict`.

        Raises:
            CheckpointError: the state belongs to another participant.
        """
