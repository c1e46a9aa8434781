"""Private names of Python's multiprocessing, as of Python 3.11 to 3.14."""

from __future__ import annotations

from typing import Any


def set_within(event: Any, timeout_s: float) -> bool:
    """Set a `multiprocessing.Event`, and do not wait forever for a lock that a killed process holds.

    Processes that wait for the event are not notified; the workers of torch's DataLoader check it between batches.

    Returns:
        True if the lock was free within `timeout_s` seconds.
    """
    if not event._cond.acquire(timeout=timeout_s):
        return False
    event._flag.release()
    event._cond.release()
    return True
