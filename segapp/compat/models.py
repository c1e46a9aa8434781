"""Private names of timm, as of timm 1.0.31, and of torchvision, as of torchvision 0.26 and 0.30."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn


def feature_maps_of(net: nn.Module, names: Mapping[str, str]) -> nn.Module:
    """Return a module that runs the children in order and returns the outputs of some of them under other names."""
    from torchvision.models._utils import IntermediateLayerGetter

    getter: nn.Module = IntermediateLayerGetter(net, return_layers=dict(names))
    return getter


def strided_blocks(blocks: Iterable[nn.Module]) -> list[int]:
    """Return the indices of MobileNetV3's blocks that begin a stage."""
    return [place for place, block in enumerate(blocks) if getattr(block, "_is_cn", False)]


def embed_positions(encoder: Any, patches: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the tokens of the first block of a VisionTransformer or Eva, and its rotary embedding if it has one.

    `patches` is the output of `encoder.patch_embed`.
    """
    embedded = encoder._pos_embed(patches)
    return embedded if isinstance(embedded, tuple) else (embedded, None)
