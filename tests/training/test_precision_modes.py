"""Trainings in half precision, through the trainer: close to float32, resumable, and stopped with a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.config import RunConfig
from segapp.errors import NonFiniteError
from segapp.precision import LossScaler
from tests.support.runs import differing, events, final_state, losses, merged, train
from tests.training.test_resume import stopped_and_resumed

HALF = ("fp16", "amp-fp16", "amp-bf16")


def config_of(base: dict[str, Any], precision: str, epochs: int = 2, **sections: Any) -> RunConfig:
    return merged(
        base,
        data={"crop_px": [24, 32]},
        train={"epochs": epochs, "precision": precision},
        eval={"every_epochs": epochs},
        **sections,
    )


@pytest.fixture(scope="module")
def whole(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the uninterrupted run of two epochs in a precision, each of which is trained once."""
    folder = tmp_path_factory.mktemp("whole")

    def run_of(precision: str) -> Path:
        run = folder / precision
        if not run.exists():
            assert train(config_of(base, precision), run) == 0
        return run

    return run_of


@pytest.fixture
def scale_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Give loss scalers another first scale, which no config has: the runs would need hundreds of steps."""
    begin = LossScaler.__init__

    def begin_at(scale: float) -> None:
        monkeypatch.setattr(LossScaler, "__init__", lambda self, device: begin(self, device, init_scale=scale))

    return begin_at


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", HALF)
def test_losses_of_every_mode_are_within_2_percent_of_float32(whole: Callable[[str], Path], precision: str) -> None:
    run, in_fp32 = whole(precision), losses(whole("fp32"))
    assert losses(run) == pytest.approx(in_fp32, rel=0.02)
    assert losses(run) != in_fp32, "it was not computed in half precision"
    dtypes = {name: value.dtype for name, value in final_state(run)["model"].items()}
    halved = {name for name, dtype in dtypes.items() if dtype == torch.float16}
    assert bool(halved) == (precision == "fp16")
    assert not [name for name in halved if ".bn" in name or "running" in name], "BatchNorm stays in float32"
    assert events(run, "val")[-1]["loss"] is not None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", HALF)
def test_resumed_run_of_every_mode_is_bitwise_equal(
    base: dict[str, Any], tmp_path: Path, whole: Callable[[str], Path], precision: str
) -> None:
    stopped_and_resumed(config_of(base, precision), tmp_path / "parts", "train.step=4")
    a, b = final_state(whole(precision)), final_state(tmp_path / "parts")
    assert differing(a, b) == []
    assert ("scaler" in a["precision"]) == (precision != "amp-bf16")
    assert ("masters" in a["precision"]) == (precision == "fp16")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp16", "amp-fp16"])
def test_skipped_steps_are_counted_and_change_nothing(
    base: dict[str, Any], tmp_path: Path, scale_of: Callable[[float], None], precision: str
) -> None:
    scale_of(2.0**26)
    assert train(config_of(base, precision, epochs=5), tmp_path / "run") == 0
    steps = events(tmp_path / "run", "step")
    skipped = [event["skipped"] for event in steps]
    assert skipped[0] == 1
    assert 2 <= skipped[-1] < len(steps), "the scale comes down, and then steps are made"
    assert [event["loss_scale"] for event in steps] == [2.0 ** (26 - n) for n in skipped]
    state = final_state(tmp_path / "run")
    tracked = {int(v) for name, v in state["model"].items() if name.endswith("num_batches_tracked")}
    assert tracked == {len(steps) - skipped[-1]}, "a skipped step leaves no trace in BatchNorm"
    assert all(bool(torch.isfinite(v).all()) for v in state["model"].values())


def test_loss_scale_below_minimum_stops_run(
    base: dict[str, Any], tmp_path: Path, scale_of: Callable[[float], None]
) -> None:
    """A factor of the loss makes every gradient overflow."""
    scale_of(4.0)
    with pytest.raises(NonFiniteError, match=r"loss scale fell below 1(.|\n)*amp-bf16"):
        train(config_of(base, "fp16", epochs=20, loss={"name": "ce", "weight": 1e7}), tmp_path / "run")
    end = events(tmp_path / "run", "run_end")[-1]
    assert (end["status"], end["exit_code"]) == ("failed", 5)


@pytest.mark.parametrize("mode", ["model", pytest.param("dp", marks=pytest.mark.slow)])
def test_fp16_over_devices_follows_one_device(
    base: dict[str, Any], tmp_path: Path, whole: Callable[[str], Path], mode: str
) -> None:
    """The average of half weights is float32, and is evaluated."""
    parallel = {"mode": mode, "devices": ["cpu", "cpu"]}
    averaged = merged(config_of(base, "fp16", parallel=parallel).model_dump(mode="json"), train={"ema": 0.9})
    assert train(averaged, tmp_path / "run") == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(whole("fp16")), rel=5e-3)
    average = final_state(tmp_path / "run")["ema"]["module"].values()
    assert {value.dtype for value in average} == {torch.float32, torch.int64}
    assert events(tmp_path / "run", "val")[0]["miou"] is not None
