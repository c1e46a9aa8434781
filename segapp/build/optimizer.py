"""Build the optimizer, its parameter groups and the learning-rate schedule from the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from segapp.config import OptimConfig, ScheduleConfig
from segapp.models import SegmentationModel
from segapp.optim import Schedule, adamw, norm_and_bias, parameter_groups, sgd
from segapp.precision import Precision


def build_parameter_groups(
    section: OptimConfig, model: SegmentationModel, precision: Precision
) -> list[Mapping[str, Any]]:
    """Return the optimizer's groups: backbone and head, with and without weight decay, as master weights."""
    no_decay = set() if section.decay_norm_and_bias else norm_and_bias(model)
    groups = parameter_groups(
        model.backbone_parameters(),
        model.head_parameters(),
        no_decay,
        weight_decay=section.weight_decay,
        head_lr_factor=section.head_lr_factor,
    )
    return [{**group, "params": precision.master_weights(group["params"])} for group in groups]


def build_optimizer(section: OptimConfig, groups: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
    """Return the optimizer of an `optim` section over parameter groups."""
    if section.name == "adamw":
        return adamw(groups, section.lr, section.betas)
    return sgd(groups, section.lr, momentum=section.momentum, nesterov=section.nesterov)


def build_schedule(section: ScheduleConfig) -> Schedule:
    """Return the learning-rate schedule of a `schedule` section."""
    return Schedule(**{**dict(section), "step_epochs": tuple(section.step_epochs)})
