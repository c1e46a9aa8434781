"""How signals ask a running training for something: they set a flag, the loop looks at it between micro-batches."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

EXIT_STOPPED_AND_SAVED = 75


class StopRequest(Exception):  # noqa: N818 - it is a request, not an error
    """Raised in the loop, at a place where the state is whole, once a stop was asked for."""


class PauseRequest(Exception):  # noqa: N818 - it is a request, not an error
    """Raised in the middle of a step that a pause leaves; the step is undone, and made anew after the pause."""


class StopSignals:
    """SIGINT and SIGTERM as a flag, and SIGUSR1 as another.

    The first signal asks for a stop, the second says that it is under way, the third ends the process at once with
    128 + signal. SIGUSR1 asks for a checkpoint. The handlers do nothing else: they may run in the middle of anything.
    SIGHUP is ignored.

    Args:
        say: called with a line for the person who sent the signal; it must be safe inside a signal handler.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.count = 0
        self.number = 0
        self.signal_name: str | None = None
        self.forward_checkpoint_request: Callable[[], None] | None = None
        """Called instead, by a process that only waits for those that train."""
        self._wants_checkpoint = False
        self._say = say or _write_stderr
        self._previous: dict[int, object] = {}

    @property
    def is_set(self) -> bool:
        """Whether a stop was asked for."""
        return self.count > 0

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._ask_for_checkpoint)
        # A closed terminal must not end a training.
        self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def check(self) -> None:
        """Raises StopRequest once a stop was asked for."""
        if self.is_set:
            raise StopRequest(self.signal_name)

    def take_checkpoint_request(self) -> bool:
        """Whether SIGUSR1 came since the last call."""
        is_wanted, self._wants_checkpoint = self._wants_checkpoint, False
        return is_wanted

    def _ask_for_checkpoint(self, _number: int, _frame: FrameType | None) -> None:
        if self.forward_checkpoint_request is not None:
            self.forward_checkpoint_request()
        self._wants_checkpoint = True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.number = number
        self.signal_name = signal.Signals(number).name
        if self.count == 1:
            self._say(f"{self.signal_name}: stopping after this micro-batch and saving a checkpoint")
        elif self.count == 2:
            self._say(f"{self.signal_name}: still saving; once more ends it at once, without a new checkpoint")
        else:
            os._exit(128 + number)


def _write_stderr(line: str) -> None:
    # os.write, not print: a handler may interrupt a print, whose lock is not reentrant.
    try:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{line}\n".encode())
    except OSError:
        return
