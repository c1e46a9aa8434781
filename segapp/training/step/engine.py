"""One optimizer step: forward, additive loss statistics, backward, update; exact for any division of the batch.

A criterion returns additive statistics (sums). The engine adds them over chunks, micro-batches and ranks before the
only division, so loss and gradient are the same as for the whole step on one large device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from segapp.accelerator import gpu_of
from segapp.checkpoint.snapshot import hold_own_state
from segapp.chunks import RankSplit
from segapp.compat.torch import takes_found_inf
from segapp.failpoints import failpoint
from segapp.losses import AdditiveCriterion, Statistics, surrogate
from segapp.memory.counters import IDLE
from segapp.memory.oom import oom_failpoint
from segapp.optim import WeightAverage, add_groups, set_lr
from segapp.parallel import DataParallelCriterion, DataParallelModel, SampleMasks
from segapp.parallel.distributed import Ranks
from segapp.precision import Precision
from segapp.training.step.graph import StepGraph
from segapp.training.step.participant import MAX_BAD_STEPS, StepParticipant
from segapp.training.step.rollback import BufferGuard, capture_torch_rng, restore_torch_rng

if TYPE_CHECKING:
    from segapp.datasets.pool import Batch
    from segapp.models import SegmentationModel


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
    """Makes optimizer steps.

    Args:
        model: the bare model, on its device and cast by `precision`.
        network: takes uint8 images (N, 3, H, W) and wraps `model`: a `DataParallelModel` (one or several devices), a
            `DistributedDataParallel` (one device per rank), or a module whose stages are on several devices.
        optimizer: its groups hold `precision`'s master weights.
        precision: the precision mode; its device is the first one, which holds the weights and where sums are made.
        smallest_chunk: minimum samples of each device that has any; more than 1 if BatchNorm is not synchronized.
        needs_samples: why the network cannot run without samples, as on a rank with a share of 0; None if it can.
        thawed: returns the network in its wrapper, and the optimizer's groups, for frozen parameters with these names
            that are trained from now on; None without `model.freeze`.
        graph: runs the passes of the steps as a graph of the device; None: the host launches each kernel.
        masks: makes the keys of the samples' dropout masks; None: dropout draws from the generator of its device.
        mark: called with each phase as it begins: forward, loss, backward, step, then `IDLE`.
    """

    def __init__(
        self,
        model: SegmentationModel,
        network: nn.Module,
        criterion: AdditiveCriterion,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        *,
        average: WeightAverage[SegmentationModel] | None = None,
        clip_grad_norm: float | None = None,
        smallest_chunk: int = 1,
        rank_split: RankSplit | None = None,
        needs_samples: str | None = None,
        thawed: Callable[[Sequence[str]], tuple[nn.Module, list[Mapping[str, Any]]]] | None = None,
        participants: Sequence[StepParticipant] = (),
        ranks: Ranks | None = None,
        graph: StepGraph | None = None,
        masks: SampleMasks | None = None,
        mark: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.model, self.network, self.criterion = model, network, criterion
        self.average, self.smallest_chunk = average, smallest_chunk
        self.rank_split, self.needs_samples, self._thawed = rank_split, needs_samples, thawed
        self.optimizer, self.precision, self.clip_grad_norm = optimizer, precision, clip_grad_norm
        self.participants = tuple(participants)
        self.ranks, self.graph = ranks or Ranks(), graph
        self.masks, self._mark = masks, mark
        self.device = device = precision.device
        devices = [device, *(parameter.device for parameter in model.parameters())]
        devices += network.devices if isinstance(network, DataParallelModel) else ()
        self._rng_devices = tuple(dict.fromkeys(each for each in devices if gpu_of(each) is not None))
        self.bad_steps = torch.zeros((), dtype=torch.int64, device=device)
        """Number of steps that did not change the weights because a value was not finite; 0-dim, on the device."""
        self.bad_in_row = torch.zeros((), dtype=torch.int64, device=device)
        """The number of consecutive such steps up to the last one."""
        self._summed = DataParallelCriterion(criterion) if isinstance(network, DataParallelModel) else criterion
        self.guard = BufferGuard(model)
        self.is_whole = True
        """False only if an update was interrupted; otherwise the state is the state at a step boundary."""
        frozen = () if thawed is None else model.frozen_parameters
        self.num_frozen = sum(model.get_parameter(name).numel() for name in frozen)

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
            check: called before each micro-batch except the first, unless a graph runs all of them; it may raise to
                leave the step.
            num_pieces: cut every micro-batch into this number of pieces; the mean is the same, with less memory.
            num_samples: samples of the first micro-batch over all ranks, for the result's split; None: only this
                rank's.
        """
        split = self.split_of(len(batches[0].indices) if num_samples is None else num_samples)
        if num_pieces > 1:
            batches = [piece for batch in batches for piece in self._cut(batch, num_pieces)]
        if self.masks is not None:
            batches = [replace(each, keys=self.masks.keys(each.epoch, each.first, len(each))) for each in batches]
        self._begin()
        with self._rolled_back_if_left():
            # A linear criterion's denominators follow from the targets, so no rank waits between its passes.
            has_totals = len(batches) > 1 or (self.ranks.world_size > 1 and self.criterion.is_linear)
            passes = functools.partial(self._passes, check=check, has_totals=has_totals)
            if self.graph is None:
                sums = passes(batches)
            else:
                updated = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
                sums = self.graph.run(passes, batches, updated, self.guard.live)
            for participant in self.participants:
                participant.backward(batches)
            self._mark("step")
            oom_failpoint("train.optimizer")
            with torch.no_grad():
                if has_totals:  # otherwise the sums of the single micro-batch are already over all ranks
                    sums = self.ranks.sums(sums)
                loss = self.criterion.finalize(sums)
                terms = self.criterion.terms(sums)
            grad_norm, is_bad = self._finish_gradients(loss)
            for participant in self.participants:
                participant.finish_gradients()
        self._apply(is_bad)
        self._mark(IDLE)
        for participant in self.participants:
            terms |= participant.terms()
        return StepResult(loss.detach(), grad_norm, is_bad, split, terms)

    def _cut(self, batch: Batch, num_pieces: int) -> list[Batch]:
        """Return a micro-batch in pieces: in ddp equally many on every rank, otherwise none too small for BatchNorm."""
        count = len(batch.indices)
        if self.ranks.world_size == 1:
            num_pieces = min(num_pieces, count)
            while num_pieces > 1 and not self.can_train_on(count // num_pieces):
                num_pieces -= 1
        pieces = zip(batch.images.tensor_split(num_pieces), batch.target.tensor_split(num_pieces), strict=True)
        cut, done = [], 0
        for images, target in pieces:
            indices = batch.indices[done : done + len(images)]
            cut.append(replace(batch, images=images, target=target, indices=indices, first=batch.first + done))
            done += len(images)
        return cut

    def can_train_on(self, num_samples: int, num_pieces: int = 1) -> bool:
        """Return True if a piece gives every device enough samples for BatchNorm and for the network."""
        if num_samples < self.model.min_train_batch:
            return False
        if self.rank_split is not None:
            shares = [share for share in self.rank_split.plan(num_samples * num_pieces) if share]
            least = self.smallest_chunk if self.smallest_chunk > 1 else int(self.needs_samples is not None)
            return max(shares) >= num_pieces and min(shares) // num_pieces >= least
        if self.smallest_chunk == 1 or not isinstance(self.network, DataParallelModel):
            return True
        return all(size == 0 or size >= self.smallest_chunk for size in self.network.plan(num_samples))

    @property
    def evaluated(self) -> SegmentationModel:
        """The model to evaluate: the average of the weights if there is one."""
        return self.model if self.average is None else self.average.module

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next steps; participants scale their own with it."""
        set_lr(self.optimizer, lr)
        for participant in self.participants:
            participant.set_lr(lr)

    @property
    def is_frozen(self) -> bool:
        """True while parameters are frozen."""
        return self._thawed is not None and bool(self.model.frozen_parameters)

    def thaw(self) -> None:
        """Train the frozen parameters from the next step on; every rank must call it at the same step boundary.

        They join the optimizer as new groups with fresh state. DistributedDataParallel is created anew, because its
        buckets only include the parameters that needed a gradient when it was created.
        """
        assert self._thawed is not None
        names = self.model.thaw()
        self.network.train()
        if isinstance(self.network, DistributedDataParallel):
            self.network = self.network.module  # frees the old buckets before new ones are made
        self.network, groups = self._thawed(names)
        add_groups(self.optimizer, groups)

    def split_of(self, num_samples: int) -> list[int]:
        """Return the samples on each device, or on each rank, of a batch of `num_samples`."""
        if isinstance(self.network, DataParallelModel):
            return list(self.network.plan(num_samples))
        return [num_samples] if self.rank_split is None else list(self.rank_split.plan(num_samples))

    def _passes(self, batches: Sequence[Batch], *, check: Callable[[], None], has_totals: bool) -> Statistics:
        """Compute the gradients of the micro-batches; return the sums of this rank's statistics."""
        totals = self._totals(batches) if has_totals else None
        sums: Statistics | None = None
        for number, batch in enumerate(batches, start=1):
            if number > 1:
                check()
            with self._reduced_later(number < len(batches)):
                statistics = self._backward(batch, totals)
            sums = statistics if sums is None else _added(sums, statistics)
        assert sums is not None
        return sums

    def _backward(self, batch: Batch, totals: Statistics | None) -> Statistics:
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
            # DDP computes the mean of the ranks' gradients; the step's gradient is their sum.
            loss = surrogate(self.criterion, statistics, totals) * self.ranks.world_size
        if failpoint("train.gradient") == "inf":
            loss = loss * torch.inf
        self.precision.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.precision.gradients_to_master()
        return own

    def _reduced_later(self, is_later: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context in which DDP does not reduce the gradients of micro-batches before the last one.

        With half weights, every micro-batch is reduced, because its gradients are moved to the fp32 masters
        immediately.
        """
        if is_later and isinstance(self.network, DistributedDataParallel) and not self.precision.has_masters:
            return self.network.no_sync()
        return contextlib.nullcontext()

    def _statistics(self, batch: Batch) -> Statistics:
        self._mark("forward")
        inputs = (batch.images,) if batch.keys is None else (batch.images, batch.keys)
        if isinstance(self.network, DataParallelModel):
            outputs, target = self.network(*inputs), batch.target
        else:
            target = batch.target.to(self.device, non_blocking=True)
            outputs = self.network(*(each.to(self.device, non_blocking=True) for each in inputs))
        for participant in self.participants:
            participant.take(outputs)
        self._mark("loss")
        oom_failpoint("train.loss")
        return self._summed.statistics(outputs, target)

    @torch.no_grad()
    def _totals(self, batches: Sequence[Batch]) -> Statistics:
        """Return the statistics of the whole step, which the gradient of every micro-batch depends on.

        A linear criterion needs only the denominators, which follow from the targets. Others first need a forward pass
        of every micro-batch; buffers and random numbers are restored after it.
        """
        sums: Statistics | None = None
        rng = None if self.criterion.is_linear else capture_torch_rng(self._rng_devices)
        for batch in batches:
            if self.criterion.is_linear:
                part = self.criterion.target_statistics(batch.target.to(self.device, non_blocking=True))
            else:
                with self.precision.autocast():
                    part = self._statistics(batch)
            sums = part if sums is None else _added(sums, part)
        if rng is not None:
            restore_torch_rng(rng)
            self.guard.restore()
            self._roll_back_participants()
        assert sums is not None
        return self.ranks.sums(sums)

    @property
    def is_loss_scale_falling(self) -> bool:
        """True after a bad step in half precision: a lower loss scale is tried, which may still end the run."""
        return self.precision.scaler is not None and int(self.bad_in_row) > 0

    def divergence(self) -> str | None:
        """Return why no further step can be made; None if one can."""
        for participant in self.participants:
            if problem := participant.divergence():
                return problem
        in_row, scaler = int(self.bad_in_row), self.precision.scaler
        is_collapsed = scaler is not None and float(scaler.scale) < 1.0
        # A scale that is still falling explains bad steps on its own.
        if not is_collapsed and (scaler is not None or in_row < MAX_BAD_STEPS):
            return None
        if is_collapsed:
            return "the loss scale fell below 1"
        return f"loss or gradient not finite for {in_row} steps in a row"

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's part of a checkpoint."""
        average = None if self.average is None else self.average.state_dict()
        if average is not None:
            self.model.without_base(average["module"])
        state: dict[str, Any] = {
            "model": self.model.without_base(self.model.state_dict()),
            "ema": average,
            "optimizer": self.optimizer.state_dict(),
            "precision": self.precision.state_dict(),
            "criterion": self.criterion.state_dict(),
            "bad_steps": self.bad_steps,
            "bad_in_row": self.bad_in_row,
            "is_frozen": self.is_frozen,
        }
        if self.model.base is not None:
            state["base"] = self.model.base.as_state()
        for participant in self.participants:
            if own := participant.state_dict():
                state[participant.name] = {**state.get(participant.name, {}), **own}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        if self.is_frozen and not state["is_frozen"]:
            self.thaw()
        self.model.load_state_dict(state["model"])
        if self.average is not None:
            self.average.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        hold_own_state(self.optimizer)
        self.precision.load_state_dict(state["precision"])
        self.criterion.load_state_dict(state["criterion"])
        self.bad_steps.copy_(state["bad_steps"])
        self.bad_in_row.copy_(state["bad_in_row"])
        for participant in self.participants:
            participant.load_state_dict(state.get(participant.name))

    @torch.no_grad()
    def _finish_gradients(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Unscale and clip the gradients; return their norm and whether the step is bad."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        self.precision.unscale(gradients)
        grad_norm = torch.nn.utils.get_total_norm(gradients).to(self.device)
        is_bad = (~(torch.isfinite(loss) & torch.isfinite(grad_norm))).float()
        if self.clip_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_grad_norm, grad_norm)
        return grad_norm, is_bad

    @torch.no_grad()
    def _apply(self, is_bad: Tensor) -> None:
        """Update weights, average, participants and counters in place, with almost no additional memory."""
        self.is_whole = False
        if may_update(self.optimizer, is_bad):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.precision.masters_to_model()
        self.precision.update(is_bad)
        self.guard.restore_where(is_bad)
        if self.average is not None:
            self.average.update(is_bad)
        for participant in self.participants:
            participant.apply(is_bad)
        bad = is_bad.long()
        self.bad_steps += bad
        self.bad_in_row = (self.bad_in_row + 1) * bad
        self.is_whole = True

    @contextlib.contextmanager
    def _rolled_back_if_left(self) -> Iterator[None]:
        """Roll back a step that is left before its update: buffers, random numbers, gradients."""
        rng = capture_torch_rng(self._rng_devices)
        try:
            yield
        except BaseException:
            if self.graph is not None:
                self.graph.drop()
            self.guard.restore()
            restore_torch_rng(rng)
            self.model.zero_grad(set_to_none=True)
            self.optimizer.zero_grad(set_to_none=True)
            self._roll_back_participants()
            raise

    def _begin(self) -> None:
        self.guard.remember()
        for participant in self.participants:
            participant.begin(self.network)

    def _roll_back_participants(self) -> None:
        for participant in self.participants:
            participant.rollback()


def _added(a: Statistics, b: Statistics) -> Statistics:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def may_update(optimizer: torch.optim.Optimizer, is_bad: Tensor) -> bool:
    """Return False if a step is bad and the optimizer would still update the weights.

    torch's fused optimizers read `found_inf` on the device, and then change nothing. For other optimizers, such as
    custom ones, the host reads the value, which waits for the step, like torch's `GradScaler`.
    """
    if takes_found_inf(optimizer):
        optimizer.found_inf = is_bad  # type: ignore[attr-defined]
        return True
    return type(is_bad) is not Tensor or not bool(is_bad)  # a simulated tensor has no value
