"""Out of memory in trainings with real budgets and armed failpoints, against runs that had memory enough."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from segapp import failpoints
from segapp.commands.runs import print_status
from segapp.config import LiveSettings, RunConfig
from segapp.errors import OutOfMemoryError
from segapp.models import SegmentationModel
from segapp.run.checkpoints import CheckpointFolder
from segapp.run.commands import parse_command, send_command
from segapp.run.folder import RunFolder
from segapp.session.request import TrainRequest
from segapp.session.session import run_session
from segapp.training.step import assembler
from segapp.view.runs import summarize
from tests.support.fault_table import case
from tests.support.live_runs import small, three_devices
from tests.support.runs import differing, events, merged, train

POINTS = ("train.forward", "train.forward.1", "train.forward.2", "train.loss", "train.backward", "train.optimizer")


@pytest.fixture(autouse=True)
def _disarmed(logical_budgets: None) -> Iterator[None]:
    yield
    failpoints.arm("")


@pytest.fixture
def _without_batchnorm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group instead of batch statistics: then smaller pieces are the same step to the last digits."""
    original = assembler.build_network

    def grouped(*args: Any, **kwargs: Any) -> SegmentationModel:
        model = original(*args, **kwargs)
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, nn.GroupNorm(1, child.num_features))
        return model

    monkeypatch.setattr(assembler, "build_network", grouped)


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in events(folder, "step")]


def saved(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    return state


def budgeted(base: dict[str, Any], *budgets_mib: float, gpu0_bsz: int | None = 6, **sections: Any) -> RunConfig:
    parallel = {"memory_budget_mib": list(budgets_mib), "gpu0_bsz": gpu0_bsz}
    train = {"batch_size": 8, **sections.pop("train", {})}
    return merged(three_devices(base, 2).model_dump(mode="json"), parallel=parallel, train=train, **sections)


@case(
    "N03",
    how="a memory budget below the peak of the first step",
    passes="the same losses, recomputed, then in pieces, remembered",
)
@pytest.mark.usefixtures("_without_batchnorm")
def test_step_over_memory_budget_runs_in_parts_with_equal_loss(
    base: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(budgeted(base, 900, 900, 900), tmp_path / "whole") == 0
    peak = saved(tmp_path / "whole")["live"]["splits"]["observed"][0][1][0]
    folder = tmp_path / "run"
    assert train(budgeted(base, 0.75 * peak, 900, 900), folder) == 0
    assert losses(folder) == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)
    first, oom = events(folder, "oom")
    settings = events(folder, "settings")
    assert [each["fallbacks"] for each in settings] == [
        {"is_recomputed": True},
        {"is_recomputed": True, "num_pieces": 2},
    ]
    assert [each["step"] for each in settings] == [0, 0]
    assert "all 5 blocks recomputed" in first["action"]
    assert (oom["device"], oom["index"], oom["step"], oom["split"]) == ("cpu", 0, 0, [6, 1, 1])
    assert oom["phase"] in ("forward", "loss", "backward")
    assert oom["allocated_mib"] <= 0.75 * peak < oom["allocated_mib"] + oom["requested_mib"]
    assert "BatchNorm" in oom["action"]
    report = (folder / oom["path"]).read_text()
    assert oom["action"] in report
    assert summarize(folder).as_json()["last_oom"] == {
        key: oom[key] for key in ("device", "phase", "step", "action", "path")
    }
    print_status(str(folder), as_json=False)
    assert oom["path"] in capsys.readouterr().out
    assert LiveSettings(**saved(folder)["live"]["settings"]).fallbacks == settings[-1]["fallbacks"]


@case("N03", how="a memory budget that no piece fits", passes="saved, exit 6")
@pytest.mark.slow
def test_step_fitting_in_no_part_saves_and_stops_with_advice(base: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(OutOfMemoryError, match="next move") as caught:
        train(budgeted(base, 5, 900, 900), folder)
    assert caught.value.exit_code == 6
    _, _, last = events(folder, "oom")
    assert [each["fallbacks"] for each in events(folder, "settings")] == [
        {"is_recomputed": True},
        {"is_recomputed": True, "num_pieces": 2},
    ]
    assert last["advice"][0] == "lower train.batch_size: train.batch_size=4 train.accumulate=2"
    assert events(folder, "run_end")[-1]["exit_code"] == 6
    assert saved(folder)["position"]["step"] == 0


@pytest.mark.slow
@case("N05", how="out of memory, a crash before the next save, a resume", passes="the same course as without the crash")
def test_memory_fallback_survives_a_crash_before_checkpoint(base: dict[str, Any], tmp_path: Path) -> None:
    config = small(base, 2, train={"batch_size": 4})
    failpoints.arm("train.backward=2:oom")
    assert train(config, tmp_path / "whole") == 0
    folder = tmp_path / "run"
    send_command(RunFolder.create(path=folder).path, parse_command("checkpoint"))  # at step 0
    failpoints.arm("train.backward=2:oom;train.step=4:raise:RuntimeError")
    with pytest.raises(Exception, match="failpoint"):
        train(config, folder)
    assert events(folder, "oom")[0]["step"] == 1
    failpoints.arm("")
    assert run_session(TrainRequest(config, RunFolder(folder))) == 0
    assert losses(folder) == losses(tmp_path / "whole")
    assert not [path for path in differing(saved(folder), saved(tmp_path / "whole")) if path.startswith("/model")]
    assert len(events(folder, "oom")) == 1


@pytest.mark.slow
@case("N03", how="out of memory in an evaluation", passes="image by image, then in windows; training untouched")
def test_oom_in_evaluation_falls_back_to_images_then_windows(base: dict[str, Any], tmp_path: Path) -> None:
    config = merged(small(base, 1).model_dump(mode="json"), eval={"batch_size": 4}, data={"crop_px": [32, 48]})
    assert train(config, tmp_path / "whole") == 0
    (whole,) = events(tmp_path / "whole", "val")
    failpoints.arm("eval.forward=1:oom")
    assert train(config, tmp_path / "single") == 0
    (single,) = events(tmp_path / "single", "val")
    assert single["iou"] == whole["iou"]
    assert single["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert "image by image" in events(tmp_path / "single", "oom")[0]["action"]
    failpoints.arm("eval.forward=1:oom*2")
    folder = tmp_path / "windows"
    assert train(config, folder) == 0
    assert [event["fallbacks"] for event in events(folder, "settings")] == [
        {"is_eval_single": True},
        {"is_eval_single": True, "window_px": [32, 48]},
    ]
    assert losses(folder) == losses(tmp_path / "whole")
    assert not [path for path in differing(saved(folder), saved(tmp_path / "whole")) if path.startswith("/model")]
    assert saved(folder)["live"]["settings"]["window_px"] == (32, 48)
    assert events(folder, "val")[0]["num_images"] == 4


def check_fault(base: dict[str, Any], reference: Path, folder: Path, seed: int) -> str:
    """One fault somewhere, a stop somewhere else; gives the phase that ran out of memory."""
    rng = random.Random(seed)
    point = rng.choice([*POINTS, "eval.forward"])
    most = 8 if point == "eval.forward" else 4
    failpoints.arm(f"{point}={rng.randint(1, most)}:oom")
    config = three_devices(base)
    RunFolder.create(path=folder)
    if rng.random() < 0.5:
        send_command(folder, parse_command("stop epoch"))
        assert train(config, folder) == 75
        assert run_session(TrainRequest(config, RunFolder(folder))) == 0
    else:
        assert train(config, folder) == 0
    failpoints.arm("")
    assert losses(folder) == pytest.approx(losses(reference), rel=1e-6)
    assert all(row.problem is None for row in CheckpointFolder(folder / "checkpoints").verify())
    for name, tensor in saved(folder)["model"].items():
        torch.testing.assert_close(tensor, saved(reference)["model"][name], rtol=1e-4, atol=1e-6)
    (oom,) = events(folder, "oom")
    assert [event["step"] for event in events(folder, "step")] == [1, 2, 3, 4, 5, 6]
    return str(oom["phase"])


@pytest.mark.slow
@case(
    "N03",
    how="out of memory at random places of a step or an evaluation, stopped and resumed",
    passes="no loss and no checkpoint changes",
)
@pytest.mark.usefixtures("_without_batchnorm")
def test_oom_at_random_phases_changes_no_loss_or_checkpoint(base: dict[str, Any], tmp_path: Path) -> None:
    assert train(three_devices(base), tmp_path / "reference") == 0
    phases = {check_fault(base, tmp_path / "reference", tmp_path / str(seed), seed) for seed in range(6)}
    assert len(phases) > 2
