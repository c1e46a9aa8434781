"""`segapp compare`: several runs beside each other, in the terminal and as a page."""

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
from segapp.report.page import loss_chart, miou_lines, render, save_page
from segapp.report.run_report import RunReport, read_story
from segapp.run.text import printable
from segapp.train.telemetry.trackers import flat_settings
from segapp.tui.state import wording

UNIMPORTANT_KEYS = frozenset({"name"})


@dataclass(frozen=True)
class RunRow:
    """One run in numbers; None where it is not known."""

    name: str
    state: str
    best_miou: float | None
    best_epoch: int | None
    last_loss: float | None
    """Mean training loss of the last steps."""
    last_val_loss: float | None
    epochs: int
    steps: int
    images_per_s: float | None
    duration_s: float | None
    num_params: int
    peak_mib: float | None
    """Of the device that needed most."""
    iou: dict[str, float | None]
    """By class, of the best evaluation."""


def compare_runs(runs: Sequence[str], out: Path | None = None) -> dict[str, Any]:
    """Compares runs, prints a table, and writes a page where asked for.

    Args:
        runs: names or folders, two at least.
        out: file for the page.

    Returns:
        What was printed, as plain values: `runs`, and `differences` (config key -> value of each run).

    Raises:
        ConfigError: fewer than two runs, or one that is not there.
        RunError: one has not begun.
        StorageError: the page cannot be written.
    """
    if len(runs) < 2:
        raise ConfigError(f"compare needs two runs at least, and was given {len(runs)}: segapp compare RUN RUN")
    stories = [read_story(run) for run in runs]
    rows = [run_row(story) for story in stories]
    differences = config_differences(stories)
    classes = list(dict.fromkeys(name for row in rows for name in row.iou))
    if out is not None:
        values = {
            "rows": rows,
            "differences": differences,
            "classes": classes,
            "best": {
                name: max((iou for row in rows if (iou := row.iou.get(name)) is not None), default=None)
                for name in classes
            },
            "loss": loss_chart(stories),
            "miou": charts.line_chart(miou_lines(stories), Frame("step", "mIoU", bottom=0.0, top=1.0)),
            "colors": charts.NUM_COLORS,
        }
        save_page(out, render("compare.html.j2", values))
    return {"runs": [asdict(row) for row in rows], "differences": differences}


def print_comparison(found: Mapping[str, Any]) -> None:
    """Prints what `compare_runs` gives as two tables."""
    console = Console(highlight=False)
    runs = found["runs"]
    lines = {
        "state": [row["state"] for row in runs],
        "best mIoU": [_percent(row["best_miou"]) for row in runs],
        "at epoch": [f"{row['best_epoch'] or '-'} of {row['epochs']}" for row in runs],
        "loss": [wording.number(row["last_loss"]) for row in runs],
        "validation loss": [wording.number(row["last_val_loss"]) for row in runs],
        "steps": [str(row["steps"]) for row in runs],
        "images/s": [wording.number(row["images_per_s"]) for row in runs],
        "time": [wording.duration(row["duration_s"]) for row in runs],
        "parameters": [f"{row['num_params']:,}" for row in runs],
        "peak GiB": [wording.gib(row["peak_mib"]) for row in runs],
    }
    console.print(_table("", [row["name"] for row in runs], lines))
    if found["differences"]:
        console.print()
        console.print(_table("what differs", [row["name"] for row in runs], found["differences"]))


def _table(heading: str, names: Sequence[str], lines: Mapping[str, Sequence[Any]]) -> Table:
    """A line for each key, a column for each run."""
    table = Table(box=None, pad_edge=False)
    table.add_column(heading, overflow="fold")
    for name in names:
        table.add_column(Text(printable(name)), overflow="fold")
    for key, values in lines.items():
        table.add_row(*(Text(printable(str(cell))) for cell in [key, *values]))
    return table


def run_row(story: RunReport) -> RunRow:
    """A run in numbers."""
    view = story.view
    assert view.start is not None
    best = view.best
    peaks = [peak for split in story.peaks_mib.values() for peak in split if peak is not None]
    last = view.history.last_average(0.9) if view.history.size else float("nan")
    names = list(view.start.classes)
    return RunRow(
        name=story.name,
        state=story.state,
        best_miou=best.miou if best else None,
        best_epoch=best.epoch if best else None,
        last_loss=None if last != last else last,
        last_val_loss=view.vals[-1].loss if view.vals else None,
        epochs=view.epoch or 0,
        steps=view.step.step if view.step else 0,
        images_per_s=view.step.images_per_s if view.step else None,
        duration_s=story.duration_s,
        num_params=view.start.num_params,
        peak_mib=max(peaks, default=None),
        iou=dict(zip(names, best.iou, strict=False)) if best else dict.fromkeys(names),
    )


def config_differences(stories: Sequence[RunReport]) -> dict[str, list[Any]]:
    """Config keys whose values are not the same in all runs, with the value of each; "?" where a config is missing."""
    flat = [flat_settings(story.config.model_dump(mode="json")) if story.config else {} for story in stories]
    keys = sorted({key for values in flat for key in values} - UNIMPORTANT_KEYS)
    found = {key: [values.get(key, "?") for values in flat] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"
