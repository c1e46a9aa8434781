"""Steps and evaluations of every mode, precision and architecture keep CUDA's rules; no GPU is needed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

SPLITS = {"single": [4], "dp": [2, 1, 1], "ddp": [4], "model": [4, 0]}

VIT_OPTIONS = {"depth": 2, "embed_dim": 48, "num_heads": 3, "num_queries": 6, "num_blocks": 1, "mask_steps": 6}
NETWORKS: dict[str, dict[str, Any]] = {
    "lraspp": {"library": "torchvision", "name": "lraspp", "encoder": "mobilenet_v3_small"},
    "deeplabv3plus": {"library": "smp", "name": "DeepLabV3Plus", "encoder": "tu-test_resnet"},
    "pspnet": {"library": "smp", "name": "PSPNet", "encoder": "tu-test_resnet"},
    "upernet": {"library": "smp", "name": "UPerNet", "encoder": "tu-test_convnext"},
    "segformer": {"library": "smp", "name": "Segformer", "encoder": "mit_b0"},
    "dpt": {"library": "smp", "name": "DPT", "encoder": "tu-test_vit"},
    "eomt": {"library": "segapp", "name": "eomt", "encoder": "tu-vit_small_patch16_dinov3", "options": VIT_OPTIONS},
}
"""Small forms of the recipes' architectures, and transformers, whose LayerNorm is what CUDA is strict about."""

CASES = [
    *(("deeplabv3plus", *pair) for pair in zip(SPLITS, ("amp-fp16", "amp-bf16", "fp16", "fp32"), strict=True)),
    ("segformer", "model", "fp16"),
    ("eomt", "ddp", "amp-bf16"),
    ("eomt", "dp", "fp16"),
    ("pspnet", "dp", "fp16"),
    ("upernet", "model", "amp-bf16"),
    ("dpt", "single", "fp16"),
    ("lraspp", "ddp", "amp-fp16"),
]
"""Each network, mode and precision, in pairs that differ."""


def case_of(network: dict[str, Any], mode: str, precision: str) -> dict[str, Any]:
    crop = 160 if network["name"] == "DPT" else 64
    config = {
        "name": "rules",
        "data": {"format": "folder", "root": "nowhere", "classes": ["a", "b", "c"], "crop_px": [crop, crop]},
        "model": network,
        "train": {"precision": precision, "ema": 0.99},
        "optim": {"name": "sgd", "momentum": 0.9, "clip_grad_norm": 1.0},
        "loss": {"name": "mask_classification" if network["library"] == "segapp" else "ce"},
    }
    return {"config": config, "mode": mode, "split": SPLITS[mode], "eval_px": [crop, 2 * crop]}


def errors_of(cases: list[dict[str, Any]], tmp_path: Path) -> list[str | None]:
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.support.gpu.cuda_rules", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_architectures_and_modes_keep_cudas_rules(tmp_path: Path) -> None:
    """One process, because most of its time is imports; the last two cases have faults that must be found."""
    cases = [case_of(NETWORKS[name], mode, precision) for name, mode, precision in CASES]
    faults = [case_of(NETWORKS["segformer"], "single", "fp16"), case_of(NETWORKS["lraspp"], "model", "fp32")]
    *errors, float_norms, far_logits = errors_of([*cases, *({**case, "fault": True} for case in faults)], tmp_path)
    assert {name: error for name, error in zip(CASES, errors, strict=True) if error} == {}
    assert "expected scalar type Half but found Float" in str(float_norms)
    assert "simgpu:1" in str(far_logits)
