"""`segapp report`: one run as a single HTML file without scripts or external references, made from a template."""

from __future__ import annotations

import base64
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from segapp.config import RunConfig, load_config
from segapp.errors import ConfigError, RunError, SegappError, storage_errors, without_secrets
from segapp.report import charts
from segapp.report.charts import ChartCurve, Frame, confusion_figure, top_confusions
from segapp.run import words
from segapp.run.events import Alert
from segapp.run.files import read_of_run, write_atomic
from segapp.run.folder import FIRST_BATCH, RunFolder, find_run
from segapp.run.state import State, read_tail
from segapp.run.words import number, printable
from segapp.scores import (
    NOT_FINITE,
    OTHER_HEADLINES,
    SCORES,
    count_scored,
    dice_of,
    of_classes,
    scored_of,
    table_of,
    with_count,
)
from segapp.view import wording
from segapp.view.history import LossHistory
from segapp.view.plot import class_iou
from segapp.view.runs import run_state
from segapp.view.source import SeriesReader, fold_file
from segapp.view.view import PASSING_ALERTS, View

if TYPE_CHECKING:
    from segapp.report.images import SplitEvaluation


MAX_PICTURED_CLASSES = 60


def render(template: str, values: dict[str, Any]) -> str:
    """Return a page from a template; values other than markup are made printable and escaped."""
    environment = Environment(
        loader=PackageLoader("segapp.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
    )  # fmt: skip
    environment.filters.update(
        number=lambda value: words.number(value, 4),
        with_count=with_count,
        of_classes=lambda iou: of_classes(count_scored(iou), len(iou)),
        over=lambda iou, name: "" if (over := scored_of(name, iou)) is None else f", {of_classes(*over)}",
        loss=lambda value, is_known: NOT_FINITE if value is None and is_known else words.number(value, 4),
        percent=lambda value: "-" if value is None else f"{100 * value:.1f} %",
        gib=words.gib,
        duration=words.duration,
        plural=words.plural,
        split=words.dots,
        share=words.share_text,
        clock=lambda t: time.strftime("%Y-%m-%d %H:%M", time.localtime(t)),
    )
    return environment.get_template(template).render(**values)


def save_page(out: Path, page: str) -> None:
    with storage_errors(out):
        write_atomic(out, page)


@dataclass
class RunReport:
    """Contents of one run."""

    folder: RunFolder
    state: State
    view: View
    config: RunConfig | None = None
    """Config at the start of the run; None if the file cannot be read."""
    config_text: str = ""
    series: dict[str, LossHistory] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def terms(self) -> list[str]:
        """Names of the loss terms of the last step, at most 16."""
        step = self.view.step
        return [name for name in (step.terms or {} if step else {}) if f"terms.{name}" in self.series]

    @property
    def alerts(self) -> list[tuple[Alert, int]]:
        """The last new message of each kind and reason, with the number of other messages; every start repeats some."""
        found: dict[tuple[str, str | None], dict[str, Alert]] = {}
        for alert in self.view.last_alerts:
            if alert.kind not in PASSING_ALERTS:
                found.setdefault((alert.kind, alert.reason), {})[alert.message] = alert
        return [(list(messages.values())[-1], len(messages) - 1) for messages in found.values()]

    @property
    def duration_s(self) -> float | None:
        """Time from the first start to the last event, including the time between a stop and a resume."""
        if self.view.first_start_s is None or self.view.last_s is None:
            return None
        return self.view.last_s - self.view.first_start_s


def read_run_report(run: str | Path, fields: Sequence[str] = ()) -> RunReport:
    """Read the events of a run once, into a view with the whole loss curve and series of other fields, and its config.

    With fields, there are series of the first 16 loss terms of the last step, too.

    Raises:
        ConfigError: there is no such run.
        RunError: the run has no events yet.
    """
    folder = find_run(run)
    report = RunReport(folder, run_state(folder.path), View())
    steps = [raw for raw in read_tail(folder.events) if raw["type"] == "step"] if fields else []
    terms = [f"terms.{name}" for name in steps[-1].get("terms") or ()][:16] if steps else []
    series = {name: SeriesReader(folder.events, name) for name in (*fields, *terms)}
    fold_file(report.view, folder.events, list(series.values()))
    report.series = {name: each.history for name, each in series.items()}
    if report.view.start is None:
        raise without_events(folder)
    with contextlib.suppress(OSError, ConfigError):  # the config is optional in a report
        report.config_text = without_secrets(read_of_run(folder.config_yaml).decode(errors="backslashreplace"))
        report.config = load_config(folder.config_yaml)
    return report


def without_events(folder: RunFolder) -> RunError:
    return RunError(f"{folder.path} has no events yet: train it first")


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
        "recomputed": "" if report.view.recomputed is None else wording.recomputed(report.view.recomputed),
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
            # Nearly every evaluation at the beginning is the best so far.
            marks += [(mark.step, mark.text) for mark in report.view.marks if mark.kind == "best"][-1:]
    values = np.concatenate([np.empty(0), *(curve.y for curve in curves)])
    values = values[np.isfinite(values)]
    # On a linear axis, the end of a loss that falls further would be a flat line.
    is_log = bool(len(values)) and values.min() > 0 and values.max() > 20 * values.min()
    return charts.line_chart(curves, Frame("step", "loss", is_log, marks))


def miou_curves(reports: Sequence[RunReport]) -> list[ChartCurve]:
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
    # A class without an IoU is absent, and must not sort as the worst.
    return sorted(rows, key=lambda row: (row.iou is None, row.iou or 0.0))


def _of_class(val: object, field: str, number: int) -> float | None:
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
            # A total that is unknown at the start comes with the events of the memory.
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
