"""The replay of a recorded run, as a source of the screen's view."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from segapp.errors import RunError
from segapp.run.events import EventReader
from segapp.run.folder import RunFolder
from segapp.run.state import RunFacts, derive_state
from segapp.view.history import History
from segapp.view.source import Status
from segapp.view.view import View, fold_events

_LONGEST_GAP_S = 60.0
_BACK_S = 1.0
"""Within so many seconds after the beginning of an epoch, a move back goes to the epoch before."""


class ReplaySource:
    """Replays the events of a run; it can be paused, and moved to any epoch.

    Args:
        folder: The run folder.
        speed: Seconds of the run per second; a gap of more than a minute counts as a minute.
        monotonic: Returns monotonic seconds.

    Raises:
        RunError: There are no events to replay.
    """

    def __init__(self, folder: RunFolder, speed: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self.view = View()
        self._monotonic = monotonic
        self._speed = speed
        self._items = EventReader(folder.events).read_raw()
        if not self._items:
            raise RunError(f"{folder.path}: no events to replay: wait until the training has started")
        self._due_s = list(_due_times([float(raw["t"]) for raw in self._items]))
        self._epochs_s = [0.0, *self._begins(), self._due_s[-1]]
        """When each epoch begins, and the end of the recording, in seconds of the replay."""
        self._next = 0
        self._at_s, self._since = 0.0, monotonic()
        self.is_paused = False
        self._series_field, self._series_end, self._series = "", 0, History()

    def _begins(self) -> Iterator[float]:
        for due_s, raw in zip(self._due_s, self._items, strict=True):
            if raw["type"] in ("epoch_start", "run_start"):
                yield due_s

    def toggle_pause(self) -> None:
        """Pause, or go on; a replay that is over begins again."""
        if self._next >= len(self._items) and not self.is_paused:
            self._move(0.0)
        else:
            self._move(self._played_s())
            self.is_paused = not self.is_paused

    def move_epoch(self, by: int) -> None:
        """Move to the beginning of the next epoch (1), or of the present one (-1); there, of the one before."""
        now_s = self._played_s()
        if by > 0:
            self._move(min((s for s in self._epochs_s if s > now_s), default=self._due_s[-1]))
        else:
            before_s = now_s if self.is_paused else now_s - _BACK_S * self._speed
            self._move(max((s for s in self._epochs_s if s < before_s), default=0.0))

    def move_to(self, *, end: bool) -> None:
        """Move to the beginning or to the end of the recording."""
        self._move(self._due_s[-1] if end else 0.0)

    def _move(self, to_s: float) -> None:
        """Play on from a moment; the events before it are folded by `poll`."""
        if self._next and to_s < self._due_s[self._next - 1]:
            self.view, self._next, self._series_field = View(), 0, ""
        self._at_s, self._since = to_s, self._monotonic()

    def poll(self) -> bool:
        """Fold the events that are due; return True if more are due already."""
        played_s = self._played_s()
        end = self._next
        while end < len(self._items) and self._due_s[end] <= played_s and end - self._next < 20_000:
            end += 1
        fold_events(self.view, self._items[self._next : end])
        self._next = end
        return end < len(self._items) and self._due_s[end] <= played_s

    def series(self, field: str) -> History:
        """Return the values of a number of the `step` events that were replayed."""
        inside, _, name = field.rpartition(".")
        if self._series_field != field:
            self._series_field, self._series_end, self._series = field, 0, History()
        rows = []
        for raw in self._items[self._series_end : self._next]:
            holder = raw.get(inside) if inside else raw
            value = holder.get(name) if raw["type"] == "step" and isinstance(holder, dict) else None
            if isinstance(value, int | float) and type(raw.get("step")) is int:
                rows.append((raw["step"], float(raw["t"]), float(value)))
        self._series_end = self._next
        if rows:
            self._series.extend(*zip(*rows, strict=True))
        return self._series

    def status(self) -> Status:
        """Return the status at the replayed moment."""
        view, is_over = self.view, self._next >= len(self._items)
        last_s = view.last_s or float(self._items[0]["t"])
        behind_s = max(0.0, self._played_s() - self._due_s[max(0, self._next - 1)])
        now_s = last_s if is_over else last_s + behind_s
        facts = RunFacts(
            end_status=view.end.status if view.end is not None else None,
            is_trainer_alive=not is_over,
            event_age_s=now_s - last_s,
            step_age_s=None if view.last_step_s is None else max(0.0, now_s - view.last_step_s),
            step_interval_s=view.step_interval_s,
        )
        return Status(
            state=derive_state(facts),
            age_s=now_s - last_s,
            now_s=now_s,
            replay="replay paused" if self.is_paused else f"replay {self._speed:g}x",
        )

    def _played_s(self) -> float:
        """Return the moment of the replay: seconds of the run, without long gaps."""
        on_s = 0.0 if self.is_paused else (self._monotonic() - self._since) * self._speed
        return min(self._at_s + on_s, self._due_s[-1])


def _due_times(times_s: list[float]) -> Iterator[float]:
    """Yield, for each event, the seconds from the start of the replay at which it is due."""
    due_s, previous_s = 0.0, times_s[0]
    for time_s in times_s:
        due_s += min(max(0.0, time_s - previous_s), _LONGEST_GAP_S)
        previous_s = time_s
        yield due_s
