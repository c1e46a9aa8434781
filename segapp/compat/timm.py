"""Private names of timm, as of timm 1.0.31."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def embed_positions(encoder: Any, patches: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the tokens of the first block of a VisionTransformer or Eva, and its rotary embedding if it has one.

    `patches` is the output of `encoder.patch_embed`.
    """
    embedded = encoder._pos_embed(patches)
    return embedded if isinstance(embedded, tuple) else (embedded, None)
