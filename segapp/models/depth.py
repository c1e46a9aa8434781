"""Depth of the parameters of a transformer or ConvNeXt backbone, for layer-wise learning rates.

Knows the names of timm's ViT, DINOv2, DINOv3, Swin, ConvNeXt, PVT and of smp's SegFormer encoders, by the parts of the
names that count blocks, whatever module holds the backbone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_BLOCK = re.compile(r"(?:^|\.)(?:stages|layers)[._](\d+)\.(?:.+\.)?blocks\.(\d+)\.")  # Swin, ConvNeXt, PVT
_MIT_BLOCK = re.compile(r"(?:^|\.)block(\d+)\.(\d+)\.")  # smp's SegFormer: from 1
_PLAIN_BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")  # ViT
_STAGE_START = re.compile(r"(?:^|\.)(?:stages|layers)[._](\d+)\.downsample\.")
_MIT_STAGE_START = re.compile(r"(?:^|\.)patch_embed(\d+)\.")
_STAGE_END = re.compile(r"(?:^|\.)(?:stages|layers)[._](\d+)\.norm\.")
_MIT_STAGE_END = re.compile(r"(?:^|\.)norm(\d+)\.(?:weight|bias)$")
_STEM = re.compile(r"(?:^|\.)(?:stem(?:_\d+)?|patch_embed|pos_embed|(?:cls|reg|mask|dist)_token|rope|norm_pre)(?:\.|$)")
_END = re.compile(r"(?:^|\.)(?:norm|fc_norm)\.(?:weight|bias)$")
_LAST = 10**6


def layer_depths(names: Iterable[str]) -> tuple[dict[str, int], int] | str:
    """Return the depth of each parameter of a backbone, and the depth of what follows it.

    The stem has depth 0, the blocks have 1 to L in the order in which they run, the head has L + 1 (Bao et al., BEiT,
    2022). What begins a stage belongs to its first block, and what ends a stage or the backbone to the last block
    before it, as timm counts.

    Args:
        names: the parameters of a backbone.

    Returns:
        The depths and L + 1; or the first name that has no place in this order.

    Example:
        >>> layer_depths(["cls_token", "blocks.0.norm1.weight", "blocks.1.norm1.weight", "norm.weight"])
        ({'cls_token': 0, 'blocks.0.norm1.weight': 1, 'blocks.1.norm1.weight': 2, 'norm.weight': 2}, 3)
        >>> layer_depths(["conv1.weight", "layer1.0.conv1.weight"])
        'conv1.weight'
    """
    places: dict[str, tuple[int, int]] = {}
    for name in names:
        place = _place(name)
        if place is None:
            return name
        places[name] = place
    blocks = sorted({place for place in places.values() if place[0] >= 0 and place[1] < _LAST})
    if not blocks:
        return next(iter(places), "no parameter")
    depth_of = {block: depth for depth, block in enumerate(blocks, start=1)}
    last_of_stage = {stage: depth_of[stage, index] for stage, index in blocks}
    last_of_stage[_LAST] = len(blocks)
    return {name: _depth(place, depth_of, last_of_stage) for name, place in places.items()}, len(blocks) + 1


def _place(name: str) -> tuple[int, int] | None:
    """Return (stage, block); stem (-1, 0), end of a stage (stage, _LAST), end of the backbone (_LAST, _LAST)."""
    if found := _BLOCK.search(name):
        return int(found[1]), int(found[2])
    if found := _MIT_BLOCK.search(name):
        return int(found[1]) - 1, int(found[2])
    if found := _PLAIN_BLOCK.search(name):
        return 0, int(found[1])
    if found := _STAGE_START.search(name):
        return int(found[1]), 0
    if found := _MIT_STAGE_START.search(name):
        return (-1, 0) if found[1] == "1" else (int(found[1]) - 1, 0)
    if found := _STAGE_END.search(name):
        return int(found[1]), _LAST
    if found := _MIT_STAGE_END.search(name):
        return int(found[1]) - 1, _LAST
    if _STEM.search(name):
        return -1, 0
    return (_LAST, _LAST) if _END.search(name) else None


def _depth(place: tuple[int, int], depth_of: dict[tuple[int, int], int], last_of_stage: dict[int, int]) -> int:
    stage, block = place
    if stage == -1:
        return 0
    return last_of_stage[stage] if block == _LAST else depth_of[place]
