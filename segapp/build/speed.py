"""Estimated times of a step in dp and in ddp, for `parallel.mode: auto` with an uneven batch split.

In dp, one process dispatches the operators of all replicas one after the other; a rank of ddp dispatches only its own.
So dp is as fast as ddp if the GPUs compute for longer than the dispatches take, as with large crops on slower GPUs. The
operators and their work are counted on the meta device; the speeds of this machine are measured within a second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from segapp.accelerator import accelerator_of
from segapp.build.network import build_network
from segapp.build.pairs import build_pixels, build_scheme
from segapp.chunks import plan_chunks
from segapp.config import RunConfig
from segapp.config.modes import SpeedEstimate
from segapp.custom.names import is_part
from segapp.memory.costs import EFFICIENCY, Machine, OperatorCosts

STEP = 3
"""Ratio of a training step to its forward pass, in operators and in work: the backward pass costs twice as much."""
DP_OVERHEAD = 1.6
"""Ratio of a dp step's operators to its replicas' operators; the rest copies tensors and syncs BatchNorm."""


@dataclass(frozen=True)
class StepWork:
    """Work of a training step.

    Attributes:
        num_operators: operators of one replica.
        flops: work of one crop.
    """

    num_operators: int
    flops: float


def count_work(config: RunConfig) -> StepWork:
    """Count the operators of a training step and the work of one crop on the meta device."""
    bands = build_pixels(config.data).num_bands
    model = build_network(config.model, build_scheme(config.data).num_classes, num_bands=bands, with_weights=False)
    model = model.to("meta").train()
    costs = OperatorCosts()
    images = torch.empty(2, bands, *config.data.crop_px, device="meta")
    with torch.no_grad(), costs:
        model(images)
    return StepWork(STEP * costs.num_operators, STEP * costs.flops / 2)


def estimate_speed(config: RunConfig, num_devices: int, devices: Sequence[torch.device] = ()) -> SpeedEstimate | None:
    """Estimate the times of a step in dp and in ddp; None for a custom network, or one that needs real values to run.

    Args:
        config: with `parallel.gpu0_bsz` or `parallel.shares`, and a known `train.batch_size`.
        num_devices: number of GPUs.
        devices: the GPUs; empty if they are only planned, and then their speed is assumed.
    """
    section = config.parallel
    try:
        work = None if is_part(config.model.name) or not config.train.batch_size else count_work(config)
    except (RuntimeError, NotImplementedError, ValueError):  # an operator without a rule for the meta device
        work = None
    if work is None:
        return None
    gpu0_bsz = section.gpu0_bsz if isinstance(section.gpu0_bsz, int) else None
    shares = section.shares or plan_chunks(config.train.batch_size, num_devices, gpu0_bsz)
    is_half = config.train.precision != "fp32"
    if devices:
        dispatch_s, flops_per_s = measure_dispatch_s(), min(measure_flops_per_s(each, is_half) for each in devices)
    else:
        assumed = Machine()
        dispatch_s, flops_per_s = assumed.dispatch_s, assumed.half_flops_per_s if is_half else assumed.flops_per_s
    device_s = max(shares) * work.flops / (EFFICIENCY * flops_per_s)
    host_s = work.num_operators * dispatch_s
    num_busy = sum(share > 0 for share in shares)
    return SpeedEstimate(
        dp_s=max(device_s, DP_OVERHEAD * num_busy * host_s), ddp_s=max(device_s, host_s), is_measured=bool(devices)
    )


def measure_dispatch_s() -> float:
    """Return the time that Python takes per operator of a network in training, measured on tiny tensors."""
    layers = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(10)))
    images = torch.zeros(2, 4, 2, 2)
    best_s = float("inf")
    for _ in range(5):
        began_s = time.perf_counter()
        layers(images).sum().backward()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s / (STEP * 3 * len(layers))


def measure_flops_per_s(device: torch.device, is_half: bool) -> float:
    """Return the speed of a large convolution on a device."""
    accelerator = accelerator_of(device)
    dtype = torch.float32 if not is_half else torch.bfloat16 if accelerator.has_bf16(device) else torch.float16
    layer = nn.Conv2d(256, 256, 3, padding=1, device=device, dtype=dtype)
    images = torch.zeros(4, 256, 64, 64, device=device, dtype=dtype)
    best_s = float("inf")
    with torch.no_grad():
        for _ in range(4):
            accelerator.synchronize(device)
            began_s = time.perf_counter()
            for _ in range(5):
                layer(images)
            accelerator.synchronize(device)
            best_s = min(best_s, (time.perf_counter() - began_s) / 5)
    return 2.0 * images.numel() * 256 * 9 / best_s
