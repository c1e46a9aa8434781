"""What a training prints: what it does before its first step, which the screen reads in its log, and to whom."""

from __future__ import annotations

import os
import sys
from typing import Any

_MARK = "starting: "


def announce(what: str) -> None:
    """Print what the trainer does now; `what` follows on `starting:`."""
    print(f"{_MARK}{what}", flush=True)


def last_announced(lines: list[str]) -> str | None:
    """Return what was announced last in the lines of a log; None if nothing was."""
    return next((line.removeprefix(_MARK) for line in reversed(lines) if line.startswith(_MARK)), None)


class _LastingStream:
    """A stream that goes on without its reader: after a broken pipe, what is written goes to /dev/null."""

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
    """Keep this process from ending with whoever reads its output, as in `segapp train | head`."""
    streams: Any = _LastingStream(sys.stdout), _LastingStream(sys.stderr)
    sys.stdout, sys.stderr = streams
