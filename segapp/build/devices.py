"""Choose the devices and the parallel mode of a training from the `parallel` section of the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from segapp.config import ParallelConfig
from segapp.errors import ConfigError
from segapp.memory.gpus import cuda_uuids, order_by_free_memory, query_gpus
from segapp.parallel import is_launched, resolve_devices

Mode = Literal["single", "dp", "ddp", "model"]


@dataclass(frozen=True)
class DevicePlan:
    """Mode and devices of a training on this machine.

    Attributes:
        mode: the parallel mode.
        devices: the devices; in ddp one per rank of this machine.
        reason: a sentence for the user why these devices were chosen.
    """

    mode: Mode
    devices: tuple[torch.device, ...]
    reason: str


def plan_devices(section: ParallelConfig) -> DevicePlan:
    """Return mode and devices of a `parallel` section.

    Raises:
        ConfigError: a device does not exist, or there are too few for the mode.
    """
    devices, reason = choose_devices(section.devices)
    mode: Mode
    if section.mode == "auto":
        mode = "ddp" if is_launched() else "dp" if len(devices) > 1 else "single"
    else:
        mode = section.mode
    if is_launched() and mode != "ddp":
        raise ConfigError(f"parallel.mode = {mode} under torchrun: use ddp or auto, or start segapp without torchrun")
    if mode == "single":
        devices = devices[:1]
    if mode == "model" and len(devices) < 2:
        raise ConfigError(
            f"parallel.mode = model needs two devices or more, found {_names(devices)}: list them in parallel.devices"
        )
    return DevicePlan(mode, tuple(devices), reason)


def choose_devices(requested: str | Sequence[int | str]) -> tuple[list[torch.device], str]:
    """Return the devices of `parallel.devices`, and the reason for the choice.

    Raises:
        ConfigError: a device does not exist on this machine.
    """
    if requested == "auto":
        if not torch.cuda.is_available():
            return [torch.device("cpu")], "no CUDA device is visible: training on the CPU"
        indices, reason = order_by_free_memory(cuda_uuids(), query_gpus())
        return [torch.device("cuda", index) for index in indices], reason
    named = [requested] if isinstance(requested, str) else list(requested)
    try:
        return list(resolve_devices(named)), "as parallel.devices says"
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"parallel.devices: {error}") from None


def _names(devices: Sequence[torch.device]) -> str:
    return ", ".join(str(device) for device in devices)
