"""One optimizer step: forward, additive loss statistics, backward, update; exact for any division of the batch.

A criterion returns additive statistics (sums). The engine adds them over chunks, micro-batches and ranks before the
only division, so loss and gradient are the same as for the whole step on one large device.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from segapp.accelerator import gpu_of
from segapp.datasets.pool import Batch
from segapp.failpoints import failpoint
from segapp.losses import AdditiveCriterion, LossStatistics, surrogate
from segapp.memory.counters import IDLE
from segapp.memory.oom import oom_failpoint
from segapp.optim import set_lr
from segapp.parallel import SampleMasks
from segapp.training.step.divided import TrainedNetwork
from segapp.training.step.rollback import BufferGuard, capture_torch_rng, restore_torch_rng
from segapp.training.step.update import WeightUpdate


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


@dataclass
class StepResult:
    """The result of a step, as tensors on the device: reading them waits for it."""

    loss: Tensor
    grad_norm: Tensor
    is_bad: Tensor
    split: list[int]
    terms: dict[str, Tensor] = field(default_factory=dict)
    """Parts of the loss for display, by name."""


class StepEngine:
    """Makes optimizer steps; `step` reads from top to bottom as one update is made.

    Args:
        network: the network and its division over devices or ranks.
        criterion: on the network's first device.
        update: the update of the network's weights.
        participants: take part in every step in addition to the network.
        masks: makes the keys of the samples' dropout masks; None: dropout draws from the generator of its device.
        pad_target: pads a target (N, H, W) with ignored pixels, as the network pads its images.
        mark: called with each phase as it begins: forward, loss, backward, step, then `IDLE`.

    Attributes:
        is_whole: False only if an update was interrupted; otherwise the state is the state at a step boundary.
        num_frozen: number of parameters that are frozen at first, and trained after `unfreeze`.
    """

    def __init__(
        self,
        network: TrainedNetwork,
        criterion: AdditiveCriterion,
        update: WeightUpdate,
        *,
        participants: Sequence[StepParticipant] = (),
        masks: SampleMasks | None = None,
        pad_target: Callable[[Tensor], Tensor] = lambda target: target,
        mark: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.network, self.criterion, self.update = network, criterion, update
        self.model, self.device, self.ranks = network.model, network.device, network.ranks
        self.participants, self.masks, self._mark = tuple(participants), masks, mark
        self._pad_target = pad_target
        self.precision, self.guard, self.is_whole = update.precision, BufferGuard(self.model), True
        self.num_frozen = sum(self.model.get_parameter(name).numel() for name in self.model.frozen_parameters)
        self._summed = network.summed(criterion)
        devices = [self.device, *(parameter.device for parameter in self.model.parameters()), *network.devices]
        self._rng_devices = tuple(dict.fromkeys(each for each in devices if gpu_of(each) is not None))

    def step(
        self,
        batches: Sequence[Batch],
        check: Callable[[], None] = lambda: None,
        *,
        num_pieces: int = 1,
        num_samples: int | None = None,
    ) -> StepResult:
        """Make an optimizer update from one or more micro-batches, with the mean over all of them and all ranks.

        If an exception occurs before the update, the model is unchanged.

        Args:
            batches: this rank's micro-batches of the step; every rank has the same number.
            check: called before each micro-batch except the first; it may raise to leave the step.
            num_pieces: cut every micro-batch into this number of pieces; the mean is the same, with less memory.
            num_samples: samples of the first micro-batch over all ranks, for the result's split; None: only this
                rank's.
        """
        batches = [replace(each, target=self._pad_target(each.target)) for each in batches]
        split = self.network.split_of(len(batches[0].indices) if num_samples is None else num_samples)
        if num_pieces > 1:
            batches = [piece for batch in batches for piece in self._cut(batch, num_pieces)]
        if self.masks is not None:
            batches = [replace(each, keys=self.masks.keys(each.epoch, each.first, len(each))) for each in batches]
        # Before the first forward pass, which changes the statistics of BatchNorm.
        self.guard.remember()
        for participant in self.participants:
            participant.begin()
        with self._rolled_back_if_left():
            # A linear criterion's denominators follow from the targets, so no rank waits between its passes.
            has_totals = len(batches) > 1 or (self.ranks.world_size > 1 and self.criterion.is_linear)
            sums = self._passes(batches, check, has_totals=has_totals)
            for participant in self.participants:
                participant.backward(batches)
            self._mark("step")
            oom_failpoint("train.optimizer")
            with torch.no_grad():
                if has_totals:  # otherwise the sums of the single micro-batch are already over all ranks
                    sums = self.ranks.sums(sums)
                loss = self.criterion.finalize(sums)
                terms = self.criterion.terms(sums)
            grad_norm, is_bad = self.update.finish_gradients(loss)
            for participant in self.participants:
                participant.finish_gradients()
        # From here on a step cannot be rolled back, because parameters change in place.
        self.is_whole = False
        # The device decides, so that the host need not wait for the gradient's norm.
        self.guard.restore_where(is_bad)
        self.update.apply(is_bad)
        self.model.count_update()
        for participant in self.participants:
            participant.apply(is_bad)
        self.is_whole = True
        self._mark(IDLE)
        for participant in self.participants:
            terms |= participant.terms()
        return StepResult(loss.detach(), grad_norm, is_bad, split, terms)

    def _cut(self, batch: Batch, num_pieces: int) -> list[Batch]:
        """Return a micro-batch in pieces: in ddp equally many on every rank, otherwise none too small for BatchNorm."""
        count = self.network.num_pieces(len(batch.indices), num_pieces)
        cut, done = [], 0
        for images, target in zip(batch.images.tensor_split(count), batch.target.tensor_split(count), strict=True):
            indices = batch.indices[done : done + len(images)]
            cut.append(replace(batch, images=images, target=target, indices=indices, first=batch.first + done))
            done += len(images)
        return cut

    def _passes(self, batches: Sequence[Batch], check: Callable[[], None], *, has_totals: bool) -> LossStatistics:
        """Compute the gradients of the micro-batches; return the sums of this rank's statistics."""
        totals = self._totals(batches) if has_totals else None
        sums: LossStatistics | None = None
        for number, batch in enumerate(batches, start=1):
            if number > 1:
                check()
            with self.network.sync(is_last=number == len(batches)):
                statistics = self._backward(batch, totals)
            sums = statistics if sums is None else _added(sums, statistics)
        assert sums is not None
        return sums

    def _backward(self, batch: Batch, totals: LossStatistics | None) -> LossStatistics:
        """Compute the gradient of this rank's part of a micro-batch, given the statistics of the whole step.

        Return this rank's statistics or, without `totals` for the only micro-batch of a step, the sums over all ranks.
        """
        with self.precision.autocast():
            statistics = self._statistics(batch)
        failpoint("train.device")
        self._mark("backward")
        oom_failpoint("train.backward")
        own = tuple(s.detach() for s in statistics)
        if totals is None and self.ranks.world_size == 1:
            loss = self.criterion.finalize(statistics)
        else:
            if totals is None:
                own = totals = self.ranks.sums(own)
            # Its gradient is this rank's share of the whole loss, so the ranks' gradients are added.
            loss = surrogate(self.criterion, statistics, totals)
        if failpoint("train.gradient") == "inf":
            loss = loss * torch.inf
        self.precision.backward(loss)
        return own

    def _statistics(self, batch: Batch) -> LossStatistics:
        self._mark("forward")
        outputs, target = self.network.forward(batch)
        for participant in self.participants:
            participant.take(outputs)
        self._mark("loss")
        oom_failpoint("train.loss")
        return self._summed.statistics(outputs, target)

    @torch.no_grad()
    def _totals(self, batches: Sequence[Batch]) -> LossStatistics:
        """Return the statistics of the whole step, which the gradient of every micro-batch depends on.

        A linear criterion needs only the denominators, which follow from the targets. Others first need a forward pass
        of every micro-batch; buffers and random numbers are restored after it.
        """
        sums: LossStatistics | None = None
        # The second forward pass must draw the same dropout masks as this one.
        rng = None if self.criterion.is_linear else capture_torch_rng(self._rng_devices)
        for batch in batches:
            if self.criterion.is_linear:
                part = self.criterion.target_statistics(batch.target.to(self.device, non_blocking=True))
            else:
                with self.precision.autocast():
                    part = self._statistics(batch)
            sums = part if sums is None else _added(sums, part)
        if rng is not None:
            self._roll_back(rng)
        assert sums is not None
        return self.ranks.sums(sums)

    @contextlib.contextmanager
    def _rolled_back_if_left(self) -> Iterator[None]:
        """Roll back a step that is left before its update: buffers, random numbers, gradients."""
        rng = capture_torch_rng(self._rng_devices)
        try:
            yield
        except BaseException:
            self._roll_back(rng)
            self.model.zero_grad(set_to_none=True)
            # With master weights, the optimizer's parameters are not the model's.
            self.update.optimizer.zero_grad(set_to_none=True)
            raise

    def _roll_back(self, rng: Any) -> None:
        self.guard.restore()
        restore_torch_rng(rng)
        for participant in self.participants:
            participant.rollback()

    def set_lr(self, lr: float) -> None:
        set_lr(self.update.optimizer, lr)
        for participant in self.participants:
            participant.set_lr(lr)

    def unfreeze(self) -> None:
        """Train the frozen parameters from the next step on; every rank must call it at the same step boundary."""
        names = self.model.unfreeze()
        self.network.module.train()
        self.network.include_unfrozen()
        self.update.include_unfrozen(names)

    def divergence(self) -> str | None:
        """Return why no further step can be made; None if one can."""
        problems = [*(each.divergence() for each in self.participants), self.update.divergence()]
        return next(filter(None, problems), None)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "model": self.model.without_base(self.model.state_dict()),
            "criterion": self.criterion.state_dict(),
            "is_frozen": bool(self.model.frozen_parameters),
            **self.update.state_dict(),
        }
        if self.model.base is not None:
            base = self.model.base
            state["base"] = {"sha256": base.sha256, "sources": list(base.sources), "num_tensors": len(base.names)}
        for participant in self.participants:
            if own := participant.state_dict():
                state[participant.name] = {**state.get(participant.name, {}), **own}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.model.frozen_parameters and not state["is_frozen"]:
            self.unfreeze()
        self.model.load_state_dict(state["model"])
        self.update.load_state_dict(state)
        self.criterion.load_state_dict(state["criterion"])
        for participant in self.participants:
            participant.load_state_dict(state.get(participant.name))


def _added(a: LossStatistics, b: LossStatistics) -> LossStatistics:
    return tuple(x + y for x, y in zip(a, b, strict=True))
