"""Trainings with own parts: model, loss, data, optimizer and schedule of the user's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.assembly.trained import read_trained
from segapp.checkpoint.training_state import load_checkpoint
from segapp.config import load_config
from segapp.custom.trust import trusting
from segapp.errors import ConfigError, RunError
from segapp.session.request import plan_request
from segapp.session.session import run_session
from tests.support import ROOT
from tests.support.runs import alerts, differing, events, losses, merged, resume, train

PARTS = "tests.support.own_parts"


@pytest.fixture(autouse=True)
def _no_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEGAPP_TRUST_PARTS", raising=False)


def trained(config: Any, folder: Path) -> dict[str, Any]:
    """Trains and returns the last state without the names of the parts and the folder."""
    assert train(config, folder) == 0
    state = load_checkpoint(folder).state
    return {key: state[key] for key in ("model", "ema", "optimizer", "rng", "position", "best")}


def short(tiny: dict[str, Any], **sections: Any) -> Any:
    """A config of one epoch with a network of two convolutions."""
    model = {"library": "python", "name": f"{PARTS}:Net"}
    return merged({**tiny, "model": model, "schedule": {"warmup_steps": 0}}, train={"epochs": 1}, **sections)


def test_own_data_equal_to_a_folder_gives_the_same_weights(tiny: dict[str, Any], tmp_path: Path) -> None:
    folder = trained(short(tiny), tmp_path / "folder")
    for workers in (0, 2):
        own = short(tiny, data={"format": f"{PARTS}:FolderData", "workers": workers})
        assert differing(trained(own, tmp_path / f"own{workers}"), folder) == []


def test_additive_own_loss_equals_the_built_in_one_in_dp(tiny: dict[str, Any], tmp_path: Path) -> None:
    dp = {"mode": "dp", "devices": ["cpu", "cpu"]}
    own = short(tiny, loss={"name": f"{PARTS}:additive_ce"}, parallel=dp)
    assert differing(trained(own, tmp_path / "own"), trained(short(tiny, parallel=dp), tmp_path / "ce")) == []


def test_plain_loss_divided_over_devices_is_told(tiny: dict[str, Any], tmp_path: Path) -> None:
    dp = {"mode": "dp", "devices": ["cpu", "cpu"]}
    own = {"name": "torch.nn:CrossEntropyLoss", "plus": [{"name": f"{PARTS}:ce", "weight": 0.5}]}
    built_in = {"name": "ce", "weight": 1.5}
    cases = {"dp": {"loss": own, "parallel": dp}, "one": {"loss": own}, "ce": {"loss": built_in}}
    for name, sections in cases.items():
        trained(short(tiny, **sections), tmp_path / name)
    (alert,) = events(tmp_path / "dp", "alert")
    assert alert["kind"] == "parts"
    assert f"torch.nn:CrossEntropyLoss, {PARTS}:ce: a plain loss, computed at full resolution" in alert["message"]
    assert events(tmp_path / "one", "alert") == []
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "ce"), rel=1e-5)
    # A mean over valid pixels is exact in parts too.
    assert losses(tmp_path / "dp") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


def test_own_optimizer_makes_the_steps_of_torch(tiny: dict[str, Any], tmp_path: Path) -> None:
    optim = {"name": "torch.optim:SGD", "lr": 0.01, "options": {"momentum": 0.9, "foreach": True}}
    own = trained(short(tiny, optim=optim), tmp_path / "own")
    built_in = trained(short(tiny, optim={"name": "sgd", "lr": 0.01}), tmp_path / "fused")
    for name, weights in built_in["model"].items():
        torch.testing.assert_close(own["model"][name], weights, rtol=1e-5, atol=1e-6)


def test_rmsprop_resumes_bit_for_bit(tiny: dict[str, Any], tmp_path: Path) -> None:
    optim = {"name": "torch.optim:RMSprop", "lr": 0.001, "options": {"momentum": 0.9}}
    first = short(tiny, optim=optim, schedule={"name": "constant"})
    second = merged(first.model_dump(mode="json"), train={"epochs": 2})
    reference = trained(second, tmp_path / "whole")
    train(first, tmp_path / "parts")
    assert resume(second, tmp_path / "parts") == 0
    assert differing(load_checkpoint(tmp_path / "parts").state["model"], reference["model"]) == []


def test_own_schedule_gives_the_factor_at_every_step(tiny: dict[str, Any], tmp_path: Path) -> None:
    config = short(tiny, schedule={"name": f"{PARTS}:falling", "options": {"end": 0.0}})
    trained(config, tmp_path / "run")
    rates = [event["lr"] for event in events(tmp_path / "run", "step")]
    assert rates == pytest.approx([0.001, 0.0008, 0.0006, 0.0004, 0.0002])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optim": {"name": "torch.optim:LBFGS"}}, "LBFGS doesn't support per-parameter options"),
        ({"optim": {"name": f"{PARTS}:ce"}}, "takes fewer than the 1 arguments"),
        ({"loss": {"name": f"{PARTS}:ce", "class_weights": [1, 1, 1]}}, "takes no argument `weight`"),
        ({"data": {"format": f"{PARTS}:falling"}}, "total_steps is missing"),
        ({"model": {"library": "python", "name": f"{PARTS}:ce"}}, "made a function: return a torch.nn.Module"),
    ],
)
def test_wrong_parts_are_refused(tiny: dict[str, Any], tmp_path: Path, sections: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(short(tiny, **sections), tmp_path / "run")


def test_problems_of_all_parts_come_together(tiny: dict[str, Any], tmp_path: Path) -> None:
    config = short(
        tiny,
        model={"library": "python", "name": f"{PARTS}:Net", "options": {"widht": 3, "hieght": 5}},
        loss={"name": f"{PARTS}:nothing"},
        optim={"name": "torch.optim:RMSprop", "options": {"lr": 1.0}},
    )
    with pytest.raises(ConfigError, match="4 problems in custom components") as error:
        train(config, tmp_path / "run")
    for text in ("did you mean width?", "hieght", "has no 'nothing'", "optim.options.lr is given by segapp"):
        assert text in str(error.value)


def test_example_trains_alike_on_one_and_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file beside the config is named from the current folder."""
    monkeypatch.syspath_prepend(str(tmp_path / "none"))
    monkeypatch.chdir(ROOT / "segapp/docs/examples")
    assert load_config("own_parts.yaml").model.name == "own_parts.py:SmallNet"
    monkeypatch.chdir(ROOT)
    short = ["train.steps=6", "log.every_steps=1", "log.tensorboard=false", "eval.every_epochs=100"]
    dp = ["parallel.mode=dp", "parallel.devices=[cpu,cpu]"]
    ways = {"one": [], "uneven": [*dp, "parallel.gpu0_bsz=1"], "none": [*dp, "parallel.gpu0_bsz=0"]}
    for name, words in ways.items():
        config = load_config("segapp/docs/examples/own_parts.yaml", [*short, *words])
        assert config.model.name == "segapp/docs/examples/own_parts.py:SmallNet"
        assert train(config, tmp_path / name) == 0
        assert alerts(tmp_path / name) == []
        assert [copy.name for copy in (tmp_path / name / "parts").glob("*/*.py")] == ["own_parts.py"]
    first, *_, last = one = losses(tmp_path / "one")
    assert (len(one), last < first) == (6, True)
    assert losses(tmp_path / "uneven") == pytest.approx(one, rel=2e-4)
    assert losses(tmp_path / "none") == pytest.approx(one, rel=2e-4)


def test_source_is_kept_and_a_change_is_told(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "none"))
    file, neighbor = tmp_path / "net_of_source_test.py", tmp_path / "neighbor_of_source_test.py"
    file.write_text("from neighbor_of_source_test import Net\n")
    neighbor.write_text(before := "from tests.support.own_parts import Net\n")
    model = {"library": "python", "name": f"{file.name}:Net", "options": {"width": 4}}
    assert train(short(tiny, model=model), tmp_path / "run") == 0
    copies = tmp_path / "run" / "parts"
    assert {copy.name: copy.read_bytes() for copy in copies.glob("*/*")} == {
        each.name: each.read_bytes() for each in (file, neighbor)
    }
    assert read_trained(str(tmp_path / "run")).messages == ()
    neighbor.write_text(before + "# changed\n")
    with trusting(True):
        (message,) = read_trained(str(tmp_path / "run")).messages
        assert message == f"{file.name}:Net: the run's copy is used, and {file} has changed since the training"
        request = plan_request(None, ["train.epochs=2"], None, str(tmp_path / "run"))
    assert run_session(request) == 0
    kinds = [alert["kind"] for alert in events(tmp_path / "run", "alert")]
    assert kinds == ["parts", "schedule"], "one epoch more is another course of the learning rate"
    texts = sorted(path.read_text() for path in copies.glob("*/*"))
    assert texts == sorted([*2 * [file.read_text()], before, before + "# changed\n"])


BROKEN = """import torch
from torch import nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Conv2d(3, num_classes, 1)

    def forward(self, images):
        if self.training and images.shape[-1] == 40:
            images = F.linear(images, self.head.weight)
        return self.head(images)


def outside(add):
    return lambda logits, target: F.cross_entropy(logits, target + add, ignore_index=255 + add)
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of components of which each fails in its own way; Python imports one module of a name."""
    file = tmp_path_factory.mktemp("parts") / "broken.py"
    file.write_text(BROKEN)
    return file


@pytest.mark.parametrize(
    ("part", "devices", "words"),
    [
        ("Net", ["cpu"], "raised RuntimeError at broken.py:13: "),
        ("Net", ["cpu", "cpu"], "raised RuntimeError at broken.py:13: "),
        ("outside", ["cpu"], "raised IndexError at broken.py:18: Target "),
    ],
)
def test_code_that_fails_is_named_with_file_and_line(
    part: str, devices: list[str], words: str, tiny: dict[str, Any], broken: Path, tmp_path: Path
) -> None:
    section: dict[str, Any] = {"model": {"library": "python", "name": f"{broken}:Net"}} if part == "Net" else {}
    section["loss"] = {"name": f"{broken}:outside", "options": {"add": 0 if section else 300}}
    parallel = {"devices": devices, "mode": "dp" if len(devices) > 1 else "auto"}
    with pytest.raises(RunError) as raised:
        train(merged({**tiny, **section}, train={"epochs": 1, "ema": None}, parallel=parallel), tmp_path / "run")
    message = str(raised.value).partition("\n")[0]
    named = [f"{key}.name = {broken}:{of}" for key, of in (("model", "Net"), ("loss", "outside")) if key in section]
    assert message.startswith(f"{' or '.join(named)} {words}")
    assert "segapp check-part --config FILE" in str(raised.value)
    assert "replica" not in message
    assert (raised.value.exit_code, raised.value.topic) == (1, "own-parts")
