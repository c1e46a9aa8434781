"""Runs are ranked by the score that their `checkpoint.monitor` names, wherever runs are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from segapp.api import history
from segapp.commands.runs import print_runs, print_status
from segapp.commands.sweep import SweepRun, setting_lines
from segapp.report.compare import compare_runs, print_comparison
from segapp.report.page import write_report
from segapp.run.events import Device, EventWriter, RunEnd, RunStart, Step, Val
from segapp.run.folder import RunFolder
from segapp.scores import foreground_means
from segapp.tui.classes import classes_title
from segapp.tui.header import finished_line
from segapp.tui.runs_screen import columns_of, run_row
from segapp.view.runs import RunList, small_view
from segapp.view.source import fold_file

CLASSES = ["background", "crack: x", "joint"]
RUNS: dict[str, tuple[float, float, list[float | None]]] = {
    "ce": (0.70, 0.5, [0.99, 0.10, 0.60]),
    "dice": (0.65, 0.9, [0.90, 0.40, 0.50]),
    "focal": (0.60, 0.2, [0.85, None, 0.30]),
}
"""Name -> mIoU, loss and IoU of its best evaluation; every score puts the runs in another order."""


def written(path: Path, name: str, monitor: str | None) -> RunFolder:
    """A finished run with a worse evaluation before the best one and after it."""
    folder = RunFolder.create(path=path / name)
    folder.write_info()
    miou, loss, iou = RUNS[name]
    worse = [None if value is None else value / 2 for value in iou]
    with EventWriter(folder.events) as writer:
        facts: Any = {"num_params": 1, "batch_size": 1, "epochs": 5, "steps_per_epoch": 1}
        writer.write(RunStart(classes=CLASSES, devices=[Device(device="cpu")], monitor=monitor, **facts))
        for epoch, part in ((2, worse), (3, iou), (5, worse)):
            writer.write(Step(epoch=epoch, step=epoch, loss=1.0, lr=0.1))
            value = (miou, loss) if part is iou else (miou / 2, loss * 2)
            writer.write(
                Val(epoch=epoch, step=epoch, miou=value[0], loss=value[1], iou=part, scores=foreground_means(part))
            )
        writer.write(RunEnd(status="finished", reason="done", exit_code=0))
    return folder


@pytest.mark.parametrize(
    ("monitors", "order", "heading_", "cells"),
    [
        ([None] * 3, ["ce", "dice", "focal"], "BEST MIOU", ["0.7000 (3/3)", "0.6500 (3/3)", "0.6000 (2/3)"]),
        (["loss"] * 3, ["focal", "ce", "dice"], "BEST LOSS", ["0.2000", "0.5000", "0.9000"]),
        (["iou:crack: x"] * 3, ["dice", "ce", "focal"], "BEST IoU of crack: x", ["0.4000", "0.1000", "-"]),
        (["miou_foreground"] * 3, ["dice", "ce", "focal"], "BEST FOREGROUND MIOU",
         ["0.4500 (2/2)", "0.3500 (2/2)", "0.3000 (1/2)"]),
        (["loss", "miou", "loss"], ["ce", "dice", "focal"], "BEST MIOU",
         ["0.7000 (3/3)", "0.6500 (3/3)", "0.6000 (2/3)"]),
    ],
    ids=["miou", "loss", "class", "foreground", "mixed"],
)  # fmt: skip
def test_every_list_ranks_by_what_the_runs_monitor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monitors: list[Any], order: list[str], heading_: str, cells: Any
) -> None:
    folders = {name: written(tmp_path, name, each) for name, each in zip(RUNS, monitors, strict=True)}
    note = "The runs name different scores in checkpoint.monitor (loss, miou): mIoU ranks them."
    is_mixed = len(set(monitors)) > 1
    runs = [SweepRun(name, folder, {"loss.name": name}, None, []) for name, folder in folders.items()]  # type: ignore[arg-type]
    lines = setting_lines(runs)
    assert lines[0].endswith(heading_)
    ranked = [line.split() for line in lines[1:4]]
    assert [line[0] for line in ranked] == order
    assert [" ".join(line[4:]) for line in ranked] == cells
    assert lines[4:] == [note] * is_mixed

    followed = RunList(tmp_path)
    followed.look()
    while followed.poll():
        pass
    columns = columns_of(followed.runs)
    assert [run.name for run in followed.runs if "★" in run_row(run, 200, columns).plain] == order[:1]

    found = compare_runs([str(folders[name].path) for name in order], has_images=False)
    assert (found["note"] or "").startswith(note) == is_mixed
    print_comparison(found)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("best "))
    assert row.casefold().startswith(heading_.casefold())
    percent = [f"{100 * float(cell[:6]):.2f} %{cell[6:]}" if cell != "-" else "-" for cell in cells]
    assert row[len(heading_) :].split() == " ".join(cells if "LOSS" in heading_ else percent).split()


def test_best_of_one_run_is_named_in_every_view(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An earlier version did not write the means over the foreground; they follow from the classes."""
    folder, view = written(tmp_path, "ce", "dice:crack: x"), small_view()
    fold_file(view, folder.events)
    assert finished_line(view.best_words, "ce").startswith("best Dice of crack: x 0.182 at epoch 3 · ")
    assert "best Dice of crack: x 0.182 at epoch 3" in classes_title(view, "", 120).plain
    write_report(str(folder.path), tmp_path / "page.html", has_pictures=False)
    page = (tmp_path / "page.html").read_text()
    assert "<b>18.2 %</b><span>best Dice of crack: x, epoch 3<" in page
    print_runs(tmp_path, as_json=False)
    assert "0.1818 Dice of crack: x" in capsys.readouterr().out
    folder.write_config("model: {library: smp, weights: null, weights_backbone: null}\ntrain: {bn_momentum: 0.05}\n")
    print_status(str(folder.path), as_json=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"monitor dice:crack: x", "best_score 0.181818", "weights random", "bn_momentum 0.05"} <= {*lines}
    assert "miou_foreground 0.175 over 2 of 2 foreground classes" in lines
    print_runs(tmp_path, as_json=True)
    (facts,) = json.loads(capsys.readouterr().out)
    assert (facts["monitor"], facts["best_miou"], facts["best_epoch"]) == ("dice:crack: x", 0.7, 3)
    assert [row.miou_foreground for row in history(folder.path)] == pytest.approx([0.175, 0.35, 0.175])
