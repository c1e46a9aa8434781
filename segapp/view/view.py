"""The view of a run: a pure fold of its events. No clock, no files, no widgets."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from segapp.memory.peaks import PeakModel
from segapp.memory.split_check import SplitChecker, usable_mib
from segapp.run import events
from segapp.run.words import printable, share_text
from segapp.scores import EpochLoss, as_float, is_best_candidate
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
    pending: events.Gpu0Bsz | None = None
    changes: list[events.Gpu0Bsz] = field(default_factory=list)
    """The changes that were applied, canceled or reverted."""
    previous: list[int | None] = field(default_factory=list)
    """Earlier values, the latest last."""
    ceiling: int | None = None
    """Smallest number of samples with which device 0 ran out of memory."""

    @property
    def last(self) -> events.Gpu0Bsz | None:
        """The last of the changes."""
        return self.changes[-1] if self.changes else None


PASSING_ALERTS = frozenset({"compile", "cuda_graph", "settings"})
"""Kinds of alert that are only logged; all others are shown until the user has seen them."""

NUM_WHOLE_EVENTS = 300
"""Number of the last log lines that keep their whole event."""


@dataclass
class View:
    """The state of a run, folded from its events."""

    start: events.RunStart | None = None
    first_start_s: float | None = None
    num_starts: int = 0
    classes: list[str] = field(default_factory=list)
    """Printable names."""
    epoch: int | None = None
    lr: float | None = None
    step: events.Step | None = None
    history: LossHistory = field(default_factory=LossHistory)
    loss: EpochLoss = field(default_factory=EpochLoss)
    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=21))
    split: tuple[int, ...] | None = None
    """Samples per device of a full batch, as observed."""
    recompute: events.Recompute | None = None
    """The recomputed blocks; None: none since the start."""
    topologies: list[events.Topology] = field(default_factory=list)
    """The resumes with other ranks or devices."""
    devices: list[events.DeviceMemory] = field(default_factory=list)
    peaks_mib: dict[tuple[int, ...], list[float | None]] = field(default_factory=dict)
    """Split -> highest allocation of each device with it, MiB."""
    vals: Evaluations = field(default_factory=Evaluations)
    best: events.Val | None = None
    """The evaluation with the highest mIoU, among those with a finite loss."""
    checkpoint: events.Checkpoint | None = None
    marks: list[Mark] = field(default_factory=list)
    gpu0: Gpu0 = field(default_factory=Gpu0)
    pending: dict[str, events.CommandAnswer] = field(default_factory=dict)
    """Accepted commands without a final answer."""
    answers: dict[str, events.CommandAnswer] = field(default_factory=dict)
    """Final answers, by id; the last 200."""
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
    last_step_s: float | None = None
    num_events: int = 0
    num_bad: int = 0
    """Number of events with invalid fields."""
    _raw_step: dict[str, Any] | None = None
    _raw_memory: dict[str, Any] | None = None
    _is_memory_stale: bool = False
    _split_text: bytes = b""
    _blocks: list[list[str]] = field(default_factory=list)
    """The split of `recompute`, kept at a resume."""
    _split_checker: SplitChecker | None = None
    """As written by the trainer, with the peaks of the steps since."""
    _paused_s: float | None = None

    @property
    def num_devices(self) -> int:
        """Number of devices; at least 1."""
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
    def is_auto(self) -> bool:
        """True if `gpu0_bsz` follows the measured memory."""
        known = [event for event in (self.start, self.gpu0.last) if event is not None]
        return bool(known and max(known, key=lambda event: event.t).is_auto)

    @property
    def step_interval_s(self) -> float:
        """Median time between two `step` events; 0 if unknown."""
        gaps = sorted(b - a for a, b in pairwise(self.step_times_s))
        return max(0.0, gaps[len(gaps) // 2]) if gaps else 0.0

    @property
    def split_checker(self) -> SplitChecker:
        """The facts that decide about a split, as the trainer wrote them, with the devices' memory of the last sample.

        If the events have none, they are made from observations.
        """
        checker = self._split_checker
        if checker is None:
            peaks = {split: tuple(mib) for split, mib in self.peaks_mib.items()}
            batch_size = self.start.batch_size if self.start is not None else sum(self.split or (0,))
            mode = (self.start.mode if self.start is not None else None) or "dp"
            usable = [device.total_mib for device in self.devices]
            checker = SplitChecker(batch_size, self.num_devices, mode, current=self.split, usable_mib=usable,
                               peaks=PeakModel(peaks), ceiling=self.gpu0.ceiling)  # fmt: skip
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


def fold_events(view: View, items: Iterable[dict[str, Any] | events.StepRun]) -> None:
    """Fold events into a view, in order; invalid ones are counted and skipped."""
    steps: list[int] = []
    times_s: list[float] = []
    losses: list[float] = []
    run: events.StepRun | None = None

    def keep_curve() -> None:
        if steps:
            view.history.extend(steps, times_s, losses)
            for column in (steps, times_s, losses):
                column.clear()

    for item in items:
        if isinstance(item, events.StepRun):
            steps += item.step
            times_s += item.t
            losses += item.loss
            view.loss.add(item.epoch, item.step, item.loss)
            view.num_events += len(item.step)
            run = item
            if item.split_text != view._split_text:
                view._split_text = item.split_text
                _note_run(view, item)
            view.last_s = item.t[-1]
            continue
        view.num_events += 1
        kind = item["type"]
        if kind == "step":
            if _note_step(view, item):
                steps.append(item["step"])
                times_s.append(as_float(item["t"]))
                losses.append(as_float(item.get("loss")))
                view.loss.add_event(item)
        elif kind == "memory":
            _note_memory(view, item)
        else:
            if run is not None:
                _note_run(view, run)
                run = None
            if kind == "heartbeat":
                _note_heartbeat(view, item)
            else:
                keep_curve()
                _fold_rare(view, item)
        view.last_s = as_float(item["t"])
    if run is not None:
        _note_run(view, run)
    keep_curve()
    _parse_latest(view)


def _note_run(view: View, run: events.StepRun) -> None:
    """Fold the last step of consecutive ones; it represents all of them."""
    last = run.last
    if last is not None and (view.last_step_s is None or as_float(last["t"]) >= view.last_step_s):
        last_s = view.last_s
        _note_step(view, last)
        view.last_s = last_s


def _note_step(view: View, raw: dict[str, Any]) -> bool:
    step = raw.get("step")
    if type(step) is not int or not 0 <= step < 2**53:
        view.num_bad += 1
        return False
    view._raw_step = raw
    view.last_s = view.last_step_s = as_float(raw["t"])
    view.phase = "train"
    view.step_times_s.append(view.last_step_s)
    _set_paused(view, False, view.last_step_s)
    view.evaluating, view.away_s = None, 0.0
    split = raw.get("split")
    if split and split != view.split:
        _note_split(view, split)
    _note_measured_peaks(view, raw.get("peaks_mib"))
    return True


def _note_measured_peaks(view: View, peaks_mib: Any) -> None:
    """Fold the peaks with the present split; they are the peaks of the whole epoch so far."""
    checker = view._split_checker
    if checker is None or checker.current is None or not isinstance(peaks_mib, list):
        return
    peaks = tuple(peaks_mib)
    if peaks != checker.peaks.measured.get(checker.current) and all(mib is None or type(mib) is float for mib in peaks):
        view._split_checker = replace(checker, peaks=checker.peaks.with_measured(checker.current, peaks))


def _note_split(view: View, split: Any) -> None:
    """Keep a split if it is for a full batch; the last batch of an epoch may be short."""
    if not (isinstance(split, (list, tuple)) and all(type(n) is int and 0 <= n < 2**31 for n in split)):
        return
    full = view.start.batch_size if view.start else sum(split)
    if sum(split) == full and tuple(split) != view.split:
        view.split = tuple(split)
        view._is_memory_stale = True


def _note_memory(view: View, raw: dict[str, Any]) -> None:
    view._raw_memory = raw
    devices = raw.get("devices")
    if not isinstance(devices, list):
        return
    if view.split is None or not all(isinstance(each, dict) for each in devices):
        return
    if view._is_memory_stale:  # its peak may belong to the previous split
        view._is_memory_stale = False
        return
    _keep_peaks(view, view.split, [as_float(device.get("peak_mib")) for device in devices[:64]])


def _keep_peaks(view: View, split: tuple[int, ...], peaks_mib: Sequence[float | None]) -> None:
    """Keep the peaks of each device that are higher than those observed earlier with the same split."""
    highest = view.peaks_mib.setdefault(split, [None] * len(split))
    for i, peak in enumerate(peaks_mib[: len(highest)]):
        if peak is not None and math.isfinite(peak) and peak > (highest[i] or 0.0):
            highest[i] = peak


def _set_paused(view: View, is_paused: bool, t: float) -> None:
    if is_paused and view._paused_s is None:
        view._paused_s = t
    elif not is_paused and view._paused_s is not None:
        view.away_s += max(0.0, t - view._paused_s)
        view._paused_s = None
    view.is_paused = is_paused


def _note_heartbeat(view: View, raw: dict[str, Any]) -> None:
    phase, t = raw.get("phase"), as_float(raw["t"])
    if not isinstance(phase, str):
        return
    view.phase = printable(phase)[:12]
    _set_paused(view, phase == "paused", t)
    done, total = raw.get("num_evaluated"), raw.get("num_images")
    if phase == "eval" and view.evaluating is None:
        view.evaluating = Evaluating(t, t)
    elif phase == "train":
        view.evaluating = None
    if view.evaluating is not None and type(done) is int and type(total) is int and 0 <= done <= total < 2**53:
        view.evaluating = view.evaluating._replace(t=t, num_done=done, num_images=total)


def _fold_rare(view: View, raw: dict[str, Any]) -> None:
    event = _parsed(view, raw)
    if event is None:
        return
    if isinstance(event, events.RunStart | events.EpochStart | events.Gpu0Bsz | events.Oom) and event.judge is not None:
        try:
            view._split_checker = SplitChecker.from_json(event.judge)
        except ValueError:
            view.num_bad += 1
    line = log_line(event, view.classes, view.vals[-1] if view.vals else None)
    if isinstance(event, events.RunStart):
        _fold_start(view, event)
    elif isinstance(event, events.EpochStart):
        _parse_step(view)  # a step of the previous epoch; its numbers must not replace the new ones
        view.epoch, view.lr = event.epoch, event.lr
        view.phase, view.evaluating = "train", None
        _note_split(view, event.split)
    elif isinstance(event, events.Val):
        view.vals.append(event)
        view.evaluating = None
        view.best = _best([event] if view.best is None else [view.best, event])
    elif isinstance(event, events.Checkpoint):
        view.checkpoint = event
        if event.is_best:
            view.marks.append(Mark(event.step, "best", f"best, epoch {event.epoch}"))
    elif isinstance(event, events.Gpu0Bsz):
        _fold_gpu0_bsz(view, event)
    elif isinstance(event, events.CommandAnswer):
        _fold_answer(view, event)
    elif isinstance(event, events.Alert):
        view.num_alerts += 1
        view.last_alerts.append(event)
        if event.kind not in PASSING_ALERTS:
            _raise(view, event)
    elif isinstance(event, events.Recompute):
        view.recompute = event
        if event.blocks != view._blocks:
            view._blocks = event.blocks
            view.peaks_mib, view._is_memory_stale = {}, True
    elif isinstance(event, events.Topology):
        view.topologies.append(event)
    elif isinstance(event, events.Oom):
        view.oom = event
    elif isinstance(event, events.RunEnd):
        view.end = event
        view.pending.clear()
        view.gpu0.pending = None
    if line is not None:
        _drop_line_of_last_epoch(view, line)
        view.log.append(line)
        if len(view.log) > NUM_WHOLE_EVENTS:
            view.log[-NUM_WHOLE_EVENTS - 1] = view.log[-NUM_WHOLE_EVENTS - 1]._replace(event=None)
        if len(view.log) > 1200:  # in blocks: a list that loses its first line must be drawn anew
            del view.log[:200]


def _drop_line_of_last_epoch(view: View, new: LogLine) -> None:
    """Remove the line of the previous epoch if another epoch begins, because the log has only one such line."""
    if new.kind == "epoch":
        at = next((i for i in range(len(view.log) - 1, -1, -1) if view.log[i].kind == "epoch"), None)
        if at is not None:
            del view.log[at]


def _fold_start(view: View, event: events.RunStart) -> None:
    view.num_starts += 1
    view.first_start_s = event.t if view.first_start_s is None else view.first_start_s
    view.start = event
    view.classes = [printable(name) for name in event.classes]
    view.end, view.phase, view.evaluating = None, "start", None
    _set_paused(view, False, event.t)
    view.pending.clear()
    view.gpu0.pending = None
    view.gpu0.value = event.gpu0_bsz
    view.recompute = None
    view.step_times_s.clear()
    _note_split(view, event.split)
    if event.resumed_from_step is not None:
        _drop_repeated(view, event.resumed_from_step)
        view.marks.append(Mark(event.resumed_from_step, "resume", "resumed"))


def _drop_repeated(view: View, step: int) -> None:
    """Remove everything that a resumed training repeats."""
    view.history.drop_after(step)
    view.loss.drop_after(step)
    view.vals.drop_after(step)
    view.best = _best(view.vals)
    view.marks = [mark for mark in view.marks if mark.step <= step]
    if view._raw_step is not None and view._raw_step["step"] > step:
        view._raw_step = None
        view.step = None


def _best(vals: Iterable[events.Val]) -> events.Val | None:
    found = [val for val in vals if is_best_candidate(val.miou, val.loss)]
    return max(found, key=lambda val: val.miou or 0.0, default=None)


def _fold_gpu0_bsz(view: View, event: events.Gpu0Bsz) -> None:
    gpu0 = view.gpu0
    if event.status == "pending":
        gpu0.pending = event
        return
    gpu0.pending = None
    gpu0.changes.append(event)
    if event.status == "cancelled":
        return
    if event.status == "applied":
        gpu0.previous = [*gpu0.previous[-19:], event.old]
        gpu0.value = event.new
    else:
        gpu0.value, gpu0.previous = event.old, gpu0.previous[:-1]
        kept = event.split[0] if event.split else event.old
        is_device_0 = event.new is not None and (kept is None or event.new > kept)
        if event.new is not None and is_device_0 and event.ran_out_of_memory:
            gpu0.ceiling = min(event.new, gpu0.ceiling or event.new)
        reason = f": {event.reason}" if event.reason else ""
        text = f"gpu0_bsz={share_text(event.new)} was reverted to {share_text(event.old)}{reason}"
        _raise(view, events.Alert(kind="reverted", message=text, t=event.t))
    _note_split(view, event.split)
    if event.observed_mib and event.split:
        _keep_peaks(view, tuple(event.split), event.observed_mib)
    step = int(view.history.step[-1]) if view.history.size else 0
    view.marks.append(Mark(step, "gpu0_bsz", f"gpu0_bsz {share_text(event.old)} to {share_text(gpu0.value)}"))


def _raise(view: View, alert: events.Alert) -> None:
    before = view.alerts.pop(alert.kind, None)
    view.alerts[alert.kind] = Raised(alert, before.times + 1 if before else 1)


def _fold_answer(view: View, event: events.CommandAnswer) -> None:
    if event.status not in events.FINAL_STATUSES:
        view.pending[event.id] = event
        return
    view.pending.pop(event.id, None)
    view.answers[event.id] = event
    if len(view.answers) > 200:
        del view.answers[next(iter(view.answers))]
    if event.status == "applied" and event.command in ("pause", "resume"):
        _set_paused(view, event.command == "pause", event.t)


def _parse_latest(view: View) -> None:
    """Parse the latest step and memory sample in full, once per fold instead of once per event."""
    _parse_step(view)
    memory, view._raw_memory = _parsed(view, view._raw_memory), None
    if isinstance(memory, events.Memory):
        view.devices = memory.devices


def _parse_step(view: View) -> None:
    step, view._raw_step = _parsed(view, view._raw_step), None
    if isinstance(step, events.Step):
        view.step, view.epoch, view.lr = step, step.epoch, step.lr


def _parsed(view: View, raw: dict[str, Any] | None) -> events.Event | None:
    """Return an event; None if there is none, or if it is invalid, which is counted."""
    try:
        return None if raw is None else events.parse_event(raw)
    except ValueError:
        view.num_bad += 1
        return None
