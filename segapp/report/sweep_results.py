"""The results of a sweep: each setting with mean and standard deviation over its repetitions.

Repetitions are runs that differ only in the seed or in the division of the data (folds). Unfinished runs are counted
but not included in the means.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from scipy.special import stdtrit  # type: ignore[import-untyped]

from segapp.config import load_config
from segapp.errors import ConfigError, RunError
from segapp.report.run_report import RunReport, RunRow, differing_settings, read_run_report, run_row
from segapp.run.sweep import SweepFolder, SweepInfo, SweepRun
from segapp.view.summary import small_view

FOLD_KEYS = ("data.train_split", "data.val_split", "data.list_dir")
"""Keys that divide the data; configs that differ in nothing else except the name are folds."""


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (divided by count - 1; None for fewer than two values)."""

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the spread of the known values; None if there are none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


@dataclass(frozen=True)
class SettingResult:
    """One setting; the spreads are over its finished runs."""

    settings: dict[str, Any]
    """Keys that vary between settings; `config` is the name of the config if several are compared."""
    runs: list[str]
    num_finished: int
    best_miou: Spread | None
    last_miou: Spread | None
    val_loss: Spread | None
    loss: Spread | None = None
    best_classes: str = ""
    """Classes that `best_miou` averages over, such as `17/19`, or `16 to 17/19` if runs differ."""
    last_classes: str = ""
    over_seeds: float | None = None
    """Standard deviation of `best_miou` over the seeds, each averaged over the folds; None unless there are two or more
    folds, and every fold has the same two or more seeds."""
    over_folds: float | None = None
    """The same over the folds, each averaged over the seeds."""
    iou: dict[str, Spread | None] = field(default_factory=dict)
    """IoU per class, from the best evaluations."""
    cells: dict[tuple[str, str], float | None] = field(default_factory=dict)
    """`best_miou` of each finished run, by fold and seed."""
    difference: Spread | None = None
    """`best_miou` minus the best setting's, over the folds and seeds of both; None for the best one."""
    margin: float | None = None
    """Half of the 95 % confidence interval of `difference` (paired t); None with fewer than two pairs."""


@dataclass(frozen=True)
class SweepResults:
    """All settings, the best first, and all runs."""

    name: str
    path: str
    state: str
    varying: list[str]
    """Keys in the columns of the settings."""
    repeated: list[str]
    """The differences between the repetitions: seed, fold."""
    settings: list[SettingResult]
    runs: list[RunRow]
    reports: dict[str, RunReport] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the results as plain values."""
        found = asdict(replace(self, reports={}))
        for row in found["settings"]:
            del row["cells"]  # its keys are no JSON
        return {name: value for name, value in found.items() if name != "reports"}


def read_results(sweep: SweepFolder) -> SweepResults:
    """Read the results of a sweep from the events of its runs; ConfigError if there is no sweep in the folder."""
    info = sweep.read()
    found = [_row_of(sweep, run) for run in info.runs]
    runs = [row for row, _ in found]
    is_folds = _are_folds(sweep, info)
    varying = [key for key in info.axes if len({json.dumps(run.settings.get(key)) for run in runs}) > 1]
    fold_keys = [key for key in varying if key in FOLD_KEYS]
    compared = [key for key in varying if key != "seed" and key not in FOLD_KEYS]
    has_configs = len({run.config for run in runs}) > 1
    if has_configs and not is_folds:
        compared = ["config", *compared]
    groups: dict[str, list[RunRow]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_columns(run, compared)), []).append(run)

    def fold(run: RunRow) -> str:
        return json.dumps([run.config if is_folds else None, [run.settings.get(key) for key in fold_keys]])

    settings = [summarize_setting(_columns(group[0], compared), group, fold) for group in groups.values()]
    has_folds = bool(fold_keys) or (has_configs and is_folds)
    repeated = [word for word, is_there in (("seed", "seed" in varying), ("fold", has_folds)) if is_there]
    state = sweep.progress().state
    reports = {row.name: report for row, report in found if report is not None}
    settings.sort(key=_rank)
    settings = [settings[0], *(with_difference(row, settings[0]) for row in settings[1:])] if settings else []
    return SweepResults(sweep.name, str(sweep.path), state, compared, repeated, settings, runs, reports)


def summarize_setting(settings: dict[str, Any], runs: Sequence[RunRow], fold: Callable[[RunRow], str]) -> SettingResult:
    """Return the spreads of one setting over its runs; `fold` names the fold of a run."""
    finished = [run for run in runs if run.state == "finished"]
    cells = {(fold(run), json.dumps(run.settings.get("seed"))): run.best_miou for run in finished}
    folds, seeds = (list(dict.fromkeys(cell[axis] for cell in cells)) for axis in (0, 1))
    over_seeds = over_folds = None
    table = [[miou for seed in seeds if (miou := cells.get((fold_, seed))) is not None] for fold_ in folds]
    is_complete = len(cells) == len(finished) and all(len(row) == len(seeds) for row in table)
    if is_complete and len(folds) > 1 and len(seeds) > 1:
        over_folds = statistics.stdev([statistics.fmean(row) for row in table])
        over_seeds = statistics.stdev([statistics.fmean(column) for column in zip(*table, strict=True)])
    return SettingResult(
        settings,
        [run.name for run in runs],
        len(finished),
        Spread.of(run.best_miou for run in finished),
        Spread.of(run.last_miou for run in finished),
        Spread.of(run.last_val_loss for run in finished),
        Spread.of(run.last_loss for run in finished),
        _classes_of(finished, "num_scored"),
        _classes_of(finished, "last_num_scored"),
        over_seeds,
        over_folds,
        {name: Spread.of(run.iou.get(name) for run in finished) for run in runs[:1] for name in run.iou},
        cells if len(cells) == len(finished) else {},
    )


def with_difference(row: SettingResult, best: SettingResult) -> SettingResult:
    """Return a setting with its difference from the best one."""
    pairs = ((row.cells[cell], best.cells[cell]) for cell in row.cells.keys() & best.cells.keys())
    found = Spread.of(own - other for own, other in pairs if own is not None and other is not None)
    margin = None
    if found is not None and found.deviation is not None:
        margin = float(stdtrit(found.count - 1, 0.975)) * found.deviation / math.sqrt(found.count)
    return replace(row, difference=found, margin=margin)


def _classes_of(runs: Sequence[RunRow], field: str) -> str:
    """Return the number of classes that a mean over runs averages over; empty if it is not known."""
    counts = [count for run in runs if (count := getattr(run, field)) is not None]
    if not counts:
        return ""
    low, high, total = min(counts), max(counts), max(len(run.iou) for run in runs)
    return f"{low}/{total}" if low == high else f"{low} to {high}/{total}"


def _rank(row: SettingResult) -> tuple[bool, float, bool, float]:
    """Return the sort key: highest mean mIoU first, then lowest loss; settings without results last."""
    miou, loss = row.best_miou, row.val_loss
    return miou is None, -miou.mean if miou else 0.0, loss is None, loss.mean if loss else 0.0


def _columns(run: RunRow, compared: Sequence[str]) -> dict[str, Any]:
    return {key: run.config if key == "config" else run.settings.get(key) for key in compared}


def _row_of(sweep: SweepFolder, run: SweepRun) -> tuple[RunRow, RunReport | None]:
    """Return the row of a run, and its report if it has begun."""
    state = sweep.state_of(run)
    known: dict[str, Any] = {"config": run.config, "settings": run.settings, "reason": run.reason}
    try:
        report = read_run_report(sweep.folder_of(run.name).path, small_view())
    except (ConfigError, RunError):
        return RunRow(run.name, state, **known), None
    end = report.view.end
    if state == "failed" and end is not None:
        known["reason"] = run.reason or end.reason
    return replace(run_row(report), name=run.name, state=state, **known), report


def _are_folds(sweep: SweepFolder, info: SweepInfo) -> bool:
    """Return True if the configs of a sweep differ only in how they divide the data."""
    first = {run.config: run.name for run in reversed(info.runs)}
    try:
        differing = differing_settings([load_config(sweep.config_of(name)) for name in first.values()])
    except ConfigError:
        return False
    return differing.keys() <= {"name", *FOLD_KEYS, *info.axes}


def shown_value(value: Any) -> str:
    """Return a setting as text, as in YAML but without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def shown_settings(settings: Mapping[str, Any]) -> str:
    """Return a setting's columns as one line; `all runs` if nothing varies."""
    return ", ".join(f"{key} {shown_value(value)}" for key, value in settings.items()) or "all runs"
