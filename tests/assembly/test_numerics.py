"""Precision and memory format by card and network, and the process-wide switches of a training."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from segapp.assembly import devices as module
from segapp.assembly.devices import (
    ALLOCATOR_VARIABLES,
    CUBLAS_VARIABLE,
    DevicePlan,
    numerics,
    uses_channels_last,
    with_precision,
)
from segapp.assembly.network import build_network
from segapp.assembly.own_parts import fp32_part
from segapp.config import ModelConfig, RunConfig, TrainConfig, load_config, validate_config
from segapp.config.trust import named_code
from segapp.custom.trust import accept_code
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.loader import Batch
from segapp.datasets.preprocessing import Preprocessing
from segapp.errors import ConfigError
from segapp.inference.evaluate import EvaluationSettings, evaluate
from segapp.inference.predict.predictor import predict_image
from segapp.inference.sliding import Inference, without_cudnn_benchmark
from segapp.models import SegmentationModel
from segapp.parallel.distributed import Ranks
from segapp.planning.auto import resolve_auto
from segapp.run.folder import RunFolder
from segapp.session.failures import as_segapp_error
from tests.support.gpu.fake_cuda import FakeCuda, FakeGpu
from tests.support.own_parts import DROPOUT
from tests.support.runs import events, merged, resume, train

CPU, V100, A100 = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
LINKNET = {"library": "smp", "name": "Linknet", "encoder": "tu-test_resnet"}
SEGFORMER = {"library": "smp", "name": "Segformer", "encoder": "mit_b0"}


def config_of(**sections: Any) -> RunConfig:
    data = {"format": "folder", "root": "nowhere", "classes": ["a", "b"]}
    return validate_config({"name": "r", "data": data, **sections})


@pytest.fixture
def two_cards(fake_cuda: FakeCuda) -> None:
    fake_cuda.gpus = [FakeGpu(capability=(7, 0)), FakeGpu(capability=(8, 0))]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ALLOCATOR_VARIABLES, CUBLAS_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [([CPU], "fp32"), ([A100], "amp-bf16"), ([V100], "amp-fp16"), ([A100, V100], "amp-fp16"), ([A100, CPU], "fp32")],
)
@pytest.mark.usefixtures("two_cards")
def test_auto_precision_is_what_every_device_has(devices: list[torch.device], expected: str) -> None:
    assert with_precision(config_of(), devices).train.precision == expected


@pytest.mark.usefixtures("two_cards")
def test_precision_that_the_config_names_is_kept() -> None:
    config = config_of(train={"precision": "amp-fp16"})
    assert [with_precision(config, devices) for devices in ((A100,), (CPU,), ())] == [config] * 3


@pytest.mark.parametrize(
    ("asking", "expected"), [({"model"}, "fp32"), ({"loss"}, "fp32"), ({"optim"}, "amp-bf16"), (set(), "amp-bf16")]
)
@pytest.mark.usefixtures("two_cards")
def test_custom_model_and_loss_can_ask_for_float32(
    asking: set[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factories = {"model": "Net", "loss": "build", "optim": "build"}
    names = {section: f"{section}_{tmp_path.name}:{factory}" for section, factory in factories.items()}
    monkeypatch.syspath_prepend(str(tmp_path))
    for section, name in names.items():
        module, factory = name.split(":")
        source = f"class {factory}: ...\n" if factory == "Net" else f"def {factory}(): ...\n"
        source += f'{factory}.precision = "fp32"\n' if section in asking else ""
        (tmp_path / f"{module}.py").write_text(source)
    sections = {"model": {"library": "python"}, "loss": {}, "optim": {}}
    config = config_of(**{key: {**section, "name": names[key]} for key, section in sections.items()})
    accept_code(named_code(config).values())
    assert fp32_part(config) == next((names[key] for key in ("model", "loss") if key in asking), None)
    assert with_precision(config, [A100, A100]).train.precision == expected


@pytest.fixture(scope="module")
def networks() -> list[SegmentationModel]:
    """Convolutions and a transformer."""
    return [build_network(ModelConfig(**section), 3, with_weights=False) for section in (LINKNET, SEGFORMER)]


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
@pytest.mark.usefixtures("two_cards")
def test_channels_last_where_tensor_cores_convolve(
    train: dict[str, Any], device: torch.device, expected: bool, networks: list[SegmentationModel]
) -> None:
    section = TrainConfig(**{"precision": "fp32", **train})
    assert [uses_channels_last(section, network, device) for network in networks] == [expected, False]


SWITCHES = {"deterministic": True, "tf32": False}


def test_deterministic_is_refused_where_cublas_has_run(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS reads its variable at its first product: set later, every product of the run would raise."""
    fake_cuda.is_begun = True
    with pytest.raises(ConfigError, match=f"{CUBLAS_VARIABLE}=:4096:8") as raised, numerics(**SWITCHES):
        pass
    assert raised.value.key == "train.deterministic"
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv(CUBLAS_VARIABLE, ":16:8")  # as a program that knows of it starts
    with numerics(**SWITCHES):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ[CUBLAS_VARIABLE] == ":16:8"
    assert os.environ[CUBLAS_VARIABLE] == ":16:8"


@pytest.mark.parametrize("has_used_cuda", [False, True])
def test_second_deterministic_run_of_a_process_works(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, has_used_cuda: bool
) -> None:
    for _ in range(2):
        with numerics(**SWITCHES):
            assert os.environ[CUBLAS_VARIABLE] == ":4096:8"
            fake_cuda.is_begun = has_used_cuda
        assert (CUBLAS_VARIABLE in os.environ) == has_used_cuda
    monkeypatch.setenv(CUBLAS_VARIABLE, "")  # so that it ends with this test


@pytest.mark.usefixtures("two_cards")
def test_training_has_the_precision_that_all_ranks_support(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, ranks = RunFolder.create("r", path=tmp_path / "run"), Ranks()
    monkeypatch.setattr(ranks, "gather", lambda own: ["amp-bf16", own, "amp-bf16"])
    plans = [DevicePlan("ddp", (device,), "") for device in (V100, A100, CPU)]
    found = [resolve_auto(config_of(), None, folder, plan, [], ranks)[0] for plan in plans]
    assert [resolved.train.precision for resolved in found] == ["amp-fp16", "amp-bf16", "fp32"]
    state = {"config": {"train": {"precision": "fp16", "bn_momentum": 0.03}}}
    kept = resolve_auto(config_of(), state, folder, plans[0], [], ranks)[0].train
    assert (kept.precision, kept.bn_momentum) == ("fp16", 0.03), "a resume, on whatever device"


def test_resume_with_auto_keeps_the_precision(tiny: dict[str, Any], tmp_path: Path) -> None:
    """A CPU would choose fp32; the checkpoint's file may also begin another run."""
    tiny["model"] = DROPOUT
    first, second = tmp_path / "first", tmp_path / "second"
    one = {"epochs": 1, "batch_size": 5}
    assert train(merged(tiny, train={**one, "precision": "amp-bf16"}), first) == 0
    longer = merged(tiny, train={**one, "epochs": 2})
    assert train(longer, second, checkpoint=first / "checkpoints" / "last.pt") == 0
    assert resume(longer, first) == 0
    for folder in (first, second):
        start = events(folder, "run_start")[-1]
        assert (start["precision"], start["resumed_from_step"]) == ("amp-bf16", 2)
        assert load_config(folder / "config.yaml").train.precision == "amp-bf16"


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


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.filterwarnings("error")
def test_switches_are_set_and_undone(deterministic: bool, tf32: bool, two_cards: None) -> None:
    before = switches()
    with numerics(deterministic=deterministic, tf32=tf32):
        inside = switches()
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")  # torch.compile reads this
    assert switches() == before
    assert (inside["deterministic"], inside["cudnn"]) == (deterministic, deterministic)
    assert inside["benchmark"] is not deterministic
    assert (inside["matmul"], inside["convolution"]) == (tf32, tf32)
    assert inside["environment"][CUBLAS_VARIABLE] == (":4096:8" if deterministic else None)


def test_training_that_needs_no_determinism_does_not_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call, even one that changes nothing, imports torch._inductor, and the process ends seconds later."""
    calls: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda is_on, **_: calls.append(is_on))
    with numerics(**PLAIN):
        assert torch.get_float32_matmul_precision() == "highest"  # without CUDA, products stay exact
    assert calls == []
    with numerics(deterministic=True, tf32=True):
        assert calls == [True]
    assert calls == [True, False]


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
    platform: str,
    cuda: str | None,
    user: dict[str, str],
    expected: str | None,
    fake_cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.sys, "platform", platform)
    fake_cuda.version.cuda = cuda
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    with numerics(**PLAIN):
        assert os.environ.get("PYTORCH_ALLOC_CONF") == expected
    assert {name: os.environ.get(name) for name in ALLOCATOR_VARIABLES} == {
        name: user.get(name) for name in ALLOCATOR_VARIABLES
    }


def test_evaluations_and_sample_pictures_time_no_algorithms() -> None:
    seen: list[tuple[bool, bool]] = []

    class Net(torch.nn.Module):
        def suitable_size(self, height: int, width: int) -> tuple[int, int]:
            return height, width

        def forward(self, images: torch.Tensor) -> tuple[torch.Tensor]:
            seen.append((torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled))
            return (images,)

    model: Any = Net()
    inference = Inference(Preprocessing(PixelFormat(mean=(0.5,) * 3, std=(0.5,) * 3)))
    batch = Batch(torch.zeros(1, 3, 4, 4, dtype=torch.uint8), torch.zeros(1, 4, 4, dtype=torch.uint8), (0,))
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        evaluate(model, [batch], EvaluationSettings(inference, 3, 255, torch.device("cpu")))
        predict_image(model, inference, np.zeros((4, 4, 3), np.uint8), torch.device("cpu"))
        assert seen == [(False, True)] * 2
        with contextlib.suppress(KeyError), without_cudnn_benchmark():
            raise KeyError
        assert torch.backends.cudnn.benchmark is True


def test_missing_deterministic_form_is_an_error_of_the_config() -> None:
    error = RuntimeError("grid_sampler_2d_backward_cuda does not have a deterministic implementation, but you set")
    known = as_segapp_error(error)
    assert isinstance(known, ConfigError)
    assert "train.deterministic = true: grid_sampler_2d_backward_cuda" in str(known)


FREEING = """
import resource, sys, torch
if sys.argv[1] == "kept":
    from segapp.datasets.resources import freed_memory_kept
    context = freed_memory_kept(True)
    context.__enter__()
    with freed_memory_kept(True), freed_memory_kept(False):
        pass  # an evaluation within a training, which goes on
for step in range(20):
    if step == 5:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.ones(2**24) for _ in range(2)]  # 64 MiB each: more than any threshold that can be set
    del kept
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", FREEING, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap can be told so")
def test_freed_memory_is_reused_without_page_faults() -> None:
    """Which the kernel counts."""
    given_back, kept = page_faults("given back"), page_faults("kept")
    assert given_back > 3 * kept
