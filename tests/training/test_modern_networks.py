"""Transformers and ConvNeXt: exact splits, resumed runs, other sizes in evaluation, sizes that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.config import RunConfig
from segapp.errors import ConfigError
from segapp.run.folder import RunFolder
from segapp.session.request import TrainRequest
from segapp.session.session import run_session
from segapp.training import signals
from tests.support.runs import differing, events, merged, train
from tests.training.test_resume import stop_at

DINO_V3 = "tu-vit_small_patch16_dinov3"
TINY_VIT: dict[str, Any] = {"depth": 4, "embed_dim": 48, "num_heads": 3}
EOMT: dict[str, Any] = {
    "model": {
        "library": "segapp",
        "name": "eomt",
        "aux": True,
        "encoder": DINO_V3,
        "options": {**TINY_VIT, "num_queries": 6, "num_blocks": 2, "mask_steps": 6},
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
NETWORKS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "ConvNeXt": ({**SEGFORMER, "encoder": "tu-test_convnext"}, (64, 96)),
    "SegFormer": ({**SEGFORMER, "encoder": "mit_b0"}, (64, 96)),
    "Swin": (
        {
            **SEGFORMER,
            "encoder": "tu-swin_tiny_patch4_window7_224",
            "options": {"depths": [1, 1, 1, 1], "embed_dim": 24, "strict_img_size": False},
        },
        (64, 96),
    ),
    "DINOv2": (
        {
            "library": "segapp",
            "name": "eomt",
            "aux": True,
            "encoder": "tu-vit_small_patch14_dinov2",
            "options": {**TINY_VIT, "num_queries": 6, "num_blocks": 2},
        },
        (42, 70),
    ),
    "DPT": (DPT["model"], (64, 96)),
}
"""A network, and a crop that it takes and that is not square."""


def config_of(tiny: dict[str, Any], network: dict[str, Any], **sections: Any) -> RunConfig:
    base = {
        "data": {"crop_px": [32, 64]},
        "optim": {"name": "sgd", "lr": 0.01},
        "train": {"epochs": 2, "batch_size": 4, "ema": 0.9},
        "eval": {"every_epochs": 2},
    }
    own = {key: {**base.get(key, {}), **value} for key, value in {**base, **network, **sections}.items()}
    return merged(tiny, **own)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["model"]
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    "network", [pytest.param(EOMT, id="EoMT"), pytest.param(DPT, id="DPT-DINOv3", marks=pytest.mark.slow)]
)
def test_any_split_takes_the_course_of_one_device(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: Any
) -> None:
    """DPT without its dropout, and not in micro-batches, whose BatchNorm statistics are each one's own."""
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda values, *args, **kwargs: values)
    splits: dict[str, dict[str, Any]] = {
        "single": {"train": {"epochs": 3, "batch_size": 10}},
        "dp": {
            "parallel": {"mode": "dp", "devices": ["cpu"] * 3, "shares": [0, 3, 7]},
            "train": {"epochs": 3, "batch_size": 10},
        },
        "accumulate": {"train": {"epochs": 3, "batch_size": 2, "accumulate": 5}},
    }
    if network is DPT:
        del splits["accumulate"]
    losses, weights = {}, {}
    for name, sections in splits.items():
        assert train(config_of(tiny, network, **sections), tmp_path / name) == 0
        losses[name] = [event["loss"] for event in events(tmp_path / name, "step")]
        weights[name] = weights_of(tmp_path / name)
    for name in splits:
        assert losses[name] == pytest.approx(losses["single"], rel=1e-5)
        for key, tensor in weights["single"].items():
            torch.testing.assert_close(weights[name][key], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_stopped_eomt_training_resumes_bitwise(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tiny, EOMT, optim={"name": "adamw", "lr": 0.001})
    assert train(config, tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        assert train(config, tmp_path / "run") == signals.EXIT_STOPPED_AND_SAVED
    assert run_session(TrainRequest(config, RunFolder(tmp_path / "run"))) == 0
    whole, resumed = (
        torch.load(tmp_path / name / "checkpoints" / "last.pt", weights_only=True) for name in ("whole", "run")
    )
    assert differing(whole, resumed) == []
    assert int(resumed["model"]["masking.num_updates"]) == whole["position"]["step"] > 0


@pytest.mark.slow
def test_eomt_learns_the_drawn_classes_in_bf16(tiny: dict[str, Any], tmp_path: Path) -> None:
    sections = {"train": {"epochs": 6, "batch_size": 2, "precision": "amp-bf16"}, "eval": {"every_epochs": 6}}
    assert train(config_of(tiny, EOMT, optim={"name": "adamw", "lr": 0.002}, **sections), tmp_path) == 0
    steps = events(tmp_path, "step")
    assert set(steps[0]["terms"]) == {"class", "mask_bce", "mask_dice"}
    first, last = (sum(step["loss"] for step in part) for part in (steps[:5], steps[-5:]))
    assert last < 0.9 * first
    assert events(tmp_path, "val")[-1]["miou"] > 0.2


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in ("SegFormer", "DPT") else ()) for n in NETWORKS]
)
def test_network_trains_at_an_odd_crop_and_evaluates_at_others(tiny: dict[str, Any], tmp_path: Path, name: str) -> None:
    model, crop = NETWORKS[name]
    network = {"model": model, "loss": EOMT["loss"] if model["library"] == "segapp" else {"name": "ce"}}
    config = config_of(tiny, network, data={"crop_px": list(crop)}, train={"epochs": 1, "batch_size": 4})
    assert train(config, tmp_path / "run") == 0
    (val,) = events(tmp_path / "run", "val")  # images of 48 x 64 px
    assert val["loss"] is not None
    odd = merged(config.model_dump(mode="json"), data={"crop_px": [50, 65]})
    with pytest.raises(ConfigError, match=r"data\.crop_px = \[50, 65\] does not fit .*: use \["):
        train(odd, tmp_path / "odd")
