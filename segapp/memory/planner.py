"""Which splits and batches fit which GPUs: arithmetic over the affine model, and the run's one judge of a split.

A gpu must hold the tensors, the driver's context, and some room for the allocator: a split *fits* where
`segapp.run.verdict` would allow it in a run that is going on. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from segapp.memory.affine import MemoryModel
from segapp.memory.gpu_specs import GpuSpec
from segapp.run.verdict import FULL_FRAC, Level, SplitFacts, SplitVerdict, split_verdict

CONTEXT_MIB = 500.0
"""What a process takes of a GPU before its first tensor: 300 to 1000 MiB by driver, GPU and libraries."""

LARGEST_BATCH = 4096


@dataclass(frozen=True)
class OverheadEstimate:
    """What no simulation knows, per GPU.

    Attributes:
        context_mib: driver, libraries and other processes, for each GPU.
        room: share of the rest that tensors may take; what is left is for the allocator's rounding and fragments.
        scale: measured over predicted tensors, for each GPU; 1 where nothing was measured.
        source: where the numbers come from.
    """

    context_mib: tuple[float, ...]
    room: float = FULL_FRAC
    scale: tuple[float, ...] = ()
    source: str = "assumed"

    def tensors_mib(self, device: int, simulated_mib: float) -> float:
        """Bytes of tensors that a GPU will hold, as `torch.cuda.max_memory_allocated` counts them."""
        return simulated_mib * (self.scale[device] if device < len(self.scale) else 1.0)

    def required_mib(self, device: int, tensors_mib: float) -> float:
        """What the GPU must have."""
        return self.context_mib[device] + tensors_mib / self.room


@dataclass(frozen=True)
class PlanRow:
    """One split.

    Attributes:
        gpu0_bsz: that leads to it; None where the mode has none.
        split: samples per device.
        peak_mib: what each GPU must have, overhead included.
        tensors_mib: predicted peak of the tensors alone.
        phase: which phase sets each GPU's peak.
        phases: for each GPU the tensors' peak in each phase.
        fits: whether every GPU has that much.
        word: the verdict.
        reason: and why.
    """

    gpu0_bsz: int | None
    split: tuple[int, ...]
    peak_mib: tuple[float, ...]
    tensors_mib: tuple[float, ...]
    phase: tuple[str, ...]
    phases: tuple[dict[str, float], ...]
    fits: bool
    word: Level
    reason: str

    def fullest(self, gpus: Sequence[GpuSpec]) -> float:
        """Need over memory of the fullest GPU."""
        return max(mib / gpu.total_mib for mib, gpu in zip(self.peak_mib, gpus, strict=True))


@dataclass(frozen=True)
class Advice:
    """A change that needs less memory.

    Attributes:
        change: what to write into the config, or on the command line.
        gain_mib: what the fullest GPU saves; 0 where it is in use already.
        peak_mib: what the fullest GPU would need then.
        fits: whether that fits.
        note: what else it changes.
        in_use: whether the plan has it already; then `gain_mib` is what it saves.
    """

    change: str
    gain_mib: float
    peak_mib: float
    fits: bool
    note: str
    in_use: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """What `segapp plan` says; see `report` for its faces."""

    name: str
    mode: str
    batch_size: int
    gpus: tuple[GpuSpec, ...]
    model: MemoryModel
    overhead: OverheadEstimate
    rows: tuple[PlanRow, ...]
    refused: tuple[tuple[int, str], ...] = ()
    current: PlanRow | None = None
    max_batch: int = 0
    max_row: PlanRow | None = None
    shares: tuple[int, ...] | None = None
    """Shares of a larger batch than any `gpu0_bsz` allows, on unequal GPUs."""
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> PlanRow:
        """The split whose fullest GPU has the most room."""
        return min(self.rows, key=lambda row: (round(row.fullest(self.gpus), 4), -(row.gpu0_bsz or 0)))


class Planner:
    """Judges splits of any batch on given GPUs.

    Args:
        model: predicts the tensors.
        gpus: the GPUs.
        overhead: what comes on top.
        smallest_chunk: samples that a busy device needs.
    """

    def __init__(
        self, model: MemoryModel, gpus: Sequence[GpuSpec], overhead: OverheadEstimate, smallest_chunk: int = 1
    ) -> None:
        self.model, self.gpus, self.overhead = model, tuple(gpus), overhead
        self.smallest_chunk = smallest_chunk

    def rows(self, batch_size: int) -> tuple[tuple[PlanRow, ...], tuple[tuple[int, str], ...]]:
        """Every possible split of a batch, and the refused values of `gpu0_bsz` with the reasons."""
        if self.model.mode != "dp":
            return (self.row(batch_size),), ()
        rows, refused = [], []
        for gpu0_bsz in range(batch_size + 1):
            found = self._judge(batch_size, gpu0_bsz)
            if isinstance(found, str):
                refused.append((gpu0_bsz, found))
            else:
                rows.append(found)
        return tuple(rows), tuple(refused)

    def row(self, batch_size: int, gpu0_bsz: int | None = None, shares: Sequence[int] | None = None) -> PlanRow:
        """One split.

        Raises:
            ValueError: no split can honour the wish.
        """
        found = self._judge(batch_size, gpu0_bsz, shares)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def largest_batch(self) -> tuple[int, PlanRow | None]:
        """The largest batch that some split fits, with that split; 0 where none does."""
        # The least batches may be refused for other reasons: every rank of ddp needs a sample, BatchNorm may need two.
        least = 2 * len(self.gpus)
        low = next((batch for batch in range(1, least + 1) if self._best_fit(batch) is not None), 0)
        high = 2 * low
        while low and high <= LARGEST_BATCH and self._best_fit(high) is not None:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._best_fit(middle) is not None else (low, middle)
        return low, self._best_fit(low) if low else None

    def largest_shares(self) -> tuple[int, ...]:
        """As many samples on each GPU as it can hold, whatever the others hold."""
        shares = []
        for i in range(len(self.gpus)):
            count = 0
            while count < LARGEST_BATCH and self._fits_alone(i, count + 1):
                count += 1
            shares.append(count)
        return tuple(shares)

    def _fits_alone(self, device: int, samples: int) -> bool:
        split = [0] * len(self.gpus)
        split[device] = samples
        tensors = self.overhead.tensors_mib(device, self.model.peak_mib(split)[device])
        return self.overhead.required_mib(device, tensors) <= self.gpus[device].total_mib

    def _best_fit(self, batch_size: int) -> PlanRow | None:
        if self.model.mode == "ddp" and batch_size < len(self.gpus):
            return None
        fitting = [row for row in self.rows(batch_size)[0] if row.fits]
        return min(fitting, key=lambda row: row.fullest(self.gpus), default=None)

    def _judge(self, batch_size: int, gpu0_bsz: int | None, shares: Sequence[int] | None = None) -> PlanRow | str:
        num_devices = len(self.gpus)
        if self.model.mode == "ddp":
            each, left_over = divmod(batch_size, num_devices)
            shares = [each + (rank < left_over) for rank in range(num_devices)]
        num_shares = num_devices if self.model.mode != "model" else 1
        check = split_verdict(SplitFacts(batch_size, num_shares, smallest_chunk=self.smallest_chunk), gpu0_bsz, shares)
        if check.split is None:
            return check.reason
        split = check.split if self.model.mode != "model" else (batch_size, *[0] * (num_devices - 1))
        phases = self.model.phases(split)
        tensors = tuple(
            self.overhead.tensors_mib(i, max(found.values(), default=0.0)) for i, found in enumerate(phases)
        )
        return self._row(gpu0_bsz, split, tensors, phases, self._verdict(split, tensors))

    def _verdict(self, split: Sequence[int], tensors_mib: Sequence[float]) -> SplitVerdict:
        usable = [gpu.total_mib - context for gpu, context in zip(self.gpus, self.overhead.context_mib, strict=True)]
        too_small = [i for i, mib in enumerate(usable) if mib <= 0]
        if too_small:
            reason = f"device {too_small[0]} has less memory than the driver's context takes"
            return SplitVerdict(tuple(split), "won't fit", reason, tuple(tensors_mib))
        facts = SplitFacts(sum(split), len(split), usable_mib=usable)
        return split_verdict(facts, None, split, predicted_mib=tensors_mib)

    def _row(
        self,
        gpu0_bsz: int | None,
        split: Sequence[int],
        tensors: Sequence[float],
        phases: Sequence[dict[str, float]],
        verdict: SplitVerdict,
    ) -> PlanRow:
        return PlanRow(
            gpu0_bsz=gpu0_bsz,
            split=tuple(split),
            peak_mib=tuple(round(self.overhead.required_mib(i, mib), 1) for i, mib in enumerate(tensors)),
            tensors_mib=tuple(round(mib, 1) for mib in tensors),
            phase=tuple(max(found, key=lambda phase: found[phase]) if found else "idle" for found in phases),
            phases=tuple({phase: round(mib, 1) for phase, mib in found.items()} for found in phases),
            fits=verdict.is_allowed,
            word=verdict.level,
            reason=verdict.reason,
        )


def plan_as_json(plan: MemoryPlan) -> dict[str, Any]:
    """The plan as plain values; `rows`, `best` and `max_batch` are what other programs read."""

    def row(found: PlanRow | None) -> dict[str, Any] | None:
        return None if found is None else asdict(found)

    return {
        "name": plan.name,
        "mode": plan.mode,
        "batch_size": plan.batch_size,
        "gpus_mib": [gpu.total_mib for gpu in plan.gpus],
        "allowance": asdict(plan.overhead),
        "rows": [row(found) for found in plan.rows],
        "refused": [{"gpu0_bsz": value, "reason": reason} for value, reason in plan.refused],
        "current": row(plan.current),
        "best": row(plan.best),
        "max_batch": plan.max_batch,
        "max_batch_row": row(plan.max_row),
        "max_batch_shares": plan.shares,
        "advice": [asdict(advice) for advice in plan.advice],
        "notes": list(plan.notes),
        **plan.facts,
    }
