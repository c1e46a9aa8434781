"""Changes that reduce memory, ranked by what they save on the fullest GPU. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from segapp.memory.planner import Advice, Planner, PlanRow


@dataclass(frozen=True)
class Variant:
    """A change of the config that a simulation can evaluate.

    Attributes:
        key: short name.
        change: what the user writes into the config.
        note: its other effects.
        changes: config keys and values for the simulation.
        in_use: the plan has it already; the simulation is of the config without it.
    """

    key: str
    change: str
    note: str
    changes: Mapping[str, object]
    in_use: bool = False


def variants(precision: str, crop_px: tuple[int, int], smaller_crop_px: tuple[int, int] | None) -> list[Variant]:
    """Return the changes worth a simulation.

    Args:
        precision: `train.precision`.
        crop_px: height and width of the crops.
        smaller_crop_px: a smaller crop that the network accepts; None if there is none.
    """
    found = []
    if precision == "fp32":
        found.append(
            Variant(
                "amp-bf16",
                "train.precision=amp-bf16",
                "half-precision activations; needs a GPU with bfloat16 (Ampere or later), else amp-fp16",
                {"train.precision": "amp-bf16"},
            )
        )
    if precision != "fp16":
        found.append(
            Variant(
                "fp16",
                "train.precision=fp16",
                "half-precision weights with float32 master weights and loss scaling",
                {"train.precision": "fp16"},
            )
        )
    if smaller_crop_px is not None and smaller_crop_px != crop_px:
        height, width = smaller_crop_px
        found.append(
            Variant(
                "crop",
                f"data.crop_px=[{height},{width}]",
                "less image context per sample",
                {"data.crop_px": [height, width]},
            )
        )
    return found


def split_advice(plan_row: PlanRow, best: PlanRow, planner: Planner) -> list[Advice]:
    """Return the advice to use a better `gpu0_bsz`; empty if the current split is the best."""
    gain = max(plan_row.peak_mib) - max(best.peak_mib)
    if best.gpu0_bsz is None or gain < 1.0:
        return []
    note = f"split {list(best.split)} instead of {list(plan_row.split)}; same loss and gradients"
    return [Advice(_split_words(best, planner), round(gain, 1), max(best.peak_mib), best.fits, note)]


def _split_words(row: PlanRow, planner: Planner) -> str:
    words = f"parallel.gpu0_bsz={row.gpu0_bsz}"
    return f"parallel.mode=ddp {words}" if planner.model.mode == "ddp" else words  # `auto` takes dp with a gpu0_bsz


def variant_advice(variant: Variant, reference_mib: float, varied_mib: float, row: PlanRow, planner: Planner) -> Advice:
    """Return what a variant saves on the fullest GPU."""
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
    """Return the advice to halve the micro-batch and double `train.accumulate`; empty if the batch cannot be halved."""
    if batch_size < 2 * max(1, planner.smallest_chunk) or batch_size % 2:
        return []
    rows = planner.rows(batch_size // 2)[0]
    if not rows:
        return []
    best = min(rows, key=lambda candidate: candidate.fullest(planner.gpus))
    # From the second micro-batch on, the gradients of the first are alive during forward.
    extra = gradients_mib / planner.overhead.room if accumulate == 1 else 0.0
    after = max(best.peak_mib[0] + extra, *best.peak_mib)
    change = f"train.batch_size={batch_size // 2} train.accumulate={2 * accumulate}"
    if best.gpu0_bsz is not None:
        change += f" {_split_words(best, planner)}"
    note = "the gradient of a step stays exact; BatchNorm sees half as many images at a time"
    fits = best.fits and best.peak_mib[0] + extra <= planner.gpus[0].total_mib
    return [Advice(change, round(max(row.peak_mib) - after, 1), round(after, 1), fits, note)]


def ranked(advice: Sequence[Advice]) -> tuple[Advice, ...]:
    """Return the advice that saves memory, largest saving first, then the changes already in use."""
    useful = [item for item in advice if item.gain_mib > 0.5 or item.in_use]
    return tuple(sorted(useful, key=lambda item: (item.in_use, -item.gain_mib)))
