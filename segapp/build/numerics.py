"""Resolve `train.precision: auto` and `train.channels_last: auto` for the devices and the network of a training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from segapp.config import TrainConfig

BF16_CAPABILITY = (8, 0)
"""Compute capability from which GPUs have bfloat16 and TF32 in hardware (Ampere)."""


def auto_precision(devices: Sequence[torch.device]) -> str:
    """Return the precision that `auto` stands for: amp-bf16 where every GPU has it, else amp-fp16; fp32 on CPUs."""
    if any(device.type == "cpu" for device in devices):
        return "fp32"
    return "amp-bf16" if all(map(_has_bf16, devices)) else "amp-fp16"


def uses_channels_last(section: TrainConfig, model: nn.Module, device: torch.device) -> bool:
    """Return True if the network is to work in NHWC.

    `auto` takes it where it is the faster format: on a GPU whose tensor cores make the convolutions (half precision, or
    float32 as TF32), for networks whose parameters are mostly those of convolutions.

    Args:
        section: `train`, with its precision resolved.
        model: the network.
        device: of the network; one that is neither CPU nor CUDA stands for a GPU that is planned for.
    """
    if section.channels_last != "auto":
        return section.channels_last
    if device.type == "cpu":
        return False
    if section.precision == "fp32" and not (section.tf32 and _has_bf16(device)):
        return False
    convolutions = [part.weight for part in model.modules() if isinstance(part, (nn.Conv2d, nn.ConvTranspose2d))]
    return 2 * sum(weight.numel() for weight in convolutions) >= sum(p.numel() for p in model.parameters())


def _has_bf16(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
