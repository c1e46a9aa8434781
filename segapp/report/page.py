"""`segapp report`: one run as one HTML file that needs nothing else, neither a network nor a script."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from segapp.build.data import build_dataset
from segapp.build.trained import load_trained
from segapp.errors import SegappError, StorageError
from segapp.inference.progress_bar import progress_bar
from segapp.report import charts
from segapp.report.charts import Frame, Line
from segapp.report.pictures import Judgement, judge
from segapp.report.run_report import RunReport, read_story
from segapp.run.files import write_atomic
from segapp.run.text import printable
from segapp.tui.state import wording
from segapp.tui.state.history import SMOOTHINGS

MAX_PICTURED_CLASSES = 60


@dataclass(frozen=True)
class ClassRow:
    """One line of the class table; None where it is not known."""

    name: str
    iou: float | None
    change: float | None
    """Since the evaluation before."""
    accuracy: float | None
    precision: float | None
    frequency: float | None


def write_report(
    run: str, out: Path | None = None, *, split: str = "val", num_worst: int = 8, has_pictures: bool = True
) -> Path:
    """Writes a run's report and says where.

    Args:
        run: name or folder.
        out: the file; `report.html` in the run folder when None.
        split: of the data, for the confusion matrix and the pictures.
        num_worst: images shown, the worst first.
        has_pictures: False leaves out what needs the model and the data.

    Returns:
        The file.

    Raises:
        ConfigError: there is no such run.
        RunError: it has not begun.
        StorageError: the file cannot be written.
    """
    story = read_story(run)
    judgement, why_not = None, "left out, as --no-images asks"
    if has_pictures:
        try:
            judgement = _judge(story, split, num_worst)
        except SegappError as error:
            why_not = str(error)
            print(f"note: no pictures and no confusion matrix: {printable(why_not)}", file=sys.stderr)
    page = render("report.html.j2", report_parts(story, judgement, why_not))
    out = out or story.folder.path / "report.html"
    save_page(out, page)
    return out


def save_page(out: Path, page: str) -> None:
    """Writes a page.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        write_atomic(out, page)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}: choose another --out") from None


def _judge(story: RunReport, split: str, num_worst: int) -> Judgement:
    trained = load_trained(str(story.folder.path))
    dataset = build_dataset(trained.config.data, trained.scheme, split, is_training=False, seed=trained.config.seed)
    with progress_bar(len(dataset), "looking at images") as progress:
        return judge(trained, dataset, split, num_worst, progress)


def render(template: str, values: dict[str, Any]) -> str:
    """A page from a template; every value is escaped and made printable unless it is markup."""
    environment = Environment(
        loader=PackageLoader("segapp.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
    )  # fmt: skip
    environment.filters.update(
        number=lambda value: wording.number(value, 4),
        percent=lambda value: "-" if value is None else f"{100 * value:.1f} %",
        gib=wording.gib,
        duration=wording.duration,
        split=wording.dots,
        share=wording.share_word,
        clock=lambda t: time.strftime("%Y-%m-%d %H:%M", time.localtime(t)),
    )
    return environment.get_template(template).render(**values)


def report_parts(story: RunReport, judgement: Judgement | None, why_not: str) -> dict[str, Any]:
    """What the template asks for."""
    view = story.view
    assert view.start is not None
    names = list(view.start.classes)
    return {
        "story": story,
        "view": view,
        "start": view.start,
        "last": view.vals[-1] if view.vals else None,
        "loss": loss_chart([story]),
        "miou": _miou_chart(story),
        "lr": _small_chart("learning rate", story.lr.points, "learning rate"),
        "rate": _small_chart("images/s", story.rate.points, "images a second"),
        "terms": [(name, _term_chart(name, curve.points)) for name, curve in story.terms.items()],
        "classes": class_rows(story, judgement),
        "judgement": judgement,
        "why_not": why_not,
        "confusion": _confusion(judgement, names),
        "top": top_confusions(judgement.matrix, names) if judgement else [],
        "memory": _memory_rows(story),
        "made_s": time.time(),
        "printable": printable,
    }


def loss_chart(stories: Sequence[RunReport]) -> Markup:
    """Training loss as a smoothed curve, one run also as a band of raw values with its evaluations and marks."""
    lines, marks = [], []
    is_alone = len(stories) == 1
    for color, story in enumerate(stories):
        history, vals = story.view.history, [val for val in story.view.vals if val.loss is not None]
        if history.size:
            factor = SMOOTHINGS[0] if history.num_steps < 200 else SMOOTHINGS[1]
            band = (np.array(history.low), np.array(history.high)) if is_alone else None
            label = f"training loss (mean over about {round(1 / (1 - factor))} lines)" if is_alone else story.name
            lines.append(Line(label, history.step, history.average(factor), color % charts.NUM_COLORS, band=band))
        if is_alone and vals:
            lines.append(Line("validation loss", [v.step for v in vals], [v.loss or 0.0 for v in vals], 1, True))
        if is_alone:
            marks = [(mark.step, mark.text) for mark in story.view.marks if mark.kind != "best"]
            marks += [(mark.step, mark.text) for mark in story.view.marks if mark.kind == "best"][-1:]
    values = np.concatenate([np.asarray(line.y, float) for line in lines]) if lines else np.empty(0)
    values = values[np.isfinite(values)]
    is_log = bool(len(values)) and values.min() > 0 and values.max() > 20 * values.min()
    return charts.line_chart(lines, Frame("step", "loss", is_log, marks))


def miou_lines(stories: Sequence[RunReport]) -> list[Line]:
    """The mIoU of every evaluation of every run."""
    return [
        Line(
            story.name if len(stories) > 1 else "mIoU",
            [val.step for val in story.view.vals],
            [np.nan if val.miou is None else val.miou for val in story.view.vals],
            color % charts.NUM_COLORS,
            True,
        )
        for color, story in enumerate(stories)
        if story.view.vals
    ]


def _miou_chart(story: RunReport) -> Markup:
    vals = story.view.vals
    accuracy = [np.nan if val.pixel_accuracy is None else val.pixel_accuracy for val in vals]
    lines = [*miou_lines([story]), Line("pixel accuracy", [val.step for val in vals], accuracy, 2, True)]
    return charts.line_chart(
        lines if vals else [], Frame("step", "share", bottom=0.0, top=1.0, width_px=charts.HALF_PX)
    )


def _term_chart(name: str, points: list[tuple[int, float]]) -> Markup:
    line = Line(name, [step for step, _ in points], [value for _, value in points], 3)
    return charts.line_chart([line], Frame("step", name.replace("_", " "), width_px=charts.HALF_PX))


def _small_chart(label: str, points: list[tuple[int, float]], y_label: str) -> Markup:
    line = Line(label, [step for step, _ in points], [value for _, value in points], 3)
    return charts.line_chart([line] if points else [], Frame("step", y_label, bottom=0.0, width_px=charts.HALF_PX))


def class_rows(story: RunReport, judgement: Judgement | None) -> list[ClassRow]:
    """The classes, worst first, absent ones last; judged as the model is now, else as it was evaluated last."""
    view = story.view
    names = list(view.start.classes) if view.start else []
    last = list(view.vals[-1].iou) if view.vals else []
    before = list(view.vals[-2].iou) if len(view.vals) > 1 else []
    rows = []
    for i, name in enumerate(names):
        iou = last[i] if i < len(last) else None
        earlier = before[i] if i < len(before) else None
        change = None if iou is None or earlier is None else iou - earlier
        accuracy = precision = frequency = None
        if judgement is not None:
            iou, accuracy = judgement.scores.iou[i], judgement.scores.accuracy[i]
            frequency = judgement.scores.frequency[i]
            predicted = int(judgement.matrix[:, i].sum())
            precision = int(judgement.matrix[i, i]) / predicted if predicted else None
        rows.append(ClassRow(name, iou, change, accuracy, precision, frequency))
    return sorted(rows, key=lambda row: (row.iou is None, row.iou or 0.0))


def _confusion(judgement: Judgement | None, names: list[str]) -> Markup | None:
    """The matrix of the classes that occur, unless they are too many for a picture."""
    if judgement is None:
        return None
    occurs = np.flatnonzero(judgement.matrix.sum(0) + judgement.matrix.sum(1))
    if not 0 < len(occurs) <= MAX_PICTURED_CLASSES:
        return None
    return charts.confusion_picture(judgement.matrix[np.ix_(occurs, occurs)], [names[i] for i in occurs])


def top_confusions(matrix: np.ndarray[Any, np.dtype[np.int64]], names: Sequence[str], count: int = 12) -> list[Any]:
    """The largest shares of a class's pixels that went to another class: (target, prediction, share)."""
    totals = matrix.sum(1, keepdims=True)
    shares = np.divide(matrix, totals, out=np.zeros(matrix.shape), where=totals > 0)
    np.fill_diagonal(shares, 0.0)
    order = np.argsort(shares, axis=None)[::-1][:count]
    pairs = [divmod(int(at), len(names)) for at in order]
    return [(names[a], names[b], float(shares[a, b])) for a, b in pairs if shares[a, b] > 0]


def _memory_rows(story: RunReport) -> list[dict[str, Any]]:
    """Each device's peak under each split, with its total."""
    start = story.view.start
    assert start is not None
    rows = []
    for split, peaks in sorted(story.peaks_mib.items()):
        for i, peak in enumerate(peaks):
            device = start.devices[i] if i < len(start.devices) else None
            total = device.total_mib if device else None
            if total is None and i < len(story.view.devices):
                total = story.view.devices[i].total_mib
            rows.append(
                {
                    "split": split,
                    "is_first": i == 0,
                    "num": len(peaks),
                    "device": (device.device if device else f"device {i}"),
                    "name": (device.name or "" if device else ""),
                    "samples": split[i] if i < len(split) else None,
                    "peak_mib": peak,
                    "total_mib": total,
                    "frac": min(1.0, peak / total) if peak and total else None,
                }
            )
    return rows
