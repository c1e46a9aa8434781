"""The runs of a folder: the summary of each for `status`, `ls` and `compare`, and the list that the TUI follows.

A summary of the events of a run is kept in its `summary.json`, so the events of a run at rest are read only once. The
summary is derived from the events: it is used only if this user made it from the same event file and it is undamaged.
Otherwise, the events are read.
"""

import contextlib
import hashlib
import json
import math
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from segapp.errors import ConfigError, StorageError
from segapp.run.events import RunEnd
from segapp.run.files import read_of_run, write_atomic
from segapp.run.folder import RunFolder, last_start_s, run_folders, run_paths
from segapp.run.state import (
    OVER,
    State,
    StateFacts,
    Word,
    derive_state,
    event_age_s,
    is_trainer_alive,
    process_of,
    read_tail,
    starting_since,
    word_of,
)
from segapp.scores import SCORES, Score, count_scored, score_named, scored_of, with_count
from segapp.view.history import LossHistory
from segapp.view.plot import class_iou
from segapp.view.source import LiveSource, fold_file
from segapp.view.view import EventFold, View
from segapp.view.wording import chosen

_WITHOUT_EFFECT = ("seed", "log.", "checkpoint.", "data.workers", "data.cache", "data.root")
"""Beginnings of the config keys that do not change the results of a run."""

_NUM_POINTS = 64
_SHOWN_FIGURES = (
    *("monitor", "best_score", "best_over", "best_miou", "best_num_scored", "best_epoch"),
    *("num_classes", "num_params", "images_per_s"),
)
_OOM_FIELDS = {"device", "phase", "step", "action", "path"}

_VERSION = 8
"""Increase it if `facts_of` or the fold changes, so that summaries of an earlier version are not used."""

SECOND_LOOK_S = 2.0
"""Time after which a run that seems lost is looked at again."""

_SETTLED_S = 2.0
"""Events that are younger are not kept: a file system may give two writes within this time the same timestamp."""


@dataclass(frozen=True)
class RunSummary:
    """One run of `segapp ls`, of `segapp status`, of `segapp compare`, or of the list of the TUI."""

    folder: RunFolder
    shown: dict[str, Any]
    """What the events say, as in `segapp status --json`."""
    figures: dict[str, Any]
    """Key figures of the run in a comparison."""
    times: dict[str, Any]
    """The end of the run, and the times that its state depends on."""
    curves: dict[str, list[float | None]]
    """`epoch`, `miou` and `loss` of at most `_NUM_POINTS` evaluations."""
    facts: StateFacts
    settings: dict[str, Any] = field(default_factory=dict)
    """`read_settings` of the run."""

    @property
    def state(self) -> State:
        return derive_state(self.facts)

    @property
    def word(self) -> Word:
        return word_of(self.facts)

    @property
    def progress(self) -> str:
        """The epoch of all epochs: `3/20`, or `3/?` for a run with a fixed number of steps; `-` before the first."""
        epoch = self.shown["epoch"]
        return "-" if epoch is None else f"{epoch}/{self.shown['epochs'] or '?'}"

    def as_json(self) -> dict[str, Any]:
        """Return the fields of `segapp status --json` and `segapp ls --json`; None if unknown."""
        info = self.folder.read_info()
        process = process_of(self.folder)
        is_over = self.facts.end_status == self.state
        return {
            "name": self.folder.name,
            "path": str(self.folder.path),
            "state": self.state,
            "id": info.id if info else None,
            **_fields(process, "host", "pid"),
            "began_s": info.created_s if info else None,
            **dict.fromkeys(("weights", "bn_momentum")),
            **chosen(self.settings),
            "age_s": self.facts.event_age_s,
            **self.shown,
            **(dict.fromkeys(("eta_epoch_s", "eta_run_s")) if self.word in OVER else {}),
            "reason": self.times["reason"] if is_over else None,
            "exit_code": self.times["exit_code"] if is_over else None,
        }


def facts_of(view: View) -> dict[str, dict[str, Any]]:
    """Return the facts of a view for a summary, as JSON: the fields of `RunSummary` from `shown` to `curves`."""
    end, shown = view.end, _shown_of(view)
    times = {
        **_fields(end, "reason", "exit_code"),
        "end_status": end.status if end else None,
        **_fields(view.start, "acquired_s", "resumed_from_step"),
        "has_started": view.start is not None,
        "is_paused": view.is_paused,
        "last_s": view.last_s,
        "last_step_s": view.moved_s,
        "step_interval_s": view.step_interval_s,
    }
    points = view.vals.values("epoch"), view.vals.values("miou"), view.vals.values("loss")
    every = -(-len(view.vals) // _NUM_POINTS) or 1
    kept = ([None if math.isnan(value) else value for value in values[::-every][::-1].tolist()] for values in points)
    curves = dict(zip(("epoch", "miou", "loss"), kept, strict=True))
    return {"shown": shown, "figures": _figures_of(view, shown), "times": times, "curves": curves}


def _shown_of(view: View) -> dict[str, Any]:
    start, step, last, best = view.start, view.step, view.vals.last, view.best
    over = scored_of(view.monitor.name, best.iou) if best else None
    return {
        "phase": view.phase,
        "epoch": view.epoch,
        **_fields(start, "epochs"),
        "step": view.at_step,
        **_fields(start, "steps", "steps_per_epoch", "batch_size", "num_params"),
        "num_classes": (len(start.classes) or None) if start else None,
        "loss": view.loss.mean,  # None if no loss of `loss_epoch` was finite
        "loss_epoch": view.loss.epoch,
        "lr": view.lr,
        **_fields(step, "images_per_s", "data_wait_frac", "eta_epoch_s", "eta_run_s"),
        "gpu0_bsz": view.gpu0.value,
        "split": list(view.split) if view.split is not None else None,
        "val_epoch": last.epoch if last else None,
        "val_loss": last.loss if last else None,  # None if it was not finite
        **_fields(last, "miou"),
        "num_scored": count_scored(last.iou) if last else None,  # the classes of which `miou` is the mean
        "num_scored_foreground": count_scored(last.iou[1:]) if last and start and start.foreground else None,
        **_fields(last, "pixel_accuracy"),
        "scores": {name: last.score(name) for name in SCORES} if last else {},
        "monitor": view.monitor.name if start else None,
        "best_score": view.monitored(best) if best else None,  # what `monitor` names, of the best evaluation
        "best_over": list(over) if over else None,  # its classes with an IoU and in all, if it is a mean
        "best_miou": best.miou if best else None,
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
    }


def _figures_of(view: View, shown: Mapping[str, Any]) -> dict[str, Any]:
    best = view.best
    peaks = [peak for split in view.peaks_mib.values() for peak in split if peak is not None]
    return {
        **{name: shown[name] for name in _SHOWN_FIGURES},
        "num_scored": shown["best_num_scored"],  # the classes that have an IoU in `iou`
        "scores": {name: best.score(name) for name in SCORES} if best else {},
        "last_loss": shown["loss"],
        "last_val_loss": shown["val_loss"],
        "num_evaluations": len(view.vals),
        "epochs": view.epoch or 0,
        "steps": view.at_step or 0,
        "duration_s": None if view.first_start_s is None or view.last_s is None else view.last_s - view.first_start_s,
        "peak_mib": max(peaks, default=None),  # of the device with the highest peak
        "iou": {name: class_iou(best, i) for i, name in enumerate(view.start.classes if view.start else ())},
        "last_miou": shown["miou"],
        "last_num_scored": shown["num_scored"],
    }


class Ranking:
    """The score that ranks runs: what all of them name in `checkpoint.monitor`, mIoU if they name different ones."""

    def __init__(self, runs: Iterable[Mapping[str, Any]]) -> None:
        self._names = sorted({facts["monitor"] for facts in runs if facts["monitor"] is not None})
        self.score: Score = score_named(self._names[0] if len(self._names) == 1 else "miou")
        self._is_monitored = len(self._names) == 1

    @property
    def note(self) -> str | None:
        if len(self._names) < 2:
            return None
        return f"The runs name different scores in checkpoint.monitor ({', '.join(self._names)}): mIoU ranks them."

    def value(self, facts: Mapping[str, Any]) -> float | None:
        value: float | None = facts["best_score" if self._is_monitored else "best_miou"]
        return value

    def text(self, facts: Mapping[str, Any], shown: str) -> str:
        """Return the shown score of a run, with the number of its classes if it is a mean over some."""
        over = facts["best_over"] if self._is_monitored else (facts["best_num_scored"], facts["num_classes"])
        return shown if over is None else with_count(shown, *over)

    def order(self, value: float) -> float:
        """Return a number that is lower for a better value."""
        return -value if self.score.larger_is_better else value


def _fields(source: object | None, *names: str) -> dict[str, Any]:
    return {name: None if source is None else getattr(source, name) for name in names}


def read_settings(folder: RunFolder) -> dict[str, Any]:
    """Return the config of a run as dotted keys and values, without its name; nothing if it cannot be read."""
    from segapp.config.values import flat_settings  # takes 0.1 s
    from segapp.config.yaml_reader import parse_yaml

    with contextlib.suppress(OSError, ConfigError):
        raw, _ = parse_yaml(read_of_run(folder.config_yaml).decode(errors="backslashreplace"))
        settings = flat_settings(raw) if isinstance(raw, dict) else {}
        return {key: value for key, value in settings.items() if key != "name"}
    return {}


def differing_settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the config keys whose values differ, with the value in each config; "?" if it is missing.

    The most telling keys come first: with more values that are not the most frequent one. Keys that do not change
    results, and the seed, come last.
    """
    keys = dict.fromkeys(key for each in settings for key in each)
    rows = {key: [each.get(key, "?") for each in settings] for key in keys}
    most = {
        key: max(Counter(map(repr, values)).values())
        for key, values in rows.items()
        if values.count(values[0]) < len(values)
    }
    order = sorted(most, key=lambda key: (key.startswith(_WITHOUT_EFFECT), most[key], not key.endswith(".name")))
    return {key: rows[key] for key in order}


def small_view() -> View:
    """Return a view that is folded only for a summary, without a loss curve."""
    return View(history=LossHistory(0))


def summarize(path: Path | str, now_s: float | None = None) -> RunSummary:
    """Return the summary of a run, from its events; of a run that is refused, only the reason."""
    folder = RunFolder(path)
    try:
        folder.check()
    except StorageError as error:
        view = View(end=RunEnd(status="failed", reason=str(error)))
        return RunSummary(folder, **facts_of(view), facts=StateFacts(end_status="failed"))
    found = read_kept(folder)
    if found is None:
        view, before = small_view(), identity_of(folder.events)
        fold_file(view, folder.events)
        found = facts_of(view) | {"settings": read_settings(folder)}
        keep(folder, found, before)
    return summary_of(folder, found, time.time() if now_s is None else now_s)


def run_state(path: Path | str, now_s: float | None = None) -> State:
    """Return the state of a run; reads only the end of its events."""
    folder, view = RunFolder(path), small_view()
    EventFold(view).add(read_tail(folder.events))
    return summary_of(folder, facts_of(view), time.time() if now_s is None else now_s).state


def list_runs(root: Path | str = "runs", now_s: float | None = None) -> list[RunSummary]:
    """Return the summary of every run in a folder, and of the runs of its sweeps, last started or resumed first."""
    return [summarize(run.path, now_s) for run in run_folders(root, with_sweeps=True)]


def looked_at_twice(summaries: Sequence[RunSummary]) -> list[RunSummary]:
    """Return summaries in which a run is lost only if it writes nothing for `SECOND_LOOK_S`.

    The age of its last event is a difference to the clock of another machine.
    """
    lost = {summary.folder.path: identity_of(summary.folder.events) for summary in summaries if summary.state == "lost"}
    if lost:
        time.sleep(SECOND_LOOK_S)

    def again(summary: RunSummary) -> RunSummary:
        events = summary.folder.events
        if summary.folder.path not in lost or lost[summary.folder.path] == identity_of(events):
            return summary
        newest = summarize(summary.folder.path)
        return summarize(summary.folder.path, newest.times["last_s"])

    return [again(summary) for summary in summaries]


def summary_of(folder: RunFolder, found: dict[str, dict[str, Any]], now_s: float) -> RunSummary:
    """Return the summary of a run from `facts_of` its events, its folder, and the present time."""
    times = found["times"]
    last_s, step_s = times["last_s"], times["last_step_s"]
    is_alive = is_trainer_alive(folder)
    age_s = event_age_s(folder.events, last_s, is_alive, now_s)
    is_starting = starting_since(process_of(folder), is_alive, times["acquired_s"]) is not None
    facts = StateFacts(
        end_status=times["end_status"],
        is_starting=is_starting,
        is_trainer_alive=is_alive,
        event_age_s=age_s,
        step_age_s=None if step_s is None or age_s is None else age_s + max(0.0, last_s - step_s),
        step_interval_s=times["step_interval_s"],
        is_paused=times["is_paused"],
        is_resumed=times["has_started"] and (is_starting or times["resumed_from_step"] is not None),
    )
    return RunSummary(folder, **found, facts=facts)


def identity_of(path: Path | str) -> list[int] | None:
    """Return numbers that differ if a file was changed or replaced; None if there is no file."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return [_VERSION, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]


def read_kept(folder: RunFolder) -> dict[str, Any] | None:
    """Return the kept `facts_of` a run; None if there are none that this user made from the present events."""
    with contextlib.suppress(OSError, ValueError):
        digest, _, text = read_of_run(folder.summary).partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() == digest and folder.summary.stat().st_uid == os.geteuid():
            kept: dict[str, Any] = from_json(text)
            return kept["found"] if kept["identity"] == identity_of(folder.events) else None
    return None


def keep(folder: RunFolder, found: dict[str, Any], identity: list[int] | None) -> None:
    """Keep `facts_of` the events of this identity, if they are at rest and this user owns the folder and may write."""
    with contextlib.suppress(OSError, ValueError):
        place = os.stat(folder.path)
        if place.st_uid != os.geteuid() or not place.st_mode & stat.S_IWUSR or identity is None:
            return
        if time.time() - max(identity[-2:]) / 1e9 > _SETTLED_S:
            text = json.dumps({"identity": identity, "found": found}, allow_nan=False).encode()
            digest = hashlib.sha256(text).hexdigest().encode()
            write_atomic(folder.summary, digest + b"\n" + text, is_derived=True)


_NOTHING = facts_of(View())
_OPEN = ("live", "busy", "stale", "lost")
"""States that change without a change of a file."""


class _SkimmedSource(LiveSource):
    """The events of a run of the list, without a loss curve."""

    full_bytes = 0

    def new_view(self) -> View:
        return small_view()


class FollowedRun:
    """One run of the list: its summary, and its events as long as they are read or the run may train."""

    began_s = 0.0
    """Last start or resume, Unix seconds."""
    is_read = False
    """False until the events have been read; before, the summary is empty."""
    is_behind = True
    """True if the summary is older than the files."""

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        self.folder = RunFolder(path)
        self.name = self.folder.name
        self.summary = RunSummary(self.folder, **_NOTHING, facts=StateFacts())
        self._clock = clock
        self._files = str(self.folder.events), str(self.folder.lock)
        self._seen: tuple[object, ...] = ()
        self._source: LiveSource | None = None
        self._identity: list[int] | None = None
        self._settings: dict[str, Any] = {}

    @property
    def sweep(self) -> str:
        """Name of the sweep that the run belongs to; empty for a run without a sweep."""
        return self.name.rpartition("/")[0]

    @property
    def is_followed(self) -> bool:
        return self.is_behind or self._source is not None

    @property
    def age_s(self) -> float | None:
        """Time since the last event; None if it is unknown.

        Without a trainer it is the age at the last full minute, so that the rows of a list are drawn again together;
        the first minute is counted in seconds.
        """
        last_s: float | None = self.summary.times["last_s"]
        if self._source is not None or last_s is None:
            return self.summary.facts.event_age_s
        now_s = self._clock()
        return max(0.0, now_s // 60 * 60 - last_s, min(now_s - last_s, 60.0))

    @property
    def devices(self) -> str:
        names = [device["device"] or "" for device in self.summary.shown["devices"]]
        return f"{len(names)} {'CPU' if names[0].startswith('cpu') else 'GPU'}" if names else "-"

    def look(self) -> None:
        """Find out if the files have changed, without reading them."""
        seen = tuple(map(identity_of, self._files))
        if seen != self._seen:
            self._seen, self.is_behind, self.began_s = seen, True, last_start_s(self.folder.path)
        elif self.summary.state in _OPEN:
            self.is_behind = True  # it may have ended without a trace

    def poll(self, budget_s: float = 0.0) -> None:
        """Read new events for a limited time; update the summary when they have been read."""
        if self._source is None and (kept := read_kept(self.folder)) is not None:
            summary = summary_of(self.folder, kept, self._clock())
            if summary.state not in _OPEN:  # else the ages count from what arrives, by no other machine's clock
                self.summary, self.is_read, self.is_behind = summary, True, False
                return
        if self._source is None:
            self._source, self._identity = _SkimmedSource(self.folder, self._clock), identity_of(self.folder.events)
            self._settings = read_settings(self.folder)
        self.is_behind = self._source.poll(budget_s)
        if not self.is_behind:
            found = facts_of(self._source.view) | {"settings": self._settings}
            self.summary, self.is_read = RunSummary(self.folder, **found, facts=self._source.facts()), True
            if self.summary.state not in _OPEN:
                keep(self.folder, found, self._identity)
                self._source = None


class RunList:
    """Follows every run below a folder and its sweeps; the clock returns Unix seconds."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self.root = root
        self.runs: list[FollowedRun] = []
        """The runs, last started or resumed first."""
        self._clock = clock
        self._next_look = 0.0

    def look(self) -> None:
        """Find new runs and changed files; a long list is looked at less often, in half a percent of the time."""
        began = time.monotonic()
        known = {str(run.folder.path): run for run in self.runs}
        runs = [known.get(path) or FollowedRun(path, self._clock) for path in run_paths(self.root, known=known)]
        for run in runs:
            run.look()
        self.runs = sorted(runs, key=lambda run: (-run.began_s, run.folder.path.name))
        now = time.monotonic()
        self._next_look = now + max(1.0, 200 * (now - began))

    def poll(self, budget_s: float = 0.05) -> bool:
        """Look at the files if it is time, and read on, for a limited time; return True if more is waiting."""
        deadline = time.monotonic() + budget_s
        if time.monotonic() >= self._next_look:
            self.look()
        for run in self.runs:
            if run.is_followed:
                run.poll(deadline - time.monotonic())
                if time.monotonic() >= deadline:
                    break
        return any(run.is_behind for run in self.runs)
