"""The effects of settings on the objects of a training: the split of a batch, and the blocks that are recomputed."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from segapp.chunks import Split
from segapp.config import LiveSettings, RecomputeChoice
from segapp.errors import ConfigError
from segapp.memory.peaks import PeakModel
from segapp.memory.plan import SavedMemoryPlan
from segapp.memory.split_check import SplitChecker, tensor_frac
from segapp.models.blocks import find_blocks
from segapp.parallel import recomputed_blocks, set_recompute
from segapp.parallel.recompute import is_recomputable
from segapp.training.step.divided import TrainedNetwork


class RecomputableBlocks:
    """The blocks of a network that the backward pass can recompute; `LiveSettings.recompute` chooses among them.

    Args:
        model: the network, in which the blocks of the config, or of the memory plan, are already chosen.
        num_devices: number of devices of a `DataParallelModel`; else 1.
        problem: why no other blocks can be chosen; None if they can.
    """

    def __init__(self, model: nn.Module, num_devices: int = 1, problem: str | None = None) -> None:
        self._model = model
        self._configured = recomputed_blocks(model, num_devices=num_devices)
        self.names: tuple[str, ...] = ()
        try:
            self.names = tuple(name for name, block in find_blocks(model).items() if is_recomputable(block))
        except ConfigError as error:  # `checkpoint_blocks` of a custom network without recomputation
            problem = problem or str(error)
        self.problem = problem or (None if self.names else "the model has no blocks")

    def of(self, choice: RecomputeChoice) -> tuple[tuple[str, ...], ...]:
        """Return the names of the chosen blocks for each device; only with `config` may devices differ."""
        if choice == "config":
            return self._configured
        return (self.names if choice == "all" else (),) * len(self._configured)

    def describe(self, choice: RecomputeChoice) -> str:
        which = {"off": "no blocks", "all": f"all {len(self.names)} blocks", "config": "the blocks of train.recompute"}
        return f"{which[choice]} recomputed in the backward pass"

    def has_kept(self, choice: RecomputeChoice) -> bool:
        """Return True if a device keeps the activations of a block that could be recomputed."""
        return self.problem is None and self.of(choice) != self.of("all")

    def change(self, old: RecomputeChoice, new: RecomputeChoice) -> bool:
        """Recompute the blocks of a new choice from the next step on; return True if they are other blocks."""
        is_new = self.of(new) != self.of(old)
        if is_new:
            set_recompute(self._model, self.of(new))
        return is_new


class BatchSplit:
    """The split of the batches, and everything that the run learns about splits, in `checker`.

    With fewer than two devices or ranks there is nothing to split. `checker` is written into the run's events.
    """

    def __init__(
        self,
        network: TrainedNetwork,
        batch_size: int,
        mode: str,
        saved_plan: SavedMemoryPlan | None = None,
    ) -> None:
        is_split = len(network.split_of(batch_size)) > 1
        self._network = network if is_split else None
        self.batch_size = batch_size
        self.saved_plan = saved_plan
        self._ranks = network.ranks
        self.checker = SplitChecker(
            batch_size,
            len(self.current or (batch_size,)),
            # On one device there is nothing to split, whatever the mode.
            mode=mode if is_split or mode == "model" else "single",
            smallest_chunk=network.smallest_chunk,
            needs_samples=network.needs_samples,
            current=self.current,
            peaks=PeakModel(slope_mib=None if saved_plan is None else saved_plan.slope_mib),
            tensor_frac=tensor_frac(os.environ),
        )

    @property
    def current(self) -> Split | None:
        """Samples of a full batch for each device; None if there is nothing to split."""
        return None if self._network is None else tuple(self._network.split_of(self.batch_size))

    def apply(self, settings: LiveSettings) -> bool:
        """Divide all following batches as the settings say.

        Returns:
            False if that is impossible here, for example for a split that was saved on a machine with other devices;
            then nothing changes.
        """
        if self._network is None:
            return settings.shares is None
        if not self.checker.check(settings.split).is_possible:
            return False
        self._network.divide(settings.split, self.batch_size)
        self.checker = replace(self.checker, current=self.current)
        return True

    def record_failure(self, split: Sequence[int], old: Sequence[int] | None = None) -> None:
        """Record that a split ran out of memory after `old` did not; None: the present split."""
        self.checker = self.checker.with_failure(split, old)

    def gathered(self, peaks_mib: Sequence[float | None]) -> list[float | None]:
        """Return the peaks of all devices; in ddp every rank knows only its own, and every rank must call it."""
        if self._ranks.world_size == 1:
            return list(peaks_mib)
        return [theirs[rank] for rank, theirs in enumerate(self._ranks.gather(list(peaks_mib)))]

    def record_peaks(self, split: Sequence[int], peaks_mib: Sequence[float | None]) -> None:
        self.checker = replace(self.checker, peaks=self.checker.peaks.with_measured(split, peaks_mib))

    def clear_peaks(self, *, keeps_failures: bool = False) -> None:
        """Discard the measured peaks, because steps are made differently from now on, and the splits that failed.

        Failures are kept if the steps need more memory from now on.
        """
        self.checker = replace(self.checker, peaks=replace(self.checker.peaks, measured={}))
        if not keeps_failures:
            self.checker = replace(self.checker, failed=(), ceiling=None)

    def state_dict(self) -> dict[str, Any]:
        known = self.checker.to_json()
        return {"observed": known["peaks"]["measured"], **{key: known[key] for key in ("mode", "failed", "ceiling")}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, without what is known of another number of devices or another mode."""
        num_devices, mode = len(self.current or ()), self.checker.mode
        if state.get("mode", mode) != mode:
            return
        measured = {tuple(s): tuple(p) for s, p in state["observed"] if len(s) == num_devices}
        failed = {tuple(split) for split in state["failed"] if len(split) == num_devices}
        saved = state["ceiling"] if failed else None  # a failure has left both
        ceilings = [each for each in (self.checker.ceiling, saved) if each is not None]
        self.checker = replace(
            self.checker,
            peaks=replace(self.checker.peaks, measured=measured),
            failed=frozenset({*self.checker.failed, *failed}),
            ceiling=min(ceilings, default=None),
        )
