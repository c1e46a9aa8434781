"""Keeps the tests from waiting for the disk, as nothing in them survives a power cut, and makes it full."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

BLOCK_BYTES = 4096


def skip_syncs() -> None:
    """Make `os.fsync` in this process, and in those it forks, check its descriptor and return."""
    os.fsync = lambda fd: _check(fd)


def _check(fd: int) -> None:
    os.fstat(fd)  # raises what fsync would for a descriptor that is not open


@contextlib.contextmanager
def disk_of(num_bytes: int) -> Iterator[None]:
    """Let no file of this process get larger, as on a disk that is full then."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
