"""The process-wide switches: set before CUDA starts, in trainers and their ranks, and undone at the end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from segapp.assembly import devices as module
from segapp.assembly.devices import ALLOCATOR_VARIABLES, CUBLAS_VARIABLE, numerics
from segapp.config import load_config
from segapp.datasets.loader import Batch
from segapp.errors import ConfigError
from segapp.inference.evaluate import EvaluationSettings, evaluate
from segapp.inference.predict.predictor import predict_image
from segapp.inference.sliding import Inference, without_cudnn_benchmark
from segapp.models.normalizer import Normalizer
from segapp.session.failures import as_segapp_error
from tests.support import ROOT

PLAIN: dict[str, Any] = {"deterministic": False, "tf32": True}


def switches() -> dict[str, Any]:
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "cudnn": torch.backends.cudnn.deterministic,
        "matmul": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "convolution": torch.backends.cudnn.conv.fp32_precision == "tf32",
        "environment": {name: os.environ.get(name) for name in (*ALLOCATOR_VARIABLES, CUBLAS_VARIABLE)},
    }


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ALLOCATOR_VARIABLES, CUBLAS_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.filterwarnings("error")
def test_switches_are_set_and_undone(deterministic: bool, tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = switches()
    with numerics(deterministic=deterministic, tf32=tf32):
        inside = switches()
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")  # torch.compile reads this
    assert switches() == before
    assert (inside["deterministic"], inside["cudnn"], inside["benchmark"]) == (
        deterministic,
        deterministic,
        not deterministic,
    )
    assert (inside["matmul"], inside["convolution"]) == (tf32, tf32)
    assert inside["environment"][CUBLAS_VARIABLE] == (":4096:8" if deterministic else None)


def test_training_that_needs_no_determinism_does_not_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call, even one that changes nothing, imports torch._inductor, and the process ends seconds later."""
    calls: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda is_on, **_: calls.append(is_on))
    with numerics(**PLAIN):
        pass
    assert calls == []
    with numerics(deterministic=True, tf32=True):
        assert calls == [True]
    assert calls == [True, False]


def test_products_on_the_cpu_stay_exact() -> None:
    with numerics(**PLAIN):
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("platform", "cuda", "user", "expected"),
    [
        ("linux", "13.0", {}, "expandable_segments:True"),
        ("linux", None, {}, None),
        ("win32", "13.0", {}, None),
        ("linux", "13.0", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ("linux", "13.0", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, None),
    ],
)
def test_expandable_segments_unless_the_user_chose(
    platform: str, cuda: str | None, user: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.sys, "platform", platform)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    with numerics(**PLAIN):
        assert os.environ.get("PYTORCH_ALLOC_CONF") == expected
    assert {name: os.environ.get(name) for name in ALLOCATOR_VARIABLES} == {
        name: user.get(name) for name in ALLOCATOR_VARIABLES
    }


def test_users_workspace_is_kept_and_children_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS_VARIABLE, ":16:8")
    with numerics(deterministic=True, tf32=True):
        code = f"import os; print(os.environ[{CUBLAS_VARIABLE!r}], os.environ.get('PYTORCH_ALLOC_CONF'))"
        words = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert words[0] == ":16:8"
    assert os.environ[CUBLAS_VARIABLE] == ":16:8"


def test_benchmark_is_off_inside_and_restored_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with contextlib.suppress(KeyError), without_cudnn_benchmark():
        assert torch.backends.cudnn.benchmark is False
        assert torch.backends.cudnn.enabled is True
        raise KeyError
    assert torch.backends.cudnn.benchmark is True


def test_evaluations_and_sample_pictures_time_no_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    seen: list[bool] = []

    class Net(torch.nn.Module):
        def suitable_size(self, height: int, width: int) -> tuple[int, int]:
            return height, width

        def forward(self, images: torch.Tensor) -> tuple[torch.Tensor]:
            seen.append(torch.backends.cudnn.benchmark)
            return (images,)

    model: Any = Net()
    inference = Inference(Normalizer((0.5,) * 3, (0.5,) * 3))
    batch = Batch(torch.zeros(1, 3, 4, 4, dtype=torch.uint8), torch.zeros(1, 4, 4, dtype=torch.uint8), (0,))
    evaluate(model, [batch], EvaluationSettings(inference, 3, 255, torch.device("cpu")))
    predict_image(model, inference, np.zeros((4, 4, 3), np.uint8), torch.device("cpu"))
    assert seen == [False, False]
    assert torch.backends.cudnn.benchmark is True


def test_missing_deterministic_form_is_an_error_of_the_config() -> None:
    error = RuntimeError("grid_sampler_2d_backward_cuda does not have a deterministic implementation, but you set")
    known = as_segapp_error(error)
    assert isinstance(known, ConfigError)
    assert "train.deterministic = true: grid_sampler_2d_backward_cuda" in str(known)


def test_the_config_has_both_switches() -> None:
    train = load_config(str(ROOT / "configs" / "demo.yaml")).train
    assert (train.deterministic, train.tf32) == (False, True)
