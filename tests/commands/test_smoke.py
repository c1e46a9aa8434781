"""`segapp train --smoke`: its estimates against a whole run; it leaves no files."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.commands.smoke import Measured, estimate_full_run, measure, report_lines
from segapp.config import dump_config, validate_config
from tests.support.runs import events, merged, segapp, train

MEASURED = Measured(
    step_s=0.5,
    slowest_step_s=1.0,
    data_wait_frac=0.1,
    eval_image_s=0.2,
    copy_s=0.25,
    save_s=1.0,
    checkpoint_bytes=1000,
    step_bytes=340,
    samples_bytes=5000,
    peak_mib={"cuda:0": 900.0, "cuda:1": 812.0},
    resumed_step=4,
)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its time and content."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_smoke_predicts_a_run_and_changes_no_file(tiny: dict[str, Any], tmp_path: Path) -> None:
    config = merged(tiny, train={"epochs": 2}, log={"tensorboard": True, "every_steps": 1}, name="tiny")
    (tmp_path / "tiny.yaml").write_text(dump_config(config))
    assert train(config, tmp_path / "runs" / "tiny") == 0
    before = snapshot(tmp_path)
    result = segapp("train", "--config", "tiny.yaml", "--smoke", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    alerts = re.findall(r"alert: (\S+)", result.stderr)
    assert alerts == ["schedule.warmup_steps"]  # of the config; its second training is longer than its first
    assert snapshot(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "tiny.yaml"]

    report = json.loads(result.stdout)
    measured, full = report["measured"], report["full_run"]
    run = tmp_path / "runs" / "tiny"
    vals = events(run, "val")
    assert full["steps"] == events(run, "step")[-1]["step"] == 10
    assert (full["evaluations"], full["saves"]) == (len(vals), len(events(run, "checkpoint")))
    assert (full["num_train"], full["num_val"]) == (10, vals[0]["num_images"])
    assert full["total_s"] == pytest.approx(full["train_s"] + full["eval_s"] + full["save_s"])
    assert full["train_s"] == pytest.approx(10 * measured["step_s"])
    assert measured["resumed_step"] == 4
    size = max(path.stat().st_size for path in (run / "checkpoints").glob("*.pt"))
    assert measured["checkpoint_bytes"] == pytest.approx(size, rel=0.1)
    assert 200 < full["peak_mib"]["cpu"] < 8000
    files = (path for kind in ("tensorboard", "samples") for path in (run / kind).rglob("*"))
    records = sum(path.stat().st_size for path in [run / "events.jsonl", *files])
    assert records / 4 < full["records_bytes"] < 4 * records


STEPS_S = (9.0, 0.6, 2.0, 8.0, 0.5, 0.7, 0.4)
"""The first steps of both trainings, 1 and 4, warm up, and the median is of the second one."""


def test_disk_of_evaluations_and_steps_is_measured_apart(tmp_path: Path) -> None:
    """The first batch is drawn once, and curves belong to the steps."""
    lines = [
        {"type": "run_start"},
        {"type": "run_start", "resumed_from_step": 3},
        *({"type": "step", "step": i, "step_s": s, "data_wait_frac": None} for i, s in enumerate(STEPS_S, start=1)),
        *({"type": "val", "val_s": val_s, "num_images": 4} for val_s in (3.0, 2.0, 5.0)),
        *({"type": "checkpoint", "size_bytes": 10 + s, "copy_s": s, "save_s": 7 - s} for s in (2, 4, 1)),
    ]
    text = "".join(json.dumps({"v": 1, "seq": i, "t": 1.0, **line}) + "\n" for i, line in enumerate(lines, start=1))
    sizes = {"samples/first_batch.png": 900, "samples/epoch_0001_0.png": 30, "samples/epoch_0002_0.png": 60}
    for name, size in {**sizes, "tensorboard/curves": 40, "tensorboard/val/curves": 30}.items():
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    (tmp_path / "run" / "events.jsonl").write_text(text)
    found = measure(tmp_path, [torch.device("cpu"), torch.device("cpu:0")])
    assert [*found.peak_mib] == ["cpu", "cpu:0"]
    assert (found.step_s, found.slowest_step_s) == (0.5, 2.0)
    assert (found.samples_bytes, found.step_bytes) == (30, (len(text) + 70) / 7)
    assert (found.eval_image_s, found.checkpoint_bytes, found.copy_s, found.save_s) == (0.5, 14, 4, 6)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--smoke", "data.root=nowhere"), 3, "data root nowhere does not exist"),
        (("--smoke", "--resume"), 2, "--smoke tries a new training"),
        (("--smoke", "parallel.mode=ddp", "parallel.devices=[cpu,cpu]"), 2, "--smoke runs in one process"),
        (("--smoke", "model.weights=gone.pt"), 4, "no file gone.pt"),
        (("--smoke", "--run", "there/deep/run", "data.crop_px=[400,400]"), 2, "of every crop is padding"),
        (("--json",), 2, "--json belongs to --smoke"),
    ],
)
def test_smoke_of_failing_config_fails_alike_and_leaves_no_file(
    words: tuple[str, ...], code: int, message: str, tiny: dict[str, Any], command: Any
) -> None:
    Path("tiny.yaml").write_text(dump_config(validate_config(tiny)))
    found, _, said = command("train", "--config", "tiny.yaml", *words)
    assert (found, message in said) == (code, True), said
    assert [path.name for path in Path().iterdir()] == ["tiny.yaml"]


def test_smoke_totals_of_a_whole_run_by_hand(tiny: dict[str, Any]) -> None:
    config = merged(
        tiny,
        train={"epochs": 10, "batch_size": 2, "accumulate": 2},
        eval={"every_epochs": 4},
        checkpoint={"every_epochs": 5, "every_steps": 20, "keep": 1},
        log={"every_steps": 10, "tensorboard": True},
    )
    found = estimate_full_run(config, 2, MEASURED, num_train=21, num_val=6, free_bytes=100)
    assert found["steps"] == 10 * 5  # 10 full batches of 2, two of them a step
    assert found["evaluations"] == 3  # epochs 4, 8 and 10
    assert found["saves"] == 1 + 3  # of four that are due: the first, the last, and 5 % of 28.6 s hold one of 1.25 s
    assert (found["train_s"], found["eval_s"], found["save_s"]) == (25.0, pytest.approx(3.6), 1.0)
    slower = dataclasses.replace(MEASURED, step_s=2 * MEASURED.step_s)
    of_slower = estimate_full_run(config, 2, slower, num_train=21, num_val=6, free_bytes=100)
    assert of_slower["saves"] == 1 + 2 + 2  # before the first evaluation, every 5 epochs and every 20 steps
    by_minutes = merged(config.model_dump(mode="json"), checkpoint={"every_minutes": 0.07})
    free = dataclasses.replace(MEASURED, copy_s=0.0, save_s=0.0)
    assert estimate_full_run(by_minutes, 2, free, num_train=21, num_val=6, free_bytes=100)["saves"] == 7  # of 28.6 s
    assert found["checkpoints_bytes"] == 4000  # two epochs, the best one, and the one being written
    assert found["records_bytes"] == (5 + 10) * 340 + 3 * 5000
    lines = report_lines(config, MEASURED, found)
    assert "50 steps, 3 evaluations of 6 images" in lines[2]
    assert lines[4].startswith("  memory  cuda:0 900 MiB, cuda:1 812 MiB at most; data.cache = auto may add")
    too_small = "  the disk is too small: lower checkpoint.keep, or choose another folder with --run"
    assert (len(lines), lines[-1]) == (7, too_small)
    *_, slowest, last = report_lines(config, dataclasses.replace(MEASURED, slowest_step_s=1.5), found)
    assert slowest.startswith("  the slowest step took 1.500 s: ")
    assert slowest.endswith("the steps take up to 1m15s")
    assert last == too_small
