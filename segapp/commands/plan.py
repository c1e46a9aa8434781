"""`segapp plan`: print the predicted memory of each GPU. Imports no torch unless `--gpus here` needs it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from segapp.config import RunConfig, load_runnable, named_config
from segapp.errors import ConfigError
from segapp.memory.plan import GpuSpec, parse_gpus, plan_as_json
from segapp.memory.report import plan_lines
from segapp.planning.plan import plan_memory
from segapp.run.words import announce_on_terminal


def print_plan(
    config_name: str | None,
    overrides: Sequence[str],
    gpus: str | None,
    *,
    fit: bool = False,
    as_json: bool = False,
) -> None:
    """Plan the memory of a config, and print it.

    With `fit`, or if the config does not fit, the ways to make its step and the fastest of them are printed too.
    """
    config = load_runnable(named_config(config_name, overrides, "name a config"), overrides)
    specs = _gpu_specs(gpus)
    if gpus == "here" and config.train.precision == "auto":
        config = _for_these_gpus(config)
    announce_on_terminal("planning the memory")
    plan = plan_memory(config, specs, fit=fit or None)
    print(json.dumps(plan_as_json(plan), indent=2) if as_json else "\n".join(plan_lines(plan)))


def _for_these_gpus(config: RunConfig) -> RunConfig:
    """Return the config with the precision that `auto` becomes on this machine's GPUs, which torch knows."""
    from segapp.accelerator import CUDA
    from segapp.assembly.devices import with_precision

    return with_precision(config, CUDA.devices())


def _gpu_specs(gpus: str | None) -> tuple[GpuSpec, ...]:
    if gpus is not None and gpus != "here":
        return parse_gpus(gpus)
    from segapp.memory.gpus import query_gpus

    known = [(gpu.total_mib - (gpu.used_mib or 0.0), gpu.total_mib) for gpu in query_gpus() if gpu.total_mib]
    found = [GpuSpec(mib, f"GPU {i}") for i, (_, mib) in enumerate(sorted(known, reverse=True))]  # as devices: auto
    if not found:
        raise ConfigError("--gpus here: nvidia-smi shows no GPU on this machine: name them, e.g. --gpus 3x24220MiB")
    return tuple(found)
