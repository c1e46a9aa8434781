"""Signal handlers of a training process: they set flags that the training loop reads between micro-batches."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Literal

from segapp.waiting import lines_while

# EX_TEMPFAIL of sysexits.h: schedulers can start the job again.
EXIT_STOPPED_AND_SAVED = 75

_LOOK_S = 0.25
_END_START_S = 0.5
ONE_TERM_S = 2.0
"""SIGTERMs within this time are one request: if a scheduler signals every process of a job, a rank also gets the
signal from its launcher, which passes it on."""

StoppedBy = Literal["signal", "command"]


class StopRequest(Exception):  # noqa: N818 - it is a request, not an error
    """Raised by the training loop at a point where the training state is consistent, after a stop was requested."""

    def __init__(self, reason: str | None, by: StoppedBy = "command") -> None:
        super().__init__(reason)
        self.by = by


class PauseRequest(Exception):  # noqa: N818 - it is a request, not an error
    """Raised between the micro-batches of a step; the step is rolled back, and repeated after the pause."""


class StopSignals:
    """Flags set by SIGINT and SIGTERM (stop) and by SIGUSR1 (checkpoint), as a context manager.

    The first SIGINT or SIGTERM requests a stop, the second prints that the stop is in progress, and the third exits
    immediately with 128 + signal number; SIGTERMs at nearly the same time count once. SIGHUP is ignored. The handlers
    do nothing else, because they may interrupt any code. A thread reports a stop that takes long.

    Args:
        is_active: handle the signals; False leaves the process's handlers unchanged.
        end_start: called half a second after a request with the exit code 128 + signal number, to end the process
            unless the training has begun; None: the process has other work.

    Attributes:
        where: returns what the training does.
    """

    def __init__(self, *, is_active: bool = True, end_start: Callable[[int], None] | None = None) -> None:
        self._is_active, self.end_start = is_active, end_start
        self.where: Callable[[], str] = lambda: "training"
        self._counted_elsewhere: set[int] = set()
        self._handled_s = 0.0
        self._is_over = threading.Event()
        self.count = 0
        self.number = 0
        self.signal_name: str | None = None
        self.by: StoppedBy = "signal"
        self._on_checkpoint_request: Callable[[], None] | None = None
        self._wants_checkpoint = False
        self._previous: dict[int, object] = {}
        self._signalled_s = 0.0

    @property
    def is_set(self) -> bool:
        return self.count > 0

    def __enter__(self) -> StopSignals:
        if not self._is_active:
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._request_checkpoint)
        # Closing the terminal must not end the training.
        self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        threading.Thread(target=self._watch, name="stop", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def request_stop(self, reason: str) -> None:
        """Request a stop without a signal; `reason` is the first part of the reason of the run's end."""
        self.count += 1
        self.number, self.signal_name, self.by = signal.SIGTERM, reason, "command"

    def check(self) -> None:
        if self.is_set:
            raise StopRequest(self.signal_name, self.by)

    def take_checkpoint_request(self) -> bool:
        """Return True if SIGUSR1 arrived since the last call."""
        is_wanted, self._wants_checkpoint = self._wants_checkpoint, False
        return is_wanted

    def forward_checkpoint_requests(self, callback: Callable[[], None]) -> None:
        """Call `callback` on every SIGUSR1, for a process that starts the ranks and does not train itself."""
        self._on_checkpoint_request = callback

    def _request_checkpoint(self, _number: int, _frame: FrameType | None) -> None:
        if self._on_checkpoint_request is not None:
            self._on_checkpoint_request()
        self._wants_checkpoint = True

    def _watch(self) -> None:
        """End a process that was stopped before its training, and report a stop that takes long."""
        while not self.number:
            if self._is_over.wait(_LOOK_S):
                return
        text = "still stopping, in {}; a third signal ends the process without a new checkpoint"
        with lines_while(lambda: text.format(self.where()), first_s=5.0):
            if not self._is_over.wait(_END_START_S) and self.end_start is not None:
                self.end_start(128 + self.number)
            self._is_over.wait()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if frame is None:  # called by `watch_signals`
            if now_s - self._handled_s < ONE_TERM_S:  # by the main thread, which waits in C++ since then
                return
            self._counted_elsewhere.add(number)
        elif number in self._counted_elsewhere:
            self._counted_elsewhere.discard(number)
            return
        else:
            self._handled_s = now_s
        before_s, self._signalled_s = self._signalled_s, now_s
        if number == self.number == signal.SIGTERM and self._signalled_s - before_s < ONE_TERM_S:
            return
        self.count += 1
        self.number = number
        self.signal_name = signal.Signals(number).name
        once = ", if the training has begun" if self.end_start is not None else ""
        if self.count == 1:
            _write_stderr(f"{self.signal_name}: stopping after this micro-batch and saving a checkpoint{once}")
        elif self.count == 2:
            _write_stderr(
                f"{self.signal_name}: still saving; send it once more to exit immediately, without a new checkpoint"
            )
        else:
            os._exit(128 + number)


def _write_stderr(line: str) -> None:
    # os.write, not print: a handler may interrupt a print, whose lock is not reentrant.
    try:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{line}\n".encode())
    except OSError:
        return
