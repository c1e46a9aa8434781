"""The runs of a folder: the summary of each for `segapp status` and `ls`, and the list that the TUI follows."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from segapp.errors import StorageError
from segapp.run.folder import RunFolder, run_folders
from segapp.run.state import State, StateFacts, derive_state, read_facts
from segapp.scores import SCORES, count_scored
from segapp.view.history import LossHistory
from segapp.view.source import LiveSource, fold_file
from segapp.view.view import View

_NUM_POINTS = 2**10
"""Maximum number of loss points in a view whose curve is not drawn."""


@dataclass
class RunSummary:
    """The fields of `segapp status --json` and `segapp ls` for one run; None if unknown."""

    name: str
    path: str
    state: State
    id: str | None = None
    host: str | None = None
    pid: int | None = None
    began_s: float | None = None
    age_s: float | None = None
    phase: str | None = None
    """Activity of the trainer: start, train, eval, save, paused."""
    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    steps: int | None = None
    """Steps of the whole run, if its length is given in steps."""
    steps_per_epoch: int | None = None
    batch_size: int | None = None
    num_params: int | None = None
    num_classes: int | None = None
    loss: float | None = None
    """Mean training loss of the epoch `loss_epoch`, see `EpochLoss`; None if all its losses were non-finite."""
    loss_epoch: int | None = None
    """The last epoch with a `step` event."""
    lr: float | None = None
    images_per_s: float | None = None
    data_wait_frac: float | None = None
    eta_epoch_s: float | None = None
    eta_run_s: float | None = None
    gpu0_bsz: int | None = None
    split: list[int] | None = None
    val_epoch: int | None = None
    val_loss: float | None = None
    """Loss of the last evaluation; None if it was not finite."""
    miou: float | None = None
    num_scored: int | None = None
    """Number of classes that `miou` averages over: those in the targets or the predictions."""
    pixel_accuracy: float | None = None
    scores: dict[str, float | None] = field(default_factory=dict)
    """All scores of the last evaluation: name, as in `segapp.scores.SCORES`, -> value."""
    best_miou: float | None = None
    """The highest mIoU of an evaluation whose loss is finite."""
    best_num_scored: int | None = None
    best_epoch: int | None = None
    checkpoint: dict[str, Any] | None = None
    """The last committed checkpoint: path, epoch, step."""
    devices: list[dict[str, Any]] = field(default_factory=list)
    """The last sample of each device: used_mib, total_mib, utilization and so on; its machine if there are several."""
    pending: dict[str, str] = field(default_factory=dict)
    """Accepted commands that are not yet applied: id -> text."""
    last_oom: dict[str, Any] | None = None
    """The last out-of-memory error: device, phase, action, and the path of its report."""
    num_alerts: int = 0
    last_alert: str | None = None
    reason: str | None = None
    exit_code: int | None = None


def small_view() -> View:
    """Return a view that is folded only for a summary, with a short loss curve."""
    return View(history=LossHistory(_NUM_POINTS))


def summarize(path: Path | str, now_s: float | None = None) -> RunSummary:
    """Return the summary of a run, from its events; of a run that is refused, only the reason."""
    folder, view = RunFolder(path), small_view()
    try:
        folder.check()
    except StorageError as error:
        return RunSummary(folder.name, str(folder.path), "failed", reason=str(error))
    fold_file(view, folder.events)
    return summary_of(view, folder, read_facts(path, now_s))


def list_runs(root: Path | str = "runs", now_s: float | None = None) -> list[RunSummary]:
    """Return the summary of every run in a folder, and of the runs of its sweeps, last started or resumed first."""
    return [summarize(run.path, now_s) for run in run_folders(root, with_sweeps=True)]


def summary_of(view: View, folder: RunFolder, facts: StateFacts) -> RunSummary:
    """Return the summary of a run from its folded events, its folder, and the facts of its state."""
    info, start, last, best = folder.read_info(), view.start, view.vals[-1] if view.vals else None, view.best
    is_over = view.end is not None and facts.end_status is not None
    oom = view.oom.model_dump(include={"device", "phase", "step", "action", "path"}) if view.oom else None
    return RunSummary(
        folder.name,
        str(folder.path),
        derive_state(facts),
        id=info.id if info else None,
        **_fields(folder.read_holder() or (info.process if info else None), "host", "pid"),
        began_s=info.created_s if info else None,
        age_s=facts.event_age_s,
        phase=view.phase,
        epoch=view.epoch,
        **_fields(start, "epochs", "steps", "steps_per_epoch", "batch_size", "num_params"),
        num_classes=(len(start.classes) or None) if start else None,
        loss=view.loss.mean,
        loss_epoch=view.loss.epoch,
        lr=view.lr,
        **{"step": start.resumed_from_step if start else None}
        | _fields(view.step, "step", "images_per_s", "data_wait_frac", "eta_epoch_s", "eta_run_s"),
        gpu0_bsz=view.gpu0.value,
        split=list(view.split) if view.split is not None else None,
        val_epoch=last.epoch if last else None,
        val_loss=last.loss if last else None,
        **_fields(last, "miou", "pixel_accuracy"),
        num_scored=count_scored(last.iou) if last else None,
        scores={name: last.score(name) for name in SCORES} if last else {},
        best_miou=best.miou if best else None,
        best_num_scored=count_scored(best.iou) if best else None,
        best_epoch=best.epoch if best else None,
        checkpoint=view.checkpoint.model_dump(include={"path", "epoch", "step"}) if view.checkpoint else None,
        devices=[
            {**device.model_dump(), "machine": machine}
            for device, machine in zip_longest(view.devices, view.machines[: len(view.devices)])
        ],
        pending={command_id: answer.command for command_id, answer in view.pending.items()},
        last_oom=oom,
        num_alerts=view.num_alerts,
        last_alert=view.last_alerts[-1].message if view.last_alerts else None,
        **_fields(view.end if is_over else None, "reason", "exit_code"),
    )


def _fields(source: object | None, *names: str) -> dict[str, Any]:
    """Return fields of an event or a file by their names; none if it does not exist."""
    return {name: getattr(source, name) for name in names} if source is not None else {}


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
