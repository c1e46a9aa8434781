"""From the `model` section to a network, and what follows from its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from segapp.config import DataConfig, EvalConfig, ModelConfig, RunConfig
from segapp.errors import ConfigError
from segapp.inference.normalize import Normalizer
from segapp.inference.sliding import Inference
from segapp.models import SegmentationModel, build_model
from segapp.optim import norm_and_bias, parameter_groups
from segapp.precision import Precision

if TYPE_CHECKING:
    pass


def build_network(section: ModelConfig, num_classes: int, *, with_weights: bool = True) -> SegmentationModel:
    """The model of a config; without its pretrained weights where a checkpoint follows."""
    return build_model(
        section.library,
        section.name,
        num_classes,
        weights=section.weights if with_weights else None,
        weights_backbone=section.weights_backbone if with_weights else None,
        aux=section.aux,
        encoder=section.encoder,
        options=section.options,
    )


def build_inference(
    data: DataConfig, section: EvalConfig, model: SegmentationModel, precision: Precision, align_corners: bool
) -> Inference:
    """How whole images are evaluated and predicted."""
    window = (section.slide_px or data.crop_px) if section.slide else None
    if model.fixed_size_px is not None:
        window = model.fixed_size_px
    return Inference(
        Normalizer(data.mean, data.std, precision.input_dtype).to(precision.device),
        align_corners=align_corners,
        window_px=window,
        overlap=section.slide_overlap,
        weighting=section.slide_weighting,
        scales=tuple(section.scales) if section.tta else (1.0,),
        flip=section.tta,
        autocast=precision.autocast,
    )


def check_sizes(config: RunConfig, model: SegmentationModel) -> None:
    """Refuses crops and batches that the model cannot take.

    Raises:
        ConfigError: names the size that would do.
    """
    height, width = config.data.crop_px
    wanted = model.suitable_size(height, width)
    if wanted != (height, width):
        raise ConfigError(
            f"data.crop_px = [{height}, {width}] does not suit {config.model.name}: use [{wanted[0]}, {wanted[1]}]"
        )
    if config.train.batch_size < model.min_train_batch:
        raise ConfigError(
            f"train.batch_size = {config.train.batch_size} is too small for {config.model.name}: its BatchNorm after "
            f"global pooling needs at least {model.min_train_batch} images"
        )


def set_batchnorm_momentum(model: nn.Module, momentum: float | None) -> None:
    """Sets the momentum of every BatchNorm layer; None leaves them as they are."""
    if momentum is not None:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = momentum


def build_parameter_groups(
    config: RunConfig, model: SegmentationModel, precision: Precision
) -> list[Mapping[str, Any]]:
    """The optimizer's groups: backbone and head, with and without weight decay, as `precision`'s master weights."""
    no_decay = set() if config.optim.decay_norm_and_bias else norm_and_bias(model)
    groups = parameter_groups(
        model.backbone_parameters(),
        model.head_parameters(),
        no_decay,
        weight_decay=config.optim.weight_decay,
        head_lr_factor=config.optim.head_lr_factor,
    )
    return [{**group, "params": precision.master_weights(group["params"])} for group in groups]
