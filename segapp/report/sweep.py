"""`sweep.html`: the results of a sweep as a single HTML file, best setting first, with curves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup

from segapp.errors import RunError
from segapp.report import charts
from segapp.report.charts import Curve, Frame
from segapp.report.render import render, save_page
from segapp.report.run_report import RunReport, read_run_report
from segapp.report.sweep_results import SweepResults, read_results, shown_settings, shown_value
from segapp.run.sweep import SweepFolder
from segapp.view.history import SMOOTHINGS
from segapp.view.plot import Floats

_NUM_POINTS = 1000
"""Points of a mean curve; about one for each pixel of its width."""


def write_sweep_page(sweep: SweepFolder, results: SweepResults | None = None) -> Path:
    """Write `sweep.html` into the folder of a sweep and return its path.

    Args:
        sweep: the sweep.
        results: as just read; None: read here.

    Raises:
        ConfigError: the folder holds no sweep.
        StorageError: the page cannot be written.
    """
    results = results or read_results(sweep)
    best = results.settings[: charts.NUM_COLORS]
    reports = [_reports(sweep, [run for run in row.runs if _is_finished(results, run)]) for row in best]
    labels = [shown_settings(row.settings) for row in best]
    page = render(
        "sweep.html.j2",
        {
            "results": results,
            "num_finished": sum(run.state == "finished" for run in results.runs),
            "num_curves": len(best),
            "miou": _chart(labels, reports, _miou_points, Frame("step", "mIoU", bottom=0.0, top=1.0)),
            "loss": _chart(labels, reports, _loss_points, Frame("step", "loss")),
            "value": shown_value,
            "made_s": time.time(),
        },
    )
    save_page(sweep.page, page)
    return sweep.page


def _is_finished(results: SweepResults, name: str) -> bool:
    return any(run.name == name and run.state == "finished" for run in results.runs)


def _reports(sweep: SweepFolder, runs: Sequence[str]) -> list[RunReport]:
    found = []
    for run in runs:
        try:
            found.append(read_run_report(sweep.folder_of(run).path))
        except RunError:
            continue  # finished without an event: nothing to draw
    return found


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
            curves.append(Curve(label, x, mean, color, band=(low, high) if len(group) > 1 else None))
    return charts.line_chart(curves, frame)


def mean_curve(curves: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats, Floats, Floats] | None:
    """Return x, mean, lowest and highest of curves, interpolated between their points where all of them have values.

    Args:
        curves: x, increasing, and y of each; points that are not finite are left out.

    Returns:
        None if the curves have no x in common.
    """
    known = [(x[np.isfinite(y)], y[np.isfinite(y)]) for x, y in curves]
    known = [(x, y) for x, y in known if len(x)]
    if not known:
        return None
    first, last = max(x[0] for x, _ in known), min(x[-1] for x, _ in known)
    if first > last:
        return None
    own = np.unique(np.concatenate([x[(x >= first) & (x <= last)] for x, _ in known]))
    x = own if len(known) == 1 else np.union1d(own, np.linspace(first, last, _NUM_POINTS))
    values = np.stack([np.interp(x, *curve) for curve in known])
    return x, values.mean(0), values.min(0), values.max(0)


def _miou_points(report: RunReport) -> tuple[Floats, Floats]:
    vals = report.view.vals
    return vals.values("step"), vals.values("miou")


def _loss_points(report: RunReport) -> tuple[Floats, Floats]:
    history = report.view.history
    if not history.size:
        return np.empty(0), np.empty(0)
    factor = SMOOTHINGS[0] if history.num_steps < 200 else SMOOTHINGS[1]
    return np.asarray(history.step, float), np.asarray(history.average(factor), float)
