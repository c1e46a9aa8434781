"""The runs in a folder, followed while they train: a summary of each, and the history of its mIoU."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from segapp.run.folder import run_folders
from segapp.run.state import StateFacts
from segapp.view.source import LiveSource
from segapp.view.summary import RunSummary, small_view, summary_of
from segapp.view.view import View

SORTS = ("newest", "name", "state", "mIoU", "sweep")


class FollowedRun(LiveSource):
    """One run of the list, with a short loss curve and its summary."""

    full_bytes = 0
    summary: RunSummary

    def new_view(self) -> View:
        """Return a view that is only used for a summary."""
        return small_view()

    def facts(self) -> StateFacts:
        """Return the facts of the state, without the interval between steps, most of which are skimmed."""
        return replace(super().facts(), step_interval_s=0.0)

    def poll(self, budget_s: float = 0.0) -> bool:
        """Read new events, like `LiveSource.poll`, and update the summary."""
        is_behind = super().poll(budget_s)
        self.summary = summary_of(self.view, self.folder, self.facts())
        return is_behind

    @property
    def sweep(self) -> str:
        """Name of the sweep that the run belongs to; empty for a run without a sweep."""
        return self.folder.name.rpartition("/")[0]

    @property
    def mious(self) -> list[float]:
        """The mIoU of each evaluation that has one."""
        return [value for value in self.view.vals.values("miou").tolist() if not math.isnan(value)]

    @property
    def devices(self) -> str:
        """The devices as text: `4 GPU`, `1 CPU`."""
        names = [device.device or "" for device in self.view.devices]
        return f"{len(names)} {'CPU' if names[0].startswith('cpu') else 'GPU'}" if names else "-"


class RunList:
    """Follows every run below a folder and its sweeps; the clock returns Unix seconds."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self.root = root
        self.runs: list[FollowedRun] = []
        """The runs, last started or resumed first."""
        self._clock = clock

    def poll(self, budget_s: float = 0.05) -> bool:
        """Find new runs and read on, for a limited time; return True if more is waiting."""
        known = {run.folder.path: run for run in self.runs}
        self.runs = [
            known.get(folder.path) or FollowedRun(folder, self._clock)
            for folder in run_folders(self.root, with_sweeps=True)
        ]
        deadline = time.monotonic() + budget_s
        is_behind = [run.poll(deadline - time.monotonic()) for run in self.runs]
        return any(is_behind)


def sorted_runs(runs: list[FollowedRun], sort: str, wanted: str = "") -> list[FollowedRun]:
    """Return the runs whose names, or the names of their sweeps, contain a text, in one of the orders of `SORTS`."""
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
