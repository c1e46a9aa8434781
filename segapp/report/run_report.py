"""Contents of a run for the report: the folded view of its events, and the lists that only the report needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from segapp.config import RunConfig, load_config
from segapp.errors import ConfigError, RunError
from segapp.run.events import Alert, EventReader, Gpu0Bsz, parse_event
from segapp.run.folder import RunFolder, find_run
from segapp.run.state import State, run_state
from segapp.view.view import View, fold_events

_BLOCK_BYTES = 8 << 20
_MAX_POINTS = 2000

_MAX_TERMS = 16


@dataclass
class Thinned:
    """Points of a curve; when there are too many, every second one is dropped and the stride doubles."""

    points: list[tuple[int, float]] = field(default_factory=list)
    _stride: int = 1
    _seen: int = 0

    def add(self, step: int, value: float) -> None:
        """Add the next point, or skip it by the stride."""
        if self._seen % self._stride == 0:
            self.points.append((step, value))
            if len(self.points) > 2 * _MAX_POINTS:
                self.points, self._stride = self.points[::2], self._stride * 2
        self._seen += 1

    def drop_after(self, step: int) -> None:
        """Drop the points after a step, which a resumed training repeats."""
        while self.points and self.points[-1][0] > step:
            self.points.pop()


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
        terms: distillation terms over steps.
        gpu0: changes of `gpu0_bsz` with their outcomes.
        alerts: in order of time.
    """

    folder: RunFolder
    state: State
    view: View = field(default_factory=View)
    config: RunConfig | None = None
    config_text: str = ""
    lr: Thinned = field(default_factory=Thinned)
    rate: Thinned = field(default_factory=Thinned)
    terms: dict[str, Thinned] = field(default_factory=dict)
    gpu0: list[Gpu0Bsz] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.folder.name

    @property
    def class_notes(self) -> list[str]:
        """What the training masks do not teach, each sentence once: every start of a run says it again."""
        return list(dict.fromkeys(alert.message for alert in self.alerts if alert.kind == "classes"))

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
    reader = EventReader(folder.events)
    while raw := reader.read_raw(_BLOCK_BYTES):
        fold_events(report.view, raw)
        for item in raw:
            _add(report, item)
    reader.close()
    if report.view.start is None:
        raise RunError(f"{folder.path} has no events yet: train it first")
    try:
        report.config_text = folder.config_yaml.read_text(encoding="utf-8", errors="backslashreplace")
        report.config = load_config(folder.config_yaml)
    except (OSError, ConfigError):
        pass  # the config is optional in a report
    return report


def _add(report: RunReport, raw: dict[str, Any]) -> None:
    kind = raw["type"]
    if kind == "step":
        for curve, name in ((report.lr, "lr"), (report.rate, "images_per_s")):
            if isinstance(raw.get(name), (int, float)) and isinstance(raw.get("step"), int):
                curve.add(raw["step"], float(raw[name]))
        terms = raw.get("terms")
        for name, value in list(terms.items())[:_MAX_TERMS] if isinstance(terms, dict) else ():
            is_shown = name in report.terms or len(report.terms) < _MAX_TERMS
            if isinstance(value, (int, float)) and isinstance(raw.get("step"), int) and is_shown:
                report.terms.setdefault(name, Thinned()).add(raw["step"], float(value))
    elif kind == "run_start" and isinstance(raw.get("resumed_from_step"), int):
        for curve in (report.lr, report.rate, *report.terms.values()):
            curve.drop_after(raw["resumed_from_step"])
    elif kind in ("gpu0_bsz", "alert"):
        try:
            event = parse_event(raw)
        except (ValueError, ValidationError):
            return
        if isinstance(event, Gpu0Bsz) and event.status != "pending":
            report.gpu0.append(event)
        elif isinstance(event, Alert):
            report.alerts.append(event)
