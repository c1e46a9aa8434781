"""End this process if another machine of the job is lost.

A machine that loses its power or its network sends no packet about it, and an exchange waits for it until a timeout of
many minutes. So one rank of each machine increments a counter in the store of the process group, and reads the counters
of the others. A machine whose counter does not change is lost. Only this process's clock is used.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

LIMIT_VARIABLE = "SEGAPP_PEER_TIMEOUT_S"
LIMIT_S = 30.0
"""Seconds without a sign of life after which a machine is lost, unless the variable sets another value."""

_LEFT = 2**40
"""Added to the counter of a machine whose ranks no longer need the others."""


class Store(Protocol):
    """The part of torch's stores that the watch uses."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, from 0, and return it."""
        ...

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values of keys that exist."""
        ...


class PeerWatch:
    """A watch over the other machines of a job, in two threads, because a lost store may never answer.

    Time in which this process is stopped or its machine is suspended does not count.

    Args:
        store: store of the process group, with a separate connection.
        own: the key of this machine.
        others: names of the other machines in error messages, by key.
        end: ends this process; called in a thread, with the reason.
        limit_s: seconds of silence after which a machine, or the store, is lost.
        needs_store: treat a store that does not answer as lost, too.
    """

    def __init__(
        self,
        store: Store,
        own: str,
        others: Mapping[str, str],
        end: Callable[[str], None],
        *,
        limit_s: float = LIMIT_S,
        needs_store: bool = True,
    ) -> None:
        self._store, self._own, self._others, self._end, self._limit_s = store, own, dict(others), end, limit_s
        self._beat_s = limit_s / 6
        self._is_over, self._has_left = threading.Event(), False
        self._num_answers = 0
        self._beating = threading.Thread(target=self._beat, name="peer-beat", daemon=True)
        self._beating.start()
        if needs_store:
            threading.Thread(target=self._await_answers, name="peer-watch", daemon=True).start()

    def stop(self, *, has_left: bool) -> None:
        """End the watch.

        Args:
            has_left: this machine ends regularly: the others do not wait for it, and must not report it.
        """
        self._has_left = has_left
        self._is_over.set()
        self._beating.join(self._beat_s)

    def _beat(self) -> None:
        """Increment the counter and read the others, until the watch is over or the store is gone."""
        silence = _Silence(2 * self._beat_s)
        with contextlib.suppress(RuntimeError):  # torch's DistError: no answer any more
            for key in self._others:
                self._store.add(key, 0)  # so that it exists: reading a missing key would wait for it
            while True:
                self._store.add(self._own, 1)
                counts = self._store.multi_get([*self._others])
                self._num_answers += 1
                silence.note(
                    {key: count for key, count in zip(self._others, counts, strict=True) if int(count) < _LEFT}
                )
                if lost := silence.longer_than(self._limit_s):
                    self._end(
                        f"{', '.join(self._others[key] for key in lost)} has not answered for {self._limit_s:g} s"
                    )
                    return
                if self._is_over.wait(self._beat_s):
                    break
            if self._has_left:
                self._store.add(self._own, _LEFT)

    def _await_answers(self) -> None:
        look_s = min(1.0, self._beat_s)
        silence = _Silence(2 * look_s)
        while not self._is_over.wait(look_s):
            silence.note({"store": self._num_answers})
            if silence.longer_than(self._limit_s):
                self._end(f"the machine of rank 0, whose store all ranks use, has not answered for {self._limit_s:g} s")
                return


class _Silence:
    """Measures how long values have not changed, by the clock of this process.

    Args:
        longest_s: a longer time between two reads counts as this.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s, self._looked_s = longest_s, time.monotonic()
        self._values: dict[str, object] = {}
        self._silent_s: dict[str, float] = {}

    def note(self, values: Mapping[str, object]) -> None:
        """Process the values of a read; a key that is left out is no longer watched."""
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, self._longest_s), now_s
        self._silent_s = {
            key: self._silent_s.get(key, 0.0) + passed_s if self._values.get(key) == value else 0.0
            for key, value in values.items()
        }
        self._values = dict(values)

    def longer_than(self, limit_s: float) -> list[str]:
        """Return the keys whose values have not changed for this time."""
        return [key for key, silent_s in self._silent_s.items() if silent_s >= limit_s]


def peer_limit_s() -> float:
    """Return the seconds after which a machine is considered lost; 0: no watch.

    Raises:
        ValueError: the variable is no number of seconds.
    """
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return LIMIT_S
    with contextlib.suppress(ValueError):
        if 0 <= (limit_s := float(text)) < float("inf"):
            return limit_s
    raise ValueError(f"{LIMIT_VARIABLE}={text!r} is not a number of seconds: use 30, or 0 for no watch")
