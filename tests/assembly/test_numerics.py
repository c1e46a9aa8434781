"""`auto` of precision and memory format: by the card's capability and the network, and kept by a resume."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.assembly.devices import CUBLAS_VARIABLE, DevicePlan, numerics, uses_channels_last, with_precision
from segapp.assembly.network import build_network
from segapp.assembly.own_parts import fp32_part
from segapp.config import ModelConfig, RunConfig, TrainConfig, load_config, validate_config
from segapp.config.trust import named_code
from segapp.custom.trust import accept_code
from segapp.errors import ConfigError
from segapp.parallel.distributed import Ranks
from segapp.planning.auto import resolve_auto
from segapp.run.folder import RunFolder
from segapp.session.request import TrainRequest
from segapp.session.session import run_session
from tests.support.runs import events, merged, train

CPU, V100, A100 = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
UNET = {"library": "smp", "name": "Unet", "encoder": "resnet18"}
SEGFORMER = {"library": "smp", "name": "Segformer", "encoder": "mit_b0"}


def config_of(**sections: Any) -> RunConfig:
    data = {"format": "folder", "root": "nowhere", "classes": ["a", "b"]}
    return validate_config({"name": "r", "data": data, **sections})


@pytest.fixture(autouse=True)
def _two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0) if device == V100 else (8, 0))


@pytest.mark.parametrize(
    ("devices", "expected"),
    [([CPU], "fp32"), ([A100], "amp-bf16"), ([V100], "amp-fp16"), ([A100, V100], "amp-fp16"), ([CPU, CPU], "fp32")],
)
def test_auto_precision_is_what_every_device_has(devices: list[torch.device], expected: str) -> None:
    assert with_precision(config_of(), devices).train.precision == expected


def test_precision_that_the_config_names_is_kept() -> None:
    config = config_of(train={"precision": "amp-fp16"})
    assert [with_precision(config, devices) for devices in ((A100,), (CPU,), ())] == [config] * 3


@pytest.mark.parametrize(
    ("asking", "expected"), [({"model"}, "fp32"), ({"loss"}, "fp32"), ({"optim"}, "amp-bf16"), (set(), "amp-bf16")]
)
def test_custom_model_and_loss_can_ask_for_float32(
    asking: set[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"model": "asking_net:Net", "loss": "asking_loss:build", "optim": "asking_optim:build"}
    monkeypatch.syspath_prepend(str(tmp_path))
    for section, name in names.items():
        module, factory = name.split(":")
        source = f"class {factory}: ...\n" if factory == "Net" else f"def {factory}(): ...\n"
        source += f'{factory}.precision = "fp32"\n' if section in asking else ""
        (tmp_path / f"{module}.py").write_text(source)
        monkeypatch.delitem(sys.modules, module, raising=False)
    sections = {"model": {"library": "python"}, "loss": {}, "optim": {}}
    config = config_of(**{key: {**section, "name": names[key]} for key, section in sections.items()})
    accept_code(named_code(config).values())
    assert fp32_part(config) == next((names[key] for key in ("model", "loss") if key in asking), None)
    assert with_precision(config, [A100, A100]).train.precision == expected


@pytest.mark.parametrize(
    ("train", "device", "expected"),
    [
        ({}, A100, True),
        ({}, V100, False),
        ({"tf32": False}, A100, False),
        ({"precision": "amp-fp16"}, V100, True),
        ({"precision": "fp16"}, V100, True),
        ({}, CPU, False),
    ],
)
def test_channels_last_where_tensor_cores_convolve(train: dict[str, Any], device: torch.device, expected: bool) -> None:
    model = build_network(ModelConfig(**UNET), 3, with_weights=False)
    section = TrainConfig(**{"precision": "fp32", **train})
    assert uses_channels_last(section, model, device) == expected


def test_channels_last_is_not_for_transformers() -> None:
    model = build_network(ModelConfig(**SEGFORMER), 3, with_weights=False)
    assert not uses_channels_last(TrainConfig(precision="amp-bf16"), model, A100)


SWITCHES = {"deterministic": True, "tf32": False}


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


def test_training_has_the_precision_that_all_ranks_support(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, ranks = RunFolder.create("r", path=tmp_path / "run"), Ranks()
    monkeypatch.setattr(ranks, "gather", lambda own: ["amp-bf16", own, "amp-bf16"])
    found = [resolve_auto(config_of(), folder, DevicePlan("ddp", (d,), ""), [], ranks)[0] for d in (V100, A100, CPU)]
    assert [resolved.train.precision for resolved in found] == ["amp-fp16", "amp-bf16", "fp32"]


@pytest.mark.parametrize("is_from_file", [False, True])
def test_resume_with_auto_keeps_the_precision(tiny: dict[str, Any], tmp_path: Path, is_from_file: bool) -> None:
    """A CPU would choose fp32; the checkpoint's file may also begin another run."""
    first, second = tmp_path / "first", tmp_path / ("second" if is_from_file else "first")
    assert train(merged(tiny, train={"epochs": 1, "precision": "amp-bf16"}), first) == 0
    config, source = merged(tiny, train={"epochs": 2}), first / "checkpoints" / "last.pt"
    request = TrainRequest(config, run=second, checkpoint=source)
    assert run_session(request if is_from_file else TrainRequest(config, RunFolder(first))) == 0
    starts = [(event["precision"], event.get("resumed_from_step")) for event in events(second, "run_start")]
    assert starts[-1] == ("amp-bf16", 5)
    assert load_config(second / "config.yaml").train.precision == "amp-bf16"
