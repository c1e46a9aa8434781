"""The interface of a participant, an object that takes part in every step in addition to the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from segapp.accelerator import gpu_of
from segapp.inference.normalize import NormalizedInput
from segapp.models.eomt import QueryMasking
from segapp.parallel import DataParallelModel, current_replica
from segapp.training.step.rollback import capture_torch_rng

if TYPE_CHECKING:
    from segapp.datasets.pool import Batch


MAX_BAD_STEPS = 10
"""Number of consecutive steps with a non-finite loss or gradient after which the training ends."""


class StepParticipant:
    """A participant that does nothing; subclasses override what they need.

    The engine calls the methods of one step in this order: `begin`, `take` after the forward pass of every micro-batch,
    `backward`, `finish_gradients`, `apply`; or `rollback` if the step is left before `apply`.
    """

    name = "participant"
    """Key of its state in a checkpoint; participants with the same name share a dict."""

    def begin(self, network: nn.Module) -> None:
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


class UpdateCount(StepParticipant):
    """Counts every update, including skipped ones; the count is a buffer of the network and saved with it."""

    name = "update_count"

    def __init__(self, masking: QueryMasking) -> None:
        self._masking = masking

    def apply(self, is_step_bad: Tensor) -> None:
        """Count the update."""
        self._masking.count_update()


class FirstLook(StepParticipant):
    """Examines the first micro-batch of a training, and has a sentence for the user if there is a problem."""

    def take_note(self) -> str | None:
        """Return the sentence once; None if there is none."""
        raise NotImplementedError


class RandomCalls(FirstLook):
    """Finds the layers of a network that draw random numbers from the generator of their device.

    Dropout layers do not (see `segapp.parallel.dropout`). Fused attention with dropout does, and so do functions that a
    network calls directly. The generators' states are compared between starts and ends of layer calls: if they differ,
    the layer that runs there has drawn. Of replicas only the first is examined, and a compiled network only as a whole.
    """

    name = "random_calls"

    def __init__(self) -> None:
        self._is_done = False
        self._found: dict[str, None] = {}
        self._stack: list[str] = []
        self._handles: list[RemovableHandle] = []

    def begin(self, network: nn.Module) -> None:
        """Watch the layers; in the first step only."""
        if self._is_done:
            return
        self.rollback()
        devices = [parameter.device for parameter in network.parameters()]
        devices += network.devices if isinstance(network, DataParallelModel) else ()
        self._devices = tuple(dict.fromkeys(device for device in devices if gpu_of(device)))
        self._states = capture_torch_rng(self._devices)
        replicated = network.module if isinstance(network, DataParallelModel) else network
        named = list(replicated.named_modules())
        is_compiled = any(isinstance(part, NormalizedInput) and part.compiled_call for _, part in named)
        for name, part in named[:1] if is_compiled else named:
            self._handles += (
                part.register_forward_pre_hook(partial(self._at_begin, name)),
                part.register_forward_hook(self._at_end),
            )

    def _at_begin(self, name: str, *_: Any) -> None:
        if self._is_watched():
            self._compare()
            self._stack.append(name)

    def _at_end(self, *_: Any) -> None:
        if self._is_watched():
            self._compare()
            self._stack.pop()

    def _is_watched(self) -> bool:
        replica = current_replica()
        return not self._is_done and (replica is None or replica.index == 0)

    def _compare(self) -> None:
        before, self._states = self._states, capture_torch_rng(self._devices)
        after = [self._states[0], *(state for _, state in self._states[1])]
        if self._stack and not all(map(torch.equal, [before[0], *(state for _, state in before[1])], after)):
            self._found[self._stack[-1].partition("model.")[2]] = None

    def take(self, outputs: Any) -> None:
        """End the examination after the first forward pass."""
        self._is_done = True
        self.rollback()

    def rollback(self) -> None:
        """End the examination; the next step begins it again if no forward pass was completed."""
        self._stack.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take_note(self) -> str | None:
        """Return a sentence that names the layers, the first time."""
        names = [name or "the model" for name in self._found]
        self._found = {}
        if not names:
            return None
        more = "" if len(names) < 4 else f" and {len(names) - 3} others"
        return (
            f"{', '.join(names[:3])}{more}: random numbers from the generator of the device, as in attention with "
            "dropout or in a function that a model calls itself; they depend on how the batch is divided, so that "
            "another number of devices or ranks takes another course: set this dropout to 0, or use layers of torch.nn"
        )


class FirstOutputs(FirstLook):
    """Finds networks that return probabilities, although losses take logits.

    It examines the first image of the first micro-batch; the result is read once, after the step.
    """

    name = "first_outputs"

    def __init__(self) -> None:
        self._seen: Tensor | None = None
        self._is_read = False

    @torch.no_grad()
    def take(self, outputs: Any) -> None:
        """Record the range of the first logits, and how far their sums over the classes are from 1."""
        if self._is_read or self._seen is not None:
            return
        while isinstance(outputs, (list, tuple)) and outputs:  # replicas, then heads
            outputs = outputs[0]
        if not isinstance(outputs, Tensor) or outputs.ndim != 4 or not len(outputs):
            return
        first = outputs[:1].float()
        self._seen = torch.stack([first.min(), first.max(), (first.sum(1) - 1).abs().max()])

    def take_note(self) -> str | None:
        """Return a sentence if the outputs are probabilities, based on the first call; None if they are not."""
        is_read, self._is_read = self._is_read, True
        if is_read or self._seen is None:
            return None
        least, most, off_one = self._seen.tolist()
        if not (least >= 0 and most <= 1 and off_one < 1e-3):
            return None
        return (
            "the outputs of the model are probabilities: from 0 to 1, with sum 1 over the classes; the losses apply "
            "the softmax themselves, and a second one stops the training from learning: return logits"
        )
