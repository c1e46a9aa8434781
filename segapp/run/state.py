"""State and summary of a run, derived from its events and from the liveness of its process."""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, Literal

from segapp.run.events import MAX_LINE_BYTES, is_known, parse_line
from segapp.run.folder import RunFolder, run_folders
from segapp.run.process import is_alive
from segapp.scores import SCORES, EpochLoss, count_scored, is_best_candidate, score_of

State = Literal["live", "busy", "stale", "lost", "crashed", "finished", "stopped", "failed"]

FRESH_S = 15.0
"""Without an event for longer than this, and than five steps, a run is no longer `live`."""

_TAIL_BYTES = 256 * 2**10
_MAX_TAIL_BYTES = 16 * 2**20
"""The search for the last events goes back no further than this."""


@dataclass(frozen=True)
class RunFacts:
    """The facts from which a state is derived."""

    end_status: Literal["finished", "stopped", "failed"] | None = None
    """Status of `run_end`, if no training began after it."""
    is_trainer_alive: bool | None = None
    """True if a process holds the run's lock, or still runs; None if unknown on this host."""
    event_age_s: float | None = None
    """Time since the last event of any type; None if there is none."""
    step_age_s: float | None = None
    """Time since the last `step`."""
    step_interval_s: float = 0.0
    """Median time between two `step` events."""


def derive_state(facts: RunFacts) -> State:
    """Return the state for a set of facts.

    live: recent steps. busy: alive, recent events, but no recent steps (start, evaluation, pause, slow data). stale:
    alive, no recent events. lost: on another host, no recent events. crashed: the process is gone, without a `run_end`.
    finished, stopped, failed: the status of `run_end`.
    """
    if facts.end_status is not None:
        return facts.end_status
    if facts.is_trainer_alive is False:
        return "crashed"
    patience_s = max(FRESH_S, 5 * facts.step_interval_s)
    if facts.step_age_s is not None and facts.step_age_s <= patience_s:
        return "live"
    if facts.event_age_s is not None and facts.event_age_s <= patience_s:
        return "busy"
    if facts.is_trainer_alive is None:
        return "lost"
    return "busy" if facts.event_age_s is None else "stale"


def read_facts(path: Path | str, now_s: float | None = None) -> RunFacts:
    """Return the facts of a run, from its folder; reads only the end of the events."""
    now_s = time.time() if now_s is None else now_s
    folder = RunFolder(path)
    events = _read_tail(folder.events)
    last_start = max((index for index, raw in enumerate(events) if raw["type"] == "run_start"), default=-1)
    ends = [raw for raw in events[last_start + 1 :] if raw["type"] == "run_end"]
    steps_s = [float(raw["t"]) for raw in events[last_start + 1 :] if raw["type"] == "step"]
    end_status = ends[-1].get("status") if ends else None
    is_running_again = bool(ends) and was_acquired_after(folder, float(ends[-1]["t"]))
    return RunFacts(
        end_status=end_status if end_status in ("finished", "stopped", "failed") and not is_running_again else None,
        is_trainer_alive=is_trainer_alive(folder),
        event_age_s=max(0.0, now_s - float(events[-1]["t"])) if events else None,
        step_age_s=max(0.0, now_s - steps_s[-1]) if steps_s else None,
        step_interval_s=_interval_s(steps_s[-20:]),
    )


def run_state(path: Path | str, now_s: float | None = None) -> State:
    """Return the state of a run: `derive_state` of its facts."""
    return derive_state(read_facts(path, now_s))


@dataclass
class RunSummary:
    """The fields of `segapp status --json` and `segapp ls` for one run; None where unknown."""

    name: str
    path: str
    state: State
    id: str | None = None
    host: str | None = None
    pid: int | None = None
    began_s: float | None = None
    """Unix seconds."""
    age_s: float | None = None
    """Time since the last event."""
    phase: str | None = None
    """Activity of the trainer at the last heartbeat: start, train, eval, save, paused."""
    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    steps: int | None = None
    """Steps of the whole run, where its length is given in steps."""
    steps_per_epoch: int | None = None
    batch_size: int | None = None
    num_params: int | None = None
    num_classes: int | None = None
    loss: float | None = None
    """Mean training loss of the epoch `loss_epoch`, see `EpochLoss`; None if no loss of it was finite."""
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
    """Of the last evaluation; None if it was not finite."""
    miou: float | None = None
    num_scored: int | None = None
    """Number of classes that `miou` is the mean of: those in the targets or the predictions."""
    pixel_accuracy: float | None = None
    scores: dict[str, float | None] = field(default_factory=dict)
    """All scores of the last evaluation: name, as in `segapp.scores.SCORES`, -> value."""
    best_miou: float | None = None
    """The highest of an evaluation whose loss is finite."""
    best_num_scored: int | None = None
    """Number of classes that `best_miou` is the mean of."""
    best_epoch: int | None = None
    checkpoint: dict[str, Any] | None = None
    """The last committed checkpoint: path, epoch, step."""
    devices: list[dict[str, Any]] = field(default_factory=list)
    """The last sample of each device: used_mib, total_mib, utilization and so on."""
    pending: dict[str, str] = field(default_factory=dict)
    """Commands accepted and not yet applied: id -> text."""
    last_oom: dict[str, Any] | None = None
    """The last out-of-memory error: device, phase, action, and the path of its report."""
    num_alerts: int = 0
    last_alert: str | None = None
    reason: str | None = None
    """Why the training ended."""
    exit_code: int | None = None
    sweep: dict[str, int] | None = None
    """Of a sweep, in place of a run: its number of runs, and of those that have finished, failed, or are running."""


def summarize(path: Path | str, now_s: float | None = None) -> RunSummary:
    """Return the summary of a run, from its events."""
    folder, facts = RunFolder(path), read_facts(path, now_s)
    summary = RunSummary(folder.name, str(folder.path), derive_state(facts), age_s=facts.event_age_s)
    holder, info = folder.read_holder(), folder.read_info()
    process = holder or (info.process if info else None)
    if info is not None:
        summary.id, summary.began_s = info.id, info.created_s
    if process is not None:
        summary.host, summary.pid = process.host, process.pid
    loss = EpochLoss()
    for raw in _read_sparsely(folder.events, loss):
        add_event(summary, raw)
    summary.loss, summary.loss_epoch = loss.mean, loss.epoch
    if facts.end_status is None:
        summary.reason = summary.exit_code = None
    return summary


def list_runs(root: Path | str = "runs", now_s: float | None = None) -> list[RunSummary]:
    """Return the summary of every run below a folder, the last one to begin or resume first."""
    return [summarize(run.path, now_s) for run in run_folders(root)]


_COPIED: dict[str, dict[str, str]] = {
    "run_start": {
        name: name for name in ("epochs", "steps", "steps_per_epoch", "batch_size", "num_params", "gpu0_bsz", "split")
    },
    "epoch_start": {name: name for name in ("epoch", "lr", "split")},
    "step": {
        name: name for name in ("epoch", "step", "lr", "images_per_s", "data_wait_frac", "eta_epoch_s", "eta_run_s")
    },
    "val": {"epoch": "val_epoch", "loss": "val_loss", "miou": "miou", "pixel_accuracy": "pixel_accuracy"},
    "run_end": {"reason": "reason", "exit_code": "exit_code"},
    "memory": {"devices": "devices"},
    "heartbeat": {"phase": "phase"},
}
"""Event type -> field of the event -> field of the summary; the last event wins."""


def add_event(summary: RunSummary, raw: dict[str, Any]) -> None:
    """Fold an event into a summary."""
    kind = raw["type"]
    for source, target in _COPIED.get(kind, {}).items():
        if source in raw:
            setattr(summary, target, raw[source])
    if kind == "run_start":
        summary.num_classes = len(raw.get("classes") or []) or None
        summary.pending.clear()
        if (resumed := raw.get("resumed_from_step")) is not None:
            summary.step = resumed
    elif kind == "val":
        miou: Any = raw.get("miou")
        summary.num_scored = count_scored(raw.get("iou"))
        summary.scores = {name: score_of(raw, name) for name in SCORES}
        is_candidate = is_best_candidate(miou, raw.get("loss"))
        if is_candidate and (summary.best_miou is None or miou > summary.best_miou):
            summary.best_miou, summary.best_num_scored = miou, summary.num_scored
            summary.best_epoch = raw.get("epoch")
    elif kind == "checkpoint":
        summary.checkpoint = {name: raw.get(name) for name in ("path", "epoch", "step")}
    elif kind == "gpu0_bsz" and raw.get("status") in ("applied", "reverted"):
        summary.gpu0_bsz = raw.get("new") if raw["status"] == "applied" else raw.get("old")
        summary.split = raw.get("split") or summary.split
    elif kind == "command":
        _add_answer(summary, raw)
    elif kind == "oom":
        summary.last_oom = {name: raw.get(name) for name in ("device", "phase", "step", "action", "path")}
    elif kind == "alert":
        summary.num_alerts += 1
        summary.last_alert = raw.get("message")


def _add_answer(summary: RunSummary, raw: dict[str, Any]) -> None:
    command_id = str(raw.get("id"))
    if raw.get("status") == "accepted":
        summary.pending[command_id] = str(raw.get("command"))
    else:
        summary.pending.pop(command_id, None)


def is_trainer_alive(folder: RunFolder) -> bool | None:
    """True if a process holds the run's lock, or still runs; None if unknown on this host."""
    if folder.is_locked():
        return True
    info = folder.read_info()
    process = folder.read_holder() or (info.process if info else None)
    return is_alive(process) if process is not None else False


def was_acquired_after(folder: RunFolder, end_s: float) -> bool:
    """Return True if a trainer locked the run again after its end, and has not yet written a `run_start`."""
    try:
        return bool(folder.is_locked()) and folder.lock.stat().st_mtime > end_s
    except OSError:
        return False


def _interval_s(times_s: list[float]) -> float:
    intervals = [later - earlier for earlier, later in pairwise(times_s)]
    return max(0.0, median(intervals)) if intervals else 0.0


def _read_tail(path: Path) -> list[dict[str, Any]]:
    """Return the last events of a file (whole lines); reads further back if the end holds none."""
    num_bytes = _TAIL_BYTES
    while True:
        block, is_whole = _read_end(path, num_bytes)
        lines = block.split(b"\n")[:-1]
        events = list(_parsed(lines if is_whole else lines[1:]))
        if events or is_whole or num_bytes >= _MAX_TAIL_BYTES:
            return events
        num_bytes *= 4


def _read_end(path: Path, num_bytes: int) -> tuple[bytes, bool]:
    """Return the last bytes of a file, and True if that is all of it; an unreadable file counts as empty."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            start = max(0, os.fstat(file.fileno()).st_size - num_bytes)
            file.seek(start)
            return file.read(num_bytes), start == 0
    except OSError:
        return b"", True


def _read_sparsely(path: Path, loss: EpochLoss) -> Iterator[dict[str, Any]]:
    """Yield the events of a file; of consecutive steps, samples or heartbeats only the last one, for speed.

    Args:
        path: `events.jsonl`.
        loss: gets the steps of the last epoch.
    """
    held: dict[bytes, bytes] = {}
    steps: list[bytes] = []  # lines since the last start of an epoch: only those of the last one are read for the loss
    is_new_epoch = False
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            for line in _whole_lines(file):
                kind = next((mark for mark in _FREQUENT if mark in line[:120]), None)
                if kind is None:
                    for raw in _parsed([*held.values(), line]):
                        is_new_epoch = is_new_epoch or raw["type"] == "epoch_start"
                        if raw["type"] == "run_start":
                            _add_losses(loss, steps)
                            loss.add_event(raw)
                        yield raw
                    held.clear()
                    continue
                held[kind] = line
                if kind == _STEP:
                    if is_new_epoch and _epoch_of(line) != _epoch_of(steps[-1] if steps else b""):
                        steps.clear()
                    is_new_epoch = False
                    steps.append(line)
    except OSError:
        return
    _add_losses(loss, steps)
    yield from _parsed(list(held.values()))


def _add_losses(loss: EpochLoss, lines: list[bytes]) -> None:
    """Move the steps of lines into the loss of their epoch."""
    for line in lines:
        if (found := _STEP_NUMBERS.search(line)) is not None:
            epoch, step, value = found.groups()
            with contextlib.suppress(ValueError):  # such as 1.2.3
                loss.add(int(epoch), [int(step)], [None if value == b"null" else float(value)])
    lines.clear()


def _epoch_of(line: bytes) -> bytes | None:
    found = _STEP_NUMBERS.search(line)
    return None if found is None else found[1]


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield complete lines with their newlines; a line longer than any event is skipped without loading it whole."""
    is_within = False
    while part := file.readline(MAX_LINE_BYTES):
        is_whole = part.endswith(b"\n")
        if is_whole and not is_within:
            yield part
        is_within = not is_whole


_STEP = b'"type":"step"'
_FREQUENT = (_STEP, b'"type":"memory"', b'"type":"heartbeat"')
_STEP_NUMBERS = re.compile(rb'"type":"step","epoch":(\d{1,9}),"step":(\d{1,15}),"loss":(null|-?\d[\d.eE+-]*+)')
"""Epoch, step and loss, in the order in which `EventWriter` writes them."""


def _parsed(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        raw = parse_line(line.rstrip(b"\n"))
        if raw is not None and is_known(raw):
            yield raw
