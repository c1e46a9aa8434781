"""Splits and batches that fit given GPUs, from the affine memory model and the judge of splits.

A GPU must hold the tensors, the driver's context and some spare memory for the allocator. A split fits if
`segapp.memory.judge` would allow it in a running training. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from segapp.memory.affine import MemoryModel
from segapp.memory.gpu_specs import GpuSpec
from segapp.memory.judge import FULL_FRAC, Level, SplitJudge, SplitVerdict
from segapp.memory.peaks import PeakModel, Split
from segapp.parallel.chunks import check_split

CONTEXT_MIB = 500.0
"""Memory of a process on a GPU before its first tensor: 300 to 1000 MiB, by driver, GPU and libraries."""

NCCL_MIB = 200.0
"""Memory of NCCL's buffers on each of several GPUs, assumed: 4 MiB for each channel and direction, 25 channels."""

LARGEST_BATCH = 4096


def context_mib(mode: str, num_gpus: int, *, driver_mib: float = CONTEXT_MIB) -> tuple[float, ...]:
    """Return the assumed memory of driver and libraries on each GPU.

    Args:
        mode: dp and ddp send weights and gradients between GPUs through NCCL.
        num_gpus: number of GPUs.
        driver_mib: of the driver and torch's own libraries; 0 where the GPUs' memory is already net of them.
    """
    nccl_mib = NCCL_MIB if mode in ("dp", "ddp") and num_gpus > 1 else 0.0
    return (driver_mib + nccl_mib,) * num_gpus


@dataclass(frozen=True)
class OverheadEstimate:
    """Memory of each GPU that no simulation covers.

    Attributes:
        context_mib: driver, libraries and other processes, for each GPU.
        room: share of the rest for tensors, 0 to 1; the allocator's rounding and fragments take the other part.
        scale: measured over predicted memory of tensors, for each GPU; empty or 1 where nothing was measured.
        source: origin of the numbers: "assumed" or "measured".
    """

    context_mib: tuple[float, ...]
    room: float = FULL_FRAC
    scale: tuple[float, ...] = ()
    source: str = "assumed"

    def tensors_mib(self, device: int, simulated_mib: float) -> float:
        """Return the expected peak of `torch.cuda.max_memory_allocated` on a GPU, from the simulated one."""
        return simulated_mib * (self.scale[device] if device < len(self.scale) else 1.0)

    def required_mib(self, device: int, tensors_mib: float) -> float:
        """Return the memory a GPU needs for so much memory of tensors."""
        return self.context_mib[device] + tensors_mib / self.room


@dataclass(frozen=True)
class PlanRow:
    """One split of a batch and its predicted memory.

    Attributes:
        gpu0_bsz: value that gives the split; None where the mode has none.
        split: samples per device.
        peak_mib: memory each GPU needs, overhead included.
        tensors_mib: predicted peak of the tensors alone.
        phase: the phase with the highest peak, for each GPU.
        phases: peak of the tensors in each phase, for each GPU.
        fits: True if every GPU has enough memory.
        word: level of the verdict.
        reason: of the verdict, in one sentence.
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
        """Return needed over available memory of the fullest GPU."""
        return max(mib / gpu.total_mib for mib, gpu in zip(self.peak_mib, gpus, strict=True))


@dataclass(frozen=True)
class Advice:
    """A change that reduces memory.

    Attributes:
        change: the text for the config or the command line.
        gain_mib: memory it saves on the fullest GPU.
        peak_mib: memory the fullest GPU needs with it.
        fits: True if every GPU then has enough memory.
        note: its other effects.
        in_use: True if the plan has the change already.
    """

    change: str
    gain_mib: float
    peak_mib: float
    fits: bool
    note: str
    in_use: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """Result of `segapp plan`; `segapp.memory.report` prints it."""

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
    """`parallel.shares` of a larger batch than any `gpu0_bsz` allows, on unequal GPUs."""
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> PlanRow:
        """The split whose fullest GPU has the most free memory."""
        return min(self.rows, key=lambda row: (round(row.fullest(self.gpus), 4), -(row.gpu0_bsz or 0)))


class Planner:
    """Predicts the memory of every split of a batch on given GPUs.

    Args:
        model: predicts the peaks of the tensors.
        gpus: one for each device.
        overhead: memory on top of the tensors.
        smallest_chunk: least samples on a device that has any.
        needs_samples: why no rank of ddp can be left without samples; None if one can.
    """

    def __init__(
        self,
        model: MemoryModel,
        gpus: Sequence[GpuSpec],
        overhead: OverheadEstimate,
        smallest_chunk: int = 1,
        needs_samples: str | None = None,
    ) -> None:
        self.model, self.gpus, self.overhead = model, tuple(gpus), overhead
        self.smallest_chunk, self.needs_samples = smallest_chunk, needs_samples

    @property
    def has_split(self) -> bool:
        """True if the batch can be divided in several ways."""
        return self.model.mode in ("dp", "ddp")

    def rows(self, batch_size: int) -> tuple[tuple[PlanRow, ...], tuple[tuple[int, str], ...]]:
        """Return every possible split of a batch, and the refused values of `gpu0_bsz` with the reasons.

        Modes without a split have one row; if the batch is too small for BatchNorm, `batch_size` is refused instead.
        """
        if not self.has_split:
            found = self._evaluate(batch_size, None)
            return ((), ((batch_size, found),)) if isinstance(found, str) else ((found,), ())
        rows, refused = [], []
        for gpu0_bsz in range(batch_size + 1):
            found = self._evaluate(batch_size, gpu0_bsz)
            if isinstance(found, str):
                refused.append((gpu0_bsz, found))
            else:
                rows.append(found)
        return tuple(rows), tuple(refused)

    def row(self, batch_size: int, gpu0_bsz: int | None = None, shares: Sequence[int] | None = None) -> PlanRow:
        """Return one split of a batch.

        Args:
            batch_size: samples of a full batch.
            gpu0_bsz: samples on device 0; None: an even split.
            shares: samples on each device, in place of `gpu0_bsz`.

        Raises:
            ValueError: the split is not possible.
        """
        found = self._evaluate(batch_size, gpu0_bsz, shares)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def largest_batch(self) -> tuple[int, PlanRow | None]:
        """Return the largest batch with a split that fits, and that split; 0 and None if no batch fits."""
        # The smallest batches may be refused for other reasons: a rank of ddp needs a sample, BatchNorm may need two.
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
        """Return the number of samples each GPU can hold, independent of the other GPUs."""
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

    def _evaluate(self, batch_size: int, gpu0_bsz: int | None, shares: Sequence[int] | None = None) -> PlanRow | str:
        split = self._split(batch_size, gpu0_bsz, shares)
        if isinstance(split, str):
            return split
        phases = self.model.phases(split)
        tensors = tuple(
            self.overhead.tensors_mib(i, max(found.values(), default=0.0)) for i, found in enumerate(phases)
        )
        return self._row(gpu0_bsz, split, tensors, phases, self._verdict(split, tensors))

    def judge(self, batch_size: int) -> SplitJudge:
        """Return what decides about the splits of a batch."""
        return SplitJudge(
            batch_size,
            len(self.gpus),
            mode=self.model.mode,
            smallest_chunk=self.smallest_chunk,
            needs_samples=self.needs_samples,
            usable_mib=[
                gpu.total_mib - context for gpu, context in zip(self.gpus, self.overhead.context_mib, strict=True)
            ],
        )

    def _split(self, batch_size: int, gpu0_bsz: int | None, shares: Sequence[int] | None) -> Split | str:
        """Return the split of a request, or why it is refused; a mode without a split has the whole batch first."""
        judge = self.judge(batch_size)
        if self.has_split or gpu0_bsz is not None or shares is not None:
            verdict = judge.verdict(gpu0_bsz, shares)
            return verdict.reason if verdict.split is None else verdict.split
        check = check_split(batch_size, 1, smallest_chunk=self.smallest_chunk)
        return check.reasons[0] if check.split is None else (batch_size, *[0] * (len(self.gpus) - 1))

    def _verdict(self, split: Sequence[int], tensors_mib: Sequence[float]) -> SplitVerdict:
        judge = self.judge(sum(split))
        too_small = [i for i, mib in enumerate(judge.usable_mib) if mib is not None and mib <= 0]
        if too_small:
            reason = f"device {too_small[0]} has less memory than the driver's context needs"
            return SplitVerdict(tuple(split), "won't fit", reason, tuple(tensors_mib))
        known = replace(judge, peaks=PeakModel({tuple(split): tuple(tensors_mib)}))
        if self.has_split:
            return known.verdict(None, split)
        level, reason = known.fit_of(split)
        return SplitVerdict(tuple(split), level, reason, tuple(tensors_mib))

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
    """Return the plan as plain values for JSON; other programs read `rows`, `best` and `max_batch`."""

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
