"""Failpoint that raises an out-of-memory error in a test: in the forward pass, the loss or the step."""

from __future__ import annotations

import os

import torch

from segapp.failpoints import failpoint
from segapp.parallel import current_replica


def oom_failpoint(point: str) -> None:
    """Raise an out-of-memory error if a test has armed `point`, `point.N` for replica N, or `point.rankN`.

    Raises:
        torch.OutOfMemoryError: the failpoint is armed with `oom` and due.
    """
    replica = current_replica()
    names = [point, f"{point}.rank{os.environ.get('RANK', 0)}"]
    names += [] if replica is None else [f"{point}.{replica.index}"]
    for name in names:
        if failpoint(name) == "oom":
            raise torch.OutOfMemoryError(f"failpoint {name}")
