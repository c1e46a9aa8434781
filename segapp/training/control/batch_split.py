"""The split of the batch over the devices of one process or over ranks, and the memory measured under each split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from segapp.config import LiveSettings
from segapp.memory.saved_plan import SavedMemoryPlan
from segapp.parallel import DataParallelModel, RankSplit
from segapp.parallel.ranks import Ranks
from segapp.run.balance import SplitMove, plan_move
from segapp.run.verdict import SplitFacts, SplitVerdict, format_split, split_verdict


class BatchSplitController:
    """The split of the batch over devices or ranks, changed between steps, and the peaks measured under each split.

    Args:
        divider: What divides a batch: a network, of which only a `DataParallelModel` has a split, or the `RankSplit` of
            ddp. With fewer than two devices or ranks there is nothing to split.
        batch_size: Samples of a full batch.
        mode: Of the training, for the message where there is nothing to split.
        smallest_chunk: Samples that a device with samples needs at least (`segapp.parallel.smallest_chunk`).
        saved_plan: The memory plan that the run began with, if one was made.
        ranks: The processes that share a batch.
        needs_samples: Why no rank can be left without samples; None if one can.
    """

    def __init__(
        self,
        divider: nn.Module | RankSplit,
        batch_size: int,
        mode: str,
        smallest_chunk: int = 1,
        saved_plan: SavedMemoryPlan | None = None,
        ranks: Ranks | None = None,
        needs_samples: str | None = None,
    ) -> None:
        is_split = isinstance(divider, (DataParallelModel, RankSplit)) and len(divider.plan(batch_size)) > 1
        self._divider: Any = divider if is_split else None
        self.batch_size, self._mode = batch_size, mode
        self._smallest_chunk, self._needs_samples = smallest_chunk, needs_samples
        self._saved_plan = saved_plan
        self._ranks = ranks or Ranks()
        self._observed: dict[tuple[int, ...], tuple[float | None, ...]] = {}
        self._failed: set[tuple[int, ...]] = set()
        self._ceiling: int | None = None

    @property
    def current(self) -> tuple[int, ...] | None:
        """Samples of a full batch for each device; None where there is nothing to split."""
        return None if self._divider is None else self._divider.plan(self.batch_size)

    def facts(self, usable_mib: Sequence[float | None] = ()) -> SplitFacts:
        """Return what is known when a split is chosen.

        Args:
            usable_mib: Memory of each device for this run; None where unknown.
        """
        mode = "ddp" if isinstance(self._divider, RankSplit) else "dp"
        if self._divider is None:
            mode = "model" if self._mode == "model" else "single"
        return SplitFacts(
            self.batch_size,
            len(self.current or (self.batch_size,)),
            mode=mode,
            smallest_chunk=self._smallest_chunk,
            needs_samples=self._needs_samples,
            current=self.current,
            usable_mib=usable_mib,
            observed=self._observed,
            ceiling=self._ceiling,
            failed=self._failed,
            planned_slope_mib=None if self._saved_plan is None else self._saved_plan.slope_mib,
        )

    def check(
        self,
        gpu0_bsz: int | Literal["auto"] | None,
        shares: Sequence[int] | None,
        usable_mib: Sequence[float | None] = (),
    ) -> SplitVerdict:
        """Return the verdict on a requested split; see `split_verdict`."""
        return split_verdict(self.facts(usable_mib), gpu0_bsz, shares)

    def auto_move(self, usable_mib: Sequence[float | None]) -> SplitMove | None:
        """Return the move of `auto` at the start of an epoch; None to keep the split.

        Args:
            usable_mib: Memory of each device for this run.
        """
        return plan_move(self.facts(usable_mib))

    def thaw_move(self) -> SplitMove | None:
        """Return the move of `auto` at the thaw: back to the planned split; None if there is none or it is in force.

        The peaks measured so far are discarded: gradients and optimizer state of the frozen parameters are missing in
        them, most of it on device 0. The plan counts them.
        """
        self.clear_peaks()
        plan = self._saved_plan
        if plan is None or plan.gpu0_bsz is None or self.current is None:
            return None
        split = self.check(plan.gpu0_bsz, None).split
        if split is None or split == self.current or split in self._failed:
            return None
        predicted = tuple(mib for mib in plan.predicted_mib(split) if mib is not None)
        reason = f"auto: frozen parameters thaw; {format_split(split)} was planned for their training"
        return SplitMove(plan.gpu0_bsz, split, predicted, reason)

    def predicted_mib(self) -> tuple[float | None, ...]:
        """Return the predicted peaks under the split in force, from measurements or the plan; empty if unknown."""
        if self.current is not None and self._observed:
            return self.facts().fit().predict(self.current)
        return () if self._saved_plan is None else self._saved_plan.predicted_mib(self.current)

    def record_failure(self, split: Sequence[int], old: Sequence[int] | None = None) -> None:
        """Record that a split ran out of memory after `old` did not; None: the present split."""
        self._failed.add(tuple(split))
        old = self.current if old is None else old
        if old is not None and split[0] > old[0]:
            self._ceiling = min(split[0], self._ceiling or split[0])

    def gathered(self, peaks_mib: Sequence[float | None]) -> list[float | None]:
        """Return the peaks of all devices; in ddp every rank knows its own only, and every rank must call it."""
        if self._ranks.world_size == 1:
            return list(peaks_mib)
        return [theirs[rank] for rank, theirs in enumerate(self._ranks.gather(list(peaks_mib)))]

    def record_peaks(self, split: Sequence[int], peaks_mib: Sequence[float | None]) -> None:
        """Record the peaks measured under a split; the highest of each device is kept."""
        known = self._observed.get(tuple(split), (None,) * len(split))
        pairs = zip(known, peaks_mib, strict=False)
        self._observed[tuple(split)] = tuple(
            new if old is None else old if new is None else max(old, new) for old, new in pairs
        )

    def clear_peaks(self) -> None:
        """Discard the measured peaks, because steps are made in another way from now on."""
        self._observed.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements as plain values."""
        return {
            "observed": [[list(split), list(peaks)] for split, peaks in self._observed.items()],
            "failed": [list(split) for split in sorted(self._failed)],
            "ceiling": self._ceiling,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, without measurements on another number of devices."""
        num_devices = len(self.current or ())
        self._observed = {tuple(s): tuple(p) for s, p in state.get("observed", ()) if len(s) == num_devices}
        self._failed |= {tuple(split) for split in state.get("failed", ()) if len(split) == num_devices}
        ceilings = [each for each in (self._ceiling, state.get("ceiling")) if each is not None]
        self._ceiling = min(ceilings, default=None)

    def apply(self, settings: LiveSettings) -> bool:
        """Split all following batches as the settings say.

        Returns:
            False if that is impossible here, such as a split saved on a machine with other devices; then nothing
            changes.
        """
        divider = self._divider
        if divider is None:
            return settings.shares is None
        if not self.check(settings.gpu0_bsz, settings.shares).is_possible:
            return False
        divider.shares = None if settings.shares is None else list(settings.shares)
        divider.full_batch = None if settings.shares is not None else self.batch_size
        divider.gpu0_bsz = None if settings.shares is not None else settings.gpu0_bsz
        return True
