"""`SegmentationModel`: a backbone and a head with logits at the head's own resolution.

Shapes: N images, B bands, C classes, K feature channels, H x W of the input in pixels, h x w of the logits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from segapp.errors import ConfigError
from segapp.models.names import BACKBONE, modules_matching, parameters_matching
from segapp.models.weights import LoadReport


@dataclass(frozen=True)
class FamilyNote:
    """Relation of a family's logits to the output of its original library.

    Attributes:
        stride: input pixels per logit along each axis, with default options and, in torchvision, a ResNet-50;
            `SegmentationModel.logits_stride` has the value of a given network.
        align_corners: of the original library's upsampling; `interpolate(logits, (H, W), mode="bilinear",
            align_corners=align_corners)` equals its output.
        removed: what the original does after these logits; here the criterion and the evaluator do it.
    """

    stride: int
    align_corners: bool
    removed: str


FAMILY_NOTES: dict[str, FamilyNote] = {
    "torchvision/fcn": FamilyNote(8, False, "bilinear upsampling of main and auxiliary logits to the input size"),
    "torchvision/deeplabv3": FamilyNote(8, False, "bilinear upsampling of main and auxiliary logits to the input size"),
    "torchvision/lraspp": FamilyNote(
        8,
        False,
        "bilinear upsampling to the input size; the branch at stride 16 is still upsampled to stride 8 inside the head",
    ),
    "smp/Unet": FamilyNote(1, True, "nothing: its decoder ends at the input's resolution"),
    "smp/UnetPlusPlus": FamilyNote(1, True, "nothing: its decoder ends at the input's resolution"),
    "smp/MAnet": FamilyNote(1, True, "nothing: its decoder ends at the input's resolution"),
    "smp/Linknet": FamilyNote(1, True, "nothing: its decoder ends at the input's resolution"),
    "smp/FPN": FamilyNote(4, True, "bilinear upsampling by 4"),
    "smp/PSPNet": FamilyNote(8, True, "bilinear upsampling by 8"),
    "smp/DeepLabV3": FamilyNote(8, True, "bilinear upsampling by 8"),
    "smp/DeepLabV3Plus": FamilyNote(4, True, "bilinear upsampling by 4; the one by 4 inside the decoder stays"),
    "smp/PAN": FamilyNote(4, True, "bilinear upsampling by 4"),
    "smp/UPerNet": FamilyNote(4, True, "bilinear upsampling by 4"),
    "smp/Segformer": FamilyNote(4, True, "bilinear upsampling by 4"),
    "smp/DPT": FamilyNote(2, True, "bilinear upsampling by 2"),
    "segapp/eomt": FamilyNote(
        4,
        False,
        "bilinear upsampling of the masks, before their product with the classes, to the input size in an evaluation",
    ),
}
"""One note per family, `library/family`."""


class SegmentationModel(nn.Module):
    """A backbone and a head that return logits at the head's own resolution.

    Parameter names are those of the original library, so that weights can be exchanged with it. The constructor takes
    one keyword argument for each of the first nine attributes.

    Attributes:
        library: `torchvision`, `smp` or `segapp`.
        name: the model's name in that library.
        encoder_name: the backbone's name in that library.
        num_classes: C, the channels of every logits tensor.
        note: relation of the logits to the original library's output.
        in_channels: B, the channels of the images.
        size_divisor: H and W must be multiples of it; 1: any size.
        min_size_px: smallest H and W.
        fixed_size_px: (H, W) if the backbone takes no other size, else None.
        min_train_batch: smallest N in training mode; 2 if a BatchNorm follows a global pooling, which leaves one value
            per image and channel.
        logits_stride: input pixels per logit along each axis.
        load_reports: one report per loaded weights file, the backbone's first.
        frozen_modules: names of the modules that stay in evaluation mode, by `freeze`.
        frozen_parameters: names of the parameters that `freeze` took from the training.
    """

    def __init__(
        self,
        *,
        library: str,
        name: str,
        encoder_name: str,
        num_classes: int,
        note: FamilyNote,
        in_channels: int,
        size_divisor: int = 1,
        min_size_px: int = 1,
        fixed_size_px: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.library = library
        self.name = name
        self.encoder_name = encoder_name
        self.num_classes = num_classes
        self.note = note
        self.in_channels = in_channels
        self.size_divisor = size_divisor
        self.min_size_px = min_size_px
        self.fixed_size_px = fixed_size_px
        self.min_train_batch = 1
        self.logits_stride = note.stride
        self.load_reports: tuple[LoadReport, ...] = ()
        self.frozen_modules: tuple[str, ...] = ()
        self.frozen_parameters: tuple[str, ...] = ()

    @property
    @abstractmethod
    def backbone_module(self) -> nn.Module:
        """The backbone, for which pretrained weights exist."""

    @property
    @abstractmethod
    def backbone_prefix(self) -> str:
        """Prefix of the names of the backbone's tensors, with the dot."""

    @property
    @abstractmethod
    def has_aux(self) -> bool:
        """True if the network returns auxiliary logits in training mode."""

    @abstractmethod
    def compute_logits(self, images_NCHW: Tensor) -> tuple[Tensor, ...]:
        """Return what `forward` does, without the check of the size."""

    @abstractmethod
    def compute_with_features(self, images_NCHW: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the result of `compute_logits`, and the features (N, K, h, w) before the last layer."""

    def record_inspection(self, logits_stride: int, min_train_batch: int) -> None:
        """Set the measures that a run of the network shows; see `inspection`."""
        self.logits_stride, self.min_train_batch = logits_stride, min_train_batch

    def record_load(self, report: LoadReport) -> None:
        """Add the report of a loaded weights file."""
        self.load_reports += (report,)

    def forward(self, images_NCHW: Tensor) -> tuple[Tensor, ...]:
        """Return the logits of a batch of images.

        Args:
            images_NCHW: float (N, B, H, W), normalised as the backbone expects.

        Returns:
            A tuple of the logits (N, C, h, w) and, in training mode with an auxiliary head, the auxiliary logits
            (N, C, h', w').

        Raises:
            ValueError: the network does not take this H and W; the message names the nearest size that it takes.
        """
        if not torch.compiler.is_compiling() and not torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            self.check_size(images_NCHW.shape[-2], images_NCHW.shape[-1])
        return self.compute_logits(images_NCHW)

    def check_size(self, height_px: int, width_px: int) -> None:
        """Raise ValueError, with the size to use, if the network does not take images of this size."""
        wanted = self.suitable_size(height_px, width_px)
        if (height_px, width_px) == wanted:
            return
        if self.fixed_size_px is not None:
            rule = f"takes {wanted[0]}x{wanted[1]} px only: crop to it with data.crop_px" + (
                ""
                if self.library == "python"
                else ", or set the backbone's own option img_size, or for Swin strict_img_size: false"
            )
        elif height_px < self.min_size_px or width_px < self.min_size_px:
            rule = f"needs at least {self.min_size_px} px a side: pad to {wanted[0]}x{wanted[1]}"
        else:
            rule = f"takes multiples of {self.size_divisor}: pad to {wanted[0]}x{wanted[1]}"
        raise ValueError(
            f"images of {height_px}x{width_px} px: {self.library} {self.name} with backbone {self.encoder_name} {rule}"
        )

    def suitable_size(self, height_px: int, width_px: int) -> tuple[int, int]:
        """Return the smallest (H, W) in pixels that the network takes and that is at least this size.

        For a network of fixed size that size, even if the image is larger.
        """
        if self.fixed_size_px is not None:
            return self.fixed_size_px
        d = self.size_divisor
        height_px, width_px = max(height_px, self.min_size_px), max(width_px, self.min_size_px)
        return -(-height_px // d) * d, -(-width_px // d) * d

    def names_matching(self, pattern: str, key: str) -> list[str]:
        """Return the names of the parameters that a pattern matches, of which there is at least one.

        Args:
            pattern: "backbone", or a glob over the names of parameters and modules; a module stands for all within it.
            key: the config key that holds it, for the error.

        Raises:
            ConfigError: it matches none; the message has the nearest names.
        """
        return parameters_matching(self, self._resolved(pattern), key)

    def freeze(self, patterns: Sequence[str], key: str = "model.freeze") -> None:
        """Take parameters from the training: no gradient, so that the optimizer leaves them out.

        Modules that a pattern names stay in evaluation mode from the next `train()` on: their BatchNorm normalises with
        its running statistics and leaves them as they are, and there is no dropout within them.

        Args:
            patterns: as `names_matching` takes them.
            key: the config key that holds them, for errors.

        Raises:
            ConfigError: a pattern matches nothing, or nothing is left to train.
        """
        chosen = {name for pattern in patterns for name in self.names_matching(pattern, key)}
        frozen = [(name, p) for name, p in self.named_parameters() if name in chosen and p.requires_grad]
        for _, parameter in frozen:
            parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise ConfigError(
                f"{key} = {list(patterns)} freezes every parameter of {self.name}: leave some to train",
                key=key,
                value=list(patterns),
            )
        self.frozen_parameters = tuple(name for name, _ in frozen)
        self.frozen_modules = tuple(
            dict.fromkeys(name for pattern in patterns for name in modules_matching(self, self._resolved(pattern)))
        )

    def thaw(self) -> list[str]:
        """Train what `freeze` took from the training again, and return the names of these parameters."""
        names = list(self.frozen_parameters)
        for name in names:
            self.get_parameter(name).requires_grad_(True)
        self.frozen_parameters = self.frozen_modules = ()
        return names

    def train(self, mode: bool = True) -> SegmentationModel:
        """Set training or evaluation mode; frozen modules stay in evaluation mode."""
        super().train(mode)
        for name in self.frozen_modules:
            self.get_submodule(name).eval()
        return self

    def _resolved(self, pattern: str) -> str:
        return self.backbone_prefix.removesuffix(".") if pattern == BACKBONE else pattern
