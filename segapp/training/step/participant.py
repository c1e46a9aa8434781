"""The interface of a participant: it takes part in every step beside the model, such as a critic with its update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from segapp.datasets.loader import Batch


class StepParticipant:
    """A participant that does nothing; subclasses override what they need.

    The engine calls the methods of one step in this order: `begin`, `take` after the forward pass of every micro-batch,
    `backward`, `finish_gradients`, `apply`; or `rollback` where the step is left before `apply`.

    Attributes:
        name: key of its state in a checkpoint.
    """

    name = "participant"

    def begin(self, network: nn.Module) -> None:
        """Store what `rollback` restores."""

    def take(self, outputs: Any) -> None:
        """Receive the network's outputs for a micro-batch."""

    def backward(self, batches: Sequence[Batch]) -> None:
        """Compute its own gradients, summed over the micro-batches of the step and over all ranks."""

    def finish_gradients(self) -> None:
        """Unscale its gradients and decide whether they are finite; without waiting for the device."""

    def apply(self, is_step_bad: Tensor) -> None:
        """Update its own parameters in place, except where its gradients or the step's are not finite.

        Args:
            is_step_bad: 0-dim float tensor; nonzero: the model's update is skipped.
        """

    def rollback(self) -> None:
        """Restore the state at `begin` and drop gradients and outputs."""

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next steps; `lr` is the model's."""

    def terms(self) -> dict[str, Tensor]:
        """Return the values of the last step that are shown beside the loss, by name."""
        return {}

    def divergence(self, max_bad_steps: int) -> str | None:
        """Return why no further step can be made; None while one can.

        Args:
            max_bad_steps: bad steps in a row that count as divergence.
        """
        return None

    def held_tensors(self) -> list[Tensor]:
        """Return the tensors that it keeps on the first device between two steps."""
        return []

    def optimizers(self) -> list[Any]:
        """Return its optimizers, for those who account for their state."""
        return []

    def replicated_bytes(self) -> int:
        """Return the bytes that every other device holds of it."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return its state for a checkpoint, as tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: the state belongs to another participant.
        """
