"""What the training thread does beside steps: evaluations, saves, pauses; told by a heartbeat when it changes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from segapp.memory.counters import DeviceMemoryTracker
from segapp.run.events import Heartbeat
from segapp.training.telemetry.clock import Activity, Clock
from segapp.training.telemetry.event_log import EventLog

PROGRESS_S = 1.0
"""Seconds between two heartbeats with the progress of an evaluation."""


class ActivityLog:
    """Tells what the training thread does, and counts the time of it.

    Args:
        event_log: takes the heartbeats.
        device_memory: is told each phase.

    Attributes:
        clock: the time by activity.
        step: returns the steps done.
    """

    def __init__(self, event_log: EventLog, device_memory: DeviceMemoryTracker) -> None:
        self.clock = Clock()
        self.step: Callable[[], int | None] = lambda: None
        self._event_log, self._memory = event_log, device_memory
        self._told = "train"
        self._told_s = 0.0

    @contextlib.contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Tell of an activity, and of the one around it when the block has ended without an error."""
        around, phase = self._told, self._memory.phase
        self._memory.mark(activity)
        self._tell(activity)
        try:
            with self.clock.during(activity):
                yield
        finally:
            self._memory.mark(phase)
            self._told = around
        self._tell(around)

    def report_evaluated(self, num_done: int, num_images: int) -> None:
        """Tell how many images of the running evaluation were handed to a device, at most once a second."""
        if time.monotonic() - self._told_s >= PROGRESS_S:
            self._tell("eval", min(num_done, num_images), num_images)

    def _tell(self, activity: str, num_done: int | None = None, num_images: int | None = None) -> None:
        self._told, self._told_s = activity, time.monotonic()
        self._event_log.emit(Heartbeat(phase=activity, step=self.step(), num_evaluated=num_done, num_images=num_images))
