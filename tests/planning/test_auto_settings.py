"""`auto`: the split that follows the measured memory, and the largest safe batch, on logical devices with budgets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from segapp.assembly.devices import DevicePlan
from segapp.config import load_config, validate_config
from segapp.errors import ConfigError
from segapp.memory.counters import DeviceInfo
from segapp.memory.plan import SavedMemoryPlan, read_saved_plan
from segapp.parallel.distributed import Ranks
from segapp.planning.auto import resolve_auto
from segapp.planning.trial import evaluation_size
from segapp.run.commands import parse_command, send_command
from segapp.run.folder import RunFolder
from tests.support.drawn_folders import draw_image, draw_mask
from tests.support.live_runs import assert_answered_once, three_devices
from tests.support.runs import events, final_state, merged, resume, train

pytestmark = pytest.mark.usefixtures("logical_budgets")


@pytest.mark.parametrize(
    ("format", "size"),
    [("cityscapes", (1024, 2048)), ("camvid", (720, 960)), ("voc", (500, 500)), ("ade20k", (768, 1024))],
)
def test_published_data_that_are_not_here_have_their_usual_size(format, size, tmp_path):
    config = validate_config({"name": "plan", "data": {"format": format, "root": str(tmp_path / "absent")}})
    assert evaluation_size(config) == (size, f"usual for {format}: its images are not here")


def test_the_largest_validation_image_has_the_most_pixels(tmp_path):
    for name, size in {"a": (30, 50), "b": (60, 20), "c": (45, 40), "d": (20, 70)}.items():
        draw_image(tmp_path / f"images/val/{name}.png", size)
        draw_mask(tmp_path / f"masks/val/{name}.png", size=size)
    data = {"format": "folder", "root": str(tmp_path), "classes": ["x", "y"]}
    config = validate_config({"name": "plan", "data": data})
    assert evaluation_size(config) == ((45, 40), "the largest of 4 validation images")


def on_budgets(tiny: dict[str, Any], epochs: int, budget_mib: float, train_section: Any = (), **parallel: Any) -> Any:
    return merged(
        three_devices(tiny, epochs).model_dump(mode="json"),
        train={"batch_size": 8, **dict(train_section)},
        parallel={"memory_budget_mib": [budget_mib] * 3, **parallel},
        eval={"every_epochs": 9},
    )


def test_bad_start_reaches_best_split_within_three_epochs(tiny, tmp_path):
    folder = tmp_path / "run"
    RunFolder.create(path=folder)
    send_command(folder, parse_command("set gpu0_bsz=auto"))
    assert train(on_budgets(tiny, 5, 30.0, gpu0_bsz=8), folder) == 0
    splits = [event["split"] for event in events(folder, "epoch_start")]
    observed = {tuple(split): peaks for split, peaks in final_state(folder)["live"]["splits"]["observed"]}
    assert splits[0] == [8, 0, 0]
    assert splits[3] == splits[4]
    # The splits around it, each trained with for one step; the far ones hold more images on some device.
    for gpu0_bsz in (1, 3):
        other = tmp_path / str(gpu0_bsz)
        assert train(on_budgets(tiny, 1, 30.0, gpu0_bsz=gpu0_bsz), other) == 0
        ((split, peaks),) = final_state(other)["live"]["splits"]["observed"]
        observed.setdefault(tuple(split), peaks)
    best = min(max(peaks) for peaks in observed.values())
    assert max(observed[tuple(splits[3])]) <= best + 0.02 * 30
    moves = events(folder, "gpu0_bsz")
    assert [event["new"] for event in moves] == [split[0] for a, split in itertools.pairwise(splits) if a != split]
    assert all("auto: device" in event["reason"] and event["is_auto"] and event["predicted_mib"] for event in moves)
    assert_answered_once(folder)


def test_evaluation_within_an_epoch_raises_no_peak_of_training(tiny, tmp_path):
    observed = []
    for every_steps in (1, 50):
        config = merged(
            on_budgets(tiny, 1, 900.0, gpu0_bsz=0).model_dump(mode="json"),
            data={"crop_px": [32, 32]},
            train={"batch_size": 4},
            eval={"every_steps": every_steps, "batch_size": 4},
        )
        assert train(config, tmp_path / str(every_steps)) == 0
        ((_, peaks),) = final_state(tmp_path / str(every_steps))["live"]["splits"]["observed"]
        observed.append(peaks)
    assert observed[0] == pytest.approx(observed[1], rel=0.1)


@pytest.mark.slow
def test_auto_split_starts_from_plan_and_can_be_switched(tiny, tmp_path):
    config = on_budgets(tiny, 2, 30.0, gpu0_bsz="auto")
    folder = tmp_path / "run"
    RunFolder.create(path=folder)
    send_command(folder, parse_command("stop epoch"))
    assert train(config, folder) == 75
    saved_plan = read_saved_plan(folder.joinpath("memory_plan.json"))
    assert events(folder, "run_start")[0]["split"] == list(saved_plan.best_split)
    assert final_state(folder)["live"]["settings"]["gpu0_bsz_auto"] is True
    kept = folder.joinpath("memory_plan.json").stat().st_mtime_ns
    send_command(folder, parse_command("set gpu0_bsz=5"))
    assert resume(config, folder) == 0
    assert folder.joinpath("memory_plan.json").stat().st_mtime_ns == kept  # not simulated again
    assert "auto is switched off" in assert_answered_once(folder)["set gpu0_bsz=5"]["reason"]
    assert events(folder, "epoch_start")[-1]["split"] == [5, 2, 1]
    assert final_state(folder)["live"]["settings"]["gpu0_bsz_auto"] is False


def test_plan_for_other_devices_keeps_its_batch_alone(tiny, tmp_path):
    """Where the memory of the present devices is unknown: no `gpu0_bsz`, and no predicted peaks."""
    folder = RunFolder.create(path=tmp_path / "run")
    blocks = ((), ("a",), ("a", "b"))
    saved = SavedMemoryPlan(6, 1, 1, (1, 3, 2), ((1, 3, 2),), ((10.0,) * 3,), 1.0, recompute=blocks)
    saved.write(folder.saved_plan)
    (folder.checkpoints / "best.pt").touch()
    config = merged(tiny, train={"batch_size": "auto"}, parallel={"gpu0_bsz": "auto"})
    devices = DevicePlan("ddp", (torch.device("cpu"),), "")
    for num, gpu0_bsz, predicted in ((3, 1, (10.0,) * 3), (2, None, ())):
        resolved, plan = resolve_auto(config, {}, folder, devices, [DeviceInfo("cpu")] * num, Ranks())
        assert (resolved.train.batch_size, plan.gpu0_bsz) == (6, gpu0_bsz)
        assert (plan.predicted_mib((1, 3, 2)), plan.recompute) == (predicted, blocks if num == 3 else None)


def test_plan_of_a_start_without_steps_is_not_used(tiny, tmp_path):
    """It may be for another crop or model; only a checkpoint of its own shows that a training of this run used it."""
    folder = RunFolder.create(path=tmp_path / "run")
    SavedMemoryPlan(6, 1, None, (6,), ((6,),), ((10.0,),), 1.0).write(folder.saved_plan)
    config, devices = merged(tiny, train={"batch_size": "auto"}), DevicePlan("single", (torch.device("cpu"),), "")
    (folder.checkpoints / "best.pt").touch()
    of_checkpoint, _ = resolve_auto(config, {}, folder, devices, [DeviceInfo("cpu")], Ranks())
    assert of_checkpoint.train.batch_size == 6
    (folder.checkpoints / "best.pt").unlink()
    of_other_run = {"config": merged(tiny, train={"batch_size": 6}).model_dump()}
    automatic = merged(tiny, train={"batch_size": "auto"}, parallel={"gpu0_bsz": "auto"})
    resolved, plan = resolve_auto(automatic, of_other_run, folder, devices, [DeviceInfo("cpu")], Ranks())
    assert (resolved.train.batch_size, plan) == (6, None)
    assert not folder.saved_plan.exists(), "the run's screen would show it"
    with pytest.raises(ConfigError, match=r"there is no GPU: set train\.batch_size to a number"):
        resolve_auto(config, None, folder, devices, [DeviceInfo("cpu")], Ranks())


@pytest.mark.slow
def test_auto_batch_fits_and_holds_after_resume(tiny, tmp_path):
    config = on_budgets(tiny, 1, 106.0, {"batch_size": "auto"}, gpu0_bsz="auto")  # 96 of them for cuBLAS
    folder = tmp_path / "run"
    assert train(config, folder) == 0
    settled = load_config(folder / "config.yaml")
    batch = settled.train.batch_size
    assert 2 <= batch < 12
    assert not events(folder, "oom")
    assert events(folder, "run_start")[0]["batch_size"] == batch
    more = merged(config.model_dump(mode="json"), train={"epochs": 2}, parallel={"memory_budget_mib": [900.0] * 3})
    assert resume(more, folder) == 0  # more memory changes nothing
    assert load_config(folder / "config.yaml").train.batch_size == batch


@pytest.mark.slow
def test_config_that_fits_no_batch_is_refused(tiny, tmp_path):
    with pytest.raises(ConfigError, match="would not fit"):
        train(on_budgets(tiny, 1, 0.5, {"batch_size": "auto"}, gpu0_bsz="auto"), tmp_path / "run")
