"""Transformers and ConvNeXt: other sizes in evaluation, sizes that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from segapp.config import RunConfig
from segapp.errors import ConfigError
from tests.support.runs import events, merged, train

DINO_V3 = "tu-vit_small_patch16_dinov3"
TINY_VIT: dict[str, Any] = {"depth": 4, "embed_dim": 48, "num_heads": 3}
QUERIES = {**TINY_VIT, "num_queries": 6, "num_blocks": 2}
EOMT: dict[str, Any] = {
    "model": {
        "library": "segapp",
        "name": "eomt",
        "aux": True,
        "encoder": DINO_V3,
        "options": {**QUERIES, "mask_steps": 6},
    },
    "loss": {"name": "mask_classification", "align_corners": False, "aux_weight": 1.0},
}
DPT: dict[str, Any] = {
    "model": {
        "library": "smp",
        "name": "DPT",
        "encoder": DINO_V3,
        "options": {
            "embed_dim": 48,
            "num_heads": 3,
            "decoder_intermediate_channels": [16, 16, 16, 16],
            "decoder_fusion_channels": 16,
        },
    },
}
SEGFORMER: dict[str, Any] = {"library": "smp", "name": "Segformer", "options": {"decoder_segmentation_channels": 16}}
SWIN_OPTIONS = {"depths": [1, 1, 1, 1], "embed_dim": 24, "strict_img_size": False}
NETWORKS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "DINOv2": ({**EOMT["model"], "encoder": "tu-vit_small_patch14_dinov2", "options": QUERIES}, (42, 70)),
    "ConvNeXt": ({**SEGFORMER, "encoder": "tu-test_convnext"}, (64, 96)),
    "SegFormer": ({**SEGFORMER, "encoder": "mit_b0"}, (64, 96)),
    "Swin": ({**SEGFORMER, "encoder": "tu-swin_tiny_patch4_window7_224", "options": SWIN_OPTIONS}, (64, 96)),
    "DPT": (DPT["model"], (64, 96)),
}
"""A network, and a crop that it takes and that is not square."""


def config_of(base: dict[str, Any], network: dict[str, Any], **sections: Any) -> RunConfig:
    own = {"data": {"crop_px": [32, 64]}, "optim": {"lr": 0.01}, "eval": {"every_epochs": 2}, **network, **sections}
    return merged({**base, "model": {}}, **own)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", NETWORKS)
def test_network_trains_at_an_odd_crop_and_evaluates_at_others(base: dict[str, Any], tmp_path: Path, name: str) -> None:
    model, crop = NETWORKS[name]
    network = {"model": model, "loss": EOMT["loss"] if model["library"] == "segapp" else {"name": "ce"}}
    config = config_of(base, network, data={"crop_px": list(crop)}, train={"epochs": 1}, eval={})
    assert train(config, tmp_path / "run") == 0
    (val,) = events(tmp_path / "run", "val")  # images of 48 x 64 px
    assert val["loss"] is not None
    odd = merged(config.model_dump(mode="json"), data={"crop_px": [50, 65]})
    with pytest.raises(ConfigError, match=r"data\.crop_px = \[50, 65\] does not fit .*: use \["):
        train(odd, tmp_path / "odd")
