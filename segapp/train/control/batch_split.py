"""How a batch is divided over the devices of one process, as something that can be changed while a run is going on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from segapp.config import LiveSettings
from segapp.memory.saved_plan import SavedMemoryPlan
from segapp.parallel import DataParallelModel
from segapp.run.balance import SplitMove, plan_move
from segapp.run.verdict import MemoryObservation, SplitVerdict, fit_memory, split_verdict

_SPLIT_SETTINGS = ("gpu0_bsz", "shares")

AUTO_ON = {"gpu0_bsz_auto": True}
"""The change that lets `gpu0_bsz` follow the measured memory."""


def with_split(settings: LiveSettings, changes: Mapping[str, Any]) -> LiveSettings:
    """Settings with some replaced; `gpu0_bsz` and `shares` replace each other, and either switches `auto` off."""
    if any(name in changes for name in _SPLIT_SETTINGS):
        changes = {"gpu0_bsz": None, "shares": None, "gpu0_bsz_auto": False, **changes}
    return settings.model_copy(update=dict(changes))


class BatchSplitController:
    """The shares of the devices.

    Args:
        network: what runs the batches; only a `DataParallelModel` over two devices or more has shares.
        batch_size: samples of a full batch.
        mode: of the training, for what is said where there is nothing to divide.
        smallest_chunk: samples that a busy device needs (BatchNorm that is not synchronised).
        saved_plan: the memory plan that the run began with, if one was made.
    """

    def __init__(
        self,
        network: nn.Module,
        batch_size: int,
        mode: str,
        smallest_chunk: int = 1,
        saved_plan: SavedMemoryPlan | None = None,
    ) -> None:
        self._network = network if isinstance(network, DataParallelModel) and len(network.devices) > 1 else None
        self.batch_size, self.mode = batch_size, mode
        self._smallest_chunk = smallest_chunk
        self._observed: dict[tuple[int, ...], tuple[float | None, ...]] = {}
        self._failed: set[tuple[int, ...]] = set()
        self.ceiling: int | None = None
        """Samples on device 0 at which it ran out of memory."""
        self._saved_plan = saved_plan

    @property
    def current(self) -> tuple[int, ...] | None:
        """Samples of a full batch for each device; None where there is nothing to divide."""
        return None if self._network is None else self._network.plan(self.batch_size)

    def judge(
        self, changes: Mapping[str, Any], total_mib: Sequence[float | None]
    ) -> tuple[SplitVerdict, dict[str, Any]]:
        """What a wish would do, and the changes of the settings that it comes to.

        Args:
            changes: `gpu0_bsz` (a number, None or "auto") or `shares`.
            total_mib: what each device has for this run.
        """
        if self._network is None:
            return self._nothing_to_divide(), dict(changes)
        num_devices, wish = len(self._network.devices), changes.get("gpu0_bsz")
        fit = fit_memory(MemoryObservation(split, peaks) for split, peaks in self._observed.items())
        if wish == "auto":
            rest = {name: value for name, value in changes.items() if name not in _SPLIT_SETTINGS}
            return self._judge_auto(total_mib), {**rest, **AUTO_ON}
        verdict = split_verdict(
            self.batch_size,
            num_devices,
            wish,
            shares=changes.get("shares"),
            current=self.current,
            total_mib=total_mib,
            fit=fit,
            ceiling=self.ceiling,
            sync_bn=self._smallest_chunk == 1,
            smallest_chunk=self._smallest_chunk,
        )
        return verdict, dict(changes)

    def _judge_auto(self, total_mib: Sequence[float | None]) -> SplitVerdict:
        if total_mib and None not in total_mib:
            return SplitVerdict(self.current, "ok", "the split follows the measured memory", is_allowed=True)
        reason = "auto needs to know what each device has, and devices that share one memory do not say: name a number"
        return SplitVerdict(None, "refused", f"{reason}, or set parallel.memory_budget_mib", is_allowed=False)

    def auto_move(self, total_mib: Sequence[float | None]) -> SplitMove | None:
        """The move of `auto` at the boundary of an epoch; None where none is worth it.

        Args:
            total_mib: what each device has for this run.
        """
        if self._network is None or self.current is None:
            return None
        return plan_move(
            self.batch_size,
            self.current,
            self._observed,
            total_mib,
            assumed_slope_mib=None if self._saved_plan is None else self._saved_plan.slope_mib,
            failed=self._failed,
            ceiling=self.ceiling,
            smallest_chunk=self._smallest_chunk,
        )

    def predicted_mib(self) -> tuple[float | None, ...]:
        """What is predicted for the split in force: from what was measured, else from the plan; empty: nothing."""
        if self.current is None:
            return () if self._saved_plan is None else self._saved_plan.predicted_mib(None)
        if self._observed:
            fit = fit_memory(MemoryObservation(split, peaks) for split, peaks in self._observed.items())
            return fit.predict(self.current)
        return () if self._saved_plan is None else self._saved_plan.predicted_mib(self.current)

    def record_failure(self, split: Sequence[int], old: Sequence[int]) -> None:
        """Remembers that a split ran out of memory after one that did not."""
        self._failed.add(tuple(split))
        if split[0] > old[0]:
            self.ceiling = min(split[0], self.ceiling or split[0])

    def clear_peaks(self) -> None:
        """Forgets what was measured: steps are made in another way from now on."""
        self._observed.clear()

    def state_dict(self) -> dict[str, Any]:
        """What was measured, as plain values."""
        return {
            "observed": [[list(split), list(peaks)] for split, peaks in self._observed.items()],
            "failed": [list(split) for split in sorted(self._failed)],
            "ceiling": self.ceiling,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave; what was measured on another number of devices is left out."""
        num_devices = len(self.current or ())
        self._observed = {tuple(s): tuple(p) for s, p in state.get("observed", ()) if len(s) == num_devices}
        self._failed = {tuple(split) for split in state.get("failed", ()) if len(split) == num_devices}
        self.ceiling = state.get("ceiling")

    def apply(self, settings: LiveSettings) -> bool:
        """Divides the batches from now on as the settings say.

        Returns:
            Whether they could: settings of another machine may name a split that is impossible here.
        """
        if self._network is None:
            return settings.shares is None
        network = self._network
        verdict, _ = self.judge({"gpu0_bsz": settings.gpu0_bsz, "shares": settings.shares}, ())
        if not verdict.is_possible:
            return False
        network.shares = None if settings.shares is None else list(settings.shares)
        network.full_batch = None if settings.shares is not None else self.batch_size
        network.gpu0_bsz = None if settings.shares is not None else settings.gpu0_bsz
        return True

    def record_peaks(self, split: Sequence[int], peaks_mib: Sequence[float | None]) -> None:
        """Remembers the peaks that a split was seen to have, for later predictions."""
        known = self._observed.get(tuple(split), (None,) * len(split))
        pairs = zip(known, peaks_mib, strict=False)
        self._observed[tuple(split)] = tuple(
            new if old is None else old if new is None else max(old, new) for old, new in pairs
        )

    def _nothing_to_divide(self) -> SplitVerdict:
        what = {
            "ddp": "parallel.mode = ddp: every rank has a device of its own, with an even part of the batch",
            "model": "parallel.mode = model: every device has the whole batch",
        }.get(self.mode, "there is one device: it takes the whole batch")
        return SplitVerdict(None, "refused", f"{what}: gpu0_bsz and shares are for parallel.mode = dp", False)
