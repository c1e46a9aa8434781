"""The view of a run: a pure fold of its events. No clock, no files, no widgets."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

from segapp.chunks import SPLIT_NAMES
from segapp.memory.peaks import PeakModel
from segapp.memory.split_check import SplitChecker, usable_mib
from segapp.run import events
from segapp.run.words import dots, number, printable, share_text
from segapp.scores import EpochLoss, Score, as_float, score_named
from segapp.view.history import Evaluations, LossHistory
from segapp.view.wording import LogLine, log_line


class Raised(NamedTuple):
    """The alerts of one kind."""

    last: events.Alert
    times: int


class Evaluating(NamedTuple):
    """The progress of the running evaluation."""

    began_s: float
    t: float
    """Time of the last report."""
    num_done: int = 0
    num_images: int | None = None
    """Number of images of the evaluation; None if unknown."""

    def eta_s(self, now_s: float) -> float | None:
        """Return the seconds to its end, from its speed so far."""
        if not self.num_done or self.num_images is None:
            return None
        left_s = (self.t - self.began_s) * (self.num_images - self.num_done) / self.num_done
        return max(0.0, left_s - max(0.0, now_s - self.t))


class Mark(NamedTuple):
    """A marked step on the curve."""

    step: int
    kind: str
    """`gpu0_bsz`, `best` or `resume`."""
    text: str


@dataclass
class Gpu0:
    """`gpu0_bsz`: the present value, the pending change, and the last change."""

    value: int | None = None
    split: list[int] | None = None
    """Samples per device, with which it began; `View.split` may know of the next one before."""
    pending: events.Gpu0Bsz | None = None
    changes: list[events.Gpu0Bsz] = field(default_factory=list)
    """The changes that were applied, canceled or reverted."""


PASSING_ALERTS = frozenset({"compile", "settings"})
"""Kinds of alert that are only logged; all others are shown until the user has seen them."""

FACT_ALERTS = frozenset({"batch", "classes", "data", "memory", "precision", "schedule"})
"""Kinds of alert with which every start repeats a fact about the data or the config."""

NUM_WHOLE_EVENTS = 300
"""Number of the last log lines that keep their whole event."""


@dataclass
class View:
    """The state of a run, which `EventFold` makes from its events."""

    start: events.RunStart | None = None
    first_start_s: float | None = None
    num_starts: int = 0
    classes: list[str] = field(default_factory=list)
    """Printable names."""
    epoch: int | None = None
    lr: float | None = None
    step: events.Step | None = None
    at_step: int | None = None
    """The newest step that an event names; heartbeats name steps that have no event of their own."""
    moved_s: float | None = None
    """Time of the event that first named it; None: the present process has not made a step."""
    history: LossHistory = field(default_factory=LossHistory)
    loss: EpochLoss = field(default_factory=EpochLoss)
    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=21))
    split: tuple[int, ...] | None = None
    """Samples per device of a full batch, as observed."""
    recomputed: events.Settings | None = None
    """The recomputed blocks; None: none since the start."""
    topologies: list[events.Settings] = field(default_factory=list)
    """The resumes with other ranks or devices."""
    devices: list[events.DeviceMemory] = field(default_factory=list)
    peaks_mib: dict[tuple[int, ...], list[float | None]] = field(default_factory=dict)
    """Split -> highest allocation of each device with it, MiB."""
    vals: Evaluations = field(default_factory=Evaluations)
    best: events.Val | None = None
    """The first with the best monitored score, among the evaluations with a finite loss in the last of `rankings`."""
    rankings: list[tuple[int, str]] = field(default_factory=list)
    """The parts of the run with their own ranking: the step after which one begins, and its `checkpoint.monitor`."""
    checkpoint: events.Checkpoint | None = None
    marks: list[Mark] = field(default_factory=list)
    gpu0: Gpu0 = field(default_factory=Gpu0)
    live: dict[str, Any] = field(default_factory=dict)
    """The settings in force that commands can change, as `set` takes them, as far as they are known."""
    pending: dict[str, events.CommandAnswer] = field(default_factory=dict)
    """Accepted commands without a final answer."""
    answers: dict[str, events.CommandAnswer] = field(default_factory=dict)
    """Final answers, by id; the last 200."""
    changes: dict[str, events.CommandAnswer] = field(default_factory=dict)
    """Setting -> the command that set the value in force."""
    phase: str | None = None
    """Phase of the last heartbeat: train, eval, save, paused, start."""
    is_paused: bool = False
    evaluating: Evaluating | None = None
    away_s: float = 0.0
    """Seconds of pauses since the last step, without the present pause."""
    log: list[LogLine] = field(default_factory=list)
    """The last thousand lines and up to 200 more."""
    alerts: dict[str, Raised] = field(default_factory=dict)
    """Kind -> the alerts of this kind that the user must see, most recently raised kind last."""
    last_alerts: deque[events.Alert] = field(default_factory=lambda: deque(maxlen=1000))
    num_alerts: int = 0
    oom: events.Oom | None = None
    end: events.RunEnd | None = None
    last_s: float | None = None
    num_events: int = 0
    num_bad: int = 0
    """Number of events with invalid fields."""
    written_checker: SplitChecker | None = None
    """As written by the trainer, with the peaks of the steps since."""

    @property
    def monitor(self) -> Score:
        """The score that selects the best evaluation."""
        named = self.start.monitor if self.start is not None else None
        return score_named(named or "miou")

    def monitored(self, val: events.Val) -> float | None:
        return val.score(self.monitor.name, self.start.classes if self.start is not None else ())

    def best_of(self, vals: Iterable[events.Val]) -> events.Val | None:
        """Return the first evaluation with the best monitored score; None if there is none."""
        begin = self.rankings[-1][0] if self.rankings else -1
        values = [(val, as_float(self.monitored(val))) for val in vals if val.step > begin]
        ranked = [(val, value) for val, value in values if math.isfinite(value) and math.isfinite(as_float(val.loss))]
        sign = 1 if self.monitor.larger_is_better else -1
        return max(ranked, key=lambda each: sign * each[1], default=(None,))[0]

    @property
    def best_words(self) -> str | None:
        """The best evaluation in words, best mIoU 0.476 at epoch 3; None without one."""
        if self.best is None:
            return None
        return f"best {printable(self.monitor.title)} {number(self.monitored(self.best))} at epoch {self.best.epoch}"

    @property
    def num_devices(self) -> int:
        return max(1, len(self.start.devices) if self.start else 0)

    @property
    def machines(self) -> list[str | None]:
        """The machine of each device; None for all if there is only one machine."""
        return [device.machine for device in self.start.devices] if self.start else []

    @property
    def device_groups(self) -> list[list[int]]:
        """The indices of `devices`, in groups that share a process and so its memory: logical devices."""
        groups: dict[object, list[int]] = {}
        for i, device in enumerate(self.devices):
            has_own_process = device.device is None or (self.start is not None and self.start.mode == "ddp")
            machine = self.machines[i] if i < len(self.machines) else None
            groups.setdefault(i if has_own_process else (machine, device.device), []).append(i)
        return list(groups.values())

    @property
    def has_logical_devices(self) -> bool:
        """True if several devices share a process, so the memory of each is unknown."""
        return len(self.device_groups) < len(self.devices)

    @property
    def step_interval_s(self) -> float:
        """Median time between two `step` events; 0 if unknown."""
        gaps = sorted(b - a for a, b in pairwise(self.step_times_s))
        return max(0.0, gaps[len(gaps) // 2]) if gaps else 0.0

    @property
    def split_checker(self) -> SplitChecker:
        """The facts that decide about a split, as the trainer wrote them, with the memory of the last sample."""
        checker = self.written_checker or SplitChecker(sum(self.split or ()), self.num_devices, current=self.split)
        if self.has_logical_devices:
            checker = replace(checker, peaks=PeakModel({}))
        usable = list(checker.usable_mib)
        for i, each in enumerate(self.devices[: len(usable)]):
            if None not in (each.total_mib, each.used_mib, each.reserved_mib) and is_gpu(each):
                usable[i] = usable_mib(each.total_mib, each.used_mib, each.reserved_mib)
        return replace(checker, usable_mib=tuple(usable))


def is_gpu(device: events.DeviceMemory) -> bool:
    """Return True for a device whose driver reports the memory of other processes."""
    return not (device.device or "cpu").startswith("cpu")


class EventFold:
    """Folds the events of a run into its view, in order; invalid events are counted and skipped."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._raw_step: dict[str, Any] | None = None
        """The last step; like the last memory sample, it is parsed in full once per `add`, not once per event."""
        self._raw_memory: dict[str, Any] | None = None
        self._steps: list[int] = []
        """The steps that are not yet in the history."""
        self._times_s: list[float] = []
        self._losses: list[float] = []
        self._is_memory_stale = False
        """True if the peaks of the next memory sample may belong to the previous split."""
        self._split_text = b""
        self._blocks: list[list[str]] = []
        """The last recomputed blocks; a resume does not clear them."""
        self._paused_s: float | None = None

    def add(self, items: Iterable[dict[str, Any] | events.StepRun]) -> None:
        """Fold the next items of an `EventReader`."""
        view = self.view
        run: events.StepRun | None = None
        beats: list[dict[str, Any]] = []  # after the run; a later step makes them void
        for item in items:
            if isinstance(item, events.StepRun):
                beats.clear()
                self._add_run(item)
                run = item
                continue
            kind = item["type"]
            if run is not None and kind == "heartbeat":
                beats.append(item)
            elif run is not None and kind != "memory":
                self._note_last_of(run, beats)
                run, beats = None, []
            if kind in ("heartbeat", "memory"):
                self._note_position(item)
            view.num_events += 1
            if kind == "step":
                if self._note_step(item):
                    view.step_times_s.append(as_float(item["t"]))
                    self._steps.append(item["step"])
                    self._times_s.append(as_float(item["t"]))
                    self._losses.append(as_float(item.get("loss")))
                    view.loss.add_event(item)
            elif kind == "memory":
                self._note_memory(item)
            elif kind == "heartbeat":
                if run is None:
                    self._note_heartbeat(item)
            else:
                self._extend_history()
                self._fold_rare(item)
            view.last_s = as_float(item["t"])
        if run is not None:
            self._note_last_of(run, beats)
        self._extend_history()
        self._parse_step()
        memory, self._raw_memory = self._parsed(self._raw_memory), None
        if isinstance(memory, events.Memory):
            view.devices = memory.devices

    def _add_run(self, run: events.StepRun) -> None:
        self._steps += run.step
        self._times_s += run.t
        self._losses += run.loss
        self.view.loss.add(run.epoch, run.step, run.loss)
        self.view.num_events += len(run.step)
        self.view.step_times_s.extend(run.t[-21:])
        if run.split_text != self._split_text:
            self._split_text = run.split_text
            self._note_last_of(run)
        self.view.last_s = run.t[-1]

    def _note_last_of(self, run: events.StepRun, beats: Sequence[dict[str, Any]] = ()) -> None:
        """Fold the last step of consecutive ones, which represents all of them, and the heartbeats after it."""
        view, last = self.view, run.last
        if last is not None:
            last_s = view.last_s
            self._note_step(last)
            view.last_s = last_s
        for beat in beats:
            self._note_heartbeat(beat)

    def _extend_history(self) -> None:
        if self._steps and self.view.history.capacity:
            self.view.history.extend(self._steps, self._times_s, self._losses)
        self._steps, self._times_s, self._losses = [], [], []

    def _note_step(self, raw: dict[str, Any]) -> bool:
        """Fold a step, except for its loss; return False if it is invalid."""
        view, step, t = self.view, raw.get("step"), as_float(raw["t"])
        if type(step) is not int or not 0 <= step < 2**53:
            view.num_bad += 1
            return False
        self._raw_step = raw
        self._note_position(raw)
        view.last_s = t
        view.phase = "train"
        self._set_paused(False, t)
        view.evaluating, view.away_s = None, 0.0
        split = raw.get("split")
        if split and split != view.split:
            self._note_split(split)
        self._note_measured_peaks(raw.get("peaks_mib"))
        return True

    def _note_position(self, raw: dict[str, Any]) -> None:
        view, step = self.view, raw.get("step")
        if type(step) is int and (view.at_step or 0) < step < 2**53:
            view.at_step, view.moved_s = step, as_float(raw["t"])

    def _note_measured_peaks(self, peaks_mib: Any) -> None:
        """Fold the peaks with the present split; they are the peaks of the whole epoch so far."""
        checker = self.view.written_checker
        if checker is None or checker.current is None or not isinstance(peaks_mib, list):
            return
        peaks = tuple(peaks_mib)
        if peaks != checker.peaks.measured.get(checker.current) and all(
            mib is None or type(mib) is float for mib in peaks
        ):
            self.view.written_checker = replace(checker, peaks=checker.peaks.with_measured(checker.current, peaks))

    def _note_split(self, split: Any) -> None:
        """Keep a split if it is for a full batch; the last batch of an epoch may be short."""
        view = self.view
        if not (isinstance(split, (list, tuple)) and all(type(n) is int and 0 <= n < 2**31 for n in split)):
            return
        full = view.start.batch_size if view.start else sum(split)
        if sum(split) == full and tuple(split) != view.split:
            view.split = tuple(split)
            self._is_memory_stale = True

    def _note_memory(self, raw: dict[str, Any]) -> None:
        self._raw_memory = raw
        devices, split = raw.get("devices"), self.view.split
        if split is None or not isinstance(devices, list) or not all(isinstance(device, dict) for device in devices):
            return
        if self._is_memory_stale:
            self._is_memory_stale = False
            return
        self._keep_peaks(split, [as_float(device.get("peak_mib")) for device in devices[:64]])

    def _keep_peaks(self, split: tuple[int, ...], peaks_mib: Sequence[float | None]) -> None:
        """Keep the peaks of each device that are higher than those observed earlier with the same split."""
        highest = self.view.peaks_mib.setdefault(split, [None] * len(split))
        for i, peak in enumerate(peaks_mib[: len(highest)]):
            if peak is not None and math.isfinite(peak) and peak > (highest[i] or 0.0):
                highest[i] = peak

    def _set_paused(self, is_paused: bool, t: float) -> None:
        if is_paused and self._paused_s is None:
            self._paused_s = t
        elif not is_paused and self._paused_s is not None:
            self.view.away_s += max(0.0, t - self._paused_s)
            self._paused_s = None
        self.view.is_paused = is_paused

    def _note_heartbeat(self, raw: dict[str, Any]) -> None:
        view, phase, t = self.view, raw.get("phase"), as_float(raw["t"])
        if not isinstance(phase, str):
            return
        view.phase = printable(phase)[:12]
        self._set_paused(phase == "paused", t)
        done, total = raw.get("num_evaluated"), raw.get("num_images")
        if phase == "eval" and view.evaluating is None:
            view.evaluating = Evaluating(t, t)
        elif phase == "train":
            view.evaluating = None
        if view.evaluating is not None and type(done) is int and type(total) is int and 0 <= done <= total < 2**53:
            view.evaluating = view.evaluating._replace(t=t, num_done=done, num_images=total)

    def _fold_rare(self, raw: dict[str, Any]) -> None:
        view, event = self.view, self._parsed(raw)
        if event is None:
            return
        written = getattr(event, "checker", None)
        if written is not None:
            try:
                view.written_checker = SplitChecker.from_json(written)
            except ValueError:
                view.num_bad += 1
        line = log_line(event, view.classes, view.vals.last)
        if type(event) in self._RARE:
            self._RARE[type(event)](self, event)
        if line is not None:
            self._log(line)

    def _log(self, line: LogLine) -> None:
        log = self.view.log
        if line.kind == "epoch":  # the log has the line of the present epoch only
            at = next((i for i in range(len(log) - 1, -1, -1) if log[i].kind == "epoch"), None)
            if at is not None:
                del log[at]
        log.append(line)
        if len(log) > NUM_WHOLE_EVENTS:
            log[-NUM_WHOLE_EVENTS - 1] = log[-NUM_WHOLE_EVENTS - 1]._replace(event=None)
        if len(log) > 1200:  # in blocks: a list that loses its first line must be drawn anew
            del log[:200]

    def _fold_start(self, event: events.RunStart) -> None:
        view = self.view
        view.num_starts += 1
        view.first_start_s = event.t if view.first_start_s is None else view.first_start_s
        # As the trainer: a checkpoint keeps its best score, unless the score that is monitored now is another one.
        step, monitor = event.resumed_from_step or 0, event.monitor or "miou"
        view.rankings = [each for each in view.rankings if each[0] < step]
        if not view.rankings or view.rankings[-1][1] != monitor:
            view.rankings.append((step if view.rankings else -1, monitor))
        view.start = event
        view.classes = [printable(name) for name in event.classes]
        view.end, view.phase, view.evaluating, view.recomputed = None, "start", None, None
        view.at_step, view.moved_s = event.resumed_from_step, None
        self._set_paused(False, event.t)
        self._end_commands()
        view.gpu0.value, view.gpu0.split = event.gpu0_bsz, event.split
        self._note_live(event.live or {"gpu0_bsz": "auto" if event.is_auto else event.gpu0_bsz})
        view.step_times_s.clear()
        self._note_split(event.split)
        if event.resumed_from_step is not None:
            self._drop_repeated(event.resumed_from_step)
            view.marks.append(Mark(event.resumed_from_step, "resume", "resumed"))

    def _drop_repeated(self, step: int) -> None:
        """Remove everything that a resumed training repeats."""
        view = self.view
        view.history.drop_after(step)
        view.loss.drop_after(step)
        view.vals.drop_after(step)
        view.best = view.best_of(view.vals)
        view.marks = [mark for mark in view.marks if mark.step <= step]
        if self._raw_step is not None and self._raw_step["step"] > step:
            self._raw_step = None
            view.step = None

    def _fold_epoch(self, event: events.EpochStart) -> None:
        self._parse_step()  # a step of the previous epoch; its numbers must not replace the new ones
        self.view.epoch, self.view.lr = event.epoch, event.lr
        self.view.phase, self.view.evaluating = "train", None
        self._note_split(event.split)

    def _fold_val(self, event: events.Val) -> None:
        view = self.view
        view.vals.append(event)
        view.evaluating = None
        view.best = view.best_of([event] if view.best is None else [view.best, event])

    def _fold_checkpoint(self, event: events.Checkpoint) -> None:
        self.view.checkpoint = event
        if event.is_best:
            self.view.marks.append(Mark(event.step, "best", f"best, epoch {event.epoch}"))

    def _fold_gpu0_bsz(self, event: events.Gpu0Bsz) -> None:
        view, gpu0 = self.view, self.view.gpu0
        if event.status == "pending":
            gpu0.pending = event
            return
        gpu0.pending = None
        gpu0.changes.append(event)
        self._note_live(event.live or view.live)
        if event.status == "cancelled":
            return
        before, gpu0.split = gpu0.split, event.split or gpu0.split
        if event.status == "applied":
            if event.new == gpu0.value and gpu0.split == before:
                return  # it was requested with another setting, and was in use
            gpu0.value = event.new
        else:
            gpu0.value = event.old
            self._raise(events.Alert(kind="reverted", message=f"the split was reverted: {event.reason}", t=event.t))
        self._note_split(event.split)
        if event.observed_mib and event.split:
            self._keep_peaks(tuple(event.split), event.observed_mib)
        text = f"gpu0_bsz {share_text(event.old)} to {share_text(gpu0.value)}, split {dots(gpu0.split)}"
        view.marks.append(Mark(event.step or view.at_step or 0, "gpu0_bsz", text))

    def _fold_answer(self, event: events.CommandAnswer) -> None:
        view = self.view
        if event.status not in events.FINAL_STATUSES:
            view.pending[event.id] = event
            return
        view.pending.pop(event.id, None)
        view.answers[event.id] = event
        changes = dict(event.changes or {})
        if changes.pop("gpu0_bsz_auto", False):
            changes["gpu0_bsz"] = "auto"
        replaced = () if SPLIT_NAMES.isdisjoint(changes) else SPLIT_NAMES
        self._note_live({**view.live, **dict.fromkeys(replaced), **changes})
        view.changes |= dict.fromkeys(changes, event)
        if len(view.answers) > 200:
            del view.answers[next(iter(view.answers))]
        if event.status == "applied" and event.command in ("pause", "resume"):
            self._set_paused(event.command == "pause", event.t)

    def _note_live(self, live: dict[str, Any]) -> None:
        """Fold the settings in force; forget the commands whose values are not."""
        view = self.view
        view.changes = {name: each for name, each in view.changes.items() if live.get(name) == view.live.get(name)}
        view.live = live

    def _fold_alert(self, event: events.Alert) -> None:
        self.view.num_alerts += 1
        self.view.last_alerts.append(event)
        if event.kind not in PASSING_ALERTS:
            self._raise(event)

    def _raise(self, alert: events.Alert) -> None:
        before = self.view.alerts.pop(alert.kind, None)
        self.view.alerts[alert.kind] = Raised(alert, before.times + 1 if before else 1)

    def _fold_settings(self, event: events.Settings) -> None:
        if event.topology is not None:
            self.view.topologies.append(event)
        if event.blocks is None:
            return
        self.view.recomputed = event
        if event.blocks != self._blocks:
            self._blocks = event.blocks
            self.view.peaks_mib, self._is_memory_stale = {}, True

    def _fold_oom(self, event: events.Oom) -> None:
        self.view.oom = event

    def _fold_end(self, event: events.RunEnd) -> None:
        self.view.end = event
        self._end_commands()

    def _end_commands(self) -> None:
        """Forget the commands without a final answer, which an ended trainer cannot give."""
        self.view.pending.clear()
        self.view.gpu0.pending = None

    def _parse_step(self) -> None:
        step, self._raw_step = self._parsed(self._raw_step), None
        if isinstance(step, events.Step):
            self.view.step, self.view.epoch, self.view.lr = step, step.epoch, step.lr

    def _parsed(self, raw: dict[str, Any] | None) -> events.Event | None:
        """Return an event; None if there is none, or if it is invalid, which is counted."""
        try:
            return None if raw is None else events.parse_event(raw)
        except ValueError:
            self.view.num_bad += 1
            return None

    _RARE: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        events.RunStart: _fold_start,
        events.EpochStart: _fold_epoch,
        events.Val: _fold_val,
        events.Checkpoint: _fold_checkpoint,
        events.Gpu0Bsz: _fold_gpu0_bsz,
        events.CommandAnswer: _fold_answer,
        events.Alert: _fold_alert,
        events.Settings: _fold_settings,
        events.Oom: _fold_oom,
        events.RunEnd: _fold_end,
    }
    """The method for each type of event that is parsed in full."""
