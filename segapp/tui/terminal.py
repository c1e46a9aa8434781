"""The terminal: its abilities, and its loss."""

import locale
import os
import select
import sys
import threading
import time
from typing import TextIO

from segapp.errors import ConfigError


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
