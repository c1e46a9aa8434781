"""How a batch is divided over the devices of one process, as something that can be changed while a run is going on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from segapp.config import LiveSettings
from segapp.parallel import DataParallelModel
from segapp.run.verdict import MemoryObservation, SplitVerdict, best_gpu0_bsz, fit_memory, split_verdict

_SPLIT_SETTINGS = ("gpu0_bsz", "shares")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or this machine, had no more memory to give."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):  # a replica's is one of torch's
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def with_split(settings: LiveSettings, changes: Mapping[str, Any]) -> LiveSettings:
    """Settings with some replaced; `gpu0_bsz` and `shares` replace each other."""
    if any(name in changes for name in _SPLIT_SETTINGS):
        changes = {"gpu0_bsz": None, "shares": None, **changes}
    return settings.model_copy(update=dict(changes))


class SplitKnob:
    """The shares of the devices.

    Args:
        network: what runs the batches; only a `DataParallelModel` over two devices or more has shares.
        batch_size: samples of a full batch.
        mode: of the training, for what is said where there is nothing to divide.
        smallest_chunk: samples that a busy device needs (BatchNorm that is not synchronised).
    """

    def __init__(self, network: nn.Module, batch_size: int, mode: str, smallest_chunk: int = 1) -> None:
        self._network = network if isinstance(network, DataParallelModel) and len(network.devices) > 1 else None
        self.batch_size, self.mode = batch_size, mode
        self._smallest_chunk = smallest_chunk
        self._observed: dict[tuple[int, ...], tuple[float | None, ...]] = {}
        self.ceiling: int | None = None
        """Samples on device 0 at which it ran out of memory."""

    @property
    def current(self) -> tuple[int, ...] | None:
        """Samples of a full batch for each device; None where there is nothing to divide."""
        return None if self._network is None else self._network.plan(self.batch_size)

    def judge(
        self, changes: Mapping[str, Any], total_mib: Sequence[float | None]
    ) -> tuple[SplitVerdict, dict[str, Any]]:
        """What a wish would do, and the wish with `auto` replaced by its number.

        Args:
            changes: `gpu0_bsz` (a number, None or "auto") or `shares`.
            total_mib: what each device has for this run.
        """
        if self._network is None:
            return self._nothing_to_divide(), dict(changes)
        num_devices, wish = len(self._network.devices), changes.get("gpu0_bsz")
        fit = fit_memory(MemoryObservation(split, peaks) for split, peaks in self._observed.items())
        if wish == "auto":
            best = best_gpu0_bsz(self.batch_size, num_devices, fit, total_mib)
            if best is None:
                reason = "auto needs the memory of two different splits to go by: name a number"
                return SplitVerdict(None, "refused", reason, is_allowed=False), dict(changes)
            wish = best[0]
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
        return verdict, {**changes, "gpu0_bsz": wish} if "gpu0_bsz" in changes else dict(changes)

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

    def note_peaks(self, split: Sequence[int], peaks_mib: Sequence[float | None]) -> None:
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
