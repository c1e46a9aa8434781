"""`segapp plan`: print the predicted memory of each GPU. Imports no torch unless `--gpus here` needs it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence

from segapp.config import load_runnable, named_config
from segapp.errors import ConfigError
from segapp.memory.plan import GpuSpec
from segapp.memory.report import plan_as_json, plan_lines
from segapp.planning.plan import plan_memory
from segapp.run.words import announce_on_terminal

_GPUS = re.compile(r"(?:(?P<count>\d+)\s*[x*]\s*)?(?P<size>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)")
_MIB_OF = {"mib": 1.0, "gib": 1024.0, "mb": 1e6 / 2**20, "gb": 1e9 / 2**20}
_EXAMPLE = "write 3x24220MiB, or 24220MiB,24220MiB,11019MiB, or here for the GPUs of this machine"
MAX_GPUS = 64


def print_plan(config_name: str | None, overrides: Sequence[str], gpus: str | None, *, as_json: bool = False) -> None:
    """Plan the memory of a config, and print it."""
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
        if len(gpus) + count > MAX_GPUS:
            raise ConfigError(f"--gpus {text}: more than {MAX_GPUS} GPUs: plan for one machine")
        gpus += [GpuSpec(size_mib)] * count
    return tuple(GpuSpec(gpu.total_mib, gpu.name or f"GPU {i}") for i, gpu in enumerate(gpus))
