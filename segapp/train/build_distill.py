"""`distill:` becomes a teacher, a critic and the terms of the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from segapp.config import CriticConfig, RunConfig
from segapp.datasets.schemes import ClassScheme
from segapp.errors import ConfigError
from segapp.losses import AdditiveCriterion, CriterionDistilled
from segapp.models import Critic, SegmentationModel, critic_size
from segapp.parallel import DataParallelModel, convert_sync_batchnorm
from segapp.precision import Precision
from segapp.train.devices import DevicePlan
from segapp.train.distill import HOLISTIC, PAIR_WISE, PIXEL_WISE, CriticTrainer, DistilledInput, Teacher, TermSettings
from segapp.train.normalize import Normalizer
from segapp.train.ranks import Ranks

if TYPE_CHECKING:
    from segapp.train.trained import TrainedState


def needs_sync_batchnorm(config: RunConfig, devices: DevicePlan) -> bool:
    """Whether BatchNorm is to be synchronised: over several devices of a process, or over ranks."""
    is_divided = devices.mode == "ddp" or (len(devices.devices) > 1 and devices.mode != "model")
    return config.parallel.sync_bn and is_divided


def distilled_criterion(config: RunConfig, task: AdditiveCriterion) -> AdditiveCriterion:
    """The criterion with what is learned from a teacher added to it; as it is where nobody teaches."""
    return task if config.distill is None else CriterionDistilled(task, _factors(config))


def _factors(config: RunConfig) -> dict[str, float]:
    assert config.distill is not None
    factors = {name: getattr(config.distill, name) for name in (PIXEL_WISE, PAIR_WISE, HOLISTIC)}
    return {name: factor for name, factor in factors.items() if factor}


def build_teacher(
    config: RunConfig, trained: TrainedState, scheme: ClassScheme, devices: DevicePlan, precision: Precision
) -> Teacher:
    """The teacher on all devices.

    Raises:
        ConfigError: it cannot teach this student.
    """
    found = trained.checkpoint.path
    if devices.mode == "model":
        raise ConfigError("distill: is not for parallel.mode = model: use single, dp or ddp")
    if list(trained.scheme.names) != list(scheme.names):
        pairs = zip(trained.scheme.names, scheme.names, strict=False)
        other = next((f"{a!r} for {b!r}" for a, b in pairs if a != b), "more or fewer")
        raise ConfigError(
            f"distill.teacher: {found} knows other classes ({trained.scheme.num_classes} of them, {other}) than this "
            f"data ({scheme.num_classes}): use a teacher of the same classes in the same order"
        )
    crop = config.data.crop_px
    wanted = trained.model.suitable_size(*crop)
    if wanted != crop:
        raise ConfigError(
            f"data.crop_px = {list(crop)} does not suit the teacher {trained.config.model.name}: use {list(wanted)}"
        )
    normalizer = Normalizer(trained.config.data.mean, trained.config.data.std)
    return Teacher(trained.model, normalizer, devices.devices, precision, trained.checkpoint.sha256)


def build_distilled_input(
    config: RunConfig,
    model: SegmentationModel,
    normalizer: Normalizer,
    teacher: Teacher,
    devices: DevicePlan,
    num_classes: int,
) -> DistilledInput:
    """The student's network with its teacher, and a critic where the holistic term counts."""
    assert config.distill is not None
    factors, size = _factors(config), critic_size(config.data.crop_px)
    precision, critic = critic_precision(config, devices.devices[0]), None
    if HOLISTIC in factors:
        section = config.distill.critic
        critic = Critic(num_classes, size, width=section.width, has_batchnorm=section.batchnorm)
        if needs_sync_batchnorm(config, devices):
            convert_sync_batchnorm(critic)
        precision.prepare(critic.to(devices.devices[0]))
        critic.requires_grad_(False)  # before DistributedDataParallel takes what learns
    settings = TermSettings(
        factors, config.distill.temperature, config.distill.pair_grid, config.loss.align_corners, size
    )
    return DistilledInput(
        model,
        normalizer,
        teacher,
        critic,
        settings,
        channels_last=config.train.channels_last,
        autocast=precision.autocast,
    )


def critic_precision(config: RunConfig, device: torch.device) -> Precision:
    """The critic's weights are always fp32: half ones would lose its small updates; autocast is as for the student."""
    name = config.train.precision
    return Precision("amp-fp16" if name == "fp16" else name, device)


def build_critic_trainer(
    config: RunConfig, critic: Critic, network: nn.Module, devices: DevicePlan, ranks: Ranks
) -> CriticTrainer:
    """What trains the critic, over the same devices as the student's network.

    Args:
        config: the complete config.
        critic: of the network.
        network: of the student, wrapped.
        devices: of this process.
        ranks: the processes that train together.
    """
    assert config.distill is not None
    section = config.distill.critic
    own: nn.Module = critic
    if isinstance(network, DataParallelModel):
        own = DataParallelModel(
            critic,
            network.devices,
            network.gpu0_bsz,
            shares=network.shares,
            full_batch=network.full_batch,
            mode=network.mode,
        )
    return CriticTrainer(
        critic,
        own,
        _build_optimizer(section, critic, lr_factor=section.lr / config.optim.lr),
        critic_precision(config, devices.devices[0]),
        kind=section.penalty,
        penalty_factor=section.penalty_weight,
        seed=config.seed,
        ranks=ranks,
    )


def _build_optimizer(section: CriticConfig, critic: Critic, lr_factor: float) -> torch.optim.Optimizer:
    groups = [{"params": list(critic.parameters()), "lr_factor": lr_factor}]
    optimizer = torch.optim.Adam(groups, lr=section.lr, betas=section.betas, fused=True)
    for parameter in critic.parameters():  # as torch makes them in the first step; then no update allocates
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer
