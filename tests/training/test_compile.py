"""`train.compile`: equal losses, unchanged checkpoints, exact resume, and an error that names the key."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from segapp.config import RunConfig, validate_config
from segapp.errors import ConfigError, RunError
from segapp.inference.sliding import NormalizedInput
from segapp.losses import CriterionMaskClassification
from segapp.models import build_model
from segapp.models.normalizer import Normalizer
from segapp.run.folder import RunFolder
from segapp.session.request import TrainRequest
from segapp.session.session import run_session
from tests.support.runs import differing, events, merged, train


def test_model_that_cannot_be_compiled_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        def call(_images: Any) -> Any:
            raise torch._dynamo.exc.Unsupported("no C++ compiler")

        return call

    monkeypatch.setattr(torch, "compile", refuse)
    network = NormalizedInput(nn.Conv2d(3, 2, 1), Normalizer((0.5,) * 3, (0.2,) * 3))
    network.compile_training()
    images = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
    with pytest.raises(RunError, match=r"train\.compile: .*\(Unsupported: no C\+\+ compiler.*\): set it to false"):
        network(images)
    assert network.eval()(images).shape == (1, 2, 4, 4), "an evaluation is not compiled"


def test_errors_of_the_network_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda call: call)
    network = NormalizedInput(nn.Conv2d(4, 2, 1), Normalizer((0.5,) * 3, (0.2,) * 3))
    network.compile_training()
    with pytest.raises(RuntimeError, match="expected input"):
        network(torch.zeros(1, 3, 4, 4, dtype=torch.uint8))


def test_only_training_with_samples_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch, "compile", lambda call: lambda images: calls.append(len(images)) or call(images))
    network = NormalizedInput(nn.Conv2d(3, 2, 1), Normalizer((0.5,) * 3, (0.2,) * 3))
    keys = list(network.state_dict())
    network.compile_training()
    for size, is_training in ((2, True), (0, True), (3, False)):
        network.train(is_training)(torch.zeros(size, 3, 4, 4, dtype=torch.uint8))
    assert calls == [2]
    assert list(network.state_dict()) == keys


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"parallel": {"mode": "dp"}}, "parallel.mode: dp"),
        ({"parallel": {"mode": "model", "devices": ["cpu", "cpu"]}}, "parallel.mode: model"),
        ({"distill": {"teacher": "runs/teacher"}}, "does not support distill"),
    ],
)
def test_modes_that_cannot_be_compiled_are_refused(tiny: dict[str, Any], sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate_config({**tiny, **sections, "train": {**tiny["train"], "compile": True}})


def compiled_config(tiny: dict[str, Any], **changes: Any) -> RunConfig:
    return merged(
        tiny,
        model={"library": "smp", "name": "Linknet", "encoder": "tu-test_resnet", "options": {"encoder_depth": 3}},
        schedule={"name": "constant"},
        train={"epochs": 2, "batch_size": 5, "ema": None, **changes},
    )


@pytest.mark.slow
def test_compiled_eomt_is_one_graph_with_equal_losses() -> None:
    """Traced with its backward pass, but not translated to C++, which takes minutes; the attention masks fade."""

    def course(call: Callable[[nn.Module], Any]) -> list[float]:
        torch.manual_seed(0)
        options = {"depth": 3, "embed_dim": 24, "num_heads": 2, "patch_size": 8, "num_queries": 5, "num_blocks": 2}
        encoder = "tu-vit_small_patch16_dinov3"
        model: Any = build_model("segapp", "eomt", 3, encoder=encoder, options={**options, "mask_steps": 4}).double()
        network, criterion = call(model), CriterionMaskClassification(5, 3).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for _ in range(4):
            images, target = torch.rand(2, 3, 32, 48, dtype=torch.float64), torch.randint(0, 3, (2, 32, 48))
            loss = criterion(network(images), target.to(torch.uint8))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.count_update()
            losses.append(float(loss.detach()))
        return losses

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = course(lambda model: torch.compile(model, backend="aot_eager", fullgraph=True))
    assert compiled == pytest.approx(course(lambda model: model), rel=1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_training_equals_eager_and_resumes_bitwise(tiny: dict[str, Any], tmp_path: Path) -> None:
    assert train(compiled_config(tiny), tmp_path / "eager") == 0
    assert train(compiled_config(tiny, compile=True), tmp_path / "compiled") == 0
    losses = [[e["loss"] for e in events(tmp_path / name, "step")] for name in ("eager", "compiled")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    states = [torch.load(tmp_path / name / "checkpoints/last.pt", weights_only=True) for name in ("eager", "compiled")]
    assert list(states[0]["model"]) == list(states[1]["model"])

    assert train(compiled_config(tiny, compile=True, epochs=1), tmp_path / "resumed") == 0
    whole = compiled_config(tiny, compile=True)
    assert run_session(TrainRequest(whole, RunFolder(tmp_path / "resumed"))) == 0
    resumed = torch.load(tmp_path / "resumed" / "checkpoints/last.pt", weights_only=True)
    for part in ("model", "optimizer"):
        assert differing(resumed[part], states[1][part]) == []
