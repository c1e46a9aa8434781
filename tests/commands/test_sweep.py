"""Sweeps: the grid of the words, one run for schedulers, and whole sweeps as real processes with real signals."""

from __future__ import annotations

import json
import os
import signal
import statistics
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer.main
import yaml

from segapp.__main__ import main
from segapp.checkpoint.training_state import load_checkpoint
from segapp.cli import app
from segapp.commands.sweep import (
    SweepRun,
    combinations,
    job_environments,
    parse_axes,
    parse_values,
    plan_sweep,
    repeated_runs,
    run_name,
    save_sweep,
    setting_lines,
    train_runs,
)
from segapp.config import dump_config, load_config
from segapp.errors import ConfigError
from segapp.run.events import EpochStart, RunEnd, Val
from segapp.run.folder import RunFolder, runs_of
from segapp.view.runs import run_state
from tests.support.drawn_folders import draw
from tests.support.fake_smi import FOUR, SLICED, Card, smi_of
from tests.support.gpu.fake_cuda import FakeCuda, FakeGpu
from tests.support.live_runs import seen, small, wait_for
from tests.support.programs import Program, start
from tests.support.recorded_runs import RecordedRun
from tests.support.runs import differing, events, merged

GRID = ("--config", "tiny.yaml", "seed=0..2", "train.epochs=1")
SLOW = {"SEGAPP_FAILPOINTS": "train.step=sleep:0.15"}


@pytest.fixture
def place(tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.yaml").write_text(dump_config(small(tiny)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sweep(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", *words])
    return int(ended.value.code or 0)


def process(place: Path, *words: str, **env: str) -> Program:
    logs = place / f"logs{len(list(place.glob('logs*')))}"
    logs.mkdir()
    return start("sweep", *words, cwd=place, logs=logs, SEGAPP_TEST_FORK="1", **env)


def names(words: list[str], configs: list[str]) -> list[str]:
    return [run.name for run in plan_sweep(words, configs)[1]]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.001,0.003", ["0.001", "0.003"]),
        ("0..3", ["0", "1", "2", "3"]),
        ("-1..1, 7", ["-1", "0", "1", "7"]),
        ("2,2,2..3", ["2", "3"]),
        ("[96, 192], [128, 256]", ["[96, 192]", "[128, 256]"]),
        ("{a: 1, b: [2, 3]},null", ["{a: 1, b: [2, 3]}", "null"]),
        ('unet, \'a, b\', "c\\", d"', ["unet", "'a, b'", '"c\\", d"']),
        ("'0..4'", ["'0..4'"]),
        ("../data,a..b", ["../data", "a..b"]),
    ],
)
def test_values_are_split_at_outer_commas(text: str, values: list[str]) -> None:
    assert parse_values(text, "key") == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,,2", "expected the node content"),
        ("", "a value is missing"),
        ("4..0", "must go up from a to b"),
        ("0..10000", "at most 10000"),
        ("[1,2", "close brackets and quotes"),
    ],
)
def test_unusable_values_are_refused_with_a_reason(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_values(text, "key")


def test_all_unusable_words_are_named_and_the_size_is_limited() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_axes(["seed=0", " seed =1", "optim. lr=1,,2", "name =a,b"])
    for part in ("3 words", "seed is given twice", "optim.lr=1,,2", "name is set by the sweep"):
        assert part in str(refused.value)
    with pytest.raises(ConfigError, match="the grid has 20000 runs"):
        combinations({"seed": [str(i) for i in range(10_000)]}, num_configs=2)


def test_run_names_are_short_and_distinct() -> None:
    assert run_name([], {"optim.lr": "1e-3", "seed": "0"}, {}) == "lr1e-3-seed0"
    assert run_name(["data-fold1"], {}, {}) == "data-fold1"
    assert run_name([], {}, {}) == "run"
    assert run_name([], {"model.name": "unet", "loss.name": "ce"}, {}) == "model.name_unet-loss.name_ce"
    assert run_name([], {"seed": "0"}, {"seed0": None}).startswith("seed0-")
    assert len(run_name([], {"data.root": "x" * 300}, {})) < 100
    assert run_name([], {"data.root": "../a/b c/"}, {}) == "root_b_c"


def test_each_run_gets_its_own_complete_config(place: Path) -> None:
    path, runs = plan_sweep(["optim.lr=0.001,0.003", "seed=0..1", "train.epochs=1"], ["tiny.yaml"])
    assert path == Path("runs/tiny-sweep")
    assert [run.name for run in runs] == ["lr0.001-seed0", "lr0.001-seed1", "lr0.003-seed0", "lr0.003-seed1"]
    assert not path.exists()
    save_sweep(path, runs)
    config = load_config(runs[3].stored_config)
    assert (config.optim.lr, config.seed, config.train.epochs) == (0.003, 1, 1)
    assert json.loads((path / "sweep.json").read_text())["lr0.003-seed1"]["optim.lr"] == 0.003
    assert names(["other", "seed=1,2"], ["tiny.yaml"]) == ["seed1", "seed2"]


@pytest.mark.usefixtures("trusted_code")
def test_runs_of_all_lengths_have_one_momentum(place: Path, tiny: dict[str, Any]) -> None:
    """The own 0.01 would suit 20,000 steps; 5,000 need 0.02, and 2,000, the fewest, need 0.05."""
    layers = "nn.Conv2d(3, num_classes, 1), nn.BatchNorm2d(num_classes, momentum=0.01)"
    (place / "net.py").write_text(f"from torch import nn\nnet = lambda num_classes: nn.Sequential({layers})")
    model = {"library": "python", "name": "net.py:net", "encoder": None, "options": {}}
    for name, train in (("mobile", {"bn_momentum": "auto"}), ("named", {"bn_momentum": 0.3}), ("silent", {})):
        (place / f"{name}.yaml").write_text(dump_config(merged(tiny, model=model, train=train)))
    path, runs = plan_sweep(["train.epochs=1000,400,4000"], ["mobile.yaml", "named.yaml", "silent.yaml"])
    save_sweep(path, runs)
    found = {run.name: load_config(run.stored_config).train.bn_momentum for run in runs}
    assert found == {name: 0.3 if name.startswith("named") else 0.05 for name in found}
    assert [run.words[-1] for run in runs if not run.name.startswith("named")] == ["train.bn_momentum=0.05"] * 6
    assert {run.config.train.bn_momentum for run in plan_sweep(["seed=0..2"], ["mobile.yaml"])[1]} == {"auto"}


def test_problems_of_all_runs_are_listed_together(place: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_sweep(["optim.lrr=1,2", "train.epochs=1,many", "schedule.min_lr=0,1.0"], ["tiny.yaml"])
    text = str(refused.value)
    assert "8 of the 8 runs have a problem, and none was started" in text
    with pytest.raises(
        ConfigError, match=r"1 of the 3 runs .*\n.*use 'dice:disc' \(run tiny checkpoint.monitor=dice:disk"
    ):
        plan_sweep(["checkpoint.monitor=miou,dice:disk,dice:disc"], ["tiny.yaml"])
    assert text.count("unknown key optim.lrr: did you mean optim.lr?") == 1
    assert "train.epochs = 'many'" in text
    assert "(run tiny optim.lrr=1 train.epochs=many" in text
    assert not Path("runs").exists()


def test_changed_config_of_a_run_is_refused_with_its_keys(place: Path) -> None:
    path, runs = plan_sweep(["seed=0..1"], ["tiny.yaml"])
    save_sweep(path, runs)
    values = yaml.safe_load((place / "tiny.yaml").read_text())
    values["optim"]["weight_decay"] = 0.5
    (place / "tiny.yaml").write_text(yaml.safe_dump(values))
    save_sweep(*plan_sweep(["seed=0..1"], ["tiny.yaml"]))  # no run has begun
    with RunFolder.create(path=runs[1].folder.path) as folder:
        folder.write_info()
    values["optim"]["weight_decay"] = 0.25
    (place / "tiny.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"seed1 began with another config \(optim.weight_decay: 0.5 -> 0.25\)"):
        save_sweep(*plan_sweep(["seed=0..3"], ["tiny.yaml"]))
    save_sweep(*plan_sweep(["seed=2..3"], ["tiny.yaml"]))


def test_folds_are_repetitions_and_other_names_are_refused(place: Path) -> None:
    values = yaml.safe_load((place / "tiny.yaml").read_text())
    for fold in (0, 1):
        Path(f"data-fold{fold}.yaml").write_text(yaml.safe_dump({**values, "name": f"data-fold{fold}"}))
    path, runs = plan_sweep(["data-fold0.yaml", "data-fold1.yaml", "seed=0,1"], [])
    assert path.name == "data-sweep"
    assert [run.name for run in runs] == [f"data-fold{fold}-seed{seed}" for fold in (0, 1) for seed in (0, 1)]
    assert [run.settings for run in runs][1] == {"fold": "data-fold0", "seed": 1}
    assert names(["seed=0,1"], ["data-fold0.yaml", "data-fold1.yaml"]) == [run.name for run in runs]
    Path("other.yaml").write_text(yaml.safe_dump({**values, "seed": 7}))
    assert plan_sweep(["data-fold0.yaml", "other.yaml"], [])[1][1].settings == {"config": "other"}
    with pytest.raises(ConfigError, match="--config FILE is missing"):
        plan_sweep(["seed=0,1"], [])
    Path("runs/tiny-sweep").mkdir(parents=True)
    for name in ("notes.txt", "more.txt"):
        Path("runs/tiny-sweep", name).write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not a sweep"):
        plan_sweep(["seed=0,1"], ["tiny.yaml"])


def test_command_that_init_names_is_a_sweep_of_the_folds(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw(place / "photos", [f"{number:03}" for number in range(6)], "images/{}.jpg", "masks/{}_mask.png")
    with pytest.raises(SystemExit):
        main(["init", "photos", "--folds", "3"])
    words = capsys.readouterr().out.splitlines()[-1].partition("; segapp sweep ")[2].split()
    assert names(words, []) == ["photos-fold0", "photos-fold1", "photos-fold2"]


@pytest.mark.parametrize(
    ("cards", "visible", "each_job"),
    [
        (FOUR, None, ["GPU-1a4e,GPU-1b77", "GPU-2c05,GPU-9d31"]),
        (FOUR, "3,0,2", ["3", "0"]),
        (FOUR, "2,7,0", ["2", "2"]),
        (FOUR, "NoDevFiles", ["", ""]),
        (SLICED, "MIG-77aa,MIG-80", ["MIG-77aa", "MIG-80"]),
        (SLICED[:2], None, ["MIG-77aa01", "MIG-77ab02"]),
    ],
)
def test_each_job_gets_gpus_that_cuda_shows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cards: tuple[Card, ...],
    visible: str | None,
    each_job: list[str],
) -> None:
    smi_of(tmp_path, cards, monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in job_environments(2)] == each_job


def test_jobs_share_the_gpus_and_threads(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nvidia-smi, as on ROCm, torch counts the GPUs."""
    fake_cuda.gpus = [FakeGpu()] * 4
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")

    def visible(jobs: int) -> list[str]:
        return [each["CUDA_VISIBLE_DEVICES"] for each in job_environments(jobs)]

    assert job_environments(1) == [{}]
    assert visible(3) == ["0", "1", "2"]
    assert visible(6) == ["0", "1", "2", "3", "0", "1"]
    assert job_environments(2)[0]["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-a,7")
    assert visible(2) == ["4,5", "GPU-a,7"]
    fake_cuda.gpus = []
    assert visible(2) == ["", ""]


def test_table_has_the_mean_of_each_setting(place: Path) -> None:
    """Against `statistics`; a run that has not begun is not counted, and an absent class is not in the mean."""
    _, runs = plan_sweep(["optim.lr=0.1,0.2", "optim.weight_decay=0.5,0.25", "seed=0..2"], ["tiny.yaml"])
    best = [(0.2, 0.5), (0.2, 0.25), (0.1, 0.5)]
    mious = {(lr, decay, seed): 0.2 + lr + decay / 10 + 0.01 * seed**2 for lr, decay in best for seed in (0, 1, 2)}
    for run in runs:
        if (miou := mious.get((*run.settings.values(),))) is not None:
            recorded(run, miou)
    lines = setting_lines(runs)
    assert lines[0].split() == ["optim.lr", "optim.weight_decay", "RUNS", "BEST", "MIOU"]
    for line, (lr, decay) in zip(lines[1:4], best, strict=True):
        values = [mious[lr, decay, seed] for seed in (0, 1, 2)]
        mean = f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f} (1/2)"
        assert " ".join(line.split()) == f"{lr} {decay} 3 of 3 {mean}"
    assert lines[4].split() == ["0.1", "0.25", "0", "of", "3", "-"]
    assert setting_lines(runs[:1])[1].split()[:6] == ["all", "runs", "1", "of", "1", "0.3500"]


def recorded(run: SweepRun, miou: float) -> None:
    """Write the events of a finished run with two classes, of which one is absent."""
    own = RecordedRun(run.folder.path, classes=["road", "sky"], num_devices=1)
    own.train(1)
    own.write(Val(epoch=1, step=1, loss=1.0, miou=miou, iou=[miou, None]))
    own.write(RunEnd(status="finished", reason="done", exit_code=0))
    own.writer.close()


def test_dry_run_lists_runs_and_writes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(*GRID, "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], [run["index"] for run in found["runs"]]) == ("tiny-sweep", [0, 1, 2])
    assert found["runs"][2] == {
        "index": 2,
        "name": "seed2",
        "folder": "runs/tiny-sweep/seed2",
        "state": "waiting",
        "settings": {"seed": 2, "train.epochs": 1},
        "arguments": ["train", "--config", "tiny.yaml", "seed=2", "train.epochs=1", "--run", "runs/tiny-sweep/seed2",
                  "--resume", "auto"],
    }  # fmt: skip
    command: Any = typer.main.get_command(app)
    train = command.commands["train"].make_context("train", found["runs"][2]["arguments"][1:]).params
    assert (train["run"], train["resume"]) == (Path("runs/tiny-sweep/seed2"), "auto")
    assert sweep(*GRID, "--dry-run", "--only", "1") == 0
    assert capsys.readouterr().out == "runs/tiny-sweep/seed1\n"
    assert sweep(*GRID, "--dry-run") == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["0", "runs/tiny-sweep/seed0", "waiting"]
    assert not (place / "runs").exists()


def test_wrong_words_are_refused_before_anything_is_written(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sweep(*GRID, "--only", "3", "--jobs", "2") == 2
    assert sweep(*GRID, "--json") == 2
    assert sweep(*GRID, "--only", "3", "--dry-run") == 2
    assert "--only 3: the sweep has the runs 0 to 2" in capsys.readouterr().err
    for size in ("2", "two"):
        monkeypatch.setenv("WORLD_SIZE", size)
        assert sweep(*GRID, "--only", "0") == 2
        assert "segapp launch" in capsys.readouterr().err
    assert not (place / "runs").exists()


def test_stopped_sweep_resumes_bit_for_bit(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its own command, and by that of one task of a scheduler."""
    grid = ("--config", "tiny.yaml", "seed=0,1", "train.epochs=2")
    whole = process(place, "whole", *grid, "--jobs", "2", OMP_NUM_THREADS="1")
    first, second = (place / "runs" / "tiny-sweep" / name for name in ("seed0", "seed1"))
    stopped = process(place, *grid, **SLOW)
    wait_for(lambda: len(seen(first, "step")) >= 3)
    values = yaml.safe_load((place / "tiny.yaml").read_text())
    refused = process(place, *grid, "--only", "0").finish()
    assert (refused.returncode, "seed0" in refused.stderr) == (9, True)
    stopped.send(signal.SIGINT)
    done = stopped.finish()
    assert done.returncode == 75, done.stderr
    assert events(first, "run_end")[-1]["status"] == "stopped"
    assert not second.exists()
    num_before = len(seen(first, "step"))
    task = process(place, *grid, "--only", "1", **SLOW)
    wait_for(lambda: len(seen(second, "step")) >= 2)
    task.send(signal.SIGTERM)
    assert task.finish().returncode == 75
    assert [run_state(folder) for folder in (first, second)] == ["stopped"] * 2

    continuing = process(place, *grid)
    wait_for(lambda: "seed0: resumed" in continuing.stdout)
    (place / "tiny.yaml").write_text(yaml.safe_dump({**values, "optim": {"name": "sgd", "lr": 0.5}}))
    rest = continuing.finish()
    assert rest.returncode == 0, rest.stderr
    assert num_before < len(seen(first, "step")) == 10
    assert rest.stdout.splitlines()[-1].startswith("all runs  2 of 2  0.")
    (place / "tiny.yaml").write_text(yaml.safe_dump(values))
    assert sweep(*grid, "--only", "1") == 0
    assert "seed1 has finished" in capsys.readouterr().out

    assert whole.finish().returncode == 0
    for name in ("seed0", "seed1"):
        resumed, at_once = (load_checkpoint(place / "runs" / of / name).state for of in ("tiny-sweep", "whole"))
        for key in ("model", "optimizer", "ema"):
            assert differing(resumed.get(key), at_once.get(key)) == []
    starts = [events(place / "runs" / "whole" / name, "run_start")[0]["t"] for name in ("seed0", "seed1")]
    ends = [events(place / "runs" / "whole" / name, "run_end")[0]["t"] for name in ("seed0", "seed1")]
    assert max(starts) < min(ends)  # both at the same time


def test_failed_run_leaves_the_others_and_is_tried_again(place: Path, tiny_root: Path) -> None:
    missing = place / "later"
    words = ("--config", "tiny.yaml", "train.epochs=1", f"data.root={tiny_root},{missing}")
    failed = process(place, *words).finish()
    assert failed.returncode == 1, failed.stderr
    assert "ended with exit code 3" in failed.stdout
    assert str(missing) in failed.stderr
    os.symlink(tiny_root, missing)
    again = process(place, *words).finish()
    assert again.returncode == 0, again.stdout
    assert "2 runs, 1 to train" in again.stdout
    assert [run_state(Path(run)) for run in runs_of("tiny-sweep")] == ["finished"] * 2


def test_sweep_of_folds_and_seeds_is_one_model(place: Path) -> None:
    folder = Path("runs") / "photos-sweep"
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text("{}")
    for name, seed, fold in (("fold1-seed7", 7, "one"), ("fold0-seed9", 9, "nil"), ("fold2-seed7", 7, "two")):
        run = RecordedRun(folder / name)
        run.folder.config_yaml.write_text(f"seed: {seed}\ndata: {{val_split: {fold}}}\noptim: {{lr: 0.1}}")
        run.write(RunEnd(status="finished", reason="done", exit_code=0), 1.0)
        run.writer.close()
    members = [str(folder / name) for name in ("fold0-seed9", "fold1-seed7", "fold2-seed7")]
    assert [repeated_runs("photos-sweep"), repeated_runs("other.pt")] == [members, ["other.pt"]]
    late = RecordedRun(folder / "fold3-seed7")
    late.folder.config_yaml.write_text("seed: 7\ndata: {val_split: three}\noptim: {lr: 0.1}")
    with pytest.raises(ConfigError, match="fold3-seed7 of this sweep has not finished: repeat the command"):
        repeated_runs("photos-sweep")
    late.folder.config_yaml.write_text("optim: {weight_decay: 0.5, lr: 0.2}")
    with pytest.raises(ConfigError, match=r"differ in optim.lr, optim.weight_decay: name the runs to average"):
        repeated_runs(str(folder))
    late.writer.close()


def test_running_sweep_says_how_far_its_runs_are(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two at a time, one fails; Ctrl-C then stops the others, and the last one never begins."""
    trainers, texts, said = list[Any](), list[Any](), list[str]()
    path, runs = plan_sweep(["seed=0..3"], ["tiny.yaml"])
    save_sweep(path, runs)

    def started(run: SweepRun, environment: dict[str, str]) -> Any:
        recorded = RecordedRun(run.folder.path, epochs=3)
        recorded.write(EpochStart(epoch=(2, 1, 3)[len(trainers)], lr=0.1, step=0), 1.0)
        recorded.writer.close()
        trainers.append(trainer := Mock(at=(run.name, environment["CUDA_VISIBLE_DEVICES"]), exit_code=None))
        trainer.print_end = lambda: trainer.exit_code
        trainer.process.send_signal = lambda number: setattr(trainer, "exit_code", 128 + number)
        return trainer

    def between_looks(_: float) -> None:
        said.append(texts[0]())
        assert len(said) < 9, "a trainer was not told to stop"
        if len(trainers) == 2:
            trainers[1].exit_code = 3
        elif len(said) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("segapp.commands.sweep._started", started)
    monkeypatch.setattr("segapp.commands.sweep.time.sleep", between_looks)
    monkeypatch.setattr("segapp.commands.sweep.lines_while", lambda text: texts.append(text) or nullcontext())
    assert train_runs(runs, [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("4,1", "3")]) == [3, 75, 75]
    assert [trainer.at for trainer in trainers] == [("seed0", "4,1"), ("seed1", "3"), ("seed2", "3")]
    assert said[0] == "0 of 4 runs have ended; seed0 is in epoch 2/3, seed1 is in epoch 1/3"
    assert said[2] == "1 of 4 runs have ended; seed0 is in epoch 2/3, seed2 is in epoch 3/3"
