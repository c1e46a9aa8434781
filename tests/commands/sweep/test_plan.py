"""Plans of sweeps: every problem at once, runs kept when the grid grows, a changed config refused, folds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from segapp.commands.sweep.plan import SweepPlan, plan_sweep
from segapp.commands.sweep.runner import parse_slots
from segapp.config import dump_config, load_config
from segapp.errors import ConfigError
from tests.support.runs import merged


@pytest.fixture
def base(tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_config(merged(tiny)))
    return path


def names(plan: SweepPlan) -> list[str]:
    return [run.name for run in plan.info.runs]


def test_each_run_gets_its_own_complete_config(base: Path) -> None:
    plan = plan_sweep(["optim.lr=0.001,0.003", "seed=0..1", "train.epochs=1"], ["tiny.yaml"])
    assert plan.folder.path == Path("runs/tiny-sweep")
    assert names(plan) == ["lr0.001-seed0", "lr0.001-seed1", "lr0.003-seed0", "lr0.003-seed1"]
    assert not plan.folder.path.exists()
    plan.save()
    config = load_config(plan.folder.config_of("lr0.003-seed1"))
    assert (config.optim.lr, config.seed, config.train.epochs) == (0.003, 1, 1)
    assert plan.folder.read() == plan.info


def test_problems_of_all_runs_are_listed_together(base: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_sweep(["optim.lrr=1,2", "train.epochs=1,many", "schedule.min_lr=0,1.0"], ["tiny.yaml"])
    text = str(refused.value)
    assert "8 of the 8 runs have a problem, and none was started" in text
    assert "unknown key optim.lrr: did you mean optim.lr?" in text
    assert "train.epochs = 'many'" in text
    assert "(run optim.lrr=1 train.epochs=many" in text
    with pytest.raises(ConfigError, match=r"2 of the 4 runs .*(?s:.)*min_lr: 1.0 is above optim.lr"):
        plan_sweep(["seed=0,1", "schedule.min_lr=0,1.0"], ["tiny.yaml"])
    assert not Path("runs").exists()


def test_grown_grid_keeps_its_runs(base: Path) -> None:
    first = plan_sweep(["seed=0..1"], ["tiny.yaml"])
    first.save()
    first.folder.folder_of("seed0").path.mkdir()
    more = plan_sweep(["seed=0..2", "optim.lr=1e-3,0.01"], ["tiny.yaml"])  # 0.001 is the config's own value
    assert names(more) == ["seed0", "seed0-lr0.01", "seed1", "seed1-lr0.01", "seed2-lr1e-3", "seed2-lr0.01"]
    assert more.info.runs[0].settings == {"seed": 0, "optim.lr": 0.001}
    more.save()
    by_name = plan_sweep(["tiny-sweep", "seed=5"], [])
    assert [run.settings for run in by_name.info.runs if run.name in by_name.names] == [
        {"seed": 5, "optim.lr": 0.001},
        {"seed": 5, "optim.lr": 0.01},
    ]
    assert "seed0" in names(by_name)  # it began; the others of the earlier grid did not, and are left out
    assert len(names(by_name)) == 3
    by_name.save()
    assert sorted(path.stem for path in (more.folder.path / "configs").iterdir()) == sorted(names(by_name))
    assert plan_sweep(["tiny-sweep"], []).names == set(names(by_name))


def test_changed_config_is_refused_with_its_keys(base: Path) -> None:
    plan_sweep(["seed=0..1"], ["tiny.yaml"]).save()
    values = yaml.safe_load(base.read_text())
    values["optim"]["weight_decay"] = 0.5
    base.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError) as refused:
        plan_sweep(["seed=0..3"], ["tiny.yaml"])
    assert "optim.weight_decay: 0.0005 -> 0.5" in str(refused.value)
    assert "seed" not in str(refused.value).splitlines()[1]
    grid = plan_sweep(["seed=0..1", "optim.weight_decay=0.0005,0.5"], ["tiny.yaml"])
    assert names(grid)[:1] == ["seed0"]
    assert len(plan_sweep(["tiny-sweep"], []).names) == 2


def test_folds_are_found_by_glob_and_named_by_file(base: Path) -> None:
    for fold in (0, 1):
        values = yaml.safe_load(base.read_text())
        values["name"] = f"data-fold{fold}"
        Path(f"data-fold{fold}.yaml").write_text(yaml.safe_dump(values))
    plan = plan_sweep(["seed=0,1"], ["data-fold*.yaml"])
    assert plan.folder.name == "data-sweep"
    assert names(plan) == ["data-fold0-seed0", "data-fold0-seed1", "data-fold1-seed0", "data-fold1-seed1"]
    assert plan.names == plan_sweep(["data-fold0.yaml", "data-fold1.yaml", "seed=0,1"], []).names
    assert names(plan_sweep(["other"], ["data-fold*.yaml"])) == ["data-fold0", "data-fold1"]
    with pytest.raises(ConfigError, match="matches no file"):
        plan_sweep([], ["nothing*.yaml"])


def test_new_name_begins_a_sweep_beside_that_of_the_config(base: Path) -> None:
    plan_sweep(["seed=0,1"], ["tiny.yaml"]).save()
    plan = plan_sweep(["other", "seed=1,2"], ["tiny.yaml"])
    assert (plan.folder.path, names(plan)) == (Path("runs/other"), ["seed1", "seed2"])


def test_missing_config_and_foreign_folder_are_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match="no-sweep: no such sweep"):
        plan_sweep(["no-sweep", "seed=0,1"], [])
    with pytest.raises(ConfigError, match="--config FILE is missing"):
        plan_sweep(["seed=0,1"], [])
    Path("runs/tiny-sweep").mkdir(parents=True)
    Path("runs/tiny-sweep/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not a sweep"):
        plan_sweep(["seed=0,1"], ["tiny.yaml"])


def test_code_of_a_stored_config_must_have_been_named_here(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["seed=0,1", "optim.name=torch.optim:RMSprop"]
    monkeypatch.setenv("SEGAPP_TRUST_PARTS", "")
    plan_sweep(words, ["tiny.yaml"]).save()
    monkeypatch.setenv("SEGAPP_TRUST_PARTS", "")
    monkeypatch.setenv("XDG_STATE_HOME", str(base.parent / "state of another user"))
    with pytest.raises(ConfigError, match=r"tiny-sweep names code .* optim.name = torch.optim:RMSprop\(\)"):
        plan_sweep(["tiny-sweep"], []).check_parts()
    with pytest.raises(ConfigError, match="names code that would run"):
        plan_sweep(["tiny-sweep", "seed=7"], [])
    plan_sweep(words, ["tiny.yaml"]).check_parts()
    plan_sweep(["tiny-sweep"], []).check_parts()
    plan_sweep(["tiny-sweep", "optim.name=torch.optim:Adagrad"], []).check_parts()


def test_devices_become_the_gpus_that_a_trainer_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [slot.environ for slot in parse_slots(None, {})] == [{}]
    slots = parse_slots("0,3", {"OMP_NUM_THREADS": "2"})
    assert [slot.environ["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["0", "3"]
    assert slots[0].environ["OMP_NUM_THREADS"] == "2"
    pairs = parse_slots("0+1,2+3", {"CUDA_VISIBLE_DEVICES": "4,5,GPU-a,7"})
    assert [slot.environ["CUDA_VISIBLE_DEVICES"] for slot in pairs] == ["4,5", "GPU-a,7"]
    assert [slot.environ["CUDA_VISIBLE_DEVICES"] for slot in parse_slots("cpu,cpu", {})] == ["", ""]
    with pytest.raises(ConfigError, match="there is no GPU 4: there are 4"):
        parse_slots("0,4", {})
    with pytest.raises(ConfigError, match="'gpu0' is not a device"):
        parse_slots("gpu0", {})
