"""One run, asked by every viewer: the same training loss, and each mIoU with the number of its classes."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from segapp.commands.runs import print_runs, print_status
from segapp.report.compare import compare_runs, csv_of, print_comparison
from segapp.report.page import loss_chart, read_run_report, write_report
from segapp.run.events import EpochStart, EventReader, RunEnd, Step, Val
from segapp.view.view import EventFold, View
from tests.support.recorded_runs import RecordedRun

LOSSES = ((3.0, 2.5, 2.0), (1.5, None, 1.0))


def recorded(path: Path, iou: list[float | None], losses: Any = LOSSES, val_loss: float | None = 0.5) -> RecordedRun:
    run = RecordedRun(path, classes=["road", "sky", "pole"], steps_per_epoch=3, epochs=2, num_devices=1)
    step = 0
    for epoch, of_epoch in enumerate(losses, start=1):
        run.write(EpochStart(epoch=epoch, lr=0.1, step=step), 1.0)
        for loss in of_epoch:
            step += 1
            run.write(Step(epoch=epoch, step=step, loss=loss, lr=0.1), 1.0)
        known = [value for value in iou if value is not None]
        miou = sum(known) / len(known) if known else None
        run.write(Val(epoch=epoch, step=step, loss=val_loss, miou=miou, iou=iou), 1.0)
    run.write(RunEnd(status="finished", reason="done", exit_code=0), 1.0)
    run.writer.close()
    return run


def test_every_viewer_has_the_same_loss_and_counts_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path / "runs" / "a", [0.5, None, 0.1])
    name, wanted = str(run.folder.path), (1.5 + 1.0) / 2
    print_runs(tmp_path / "runs", as_json=True)
    (listed,) = json.loads(capsys.readouterr().out)
    print_status(name, as_json=True)
    status = json.loads(capsys.readouterr().out)
    found = compare_runs([name, name], tmp_path / "compare.html")
    screen, report = View(), read_run_report(name)
    EventFold(screen).add(EventReader(run.folder.events).read_skimmed())
    asked = {
        "ls": listed["loss"],
        "status": status["loss"],
        "compare": found["runs"][0]["last_loss"],
        "screen": screen.loss.mean,
        "report": report.view.loss.mean,
    }
    assert asked == dict.fromkeys(asked, wanted)
    # the texts too, each with a name for the number, and each mIoU with the number of its classes
    assert "mean of epoch 2: 1.250<" in loss_chart([report])
    write_report(name, tmp_path / "report.html", has_pictures=False)
    text = (tmp_path / "report.html").read_text()
    assert "<b>1.250</b><span>training loss, mean of epoch 2<" in text
    assert "best mIoU, epoch 1, 2 of 3 classes" in text
    assert "last mIoU, epoch 2, 2 of 3 classes" in text
    print_comparison(found)
    printed = re.sub(r"   +", "  ", capsys.readouterr().out)
    assert "loss of the last epoch  1.2500  1.2500" in printed
    assert "30.00 % (2/3)  30.00 % (2/3)" in printed
    assert "30.00 % (2/3)" in (tmp_path / "compare.html").read_text()


def test_loss_that_was_not_finite_is_told_from_an_absent_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = recorded(tmp_path / "bad", [0.5, None, 0.1], ((1.0,), (None, None)), val_loss=None)
    begun = RecordedRun(tmp_path / "begun", classes=["road"], num_devices=1)
    begun.writer.close()
    print_comparison(compare_runs([str(bad.folder.path), str(begun.folder.path)], tmp_path / "page.html"))
    lines = {re.sub(r"   +", "  ", line).strip() for line in capsys.readouterr().out.splitlines()}
    assert {"loss of the last epoch  not finite  -", "validation loss  not finite  -", "best mIoU  -  -"} <= lines
    assert (tmp_path / "page.html").read_text().count("not finite") == 2 + 1  # cells, and the legend of the chart
    write_report(str(bad.folder.path), tmp_path / "report.html", has_pictures=False)
    facts = re.findall(r"<div><b>([^<]*)</b><span>([^<]*)</span></div>", (tmp_path / "report.html").read_text())
    assert {("not finite", "training loss, mean of epoch 2"), ("not finite", "validation loss, epoch 2")} <= set(facts)
    assert ("-", "best mIoU") in facts


def test_means_over_different_classes_are_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, iou in (("one", [0.5, None, 0.1]), ("two", [0.4, 0.0, 0.2])):
        recorded(tmp_path / name, iou)
    print_comparison(compare_runs([str(tmp_path / "one"), str(tmp_path / "two")]))
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "The mIoU are means over different classes (one 2, two 3). "
        "Over the 2 classes that all have: one 30.00 %, two 30.00 %." in shown
    )


def test_csv_has_a_line_for_each_run(tmp_path: Path) -> None:
    one = recorded(tmp_path / "one", [0.5, None, 0.125])
    two = recorded(tmp_path / "two", [0.25, 0.75, 0.5])
    for run, optim in ((one, "{lr: 0.002}"), (two, "{lr: 0.014, nesterov: true}")):
        run.folder.config_yaml.write_text(f"optim: {optim}")
    found = compare_runs([str(two.folder.path), str(one.folder.path)], has_images=False)
    first, second = csv.DictReader(io.StringIO(csv_of(found)))
    assert [first["name"], second["name"]] == ["two", "one"]
    assert [float(row["best_miou"]) for row in (first, second)] == [0.5, 0.3125]
    assert [first["iou of sky"], second["iou of sky"], second["iou of pole"]] == ["0.75", "", "0.125"]
    assert [first["optim.lr"], second["optim.lr"]] == ["0.014", "0.002"]
    assert [first["optim.nesterov"], second["optim.nesterov"]] == ["True", ""]
    assert not any("[" in value or "{" in value for value in first.values())
