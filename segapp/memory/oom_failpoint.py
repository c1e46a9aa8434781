"""A place where a test can make a device run out of memory; a leaf, for the forward pass, the loss and the step."""

from __future__ import annotations

import os

import torch

from segapp.failpoints import failpoint
from segapp.parallel import current_replica


def oom_failpoint(point: str) -> None:
    """Runs out of memory where a test has armed the failpoint `point`, `point.N` for replica N, or `point.rankN`.

    Raises:
        torch.OutOfMemoryError: it is armed with `oom`, and due.
    """
    replica = current_replica()
    names = [point, f"{point}.rank{os.environ.get('RANK', 0)}"]
    names += [] if replica is None else [f"{point}.{replica.index}"]
    for name in names:
        if failpoint(name) == "oom":
            raise torch.OutOfMemoryError(f"failpoint {name}")
