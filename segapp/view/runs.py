"""The runs of a folder: the summary of each for `segapp status` and `ls`, and the list that the TUI follows."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from segapp.errors import StorageError
from segapp.run.events import RunEnd
from segapp.run.folder import RunFolder, RunInfo, run_folders
from segapp.run.lock import ProcessId
from segapp.run.state import State, StateFacts, derive_state, read_facts
from segapp.scores import SCORES, count_scored
from segapp.view.history import LossHistory
from segapp.view.source import LiveSource, fold_file
from segapp.view.view import View

_NUM_POINTS = 2**10
"""Maximum number of loss points in a view whose curve is not drawn."""

_OOM_FIELDS = {"device", "phase", "step", "action", "path"}


@dataclass(frozen=True)
class RunSummary:
    """One run of `segapp ls`, of `segapp status`, or of the list of the TUI."""

    folder: RunFolder
    view: View
    facts: StateFacts
    info: RunInfo | None = None
    process: ProcessId | None = None
    """The process that holds the folder, else the one that created it."""

    @property
    def state(self) -> State:
        """The state of the run."""
        return derive_state(self.facts)

    @property
    def progress(self) -> str:
        """The epoch of all epochs: `3/20`, or `3/?` for a run with a fixed number of steps; `-` before the first."""
        epochs = self.view.start.epochs if self.view.start else None
        return "-" if self.view.epoch is None else f"{self.view.epoch}/{epochs or '?'}"

    def as_json(self) -> dict[str, Any]:
        """Return the fields of `segapp status --json` and `segapp ls --json`; None if unknown."""
        info, view, start, last, best = self.info, self.view, self.view.start, self.view.vals.last, self.view.best
        is_over = view.end is not None and self.facts.end_status is not None
        return {
            "name": self.folder.name,
            "path": str(self.folder.path),
            "state": self.state,
            "id": info.id if info else None,
            **_fields(self.process, "host", "pid"),
            "began_s": info.created_s if info else None,
            "age_s": self.facts.event_age_s,
            "phase": view.phase,
            "epoch": view.epoch,
            **_fields(start, "epochs"),
            "step": view.step.step if view.step else start.resumed_from_step if start else None,
            **_fields(start, "steps", "steps_per_epoch", "batch_size", "num_params"),
            "num_classes": (len(start.classes) or None) if start else None,
            "loss": view.loss.mean,  # None if no loss of `loss_epoch` was finite
            "loss_epoch": view.loss.epoch,
            "lr": view.lr,
            **_fields(view.step, "images_per_s", "data_wait_frac", "eta_epoch_s", "eta_run_s"),
            "gpu0_bsz": view.gpu0.value,
            "split": list(view.split) if view.split is not None else None,
            "val_epoch": last.epoch if last else None,
            "val_loss": last.loss if last else None,  # None if it was not finite
            **_fields(last, "miou"),
            "num_scored": count_scored(last.iou) if last else None,  # the classes of which `miou` is the mean
            **_fields(last, "pixel_accuracy"),
            "scores": {name: last.score(name) for name in SCORES} if last else {},
            "best_miou": best.miou if best else None,  # of the evaluations whose loss is finite
            "best_num_scored": count_scored(best.iou) if best else None,
            "best_epoch": best.epoch if best else None,
            "checkpoint": view.checkpoint.model_dump(include={"path", "epoch", "step"}) if view.checkpoint else None,
            "devices": [
                {**device.model_dump(), "machine": machine}
                for device, machine in zip_longest(view.devices, view.machines[: len(view.devices)])
            ],
            "pending": {command_id: answer.command for command_id, answer in view.pending.items()},
            "last_oom": view.oom.model_dump(include=_OOM_FIELDS) if view.oom else None,
            "num_alerts": view.num_alerts,
            "last_alert": view.last_alerts[-1].message if view.last_alerts else None,
            **_fields(view.end if is_over else None, "reason", "exit_code"),
        }


def small_view() -> View:
    """Return a view that is folded only for a summary, with a short loss curve."""
    return View(history=LossHistory(_NUM_POINTS))


def summarize(path: Path | str, now_s: float | None = None) -> RunSummary:
    """Return the summary of a run, from its events; of a run that is refused, only the reason."""
    folder, view = RunFolder(path), small_view()
    try:
        folder.check()
    except StorageError as error:
        view.end = RunEnd(status="failed", reason=str(error))
        return RunSummary(folder, view, StateFacts(end_status="failed"))
    fold_file(view, folder.events)
    return summary_of(view, folder, read_facts(path, now_s))


def list_runs(root: Path | str = "runs", now_s: float | None = None) -> list[RunSummary]:
    """Return the summary of every run in a folder, and of the runs of its sweeps, last started or resumed first."""
    return [summarize(run.path, now_s) for run in run_folders(root, with_sweeps=True)]


def summary_of(view: View, folder: RunFolder, facts: StateFacts) -> RunSummary:
    """Return the summary of a run from its folded events, its folder, and the facts of its state."""
    info = folder.read_info()
    return RunSummary(folder, view, facts, info, folder.read_holder() or (info.process if info else None))


def _fields(source: object | None, *names: str) -> dict[str, Any]:
    """Return fields of an event or a file by their names; None for each if it does not exist."""
    return {name: None if source is None else getattr(source, name) for name in names}


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
