"""A run for reports: the folded view of its events, its config, and its key figures, a row of `segapp compare`."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from segapp.config import RunConfig, load_config
from segapp.errors import ConfigError, RunError, without_secrets
from segapp.run.files import read_of_run
from segapp.run.folder import RunFolder, find_run
from segapp.run.state import State, read_tail
from segapp.view.history import LossHistory
from segapp.view.runs import run_state
from segapp.view.source import SeriesReader, fold_file
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
    series: dict[str, LossHistory] = field(default_factory=dict)
    """The values of numbers of the `step` events."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def terms(self) -> list[str]:
        """Names of the loss terms of the last step, at most 16."""
        step = self.view.step
        return [name for name in (step.terms or {} if step else {}) if f"terms.{name}" in self.series]

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
