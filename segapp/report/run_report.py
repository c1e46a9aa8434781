"""A run for reports: the folded view of its events, its config, and its key figures, a row of `segapp compare`."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segapp.config import RunConfig, load_config
from segapp.errors import ConfigError, RunError, without_secrets
from segapp.run.files import read_of_run
from segapp.run.folder import RunFolder, find_run
from segapp.run.state import State, run_state
from segapp.training.trackers import flat_settings
from segapp.view.history import LossHistory
from segapp.view.runs import RunSummary
from segapp.view.source import fold_file, series_of
from segapp.view.view import View


@dataclass
class RunReport:
    """Contents of one run."""

    folder: RunFolder
    state: State
    view: View
    config: RunConfig | None = None
    """Config at the start of the run; None if the file cannot be read."""
    config_text: str = ""

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.folder.name

    def series(self, field: str) -> LossHistory:
        """Return the values of a numeric field of the `step` events, read from the file."""
        return series_of(self.folder.events, field)

    @property
    def terms(self) -> list[str]:
        """Names of the loss terms of the last step, at most 16."""
        step = self.view.step
        return list(step.terms or ())[:16] if step is not None else []

    @property
    def class_notes(self) -> list[str]:
        """Sentences about classes in the training masks, each only once, although every start of a run writes them."""
        return list(dict.fromkeys(alert.message for alert in self.view.last_alerts if alert.kind == "classes"))

    @property
    def duration_s(self) -> float | None:
        """Time from the first start to the last event, including the time between a stop and a resume."""
        if self.view.first_start_s is None or self.view.last_s is None:
            return None
        return self.view.last_s - self.view.first_start_s


def read_run_report(run: str | Path, view: View | None = None) -> RunReport:
    """Read the events of a run into a view, by default one with the whole loss curve, and its config.

    Raises:
        ConfigError: there is no such run.
        RunError: the run has no events yet.
    """
    folder = find_run(run)
    report = RunReport(folder, run_state(folder.path), view or View())
    fold_file(report.view, folder.events)
    if report.view.start is None:
        raise without_events(folder)
    with contextlib.suppress(OSError):  # the config is optional in a report
        report.config_text = without_secrets(read_of_run(folder.config_yaml).decode(errors="backslashreplace"))
        report.config = read_config(folder)
    return report


def without_events(folder: RunFolder) -> RunError:
    """Return the error about a run that has no `run_start` yet."""
    return RunError(f"{folder.path} has no events yet: train it first")


def read_config(folder: RunFolder) -> RunConfig | None:
    """Return the config at the start of a run; None if the file cannot be read."""
    try:
        return load_config(folder.config_yaml)
    except ConfigError:
        return None


def differing_settings(configs: Sequence[RunConfig | None]) -> dict[str, list[Any]]:
    """Return the config keys whose values differ, with the value in each config; "?" if a config is missing."""
    flat = [flat_settings(config.model_dump(mode="json")) if config else {} for config in configs]
    found = {key: [values.get(key, "?") for values in flat] for key in sorted({key for each in flat for key in each})}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


@dataclass(frozen=True)
class RunRow:
    """Key figures of a run; None if a value is not known."""

    name: str
    state: str
    best_miou: float | None = None
    num_scored: int | None = None
    """Number of classes that `best_miou` averages over: the classes that have an IoU in `iou`."""
    best_epoch: int | None = None
    scores: dict[str, float | None] = field(default_factory=dict)
    """Scores of the best evaluation, by name."""
    last_loss: float | None = None
    last_val_loss: float | None = None
    """Loss of the last evaluation; None if it was not finite."""
    num_evaluations: int = 0
    epochs: int = 0
    steps: int = 0
    images_per_s: float | None = None
    duration_s: float | None = None
    num_params: int = 0
    peak_mib: float | None = None
    """Peak of the device with the highest peak."""
    iou: dict[str, float | None] = field(default_factory=dict)
    """IoU per class, from the best evaluation."""
    last_miou: float | None = None
    last_num_scored: int | None = None


def run_row(summary: RunSummary) -> RunRow:
    """Return the key figures of a run that has events."""
    shown, more = summary.shown, summary.more
    return RunRow(
        name=summary.folder.name,
        state=summary.state,
        best_miou=shown["best_miou"],
        num_scored=shown["best_num_scored"],
        best_epoch=shown["best_epoch"],
        scores=more["best_scores"],
        last_loss=shown["loss"],
        last_val_loss=shown["val_loss"],
        last_miou=shown["miou"],
        last_num_scored=shown["num_scored"],
        num_evaluations=more["num_evaluations"],
        epochs=shown["epoch"] or 0,
        steps=more["steps"],
        images_per_s=shown["images_per_s"],
        duration_s=more["last_s"] - more["first_start_s"],
        num_params=shown["num_params"],
        peak_mib=more["peak_mib"],
        iou=more["best_iou"],
    )
