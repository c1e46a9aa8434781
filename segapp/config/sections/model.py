"""The sections of what is trained: `model`, `loss` and `distill`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from segapp.config.sections.values import (
    Count,
    HeightWidth,
    NonNegativeFloat,
    PartName,
    PositiveFloat,
    PositiveInt,
    Section,
)


class ModelConfig(Section):
    """`model:` the network."""

    library: Literal["torchvision", "smp", "segapp", "python"] = "torchvision"
    """torchvision.models.segmentation, segmentation_models_pytorch, segapp (eomt), or python: own code."""
    name: str = "deeplabv3_resnet50"
    """Name of the model in its library; with library python an own part: package.module:factory, ./file.py:factory."""
    encoder: str | None = None
    """Encoder of an smp model, e.g. resnet34, or tu- and a model of timm; for eomt a vision transformer of timm."""
    weights: str | None = None
    """Initial weights of the whole model: name of a torchvision weights enum, a file, or a run; null: random."""
    weights_backbone: str | None = None
    """Initial weights of the backbone: IMAGENET1K_V1 (torchvision), imagenet (smp, eomt), or a file; null: random."""
    partial_weights: bool = False
    """Take the tensors of a weights file that match, also of another backbone or of a part of one."""
    freeze: list[Annotated[str, Field(min_length=1)]] = []
    """Parts that are not trained, BatchNorm and dropout in evaluation mode: backbone, or names or patterns of names."""
    freeze_epochs: PositiveInt | None = None
    """Epochs for which model.freeze holds; null: the whole run."""
    aux: bool = True
    """Build the auxiliary head, if the model has one; for eomt: also learn from the queries before each block."""
    options: dict[str, Any] = {}
    """Further keyword arguments for the library's constructor; eomt: num_queries, num_blocks, mask_steps, timm's."""


class LossTerm(Section):
    """A criterion with its weight in the sum of the terms."""

    name: (
        Literal["ce", "ohem", "bce", "dice", "tversky", "focal", "lovasz", "boundary", "mask_classification"] | PartName
    ) = "ce"
    """Criterion: (binary) cross-entropy, hard pixels (ohem), overlap, boundary, eomt's (mask_*), or an own part."""
    options: dict[str, Any] = {}
    """Keyword arguments of an own part."""
    weight: NonNegativeFloat = 1.0
    """Weight of this term in the sum."""
    align_corners: bool = True
    """align_corners of the bilinear upsampling of the logits; evaluation uses the first term's."""
    aux_weight: NonNegativeFloat = 0.4
    """Weight of the auxiliary head's loss."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target probability spread evenly over all classes (ce), or over yes and no (bce)."""
    implementation: Literal["auto", "compiled", "reference"] = "auto"
    """auto: fused, Triton on GPUs; compiled: fused by torch.compile (CPU); reference: full-resolution logits (ce)."""
    class_weights: list[NonNegativeFloat] | Literal["inverse", "enet", "median-frequency"] | None = None
    """Weight of each class, or a rule that computes them from the training masks (ce, ohem, bce, focal)."""
    ohem_threshold: Annotated[float, Field(gt=0, le=1)] = 0.7
    """A pixel is hard if the probability of its target class is below this (ohem)."""
    ohem_min_kept: Count = 100_000
    """Smallest number of valid pixels of a step that contribute (ohem)."""
    focal_gamma: NonNegativeFloat = 2.0
    """Focusing exponent gamma (focal)."""
    bce_pos_weight: PositiveFloat = 1.0
    """Factor of the pixels that are of a class (bce)."""
    dice_smooth: NonNegativeFloat = 1.0
    """Added to numerator and denominator (dice, tversky)."""
    tversky_alpha: NonNegativeFloat = 0.3
    """Weight of false positives (tversky)."""
    tversky_beta: NonNegativeFloat = 0.7
    """Weight of false negatives (tversky)."""
    tversky_gamma: PositiveFloat = 1.0
    """Exponent; 0.75 is the focal Tversky loss (tversky)."""
    mask_class_factor: NonNegativeFloat = 2.0
    """Factor of the cross-entropy of the queries' classes (mask_classification)."""
    mask_bce_factor: NonNegativeFloat = 5.0
    """Factor of the masks' binary cross-entropy (mask_classification)."""
    mask_dice_factor: NonNegativeFloat = 5.0
    """Factor of the masks' Dice loss (mask_classification)."""
    mask_no_object: NonNegativeFloat = 0.1
    """Weight of queries without a match in the cross-entropy of the classes (mask_classification)."""


class LossConfig(LossTerm):
    """`loss:` a criterion, and further ones added to it."""

    plus: list[LossTerm] = []
    """Further terms; the loss is the weighted sum of all."""


class CriticConfig(Section):
    """`distill.critic:` the network that scores prediction maps in the holistic term, and its training."""

    penalty: Literal["wgan-gp", "wgan-lp", "dragan"] = "wgan-gp"
    """Gradient penalty."""
    penalty_weight: NonNegativeFloat = 10.0
    """Weight of the gradient penalty."""
    width: PositiveInt = 64
    """Channels of the first stage."""
    batchnorm: bool = True
    """Normalise the input over the whole batch."""
    lr: PositiveFloat = 0.0004
    """Initial learning rate (Adam); it follows the schedule."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    """Decay rates of the first and second moment (Adam)."""


class DistillConfig(Section):
    """`distill:` knowledge distillation from a trained model; modes single, dp and ddp."""

    teacher: Annotated[str, Field(min_length=1)]
    """Teacher with the same classes: a run (name or folder; its best checkpoint is used) or a checkpoint file."""
    pixel_wise: NonNegativeFloat = 10.0
    """Weight of the KL divergence between the class probabilities of each pixel; 0: off."""
    temperature: PositiveFloat = 1.0
    """Temperature by which the logits are divided in the pixel-wise term."""
    pair_wise: NonNegativeFloat = 10.0
    """Weight of the squared difference between the similarities of pairs of image regions; 0: off."""
    pair_grid: HeightWidth = (8, 8)
    """Number of regions along height and width, for the pair-wise term."""
    holistic: NonNegativeFloat = 0.1
    """Weight of the critic's score of whole prediction maps (adversarial term); 0: off."""
    critic: CriticConfig = CriticConfig()
    """The critic of the holistic term."""
