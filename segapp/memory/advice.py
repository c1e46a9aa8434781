"""What would need less memory, ranked by what it saves on the fullest GPU. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from segapp.memory.planner import Advice, MemoryPlan, Planner, PlanRow


@dataclass(frozen=True)
class Variant:
    """A change that a simulation can try.

    Attributes:
        key: short name.
        change: what a person writes.
        note: what else it changes.
        changes: config keys and values of the simulation.
        in_use: the plan has it; the simulation shows what would be without.
    """

    key: str
    change: str
    note: str
    changes: Mapping[str, object]
    in_use: bool = False


def variants(precision: str, crop_px: tuple[int, int], smaller_crop_px: tuple[int, int] | None) -> list[Variant]:
    """What is worth a simulation for a config."""
    found = []
    if precision == "fp32":
        found.append(
            Variant(
                "amp-bf16",
                "train.precision=amp-bf16",
                "activations in half; needs a GPU with bfloat16 (Ampere or later), else amp-fp16",
                {"train.precision": "amp-bf16"},
            )
        )
    if precision != "fp16":
        found.append(
            Variant(
                "fp16",
                "train.precision=fp16",
                "half weights with float32 masters and loss scaling",
                {"train.precision": "fp16"},
            )
        )
    if smaller_crop_px is not None and smaller_crop_px != crop_px:
        height, width = smaller_crop_px
        found.append(
            Variant(
                "crop",
                f"data.crop_px=[{height},{width}]",
                "less context for the network to learn from",
                {"data.crop_px": [height, width]},
            )
        )
    return found


def split_advice(plan_row: PlanRow, best: PlanRow, planner: Planner) -> list[Advice]:
    """The better `gpu0_bsz`, where there is one."""
    gain = max(plan_row.peak_mib) - max(best.peak_mib)
    if best.gpu0_bsz is None or gain < 1.0:
        return []
    note = f"split {list(best.split)} instead of {list(plan_row.split)}; same loss and gradients"
    return [Advice(f"parallel.gpu0_bsz={best.gpu0_bsz}", round(gain, 1), max(best.peak_mib), best.fits, note)]


def variant_advice(variant: Variant, reference_mib: float, varied_mib: float, row: PlanRow, planner: Planner) -> Advice:
    """What a variant saves on the fullest GPU.

    Args:
        variant: the change.
        reference_mib: simulated peak of one device with the fullest GPU's samples.
        varied_mib: the same with the change.
        row: the split that it is about.
        planner: adds the overhead.
    """
    fullest = max(range(len(row.split)), key=lambda i: row.peak_mib[i])
    before = row.peak_mib[fullest]
    if variant.in_use:
        saved = planner.overhead.tensors_mib(fullest, varied_mib - reference_mib) / planner.overhead.room
        return Advice(variant.change, round(saved, 1), before, row.fits, variant.note, in_use=True)
    ratio = varied_mib / reference_mib if reference_mib else 1.0
    after = planner.overhead.required_mib(fullest, row.tensors_mib[fullest] * ratio)
    fits = all(
        planner.overhead.required_mib(i, mib * ratio) <= planner.gpus[i].total_mib
        for i, mib in enumerate(row.tensors_mib)
    )
    return Advice(variant.change, round(before - after, 1), round(after, 1), fits, variant.note)


def accumulate_advice(
    batch_size: int, accumulate: int, gradients_mib: float, row: PlanRow, planner: Planner
) -> list[Advice]:
    """Half the micro-batch, twice as many of them: the same step."""
    if batch_size < 2 * max(1, planner.smallest_chunk) or batch_size % 2:
        return []
    rows = planner.rows(batch_size // 2)[0]
    if not rows:
        return []
    best = min(rows, key=lambda candidate: candidate.fullest(planner.gpus))
    # From the second micro-batch on the gradients of the first are there during forward.
    extra = gradients_mib / planner.overhead.room if accumulate == 1 else 0.0
    after = max(best.peak_mib[0] + extra, *best.peak_mib)
    change = f"train.batch_size={batch_size // 2} train.accumulate={2 * accumulate}"
    if best.gpu0_bsz is not None:
        change += f" parallel.gpu0_bsz={best.gpu0_bsz}"
    note = "the gradient of a step stays exact; BatchNorm sees half as many images at a time"
    fits = best.fits and best.peak_mib[0] + extra <= planner.gpus[0].total_mib
    return [Advice(change, round(max(row.peak_mib) - after, 1), round(after, 1), fits, note)]


def ranked(advice: Sequence[Advice]) -> tuple[Advice, ...]:
    """Those that save anything, most first; then those in use already."""
    useful = [item for item in advice if item.gain_mib > 0.5 or item.in_use]
    return tuple(sorted(useful, key=lambda item: (item.in_use, -item.gain_mib)))


def is_tight(plan: MemoryPlan) -> bool:
    """Whether a person will want the advice: the split in force does not fit, or barely."""
    row = plan.current or plan.best
    return not row.fits or row.word == "tight"
