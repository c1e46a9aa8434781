"""`segapp compare`: several runs, or those of a sweep, side by side, in the terminal and as an HTML page."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from rich.console import Console
from rich.table import Table
from rich.text import Text

from segapp.errors import ConfigError
from segapp.report import charts
from segapp.report.charts import ChartCurve, Frame
from segapp.report.page import loss_chart, miou_curves
from segapp.report.render import render, save_page
from segapp.report.run_report import RunReport, RunRow, differing_settings, read_run_report, run_row
from segapp.report.sweep_results import SweepResults, read_results, shown_settings, shown_value
from segapp.run import words
from segapp.run.sweep import SweepFolder
from segapp.run.words import printable
from segapp.scores import OTHER_HEADLINES, best_shown, loss_text, with_count
from segapp.view.plot import Floats


def compare_runs(runs: Sequence[str], out: Path | None = None) -> dict[str, Any]:
    """Compare runs, and write a page if requested; return plain values.

    They are `runs`, `differences` (config key -> value of each run), and `common_classes`: the classes that have an IoU
    in every run's best evaluation, with `common_miou`, the mean over them of each run.

    Raises:
        ConfigError: fewer than two runs, or a run does not exist.
        RunError: a run has no events yet.
        StorageError: the page cannot be written.
    """
    if len(runs) < 2:
        raise ConfigError(f"compare needs at least two runs, and got {len(runs)}: segapp compare RUN RUN")
    reports = [read_run_report(run) for run in runs]
    rows = [run_row(report) for report in reports]
    differences = differing_settings([report.config for report in reports])
    differences.pop("name", None)
    classes = list(dict.fromkeys(name for row in rows for name in row.iou))
    common = common_classes(rows)
    if out is not None:
        values = {
            "rows": rows,
            "differences": differences,
            "classes": classes,
            "best": {name: best_shown(row.iou.get(name) for row in rows) for name in classes},
            "note": note_of_means(rows, common),
            "loss": loss_chart(reports),
            "miou": charts.line_chart(miou_curves(reports), Frame("step", "mIoU", bottom=0.0, top=1.0)),
            "colors": charts.NUM_COLORS,
            "results": None,
            "headlines": OTHER_HEADLINES,
            "made_s": time.time(),
        }
        save_page(out, render("compare.html.j2", values))
    return {
        "runs": [asdict(row) for row in rows],
        "differences": differences,
        "common_classes": list(common),
        "common_miou": [_mean_over(row, common) for row in rows],
        "note": note_of_means(rows, common),
    }


def write_sweep_page(sweep: SweepFolder, results: SweepResults | None = None) -> Path:
    """Write the page of a sweep into its folder, and return its path: its runs with columns of their settings.

    Raises:
        ConfigError: the folder holds no sweep.
        StorageError: the page cannot be written.
    """
    results = results or read_results(sweep)
    best = results.settings[: charts.NUM_COLORS]
    finished = {run.name for run in results.runs if run.state == "finished"} & results.reports.keys()
    reports = [[results.reports[name] for name in row.runs if name in finished] for row in best]
    labels = [shown_settings(row.settings) for row in best]
    values = {
        "rows": results.runs,
        "results": results,
        "headlines": OTHER_HEADLINES,
        "num_curves": len(best),
        "miou": _chart(labels, reports, _miou_points, Frame("step", "mIoU", bottom=0.0, top=1.0)),
        "loss": _chart(labels, reports, _loss_points, Frame("step", "loss")),
        "value": shown_value,
        "made_s": time.time(),
    }
    save_page(sweep.page, render("compare.html.j2", values))
    return sweep.page


def common_classes(rows: Sequence[RunRow]) -> tuple[str, ...]:
    """Return the classes that have an IoU in the best evaluation of every evaluated run."""
    evaluated = [row for row in rows if row.num_scored]
    first = evaluated[0].iou if evaluated else {}
    return tuple(name for name in first if all(row.iou.get(name) is not None for row in evaluated))


def note_of_means(rows: Sequence[RunRow], common: Sequence[str]) -> str | None:
    """Return a sentence if the mIoU of the runs are means over different classes; None if they can be compared."""
    scored = [{name for name, iou in row.iou.items() if iou is not None} for row in rows if row.num_scored]
    if all(names == set(common) for names in scored):
        return None
    own = ", ".join(f"{row.name} {row.num_scored}" for row in rows if row.num_scored)
    if not common:
        return f"The mIoU are means over different classes ({own}), and no class is common to all."
    means = ", ".join(f"{row.name} {_percent(_mean_over(row, common))}" for row in rows if row.num_scored)
    which = "the class" if len(common) == 1 else f"the {len(common)} classes"
    return f"The mIoU are means over different classes ({own}). Over {which} that all have: {means}."


def _mean_over(row: RunRow, classes: Sequence[str]) -> float | None:
    values = [iou for name in classes if (iou := row.iou.get(name)) is not None]
    return sum(values) / len(values) if values else None


def print_comparison(found: Mapping[str, Any]) -> None:
    """Print the result of `compare_runs` as two tables."""
    console = Console(highlight=False)
    runs = found["runs"]
    lines = {
        "state": [row["state"] for row in runs],
        "best mIoU": [with_count(_percent(row["best_miou"]), row["num_scored"], len(row["iou"])) for row in runs],
        **{score.title: [_percent(row["scores"].get(score.name)) for row in runs] for score in OTHER_HEADLINES},
        "at epoch": [f"{row['best_epoch'] or '-'} of {row['epochs']}" for row in runs],
        "loss of the last epoch": [loss_text(row["last_loss"], is_known=row["steps"] > 0) for row in runs],
        "validation loss": [loss_text(row["last_val_loss"], is_known=row["num_evaluations"] > 0) for row in runs],
        "steps": [str(row["steps"]) for row in runs],
        "images/s": [words.number(row["images_per_s"]) for row in runs],
        "time": [words.duration(row["duration_s"]) for row in runs],
        "parameters": [f"{row['num_params']:,}" for row in runs],
        "peak GiB": [words.gib(row["peak_mib"]) for row in runs],
    }
    console.print(_table("", [row["name"] for row in runs], lines))
    if found.get("note"):
        console.print(Text(printable(found["note"])))
    if found["differences"]:
        console.print()
        console.print(_table("differences", [row["name"] for row in runs], found["differences"]))


def _table(heading: str, names: Sequence[str], lines: Mapping[str, Sequence[Any]]) -> Table:
    """Return a table with a row per key and a column per run."""
    table = Table(box=None, pad_edge=False)
    table.add_column(heading, overflow="fold")
    for name in names:
        table.add_column(Text(printable(name)), overflow="fold")
    for key, values in lines.items():
        table.add_row(*(Text(printable(str(cell))) for cell in [key, *values]))
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _chart(
    labels: Sequence[str],
    reports: Sequence[Sequence[RunReport]],
    points: Callable[[RunReport], tuple[Floats, Floats]],
    frame: Frame,
) -> Markup:
    curves = []
    for color, (label, group) in enumerate(zip(labels, reports, strict=True)):
        found = mean_curve([points(report) for report in group])
        if found is not None:
            x, mean, low, high = found
            curves.append(ChartCurve(label, x, mean, color, band=(low, high) if len(group) > 1 else None))
    return charts.line_chart(curves, frame)


def mean_curve(curves: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats, Floats, Floats] | None:
    """Return x, mean, lowest and highest of curves (x, y), interpolated between their points that are finite.

    The result lies where all curves have values; None if they have no x in common.
    """
    known = [(x[np.isfinite(y)], y[np.isfinite(y)]) for x, y in curves]
    known = [(x, y) for x, y in known if len(x)]
    if not known:
        return None
    first, last = max(x[0] for x, _ in known), min(x[-1] for x, _ in known)
    if first > last:
        return None
    own = np.unique(np.concatenate([x[(x >= first) & (x <= last)] for x, _ in known]))
    x = own if len(known) == 1 else np.union1d(own, np.linspace(first, last, charts.WIDTH_PX))
    values = np.stack([np.interp(x, *curve) for curve in known])
    return x, values.mean(0), values.min(0), values.max(0)


def _miou_points(report: RunReport) -> tuple[Floats, Floats]:
    return report.view.vals.values("step"), report.view.vals.values("miou")


def _loss_points(report: RunReport) -> tuple[Floats, Floats]:
    history = report.view.history
    return history.step, history.average(history.usual_smoothing)
