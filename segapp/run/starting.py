"""Messages before a command's work begins: in a training's log, which the TUI reads; for others, on a terminal."""

from __future__ import annotations

import os
import sys
from typing import Any

_MARK = "starting: "


def announce(what: str) -> None:
    """Print what the trainer does now, after `starting:`."""
    print(f"{_MARK}{what}", flush=True)


def announce_on_terminal(what: str) -> None:
    """Print a command's present action on stderr if it is a terminal; scripts, pipes and --json get only results."""
    if sys.stderr.isatty():
        print(f"{_MARK}{what}", file=sys.stderr, flush=True)


class _TorchNotice:
    """A module finder that finds nothing, and prints a line when torch is about to be imported.

    It is never removed, because removing a finder during a search would skip the next one.
    """

    has_printed = False

    def find_spec(self, name: str, *_: object) -> None:
        if name == "torch" and not self.has_printed:
            self.has_printed = True
            announce_on_terminal("importing torch")


def announce_torch() -> None:
    """Print a line on a terminal when a command imports torch, which takes seconds."""
    sys.meta_path.insert(0, _TorchNotice())


def last_announced(lines: list[str]) -> str | None:
    """Return the last announcement in the lines of a log; None if there is none."""
    return next((line.removeprefix(_MARK) for line in reversed(lines) if line.startswith(_MARK)), None)


class _LastingStream:
    """A stream that continues without its reader: after a broken pipe, it writes to /dev/null."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text and return its length."""
        try:
            self._stream.write(text)
        except BrokenPipeError:
            self._discard()
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._discard()

    def _discard(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)


def outlast_readers() -> None:
    """Keep this process from ending when the reader of its output ends, as in `segapp train | head`."""
    streams: Any = _LastingStream(sys.stdout), _LastingStream(sys.stderr)
    sys.stdout, sys.stderr = streams
