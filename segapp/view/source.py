"""The files of a run that a viewer follows: events, one number of its steps, its log, its images."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from segapp.run.events import EventReader, StepColumn, StepRun
from segapp.run.files import open_of_run
from segapp.run.folder import FIRST_BATCH, RunFolder
from segapp.run.lock import ProcessId
from segapp.run.state import (
    OVER,
    State,
    StateFacts,
    Word,
    derive_state,
    event_age_s,
    is_trainer_alive,
    process_of,
    starting_since,
    word_of,
)
from segapp.run.words import printable
from segapp.view.history import LossHistory
from segapp.view.view import EventFold, View

_SLICE_BYTES = 4 * 2**20
_MAX_PICTURES = 1500


class SeriesReader:
    """Follows one number of the `step` events, a field or `terms.NAME`; `fold_file` fills several together."""

    def __init__(self, path: Path, field: str) -> None:
        self.history, self.column = LossHistory(), StepColumn(field)
        self._reader = EventReader(path)
        self._generation = self._reader.generation

    def poll(self) -> bool:
        """Read at most four megabytes; return True if more is waiting."""
        self._reader.read_column(self.column, _SLICE_BYTES)
        if self._reader.generation != self._generation:
            self._generation, self.history = self._reader.generation, LossHistory()
        self.take()
        return self._reader.num_bytes_left > _SLICE_BYTES

    def take(self) -> None:
        """Move the values of the column to the history."""
        rows, self.column.rows = self.column.rows, []
        starts = [0, *(i for i in range(1, len(rows)) if rows[i][1] <= rows[i - 1][1])]
        for start, end in pairwise([*starts, len(rows)] if rows else []):
            t, step, value = zip(*rows[start:end], strict=True)
            if self.history.size and step[0] <= self.history.step[-1]:  # repeated by a resumed training
                self.history.drop_after(step[0] - 1)
            self.history.extend(step, t, value)


_BLOCK_BYTES = 2**15
"""Size of the pieces that are read, because events take several times their bytes until they are folded."""


@dataclass(frozen=True)
class Status:
    """The status of a run, which does not follow from its events only."""

    state: State
    word: Word
    age_s: float | None = None
    now_s: float = 0.0
    """Present time, Unix seconds; on the trainer's clock if its offset is known."""
    loaded_frac: float = 1.0
    host: str | None = None
    pid: int | None = None
    skew_s: float = 0.0
    """Seconds by which the trainer's clock is ahead of this host's; 0 if small."""
    starting_s: float | None = None
    """When a process that has not yet made a step took the run, or began to train; None if there is none."""
    is_resumed: bool = False
    """True if that process continues a training."""

    @property
    def is_over(self) -> bool:
        """True if no trainer will answer a command."""
        return self.word in OVER

    @property
    def has_old_numbers(self) -> bool:
        """True if the numbers of the steps and of the devices are not of a process that is known to train."""
        return self.is_over or self.starting_s is not None or self.word in ("stale", "lost")


@dataclass(frozen=True)
class _TrainerFacts:
    """Facts about the trainer in a run folder."""

    checked_s: float
    is_there: bool
    is_alive: bool | None
    process: ProcessId | None
    """Result of `process_of`."""


class LiveSource:
    """Follows the events of a run folder."""

    full_bytes = 2**21
    """Of a longer backlog, only this last part is read completely; the rest is skimmed."""

    def __init__(
        self, folder: RunFolder, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder = folder
        self._fold = EventFold(self.new_view())
        self._reader = EventReader(folder.events)
        self._clock, self._monotonic = clock, monotonic
        self._generation = self._reader.generation
        self._num_read = 0
        self._is_caught_up = False
        self._is_void = False
        self._opened = monotonic()
        self._arrived: float | None = None
        self._step_arrived: float | None = None
        self._trainer: _TrainerFacts | None = None
        self._series: dict[str, SeriesReader] = {}

    @property
    def view(self) -> View:
        """The state that follows from the events read so far."""
        return self._fold.view

    def new_view(self) -> View:
        return View()

    def poll(self, budget_s: float = 0.1) -> bool:
        """Read for a limited time; return True if more is waiting."""
        deadline = self._monotonic() + budget_s
        while True:
            left = self._reader.num_bytes_left
            items: Sequence[dict[str, Any] | StepRun] = (
                self._reader.read_skimmed(_BLOCK_BYTES)
                if left > self.full_bytes
                else self._reader.read_raw(_BLOCK_BYTES)
            )
            if self._reader.generation != self._generation:
                self._generation, self._is_void = self._reader.generation, True
            if items and self._is_void:  # the file was replaced or removed; the old view stays until there are events
                self._fold, self._is_void = EventFold(self.new_view()), False
                self._is_caught_up, self._num_read = False, 0
            step_before = self.view.moved_s
            self._fold.add(items)
            if items and self._is_caught_up:
                self._arrived = self._monotonic()
                if self.view.moved_s != step_before:
                    self._step_arrived = self._arrived
            left_now = self._reader.num_bytes_left
            self._num_read += max(0, left - left_now)
            if left_now == 0 or left_now >= left:  # all, or all except an incomplete last line
                self._is_caught_up = True
                return False
            if self._monotonic() >= deadline:
                return True

    def series(self, field: str) -> LossHistory:
        """Return the values of a number of the `step` events; each call reads a slice of the file."""
        if field not in self._series:
            self._series[field] = SeriesReader(self.folder.events, field)
        self._series[field].poll()
        return self._series[field].history

    def facts(self) -> StateFacts:
        """Return the facts from which the state is derived.

        After an event has arrived, ages are counted from its arrival, so they do not depend on the trainer's clock.
        Before the first arrival from another machine, they are counted from the opening.
        """
        view, trainer, now_s, taken_s = self.view, self._trainer_facts(), self._monotonic(), self._taken_s()
        age_s = event_age_s(self.folder.events, view.last_s, trainer.is_alive, self._clock())
        if self._arrived is not None or (trainer.is_alive is None and age_s is not None):
            age_s = max(0.0, now_s - (self._opened if self._arrived is None else self._arrived))
        step_age_s = None
        # Both times are on the trainer's clock until a step arrives here.
        if view.moved_s is not None and view.last_s is not None and age_s is not None:
            step_age_s = age_s + max(0.0, view.last_s - view.moved_s)
            step_age_s = step_age_s if self._step_arrived is None else max(0.0, now_s - self._step_arrived)
        return StateFacts(
            end_status=view.end.status if view.end is not None else None,
            is_starting=taken_s is not None,
            is_trainer_alive=trainer.is_alive,
            event_age_s=age_s,
            step_age_s=step_age_s,
            step_interval_s=view.step_interval_s,
            is_paused=view.is_paused,
            is_resumed=view.start is not None and (taken_s or view.start.resumed_from_step) is not None,
            is_there=trainer.is_there,
            is_read=self._is_caught_up or self._reader.num_bytes_left == 0,
        )

    def status(self) -> Status:
        now_s, facts, trainer = self._clock(), self.facts(), self._trainer_facts()
        skew_s = self._skew_s(now_s)
        left = self._reader.num_bytes_left
        is_reading = not facts.is_read
        process, state, view, taken_s = trainer.process, derive_state(facts), self.view, self._taken_s()
        began_s = view.start.t if view.start is not None and view.moved_s is None else None
        return Status(
            state="busy" if is_reading else state,  # the end may be in what is not read yet
            word=word_of(facts),
            age_s=facts.event_age_s,
            now_s=now_s + skew_s,
            loaded_frac=self._num_read / (self._num_read + left) if is_reading else 1.0,
            host=process.host if process else None,
            pid=process.pid if process else None,
            skew_s=skew_s,
            starting_s=taken_s or began_s if state in ("live", "busy") and not is_reading else None,
            is_resumed=facts.is_resumed,
        )

    def _taken_s(self) -> float | None:
        """Return when a process took the folder that has not begun to train; None if there is none."""
        trainer, start = self._trainer_facts(), self.view.start
        acquired_s = None if start is None else start.acquired_s
        return starting_since(trainer.process, trainer.is_alive, acquired_s)

    def _skew_s(self, now_s: float) -> float:
        if self.view.last_s is None or self._arrived is None:
            return 0.0
        skew_s = self.view.last_s - (now_s - (self._monotonic() - self._arrived))
        return skew_s if abs(skew_s) > 5 else 0.0

    def _trainer_facts(self) -> _TrainerFacts:
        """Return the folder's facts about the trainer; read every two seconds."""
        now = self._monotonic()
        if self._trainer is None or now - self._trainer.checked_s >= 2.0:
            is_there = os.path.isdir(self.folder.path)
            self._trainer = _TrainerFacts(
                now,
                is_there,
                is_alive=is_trainer_alive(self.folder) if is_there else False,
                process=process_of(self.folder),
            )
        return self._trainer


def fold_file(view: View, path: Path, series: Sequence[SeriesReader] = ()) -> None:
    """Fold all events of a file; of consecutive steps, only the losses, the last step, and the series."""
    reader, fold = EventReader(path), EventFold(view)
    for items in reader.skim([each.column for each in series]):
        fold.add(items)
        for each in series:
            each.take()
    reader.close()


def newest_pictures(folder: Path) -> list[Path]:
    """Return the sample pictures of a run, at most `_MAX_PICTURES`: of its first batch, then the newest first."""
    try:
        with os.scandir(folder) as entries:
            found = [
                (entry.name == FIRST_BATCH, entry.stat(follow_symlinks=False).st_mtime, entry.name)
                for entry in entries
                if entry.name.endswith(".png") and entry.name[0] != "." and entry.is_file(follow_symlinks=False)
            ]
    except OSError:
        return []
    return [folder / name for *_, name in sorted(found, reverse=True)[:_MAX_PICTURES]]


class LogTail:
    """Reads the last lines of a text file, and then lines that are added to it."""

    def __init__(self, path: Path, max_bytes: int = 2**16) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._offset: int | None = None
        self._rest = b""
        self.written_s = 0.0
        """When the file was last written, Unix seconds."""

    def read(self) -> list[str]:
        """Return the new whole lines, printable; none if the file cannot be read."""
        try:
            with open(open_of_run(self._path), "rb") as file:
                facts = os.fstat(file.fileno())
                size, self.written_s = facts.st_size, facts.st_mtime
                is_first = self._offset is None or size < self._offset
                start = max(0, size - self._max_bytes) if is_first else max(self._offset or 0, size - self._max_bytes)
                file.seek(start)
                block = (b"" if is_first else self._rest) + file.read(self._max_bytes)
        except OSError:
            return []
        self._offset = start + len(block) - (0 if is_first else len(self._rest))
        *lines, rest = block.split(b"\n")
        self._rest = rest[-self._max_bytes :]  # a line may have no end
        if is_first and start > 0:
            del lines[:1]
        return [printable(line.decode(errors="replace")) for line in lines]
