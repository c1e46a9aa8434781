"""Choose the devices and the parallel mode of a training from the `parallel` section of the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from segapp.accelerator import ACCELERATORS, CUDA, GPUS, accelerator_of
from segapp.chunks import Mode
from segapp.config import RunConfig
from segapp.config.modes import auto_mode, check_mode
from segapp.errors import ConfigError, did_you_mean
from segapp.memory.gpus import cuda_uuids, order_by_free_memory, query_gpus
from segapp.parallel.distributed import is_launched
from segapp.parallel.scatter_gather import resolve_devices


@dataclass(frozen=True)
class DevicePlan:
    """Mode and devices of a training on this machine.

    Attributes:
        devices: the devices; in ddp one per rank of this machine.
        reason: a sentence for the user that says why these devices were chosen.
        mode_reason: why `auto` chose the mode; empty if the config sets it.
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


def plan_devices(config: RunConfig, *, is_one_process: bool = False) -> DevicePlan:
    """Return mode and devices of a training.

    `is_one_process`: the caller starts no ranks, so `auto` does not choose ddp.

    Raises:
        ConfigError: a device does not exist, there are too few for the mode, or it cannot do what the config asks for.
    """
    devices, reason = choose_devices(config.parallel.devices)
    mode, mode_reason = config.parallel.mode, ""
    if mode == "auto" and is_launched():
        mode, mode_reason = "ddp", "started as a rank"
    elif mode == "auto":
        against_ddp = _against_ddp(devices, is_one_process=is_one_process)
        mode, mode_reason = auto_mode(config, len(devices), against_ddp)
    check_mode(config, mode)
    if config.train.cuda_graph and not accelerator_of(devices[0]).can_capture:
        raise ConfigError(
            f"train.cuda_graph = true on {devices[0]}: CUDA graphs need a CUDA device: set it to false",
            key="train.cuda_graph",
            value=True,
        )
    alone = [device for device in devices if not accelerator_of(device).can_replicate]
    if alone and mode != "single":
        raise ConfigError(
            f"parallel.mode = {mode} on {_names(alone)}: only CUDA and CPU devices work together: use single, with one "
            "device in parallel.devices",
            key="parallel.mode",
            value=mode,
        ).see("several-gpus")
    if is_launched() and mode != "ddp":
        raise ConfigError(
            f"parallel.mode = {mode} under torchrun: use ddp or auto, or start segapp without torchrun",
            key="parallel.mode",
            value=mode,
        ).see("several-gpus")
    if mode == "single":
        devices = devices[:1]
    if mode == "model" and len(devices) < 2:
        raise ConfigError(
            f"parallel.mode = model needs two devices or more, found {_names(devices)}: list them in parallel.devices",
            key="parallel.mode",
        )
    return DevicePlan(mode, tuple(devices), reason, mode_reason)


def _against_ddp(devices: Sequence[torch.device], *, is_one_process: bool) -> str | None:
    """Return why `parallel.mode: auto` cannot start one rank per device; None if it can."""
    if any(device.type != "cuda" for device in devices) or len(set(devices)) < len(devices):
        return "logical devices"
    if is_one_process:
        return "one process"
    if not (dist.is_available() and dist.is_nccl_available()):
        return "this torch has no NCCL"
    return None


_DEVICES = (*ACCELERATORS, "auto")


def choose_devices(requested: str | Sequence[int | str]) -> tuple[list[torch.device], str]:
    """Return the devices of `parallel.devices`, and the reason for the choice.

    Raises:
        ConfigError: a device does not exist on this machine.
    """
    if requested == "auto":
        if not CUDA.is_available():
            others = [gpu.kind for gpu in GPUS if gpu.is_available()]
            hint = f"; parallel.devices={others[0]} trains on its GPU, untested" if others else ""
            return [torch.device("cpu")], f"no CUDA device is visible: training on the CPU{hint}"
        indices, reason = order_by_free_memory(cuda_uuids(), query_gpus())
        return [torch.device(CUDA.kind, index) for index in indices], reason
    named = [requested] if isinstance(requested, str) else list(requested)
    try:
        devices = list(resolve_devices(named))
        for device in devices:  # `resolve_devices` also takes the simulated devices of a memory plan
            if device.type not in _DEVICES:
                raise ValueError(f"device {str(device)!r} is not supported: use 'cpu', 'cuda:0' or a CUDA index like 0")
        return devices, "as parallel.devices says"
    except (ValueError, TypeError, RuntimeError) as error:
        kinds = [word.partition(":")[0] for word in named if isinstance(word, str)]
        hints = [did_you_mean(kind, _DEVICES) for kind in kinds if kind not in _DEVICES]
        hint = next((f" ({hint})" for hint in hints if hint), "")
        raise ConfigError(f"parallel.devices: {error}{hint}", key="parallel.devices").see("no-gpu") from None


def _names(devices: Sequence[torch.device]) -> str:
    return ", ".join(str(device) for device in devices)
