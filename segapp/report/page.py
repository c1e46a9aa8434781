"""`segapp report`: one run as a single HTML file."""

from __future__ import annotations

import base64
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from segapp.errors import SegappError
from segapp.report import charts
from segapp.report.charts import ChartCurve, Frame
from segapp.report.confusion import confusion_figure, top_confusions
from segapp.report.render import render, save_page
from segapp.report.run_report import RunReport, read_run_report
from segapp.run.files import read_of_run
from segapp.run.folder import FIRST_BATCH
from segapp.run.words import number, printable
from segapp.scores import OTHER_HEADLINES, SCORES, dice_of, table_of
from segapp.view import wording
from segapp.view.history import LossHistory
from segapp.view.plot import class_iou

if TYPE_CHECKING:
    from segapp.report.images import SplitEvaluation

MAX_PICTURED_CLASSES = 60


@dataclass(frozen=True)
class ReportedClass:
    """A row of the class table; None if a value is not known."""

    name: str
    iou: float | None
    change: float | None
    """Change of the IoU since the previous evaluation."""
    dice: float | None
    recall: float | None
    precision: float | None
    frequency: float | None
    color: tuple[int, int, int] | None = None


def write_report(
    run: str, out: Path | None = None, *, split: str | None = None, num_worst: int = 8, has_pictures: bool = True
) -> Path:
    """Write the report of a run, by default `report.html` in the run folder, and return its path.

    Args:
        run: name or folder.
        out: path of the HTML file, which is replaced.
        split: data split for the confusion matrix and the images; None: the run's own validation split.
        num_worst: number of images shown with the lowest mIoU.
        has_pictures: False: leave out the parts that need the model and the data.

    Raises:
        ConfigError: there is no such run.
        RunError: the run has no events yet.
        StorageError: the file cannot be written.
    """
    report = read_run_report(run, ("lr", "images_per_s"))
    out = out or report.folder.path / "report.html"
    evaluation, why_not = None, "left out because of --no-images"
    if has_pictures:
        from segapp.report.images import evaluate_run

        try:
            evaluation = evaluate_run(report.folder, split, num_worst)
        except SegappError as error:
            why_not = str(error)
            print(f"note: no images and no confusion matrix: {printable(why_not)}", file=sys.stderr)
    values = template_values(report, evaluation, why_not)
    with contextlib.suppress(OSError):  # an older run has no picture
        if has_pictures:
            values["first_batch"] = base64.b64encode(read_of_run(report.folder.samples / FIRST_BATCH)).decode("ascii")
    save_page(out, render("report.html.j2", values))
    return out


def template_values(report: RunReport, evaluation: SplitEvaluation | None, why_not: str) -> dict[str, Any]:
    """Return the values for the template."""
    view = report.view
    assert view.start is not None
    names = list(view.start.classes)
    return {
        "report": report,
        "view": view,
        "start": view.start,
        "info": report.folder.read_info(),
        "last": view.vals.last,
        "loss": loss_chart([report]),
        "miou": _miou_chart(report),
        "lr": _small_chart("learning rate", report.series["lr"], "learning rate"),
        "rate": _small_chart("images/s", report.series["images_per_s"], "images per second"),
        "terms": [
            (name, _small_chart(name, report.series[f"terms.{name}"], name.replace("_", " "), bottom=None))
            for name in report.terms
        ],
        "classes": class_rows(report, evaluation),
        "evaluation": evaluation,
        "headlines": OTHER_HEADLINES,
        "scores": table_of(evaluation.scores, view.start.foreground) if evaluation else {},
        "titles": {name: score.title for name, score in SCORES.items() if name != "miou"},
        "why_not": why_not,
        "first_batch": None,
        "palette": list(zip(names, view.start.palette or (), strict=False)),
        "confusion": _confusion(evaluation, names),
        "top": top_confusions(evaluation.matrix, names, 12) if evaluation and evaluation.matrix is not None else [],
        "memory": _memory_rows(report),
        "topologies": [(each.step, wording.topology(each)) for each in report.view.topologies],
        "recomputed": "" if report.view.recompute is None else wording.recomputed(report.view.recompute),
        "made_s": time.time(),
        "printable": printable,
    }


def loss_chart(reports: Sequence[RunReport]) -> Markup:
    """Return a chart of smoothed training losses; for a single run, with raw values, evaluations and marks."""
    curves, marks = [], []
    is_alone = len(reports) == 1
    for color, report in enumerate(reports):
        history, vals = report.view.history, report.view.vals
        if history.size:
            factor = history.usual_smoothing
            band = (history.low, history.high) if is_alone else None
            smoothed = f"training loss (smoothed over about {round(1 / (1 - factor))} logged steps)"
            mean = f"mean of epoch {report.view.loss.epoch}: {wording.loss(report.view.loss.mean, 4)}"
            label = f"{smoothed if is_alone else report.name}, {mean}"
            smooth = history.average(factor)
            curves.append(ChartCurve(label, history.step, smooth, color % charts.NUM_COLORS, band=band))
        if is_alone and vals:
            losses = vals.values("loss")
            curves.append(ChartCurve("validation loss", vals.values("step"), losses, 1, True))
        if is_alone:
            marks = [(mark.step, mark.text) for mark in report.view.marks if mark.kind != "best"]
            marks += [(mark.step, mark.text) for mark in report.view.marks if mark.kind == "best"][-1:]
    values = np.concatenate([np.empty(0), *(curve.y for curve in curves)])
    values = values[np.isfinite(values)]
    is_log = bool(len(values)) and values.min() > 0 and values.max() > 20 * values.min()
    return charts.line_chart(curves, Frame("step", "loss", is_log, marks))


def miou_curves(reports: Sequence[RunReport]) -> list[ChartCurve]:
    """Return the mIoU over the steps of each run."""
    curves = []
    for color, report in enumerate(reports):
        vals = report.view.vals
        if vals:
            label = f"{report.name}, last {number(vals[-1].miou)}" if len(reports) > 1 else "mIoU"
            curves.append(ChartCurve(label, vals.values("step"), vals.values("miou"), color % charts.NUM_COLORS, True))
    return curves


def _miou_chart(report: RunReport) -> Markup:
    vals = report.view.vals
    curves = miou_curves([report])
    for color, score in enumerate(OTHER_HEADLINES, start=1):
        values = vals.values(score.name)
        if np.isfinite(values).any():
            curves.append(ChartCurve(score.title, vals.values("step"), values, color % charts.NUM_COLORS, True))
    return charts.line_chart(curves, Frame("step", "share", bottom=0.0, top=1.0, width_px=charts.HALF_PX))


def _small_chart(label: str, series: LossHistory, y_label: str, bottom: float | None = 0.0) -> Markup:
    frame = Frame("step", y_label, bottom=bottom, width_px=charts.HALF_PX)
    return charts.line_chart([ChartCurve(label, series.step, series.high)], frame)


def class_rows(report: RunReport, evaluation: SplitEvaluation | None) -> list[ReportedClass]:
    """Return a row per class, lowest IoU first, absent ones last; from the evaluation or the last `val` event."""
    view = report.view
    names = list(view.start.classes) if view.start else []
    newest = view.vals.last
    before = view.vals[-2] if len(view.vals) > 1 else None
    rows = []
    for i, name in enumerate(names):
        iou, earlier = class_iou(newest, i), class_iou(before, i)
        change = None if iou is None or earlier is None else iou - earlier
        recall, precision, frequency = _of_class(newest, "recall", i), _of_class(newest, "precision", i), None
        if evaluation is not None:
            scores = evaluation.scores
            iou, recall, precision = scores.iou[i], scores.recall[i], scores.precision[i]
            frequency = scores.frequency[i]
        color = view.start.palette[i] if view.start and view.start.palette and i < len(view.start.palette) else None
        rows.append(ReportedClass(name, iou, change, dice_of(iou), recall, precision, frequency, color))
    return sorted(rows, key=lambda row: (row.iou is None, row.iou or 0.0))


def _of_class(val: object, field: str, number: int) -> float | None:
    """Return a class's score in a `val` event; None if it has none."""
    values: Sequence[float | None] = getattr(val, field, None) or ()
    return values[number] if number < len(values) else None


def _confusion(evaluation: SplitEvaluation | None, names: list[str]) -> Markup | None:
    """Return the confusion matrix of the classes that occur; None if there are too many for a figure."""
    if evaluation is None or evaluation.matrix is None:
        return None
    occurs = np.flatnonzero(evaluation.matrix.sum(0) + evaluation.matrix.sum(1))
    if not 0 < len(occurs) <= MAX_PICTURED_CLASSES:
        return None
    return confusion_figure(evaluation.matrix[np.ix_(occurs, occurs)], [names[i] for i in occurs])


def _memory_rows(report: RunReport) -> list[dict[str, Any]]:
    """Return a row per device and split with the peak and the total memory, MiB."""
    start = report.view.start
    assert start is not None
    rows = []
    for split, peaks in sorted(report.view.peaks_mib.items()):
        for i, peak in enumerate(peaks):
            device = start.devices[i] if i < len(start.devices) else None
            total = device.total_mib if device else None
            if total is None and i < len(report.view.devices):
                total = report.view.devices[i].total_mib
            rows.append(
                {
                    "split": split,
                    "is_first": i == 0,
                    "device": " ".join(filter(None, (device.machine, device.device))) if device else f"device {i}",
                    "name": (device.name or "") if device else "",
                    "samples": split[i] if i < len(split) else None,
                    "peak_mib": peak,
                    "total_mib": total,
                    "frac": min(1.0, peak / total) if peak and total else None,
                }
            )
    return rows
