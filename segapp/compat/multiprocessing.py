"""Private names of Python's multiprocessing, as of Python 3.11 to 3.14."""

from __future__ import annotations

from typing import Any


def set_within(event: Any, timeout_s: float) -> bool:
    """Set a `multiprocessing.Event` without waiting for ever for a lock that a killed process holds.

    Processes that wait for the event are not notified: those of torch's DataLoader look at it between two batches.

    Returns:
        True if the lock was free within `timeout_s` seconds.
    """
    if not event._cond.acquire(timeout=timeout_s):
        return False
    event._flag.release()
    event._cond.release()
    return True
