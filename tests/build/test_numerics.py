"""`auto` of precision and memory format: by the card's capability and the network, and kept by a resume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.build.devices import DevicePlan
from segapp.build.network import build_network
from segapp.build.numerics import CUBLAS_VARIABLE, auto_precision, numerics, uses_channels_last
from segapp.config import ModelConfig, TrainConfig, dump_config, validate_config
from segapp.errors import ConfigError
from segapp.parallel.distributed import Ranks
from segapp.run.folder import RunFolder
from segapp.training.planning.auto import resolve_auto

CPU, V100, A100 = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
UNET = {"library": "smp", "name": "Unet", "encoder": "resnet18"}
SEGFORMER = {"library": "smp", "name": "Segformer", "encoder": "mit_b0"}


@pytest.fixture(autouse=True)
def _two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0) if device == V100 else (8, 0))


@pytest.mark.parametrize(
    ("devices", "expected"),
    [([CPU], "fp32"), ([A100], "amp-bf16"), ([V100], "amp-fp16"), ([A100, V100], "amp-fp16"), ([CPU, CPU], "fp32")],
)
def test_auto_precision_is_what_every_device_has(devices: list[torch.device], expected: str) -> None:
    assert auto_precision(devices) == expected


@pytest.mark.parametrize(
    ("train", "device", "expected"),
    [
        ({}, A100, True),
        ({}, V100, False),
        ({"tf32": False}, A100, False),
        ({"precision": "amp-fp16"}, V100, True),
        ({"precision": "fp16"}, V100, True),
        ({}, CPU, False),
        ({"channels_last": True}, CPU, True),
        ({"channels_last": False, "precision": "amp-bf16"}, A100, False),
    ],
)
def test_channels_last_where_tensor_cores_convolve(train: dict[str, Any], device: torch.device, expected: bool) -> None:
    model = build_network(ModelConfig(**UNET), 3, with_weights=False)
    assert uses_channels_last(TrainConfig(**train), model, device) == expected


def test_channels_last_is_not_for_transformers() -> None:
    model = build_network(ModelConfig(**SEGFORMER), 3, with_weights=False)
    assert not uses_channels_last(TrainConfig(precision="amp-bf16"), model, A100)


SWITCHES = {"deterministic": True, "tf32": False, "cudnn_benchmark": False}


def test_deterministic_is_refused_where_cublas_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS reads its variable at its first product: set later, every product of the run would raise."""
    monkeypatch.delenv(CUBLAS_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=f"{CUBLAS_VARIABLE}=:4096:8") as raised, numerics(**SWITCHES):
        pass
    assert raised.value.key == "train.deterministic"
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv(CUBLAS_VARIABLE, ":16:8")  # as a program that knows of it starts
    with numerics(**SWITCHES):
        assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("has_used_cuda", [False, True])
def test_second_deterministic_run_of_a_process_works(monkeypatch: pytest.MonkeyPatch, has_used_cuda: bool) -> None:
    monkeypatch.delenv(CUBLAS_VARIABLE, raising=False)
    for _ in range(2):
        with numerics(**SWITCHES):
            assert os.environ[CUBLAS_VARIABLE] == ":4096:8"
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_used_cuda)
        assert (CUBLAS_VARIABLE in os.environ) == has_used_cuda
    monkeypatch.setenv(CUBLAS_VARIABLE, "")  # so that it ends with this test


@pytest.mark.parametrize("began_with", [None, "amp-fp16"])
def test_resolved_precision_is_written_and_kept(began_with: str | None, tmp_path: Path) -> None:
    data = {"format": "folder", "root": str(tmp_path), "classes": ["a", "b"]}
    config = validate_config({"name": "r", "data": data, "train": {"precision": "auto"}})
    folder = RunFolder.create("r", path=tmp_path / "run")
    if began_with is not None:
        first = config.model_copy(update={"train": TrainConfig(precision=began_with)})
        folder.config_yaml.write_text(dump_config(first))
    resolved, plan = resolve_auto(config, folder, DevicePlan("single", (A100,), ""), [], Ranks())
    assert plan is None
    assert resolved.train.precision == (began_with or "amp-bf16")
