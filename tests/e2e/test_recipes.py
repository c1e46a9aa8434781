"""Every shipped config trains on synthetic data in its layout, and its small form keeps the curve stored for it."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path

import pytest

from tests.support.golden_runs import (
    CONFIGS,
    CURVES,
    NUM_STEPS,
    curve_of,
    differences,
    prepare,
    stored_curve,
    train_recipe,
    versions,
)
from tests.support.runs import alerts, events, segapp, train


def advice(recipe: str) -> list[str]:
    """Return how to make a stored curve again, and which versions differ from those it was made with."""
    old, new = stored_curve(recipe)["made_with"], versions()
    lines = [f"it was made with {name} {old[name]}, this is {new[name]}" for name in old if old[name] != new[name]]
    return [*lines, f"if the change is meant: python -m tests.support.golden_runs --write {recipe}"]


def problems(path: Path, folder: Path, *more: str) -> list[str]:
    """Train a recipe's small form and return what differs from its stored curve."""
    return differences(path.stem, curve_of(train_recipe(path, folder, *more)), stored_curve(path.stem))


def config_named(recipe: str) -> Path:
    return next(path for path in CONFIGS if path.stem == recipe)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_recipe_header_cites_published_result_and_source(path: Path) -> None:
    header = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    for word in ("Data:", "Launch:", "Override:", "Published:", "Source:"):
        assert re.search(rf"^# {word}\s+\S", header, re.MULTILINE), f"{path.name} has no line '# {word} ...'"
    published = header.partition("Published:")[2].partition("Source:")[0]
    assert re.search(r"\d\d\.\d+ % mIoU|^\s+nothing, ", published), published


SLOW = (
    *("ade20k-segformer-b2", "cityscapes-eomt-vitl", "cityscapes-eomt-vitl-lora", "cityscapes-fast", "folder"),
    *("topdown", "ade20k", "voc", "cityscapes-eomt-vits", "cityscapes-pspnet", "camvid-distill", "cityscapes"),
)
"""Recipes that differ from the others by data and network alone, both of which have tests of their own."""


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[pytest.mark.slow] * (path.stem in SLOW), id=path.stem) for path in CONFIGS]
)
def test_recipe_keeps_its_golden_curve(path: Path, tmp_path: Path) -> None:
    run = train_recipe(path, tmp_path)
    found = differences(path.stem, curve_of(run), stored_curve(path.stem))
    assert found == [], "\n".join([*found, *advice(path.stem)])
    assert not alerts(run)
    (start,) = events(run, "run_start")
    (val,) = events(run, "val")
    assert len(val["iou"]) == len(start["classes"])
    assert (run / "checkpoints" / "best.pt").is_file()
    assert events(run, "run_end")[-1]["status"] == "finished"


def test_every_recipe_has_one_stored_curve_and_no_other() -> None:
    assert {path.stem for path in CURVES.iterdir()} == {path.stem for path in CONFIGS}
    for path in CONFIGS:
        assert [step["step"] for step in stored_curve(path.stem)["steps"]] == list(range(1, NUM_STEPS + 1))


def test_difference_names_recipe_step_and_both_values() -> None:
    stored = {"steps": [{"step": 1, "loss": 2.5, "grad_norm": 1.0, "lr": 0.1}], "val": {}}
    stored["val"] = {"loss": 2.0, "miou": 0.5, "pixel_accuracy": 0.75}
    assert differences("voc", stored, stored) == []
    curve = copy.deepcopy(stored)
    curve["steps"][0]["loss"] = 2.5001
    assert differences("voc", curve, stored) == ["voc, step 1: loss is 2.5001, stored is 2.5 (tolerance 1e-08)"]
    curve = copy.deepcopy(stored)
    curve["val"]["miou"] = 0.6
    assert [line.partition(" is ")[0] for line in differences("voc", curve, stored)] == ["voc, evaluation: miou"]
    assert differences("voc", {**stored, "steps": []}, stored) == ["voc: 0 steps, stored are 1"]


CHANGES = [
    ("cityscapes", "loss.aux_weight=0.404"),
    ("cityscapes", "optim.head_lr_factor=10.1"),
    ("cityscapes", "optim.momentum=0.909"),
    ("cityscapes", "optim.weight_decay=0.000505"),
    ("cityscapes", "optim.lr=0.0101"),
    ("cityscapes", "schedule.power=0.909"),
    ("cityscapes", "seed=1"),
    ("ade20k", "data.scale=[0.5, 2.02]"),
    ("cityscapes-eomt-vits", "optim.lr=1.01e-4"),
    ("camvid", "data.photometric=0.707"),
    ("camvid", "train.bn_momentum=0.0505"),
    ("camvid", "loss.class_weights=null"),
]
"""Not noticed are a decay of the weight average, whose warm-up is longer than 20 steps, and a limit of gradients that
Adam scales anyway."""


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "change"), CHANGES)
def test_golden_curve_notices_a_change_of_one_percent(recipe: str, change: str, tmp_path: Path) -> None:
    assert problems(config_named(recipe), tmp_path, change)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in CONFIGS if "vitl" not in path.stem], ids=lambda path: path.stem)
def test_recipe_trains_with_its_own_network(path: Path, tmp_path: Path) -> None:
    """In its own precision; without a ViT-L, whose steps take a minute on a CPU."""
    assert train(prepare(path, tmp_path, "train.epochs=1", "eval.every_epochs=1"), tmp_path / "run") == 0
    steps = events(tmp_path / "run", "step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in steps)
    assert not alerts(tmp_path / "run")


FITS = [
    (path, *line)
    for path in CONFIGS
    for line in re.findall(r"^# Fits:\s+(\d+) MiB of (\d+) GiB: segapp (plan .*)$", path.read_text(), re.MULTILINE)
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("path", "peak_mib", "gib", "command"), FITS, ids=lambda value: Path(str(value)).stem)
def test_recipe_fits_the_card_that_its_header_names(
    path: Path, peak_mib: str, gib: str, command: str, tmp_path: Path
) -> None:
    done = segapp(*command.split(), "--json", cwd=tmp_path, timeout_s=1100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["best"]
    assert found["peak_mib"][0] == pytest.approx(float(peak_mib), rel=0.01)
    assert found["fits"]
    assert f"--config {path.name} --gpus {gib}GiB" in command
