"""Trainings in half precision, through the trainer: close to float32, resumable, and stopped with a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from segapp.assembly import network
from segapp.config import RunConfig, dump_config
from segapp.errors import NonFiniteError
from segapp.precision import LossScaler
from segapp.run.folder import RunFolder
from segapp.session.request import TrainRequest
from segapp.session.session import run_session
from tests.support.runs import differing, events, merged, segapp, train

HALF = ("fp16", "amp-fp16", "amp-bf16")


def config_of(tiny: dict[str, Any], precision: str, epochs: int = 2, **sections: Any) -> RunConfig:
    # Linknet at depth 3: half-precision convolutions are slow on a CPU.
    return merged(
        tiny,
        model={"library": "smp", "name": "Linknet", "encoder": "tu-test_resnet", "options": {"encoder_depth": 3}},
        optim={"name": "sgd", "lr": 0.002},
        schedule={"name": "constant"},
        data={"crop_px": [48, 64]},
        train={"epochs": epochs, "batch_size": 4, "precision": precision, "ema": None},
        **sections,
    )


def losses(folder: Path) -> list[float | None]:
    return [event["loss"] for event in events(folder, "step")]


def last_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    return state


@pytest.fixture(scope="module")
def tiny(tiny_root: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "seed": 3,
        "data": {"format": "folder", "root": str(tiny_root), "classes": ["ground", "box", "disc"], "workers": 0},
        "schedule": {"warmup_steps": 3},
        "log": {"every_steps": 1, "tensorboard": False},
    }


@pytest.fixture(scope="module")
def whole(tiny: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the uninterrupted run of two epochs in a precision, each of which is trained once."""
    folder = tmp_path_factory.mktemp("whole")

    def run_of(precision: str) -> Path:
        run = folder / precision
        if not run.exists():
            assert train(config_of(tiny, precision), run) == 0
        return run

    return run_of


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", HALF)
def test_losses_of_every_mode_are_within_2_percent_of_float32(whole: Callable[[str], Path], precision: str) -> None:
    run, in_fp32 = whole(precision), losses(whole("fp32"))
    assert losses(run) == pytest.approx(in_fp32, rel=0.02)
    assert losses(run) != in_fp32, "it was not computed in half precision"
    dtypes = {name: value.dtype for name, value in last_state(run)["model"].items()}
    halved = {name for name, dtype in dtypes.items() if dtype == torch.float16}
    assert bool(halved) == (precision == "fp16")
    assert not [name for name in halved if ".bn" in name or "running" in name], "BatchNorm stays in float32"
    (val,) = events(run, "val")[-1:]
    assert val["loss"] is not None


@pytest.mark.parametrize("precision", ["fp16", *(pytest.param(name, marks=pytest.mark.slow) for name in HALF[1:])])
def test_resumed_run_of_every_mode_is_bitwise_equal(
    tiny: dict[str, Any], tmp_path: Path, whole: Callable[[str], Path], precision: str
) -> None:
    assert train(config_of(tiny, precision, epochs=1), tmp_path / "parts") == 0
    assert run_session(TrainRequest(config_of(tiny, precision, epochs=2), RunFolder(tmp_path / "parts"))) == 0
    a, b = last_state(whole(precision)), last_state(tmp_path / "parts")
    assert [path for path in differing(a, b) if not path.startswith("/best")] == []
    assert ("scaler" in a["precision"]) == (precision != "amp-bf16")
    assert ("masters" in a["precision"]) == (precision == "fp16")


@pytest.mark.parametrize("precision", ["fp16", pytest.param("amp-fp16", marks=pytest.mark.slow)])
def test_skipped_steps_are_counted_and_change_nothing(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    begin = LossScaler.__init__

    def begin_too_high(self: LossScaler, device: torch.device) -> None:
        begin(self, device, init_scale=2.0**26)

    monkeypatch.setattr(LossScaler, "__init__", begin_too_high)
    assert train(config_of(tiny, precision, epochs=5), tmp_path / "run") == 0
    steps = events(tmp_path / "run", "step")
    skipped = [event["skipped"] for event in steps]
    assert skipped[0] == 1
    assert 2 <= skipped[-1] < len(steps), "the scale comes down, and then steps are made"
    assert [event["loss_scale"] for event in steps] == [2.0 ** (26 - n) for n in skipped]
    state = last_state(tmp_path / "run")
    tracked = {int(v) for name, v in state["model"].items() if name.endswith("num_batches_tracked")}
    assert tracked == {len(steps) - skipped[-1]}, "a skipped step leaves no trace in BatchNorm"
    assert all(bool(torch.isfinite(v).all()) for v in state["model"].values())


def test_loss_scale_below_minimum_stops_run(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = network.build_model

    def with_a_huge_layer(*arguments: Any, **keywords: Any) -> Any:
        model = make(*arguments, **keywords)
        layer = [part for part in model.modules() if isinstance(part, nn.Conv2d)][3]
        with torch.no_grad():
            layer.weight.fill_(60000.0)
        return model

    begin = LossScaler.__init__
    monkeypatch.setattr(LossScaler, "__init__", lambda self, device: begin(self, device, init_scale=4.0))
    monkeypatch.setattr(network, "build_model", with_a_huge_layer)
    with pytest.raises(NonFiniteError, match="loss scale fell below 1") as caught:
        train(config_of(tiny, "fp16", epochs=20), tmp_path / "run")
    assert "amp-bf16" in str(caught.value)
    end = events(tmp_path / "run", "run_end")[-1]
    assert (end["status"], end["exit_code"]) == ("failed", 5)


@pytest.mark.parametrize("mode", ["model", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("dp", "ddp"))])
def test_fp16_over_devices_and_ranks_follows_one_device(
    tiny: dict[str, Any], tmp_path: Path, whole: Callable[[str], Path], mode: str
) -> None:
    spread = config_of(tiny, "fp16", parallel={"mode": mode, "devices": ["cpu", "cpu"]})
    if mode == "ddp":
        (tmp_path / "spread.yaml").write_text(dump_config(spread))
        result = segapp("train", "--config", "spread.yaml", "--run", "run", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    else:
        assert train(spread, tmp_path / "run") == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(whole("fp16")), rel=5e-3)


def test_float32_average_of_half_weights_is_evaluated(tiny: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(tiny, "fp16", epochs=1)
    averaged = config.model_copy(update={"train": config.train.model_copy(update={"ema": 0.9})})
    assert train(averaged, tmp_path / "run") == 0
    assert events(tmp_path / "run", "val")[0]["miou"] is not None
