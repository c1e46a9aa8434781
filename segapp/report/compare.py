"""`segapp compare`: several runs, or the runs of a sweep, side by side, in the terminal and as an HTML page.

`images` predicts the images and compares them; only that needs torch.
"""

import csv
import io
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from segapp.errors import ConfigError, SegappError
from segapp.report import charts
from segapp.report.charts import Frame
from segapp.report.page import loss_chart, miou_curves, read_run_report, render, save_page, without_events
from segapp.run import words
from segapp.run.folder import RunFolder, find_run, runs_of
from segapp.run.words import printable
from segapp.scores import OTHER_HEADLINES, best_shown, loss_text, score_text, with_count
from segapp.view.runs import Ranking, differing_settings, read_settings, summarize

MAX_CLASSES = 20
"""Number of classes in the terminal: the classes with the largest differences."""


def compare_runs(
    runs: Sequence[str],
    out: Path | None = None,
    *,
    split: str | None = None,
    num_images: int = 6,
    has_images: bool = True,
) -> dict[str, Any]:
    """Compare runs, and write a page if requested; return plain values.

    The keys are `runs`; `differences` (config key -> value of each run); `common_classes`, the classes that have an IoU
    in every run's best evaluation, with `common_miou`, each run's mean over them; and `same_images`, the scores on the
    images that all runs know (`fold_counts`), or None, with the reason in `why_not`.

    Args:
        runs: names or folders, of sweeps too; the differences are from the first one.
        out: path of the HTML file; None: no page.
        split: data split for `same_images`; None: each run's own validation split.
        num_images: number of images that are listed and shown, which contribute most to the differences.
        has_images: False: leave out `same_images`, which needs the networks and the data.

    Raises:
        ConfigError: fewer than two runs, or a run does not exist.
        RunError: a run has no events yet.
        StorageError: the page cannot be written.
    """
    folders = [find_run(name) for run in runs for name in runs_of(run)]
    if len(folders) < 2:
        raise ConfigError(f"compare needs at least two runs, and got {len(folders)}: segapp compare RUN RUN")
    rows = [_row_of(folder) for folder in folders]
    differences = differing_settings([read_settings(folder) for folder in folders])
    same, why_not = None, None if has_images else "left out because of --no-images"
    if has_images:
        from segapp.report.images import compare_on_images

        try:
            same = compare_on_images(folders, split, num_images, has_pictures=out is not None)
        # The data or the weights may be gone; the events suffice for the rest.
        except SegappError as error:
            why_not = str(error)
            print(f"note: no comparison on the same images: {printable(why_not)}", file=sys.stderr)
    common = common_classes(rows)
    iou = [row["iou"] for row in rows] if same is None else [run["iou"] for run in same["runs"]]
    classes = list(dict.fromkeys(name for each in iou for name in each))
    shown = [name for name in classes if any(each.get(name) is not None for each in iou)]
    note = " ".join(filter(None, (Ranking(rows).note, note_of_means(rows, common)))) or None
    if out is not None:
        reports = [read_run_report(folder.path) for folder in folders]
        values = {
            "rows": rows,
            "figures": key_figures(rows),
            "differences": differences,
            "same": same,
            "why_not": why_not,
            "iou": iou,
            "classes": shown,
            "absent": [name for name in classes if name not in shown],
            "best": {name: best_shown(each.get(name) for each in iou) for name in shown},
            "note": note,
            "loss": loss_chart(reports),
            "miou": charts.line_chart(miou_curves(reports), Frame("step", "mIoU", bottom=0.0, top=1.0)),
            "difference": difference_text,
            "made_s": time.time(),
        }
        save_page(out, render("compare.html.j2", values))
    for image in same["images"] if same else ():
        # Embedded images do not belong to the result in JSON.
        image.pop("shown", None)
    return {
        "runs": rows,
        "differences": differences,
        "common_classes": list(common),
        "common_miou": [_mean_over(row, common) for row in rows],
        "note": note,
        "same_images": same,
        "why_not": why_not,
    }


def _row_of(folder: RunFolder) -> dict[str, Any]:
    summary = summarize(folder.path)
    if summary.figures["num_params"] is None:
        raise without_events(folder)
    return {"name": folder.name, "state": summary.state, **summary.figures}


def common_classes(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the classes that have an IoU in the best evaluation of every evaluated run."""
    evaluated = [row for row in rows if row["num_scored"]]
    first = evaluated[0]["iou"] if evaluated else {}
    return tuple(name for name in first if all(row["iou"].get(name) is not None for row in evaluated))


def note_of_means(rows: Sequence[Mapping[str, Any]], common: Sequence[str]) -> str | None:
    """Return a sentence if the mIoU of the runs are means over different classes; None if they can be compared."""
    scored = [{name for name, iou in row["iou"].items() if iou is not None} for row in rows if row["num_scored"]]
    if all(names == set(common) for names in scored):
        return None
    numbers = ", ".join(f"{row['name']} {row['num_scored']}" for row in rows if row["num_scored"])
    if not common:
        return f"The mIoU are means over different classes ({numbers}), and no class is common to all."
    means = ", ".join(f"{row['name']} {_percent(_mean_over(row, common))}" for row in rows if row["num_scored"])
    which = "the class" if len(common) == 1 else f"the {len(common)} classes"
    return f"The mIoU are means over different classes ({numbers}). Over {which} that all have: {means}."


def _mean_over(row: Mapping[str, Any], classes: Sequence[str]) -> float | None:
    values = [iou for name in classes if (iou := row["iou"].get(name)) is not None]
    return sum(values) / len(values) if values else None


def key_figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the state and `RunSummary.figures` of runs as lines of text: title -> text of each run."""
    ranking = Ranking(runs)
    miou = [with_count(_percent(row["best_miou"]), row["num_scored"], len(row["iou"])) for row in runs]
    form = _percent if ranking.score.larger_is_better else score_text
    return {
        "state": [row["state"] for row in runs],
        f"best {ranking.score.title}": [ranking.text(row, form(ranking.value(row))) for row in runs],
        **({} if ranking.score.name == "miou" else {"mIoU": miou}),
        **{
            score.title: [_percent(row["scores"].get(score.name)) for row in runs]
            for score in OTHER_HEADLINES
            if any(row["scores"].get(score.name) is not None for row in runs)
        },
        "at epoch": [f"{row['best_epoch'] or '-'} of {row['epochs']}" for row in runs],
        "last mIoU": [with_count(_percent(row["last_miou"]), row["last_num_scored"], len(row["iou"])) for row in runs],
        "loss of the last epoch": [loss_text(row["last_loss"], is_known=row["steps"] > 0) for row in runs],
        "validation loss": [loss_text(row["last_val_loss"], is_known=row["num_evaluations"] > 0) for row in runs],
        "steps": [str(row["steps"]) for row in runs],
        "images/s": [words.number(row["images_per_s"]) for row in runs],
        "time": [words.duration(row["duration_s"]) for row in runs],
        "parameters": [f"{row['num_params']:,}" for row in runs],
        "peak GiB": [words.gib(row["peak_mib"]) for row in runs],
    }


def csv_of(found: Mapping[str, Any]) -> str:
    """Return a line per run: its figures, the settings that differ, its scores, and the IoU of each class as shares."""
    rows = []
    for i, run in enumerate(found["runs"]):
        figures = {key: value for key, value in run.items() if not isinstance(value, Mapping | list)}
        settings = {key: "" if values[i] == "?" else values[i] for key, values in found["differences"].items()}
        classes = {f"iou of {name}": iou for name, iou in run["iou"].items()}
        rows.append({**figures, **settings, **run["scores"], **classes})
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def print_comparison(found: Mapping[str, Any]) -> None:
    """Print the result of `compare_runs`: differing keys, figures, and the scores on the same images."""
    console = Console(highlight=False)
    runs, same = found["runs"], found.get("same_images")
    names = [row["name"] for row in runs]
    settings = found["differences"] and {**found["differences"], "": [""] * len(names)}
    console.print(_table("differences" if settings else "", names, {**settings, **key_figures(runs)}))
    if found.get("note"):
        console.print(Text(printable(found["note"])))
    if same is None:
        return
    console.print()
    first, *others = same["runs"]
    largest = sorted(
        (name for name in same["classes"] if others[0]["iou_difference"][name] is not None),
        key=lambda name: -max(abs(run["iou_difference"][name]) for run in others),
    )
    lines = {
        f"mIoU ({same['num_scored']} classes)": [
            _percent(first["miou"]),
            *(f"{_percent(run['miou'])}  {difference_text(run['difference'])}" for run in others),
        ]
    }
    for name in largest[:MAX_CLASSES]:
        lines[name] = [_percent(first["iou"][name])]
        for run in others:
            lines[name].append(f"{_percent(run['iou'][name])}  {difference_text(run['iou_difference'][name])}")
    console.print(_table(f"{same['num_images']} images of {same['split']}", names, lines))
    if len(largest) > MAX_CLASSES:
        console.print(Text(f"and {len(largest) - MAX_CLASSES} classes with smaller differences: --json, --html"))
    console.print(Text("Another choice of images or another seed of the training also changes the differences."))
    if same["images"]:
        console.print()
        lines = {image["name"]: [_percent(miou) for miou in image["miou"]] for image in same["images"]}
        console.print(_table("mIoU of the images that differ most", names, lines))


def _table(heading: str, names: Sequence[str], lines: Mapping[str, Sequence[Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(heading, overflow="fold")
    for name in names:
        table.add_column(Text(printable(name)), overflow="fold")
    for key, values in lines.items():
        table.add_row(*(Text(printable(str(cell))) for cell in [key, *values]))
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def difference_text(value: float | None) -> str:
    """Return a difference of shares in percentage points.

    >>> difference_text(0.0123), difference_text(-0.01), difference_text(None)
    ('+1.2', '-1.0', '-')
    """
    return "-" if value is None else f"{100 * value:+.1f}"
