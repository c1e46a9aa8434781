"""Choose the devices, the parallel mode and the numerics of a training: precision, memory format, algorithms, heap."""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from segapp.accelerator import ACCELERATORS, CUDA, GPUS, accelerator_of
from segapp.assembly.own_parts import fp32_part
from segapp.chunks import Mode
from segapp.config import RunConfig, TrainConfig
from segapp.config.modes import auto_mode, check_mode
from segapp.errors import ConfigError, did_you_mean
from segapp.memory.gpus import order_by_free_memory, visible_gpus
from segapp.memory.split_check import ALLOCATOR_VARIABLES, EXPANDABLE_SEGMENTS
from segapp.parallel.distributed import is_launched
from segapp.parallel.scatter_gather import DeviceLike, resolve_devices
from segapp.places import keep_compiled_code
from segapp.precision import Precision, PrecisionName


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
    alone = [device for device in devices if not accelerator_of(device).can_replicate]
    if alone and mode != "single":
        raise ConfigError(
            f"parallel.mode = {mode} on {_names(alone)}: only CUDA and CPU devices work together: use single, with one "
            "device in parallel.devices",
            key="parallel.mode",
            value=mode,
        ).see("several-gpus")
    # Each rank would otherwise train the whole run.
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


def choose_devices(
    requested: str | Sequence[DeviceLike], name: str = "parallel.devices"
) -> tuple[list[torch.device], str]:
    """Return the devices of `parallel.devices`, or of another option with that name, and the reason for the choice.

    Raises:
        ConfigError: a device does not exist on this machine.
    """
    if requested == "auto":
        seen = visible_gpus()
        note = f"; {seen.message}" if seen.cure else ""
        if not CUDA.is_available():
            others = [gpu.kind for gpu in GPUS if gpu.is_available()]
            hint = f"; parallel.devices={others[0]} trains on its GPU, untested" if others else ""
            return [torch.device("cpu")], f"no CUDA device is visible: training on the CPU{hint}{note}"
        indices, reason = order_by_free_memory([CUDA.facts(each).uuid for each in CUDA.devices()], seen.listed)
        return [torch.device(CUDA.kind, index) for index in indices], reason + note
    named = [requested] if isinstance(requested, str) else list(requested)
    try:
        devices = list(resolve_devices(named))
        for device in devices:  # `resolve_devices` also takes the simulated devices of a memory plan
            if device.type not in _DEVICES:
                raise ValueError(f"device {str(device)!r} is not supported: use 'cpu', 'cuda:0' or a CUDA index like 0")
        return devices, f"as {name} says"
    except (ValueError, TypeError, RuntimeError) as error:
        kinds = [word.partition(":")[0] for word in named if isinstance(word, str)]
        hints = [did_you_mean(kind, _DEVICES) for kind in kinds if kind not in _DEVICES]
        note = visible_gpus().problem if "visible" in str(error) else ""
        hint = next((f" ({hint})" for hint in [*hints, note] if hint), "")
        raise ConfigError(f"{name}: {error}{hint}", key=name if "." in name else None).see("no-gpu") from None


def _names(devices: Sequence[torch.device]) -> str:
    return ", ".join(str(device) for device in devices)


def with_precision(config: RunConfig, devices: Sequence[torch.device]) -> RunConfig:
    """Return the config with a precision for the devices if `train.precision` is auto.

    It is amp-bf16 if every GPU supports it, else amp-fp16. It is fp32 on CPUs, and if a custom component asks for it.
    Without devices, as in a plan for any GPUs, they are assumed to support bfloat16.
    """
    if config.train.precision != "auto":
        return config
    precision = "amp-bf16" if all(accelerator_of(device).has_bf16(device) for device in devices) else "amp-fp16"
    if any(device.type == "cpu" for device in devices) or fp32_part(config) is not None:
        precision = "fp32"
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})


def build_precision(config: RunConfig, device: torch.device) -> Precision:
    """Return the precision of a training; `with_precision` has replaced auto."""
    return Precision(cast(PrecisionName, config.train.precision), device)


def uses_channels_last(section: TrainConfig, model: nn.Module, device: torch.device) -> bool:
    """Return True if the network is to work in channels_last (NHWC).

    NHWC is used if it is the faster format: on a GPU whose tensor cores compute the convolutions (half
    precision, or float32 as TF32), for networks most of whose parameters are in convolutions. The precision must be
    resolved. A device that is neither CPU nor CUDA represents a GPU in a plan.
    """
    if device.type == "cpu":
        return False
    if section.precision == "fp32" and not (section.tf32 and accelerator_of(device).has_tf32(device)):
        return False
    convolutions = [part.weight for part in model.modules() if isinstance(part, (nn.Conv2d, nn.ConvTranspose2d))]
    return 2 * sum(weight.numel() for weight in convolutions) >= sum(p.numel() for p in model.parameters())


CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"

_WORKSPACE = ":4096:8"
"""Eight buffers of 4 MiB: with one buffer per stream, cuBLAS gives reproducible results."""


@contextlib.contextmanager
def numerics(*, deterministic: bool, tf32: bool) -> Iterator[None]:
    """Run the body of the `with` statement with these switches, and restore the previous ones at its end.

    cuBLAS reads its variable at the first matrix product of the process. So `deterministic` needs a process that has
    not used CUDA, or one that was started with the variable. Once CUDA has run, the variable stays set.

    Args:
        deterministic: use algorithms that repeat their results bit for bit; an operation without such an algorithm
            raises. Without it, cuDNN times its algorithms for each new shape and uses the fastest.
        tf32: float32 convolutions and matrix products on GPUs round their inputs to TF32 (10 bits of mantissa).

    Raises:
        ConfigError: `deterministic`, but CUDA has started in this process without cuBLAS's variable.
    """
    if deterministic and _has_used_cuda() and CUBLAS_VARIABLE not in os.environ:
        raise ConfigError(
            f"train.deterministic = true, but this process has used CUDA without {CUBLAS_VARIABLE}={_WORKSPACE}, which "
            "cuBLAS reads once: set it before the program starts, or train in a new process (segapp train)",
            key="train.deterministic",
            value=True,
        )
    keep_compiled_code()  # the first step of an optimizer imports torch._dynamo, which makes its folder
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment(os.environ, deterministic=deterministic))
        stack.enter_context(_algorithms_restored())
        torch.backends.cudnn.benchmark = not deterministic
        if deterministic:
            torch.backends.cudnn.deterministic = True
            is_on = torch.are_deterministic_algorithms_enabled()
            warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
            stack.callback(torch.use_deterministic_algorithms, is_on, warn_only=warn_only)
            torch.use_deterministic_algorithms(True)  # its first call imports torch._inductor, for seconds
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if torch.cuda.is_available():  # the same switches change products on CPUs
            stack.callback(set_tf32, *_tf32())
            set_tf32(tf32, tf32)
        yield


def _has_used_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def set_tf32(matmul: bool, convolution: bool) -> None:
    """Allow or forbid TF32 in matrix products and in convolutions.

    This uses the older names, because torch.compile in torch 2.11 still reads them and raises if only the newer ones
    (`fp32_precision`) were set.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch recommend the newer names
        torch.backends.cuda.matmul.allow_tf32 = matmul
        torch.backends.cudnn.allow_tf32 = convolution


def _tf32() -> tuple[bool, bool]:
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return matmul.fp32_precision == "tf32", convolution.fp32_precision == "tf32"


@contextlib.contextmanager
def _algorithms_restored() -> Iterator[None]:
    cudnn, deterministic = torch.backends.cudnn, torch.utils.deterministic
    kept = cudnn.benchmark, cudnn.deterministic, deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic, deterministic.fill_uninitialized_memory = kept  # type: ignore[attr-defined]


@contextlib.contextmanager
def _environment(environ: MutableMapping[str, str], *, deterministic: bool) -> Iterator[None]:
    """Set the variables that CUDA reads at its start, also in the ranks, unless the user has set them."""
    chosen = {}
    if deterministic:
        chosen[CUBLAS_VARIABLE] = _WORKSPACE
    # Expandable segments do not fragment when sizes change; the driver supports them on Linux.
    if sys.platform == "linux" and torch.version.cuda and not any(name in environ for name in ALLOCATOR_VARIABLES):
        chosen[ALLOCATOR_VARIABLES[0]] = EXPANDABLE_SEGMENTS
    added = [name for name in chosen if name not in environ]
    environ.update({name: chosen[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            if name != CUBLAS_VARIABLE or not _has_used_cuda():
                environ.pop(name, None)
