"""Contents of a run for the report: the folded view of its events, and the lists that only the report needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from segapp.config import RunConfig, load_config
from segapp.errors import ConfigError, RunError
from segapp.run.folder import RunFolder, find_run
from segapp.run.state import State, run_state
from segapp.view.history import History
from segapp.view.source import fold_file, series_of
from segapp.view.view import View

_MAX_TERMS = 16


@dataclass
class RunReport:
    """Contents of one run.

    Attributes:
        folder: the run folder.
        state: live, finished, failed and so on.
        view: its folded events.
        config: at the start of the run; None if the file cannot be read.
        config_text: content of the config file.
        lr: learning rate over steps.
        rate: images per second over steps.
        terms: terms of the loss over steps, at most 16.
    """

    folder: RunFolder
    state: State
    view: View = field(default_factory=View)
    config: RunConfig | None = None
    config_text: str = ""
    lr: History = field(default_factory=History)
    rate: History = field(default_factory=History)
    terms: dict[str, History] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.folder.name

    @property
    def class_notes(self) -> list[str]:
        """What the training masks do not teach, each sentence once: every start of a run says it again."""
        return list(dict.fromkeys(alert.message for alert in self.view.last_alerts if alert.kind == "classes"))

    @property
    def duration_s(self) -> float | None:
        """Time from the first start to the last event, including the time between a stop and a resume."""
        if self.view.first_start_s is None or self.view.last_s is None:
            return None
        return self.view.last_s - self.view.first_start_s

    @property
    def peaks_mib(self) -> dict[tuple[int, ...], list[float | None]]:
        """Peak of each device by split."""
        return self.view.peaks_mib


def read_run_report(run: str | Path) -> RunReport:
    """Read the events and the config of a run.

    Raises:
        ConfigError: there is no such run.
        RunError: the run has no events yet.
    """
    folder = find_run(run)
    report = RunReport(folder, run_state(folder.path))
    fold_file(report.view, folder.events)
    if report.view.start is None:
        raise RunError(f"{folder.path} has no events yet: train it first")
    report.lr, report.rate = series_of(folder.events, "lr"), series_of(folder.events, "images_per_s")
    terms = [name.removeprefix("terms.") for name in report.view.recent if name.startswith("terms.")][:_MAX_TERMS]
    report.terms = {name: series_of(folder.events, f"terms.{name}") for name in terms}
    try:
        report.config_text = folder.config_yaml.read_text(encoding="utf-8", errors="backslashreplace")
        report.config = load_config(folder.config_yaml)
    except (OSError, ConfigError):
        pass  # the config is optional in a report
    return report
