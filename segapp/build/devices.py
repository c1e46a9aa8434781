"""Which devices a training uses, in which mode, and why."""

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
    """What `parallel.mode` and `parallel.devices` come to on this machine.

    Args:
        mode: how the devices work together.
        devices: the devices; in ddp one a rank of this machine.
        reason: a sentence for the person who starts the run.
    """

    mode: Mode
    devices: tuple[torch.device, ...]
    reason: str


def plan_devices(section: ParallelConfig) -> DevicePlan:
    """Decides mode and devices.

    Raises:
        ConfigError: a device is not here, or there are too few for the mode.
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
        raise ConfigError(f"parallel.mode = model needs two devices or more, here is {_names(devices)}: name them")
    return DevicePlan(mode, tuple(devices), reason)


def choose_devices(wish: str | Sequence[int | str]) -> tuple[list[torch.device], str]:
    """The devices of `parallel.devices`, and why.

    Raises:
        ConfigError: one is not on this machine.
    """
    if wish == "auto":
        if not torch.cuda.is_available():
            return [torch.device("cpu")], "no CUDA device is visible: training on the CPU"
        indices, reason = order_by_free_memory(cuda_uuids(), query_gpus())
        return [torch.device("cuda", index) for index in indices], reason
    named = [wish] if isinstance(wish, str) else list(wish)
    try:
        return list(resolve_devices(named)), "as parallel.devices says"
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"parallel.devices: {error}") from None


def _names(devices: Sequence[torch.device]) -> str:
    return ", ".join(str(device) for device in devices)
