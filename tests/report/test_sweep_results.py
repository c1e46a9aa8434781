"""Means and deviations of a sweep against numpy, for drawn results; its page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from segapp.commands.sweep import result_lines
from segapp.config import dump_config, validate_config
from segapp.report.compare import mean_curve, write_sweep_page
from segapp.report.run_report import RunRow
from segapp.report.sweep_results import SettingResult, _rank, read_results, summarize_setting
from segapp.run.events import EventWriter, RunEnd, RunStart, Step, Val
from segapp.run.sweep import SweepFolder, SweepRun, new_info

RNG = np.random.default_rng(0)


def recorded(sweep: SweepFolder, name: str, config: dict[str, Any], mious: list[float], status: Any) -> None:
    """Writes a run with an evaluation after each two steps."""
    sweep.config_of(name).parent.mkdir(parents=True, exist_ok=True)
    sweep.config_of(name).write_text(dump_config(validate_config(config)))
    folder = sweep.folder_of(name)
    folder.path.mkdir(parents=True)
    with folder, EventWriter(folder.events) as writer:
        folder.write_info()
        writer.write(RunStart(classes=["a", "b"], num_params=1, batch_size=1, epochs=2, steps_per_epoch=2, devices=[]))
        for step in range(1, 2 * len(mious) + 1):
            writer.write(Step(epoch=(step + 1) // 2, step=step, loss=1.0 / step, lr=0.1))
            if step % 2 == 0:
                miou = mious[step // 2 - 1]
                writer.write(Val(epoch=step // 2, step=step, loss=1 - miou, miou=miou, iou=[miou, None]))
        writer.write(RunEnd(status=status, reason="enough", exit_code=0))


@pytest.fixture
def swept(tiny: dict[str, Any], tmp_path: Path) -> tuple[SweepFolder, np.ndarray]:
    """Two rates, two folds, three seeds, two evaluations each; one run of the second rate has not finished."""
    sweep = SweepFolder(tmp_path / "lr-sweep")
    mious = RNG.uniform(0.3, 0.6, (2, 2, 3, 2))
    mious[1] += 0.2
    runs = []
    for r, f, s in np.ndindex(2, 2, 3):
        lr = [0.001, 0.003][r]
        name = f"fold{f}-lr{lr}-seed{s}"
        config = {**tiny, "name": f"fold{f}", "seed": int(s), "optim": {"name": "adamw", "lr": lr}}
        config["data"] = {**tiny["data"], "train_split": f"fold{f}-train", "val_split": f"fold{f}-val"}
        status = "stopped" if (r, f, s) == (1, 1, 2) else "finished"
        recorded(sweep, name, config, mious[r, f, s].tolist(), status)
        runs.append(SweepRun(name=name, config=f"fold{f}", settings={"optim.lr": lr, "seed": int(s)}))
    axes = {"optim.lr": ["0.001", "0.003"], "seed": ["0", "1", "2"]}
    sweep.write(new_info().model_copy(update={"axes": axes, "runs": runs}))
    return sweep, mious


def test_means_and_deviations_are_those_of_numpy(swept: tuple[SweepFolder, np.ndarray]) -> None:
    sweep, mious = swept
    results = read_results(sweep)
    assert (results.name, results.path) == ("lr-sweep", str(sweep.path))
    assert (results.varying, results.repeated, results.state) == (["optim.lr"], ["seed", "fold"], "stopped")
    first, second = results.settings
    assert [row.settings for row in results.settings] == [{"optim.lr": 0.003}, {"optim.lr": 0.001}]
    best = mious.max(-1)
    assert second.best_miou is not None
    assert second.best_miou.mean == pytest.approx(best[0].mean(), abs=1e-12)
    assert second.best_miou.deviation == pytest.approx(best[0].std(ddof=1), abs=1e-12)
    assert second.over_seeds == pytest.approx(best[0].mean(0).std(ddof=1), abs=1e-12)
    assert second.over_folds == pytest.approx(best[0].mean(1).std(ddof=1), abs=1e-12)
    finished = mious[1].reshape(6, 2)[:5]
    assert (first.num_finished, len(first.runs)) == (5, 6)
    assert first.best_miou is not None
    assert first.last_miou is not None
    assert first.val_loss is not None
    assert first.best_miou.mean == pytest.approx(finished.max(1).mean(), abs=1e-12)
    assert first.last_miou.mean == pytest.approx(finished[:, 1].mean(), abs=1e-12)
    assert first.last_miou.deviation == pytest.approx(finished[:, 1].std(ddof=1), abs=1e-12)
    assert first.val_loss.mean == pytest.approx((1 - finished[:, 1]).mean(), abs=1e-12)
    assert first.over_seeds is None  # a fold lacks a seed
    assert (first.difference, first.margin) == (None, None)  # the best setting


def test_difference_of_settings_is_scipys_paired_t_interval(swept: tuple[SweepFolder, np.ndarray]) -> None:
    """Over the five seeds and folds that both settings have finished."""
    sweep, mious = swept
    found = read_results(sweep)
    other = found.settings[1]
    worse, best = (mious[rate].max(-1).reshape(6)[:5] for rate in (0, 1))
    low, high = stats.ttest_rel(worse, best).confidence_interval(0.95)
    assert other.difference is not None
    assert other.difference.mean == pytest.approx((worse - best).mean(), abs=1e-12)
    assert other.difference.count == 5
    assert other.margin == pytest.approx((high - low) / 2, rel=1e-9)
    written = json.loads(json.dumps(found.as_json()))["settings"][1]
    assert (written["margin"], written["difference"]["mean"]) == (other.margin, other.difference.mean)
    assert "cells" not in written
    assert written["iou"]["a"]["mean"] == pytest.approx(mious[0].max(-1).mean())
    assert written["iou"]["b"] is None
    lines = result_lines(found)
    assert f"  {other.difference.mean:+.4f} ± {other.margin:.4f}  " in lines[2]


def test_page_after_one_evaluation_has_points_and_no_curve(tiny: dict[str, Any], tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path / "s")
    settings = [{"optim.lr": lr, "seed": seed} for lr in (0.001, 0.01) for seed in (0, 1)]
    runs = [SweepRun(name=f"r{i}", config="c", settings=each) for i, each in enumerate(settings)]
    for i, run in enumerate(runs):
        recorded(sweep, run.name, tiny, [0.3 + 0.1 * i], "finished")
    axes = {"optim.lr": ["0.001", "0.01"], "seed": ["0", "1"]}
    sweep.write(new_info().model_copy(update={"runs": runs, "axes": axes}))
    page = write_sweep_page(sweep).read_text()
    assert "<h2>mIoU</h2>" not in page
    assert re.findall(r"<title>([\d.]+ %)</title>", page) == ["50.0 %", "60.0 %", "30.0 %", "40.0 %"]
    assert "-20.00 ± 0.00" in page  # each seed alike


def test_one_run_has_no_deviation_and_none_no_mean() -> None:
    done = RunRow("a", "finished", config="c", settings={"seed": 0}, best_miou=0.5)
    row = summarize_setting({}, [done], lambda run: run.config)
    assert row.best_miou is not None
    assert (row.best_miou.mean, row.best_miou.deviation, row.best_miou.count) == (0.5, None, 1)
    assert row.val_loss is None
    two = [
        RunRow(fold, "finished", config=fold, settings={"seed": 0}, best_miou=miou)
        for fold, miou in (("a", 0.5), ("b", 0.7))
    ]
    row = summarize_setting({}, two, lambda run: run.config)
    assert (row.over_seeds, row.over_folds) == (None, None)  # two folds, but one seed
    assert row.best_miou is not None
    assert (row.best_miou.mean, row.best_miou.deviation) == pytest.approx((0.6, 0.2 / 2**0.5))
    two = [
        RunRow("a", "finished", config="c", settings={"seed": seed}, best_miou=miou)
        for seed, miou in ((0, 0.5), (1, 0.7))
    ]
    row = summarize_setting({}, two, lambda run: run.config)
    assert (row.over_seeds, row.over_folds) == (None, None)  # two seeds, but one fold
    waiting = summarize_setting({}, [RunRow("a", "waiting", config="c", settings={})], lambda run: run.config)
    assert (waiting.best_miou, waiting.num_finished) == (None, 0)


def test_settings_are_ranked_by_miou_then_loss() -> None:
    def row(name: str, miou: float | None, loss: float | None) -> SettingResult:
        run = RunRow(name, "finished", config="c", settings={}, best_miou=miou, last_val_loss=loss)
        return summarize_setting({"name": name}, [run], lambda run: run.config)

    rows = [row("nothing", None, None), row("loss 3", None, 3.0), row("best", 0.7, 9.0), row("loss 2", None, 2.0),
            row("same, worse", 0.5, 0.4), row("same", 0.5, 0.3), row("same, unknown", 0.5, None),
            row("zero", 0.0, 0.1)]  # fmt: skip
    wanted = ["best", "same", "same, worse", "same, unknown", "zero", "loss 2", "loss 3", "nothing"]
    assert [each.settings["name"] for each in sorted(rows, key=_rank)] == wanted


def test_configs_that_differ_beyond_the_division_are_compared(tiny: dict[str, Any], tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path / "s")
    for name, lr in (("slow", 0.001), ("fast", 0.01)):
        recorded(sweep, name, {**tiny, "name": name, "optim": {"lr": lr}}, [0.5], "finished")
    runs = [SweepRun(name=name, config=name, settings={}) for name in ("slow", "fast")]
    sweep.write(new_info().model_copy(update={"runs": runs}))
    results = read_results(sweep)
    assert results.varying == ["config"]
    assert [row.settings["config"] for row in results.settings] == ["slow", "fast"]
    assert results.state == "finished"


def test_mean_curve_is_numpy_interpolation_where_all_have_values() -> None:
    a = (np.array([1.0, 3.0, 5.0]), np.array([0.0, 1.0, 2.0]))
    b = (np.array([2.0, 4.0, 8.0]), np.array([4.0, np.nan, 10.0]))
    found = mean_curve([a, b])
    assert found is not None
    x, mean, low, high = found
    assert (x[0], x[-1]) == (2.0, 5.0)
    expected = np.stack([np.interp(x, *a), np.interp(x, [2.0, 8.0], [4.0, 10.0])])
    assert np.allclose(mean, expected.mean(0))
    assert np.allclose(low, expected.min(0))
    assert np.allclose(high, expected.max(0))
    assert mean_curve([(np.array([1.0]), np.array([2.0])), (np.array([3.0]), np.array([2.0]))]) is None
    assert mean_curve([]) is None


def test_page_names_settings_best_first_and_every_run(swept: tuple[SweepFolder, np.ndarray]) -> None:
    sweep, mious = swept
    page = write_sweep_page(sweep).read_text()
    assert page.index(">0.003<") < page.index(">0.001<")
    best = 100 * mious[0].max(-1)
    assert f"{best.mean():.1f} % ± {best.std(ddof=1):.1f}" in page
    assert "which differ in seed and fold" in page
    assert page.count("<figure class=chart>") == 2
    assert all(f"lr-sweep/fold{f}-lr{lr}-seed{s}" in page for f in (0, 1) for s in (0, 1, 2) for lr in (0.001, 0.003))
    assert "<script" not in page
