"""Signs of life of a training process: its activity and progress, heartbeats, and the alert of a blocked writer.

The training thread reports what it does. The watchdog reads it, and on the main rank, a thread calls `poll`.
"""

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

from segapp.checkpoint.saver import CheckpointSaver
from segapp.memory.counters import DeviceMemoryTracker
from segapp.run.events import Alert, EventLog, Heartbeat
from segapp.training.progress import TrainingProgress

HEARTBEAT_S = 5.0

STEP_S = 1.0
"""Seconds after an event with a step, after which a heartbeat has the present step if it is another one."""

PROGRESS_S = 1.0
"""Seconds between two heartbeats with the progress of an evaluation."""


class Liveness:
    """Activity and progress of a training thread, and the heartbeats about them.

    Args:
        blocked_s: a checkpoint write is reported each time it has taken so many more seconds.

    Attributes:
        activity: a phase of the memory counters, or `read` while the training thread waits for a batch.
        has_stepped: True after a step of this process; until then, kernels are selected or compiled.
        is_saved: True if there is a checkpoint to continue from; from the first step on, every end saves first.
        training: progress and saver; None before the training itself begins.
    """

    event_log: EventLog
    device_memory: DeviceMemoryTracker

    def __init__(self, blocked_s: float = 30.0) -> None:
        self.activity, self.has_stepped, self.is_saved = "start", False, False
        self.last_progress_s = time.monotonic()
        self._spent_s: dict[str, float] = defaultdict(float)
        self.training: tuple[TrainingProgress, CheckpointSaver] | None = None
        self._blocked_s = self._blocked_alert_s = blocked_s
        self._next_beat_s = self._announced_s = 0.0

    def step(self) -> int | None:
        """Return the number of steps; None before the training itself begins."""
        return None if self.training is None else self.training[0].position.step

    def saving_s(self) -> float | None:
        """Return the seconds since the running checkpoint write began; None while none runs."""
        return None if self.training is None else self.training[1].written_for_s()

    def report_progress(self, *, activity: str | None = None) -> None:
        now_s = time.monotonic()
        self._spent_s[self.activity] += now_s - self.last_progress_s
        self.activity, self.last_progress_s = activity or self.activity, now_s

    def spent_s(self, activity: str) -> float:
        """Return the seconds of an activity so far, without other activities within it."""
        running_s = time.monotonic() - self.last_progress_s if activity == self.activity else 0.0
        return self._spent_s[activity] + running_s

    def mark(self, phase: str) -> None:
        self.device_memory.mark(phase)
        self.report_progress(activity=phase)

    @contextlib.contextmanager
    def during(self, activity: Literal["eval", "save", "paused"]) -> Iterator[None]:
        """Report an activity, and the surrounding one after the block has ended without an error."""
        around = self.device_memory.phase
        self.mark(activity)
        self._announce()
        try:
            yield
        finally:
            self.mark(around)
        self._announce()

    def report_evaluated(self, num_done: int, num_images: int) -> None:
        """Report how many images of the running evaluation were passed to a device, at most once per second."""
        if time.monotonic() - self._announced_s >= PROGRESS_S:
            self._announce(min(num_done, num_images), num_images)

    def _announce(self, num_done: int | None = None, num_images: int | None = None) -> None:
        self._announced_s = time.monotonic()
        self.event_log.emit(self._heartbeat(num_evaluated=num_done, num_images=num_images))

    def _heartbeat(self, **more: float | None) -> Heartbeat:
        phase = self.activity if self.activity in ("start", "eval", "save", "paused") else "train"
        return Heartbeat.model_validate({"phase": phase, "step": self.step(), **more})

    def beat(self) -> None:
        """Emit a heartbeat, and an alert if the checkpoint write is blocked."""
        saving_s = self.saving_s()
        self.event_log.emit(self._heartbeat(pid=os.getpid(), saving_s=saving_s))
        if saving_s is None:
            self._blocked_alert_s = self._blocked_s
        elif saving_s >= self._blocked_alert_s:
            self._blocked_alert_s = saving_s + self._blocked_s
            message = (
                f"checkpoint write blocked: the disk has not finished it after {saving_s:.0f} s; training continues"
            )
            self.event_log.emit(Alert(kind="storage", message=message, step=self.step()))

    def poll(self) -> float:
        """Emit a heartbeat if it is due, and return the seconds until the next poll.

        The step of the last event, of whatever kind, is at most `STEP_S` old while steps are made.
        """
        now_s, (told_step, told_s) = time.monotonic(), self.event_log.told
        if now_s >= self._next_beat_s or (now_s >= told_s + STEP_S and self.step() != told_step):
            self._next_beat_s = now_s + min(HEARTBEAT_S, self._blocked_s)
            self.beat()
        next_look_s = max(told_s + STEP_S, now_s + STEP_S / 2)
        return max(0.01, min(self._next_beat_s, next_look_s) - now_s)
