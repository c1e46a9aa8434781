"""`segapp plan`: print the predicted memory of each GPU. Imports no torch unless `--gpus here` needs it."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from segapp.config import load_runnable, named_config
from segapp.errors import ConfigError
from segapp.memory.peaks import KINDS
from segapp.memory.plan import GpuSpec, MemoryPlan, PlanRow
from segapp.planning.plan import plan_memory
from segapp.run.words import aligned, announce_on_terminal

_GPUS = re.compile(r"(?:(?P<count>\d+)\s*[x*]\s*)?(?P<size>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)")
_MIB_OF = {"mib": 1.0, "gib": 1024.0, "mb": 1e6 / 2**20, "gb": 1e9 / 2**20}
_EXAMPLE = "write 3x24220MiB, or 24220MiB,24220MiB,11019MiB, or here for the GPUs of this machine"
MAX_GPUS = 64
_FACTS = ("num_params", "eval_px", "eval_px_from", "smallest_chunk")
_FIRST_GPU = "GPU 0 is the first of parallel.devices; with auto, the GPU with the most free memory"


def print_plan(config_name: str | None, overrides: Sequence[str], gpus: str | None, *, as_json: bool = False) -> None:
    config = load_runnable(named_config(config_name, overrides, "name a config"), overrides)
    specs = gpu_specs(gpus)
    if gpus == "here" and config.train.precision == "auto":
        from segapp.accelerator import CUDA
        from segapp.assembly.devices import with_precision

        config = with_precision(config, CUDA.devices())
    announce_on_terminal("planning the memory")
    plan = plan_memory(config, specs)
    print(json.dumps(plan_as_json(plan), indent=2) if as_json else "\n".join(plan_lines(plan)))


def gpu_specs(gpus: str | None) -> tuple[GpuSpec, ...]:
    """Return the GPUs of `--gpus`; None or "here": the ones of this machine, largest free memory first."""
    if gpus is not None and gpus != "here":
        return parse_gpus(gpus)
    from segapp.memory.gpus import visible_gpus

    seen = visible_gpus()
    known = [(gpu.total_mib - (gpu.used_mib or 0.0), gpu.total_mib) for gpu in seen.gpus if gpu.total_mib]
    found = [GpuSpec(mib, f"GPU {i}") for i, (_, mib) in enumerate(sorted(known, reverse=True))]  # as devices: auto
    if not found:
        problem = seen.message or "nvidia-smi does not report the memory of the GPUs"
        raise ConfigError(f"--gpus here: {problem}; or name the GPUs, such as --gpus 3x24220MiB").see("no-gpu")
    if seen.message:
        print(f"--gpus here: {seen.message}", file=sys.stderr)
    return tuple(found)


def parse_gpus(text: str) -> tuple[GpuSpec, ...]:
    """Parse GPU sizes with a unit (MiB, GiB, MB, GB), separated by commas, each with an optional count before it.

    Raises:
        ConfigError: the text has another form.

    Example:
        >>> [gpu.total_mib for gpu in parse_gpus("2x24GiB,11019MiB")]
        [24576.0, 24576.0, 11019.0]
    """
    gpus: list[GpuSpec] = []
    for word in text.split(","):
        found = _GPUS.fullmatch(word.strip())
        unit_mib = None if found is None else _MIB_OF.get(found["unit"].lower())
        if found is None or unit_mib is None or not (int(found["count"] or 1) and float(found["size"])):
            raise ConfigError(f"--gpus {text}: {word.strip()!r} is not a size above 0 with MiB or GiB: {_EXAMPLE}")
        count, size_mib = int(found["count"] or 1), float(found["size"]) * unit_mib
        # Before the list is made, because a count of many digits would fill the memory.
        if len(gpus) + count > MAX_GPUS:
            raise ConfigError(f"--gpus {text}: more than {MAX_GPUS} GPUs: plan for one machine")
        gpus += [GpuSpec(size_mib)] * count
    return tuple(GpuSpec(gpu.total_mib, gpu.name or f"GPU {i}") for i, gpu in enumerate(gpus))


def plan_lines(plan: MemoryPlan) -> list[str]:
    gpus = ", ".join(f"{gpu.total_mib:.0f}" for gpu in plan.gpus)
    lines = [
        f"{plan.name}: batch {plan.batch_size} on {len(plan.gpus)} GPU{'s' * (len(plan.gpus) > 1)} ({gpus} MiB), "
        f"mode {plan.mode}",
        *plan.notes,
        "",
        *split_table(plan),
        *([_FIRST_GPU] if len(plan.gpus) > 1 and plan.gpus[0].name in ("", "GPU 0") else []),
        "",
        *_best_lines(plan),
        "",
        *gpu_lines(plan, plan.best),
    ]
    if plan.ring_mib:
        lines.append(f"host memory of the ring of batches: {plan.ring_mib:.0f} MiB, in a training on a CPU")
    return [line.rstrip() for line in lines]


def plan_as_json(plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan as plain values for JSON; other programs read `rows`, `best` and `max_batch`."""
    return {
        "name": plan.name,
        "mode": plan.mode,
        "batch_size": plan.batch_size,
        "gpus_mib": [gpu.total_mib for gpu in plan.gpus],
        "overhead": {"context_mib": plan.overhead.context_mib, "tensor_frac": plan.overhead.tensor_frac},
        "rows": [asdict(row) for row in plan.rows],
        "refused": [{"gpu0_bsz": value, "reason": reason} for value, reason in plan.refused],
        "current": None if plan.current is None else asdict(plan.current),
        "best": asdict(plan.best),
        "max_batch": plan.max_batch,
        "ring_mib": plan.ring_mib,
        "max_batch_row": None if plan.max_row is None else asdict(plan.max_row),
        "recompute": None if plan.chosen is None else plan.chosen.blocks_per_device,
        "notes": list(plan.notes),
        **{name: getattr(plan.network, name, None) for name in _FACTS},
    }


def split_table(plan: MemoryPlan) -> list[str]:
    """Return one line per split: the memory that each GPU needs, the phase of its peak, and the verdict."""
    header = ("gpu0_bsz", "split", *(f"{gpu.name or f'GPU {i}'} MiB" for i, gpu in enumerate(plan.gpus)), "verdict")
    rows: list[Sequence[str]] = [header]
    for row in plan.rows:
        marks = [
            name
            for name, other in (("best", plan.best), ("config", plan.current))
            if other and other.split == row.split
        ]
        cells = [f"{mib:.0f} {phase}" for mib, phase in zip(row.peak_mib, row.phase, strict=True)]
        word = row.level + (f"  <- {', '.join(marks)}" if marks else "")
        rows.append(("-" if row.gpu0_bsz is None else str(row.gpu0_bsz), _joined(row.split), *cells, word))
    lines = aligned(rows)
    # Many values of gpu0_bsz may be refused for one reason, which is printed once.
    by_reason: dict[str, list[int]] = {}
    for value, reason in plan.refused:
        by_reason.setdefault(reason.partition(" leaves ")[2] or reason, []).append(value)
    lines += [
        f"gpu0_bsz {', '.join(map(str, values))} refused: leaves {reason}" for reason, values in by_reason.items()
    ]
    return lines


def gpu_lines(plan: MemoryPlan, row: PlanRow) -> list[str]:
    """Return the memory of each GPU by kind at its peak, under one split."""
    peaks = plan.model.peaks(row.split)
    lines = [f"split {_joined(row.split)}, each GPU at its peak:"]
    for i, gpu in enumerate(plan.gpus):
        phase, overhead_mib = row.phase[i], row.peak_mib[i] - row.tensors_mib[i]
        by_kind = peaks[i][phase].by_kind if phase in peaks[i] else {}
        parts = {kind: by_kind.get(kind, 0.0) for kind in KINDS} | {"overhead": overhead_mib}
        free = gpu.total_mib - row.peak_mib[i]
        over = "  OVER" if free < 0 else ""
        lines.append(
            f"  {gpu.name or f'GPU {i}':8s} {row.peak_mib[i]:.0f} of {gpu.total_mib:.0f} MiB, "
            f"{phase}, {free:+.0f} free{over}"
        )
        largest = sorted(((mib, kind) for kind, mib in parts.items() if mib >= 1.0), reverse=True)[:6]
        lines.append("           " + "  ".join(f"{kind} {mib:.0f}" for mib, kind in largest))
    return lines


def _best_lines(plan: MemoryPlan) -> list[str]:
    best = plan.best
    value = "" if best.gpu0_bsz is None else f"gpu0_bsz {best.gpu0_bsz}, "
    lines = [
        f"best for batch {plan.batch_size}: {value}split {_joined(best.split)}, fullest GPU "
        f"{100 * best.fullest(plan.gpus):.0f} % with its overhead ({best.level}; tensors only: {best.reason})"
    ]
    if plan.max_row is None:
        lines.append("largest batch that fits: none, not even 1")
    else:
        value = "" if plan.max_row.gpu0_bsz is None else f" at gpu0_bsz {plan.max_row.gpu0_bsz}"
        lines.append(f"largest batch that fits: {plan.max_batch}{value}, split {_joined(plan.max_row.split)}")
    if not (plan.current or best).fits:
        ways = ["halve train.batch_size and double train.accumulate"] if plan.max_row else []
        ways.append("add train.recompute=auto" if plan.chosen is None else "lower data.crop_px")
        lines.append(f"  the config does not fit: {', or '.join(ways)}")
    overhead = plan.overhead
    contexts = "/".join(f"{mib:.0f}" for mib in dict.fromkeys(overhead.context_mib))
    lines.append(
        f"overhead (assumed): {contexts} MiB per GPU for driver, context and libraries, "
        f"{100 * (1 - overhead.tensor_frac):.0f} % for the allocator"
    )
    return lines


def _joined(split: Sequence[int]) -> str:
    return "+".join(map(str, split))
