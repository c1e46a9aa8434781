"""End this process if a rank that it would wait for is gone: a process of this machine, or another machine.

A machine that loses its power or its network sends no packet about it, and an exchange waits for it until a timeout of
many minutes. So one rank of each machine increments a counter in the store of the process group, and reads the counters
of the others. A machine whose counter does not change is lost. Only this process's clock is used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from segapp.parallel.launch import end_process, end_with_peers

LIMIT_VARIABLE = "SEGAPP_PEER_TIMEOUT_S"
LIMIT_S = 30.0
"""Seconds without a sign of life after which a machine is lost, unless the variable sets another value."""

_LEFT = 2**40
"""Added to the counter of a machine whose ranks no longer need the others."""


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
        store: Any,
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


class Peers:
    """The ranks of a job and, on one rank per machine, the watch over the other machines, which starts here.

    Args:
        rank: rank of this process.
        places: (machine, process id, host name) of every rank.
        store: returns the store of the process group, with a separate connection.
        exit_code: exit code of this process if it ends because another one is gone.
        limit_s: seconds of silence after which a machine is lost; 0: they are not watched.

    Attributes:
        pids: (machine, process id) of every rank.
    """

    def __init__(
        self,
        rank: int,
        places: Sequence[tuple[str, int, str]],
        store: Callable[[], Any],
        exit_code: int,
        limit_s: float,
    ) -> None:
        self.pids = [(machine, pid) for machine, pid, _ in places]
        self._exit_code = exit_code
        self._report: Callable[[str], None] = logging.getLogger("segapp").error
        self._watch: PeerWatch | None = None
        here = places[rank][0]
        self._pids_here = [pid for number, (machine, pid) in enumerate(self.pids) if machine == here and number != rank]
        ranks_of: dict[str, list[int]] = {}
        for number, (machine, _, _) in enumerate(places):
            ranks_of.setdefault(machine, []).append(number)
        if limit_s > 0 and len(ranks_of) > 1 and ranks_of[here][0] == rank:
            job = f"segapp/alive/{places[0][0]}/{places[0][1]}"  # of this round, because all rounds may share the store
            others = {f"{job}/{machine}": _named(places, own) for machine, own in ranks_of.items() if machine != here}
            self._watch = PeerWatch(store(), f"{job}/{here}", others, self._lose, limit_s=limit_s)

    def _lose(self, reason: str) -> None:
        message = f"{reason}: its power or network connection failed, or it hangs"
        end_process(self._exit_code, lambda: self._tell(message))

    def _tell(self, message: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"error: {message}; --resume continues from the newest checkpoint\n".encode())
        self._report(message)

    @contextlib.contextmanager
    def watched(self, report: Callable[[str], None]) -> Iterator[None]:
        """Run the body; end this process soon after a rank of this machine, or another machine, is gone.

        Args:
            report: called with the reason before the process ends.
        """
        gone, self._report = "another rank ended while this rank waited for it: read the other rank's output", report
        pids, code = self._pids_here, self._exit_code
        end_watch = end_with_peers(pids, code, lambda: self._tell(gone)) if pids else lambda: None
        try:
            yield
            self.close(has_left=True)
        finally:
            end_watch()

    def close(self, *, has_left: bool = False) -> None:
        """End the watch over the other machines; with `has_left`, machines that still watch do not report this one."""
        if self._watch is not None:
            self._watch.stop(has_left=has_left)
            self._watch = None


def _named(places: Sequence[tuple[str, int, str]], ranks: Sequence[int]) -> str:
    """Return "machine node2 (ranks 2 to 3)"."""
    numbers = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"machine {places[ranks[0]][2]} ({numbers})"


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
