"""`segapp compare`: several runs side by side, in the terminal and as an HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from segapp.errors import ConfigError
from segapp.report import charts
from segapp.report.charts import Frame
from segapp.report.page import loss_chart, miou_curves
from segapp.report.render import render, save_page
from segapp.report.run_report import RunReport, read_run_report
from segapp.run import words
from segapp.run.words import printable
from segapp.scores import best_shown, count_scored, loss_text, with_count
from segapp.training.telemetry.trackers import flat_settings

UNIMPORTANT_KEYS = frozenset({"name"})


@dataclass(frozen=True)
class RunRow:
    """Key figures of one run; None where a value is not known."""

    name: str
    state: str
    best_miou: float | None
    num_scored: int | None
    """Number of classes that `best_miou` is the mean of: those that have an IoU in `iou`."""
    best_epoch: int | None
    mean_dice: float | None
    """Of the best evaluation; None if an older trainer wrote the run."""
    last_loss: float | None
    """Mean training loss of the last epoch, see `EpochLoss`."""
    last_val_loss: float | None
    """Of the last evaluation; None if it was not finite."""
    num_evaluations: int
    epochs: int
    steps: int
    images_per_s: float | None
    duration_s: float | None
    num_params: int
    peak_mib: float | None
    """Of the device with the highest peak."""
    iou: dict[str, float | None]
    """Per class, of the best evaluation."""


def compare_runs(runs: Sequence[str], out: Path | None = None) -> dict[str, Any]:
    """Compare runs, and write a page if requested.

    Returns:
        Plain values: `runs`, `differences` (config key -> value of each run), and `common_classes`: the classes that
        have an IoU in every run's best evaluation, with `common_miou`, the mean over them of each run.

    Raises:
        ConfigError: fewer than two runs, or a run does not exist.
        RunError: a run has no events yet.
        StorageError: the page cannot be written.
    """
    if len(runs) < 2:
        raise ConfigError(f"compare needs at least two runs, and got {len(runs)}: segapp compare RUN RUN")
    reports = [read_run_report(run) for run in runs]
    rows = [run_row(report) for report in reports]
    differences = config_differences(reports)
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
        }
        save_page(out, render("compare.html.j2", values))
    return {
        "runs": [asdict(row) for row in rows],
        "differences": differences,
        "common_classes": list(common),
        "common_miou": [_mean_over(row, common) for row in rows],
        "note": note_of_means(rows, common),
    }


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
        "mean Dice": [_percent(row["mean_dice"]) for row in runs],
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


def run_row(report: RunReport) -> RunRow:
    """Return the key figures of a run."""
    view = report.view
    assert view.start is not None
    best = view.best
    peaks = [peak for split in report.peaks_mib.values() for peak in split if peak is not None]
    names = list(view.start.classes)
    return RunRow(
        name=report.name,
        state=report.state,
        best_miou=best.miou if best else None,
        num_scored=count_scored(best.iou) if best else None,
        best_epoch=best.epoch if best else None,
        mean_dice=best.score("mean_dice") if best else None,
        last_loss=view.loss.mean,
        last_val_loss=view.vals[-1].loss if view.vals else None,
        num_evaluations=len(view.vals),
        epochs=view.epoch or 0,
        steps=view.step.step if view.step else 0,
        images_per_s=view.step.images_per_s if view.step else None,
        duration_s=report.duration_s,
        num_params=view.start.num_params,
        peak_mib=max(peaks, default=None),
        iou=dict(zip(names, map(_known, best.iou), strict=False)) if best else dict.fromkeys(names),
    )


def _known(iou: float | None) -> float | None:
    """Return an IoU, None for the nan of an old evaluation."""
    return None if iou is None or iou != iou else iou


def config_differences(reports: Sequence[RunReport]) -> dict[str, list[Any]]:
    """Return the config keys whose values differ, with the value of each run; "?" where a config is missing."""
    flat = [flat_settings(report.config.model_dump(mode="json")) if report.config else {} for report in reports]
    keys = sorted({key for values in flat for key in values} - UNIMPORTANT_KEYS)
    found = {key: [values.get(key, "?") for values in flat] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"
