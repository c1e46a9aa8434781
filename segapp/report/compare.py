"""`segapp compare`: several runs, or the runs of a sweep, side by side, in the terminal and as an HTML page.

Differences on the same images have 95 % confidence intervals by a paired bootstrap over the images: they are drawn with
replacement, the same images for both models (Efron and Tibshirani, An Introduction to the Bootstrap, 1993), and the
scores are computed from the sums over the draw. The margin is the 95 % quantile of the distance between the draws'
differences and the measured difference, so the interval is symmetric. It covers only the choice of images; another
seed of the training also changes the difference.

Shapes: R runs, N images, C classes; counts have shape (N, C, 3), as in `ImageCounts`.
"""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from segapp.assembly.data import build_dataset
from segapp.assembly.pairs import split_names
from segapp.assembly.trained import TrainedModel, load_trained
from segapp.datasets.dataset import SegmentationDataset
from segapp.errors import ConfigError, DataError, SegappError
from segapp.inference.workspace import HostLimit
from segapp.report import charts
from segapp.report.charts import Frame
from segapp.report.images import ImageCounts, count_split, evaluate_image, iou_of, mean_of_known
from segapp.report.page import loss_chart, miou_curves
from segapp.report.render import render, save_page
from segapp.report.run_report import RunReport, RunRow, differing_settings, read_run_report, run_row
from segapp.run import words
from segapp.run.folder import runs_of
from segapp.run.words import printable
from segapp.scores import OTHER_HEADLINES, best_shown, loss_text, with_count
from segapp.training.console import progress_bar

Network = tuple[TrainedModel, SegmentationDataset]

MAX_CLASSES = 20
"""Number of classes in the terminal: the classes with the largest differences."""
MIN_IMAGES = 10
"""With fewer images, or fewer images with a class, there is no margin, because it would be too small."""
NUM_DRAWS = 2000
_CHUNK = 200  # draws that are processed together


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
    runs = [name for run in runs for name in runs_of(run)]
    if len(runs) < 2:
        raise ConfigError(f"compare needs at least two runs, and got {len(runs)}: segapp compare RUN RUN")
    reports = [read_run_report(run) for run in runs]
    rows = [run_row(report) for report in reports]
    differences = differing_settings([report.config for report in reports])
    differences.pop("name", None)
    same, why_not = None, None if has_images else "left out because of --no-images"
    if has_images:
        try:
            same = compare_on_images(reports, split, num_images, has_pictures=out is not None)
        except SegappError as error:
            why_not = str(error)
            print(f"note: no comparison on the same images: {printable(why_not)}", file=sys.stderr)
    common = common_classes(rows)
    iou = [row.iou for row in rows] if same is None else [run["iou"] for run in same["runs"]]
    classes = list(dict.fromkeys(name for each in iou for name in each))
    shown = [name for name in classes if any(each.get(name) is not None for each in iou)]
    note = note_of_means(rows, common)
    if out is not None:
        values = {
            "rows": rows,
            "figures": key_figures([asdict(row) for row in rows]),
            "differences": differences,
            "same": same,
            "why_not": why_not,
            "verdicts": verdicts(same),
            "iou": iou,
            "classes": shown,
            "absent": [name for name in classes if name not in shown],
            "best": {name: best_shown(each.get(name) for each in iou) for name in shown},
            "note": note,
            "loss": loss_chart(reports),
            "miou": charts.line_chart(miou_curves(reports), Frame("step", "mIoU", bottom=0.0, top=1.0)),
            "difference": difference_text,
            "scale": _widest(same),
            "made_s": time.time(),
        }
        save_page(out, render("compare.html.j2", values))
    for image in same["images"] if same else ():
        image.pop("shown", None)
    return {
        "runs": [asdict(row) for row in rows],
        "differences": differences,
        "common_classes": list(common),
        "common_miou": [_mean_over(row, common) for row in rows],
        "note": note,
        "same_images": same,
        "why_not": why_not,
    }


def _widest(same: Mapping[str, Any] | None) -> float:
    """Return the farthest end of an interval of the classes and the mean, which is half the width of their figures."""
    ends = [0.0]
    for run in same["runs"][1:] if same else ():
        for values, margins in (
            (run["iou_difference"], run["iou_margin"]),
            ({"": run["difference"]}, {"": run["margin"]}),
        ):
            ends += [abs(value) + (margins[name] or 0.0) for name, value in values.items() if value is not None]
    return max(ends)


def verdicts(same: Mapping[str, Any] | None) -> list[str]:
    """Return a sentence per run after the first one; empty without the same images."""
    return [verdict(same, run) for run in same["runs"][1:]] if same else []


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
    numbers = ", ".join(f"{row.name} {row.num_scored}" for row in rows if row.num_scored)
    if not common:
        return f"The mIoU are means over different classes ({numbers}), and no class is common to all."
    means = ", ".join(f"{row.name} {_percent(_mean_over(row, common))}" for row in rows if row.num_scored)
    which = "the class" if len(common) == 1 else f"the {len(common)} classes"
    return f"The mIoU are means over different classes ({numbers}). Over {which} that all have: {means}."


def _mean_over(row: RunRow, classes: Sequence[str]) -> float | None:
    values = [iou for name in classes if (iou := row.iou.get(name)) is not None]
    return sum(values) / len(values) if values else None


def key_figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the figures of runs, which are fields of `RunRow`, as lines of text: title -> text of each run."""
    return {
        "state": [row["state"] for row in runs],
        "best mIoU": [with_count(_percent(row["best_miou"]), row["num_scored"], len(row["iou"])) for row in runs],
        **{score.title: [_percent(row["scores"].get(score.name)) for row in runs] for score in OTHER_HEADLINES},
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


def print_comparison(found: Mapping[str, Any]) -> None:
    """Print the result of `compare_runs`: differing keys, figures, and the scores on the same images."""
    console = Console(highlight=False)
    runs, same = found["runs"], found.get("same_images")
    names = [row["name"] for row in runs]
    if found["differences"]:
        console.print(_table("differences", names, found["differences"]))
        console.print()
    console.print(_table("", names, key_figures(runs)))
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
            *(f"{_percent(run['miou'])}  {difference_text(run['difference'], run['margin'])}" for run in others),
        ]
    }
    for name in largest[:MAX_CLASSES]:
        lines[name] = [_percent(first["iou"][name])]
        for run in others:
            text = difference_text(run["iou_difference"][name], run["iou_margin"][name])
            lines[name].append(f"{_percent(run['iou'][name])}  {text}")
    console.print(_table(f"{same['num_images']} images of {same['split']}", names, lines))
    if len(largest) > MAX_CLASSES:
        console.print(Text(f"and {len(largest) - MAX_CLASSES} classes with smaller differences: --json, --html"))
    for sentence in [
        *verdicts(same),
        "The intervals are about the choice of images, not about the seed of the training.",
    ]:
        console.print(Text(printable(sentence)))
    if same["images"]:
        console.print()
        lines = {image["name"]: [_percent(miou) for miou in image["miou"]] for image in same["images"]}
        console.print(_table("mIoU of the images that differ most", names, lines))


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


def compare_on_images(
    reports: Sequence[RunReport], split: str | None, num_images: int, *, has_pictures: bool
) -> dict[str, Any]:
    """Return plain values about runs on the images whose masks they all know: the keys of `segapp compare --json`.

    Each run is evaluated with its best checkpoint on `split`, by default its own validation split.

    Raises:
        SegappError: a network or its data cannot be loaded, or the runs have no image in common.
    """
    networks: list[Network] = []
    counts = []
    for report in reports:
        trained = load_trained(str(report.folder.path))
        own_split = split or split_names(trained.config.data)[1]
        dataset = build_dataset(
            trained.config.data, trained.scheme, own_split, is_training=False, seed=trained.config.seed
        )
        networks.append((trained, dataset))
        with progress_bar(len(dataset), f"evaluating {report.name}") as progress:
            counts.append(count_split(trained, dataset, own_split, progress))
    scores = fold_counts([report.name for report in reports], counts, num_images)
    if has_pictures:
        for image in scores["images"]:
            _add_pictures(image, networks, counts, scores["names"])
    return scores


def fold_counts(names: Sequence[str], counts: Sequence[ImageCounts], num_images: int) -> dict[str, Any]:
    """Return scores and differences of runs from their counts; DataError if no image is common to all."""
    classes = [name for name in counts[0].classes if all(name in of_run.classes for of_run in counts)]
    places = [{name: place for place, name in enumerate(of_run.names)} for of_run in counts]
    images = [name for name in counts[0].names if all(name in of_run for of_run in places)]
    shared = np.stack([
        of_run.counts[np.ix_([at[name] for name in images], [of_run.classes.index(name) for name in classes])]
        for of_run, at in zip(counts, places, strict=True)
    ])  # fmt: skip
    is_same = (shared[..., 1] == shared[:1, ..., 1]).all((0, 2))  # masks with the same pixels of each class
    if not classes or not is_same.any():
        raise DataError(
            f"{', '.join(names)} have no {'image with the same mask' if classes else 'class'} in common: name a split "
            "that all have with --split, or compare runs of one data set",
            key="data.val_split",
        )
    shared, images = shared[:, is_same], [name for name, is_kept in zip(images, is_same, strict=True) if is_kept]
    iou = iou_of(shared.sum(1))  # (R, C)
    shared[:, :, ~np.isfinite(iou).all(0)] = 0  # a class without an IoU in one run is left out of all means
    miou, of_images = mean_of_known(iou_of(shared.sum(1))), mean_of_known(iou_of(shared))
    differences: list[Differences | None] = [None, *(differences_of(shared[0], of_run) for of_run in shared[1:])]
    effects = np.stack([np.zeros(len(images)) if diff is None else diff.effects for diff in differences])
    worst = np.argsort(-np.abs(np.nan_to_num(effects)).max(0), kind="stable")[:num_images]
    return {
        "names": list(names),
        "split": ", ".join(dict.fromkeys(of_run.split for of_run in counts)),
        "num_images": len(images),
        "num_left_out": max(len(of_run.names) for of_run in counts) - len(images),
        "classes": classes,
        "num_scored": int(np.isfinite(iou).all(0).sum()),
        "runs": [
            {
                "name": name,
                "miou": known(miou[run]),
                "iou": _by_class(classes, iou[run]),
                **({} if diff is None else {
                    "difference": known(diff.miou), "margin": known(diff.miou_margin),
                    "iou_difference": _by_class(classes, diff.iou), "iou_margin": _by_class(classes, diff.iou_margin),
                }),
            }
            for run, (name, diff) in enumerate(zip(names, differences, strict=True))
        ],
        "images": [
            {
                "name": images[place],
                "miou": [known(value) for value in of_images[:, place]],
                "effects": [known(value) for value in effects[1:, place]],
            }
            for place in worst.tolist()
        ],
    }  # fmt: skip


def known(value: float) -> float | None:
    """Return a number; None for NaN."""
    return None if math.isnan(value) else float(value)


def _by_class(classes: Sequence[str], values: Any) -> dict[str, float | None]:
    return {name: known(value) for name, value in zip(classes, values, strict=True)}


def _add_pictures(
    image: dict[str, Any], networks: Sequence[Network], counts: Sequence[ImageCounts], names: Sequence[str]
) -> None:
    """Add the page's data about an image: pictures, files, and the colors of its classes.

    A row of pictures has the image and each run's prediction; the next row has the target and the wrong pixels.
    """
    shown = [
        evaluate_image(trained, dataset, of_run.names.index(image["name"]), HostLimit())
        for (trained, dataset), of_run in zip(networks, counts, strict=True)
    ]
    first, target, *_ = shown[0].pictures.items()
    rows = [[first], [target]]
    for name, evaluated in zip(names, shown, strict=True):
        for row, (what, address) in zip(rows, list(evaluated.pictures.items())[2:], strict=True):
            row.append((f"{what}, {name}", address))
    image["shown"] = {
        "pictures": [*rows[0], *rows[1]],
        "files": shown[0].files,
        "legend": list(dict(entry for evaluated in shown for entry in evaluated.legend).items()),
        "has_ignored": any(evaluated.has_ignored for evaluated in shown),
    }


def verdict(found: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Return a sentence about the difference between a run and the first one."""
    first, margin = found["names"][0], run["margin"]
    where = f"{found['num_images']} images of {found['split']}, {found['num_scored']} classes"
    if run["difference"] is None:
        return f"{run['name']} and {first} have no class in common that has an IoU ({where})."
    points = f"mIoU {difference_text(run['difference'], margin)} points ({where}"
    if margin is None:
        return f"{run['name']} against {first}: {points}). Fewer than {MIN_IMAGES} images give no confidence."
    if abs(run["difference"]) <= margin:
        return f"{run['name']} and {first} do not differ clearly: {points}, 95 % confidence)."
    better = "better" if run["difference"] > 0 else "worse"
    return f"{run['name']} is {better} than {first}: {points}, 95 % confidence)."


def difference_text(value: float | None, margin: float | None = None) -> str:
    """Return a difference of shares in percentage points.

    >>> difference_text(0.0123, 0.008), difference_text(0.0004, 0.0001), difference_text(-0.01), difference_text(None)
    ('+1.2 ± 0.8', '+0.04 ± 0.01', '-1.0', '-')
    """
    if value is None:
        return "-"
    digits = 2 if margin is not None and margin < 0.0005 else 1
    return f"{100 * value:+.{digits}f}" + ("" if margin is None else f" ± {100 * margin:.{digits}f}")


@dataclass(frozen=True)
class Differences:
    """Scores of the second model minus scores of the first model; NaN if one of them does not have the score."""

    miou: float
    """Difference of the mean over the classes that have an IoU in both."""
    miou_margin: float
    """The true difference is within `miou` ± `miou_margin` with 95 % confidence; NaN with too few images."""
    iou: NDArray[np.float64]
    """(C,)."""
    iou_margin: NDArray[np.float64]
    """(C,)."""
    effects: NDArray[np.float64]
    """For each image, (N,): `miou` minus the same difference over all other images."""


def differences_of(first: NDArray[np.int64], second: NDArray[np.int64], seed: int = 0) -> Differences:
    """Return the differences of two models from their counts (N, C, 3) of the same images."""
    both = np.stack([first, second]).astype(np.float64)  # (2, N, C, 3)
    total = both.sum(1)
    iou = _iou_difference(total)
    miou = mean_of_known(iou)
    num_images = len(first)
    rng = np.random.default_rng(seed)
    distances = np.empty((NUM_DRAWS, 1 + len(iou)))
    for start in range(0, NUM_DRAWS, _CHUNK):
        times = rng.multinomial(num_images, np.full(num_images, 1 / num_images), _CHUNK)  # of each image in a draw
        drawn = _iou_difference(np.einsum("dn,rncs->rdcs", times.astype(np.float64), both, optimize=True))
        distances[start : start + _CHUNK, 0] = np.abs(mean_of_known(drawn) - miou)
        distances[start : start + _CHUNK, 1:] = np.abs(drawn - iou)
    has_class = (both[..., 1:] > 0).any((0, -1)).sum(0)  # images with each class
    is_enough = np.concatenate([[num_images], has_class]) >= MIN_IMAGES
    margins = np.full(len(is_enough), np.nan)
    margins[is_enough] = np.nanquantile(distances[:, is_enough], 0.95, axis=0)
    without = _iou_difference(total[:, None] - both)  # (N, C)
    return Differences(float(miou), float(margins[0]), iou, margins[1:], miou - mean_of_known(without))


def _iou_difference(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Return the IoU of the second model minus the IoU of the first, (..., C), from counts (2, ..., C, 3)."""
    return np.asarray(iou_of(counts[1]) - iou_of(counts[0]))
