"""The terminal: its abilities, its loss, its title, and notifications for a user who does not look at it."""

import locale
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from segapp.errors import ConfigError
from segapp.run.words import printable
from segapp.tui.header import state_label
from segapp.view.source import Status
from segapp.view.view import View
from segapp.view.wording import miou


def check_terminal() -> None:
    """Raise ConfigError if stdin or stderr is not a terminal that can show the TUI.

    Textual does not check this: with /dev/null as its input, it keeps a core busy.
    """
    for name, stream in (("stdin", sys.__stdin__), ("stderr", sys.__stderr__)):
        if not _is_terminal(stream):
            raise ConfigError(f"{name} is not a terminal: `segapp status RUN` prints the status of the run")
    term = os.environ.get("TERM", "")
    if term in ("", "dumb", "unknown"):
        raise ConfigError(
            f"TERM={term or '(nothing)'} does not support the TUI: set TERM=xterm-256color, or use `segapp status RUN`"
        )


def is_hung_up() -> bool:
    """Return True if the terminal was closed, or its connection lost."""
    poll = select.poll()
    for stream in (sys.__stdin__, sys.__stderr__):
        if _is_open(stream):
            assert stream is not None
            poll.register(stream.fileno(), 0)
    return any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0))


def end_with_terminal(within_s: float) -> None:
    """End this process after its terminal has been gone for some seconds; a thread checks this.

    The event loop cannot check it: if a terminal that accepted no output is closed, it waits forever for a place in the
    queue of a writer that has ended.
    """

    def watch() -> None:
        while not is_hung_up():
            time.sleep(within_s)
        time.sleep(within_s)  # for the usual end
        os._exit(0)

    threading.Thread(target=watch, name="terminal", daemon=True).start()


def is_ascii_only() -> bool:
    """Return True if the locale's encoding has no Unicode."""
    return "utf" not in locale.getpreferredencoding(False).lower()


def _is_open(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.fileno() >= 0
    except (OSError, ValueError):
        return False


def _is_terminal(stream: TextIO | None) -> bool:
    return _is_open(stream) and stream is not None and stream.isatty()


SAVE_TITLE, RESTORE_TITLE = "\x1b[22;2t", "\x1b[23;2t"
_ENDS = ("finished", "stopped", "failed", "crashed")


class Announcer:
    """Writes the title of one run to the terminal, and rings the bell at an alert and at its end."""

    def __init__(self, write: Callable[[str], None]) -> None:
        is_silent = "NO_COLOR" in os.environ or os.environ.get("TERM", "") in ("", "dumb")
        self._write, self._rings = write, not is_silent
        self._title = ""
        self._alerts: dict[str, float] | None = None
        self._is_over: bool | None = None

    def update(self, view: View, status: Status, name: str) -> None:
        """Write the title if it has changed, and announce an end or an alert that is new since the last call."""
        if status.loaded_frac < 1:
            return
        title = terminal_title(view, status, name)
        if title != self._title:
            self._title = title
            self._write(f"\x1b]2;{title}\x07")
        alerts = {kind: raised.last.t for kind, raised in view.alerts.items()}
        is_over = state_label(status) in _ENDS
        if self._alerts is not None and self._rings:  # the first call only records the present state
            is_alert = any(t > self._alerts.get(kind, 0.0) for kind, t in alerts.items())
            if is_alert or (is_over and not self._is_over):
                self._write("\x07")
        self._alerts, self._is_over = alerts, is_over

    def restart(self) -> None:
        """Begin with another run."""
        self._alerts = self._is_over = None


def terminal_title(view: View, status: Status, name: str) -> str:
    """Return `camvid 13/20 mIoU 0.557 (17/19)`, with the state in front unless the run trains."""
    word = state_label(status)
    parts = [] if word in ("live", "busy") else [word.upper()]
    parts.append(printable(name)[:60])
    if view.epoch is not None:
        parts.append(f"{view.epoch}/{view.start.epochs}" if view.start is not None else str(view.epoch))
    if view.vals and view.vals[-1].miou is not None:
        parts.append(f"mIoU {miou(view.vals[-1])}")
    return " ".join(parts)
