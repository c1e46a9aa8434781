"""Choose the devices and the parallel mode of a training from the `parallel` section of the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from segapp.config import ParallelConfig
from segapp.errors import ConfigError, did_you_mean
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
        mode_reason: why `auto` chose the mode; empty where the config names it.
    """

    mode: Mode
    devices: tuple[torch.device, ...]
    reason: str
    mode_reason: str = ""

    @property
    def description(self) -> str:
        """One line for the user: devices, mode and the reasons."""
        names = ", ".join(str(device) for device in self.devices)
        mode = f"mode {self.mode} (auto: {self.mode_reason})" if self.mode_reason else f"mode {self.mode}"
        return f"devices: {names} ({self.reason}), {mode}"


def plan_devices(section: ParallelConfig, *, batch_size: int = 0, is_one_process: bool = False) -> DevicePlan:
    """Return mode and devices of a `parallel` section.

    Args:
        section: the section.
        batch_size: `train.batch_size`; 0 while it is not known.
        is_one_process: the caller starts no ranks: `auto` does not choose ddp.

    Raises:
        ConfigError: a device does not exist, or there are too few for the mode.
    """
    devices, reason = choose_devices(section.devices)
    mode: Mode
    mode_reason = ""
    if section.mode == "auto":
        mode, mode_reason = _auto_mode(section, devices, batch_size, is_one_process=is_one_process)
    else:
        mode = section.mode
    if is_launched() and mode != "ddp":
        raise ConfigError(
            f"parallel.mode = {mode} under torchrun: use ddp or auto, or start segapp without torchrun"
        ).see("several-gpus")
    if mode == "single":
        devices = devices[:1]
    if mode == "model" and len(devices) < 2:
        raise ConfigError(
            f"parallel.mode = model needs two devices or more, found {_names(devices)}: list them in parallel.devices"
        )
    return DevicePlan(mode, tuple(devices), reason, mode_reason)


def _auto_mode(
    section: ParallelConfig, devices: Sequence[torch.device], batch_size: int, *, is_one_process: bool
) -> tuple[Mode, str]:
    """Return the mode of `parallel.mode: auto`, and the reason; no reason on one device."""
    if is_launched():
        return "ddp", "started as a rank"
    if len(devices) == 1:
        return "single", ""
    if section.has_split:
        return "dp", "gpu0_bsz or shares is set"
    if any(device.type != "cuda" for device in devices) or len(set(devices)) < len(devices):
        return "dp", "logical devices"
    if is_one_process:
        return "dp", "one process"
    if batch_size and batch_size < len(devices):
        return "dp", f"a batch of {batch_size} does not give every device an image"
    if not (dist.is_available() and dist.is_nccl_available()):
        return "dp", "this torch has no NCCL"
    return "ddp", "one process for each GPU is the fastest"


_DEVICES = ("cpu", "cuda", "auto")


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
        kinds = [word.partition(":")[0] for word in named if isinstance(word, str)]
        hints = [did_you_mean(kind, _DEVICES) for kind in kinds if kind not in _DEVICES]
        hint = next((f" ({hint})" for hint in hints if hint), "")
        raise ConfigError(f"parallel.devices: {error}{hint}").see("no-gpu") from None


def _names(devices: Sequence[torch.device]) -> str:
    return ", ".join(str(device) for device in devices)
