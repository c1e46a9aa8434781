"""Signal handlers of a training process: they set flags that the training loop reads between micro-batches."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Literal

EXIT_STOPPED_AND_SAVED = 75

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
    do nothing else, because they may interrupt any code.

    Args:
        write_line: prints one line for the user; must be safe inside a signal handler. Default: to stderr.
        is_active: handle the signals; False leaves the process's handlers unchanged.
    """

    def __init__(self, write_line: Callable[[str], None] | None = None, *, is_active: bool = True) -> None:
        self._is_active = is_active
        self.count = 0
        self.number = 0
        self.signal_name: str | None = None
        self.by: StoppedBy = "signal"
        self._on_checkpoint_request: Callable[[], None] | None = None
        self._wants_checkpoint = False
        self._write_line = write_line or _write_stderr
        self._previous: dict[int, object] = {}
        self._signalled_s = 0.0

    @property
    def is_set(self) -> bool:
        """True once a stop was requested."""
        return self.count > 0

    def __enter__(self) -> StopSignals:
        if not self._is_active:
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._request_checkpoint)
        # Closing the terminal must not end the training.
        self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def request_stop(self, reason: str) -> None:
        """Request a stop without a signal; `reason` is the first part of the reason of the run's end."""
        self.count += 1
        self.number, self.signal_name, self.by = signal.SIGTERM, reason, "command"

    def check(self) -> None:
        """Raise StopRequest if a stop was requested."""
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

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        before_s, self._signalled_s = self._signalled_s, time.monotonic()
        if number == self.number == signal.SIGTERM and self._signalled_s - before_s < ONE_TERM_S:
            return
        self.count += 1
        self.number = number
        self.signal_name = signal.Signals(number).name
        if self.count == 1:
            self._write_line(f"{self.signal_name}: stopping after this micro-batch and saving a checkpoint")
        elif self.count == 2:
            self._write_line(
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
