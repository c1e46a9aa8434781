"""What a training does before its first step: lines that the trainer prints, and that the screen reads in its log."""

from __future__ import annotations

_MARK = "starting: "


def announce(what: str) -> None:
    """Print what the trainer does now; `what` follows on `starting:`."""
    print(f"{_MARK}{what}", flush=True)


def last_announced(lines: list[str]) -> str | None:
    """Return what was announced last in the lines of a log; None if nothing was."""
    return next((line.removeprefix(_MARK) for line in reversed(lines) if line.startswith(_MARK)), None)
