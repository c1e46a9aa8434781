"""Every shipped config trains on synthetic data in its layout, and its small form keeps the curve stored for it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.golden_runs import CONFIGS, CURVES, NUM_STEPS, curve_of, prepare, stored_curve, train_recipe
from tests.support.runs import alerts, events, segapp, train

VAL_TOLERANCES = {"loss": 1e-6, "miou": 2e-3, "pixel_accuracy": 2e-3}
"""Relative and absolute. Weight averages are float32, and a tie of two classes may turn a pixel over."""


def tolerance(step: int) -> float:
    """Return the relative tolerance of a step's loss, 1e-8 to 1.5e-6; the gradients' norm has ten times as much.

    Measured against AVX-512: with SSE4 (torch, MKL and OpenCV) 2e-15 in the first three steps, and up to 9e-11 in the
    others; 2e-10 with distillation, whose teacher is a float32 average. torch 2.11 against 2.15: 6e-15.
    """
    return 1e-8 * 1.3 ** (step - 1)


def differences(curve: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    """Return a line for each value of a curve that is not the stored one: step, both values."""
    found = []
    for new, old in zip(curve["steps"], stored["steps"], strict=True):
        limits = {"lr": 1e-12, "loss": tolerance(old["step"]), "grad_norm": 10 * tolerance(old["step"])}
        for field, limit in limits.items():
            if not math.isclose(new[field], old[field], rel_tol=limit):
                found.append(f"step {old['step']}: {field} is {new[field]!r}, stored is {old[field]!r}")
    for field, limit in VAL_TOLERANCES.items():
        new, old = curve["val"][field], stored["val"][field]
        if not math.isclose(new, old, rel_tol=limit, abs_tol=limit):
            found.append(f"evaluation: {field} is {new!r}, stored is {old!r}")
    return found


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
    found = differences(curve_of(run), stored_curve(path.stem))
    assert not found, f"{found}; if the change is meant: python -m tests.support.golden_runs --write {path.stem}"
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
