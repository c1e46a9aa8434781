"""The times of the training thread by activity, its heartbeats, and the throughput between two `step` events."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from segapp.memory.counters import DeviceMemoryTracker
from segapp.run.events import EventLog, Heartbeat

Activity = Literal["train", "load", "eval", "save", "paused"]
"""`load`: from the start of an epoch, or of its rest after an evaluation, to its first batch."""


class Spent(NamedTuple):
    """Time spent so far on an activity that is repeated."""

    times: int = 0
    seconds: float = 0.0


class Clock:
    """Times by activity since the training began, and counts since the last `step` event."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._activity: Activity = "train"
        self._since = now()
        self._seconds: dict[str, float] = defaultdict(float)
        self._times: dict[str, int] = defaultdict(int)
        self.wait_s = 0.0
        """Seconds of the interval in which the training waited for data."""
        self.restart()

    def restart(self) -> None:
        """Begin a new interval."""
        self._began, self._paused_s = self._now(), self.spent("paused").seconds
        self.wait_s, self.num_images, self.num_steps = 0.0, 0, 0

    def count_step(self, num_images: int) -> None:
        """Count one step of `num_images` images."""
        self.num_steps += 1
        self.num_images += num_images

    def elapsed_s(self) -> float:
        """Return the seconds of the interval, without pauses."""
        return self._now() - self._began - (self.spent("paused").seconds - self._paused_s)

    @contextlib.contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Count the time of a block for an activity, but not for the surrounding one."""
        around = self._switch(activity)
        try:
            yield
            self._times[activity] += 1
        finally:
            self._switch(around)

    def spent(self, activity: Activity) -> Spent:
        """Return how often an activity was finished, and the seconds spent in it so far."""
        running_s = self._now() - self._since if activity == self._activity else 0.0
        return Spent(self._times[activity], self._seconds[activity] + running_s)

    def _switch(self, activity: Activity) -> Activity:
        now, before = self._now(), self._activity
        self._seconds[before] += now - self._since
        self._activity, self._since = activity, now
        return before


def images_in(first: int, count: int, batch_size: int, num_images: int) -> int:
    """Return the images of `count` batches of an epoch from the batch `first` on, over all ranks.

    >>> images_in(0, 2, 4, 10), images_in(1, 2, 4, 10)
    (8, 6)
    """
    return sum(min(batch_size, num_images - batch * batch_size) for batch in range(first, first + count))


PROGRESS_S = 1.0
"""Seconds between two heartbeats with the progress of an evaluation."""


class ActivityLog:
    """Reports the activity of the training thread, and counts its time."""

    def __init__(self, event_log: EventLog, device_memory: DeviceMemoryTracker, step: Callable[[], int]) -> None:
        self.clock = Clock()
        self._event_log, self._memory, self._step = event_log, device_memory, step
        self._told = "train"
        self._told_s = 0.0

    @contextlib.contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Report an activity, and the surrounding one after the block has ended without an error."""
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
        """Report how many images of the running evaluation were passed to a device, at most once per second."""
        if time.monotonic() - self._told_s >= PROGRESS_S:
            self._tell("eval", min(num_done, num_images), num_images)

    def _tell(self, activity: str, num_done: int | None = None, num_images: int | None = None) -> None:
        self._told, self._told_s = activity, time.monotonic()
        step = self._step()
        self._event_log.emit(Heartbeat(phase=activity, step=step, num_evaluated=num_done, num_images=num_images))
