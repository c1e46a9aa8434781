"""The passes of a step as one graph of the GPU, for networks whose steps wait for the host.

A graph contains the forward pass, the loss and the backward pass of all micro-batches of a step. The rest of the step
(norm and clipping of the gradients, update, average, loss scale, rollback of a bad step) runs as usual, because it
depends on host numbers, such as the learning rate, that a graph would keep forever.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from segapp.accelerator import DeviceGraphs
from segapp.errors import ConfigError
from segapp.losses import Statistics
from segapp.memory.oom import is_out_of_memory

if TYPE_CHECKING:
    from segapp.datasets.pool import Batch

WARM_UP_STEPS = 3
"""Number of steps of one kind before it is captured: libraries choose algorithms, and kernels and tables are built."""

Passes = Callable[[Sequence["Batch"]], Statistics]
"""Makes the gradients of micro-batches and returns the sums of their statistics."""


@dataclass(frozen=True)
class _Captured:
    """A graph with its inputs and outputs.

    Attributes:
        kind: kind of the steps that it can make.
        batches: its micro-batches, on the device; filled before each launch.
        sums: sums of the statistics, filled by the graph.
        gradients: parameters with their gradients, which the graph overwrites.
        launch: launches the graph.
    """

    kind: Hashable
    batches: Sequence[Batch]
    sums: Statistics
    gradients: Sequence[tuple[Tensor, Tensor]]
    launch: Callable[[], None]

    def run(self, batches: Sequence[Batch]) -> Statistics:
        """Compute the gradients of micro-batches; return the sums of their statistics."""
        for own, batch in zip(self.batches, batches, strict=True):
            own.images.copy_(batch.images, non_blocking=True)
            own.target.copy_(batch.target, non_blocking=True)
            if own.keys is not None and batch.keys is not None:
                own.keys.copy_(batch.keys, non_blocking=True)
        self.launch()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return tuple(entry.clone() for entry in self.sums)


class StepGraph:
    """Runs the passes of steps: the first ones of a kind directly, later ones as a graph.

    Steps are of the same kind if their micro-batches have the same shapes, the network is in the same mode, and they
    read and update the same tensors in the same places; unfrozen parameters begin a new kind. Only one graph is kept.
    It is captured after `WARM_UP_STEPS` consecutive steps of its kind, so a short batch at the end of an epoch does not
    replace it.

    Args:
        graphs: graphs of the device.
        device: device of the graph's batches.
        model: model whose parameters the passes read.
        is_linear: the criterion is linear; otherwise several micro-batches cannot be captured.
    """

    def __init__(self, graphs: DeviceGraphs, device: torch.device, model: nn.Module, *, is_linear: bool) -> None:
        self._graphs, self._device, self._model, self._is_linear = graphs, device, model, is_linear
        self._parameters = tuple(model.parameters())
        self._captured: _Captured | None = None
        self._last_kind: Hashable = None
        self._num_alike = 0
        self._notes: dict[str, bool] = {}

    def run(
        self, passes: Passes, batches: Sequence[Batch], updated: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> Statistics:
        """Compute the gradients of a step, which are all None before; return the sums of its statistics.

        Args:
            passes: computes them.
            batches: the micro-batches of the step.
            updated: the tensors that get gradients.
            buffers: all memory of the model's buffers.

        Raises:
            ConfigError: the passes cannot be captured.
        """
        shapes = [(*batch.images.shape, *batch.target.shape) for batch in batches]
        types = [(batch.images.dtype, batch.target.dtype) for batch in batches]
        places = [tensor.data_ptr() for tensor in (*self._parameters, *updated, *buffers)]
        kind = (*shapes, *types, self._model.training, *places)
        if self._captured is None or self._captured.kind != kind:
            self._num_alike = self._num_alike + 1 if kind == self._last_kind else 1
            self._last_kind = kind
            can_capture = self._is_linear or len(batches) == 1
            if self._num_alike <= WARM_UP_STEPS or not can_capture:
                self._note_eager(can_capture=can_capture)
                return self._graphs.run(lambda: passes(batches))
            self._captured = None  # frees its memory before the next one allocates some
            self._captured = self._capture(passes, batches, updated, kind)
            self._note("train.cuda_graph: forward and backward pass run as one graph from now on")
        return self._captured.run(batches)

    def drop(self) -> None:
        """Free the memory of the graph; it is captured again after further steps."""
        self._captured, self._num_alike = None, 0

    def take_notes(self) -> list[str]:
        """Return the pending notes and clear them."""
        notes = [text for text, is_taken in self._notes.items() if not is_taken]
        self._notes = dict.fromkeys(self._notes, True)
        return notes

    def _capture(
        self, passes: Passes, batches: Sequence[Batch], updated: Sequence[Tensor], kind: Hashable
    ) -> _Captured:
        own = [
            replace(
                batch,
                images=batch.images.to(self._device, copy=True),
                target=batch.target.to(self._device, copy=True),
                keys=None if batch.keys is None else batch.keys.to(self._device, copy=True),
            )
            for batch in batches
        ]
        host_rng = torch.get_rng_state()
        try:
            sums, launch = self._graphs.capture(lambda: passes(own))
        except Exception as error:
            cause: BaseException = error
            while cause.__context__ is not None:  # when the capture is left, CUDA raises another error
                cause = cause.__context__
            if is_out_of_memory(cause):
                raise cause from None
            first_line = str(cause).strip().partition("\n")[0]
            raise _not_captured(f"{type(cause).__name__}: {first_line}") from error
        if not torch.equal(torch.get_rng_state(), host_rng):
            raise _not_captured("it draws random numbers on the host, which a graph would repeat")
        gradients = [(parameter, parameter.grad) for parameter in updated if parameter.grad is not None]
        return _Captured(kind, own, sums, gradients, launch)

    def _note_eager(self, *, can_capture: bool) -> None:
        if not can_capture:
            self._note("train.cuda_graph: in pieces, this loss needs two passes of each, and steps run without a graph")
        elif self._captured is not None:
            self._note(
                "train.cuda_graph: a step that differs from the captured graph (a short batch, pieces, unfrozen "
                f"parameters) runs without it; after {WARM_UP_STEPS} steps that are alike a graph is captured again"
            )

    def _note(self, text: str) -> None:
        self._notes.setdefault(text, False)


def _not_captured(reason: str) -> ConfigError:
    return ConfigError(
        f"train.cuda_graph = true: the step cannot be captured: {reason}: set it to false",
        key="train.cuda_graph",
        value=True,
    )
