"""The runs below a folder, followed while they train: one summary each, and the course of their mIoU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from segapp.run.events import EventReader
from segapp.run.folder import RunFolder, run_folders
from segapp.run.state import FRESH_S, StateFacts, is_trainer_alive
from segapp.view.summary import RunSummary, small_view, summary_of
from segapp.view.view import View, fold_events

_SLICE_BYTES = 2**20
_LIVENESS_S = 2.0

SORTS = ("newest", "name", "state", "mIoU", "sweep")


@dataclass
class FollowedRun:
    """One run: its events are folded as they are read."""

    folder: RunFolder
    reader: EventReader
    view: View = field(default_factory=small_view)
    summary: RunSummary = field(init=False)
    is_alive: bool | None = None
    checked_s: float = -1e9
    generation: int = 0

    @property
    def sweep(self) -> str:
        """Name of the sweep that the run belongs to; empty for a run of its own."""
        return self.folder.name.rpartition("/")[0]

    @property
    def mious(self) -> list[float]:
        """The mIoU of each evaluation that has one."""
        values = self.view.vals.values("miou")
        return [value for value in values.tolist() if not math.isnan(value)]

    @property
    def devices(self) -> str:
        """The devices as text: `4 GPU`, `1 CPU`."""
        names = [device.device or "" for device in self.view.devices]
        return f"{len(names)} {'CPU' if names[0].startswith('cpu') else 'GPU'}" if names else "-"


class RunList:
    """Follows every run below a folder, those of sweeps too.

    Args:
        root: The folder.
        clock: Returns Unix seconds.
    """

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self.root = root
        self.runs: list[FollowedRun] = []
        """The last one to begin or resume first."""
        self._clock = clock

    def poll(self, budget_s: float = 0.05) -> bool:
        """Find new runs and read on, for a limited time; return True if more is waiting."""
        known = {run.folder.path: run for run in self.runs}
        self.runs = [
            known.get(folder.path) or FollowedRun(folder, EventReader(folder.events))
            for folder in run_folders(self.root, with_sweeps=True)
        ]
        deadline = time.monotonic() + budget_s
        is_behind = False
        for run in self.runs:
            while self._read(run):
                if time.monotonic() > deadline:
                    is_behind = True
                    break
        for run in self.runs:
            self._judge(run)
        return is_behind

    def _read(self, run: FollowedRun) -> bool:
        """Fold a slice of a run's events; return True if more is waiting."""
        items = run.reader.read_skimmed(_SLICE_BYTES)
        if run.reader.generation != run.generation:
            run.generation = run.reader.generation
            run.view = small_view()
        fold_events(run.view, items)
        return run.reader.num_bytes_left > 0 and bool(items)

    def _judge(self, run: FollowedRun) -> None:
        now_s = self._clock()
        if abs(now_s - run.checked_s) >= _LIVENESS_S:
            run.checked_s = now_s
            run.is_alive = is_trainer_alive(run.folder)
        view = run.view
        facts = StateFacts(
            end_status=view.end.status if view.end is not None else None,
            is_trainer_alive=run.is_alive,
            event_age_s=None if view.last_s is None else max(0.0, now_s - view.last_s),
            step_age_s=None if view.last_step_s is None else max(0.0, now_s - view.last_step_s),
            step_interval_s=FRESH_S / 5,
        )
        run.summary = summary_of(view, run.folder, facts)


def sorted_runs(runs: list[FollowedRun], sort: str, wanted: str = "") -> list[FollowedRun]:
    """Return the runs whose names, with those of their sweeps, contain a text, in one of the orders of `SORTS`."""
    found = [run for run in runs if wanted.casefold() in run.folder.name.casefold()]
    if sort == "name":
        return sorted(found, key=lambda run: run.folder.name.casefold())
    if sort == "sweep":
        return sorted(found, key=lambda run: (not run.sweep, run.folder.name.casefold()))
    if sort == "state":
        order = ("live", "busy", "stale", "lost", "crashed", "failed", "stopped", "finished")
        return sorted(found, key=lambda run: order.index(run.summary.state))
    if sort == "mIoU":
        return sorted(found, key=lambda run: -(run.summary.best_miou or 0.0))
    return found
