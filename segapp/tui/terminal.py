"""The terminal: its abilities, its loss, and the color themes; the command palette offers Textual's themes, too."""

import locale
import os
import select
import sys
import threading
import time
from typing import Any

from textual.app import App
from textual.constants import DEFAULT_THEME
from textual.theme import Theme

from segapp.errors import ConfigError

_STREAMS = {"stdin": 0, "stderr": 2}


def check_terminal() -> None:
    """Raise ConfigError if stdin or stderr is not a terminal that can show the TUI.

    Textual does not check this: with /dev/null as its input, it keeps a core busy.
    """
    for name, fd in _STREAMS.items():
        if not os.isatty(fd):
            raise ConfigError(f"{name} is not a terminal: `segapp status RUN` prints the status of the run")
    term = os.environ.get("TERM", "")
    if term in ("", "dumb", "unknown"):
        raise ConfigError(
            f"TERM={term or '(nothing)'} does not support the TUI: set TERM=xterm-256color, or use `segapp status RUN`"
        )


def is_hung_up() -> bool:
    """Return True if the terminal was closed, or its connection lost."""
    poll = select.poll()
    for fd in _STREAMS.values():
        poll.register(fd, 0)
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
    """Return True if the locale or stderr has another encoding than UTF-8.

    Python replaces the locale C by C.UTF-8 in LC_CTYPE; then LANG still names it.
    """
    lc_all, lc_ctype, lang = (os.environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    encodings = (locale.getencoding(), getattr(sys.__stderr__, "encoding", "utf-8"))
    is_c = not lc_all and lc_ctype == "C.UTF-8" and lang in ("C", "POSIX")
    return is_c or any("utf" not in encoding.lower() for encoding in encodings)


DARK = Theme(
    name="segapp-dark",
    primary="#5aa9e6",
    secondary="#3f7f8f",
    accent="#c792ea",
    warning="#f2b84b",
    error="#ff6b6b",
    success="#7bd88f",
    foreground="#d8dee9",
    background="#0f1419",
    surface="#0f1419",
    panel="#1b232c",
    variables={"border": "#3b4754", "text-muted": "#8593a1"},
)
LIGHT = Theme(
    name="segapp-light",
    primary="#0b62a8",
    secondary="#4d98a8",
    accent="#7b3fa0",
    warning="#9a5b00",
    error="#b3261e",
    success="#1c7a35",
    foreground="#1c2329",
    background="#fafafa",
    surface="#fafafa",
    panel="#e4e8ec",
    dark=False,
    variables={"border": "#a8b2bc", "text-muted": "#66727d"},
)


def set_up_themes(app: App[Any]) -> None:
    """Register segapp's themes, and select the dark one unless the environment names another for Textual."""
    for own in (DARK, LIGHT):
        app.register_theme(own)
    is_named = DEFAULT_THEME != "textual-dark" and DEFAULT_THEME in app.available_themes
    app.theme = DEFAULT_THEME if is_named else DARK.name
