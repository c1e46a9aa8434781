"""Memory plan at the start of a run, stored in its folder: the resolved `auto` values and the predicted peaks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from segapp.memory.planner import MemoryPlan
from segapp.run.files import write_atomic

FORMAT = 1


@dataclass(frozen=True)
class SavedMemoryPlan:
    """The part of a plan that resumes and reports need.

    Attributes:
        batch_size: planned images of a micro-batch.
        accumulate: micro-batches per step.
        gpu0_bsz: of the best split; None where the mode has none.
        best_split: samples per device, of the best `gpu0_bsz` where that is auto, else of the config.
        splits: samples per device, for every possible split.
        tensors_mib: predicted peak of each device, for every possible split.
        slope_mib: memory that one more sample adds to a device.
        advice: changes that reduce memory, best first.
        notes: how the batch was found.
    """

    batch_size: int
    accumulate: int
    gpu0_bsz: int | None
    best_split: tuple[int, ...]
    splits: tuple[tuple[int, ...], ...]
    tensors_mib: tuple[tuple[float, ...], ...]
    slope_mib: float
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def predicted_mib(self, split: Sequence[int] | None) -> tuple[float | None, ...]:
        """Return the predicted peak of each device under a split; empty if the plan does not have the split.

        Args:
            split: samples per device; None where the mode has only one.
        """
        if split is None:
            return self.tensors_mib[0] if len(self.tensors_mib) == 1 else ()
        return dict(zip(self.splits, self.tensors_mib, strict=True)).get(tuple(split), ())

    @classmethod
    def of_plan(cls, plan: MemoryPlan, accumulate: int, notes: Sequence[str] = ()) -> SavedMemoryPlan:
        """Return the saved form of a plan."""
        row = plan.current or plan.best
        many = plan.batch_size + 8  # where the activations set the peak
        shape = (0,) * (len(plan.gpus) - 1) if plan.mode in ("dp", "model") else ()
        low, high = (plan.model.peak_mib((count, *shape))[0] for count in (many, many + 8))
        return cls(
            plan.batch_size,
            accumulate,
            plan.best.gpu0_bsz,
            row.split,
            tuple(row.split for row in plan.rows),
            tuple(row.tensors_mib for row in plan.rows),
            max(0.0, (high - low) / 8),
            tuple(advice_text(plan)),
            tuple(notes),
        )

    def write(self, path: Path) -> None:
        """Write the plan to a JSON file."""
        write_atomic(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")


def read_saved_plan(path: Path) -> SavedMemoryPlan | None:
    """Return the plan in a file; None if it is missing or cannot be read."""
    try:
        raw = json.loads(path.read_text())
        if raw.pop("format") != FORMAT:
            return None
        tuples = {name: tuple(tuple(row) for row in raw[name]) for name in ("splits", "tensors_mib")}
        tuples["best_split"] = tuple(raw["best_split"])
        return SavedMemoryPlan(**{**raw, **tuples, "advice": tuple(raw["advice"]), "notes": tuple(raw["notes"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def advice_text(plan: MemoryPlan) -> list[str]:
    """Return the plan's advice, one line each: changes that make it fit first."""
    return [
        f"{item.change}: saves {item.gain_mib:.0f} MiB on the fullest GPU, "
        f"{'fits' if item.fits else 'does not fit'} with {item.peak_mib:.0f} MiB ({item.note})"
        for item in sorted(plan.advice, key=lambda item: not item.fits)
        if not item.in_use
    ]
