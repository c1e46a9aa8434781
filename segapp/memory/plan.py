"""The memory plan: splits and batches that fit given GPUs, and the part that a run saves.

A GPU must hold the tensors, the driver's context and some spare memory for the allocator. Peaks come from the simulated
lines of `segapp.memory.peaks`, and `segapp.memory.split_check` decides if a split fits, as in a running training. No
torch here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from segapp.chunks import EVEN, SplitRequest, check_split
from segapp.memory.peaks import BlocksPerDevice, NetworkFacts, PeakModel, PlannedPeaks
from segapp.memory.split_check import FULL_FRAC, Level, SplitChecker, fits
from segapp.run.files import read_of_run, write_atomic

CONTEXT_MIB = 500.0
"""Memory of a process on a GPU before its first tensor: 300 to 1000 MiB, depending on driver, GPU and libraries."""

NCCL_MIB = 200.0
"""Assumed memory of NCCL's buffers on the GPU of each rank: 4 MiB per channel and direction, 25 channels."""

BLAS_MIB = 32.0
"""Workspace of cuBLAS for each thread on an unknown GPU, 32 MiB as on Hopper and Blackwell; others have 8 MiB
(`parseChosenWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp)."""

LARGEST_BATCH = 4096

_SAVED_FORMAT = 1


@dataclass(frozen=True)
class GpuSpec:
    """Memory of one GPU, as nvidia-smi reports it, and its name in reports."""

    total_mib: float
    name: str = ""


def context_mib(mode: str, num_gpus: int, *, driver_mib: float = CONTEXT_MIB) -> tuple[float, ...]:
    """Return the assumed memory of driver and libraries on each GPU.

    In ddp, ranks communicate with NCCL. `driver_mib` is 0 if the GPUs' memory is given without the driver's.
    """
    shared_mib = NCCL_MIB if mode == "ddp" and num_gpus > 1 else 0.0
    return (driver_mib + shared_mib,) * num_gpus


@dataclass(frozen=True)
class OverheadEstimate:
    """Memory of each GPU that simulations do not include."""

    context_mib: tuple[float, ...]
    """Driver, libraries and other processes."""
    tensor_frac: float = FULL_FRAC
    """Share of the rest for tensors, 0 to 1; the remainder is for the allocator's rounding and fragments."""

    def required_mib(self, tensors_mib: Sequence[float]) -> tuple[float, ...]:
        each_gpu = zip(self.context_mib, tensors_mib, strict=True)
        return tuple(context_mib + mib / self.tensor_frac for context_mib, mib in each_gpu)


@dataclass(frozen=True)
class PlanRow:
    """One split of a batch, its predicted memory, and if that fits."""

    gpu0_bsz: int | None
    """gpu0_bsz; None if the mode has none."""
    split: tuple[int, ...]
    peak_mib: tuple[float, ...]
    """Memory that each GPU needs, overhead included."""
    tensors_mib: tuple[float, ...]
    """Predicted peak of the tensors only."""
    phase: tuple[str, ...]
    """Phase of each GPU's peak; `idle` if it has none."""
    phases: tuple[dict[str, float], ...]
    """Peak of the tensors in each phase, for each GPU."""
    fits: bool
    level: Level
    reason: str

    def fullest(self, gpus: Sequence[GpuSpec]) -> float:
        return max(mib / gpu.total_mib for mib, gpu in zip(self.peak_mib, gpus, strict=True))

    def rank(self, gpus: Sequence[GpuSpec]) -> tuple[float, int]:
        """Return the key by which splits are sorted: first the one whose fullest GPU has the most free memory."""
        return round(self.fullest(gpus), 4), -(self.gpu0_bsz or 0)


@dataclass(frozen=True)
class Fit:
    """A split with recomputed blocks, and the memory that its simulated step needs."""

    split: tuple[int, ...]
    blocks_per_device: BlocksPerDevice
    peak_mib: tuple[float, ...]
    """Memory that each GPU needs, overhead included."""
    fitting: tuple[bool, ...]
    """For each GPU, if it has as much."""

    @property
    def fits(self) -> bool:
        return all(self.fitting)

    @property
    def note(self) -> str:
        counts = "/".join(str(len(names)) for names in self.blocks_per_device)
        return f"train.recompute = auto: the memory plan chose {counts} blocks to recompute"


@dataclass(frozen=True)
class MemoryPlan:
    """Result of `segapp plan`; `segapp.commands.plan` prints it."""

    name: str
    mode: str
    batch_size: int
    gpus: tuple[GpuSpec, ...]
    model: PlannedPeaks
    overhead: OverheadEstimate
    rows: tuple[PlanRow, ...]
    refused: tuple[tuple[int, str], ...] = ()
    current: PlanRow | None = None
    max_batch: int = 0
    max_row: PlanRow | None = None
    notes: tuple[str, ...] = ()
    ring_mib: float = 0.0
    """Host memory of the ring of shared batches, of all ranks of a machine together; 0 without data workers."""
    network: NetworkFacts | None = None
    chosen: Fit | None = None
    """With `train.recompute: auto`: the blocks that `model` recomputes, and the split that they were chosen for."""

    @property
    def best(self) -> PlanRow:
        """The split whose fullest GPU has the most free memory, or for which the recomputed blocks were chosen."""
        if self.chosen is not None and self.current is None:
            return next(row for row in self.rows if row.split == self.chosen.split)
        return min(self.rows, key=lambda row: row.rank(self.gpus))


@dataclass(frozen=True)
class Planner:
    """Predicts the memory of every split of a batch on given GPUs."""

    model: PlannedPeaks
    gpus: tuple[GpuSpec, ...]
    overhead: OverheadEstimate
    smallest_chunk: int = 1
    needs_samples: str | None = None

    @property
    def has_split(self) -> bool:
        return self.model.mode in ("dp", "ddp")

    def fitting(self, tensors_mib: Sequence[float]) -> tuple[bool, ...]:
        contexts, frac = self.overhead.context_mib, self.overhead.tensor_frac
        each_gpu = zip(tensors_mib, self.gpus, contexts, strict=True)
        return tuple(fits(mib, gpu.total_mib - context_mib, frac) for mib, gpu, context_mib in each_gpu)

    def rows(self, batch_size: int) -> tuple[tuple[PlanRow, ...], tuple[tuple[int, str], ...]]:
        """Return every possible split of a batch, and the refused values of `gpu0_bsz` with the reasons.

        Modes without a split have one row; if the batch is too small for BatchNorm, `batch_size` is refused instead.
        """
        checker = self.checker(batch_size)
        requests = {value: SplitRequest(value) for value in range(batch_size + 1)}
        results = {value: self._evaluate(checker, request) for value, request in requests.items()}
        if not self.has_split:
            results = {batch_size: self._evaluate(checker, EVEN)}
        rows = tuple(row for row in results.values() if not isinstance(row, str))
        return rows, tuple((value, reason) for value, reason in results.items() if isinstance(reason, str))

    def row(self, batch_size: int, request: SplitRequest = EVEN) -> PlanRow | None:
        """Return one split of a batch; None if it is not possible."""
        row = self._evaluate(self.checker(batch_size), request)
        return None if isinstance(row, str) else row

    def largest_batch(self) -> tuple[int, PlanRow | None]:
        """Return the largest batch with a split that fits, and that split; 0 and None if no batch fits."""
        # The smallest batches may be refused for other reasons: a rank of ddp needs a sample, BatchNorm may need two.
        least = 2 * len(self.gpus)
        low = next((batch for batch in range(1, least + 1) if self._best_fit(batch) is not None), 0)
        high = 2 * low
        while low and high <= LARGEST_BATCH and self._best_fit(high) is not None:
            low, high = high, 2 * high
        high = min(high, LARGEST_BATCH + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._best_fit(middle) is not None else (low, middle)
        return low, self._best_fit(low) if low else None

    def _best_fit(self, batch_size: int) -> PlanRow | None:
        if self.model.mode == "ddp" and batch_size < len(self.gpus):
            return None
        fitting = [row for row in self.rows(batch_size)[0] if row.fits]
        return min(fitting, key=lambda row: row.fullest(self.gpus), default=None)

    def checker(self, batch_size: int) -> SplitChecker:
        usable = (gpu.total_mib - context for gpu, context in zip(self.gpus, self.overhead.context_mib, strict=True))
        return SplitChecker(
            batch_size,
            len(self.gpus),
            mode=self.model.mode,
            smallest_chunk=self.smallest_chunk,
            needs_samples=self.needs_samples,
            usable_mib=tuple(usable),
            peaks=PeakModel(planned=self.model),
            tensor_frac=self.overhead.tensor_frac,
        )

    def _evaluate(self, checker: SplitChecker, request: SplitRequest) -> PlanRow | str:
        """Return the row of a split, or why it is refused; modes without a split have the whole batch first."""
        if self.has_split:
            checked = checker.check(request)
            if checked.split is None:
                return checked.reason
            return self._row(request.gpu0_bsz, checked.split, checked.level, checked.reason)
        split, reason = check_split(None, checker.batch_size, 1, self.smallest_chunk)
        if split is None:
            return reason
        split = (checker.batch_size, *[0] * (len(self.gpus) - 1))
        return self._row(None, split, *checker.fit_of(split))

    def _row(self, gpu0_bsz: int | None, split: Sequence[int], level: Level, reason: str) -> PlanRow:
        phases = self.model.phase_mib(split)
        tensors = [max(peaks.values(), default=0.0) for peaks in phases]
        return PlanRow(
            gpu0_bsz=gpu0_bsz,
            split=tuple(split),
            peak_mib=tuple(round(mib, 1) for mib in self.overhead.required_mib(tensors)),
            tensors_mib=tuple(round(mib, 1) for mib in tensors),
            phase=tuple(max(peaks, key=lambda phase: peaks[phase]) if peaks else "idle" for peaks in phases),
            phases=tuple({phase: round(mib, 1) for phase, mib in peaks.items()} for peaks in phases),
            fits=level in ("ok", "tight"),
            level=level,
            reason=reason,
        )


@dataclass(frozen=True)
class SavedMemoryPlan:
    """The part of a plan that resumes and reports need."""

    batch_size: int
    accumulate: int
    gpu0_bsz: int | None
    """gpu0_bsz of the best split; None if the mode has none."""
    best_split: tuple[int, ...]
    """Split of the best `gpu0_bsz` if it is auto, else of the config."""
    splits: tuple[tuple[int, ...], ...]
    tensors_mib: tuple[tuple[float, ...], ...]
    slope_mib: float
    """Memory that one more sample adds to a device."""
    notes: tuple[str, ...] = ()
    """Sentences on how the batch was found."""
    recompute: BlocksPerDevice | None = None
    """With `train.recompute: auto`: the recomputed blocks."""

    @property
    def request(self) -> SplitRequest:
        """The split that an automatic one begins with."""
        return SplitRequest(self.gpu0_bsz)

    def without_splits(self) -> SavedMemoryPlan:
        return replace(self, gpu0_bsz=None, splits=(), tensors_mib=())

    def predicted_mib(
        self, split: Sequence[int] | None, *, has_own_blocks: bool = True, is_shared: bool = False
    ) -> tuple[float | None, ...]:
        """Return the predicted peak of each device under a split; empty if the plan does not have the split.

        The split is None in a mode that has only one. The plan says nothing if other blocks are recomputed than its own
        (`has_own_blocks`), or of logical devices, which share one memory (`is_shared`).
        """
        if is_shared or not has_own_blocks:
            return ()
        if split is None:
            return self.tensors_mib[0] if len(self.tensors_mib) == 1 else ()
        return dict(zip(self.splits, self.tensors_mib, strict=True)).get(tuple(split), ())

    @classmethod
    def of_plan(cls, plan: MemoryPlan, accumulate: int, notes: Sequence[str] = ()) -> SavedMemoryPlan:
        row = plan.current or plan.best
        many = plan.batch_size + 8  # a batch at which the activations determine the peak
        shape = (0,) * (len(plan.gpus) - 1) if plan.mode in ("dp", "model") else ()
        chosen = plan.chosen
        low, high = (plan.model.peak_mib((count, *shape))[0] for count in (many, many + 8))
        return cls(
            plan.batch_size,
            accumulate,
            plan.best.gpu0_bsz,
            row.split,
            tuple(row.split for row in plan.rows),
            tuple(row.tensors_mib for row in plan.rows),
            max(0.0, (high - low) / 8),
            tuple(notes) if chosen is None else (*notes, chosen.note),
            None if chosen is None else chosen.blocks_per_device,
        )

    def write(self, path: Path) -> None:
        write_atomic(path, json.dumps({"format": _SAVED_FORMAT, **asdict(self)}, indent=1) + "\n")


def read_saved_plan(path: Path) -> SavedMemoryPlan | None:
    """Return the plan in a file; None if it is missing or cannot be read."""
    try:
        raw = json.loads(read_of_run(path))
        return TypeAdapter(SavedMemoryPlan).validate_python(raw) if raw["format"] == _SAVED_FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
