"""Keeps the tests from waiting for the disk: nothing in them survives a power cut that is not simulated."""

from __future__ import annotations

import os


def skip_syncs() -> None:
    """Make `os.fsync` in this process, and in those it forks, check its descriptor and return."""
    os.fsync = lambda fd: _check(fd)


def _check(fd: int) -> None:
    os.fstat(fd)  # raises what fsync would for a descriptor that is not open
