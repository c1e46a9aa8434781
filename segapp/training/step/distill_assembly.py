"""Build teacher, critic and terms from the `distill` section."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from segapp.assembly.devices import uses_channels_last
from segapp.assembly.network import build_normalizer
from segapp.assembly.pairs import build_pixels
from segapp.config import RunConfig
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.errors import ConfigError
from segapp.inference.sliding import NormalizedInput
from segapp.losses import AdditiveCriterion, CriterionDistilled
from segapp.models import Critic, SegmentationModel, critic_size
from segapp.models.normalizer import Normalizer
from segapp.optim import adam
from segapp.parallel import DataParallelModel, convert_sync_batchnorm
from segapp.precision import Precision
from segapp.training.step.distill import (
    HOLISTIC,
    PAIR_WISE,
    PIXEL_WISE,
    CriticTrainer,
    DistilledInput,
    Teacher,
    TeacherIdentity,
)
from segapp.training.step.network import TrainedNetwork
from segapp.training.step.participant import StepParticipant
from segapp.training.step.update import WeightUpdate

if TYPE_CHECKING:
    from segapp.assembly.trained import TrainedState

CRITIC_LR = 0.0004
"""Initial learning rate of the critic; it follows the schedule. Both values are from Liu et al., 2019."""
PENALTY_WEIGHT = 10.0
"""Weight of the critic's gradient penalty."""


def distilled_criterion(config: RunConfig, task: AdditiveCriterion, network: NormalizedInput) -> AdditiveCriterion:
    """Return the criterion with the terms of the distillation added; unchanged for a network without distillation."""
    return CriterionDistilled(task, _factors(config)) if isinstance(network, DistilledInput) else task


def _factors(config: RunConfig) -> dict[str, float]:
    assert config.distill is not None
    factors = {name: getattr(config.distill, name) for name in (PIXEL_WISE, PAIR_WISE, HOLISTIC)}
    return {name: factor for name, factor in factors.items() if factor}


def check_teacher(config: RunConfig, trained: TrainedState, scheme: ClassScheme) -> None:
    """Raise ConfigError if the teacher does not suit the student: its classes, its library, its images, its crops."""
    found = trained.path
    if list(trained.scheme.names) != list(scheme.names):
        pairs = zip(trained.scheme.names, scheme.names, strict=False)
        other = next((f"{a!r} for {b!r}" for a, b in pairs if a != b), "more or fewer")
        raise ConfigError(
            f"distill.teacher: {found} has other classes ({trained.scheme.num_classes} of them, {other}) than this "
            f"data ({scheme.num_classes}): use a teacher of the same classes in the same order",
            key="distill.teacher",
        )
    for key, library in (("model", config.model.library), ("distill.teacher", trained.config.model.library)):
        if library == "python":
            raise ConfigError(
                f"{key} is a custom model (library python), and distill cannot find its features before the last "
                "layer: use a model of torchvision or smp, or remove distill",
                key=key,
            )
    own, taught = build_pixels(config.data), build_pixels(trained.config.data)
    if (own.bands, own.dtype) != (taught.bands, taught.dtype):
        raise ConfigError(
            f"distill.teacher: {found} was trained on {taught.layout}, and this data is {own.layout}: use a teacher of "
            "the same data.bands and data.dtype",
            key="distill.teacher",
        )
    crop = config.data.crop_px
    wanted = trained.model.suitable_size(*crop)
    if wanted != crop:
        raise ConfigError(
            f"data.crop_px = {list(crop)} does not suit the teacher {trained.config.model.name}: use {list(wanted)}",
            key="data.crop_px",
        )


def build_teacher(
    trained: TrainedState,
    devices: Sequence[torch.device],
    input_dtype: torch.dtype,
    put: Callable[[nn.Module, torch.device], Any] = lambda module, device: copy.deepcopy(module).to(device),
) -> Teacher:
    """Return the teacher in the training's precision; `put` makes one copy of it per device.

    Logical devices on one real device share a copy.
    """
    model, data = trained.model.eval().requires_grad_(False), trained.config.data
    return Teacher(
        {
            device: (put(model, device), build_normalizer(data, input_dtype).to(device))
            for device in dict.fromkeys(devices)
        },
        trained.sha256,
    )


def build_critic(config: RunConfig, num_classes: int, device: torch.device, *, is_synced: bool) -> Critic | None:
    """Return the critic of the holistic term; None if the term's weight is 0."""
    assert config.distill is not None
    if not config.distill.holistic:
        return None
    size = critic_size(config.data.crop_px)
    channels = build_pixels(config.data).num_bands + num_classes
    critic = Critic(channels, size, width=config.distill.critic_width)
    if is_synced:
        convert_sync_batchnorm(critic)
    _critic_precision(config, device).prepare(critic.to(device))
    return critic.requires_grad_(False)  # before DistributedDataParallel collects the trainable parameters


def build_distilled_input(
    config: RunConfig,
    model: SegmentationModel,
    normalizer: Normalizer,
    teacher: Teacher,
    critic: Critic | None,
    device: torch.device,
) -> DistilledInput:
    """Return the network of student, teacher and critic."""
    assert config.distill is not None
    distill = config.distill
    return DistilledInput(
        model,
        normalizer,
        teacher,
        critic,
        factors=_factors(config),
        temperature=distill.temperature,
        align_corners=config.loss.align_corners,
        critic_size=critic_size(config.data.crop_px),
        channels_last=uses_channels_last(config.train, model, device),
        autocast=_critic_precision(config, device).autocast,
    )


def _critic_precision(config: RunConfig, device: torch.device) -> Precision:
    """Return the critic's precision: fp32 weights, because half weights lose small updates; the student's autocast."""
    name = config.train.precision
    return Precision("amp-fp16" if name == "fp16" else name, device)


def build_distillation(config: RunConfig, network: TrainedNetwork, inner: DistilledInput) -> list[StepParticipant]:
    """Build the participants of the distillation; a critic is trained on the devices of the student's network.

    `network` is the student's, and `inner` the same without its division over devices.
    """
    assert config.distill is not None
    critic = inner.critic
    identity = TeacherIdentity(inner.teacher)
    if critic is None:
        return [identity]
    student, own = network.module, cast(nn.Module, critic)
    if isinstance(student, DataParallelModel):
        own = DataParallelModel(
            critic,
            student.devices,
            student.gpu0_bsz,
            shares=student.shares,
            full_batch=student.full_batch,
            mode=student.mode,
        )
    groups = [{"params": list(critic.parameters()), "lr_factor": CRITIC_LR / config.optim.lr}]
    update = WeightUpdate(
        cast(Any, critic), adam(groups, CRITIC_LR, (0.9, 0.99)), _critic_precision(config, network.device)
    )
    trainer = CriticTrainer(
        critic,
        own,
        update,
        network.ranks,
        penalty=config.distill.critic_penalty,
        factor=PENALTY_WEIGHT,
        seed=config.seed,
        student=student,
    )
    return [identity, trainer]
