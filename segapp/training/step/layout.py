"""The division of a training step over devices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from segapp.build.devices import DevicePlan
from segapp.config import RunConfig
from segapp.config.modes import Mode
from segapp.memory.simulated.jobs import LossStyle


@dataclass(frozen=True)
class StepLayout:
    """The division of a step over devices.

    Attributes:
        mode: how the devices work together.
        devices: of this process; the first one holds the weights.
        gpu0_bsz: samples of a full batch on the first device or rank, in dp and ddp; None: an even split.
        shares: samples of a full batch on each device or rank, in dp and ddp; None: as `gpu0_bsz` says.
        loss: style of the loss; the planner compares segapp's with others.
    """

    mode: Mode
    devices: tuple[torch.device, ...]
    gpu0_bsz: int | None = None
    shares: tuple[int, ...] | None = None
    loss: LossStyle = "small"

    @property
    def is_batch_divided(self) -> bool:
        """True if BatchNorm sees only a part of the batch on each device."""
        return self.mode == "ddp" or (self.mode == "dp" and len(self.devices) > 1)


def build_layout(config: RunConfig, devices: DevicePlan, gpu0_bsz: int | None) -> StepLayout:
    """Return the layout that a config asks for on the devices of this process.

    Args:
        config: its `parallel.shares` hold before `gpu0_bsz`.
        devices: devices and mode.
        gpu0_bsz: samples of a full batch on the first device, `auto` resolved.
    """
    shares = None if config.parallel.shares is None else tuple(config.parallel.shares)
    return StepLayout(devices.mode, devices.devices, gpu0_bsz, shares)
