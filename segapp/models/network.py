"""`SegmentationModel`: a backbone and a head with logits at the head's own resolution.

Shapes: N images, B bands, C classes, K feature channels, H x W of the input in pixels, h x w of the logits.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from segapp.errors import ConfigError
from segapp.models.keys import LoadReport, modules_of
from segapp.models.names import unknown_name


@dataclass(frozen=True)
class BaseReference:
    """Frozen tensors below adapters that checkpoints leave out, because weights files contain them."""

    names: frozenset[str]
    """Names in the network with its adapters."""
    sha256: str
    """Hash of names, dtypes, shapes and values, before adapters and casts."""
    sources: tuple[str, ...]
    """The weights files, as named in the config."""


class SegmentationModel(nn.Module):
    """A backbone and a head that return logits at the head's own resolution.

    Parameter names are the original library's, so weights can be exchanged with it.

    Attributes:
        library: `torchvision`, `smp`, `segapp` or `python`.
        name: the model's name in that library.
        encoder_name: the backbone's name in that library.
        backbone_name: name of the submodule that is the backbone, for which pretrained weights exist.
        num_classes: C, the channels of every logits tensor.
        in_channels: B, the channels of the images.
        size_divisor: H and W must be multiples of it; 1: any size. `inspect_model` raises it until the network runs.
        min_size_px: smallest H and W.
        fixed_size_px: (H, W) if the backbone accepts no other size, else None.
        usual_size_px: (H, W) for which the library's entry of the backbone was made, else None.
        min_train_batch: smallest N in training mode; 2 if a BatchNorm follows a global pooling, which leaves one value
            per image and channel.
        logits_stride: input pixels per logit along each axis, measured by `inspect_model`.
        coarsest_stride: smallest multiple of the strides of all feature maps, measured by `inspect_model`.
        load_reports: one report per loaded weights file, the backbone's first.
        frozen_modules: names of the modules that `freeze` keeps in evaluation mode.
        frozen_parameters: names of the parameters that `freeze` has excluded from the training.
        called_modules: names of the modules that a forward pass calls, measured by `inspect_model`.
        base: tensors below adapters that checkpoints leave out; None: checkpoints hold all tensors.
        base_norms: names of the BatchNorms below adapters, which stay in evaluation mode.
    """

    def __init__(
        self,
        *,
        library: str,
        name: str,
        encoder_name: str,
        num_classes: int,
        in_channels: int,
        backbone_name: str = "encoder",
        size_divisor: int = 1,
        min_size_px: int = 1,
        fixed_size_px: tuple[int, int] | None = None,
        usual_size_px: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.library, self.name, self.encoder_name = library, name, encoder_name
        self.num_classes, self.in_channels = num_classes, in_channels
        self.backbone_name = backbone_name
        self.size_divisor, self.min_size_px = size_divisor, min_size_px
        self.fixed_size_px, self.usual_size_px = fixed_size_px, usual_size_px
        self.min_train_batch = self.logits_stride = self.coarsest_stride = 1
        self.load_reports: tuple[LoadReport, ...] = ()
        self.frozen_modules: tuple[str, ...] = ()
        self.frozen_parameters: tuple[str, ...] = ()
        self.called_modules: frozenset[str] = frozenset()
        self.base: BaseReference | None = None
        self.base_norms: tuple[str, ...] = ()

    @property
    def backbone_module(self) -> nn.Module:
        return self.get_submodule(self.backbone_name)

    @property
    def backbone_prefix(self) -> str:
        return f"{self.backbone_name}."

    def compute_logits(self, images_NCHW: Tensor) -> tuple[Tensor, ...]:
        """Return the same as `forward`, without checking the size."""
        return self.compute_with_features(images_NCHW)[0]

    @abstractmethod
    def compute_with_features(self, images_NCHW: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return the result of `compute_logits`, and the features (N, K, h, w) before the last layer, if known."""

    def forward(self, images_NCHW: Tensor) -> tuple[Tensor, ...]:
        """Return the logits (N, C, h, w) of normalized images (N, B, H, W), and auxiliary logits in training mode.

        Raises:
            ValueError: the network does not accept this H and W; the message names the nearest size that it accepts.
        """
        if not torch.compiler.is_compiling() and not torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            self.check_size(images_NCHW.shape[-2], images_NCHW.shape[-1])
        return self.compute_logits(images_NCHW)

    def count_update(self) -> None:
        """Count every update of the weights, including skipped ones; for networks that change with the training."""

    def check_size(self, height_px: int, width_px: int) -> None:
        """Raise ValueError, with the size to use, if the network does not accept images of this size."""
        if self.accepts(height_px, width_px):
            return
        wanted = self.suitable_size(height_px, width_px)
        if self.fixed_size_px is not None:
            rule = f"takes {wanted[0]}x{wanted[1]} px only: crop to it with data.crop_px"
            if self.library != "python":
                rule += ", or set the backbone's own option img_size, or for Swin strict_img_size: false"
        elif height_px < self.min_size_px or width_px < self.min_size_px:
            rule = f"needs at least {self.min_size_px} px a side: pad to {wanted[0]}x{wanted[1]}"
        else:
            rule = f"takes multiples of {self.size_divisor}: pad to {wanted[0]}x{wanted[1]}"
        raise ValueError(
            f"images of {height_px}x{width_px} px: {self.library} {self.name} with backbone {self.encoder_name} {rule}"
        )

    def accepts(self, height_px: int, width_px: int) -> bool:
        if self.fixed_size_px is not None:
            return (height_px, width_px) == self.fixed_size_px
        return all(side >= self.min_size_px and side % self.size_divisor == 0 for side in (height_px, width_px))

    @property
    def size_multiple(self) -> int:
        """Sides that are multiples of it are whole cells of every feature map; others stretch maps and move logits."""
        return math.lcm(self.size_divisor, self.coarsest_stride)

    def suitable_size(self, height_px: int, width_px: int) -> tuple[int, int]:
        """Return the smallest (H, W), at least this, to which images are padded; a fixed size in any case."""
        if self.fixed_size_px is not None:
            return self.fixed_size_px
        multiple, least_px = self.size_multiple, self.min_size_px
        # A traced side is a symbol. Written as a multiple, the tracer can divide it by the network's strides.
        sides: Iterator[Any] = (
            torch.sym_max(side, least_px) if least_px > 1 else side for side in (height_px, width_px)
        )
        height_px, width_px = ((side + multiple - 1) // multiple * multiple for side in sides)
        return height_px, width_px

    def names_matching(self, pattern: str, key: str) -> list[str]:
        """Return the names of the parameters that a pattern matches, which is the value of a config key.

        It is "backbone", or a glob over the names of parameters and modules; a module includes all parameters within
        it.

        Raises:
            ConfigError: it matches nothing; the message suggests similar names.
        """
        pattern, names = self._resolved(pattern), [name for name, _ in self.named_parameters()]
        found = [name for name in names if any(fnmatchcase(each, pattern) for each in modules_of(name))]
        if not found:
            known = {each for name in names for each in modules_of(name)}
            raise unknown_name(key, pattern, "the name, or a pattern of names, of a module or parameter", known)
        return found

    def freeze(self, patterns: Sequence[str]) -> None:
        """Exclude the parameters that patterns match (`names_matching`) from the training: they get no gradient.

        Modules that a pattern names stay in evaluation mode from the next `train()` on: their BatchNorm uses its
        running statistics and does not update them, and dropout within them is off.

        Raises:
            ConfigError: a pattern matches nothing, or nothing is left to train.
        """
        chosen = {name for pattern in patterns for name in self.names_matching(pattern, "model.freeze")}
        # `unfreeze` must not train parameters that never had a gradient.
        frozen = [name for name, p in self.named_parameters() if name in chosen and p.requires_grad]
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise ConfigError(
                f"model.freeze = {list(patterns)} freezes every parameter of {self.name}: leave some to train",
                key="model.freeze",
                value=list(patterns),
            )
        self.frozen_parameters = tuple(frozen)
        resolved = [self._resolved(pattern) for pattern in patterns]
        self.frozen_modules = tuple(
            name for name, _ in self.named_modules() if name and any(fnmatchcase(name, each) for each in resolved)
        )

    def unfreeze(self) -> list[str]:
        """Undo `freeze`, so that the parameters train again, and return their names."""
        names, self.frozen_parameters, self.frozen_modules = list(self.frozen_parameters), (), ()
        for name in names:
            self.get_parameter(name).requires_grad_(True)
        return names

    def train(self, mode: bool = True) -> SegmentationModel:
        """Set training or evaluation mode; frozen modules stay in evaluation mode."""
        super().train(mode)
        for name in (*self.frozen_modules, *self.base_norms):
            self.get_submodule(name).eval()
        return self

    def without_base(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict of this network without the tensors that `base` refers to; it is modified in place."""
        for name in () if self.base is None else self.base.names:
            del state[name]
        return state

    def _resolved(self, pattern: str) -> str:
        return self.backbone_name if pattern == "backbone" else pattern
