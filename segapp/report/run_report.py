"""A run as a report tells it: what the screen folds out of the events, and the lists that only a report needs."""

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
from segapp.tui.state.view import View, fold_events

_BLOCK_BYTES = 8 << 20
_MAX_POINTS = 2000

_MAX_TERMS = 16


@dataclass
class Thinned:
    """Points of a long curve: every one at first, every second when there are too many, and so on."""

    points: list[tuple[int, float]] = field(default_factory=list)
    _stride: int = 1
    _seen: int = 0

    def add(self, step: int, value: float) -> None:
        """Takes the next point, or leaves it out."""
        if self._seen % self._stride == 0:
            self.points.append((step, value))
            if len(self.points) > 2 * _MAX_POINTS:
                self.points, self._stride = self.points[::2], self._stride * 2
        self._seen += 1

    def drop_after(self, step: int) -> None:
        """Takes back what a resumed training does again."""
        while self.points and self.points[-1][0] > step:
            self.points.pop()


@dataclass
class RunReport:
    """One run.

    Attributes:
        folder: where it lies.
        state: how it stands.
        view: its events as the screen knows them.
        config: as it was at the start; None where the file cannot be read.
        config_text: the file itself.
        lr: learning rate over steps.
        rate: images a second over steps.
        gpu0: what became of each wish for `gpu0_bsz`.
        alerts: in the order of time.
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
        """Of the folder."""
        return self.folder.name

    @property
    def duration_s(self) -> float | None:
        """From the first start to the last event, pauses and nights between two starts included."""
        if self.view.first_start_s is None or self.view.last_s is None:
            return None
        return self.view.last_s - self.view.first_start_s

    @property
    def peaks_mib(self) -> dict[tuple[int, ...], list[float | None]]:
        """Highest allocation of each device under each split."""
        return self.view.peaks_mib


def read_story(run: str | Path) -> RunReport:
    """Reads a run's events and config.

    Args:
        run: its name, or a path to its folder.

    Raises:
        ConfigError: there is no such run.
        RunError: it has not begun.
    """
    folder = find_run(run)
    story = RunReport(folder, run_state(folder.path))
    reader = EventReader(folder.events)
    while raw := reader.read_raw(_BLOCK_BYTES):
        fold_events(story.view, raw)
        for item in raw:
            _take(story, item)
    reader.close()
    if story.view.start is None:
        raise RunError(f"{folder.path} has no events yet: there is nothing to report; train it first")
    try:
        story.config_text = folder.config_yaml.read_text(encoding="utf-8", errors="backslashreplace")
        story.config = load_config(folder.config_yaml)
    except (OSError, ConfigError):
        pass  # a folder without its config still has a story
    return story


def _take(story: RunReport, raw: dict[str, Any]) -> None:
    kind = raw["type"]
    if kind == "step":
        for curve, name in ((story.lr, "lr"), (story.rate, "images_per_s")):
            if isinstance(raw.get(name), (int, float)) and isinstance(raw.get("step"), int):
                curve.add(raw["step"], float(raw[name]))
        terms = raw.get("terms")
        for name, value in list(terms.items())[:_MAX_TERMS] if isinstance(terms, dict) else ():
            if isinstance(value, (int, float)) and isinstance(raw.get("step"), int) and len(story.terms) < _MAX_TERMS:
                story.terms.setdefault(name, Thinned()).add(raw["step"], float(value))
    elif kind == "run_start" and isinstance(raw.get("resumed_from_step"), int):
        for curve in (story.lr, story.rate, *story.terms.values()):
            curve.drop_after(raw["resumed_from_step"])
    elif kind in ("gpu0_bsz", "alert"):
        try:
            event = parse_event(raw)
        except (ValueError, ValidationError):
            return
        if isinstance(event, Gpu0Bsz) and event.status != "pending":
            story.gpu0.append(event)
        elif isinstance(event, Alert):
            story.alerts.append(event)
