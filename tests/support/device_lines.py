"""Planned peaks written by hand."""

from __future__ import annotations

from segapp.memory.peaks import DeviceLines, Line, PhaseLines


def device_lines(**phases: Line | PhaseLines) -> DeviceLines:
    """Return the lines of a device, one per phase, whatever the number of samples."""
    return DeviceLines(
        {phase: (PhaseLines(line) if isinstance(line, Line) else line,) for phase, line in phases.items()}
    )
