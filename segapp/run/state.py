"""State of a run, derived from the end of its events and from the liveness of its process."""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from segapp.run.events import EventReader
from segapp.run.files import boot_id
from segapp.run.folder import RunFolder
from segapp.run.lock import ProcessId, is_alive

State = Literal["live", "busy", "stale", "lost", "crashed", "finished", "stopped", "failed"]
Word = State | Literal["gone", "reading", "paused", "resuming", "starting"]
"""A state as people see it: more is known than `State` says, which programs read."""

OVER = frozenset({"gone", "crashed", "finished", "stopped", "failed"})
"""The words of runs that no trainer has."""

FRESH_S = 15.0
"""A run without an event for longer than this, and longer than five steps, is no longer `live`."""

_TAIL_BYTES = 256 * 2**10
_MAX_TAIL_BYTES = 16 * 2**20
"""Maximum size of the end of the file that is searched for the last events."""


@dataclass(frozen=True)
class StateFacts:
    """Facts that determine a state."""

    end_status: Literal["finished", "stopped", "failed"] | None = None
    """Status of `run_end`, if no training began after it."""
    is_starting: bool = False
    """True if a process has taken the run since its last `run_start` or `run_end`."""
    is_trainer_alive: bool | None = None
    """True if a process holds the run's lock, or still runs; None if unknown on this host."""
    event_age_s: float | None = None
    """Time since the last event of any type; None if there is none."""
    step_age_s: float | None = None
    """Time since the last step that the present process has made."""
    step_interval_s: float = 0.0
    """Median time between two `step` events."""
    is_paused: bool = False
    is_resumed: bool = False
    """True if the process that holds the run continues a training."""
    is_there: bool = True
    """False if the run folder was removed."""
    is_read: bool = True
    """False while older events are read; the end may be in what is not read yet."""


def word_of(facts: StateFacts) -> Word:
    """Return the word for a set of facts; the first that holds: gone, reading, no trainer, no events, paused, ..."""
    if not facts.is_there:
        return "gone"
    if not facts.is_read:
        return "reading"
    state = derive_state(facts)
    if state not in ("live", "busy"):
        return state
    if facts.is_paused and not facts.is_starting:  # else the process before was paused
        return "paused"
    if facts.is_starting or facts.step_age_s is None:
        return "resuming" if facts.is_resumed else "starting"
    return state


def derive_state(facts: StateFacts) -> State:
    """Return the state for a set of facts.

    live: recent steps. busy: alive, recent events, but no recent steps (start, evaluation, pause, slow data). stale:
    alive, no recent events. lost: on another host, no recent events. crashed: the process is gone, without a `run_end`.
    finished, stopped, failed: the status of `run_end`.
    """
    if facts.is_starting:
        return "busy"
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


def process_of(folder: RunFolder) -> ProcessId | None:
    """Return the process that holds or held a run, or that has just created its folder; None if that is not proven.

    In the copy of a run, the lock is a file with another inode than its holder's.
    """
    holder = folder.read_holder()
    if holder is not None:
        return holder if holder.inode in (None, folder.lock_inode()) else None
    info = folder.read_info()
    return None if info is None else info.process


def is_trainer_alive(folder: RunFolder) -> bool | None:
    """Return True if a process holds the run's lock, or still runs; None if unknown on this host."""
    is_locked, process = folder.is_locked(), process_of(folder)
    if is_locked or (is_locked is None and folder.read_holder() is None):  # only its owner may read the lock
        return is_locked
    if process is None:
        return False
    if process.boot_id not in (None, boot_id()) and _was_written_since_boot(folder):
        return None  # its holder is from an earlier boot, or on another machine, perhaps with the same name
    return is_alive(process)


def _was_written_since_boot(folder: RunFolder) -> bool:
    """Return True if events were written since this machine started."""
    try:
        return folder.events.stat().st_mtime > time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):  # no events, or a system without this clock
        return False


def event_age_s(events: Path, last_s: float | None, is_alive: bool | None, now_s: float) -> float | None:
    """Return the time since the last event, which has the time `last_s`; None if there is none.

    A trainer that is alive writes on this machine, so the time of its file counts: the clocks may have been set since.
    """
    with contextlib.suppress(OSError):
        last_s = events.stat().st_mtime if is_alive and last_s is not None else last_s
    return None if last_s is None else max(0.0, now_s - last_s)


def starting_since(holder: ProcessId | None, is_alive: bool | None, acquired_s: float | None) -> float | None:
    """Return when the process that holds a run took it, if it runs and has not begun to train; None otherwise.

    `acquired_s` is the time of its lock that the last `run_start` names: an order of times would depend on the clock.
    """
    taken_s = None if holder is None or not is_alive else holder.acquired_s
    return None if taken_s == acquired_s else taken_s


def read_tail(path: Path) -> list[dict[str, Any]]:
    """Return the last events of a file; read further back if the end has none."""
    num_bytes = _TAIL_BYTES
    while True:
        events = EventReader(path, last_bytes=num_bytes).read_raw()
        if events or num_bytes >= _MAX_TAIL_BYTES:
            return events
        num_bytes *= 4
